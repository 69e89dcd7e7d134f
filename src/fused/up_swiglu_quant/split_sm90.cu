// Few rows: a cluster of blocks shares the K of one tile, so that eight experts of one token keep all multiprocessors
// loading.
//
//   every block   loads its blocks of 128 k of 128 gate and 128 up rows, and sums each of them on the tensor cores
//   consumers     hand the sum of each block of k, not yet scaled, to the block that owns its column (16 to 64 columns a
//                 block), in that one's shared memory
//   after all     the owner promotes the sums of a column in ascending k, scale by scale: one chain of the same fmas as in
//                 the unsplit kernel, hence the same bits; then the activation, the amax of the tile through all blocks,
//                 and e4m3
#include <cstdint>

#include "cuda/dependent_launch.cuh"
#include "fused/up_swiglu_quant/epilogue_sm90.cuh"

namespace sluice::up_swiglu_quant {

namespace {

namespace wgmma = grouped_gemm::wgmma;
using grouped_gemm::Tile;
using grouped_gemm::TileTable;
using grouped_gemm::TileWalk;

constexpr int kTokens = static_cast<int>(kSplitTokens);
constexpr int kColumns = static_cast<int>(kScaleBlock);
constexpr int kWeightBytes = 2 * kColumns * sm90::kSwizzleBytes;
constexpr int kTokenBytes = kTokens * sm90::kSwizzleBytes;
constexpr int kConsumerThreads = wgmma::kConsumers * sm90::kWarpgroupThreads;
constexpr int kScaleThreads = wgmma::kThreads - kConsumerThreads - 32;

struct Shared {
  std::byte* weights;  // [stages][kWeightBytes]
  std::byte* tokens;   // [stages][kTokenBytes]
  float* sums;         // [Kb][kTokens][2][columns of this block]
  float* scales;       // [Kb][2][kTokens]: a_scale * w_scale
  float* amax;         // [kTokens], of the whole tile
  std::uint64_t* full;
  std::uint64_t* empty;
  TileTable table;
};

template <int kSplit>
__device__ __forceinline__ Shared carve(std::byte* memory, const FusedParams& p) {
  Shared s;
  s.weights = memory;
  s.tokens = s.weights + p.num_stages * kWeightBytes;
  s.sums = reinterpret_cast<float*>(s.tokens + p.num_stages * kTokenBytes);
  s.scales = s.sums + p.num_k_steps * kTokens * 2 * (kColumns / kSplit);
  s.amax = s.scales + p.num_k_steps * 2 * kTokens;
  s.full = reinterpret_cast<std::uint64_t*>(s.amax + kTokens);
  s.empty = s.full + p.num_stages;
  s.table = TileTable::at(s.empty + p.num_stages, p.num_groups);
  return s;
}

template <int kSplit>
__global__ void __launch_bounds__(wgmma::kThreads, 1) up_swiglu_quant_split(const __grid_constant__ FusedParams p) {
  extern __shared__ __align__(1024) std::byte memory[];
  constexpr int kOwned = kColumns / kSplit;  // columns this block finishes
  const Shared s = carve<kSplit>(memory, p);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto rank = static_cast<int>(sm90::cluster_rank());
  if (threadIdx.x == 32) {
    sm90::prefetch_map(&p.weights);
    sm90::prefetch_map(&p.tokens);
    for (std::uint32_t i = 0; i < p.num_stages; ++i) {
      sm90::barrier_init(s.full + i, 1);
      sm90::barrier_init(s.empty + i, wgmma::kConsumerWarps);
    }
    sm90::barrier_init_fence();
  }
  if (threadIdx.x < kTokens) s.amax[threadIdx.x] = 0.0f;
  __syncwarp();
  sm90::cluster_arrive();
  cuda::wait_for_previous();
  cuda::allow_next();
  s.table.fill(p.groups, p.num_rows, kTokens, p.column_tiles);
  TileWalk walk{s.table, kTokens, static_cast<std::int32_t>(blockIdx.x) / kSplit, s.table.num_tiles()};
  Tile tile;
  if (!walk.next(tile)) {  // as all blocks of its cluster find
    sm90::cluster_wait();
    return;
  }
  const std::int32_t column = tile.column_tile * kColumns;
  const int rows = min(tile.end - tile.row, kTokens);
  const std::int32_t first_step = p.num_k_steps * rank / kSplit;
  const std::int32_t end_step = p.num_k_steps * (rank + 1) / kSplit;
  sm90::cluster_wait();  // its blocks run: their shared memory may be written from here on

  if (warp == 0) {
    // ---- the loads ----
    if (lane == 0) {
      sm90::RingPosition at;
      for (std::int32_t step = first_step; step < end_step; ++step, at.advance(p.num_stages)) {
        std::uint64_t* const full = s.full + at.stage;
        sm90::barrier_wait(s.empty + at.stage, at.parity ^ 1u);
        sm90::barrier_arrive_expect(full, kWeightBytes + kTokenBytes);
        std::byte* const weights = s.weights + at.stage * kWeightBytes;
        const std::int32_t k = step * sm90::kSwizzleBytes;
        sm90::tma_load_4d(&p.weights, full, weights, k, column, 0, tile.group);
        sm90::tma_load_4d(&p.weights, full, weights + kWeightBytes / 2, k, column, 1, tile.group);
        sm90::tma_load_2d(&p.tokens, full, s.tokens + at.stage * kTokenBytes, k, tile.row);
      }
    }
    __syncwarp();
  } else if (warp < 4) {
    // ---- all scales of the tile ----
    const float* const w_scale = p.w_scale + tile.group * p.w_scale_group + tile.column_tile * p.w_scale_row;
    const std::int64_t up_scale = p.scale_rows_per_part * p.w_scale_row;
    // All loads of a thread first: one after another they would wait for memory, which the weights keep busy, each time.
    constexpr int kBatch = 4;
    const int count = p.num_k_steps * rows;
    for (int first = static_cast<int>(threadIdx.x) - 32; first < count; first += kBatch * kScaleThreads) {
      float a[kBatch], gate[kBatch], up[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = min(first + j * kScaleThreads, count - 1);
        const int step = i / rows;
        a[j] = p.a_scale[step * p.a_scale_step + (tile.row + i - step * rows) * p.a_scale_row];
        gate[j] = w_scale[step * p.w_scale_step];
        up[j] = w_scale[step * p.w_scale_step + up_scale];
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = min(first + j * kScaleThreads, count - 1);  // the last one more than once: the same value
        const int step = i / rows;
        float* const to = s.scales + step * 2 * kTokens + i - step * rows;
        to[0] = __fmul_rn(a[j], gate[j]);
        to[kTokens] = __fmul_rn(a[j], up[j]);
      }
    }
  } else {
    // ---- sums of the blocks of k ----
    const int warpgroup = warp / 4 - 1;
    const int m = warpgroup * 64 + warp % 4 * 16;  // this warp's columns of the tile
    const int g = lane / 4;
    const int token = lane % 4 * 2;
    const std::uint32_t owner = static_cast<std::uint32_t>(m / kOwned);
    const std::uint32_t to = sm90::address_in(s.sums, owner) + 4 * (m % kOwned + g);
    sm90::RingPosition at;
    for (std::int32_t step = first_step; step < end_step; ++step, at.advance(p.num_stages)) {
      sm90::barrier_wait(s.full + at.stage, at.parity);
      constexpr int kHalfBytes = 64 * sm90::kSwizzleBytes;
      const std::uint64_t n_side = sm90::operand_descriptor(s.tokens + at.stage * kTokenBytes);
      const std::byte* const weights = s.weights + at.stage * kWeightBytes + warpgroup * kHalfBytes;
      float gate[4], up[4];
      wgmma::fence();
      wgmma::multiply<wgmma::E4m3, 8>(sm90::operand_descriptor(weights), n_side, gate, false);
      wgmma::multiply<wgmma::E4m3, 8>(sm90::operand_descriptor(weights + kWeightBytes / 2), n_side, up, false);
      wgmma::commit();
      wgmma::wait<0>();
      wgmma::hold(gate);
      wgmma::hold(up);
      __syncwarp();
      if (lane == 0) sm90::barrier_arrive(s.empty + at.stage);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (token + i % 2 >= rows) continue;
        const int word = ((step * kTokens + token + i % 2) * 2) * kOwned + 8 * (i / 2);
        sm90::store_in_cluster(to + 4 * word, gate[i]);
        sm90::store_in_cluster(to + 4 * (word + kOwned), up[i]);
      }
    }
  }
  __syncwarp();
  sm90::cluster_barrier();

