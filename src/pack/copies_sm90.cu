// Stage 3 with one scale a row on Hopper: a thread block quantises a token, puts the row together in shared memory, and
// the copy engine takes it to each of the token's rows: 7 KB at a time where warps would store 512 bytes here and there.
#include "cuda/dependent_launch.cuh"
#include "cuda/row_amax.cuh"
#include "cuda/sm90.cuh"
#include "pack/source.cuh"

namespace sluice::pack {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

namespace sm90 = cuda::sm90;

// Q: std::uint8_t (e4m3) or std::int8_t.
template <class Q>
__global__ void __launch_bounds__(1024) pack_by_copies(const __grid_constant__ Params p) {
  extern __shared__ uint4 g_row[];  // [H] bytes
  __shared__ RowAmaxStorage storage;
  wait_for_previous();
  allow_next();
  Source source;
  if (!find_source(p, blockIdx.x, source)) return;
  float v[kUnitColumns];
  const std::int64_t column = static_cast<std::int64_t>(threadIdx.x) * kUnitColumns;
  const int count = load_token<std::uint16_t>(p, source, column, v);
  GroupAmax group = {block_wide_max(amax_of(v), storage), true};
  if (!is_finite(group.amax)) group = {block_wide_max(finite_amax(v), storage), false};
  const float scale = scale_of<Q>(group.amax, p.scale_format);
  if (count > 0) g_row[threadIdx.x] = quantise_unit<Q>(v, scale, group.finite);
  sm90::async_fence();
  __syncthreads();
  // Lane s of the first warp knows row s.
  if (threadIdx.x < 32 && source.row >= 0) {
    sm90::bulk_store(static_cast<Q*>(p.rows) + source.row * p.rows_stride, g_row, static_cast<std::uint32_t>(p.hidden));
    sm90::bulk_commit();
    p.rows_scale[source.row * p.rows_scale_row] = scale;
    sm90::bulk_wait_read();
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

Status launch_copies(const Params& p, DType rows, cudaStream_t stream) {
  const auto kernel = rows == DType::kI8 ? pack_by_copies<std::int8_t> : pack_by_copies<std::uint8_t>;
  return launch_after("pack", kernel, static_cast<unsigned>(p.num_sources), row_threads(p.hidden),
                      static_cast<std::size_t>(p.hidden), stream, p);
}

}  // namespace sluice::pack
