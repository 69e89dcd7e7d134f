// Stage 6 on a GPU: a thread takes sixteen columns of both halves of a row, eight threads share a scale of 128 columns, a
// warp takes such a block of four neighbouring rows, whose scales share a sector. Bytes moved: h once, a once. Many rows
// on Hopper: stream_sm90.cu.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/row_amax.cuh"
#include "cuda/row_groups.cuh"
#include "swiglu_quant/gate_table.cuh"
#include "swiglu_quant/impls.h"
#include "swiglu_quant/stream.h"

namespace sluice::swiglu_quant {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

using namespace sluice::cuda;  // NOLINT: the device helpers, in this file alone

constexpr int kDirectThreads = 256;
constexpr int kTableThreads = 512;
constexpr int kTableBlocksPerSm = 2;
constexpr int kWarpRows = 4;
// Making a table takes a thread block some 2 us; it saves that from about a million elements on every 132 blocks.
constexpr std::int64_t kMinElemsForTable = std::int64_t{1} << 23;

struct Params {
  const void* h;  // [R,2I]
  std::int64_t h_stride;
  DeviceRowGroups groups;
  Activation activation;
  void* a;  // [R,I]
  std::int64_t a_stride;
  float* a_scale;  // [Ib or 1,R]
  std::int64_t a_scale_block, a_scale_row;
  std::int64_t num_rows, width;          // R, I
  std::int32_t num_blocks, num_fours;    // Ib, ceil(R/4)
  std::int32_t step_blocks, step_fours;  // as many units as the grid has warps
  ScaleFormat scale_format;
  bool wide_g, wide_u, wide_a;
};

// v = the activation of columns [column, column + 16) of a row, zeros past its end; returns how many there are.
template <class X>
__device__ __forceinline__ int activate_unit(const Params& p, std::int64_t row, std::int64_t column,
                                             float (&v)[kUnitColumns]) {
  const int count = columns_left(p.width, column, kUnitColumns);
  const X* const h = static_cast<const X*>(p.h) + (count > 0 ? row * p.h_stride + column : 0);
  float u[kUnitColumns];
  load_unit(h, count, p.wide_g && count == kUnitColumns, v);
  load_unit(count > 0 ? h + p.width : h, count, p.wide_u && count == kUnitColumns, u);
  // Gates are nearly always so small that the sigmoid has nothing to guard against; false for NaN.
  if (gates_are_tame(p.activation, amax_of(v))) {
#pragma unroll
    for (int i = 0; i < kUnitColumns; ++i)
      v[i] = canonical(__fmul_rn(fast_gate_factor(p.activation, v[i]), up_factor(p.activation, u[i])));
    return count;
  }
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i)
    v[i] = canonical(__fmul_rn(gate_factor(p.activation, v[i]), up_factor(p.activation, u[i])));
  return count;
}

// Columns [column, column + 16) of both halves.
__device__ __forceinline__ void load_raw(const Params& p, std::int64_t row, std::int64_t column, bool present,
                                         RawUnit& raw) {
  raw = {};
  if (!present) return;
  const auto* const h = static_cast<const std::uint16_t*>(p.h) + row * p.h_stride + column;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    raw.g[i] = __ldg(reinterpret_cast<const uint4*>(h) + i);
    raw.u[i] = __ldg(reinterpret_cast<const uint4*>(h + p.width) + i);
  }
}

template <class Q>
__device__ __forceinline__ void store_values(const Params& p, float (&v)[kUnitColumns], std::int64_t row,
                                             std::int64_t block, int count) {
  const bool wide = p.wide_a && count == kUnitColumns;
  const int lane = static_cast<int>(threadIdx.x % kUnitsPerBlock);
  Q* const a = static_cast<Q*>(p.a) + (count > 0 ? row * p.a_stride + block * kScaleBlock + lane * kUnitColumns : 0);
  if constexpr (sizeof(Q) == 1) {
    const GroupAmax group = block_amax(v);
    if (count == 0) return;
    const float scale = scale_of<Q>(group.amax, p.scale_format);
    if (!group.finite) {
#pragma unroll
      for (int i = 0; i < kUnitColumns; ++i) v[i] = canonical(v[i]);
    }
    store_bytes(quantise_unit<Q>(v, scale, group.finite), a, count, wide);
    if (lane == 0) p.a_scale[block * p.a_scale_block + row * p.a_scale_row] = scale;
  } else {
    if (count == 0) return;
#pragma unroll
    for (int i = 0; i < kUnitColumns; ++i) v[i] = canonical(v[i]);
    store_unit(v, a, count, wide);
  }
}

