// Stage 3 on a GPU. Where slot_row is given a token is read and quantised once and written to each of its rows; otherwise
// (rows that are the tokens, weighted rows) each row is a source of its own. Bytes moved: x once, every row once.
//
// Scales [Hb,R] of rows of one token lie R apart in 4-byte pieces, which cost as much as the rows' 32-byte sectors. So the
// token's scales go to scratch [T,Hb] first, and a second kernel, row by row, brings them where they belong in whole lines.
#include <string>

#include "cuda/columns.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/row_amax.cuh"
#include "pack/impls.h"
#include "pack/source.cuh"

namespace sluice::pack {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWarpColumns = 32 * kUnitColumns;
// Where fewer rows are packed the second kernel costs more than it saves.
constexpr std::int64_t kMinRowsForScratch = 8192;

// A warp packs 512 columns of a source. X: float or std::uint16_t (bf16); Q: float, std::uint16_t (bf16) or std::uint8_t
// (e4m3 with a scale for 128 columns).
template <class X, class Q>
__global__ void __launch_bounds__(kThreads) pack_columns(const __grid_constant__ Params p) {
  wait_for_previous();
  allow_next();
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const std::int64_t i = warp / p.warps_per_source;
  if (i >= p.num_sources) return;
  Source source;
  if (!find_source(p, i, source)) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t column = (warp - i * p.warps_per_source) * kWarpColumns + lane * kUnitColumns;
  float v[kUnitColumns];
  const int count = load_token<X>(p, source, column, v);
  const bool wide = p.wide_rows && count == kUnitColumns;
  if constexpr (sizeof(Q) == 1) {
    const GroupAmax group = block_amax(v);
    const float scale = scale_of<Q>(group.amax, p.scale_format);
    const uint4 q = quantise_unit<Q>(v, scale, group.finite);
    const bool first_of_block = lane % kUnitsPerBlock == 0 && count > 0;
    const std::int64_t block = column / kScaleBlock;
    if (p.token_scale != nullptr && first_of_block) p.token_scale[i * p.num_scales + block] = scale;
    for (int s = 0; s < source.num_slots; ++s) {
      const std::int64_t row = __shfl_sync(kAllLanes, source.row, s);
      if (row < 0) continue;
      store_bytes(q, static_cast<Q*>(p.rows) + row * p.rows_stride + column, count, wide);
      if (p.token_scale == nullptr && first_of_block)
        p.rows_scale[block * p.rows_scale_block + row * p.rows_scale_row] = scale;
    }
  } else {
    for (int s = 0; s < source.num_slots; ++s) {
      const std::int64_t row = __shfl_sync(kAllLanes, source.row, s);
      if (row < 0) continue;
      store_unit(v, static_cast<Q*>(p.rows) + row * p.rows_stride + column, count, wide);
    }
  }
}

// A thread block packs a source with one scale for the row. Q: std::uint8_t (e4m3) or std::int8_t.
template <class X, class Q>
__global__ void __launch_bounds__(1024) pack_with_row_scale(const __grid_constant__ Params p) {
  wait_for_previous();
  allow_next();
  __shared__ RowAmaxStorage storage;
  Source source;
  if (!find_source(p, blockIdx.x, source)) return;
  float v[kUnitColumns];
  const auto load = [&](std::int64_t column, float(&to)[kUnitColumns]) { load_token<X>(p, source, column, to); };
  const GroupAmax group = row_amax(p.hidden, load, v, storage);
  const float scale = scale_of<Q>(group.amax, p.scale_format);
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kUnitColumns;
  for (std::int64_t first = 0; first < p.hidden; first += step) {
    const std::int64_t column = first + static_cast<std::int64_t>(threadIdx.x) * kUnitColumns;
    if (p.hidden > step) load(column, v);
    const int count = columns_left(p.hidden, column, kUnitColumns);
    const uint4 q = quantise_unit<Q>(v, scale, group.finite);
    for (int s = 0; s < source.num_slots; ++s) {
      const std::int64_t row = __shfl_sync(kAllLanes, source.row, s);
      if (row < 0) continue;
      store_bytes(q, static_cast<Q*>(p.rows) + row * p.rows_stride + column, count,
                  p.wide_rows && count == kUnitColumns);
      if (column == 0) p.rows_scale[row * p.rows_scale_row] = scale;
    }
  }
}

// rows_scale[b,r] = token_scale[row_token[r],b]: a lane a row, a warp sixteen blocks. What was there before pack began is
// read before pack is waited for.
__global__ void __launch_bounds__(kThreads) spread_scales(const __grid_constant__ Params p) {
  constexpr int kBlocks = 16;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool filled = row < p.capacity && (p.num_rows == nullptr || row < *p.num_rows);
  const std::int64_t token = filled ? p.row_token[row] : -1;
  wait_for_previous();
  allow_next();
  if (token < 0 || token >= p.num_tokens) return;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.y) * kBlocks;
  const float* const from = p.token_scale + token * p.num_scales + begin;
  float* const to = p.rows_scale + begin * p.rows_scale_block + row * p.rows_scale_row;
  const auto left = static_cast<int>(min(p.num_scales - begin, std::int64_t{kBlocks}));
  if (left == kBlocks && reinterpret_cast<std::uintptr_t>(from) % sizeof(float4) == 0) {
    float4 scale[kBlocks / 4];
#pragma unroll
    for (int i = 0; i < kBlocks / 4; ++i) scale[i] = __ldg(reinterpret_cast<const float4*>(from) + i);
#pragma unroll
    for (int i = 0; i < kBlocks / 4; ++i) {
      to[(4 * i) * p.rows_scale_block] = scale[i].x;
      to[(4 * i + 1) * p.rows_scale_block] = scale[i].y;
      to[(4 * i + 2) * p.rows_scale_block] = scale[i].z;
      to[(4 * i + 3) * p.rows_scale_block] = scale[i].w;
    }
  } else {
    for (int i = 0; i < left; ++i) to[i * p.rows_scale_block] = __ldg(from + i);
  }
}

