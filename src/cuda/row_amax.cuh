// The amax of a whole row that one thread block holds, sixteen columns a thread at a time.
#pragma once

#include "cuda/columns.cuh"

namespace sluice::cuda {

struct RowAmaxStorage {
  float of_warp[32];
};

// `amax` of every thread to the largest of all, NaN where one of them is; every thread of the block calls.
__device__ __forceinline__ float block_wide_max(float amax, RowAmaxStorage& storage) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) amax = max_nan(amax, __shfl_xor_sync(kAllLanes, amax, d));
  const unsigned num_warps = blockDim.x / 32;
  if (num_warps == 1) return amax;
  __syncthreads();  // an earlier round may still be read
  if (threadIdx.x % 32 == 0) storage.of_warp[threadIdx.x / 32] = amax;
  __syncthreads();
  amax = threadIdx.x % 32 < num_warps ? storage.of_warp[threadIdx.x % 32] : 0.0f;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) amax = max_nan(amax, __shfl_xor_sync(kAllLanes, amax, d));
  return amax;
}

// Of a row of `width` columns: `load(column, v)` fills v with the values from a column on, zeros past the end. A row
// that fits the block is left in v, where the caller finds it; a longer one is loaded again by whoever needs it.
template <class Load>
__device__ __forceinline__ GroupAmax row_amax(std::int64_t width, const Load& load, float (&v)[kUnitColumns],
                                              RowAmaxStorage& storage) {
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kUnitColumns;
  const std::int64_t own = static_cast<std::int64_t>(threadIdx.x) * kUnitColumns;
  float amax = 0.0f;
  for (std::int64_t first = 0; first < width; first += step) {
    load(first + own, v);
    amax = max_nan(amax, amax_of(v));
  }
  amax = block_wide_max(amax, storage);
  if (is_finite(amax)) return {amax, true};
  amax = 0.0f;
  for (std::int64_t first = 0; first < width; first += step) {
    if (width > step) load(first + own, v);
    amax = fmaxf(amax, finite_amax(v));
  }
  return {block_wide_max(amax, storage), false};
}

// Threads of a block for rows of this width: the row in one go up to 16384 columns.
inline unsigned row_threads(std::int64_t width) {
  const std::int64_t units = ceil_div(width, kUnitColumns);
  const std::int64_t threads = ceil_div(units, 32) * 32;
  return static_cast<unsigned>(threads < 1024 ? threads : 1024);
}

}  // namespace sluice::cuda