// Walks the units of this warp: 128 columns of four rows each, blocks fastest. Rows are fewer than 2^31.
struct Walk {
  std::int32_t fours, block;
  __device__ __forceinline__ explicit Walk(const Params& p) {
    const std::int64_t unit = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    fours = static_cast<std::int32_t>(unit / p.num_blocks);
    block = static_cast<std::int32_t>(unit - static_cast<std::int64_t>(fours) * p.num_blocks);
  }
  __device__ __forceinline__ std::int64_t lane_row() const {
    return static_cast<std::int64_t>(fours) * kWarpRows + threadIdx.x % 32 / kUnitsPerBlock;
  }
  __device__ __forceinline__ std::int64_t lane_column() const {
    return static_cast<std::int64_t>(block) * kScaleBlock + threadIdx.x % kUnitsPerBlock * kUnitColumns;
  }
  __device__ __forceinline__ bool inside(const Params& p) const { return fours < p.num_fours; }
  __device__ __forceinline__ void advance(const Params& p) {
    fours += p.step_fours;
    block += p.step_blocks;
    if (block >= p.num_blocks) {
      block -= p.num_blocks;
      ++fours;
    }
  }
};

// Few elements, f32 inputs, addresses that are not aligned. X: float or std::uint16_t (bf16).
template <class X, class Q>
__global__ void __launch_bounds__(kDirectThreads) swiglu(const __grid_constant__ Params p) {
  const OwnedRows owned(p.groups, p.num_rows);
  for (Walk walk(p); walk.inside(p); walk.advance(p)) {
    const std::int64_t row = walk.lane_row();
    int count = 0;
    float v[kUnitColumns] = {};
    if (owned.has(row)) count = activate_unit<X>(p, row, walk.lane_column(), v);
    store_values<Q>(p, v, row, walk.block, count);
  }
}

// bf16 inputs by the table; the next unit is on its way while this one is worked on.
template <class Q>
__global__ void __launch_bounds__(kTableThreads, kTableBlocksPerSm) swiglu_by_table(const __grid_constant__ Params p) {
  __shared__ float table[kTableNegative + kTableCount];
  const OwnedRows owned(p.groups, p.num_rows);
  Walk walk(p);
  const auto is_there = [&](const Walk& w) {
    return w.inside(p) && owned.has(w.lane_row()) && w.lane_column() < p.width;
  };
  bool present = is_there(walk);
  RawUnit raw;
  load_raw(p, walk.lane_row(), walk.lane_column(), present, raw);
  make_table(p.activation, table);
  while (walk.inside(p)) {
    Walk next = walk;
    next.advance(p);
    const bool next_present = is_there(next);
    RawUnit next_raw;
    load_raw(p, next.lane_row(), next.lane_column(), next_present, next_raw);
    if (__any_sync(kAllLanes, present)) {
      float v[kUnitColumns] = {};
      if (present) activate_raw<false>(p.activation, table, raw, v);
      store_values<Q>(p, v, walk.lane_row(), walk.block, present ? kUnitColumns : 0);
    }
    walk = next;
    present = next_present;
    raw = next_raw;
  }
}

// One scale a row: a thread block a row, its values in registers up to 16384 columns, computed twice beyond.
template <class X, class Q>
__global__ void __launch_bounds__(1024) swiglu_with_row_scale(const __grid_constant__ Params p) {
  __shared__ RowAmaxStorage storage;
  const std::int64_t row = blockIdx.x;
  if (!OwnedRows(p.groups, p.num_rows).has(row)) return;
  float v[kUnitColumns];
  const auto load = [&](std::int64_t column, float(&to)[kUnitColumns]) { activate_unit<X>(p, row, column, to); };
  const GroupAmax group = row_amax(p.width, load, v, storage);
  const float scale = scale_of<Q>(group.amax, p.scale_format);
  if (threadIdx.x == 0) p.a_scale[row * p.a_scale_row] = scale;
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kUnitColumns;
  for (std::int64_t first = 0; first < p.width; first += step) {
    const std::int64_t column = first + static_cast<std::int64_t>(threadIdx.x) * kUnitColumns;
    if (p.width > step) load(column, v);
    const int count = columns_left(p.width, column, kUnitColumns);
    if (count == 0) continue;
    store_bytes(quantise_unit<Q>(v, scale, group.finite), static_cast<Q*>(p.a) + row * p.a_stride + column, count,
                p.wide_a && count == kUnitColumns);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Params);

template <class X>
Kernel direct_kernel(DType a) {
  if (a == DType::kE4M3) return swiglu<X, std::uint8_t>;
  if (a == DType::kBF16) return swiglu<X, std::uint16_t>;
  return swiglu<X, float>;
}
Kernel table_kernel(DType a) {
  if (a == DType::kE4M3) return swiglu_by_table<std::uint8_t>;
  if (a == DType::kBF16) return swiglu_by_table<std::uint16_t>;
  return swiglu_by_table<float>;
}
template <class X>
Kernel row_kernel(DType a) {
  return a == DType::kI8 ? swiglu_with_row_scale<X, std::int8_t> : swiglu_with_row_scale<X, std::uint8_t>;
}

bool has_row_scale(const Args& args) {
  if (args.a.dtype == DType::kI8) return true;
  return args.a.dtype == DType::kE4M3 && args.a_scale.shape[0] == 1 && args.a.shape[1] > kScaleBlock;
}

bool takes_table(const Args& args) {
  const std::int64_t width = args.a.shape[1];
  return args.h.dtype == DType::kBF16 && !has_row_scale(args) && width % kUnitColumns == 0 && allows_wide(args.h) &&
         args.h.shape[0] * width >= kMinElemsForTable;
}

bool takes_stream(const Args& args, int capability_major) {
  return capability_major == 9 && size_bytes(args.a.dtype) == 1 && args.h.dtype == DType::kBF16 &&
         allows_wide(args.h) && allows_wide(args.a) && stream_serves(args.a.shape[1]) &&
         args.h.shape[0] * args.a.shape[1] >= kMinElemsForTable;
}

}  // namespace