// Rows that are only moved, bit by bit: eight-bit ones with their scales, and bf16 to bf16, where a rounding would touch
// NaN. A warp moves 512 bytes of a source.
template <class T>
__global__ void __launch_bounds__(kThreads) move_rows(const __grid_constant__ Params p) {
  wait_for_previous();
  allow_next();
  const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const std::int64_t i = warp / p.warps_per_source;
  if (i >= p.num_sources) return;
  Source source;
  if (!find_source(p, i, source)) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t part = warp - i * p.warps_per_source;
  constexpr int kElems = 16 / static_cast<int>(sizeof(T));
  const std::int64_t column = (part * 32 + lane) * kElems;
  const int count = columns_left(p.hidden, column, kElems);
  const T* const x = static_cast<const T*>(p.x) + source.token * p.x_stride + column;
  const bool wide = p.wide_x && p.wide_rows && count == kElems;
  uint4 bits = {};
  if (wide) bits = __ldg(reinterpret_cast<const uint4*>(x));
  for (int s = 0; s < source.num_slots; ++s) {
    const std::int64_t row = __shfl_sync(kAllLanes, source.row, s);
    if (row < 0) continue;
    T* const to = static_cast<T*>(p.rows) + row * p.rows_stride + column;
    if (wide) {
      *reinterpret_cast<uint4*>(to) = bits;
    } else {
      for (int c = 0; c < count; ++c) to[c] = x[c];
    }
    if (p.x_scale == nullptr) continue;
    // Each warp of the source brings its share of the scales.
    for (std::int64_t b = part * 32 + lane; b < p.num_scales; b += p.warps_per_source * 32) {
      p.rows_scale[b * p.rows_scale_block + row * p.rows_scale_row] =
          p.x_scale[b * p.x_scale_block + source.token * p.x_scale_token];
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Params);

template <class X>
Kernel kernel_for(DType rows, bool row_scale) {
  if (rows == DType::kI8) return pack_with_row_scale<X, std::int8_t>;
  if (rows == DType::kE4M3) return row_scale ? pack_with_row_scale<X, std::uint8_t> : pack_columns<X, std::uint8_t>;
  if (rows == DType::kBF16) return pack_columns<X, std::uint16_t>;
  return pack_columns<X, float>;
}

Kernel mover_for(DType dtype) {
  if (size_bytes(dtype) == 1) return move_rows<std::uint8_t>;
  return dtype == DType::kBF16 ? move_rows<std::uint16_t> : move_rows<float>;
}

bool by_token(const Args& args) { return args.slot_row.is_present() && !args.weight.is_present(); }
bool is_moved(const Args& args) { return args.x.dtype == args.rows.dtype && !args.weight.is_present(); }

// int8 with one column has the shape of a block.
bool has_row_scale(const Args& args) {
  if (args.rows.dtype == DType::kI8) return true;
  return args.rows.dtype == DType::kE4M3 && args.rows_scale.shape[0] == 1 && args.rows.shape[1] > kScaleBlock;
}

bool scales_take_scratch(const Args& args) {
  return by_token(args) && args.row_token.is_present() && args.rows.dtype == DType::kE4M3 && !is_moved(args) &&
         !has_row_scale(args) && args.rows.shape[0] >= kMinRowsForScratch;
}

bool takes_copies(const Args& args, int capability_major) {
  return capability_major == 9 && by_token(args) && args.x.dtype == DType::kBF16 && allows_wide(args.rows) &&
         copies_serve(args.rows.shape[1]);
}

}  // namespace

std::int64_t scratch_bytes_cuda(const Args& args, const Machine&) {
  return scales_take_scratch(args) ? args.x.shape[0] * args.rows_scale.shape[0] * std::int64_t{sizeof(float)} : 0;
}

std::string describe_cuda(const Args& args, const Machine& machine) {
  if (!is_moved(args) && has_row_scale(args) && takes_copies(args, machine.gpu.capability.major))
    return "each token once, copied to all its rows by the copy engine";
  const std::string how = by_token(args) ? "each token once, to all its rows" : "row by row";
  return scales_take_scratch(args) ? how + ", scales by way of scratch" : how;
}

Status run_cuda(const Args& args, const Ctx& ctx) {
  const std::int64_t scratch_bytes = scratch_bytes_cuda(args, {});
  if (static_cast<std::int64_t>(ctx.workspace.size()) < scratch_bytes) {
    return {StatusCode::kWorkspaceTooSmall, "pack: the workspace has " + std::to_string(ctx.workspace.size()) +
                                                " bytes, " + std::to_string(scratch_bytes) + " are needed"};
  }
  const device::Current current(args.x.device);
  SLUICE_TRY(current.status().with_context("pack"));
  Params p = {};
  p.x = args.x.data;
  p.x_stride = args.x.stride[0];
  p.num_tokens = args.x.shape[0];
  p.hidden = args.x.shape[1];
  if (args.x_scale.is_present()) {
    p.x_scale = args.x_scale.as<const float>();
    p.x_scale_block = args.x_scale.stride[0];
    p.x_scale_token = args.x_scale.stride[1];
  }
  if (by_token(args)) {
    p.slot_row = args.slot_row.as<const std::int32_t>();
    p.slot_row_stride = args.slot_row.stride[0];
    p.num_slots = static_cast<std::int32_t>(args.slot_row.shape[1]);
  }
  if (args.row_token.is_present()) p.row_token = args.row_token.as<const std::int32_t>();
  if (args.num_rows.is_present()) p.num_rows = args.num_rows.as<const std::int32_t>();
  p.groups = DeviceRowGroups::from(args.groups);
  if (args.weight.is_present()) {
    p.row_slot = args.row_slot.as<const std::int32_t>();
    p.weight = args.weight.as<const float>();
    p.weight_stride = args.weight.stride[0];
    p.num_slots = static_cast<std::int32_t>(args.weight.shape[1]);
  }
  p.rows = args.rows.data;
  p.rows_stride = args.rows.stride[0];
  p.capacity = args.rows.shape[0];
  if (args.rows_scale.is_present()) {
    p.rows_scale = args.rows_scale.as<float>();
    p.rows_scale_block = args.rows_scale.stride[0];
    p.rows_scale_row = args.rows_scale.stride[1];
  }
  p.scale_format = args.scale_format;
  p.wide_x = allows_wide(args.x);
  p.wide_rows = allows_wide(args.rows);
  p.num_sources = by_token(args) ? p.num_tokens : p.capacity;
  p.num_scales = args.rows_scale.is_present() ? args.rows_scale.shape[0] : 0;
  if (p.num_sources == 0 || p.hidden == 0) return Status::ok();
  const bool row_scale = !is_moved(args) && has_row_scale(args);
  if (scratch_bytes > 0) p.token_scale = reinterpret_cast<float*>(ctx.workspace.data());
  const Kernel kernel = is_moved(args)                 ? mover_for(args.x.dtype)
                        : args.x.dtype == DType::kBF16 ? kernel_for<std::uint16_t>(args.rows.dtype, row_scale)
                                                       : kernel_for<float>(args.rows.dtype, row_scale);
  DeviceFacts facts;
  SLUICE_TRY(facts_of(args.x.device.index, facts).with_context("pack"));
  if (row_scale && takes_copies(args, facts.capability_major)) return launch_copies(p, args.rows.dtype, stream_of(ctx));
  if (row_scale) {
    return launch_after("pack", kernel, static_cast<unsigned>(p.num_sources), row_threads(p.hidden), 0, stream_of(ctx),
                        p);
  }
  const std::int64_t warp_columns = is_moved(args) ? 512 / size_bytes(args.x.dtype) : kWarpColumns;
  p.warps_per_source = ceil_div(p.hidden, warp_columns);
  const std::int64_t blocks = ceil_div(p.num_sources * p.warps_per_source, kWarps);
  SLUICE_TRY(launch_after("pack", kernel, static_cast<unsigned>(blocks), kThreads, 0, stream_of(ctx), p));
  if (p.token_scale == nullptr) return Status::ok();
  const dim3 grid(static_cast<unsigned>(ceil_div(p.capacity, kThreads)),
                  static_cast<unsigned>(ceil_div(p.num_scales, 16)));
  return launch_after("pack: scales", spread_scales, grid, kThreads, 0, stream_of(ctx), p);
}

}  // namespace sluice::pack
