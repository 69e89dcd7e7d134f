// Stage 3 on a GPU. Where slot_row is given a thread block takes a token, quantises it once and writes it to each of
// its rows; otherwise (rows that are the tokens, weighted rows) it takes a row. Bytes moved: x once, every row once.
#include <algorithm>

#include "cuda/columns.cuh"
#include "cuda/launch.h"
#include "cuda/row_groups.cuh"
#include "pack/cuda.h"

namespace sluice::pack {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

using namespace sluice::cuda;  // NOLINT: the device helpers, in this file alone

constexpr int kMaxSlots = 32;

struct Params {
  const void* x;  // [T,H]
  std::int64_t x_stride;
  const float* x_scale;  // [Hb,T]
  std::int64_t x_scale_block, x_scale_token;
  const std::int32_t* slot_row;  // [T,S]; null: one source per row
  std::int64_t slot_row_stride;
  const std::int32_t* row_token;  // [R]; null: the row is its token
  const std::int32_t* row_slot;   // [R]
  const std::int32_t* num_rows;   // [1]; null: all
  DeviceRowGroups groups;
  const float* weight;  // [T,S]; null: unweighted
  std::int64_t weight_stride;
  void* rows;  // [R,H]
  std::int64_t rows_stride;
  float* rows_scale;  // [Hb,R]
  std::int64_t rows_scale_block, rows_scale_row;
  std::int64_t num_tokens, capacity;  // T, R
  std::int32_t num_slots;             // S
  std::int64_t hidden;                // H
  ScaleFormat scale_format;
  bool wide_x, wide_rows;
};

// What one thread block packs: a token and the rows that want it.
struct Source {
  std::int64_t token;
  float weight;
  int num_rows;
  std::int32_t rows[kMaxSlots];
};

__device__ __forceinline__ bool find_source(const Params& p, Source& source) {
  if (threadIdx.x == 0) {
    const std::int64_t i = blockIdx.x;
    source.weight = 1.0f;
    source.num_rows = 0;
    if (p.slot_row != nullptr) {
      source.token = i;
      for (int s = 0; s < p.num_slots; ++s) {
        const std::int32_t row = p.slot_row[i * p.slot_row_stride + s];
        if (row >= 0 && row < p.capacity) source.rows[source.num_rows++] = row;
      }
    } else if ((p.num_rows == nullptr || i < *p.num_rows) && p.groups.owns(i)) {
      source.token = p.row_token == nullptr ? i : p.row_token[i];
      if (source.token >= 0 && source.token < p.num_tokens)
        source.rows[source.num_rows++] = static_cast<std::int32_t>(i);
      if (p.weight != nullptr) {
        const std::int32_t slot = p.row_slot[i];
        source.weight = p.weight[slot / p.num_slots * p.weight_stride + slot % p.num_slots];
      }
    }
  }
  __syncthreads();
  return source.num_rows > 0;
}

// X: float or std::uint16_t (bf16); Q: float, std::uint16_t (bf16) or std::uint8_t (e4m3 with scales).
template <class X, class Q>
__global__ void __launch_bounds__(512) pack_rows(const __grid_constant__ Params p) {
  __shared__ Source source;
  if (!find_source(p, source)) return;
  const X* const x = static_cast<const X*>(p.x) + source.token * p.x_stride;
  const std::int64_t num_units = ceil_div(p.hidden, kScaleBlock) * kUnitsPerBlock;
  for (std::int64_t first = 0; first < num_units; first += blockDim.x) {
    const std::int64_t column = (first + threadIdx.x) * kUnitColumns;
    const int count = columns_left(p.hidden, column, kUnitColumns);
    float v[kUnitColumns];
    load_unit(count > 0 ? x + column : x, count, p.wide_x && count == kUnitColumns, v);
    if (p.weight != nullptr) {
#pragma unroll
      for (int i = 0; i < kUnitColumns; ++i) v[i] = canonical(__fmul_rn(v[i], source.weight));
    }
    const bool wide = p.wide_rows && count == kUnitColumns;
    if constexpr (sizeof(Q) == 1) {
      const float scale = block_scale(v, p.scale_format);
      uint4 q;
      quantise_unit(v, scale, q);
      for (int s = 0; s < source.num_rows; ++s) {
        const std::int64_t row = source.rows[s];
        store_bytes(q, static_cast<std::uint8_t*>(p.rows) + row * p.rows_stride + column, count, wide);
        if (threadIdx.x % kUnitsPerBlock == 0 && count > 0) {
          p.rows_scale[column / kScaleBlock * p.rows_scale_block + row * p.rows_scale_row] = scale;
        }
      }
    } else {
      for (int s = 0; s < source.num_rows; ++s) {
        store_unit(v, static_cast<Q*>(p.rows) + source.rows[s] * p.rows_stride + column, count, wide);
      }
    }
  }
}

// Rows that are only moved, bit by bit: e4m3 with its scales, and bf16 to bf16, where a rounding would touch NaN.
template <class T>
__global__ void __launch_bounds__(512) move_rows(const __grid_constant__ Params p) {
  __shared__ Source source;
  if (!find_source(p, source)) return;
  const T* const x = static_cast<const T*>(p.x) + source.token * p.x_stride;
  constexpr int kElems = 16 / static_cast<int>(sizeof(T));
  const bool wide = p.wide_x && p.wide_rows;
  const std::int64_t num_wide = wide ? p.hidden / kElems : 0;
  for (std::int64_t i = threadIdx.x; i < num_wide; i += blockDim.x) {
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(x) + i);
    for (int s = 0; s < source.num_rows; ++s) {
      reinterpret_cast<uint4*>(static_cast<T*>(p.rows) + source.rows[s] * p.rows_stride)[i] = bits;
    }
  }
  for (std::int64_t i = num_wide * kElems + threadIdx.x; i < p.hidden; i += blockDim.x) {
    for (int s = 0; s < source.num_rows; ++s) static_cast<T*>(p.rows)[source.rows[s] * p.rows_stride + i] = x[i];
  }
  if (p.x_scale == nullptr) return;
  const std::int64_t num_blocks = ceil_div(p.hidden, kScaleBlock);
  for (std::int64_t b = threadIdx.x; b < num_blocks; b += blockDim.x) {
    const float scale = p.x_scale[b * p.x_scale_block + source.token * p.x_scale_token];
    for (int s = 0; s < source.num_rows; ++s)
      p.rows_scale[b * p.rows_scale_block + source.rows[s] * p.rows_scale_row] = scale;
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

void (*kernel_for(const Args& args))(Params) {
  const bool moved = args.x.dtype == args.rows.dtype && !args.weight.is_present();
  if (args.x.dtype == DType::kE4M3) return move_rows<std::uint8_t>;
  if (args.x.dtype == DType::kBF16) {
    if (args.rows.dtype == DType::kE4M3) return pack_rows<std::uint16_t, std::uint8_t>;
    if (args.rows.dtype == DType::kF32) return pack_rows<std::uint16_t, float>;
    return moved ? move_rows<std::uint16_t> : pack_rows<std::uint16_t, std::uint16_t>;
  }
  if (args.rows.dtype == DType::kE4M3) return pack_rows<float, std::uint8_t>;
  if (args.rows.dtype == DType::kBF16) return pack_rows<float, std::uint16_t>;
  return moved ? move_rows<float> : pack_rows<float, float>;
}

}  // namespace

Status run_cuda(const Args& args, const Ctx& ctx) {
  const DeviceGuard guard(args.x.device.index);
  SLUICE_TRY(to_status(guard.error(), "pack: set device"));
  const bool by_token = args.slot_row.is_present() && !args.weight.is_present();
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
  if (by_token) {
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
  const std::int64_t num_sources = by_token ? p.num_tokens : p.capacity;
  if (num_sources == 0 || p.hidden == 0) return Status::ok();
  const std::int64_t units = ceil_div(p.hidden, kScaleBlock) * kUnitsPerBlock;
  const unsigned threads = static_cast<unsigned>(std::min<std::int64_t>(ceil_div(units, 32) * 32, 512));
  return launch("pack", kernel_for(args), static_cast<unsigned>(num_sources), threads, 0, stream_of(ctx), p);
}

}  // namespace sluice::pack