std::string describe_cuda(const Args& args, const Machine& machine) {
  if (takes_stream(args, machine.gpu.capability.major)) return "rows by the copy engine, gates by a table";
  if (has_row_scale(args)) return "a thread block a row";
  return takes_table(args) ? "gates by a table" : "gates computed";
}

Status run_cuda(const Args& args, const Ctx& ctx) {
  const device::Current current(args.h.device);
  SLUICE_TRY(current.status().with_context("swiglu_quant"));
  Params p = {};
  p.h = args.h.data;
  p.h_stride = args.h.stride[0];
  p.groups = DeviceRowGroups::from(args.groups);
  p.activation = args.activation;
  p.a = args.a.data;
  p.a_stride = args.a.stride[0];
  if (args.a_scale.is_present()) {
    p.a_scale = args.a_scale.as<float>();
    p.a_scale_block = args.a_scale.stride[0];
    p.a_scale_row = args.a_scale.stride[1];
  }
  p.num_rows = args.h.shape[0];
  p.width = args.a.shape[1];
  p.num_blocks = static_cast<std::int32_t>(ceil_div(p.width, kScaleBlock));
  p.num_fours = static_cast<std::int32_t>(ceil_div(p.num_rows, kWarpRows));
  p.scale_format = args.scale_format;
  p.wide_g = allows_wide(args.h);
  p.wide_u = p.wide_g && p.width * size_bytes(args.h.dtype) % 16 == 0;
  p.wide_a = allows_wide(args.a);
  if (p.num_rows == 0 || p.width == 0) return Status::ok();
  const bool bf16 = args.h.dtype == DType::kBF16;
  DeviceFacts facts;
  SLUICE_TRY(facts_of(args.h.device.index, facts).with_context("swiglu_quant"));
  if (takes_stream(args, facts.capability_major)) {
    StreamParams q = {};
    q.h = args.h.as<const std::uint16_t>();
    q.h_stride = p.h_stride;
    q.groups = p.groups;
    q.activation = p.activation;
    q.a = p.a;
    q.a_stride = p.a_stride;
    q.a_scale = p.a_scale;
    q.a_scale_block = p.a_scale_block;
    q.a_scale_row = p.a_scale_row;
    q.num_rows = static_cast<std::int32_t>(p.num_rows);
    q.width = static_cast<std::int32_t>(p.width);
    q.scale_format = p.scale_format;
    return launch_stream(q, args.a.dtype, has_row_scale(args), facts.num_sms, stream_of(ctx));
  }
  if (has_row_scale(args)) {
    return launch("swiglu", bf16 ? row_kernel<std::uint16_t>(args.a.dtype) : row_kernel<float>(args.a.dtype),
                  static_cast<unsigned>(p.num_rows), row_threads(p.width), 0, stream_of(ctx), p);
  }
  const bool table = takes_table(args);
  const int threads = table ? kTableThreads : kDirectThreads;
  std::int64_t blocks = ceil_div(static_cast<std::int64_t>(p.num_fours) * p.num_blocks, threads / 32);
  if (table) {
    DeviceFacts facts;
    SLUICE_TRY(facts_of(args.h.device.index, facts).with_context("swiglu_quant"));
    blocks = std::min<std::int64_t>(blocks, facts.num_sms * kTableBlocksPerSm);
  }
  blocks = std::min<std::int64_t>(blocks, INT32_MAX);
  const std::int64_t num_warps = blocks * (threads / 32);
  p.step_fours = static_cast<std::int32_t>(num_warps / p.num_blocks);
  p.step_blocks = static_cast<std::int32_t>(num_warps % p.num_blocks);
  const Kernel kernel = table  ? table_kernel(args.a.dtype)
                        : bf16 ? direct_kernel<std::uint16_t>(args.a.dtype)
                               : direct_kernel<float>(args.a.dtype);
  return launch("swiglu", kernel, static_cast<unsigned>(blocks), threads, 0, stream_of(ctx), p);
}

}  // namespace sluice::swiglu_quant