  // ---- the columns of this block ----
  constexpr int kTurns = (kTokens * kOwned + kConsumerThreads - 1) / kConsumerThreads;
  float v[kTurns] = {};
  const int index = static_cast<int>(threadIdx.x) - sm90::kWarpgroupThreads;
  const auto token_of = [&](int turn) { return (index + turn * kConsumerThreads) / kOwned; };
  const int inside = index % kOwned;  // kOwned divides the number of consumer threads
  const std::int32_t own = column + rank * kOwned + inside;
  if (index >= 0) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int token = token_of(turn);
      if (token < rows) {
        float gate = 0.0f, up = 0.0f;
        const float* const sums = s.sums + token * 2 * kOwned + inside;
#pragma unroll 8
        for (std::int32_t step = 0; step < p.num_k_steps; ++step) {
          const float* const at = sums + step * kTokens * 2 * kOwned;
          gate = __fmaf_rn(at[0], s.scales[step * 2 * kTokens + token], gate);
          up = __fmaf_rn(at[kOwned], s.scales[(step * 2 + 1) * kTokens + token], up);
        }
        if (p.bias != nullptr && own < p.part_rows) {
          const float* const bias = p.bias + tile.group * p.bias_group + own;
          gate = __fadd_rn(gate, bias[0]);
          up = __fadd_rn(up, bias[p.part_rows]);
        }
        v[turn] = activation_of(p.activation, gate, up);
      }
      // Sixteen neighbouring lanes have one token.
      float most = finite_magnitude(v[turn]);
#pragma unroll
      for (int d = 1; d < 16; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, d));
      if (token < rows && lane % 16 < kSplit) {
        sm90::raise_in_cluster(sm90::address_in(s.amax + token, static_cast<std::uint32_t>(lane % 16)),
                               __float_as_uint(most));
      }
    }
  }
  __syncwarp();
  sm90::cluster_barrier();
  if (index < 0) return;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int token = token_of(turn);
    if (token >= rows || own >= p.part_rows) continue;
    const std::int64_t row = tile.row + token;
    const float scale = cuda::scale_of<std::uint8_t>(s.amax[token], p.format);
    const float value = scaled(v[turn], scale, __frcp_rn(scale));
    p.a[row * p.a_row + own] = static_cast<std::uint8_t>(cuda::e4m3x2_from_f32(value, 0.0f));
    if (rank == 0 && inside == 0) p.scale_out[tile.column_tile * p.scale_out_block + row * p.scale_out_row] = scale;
  }
}

}  // namespace

Kernel split_kernel(const Config& config) {
  switch (config.split) {
    case 2: return up_swiglu_quant_split<2>;
    case 4: return up_swiglu_quant_split<4>;
    case 8: return up_swiglu_quant_split<8>;
    default: return nullptr;
  }
}

}  // namespace sluice::up_swiglu_quant
