// Few rows: a cluster of 2 or 4 blocks shares the columns of one tile, so that eight experts of one token keep enough
// multiprocessors loading. Each block is the grouped GEMM in small: its columns' gate and up rows, all of K, one chain of
// fmas an output as ever; only the amax goes through the cluster.
//
//   warp 0       TMA: 128 bytes of K of the block's gate and up rows and of eight tokens, stage after stage
//   warps 1-3    all scales of the tile, once
//   warps 4-7    64 rows of the M side. With two blocks a warp sums gate and then up of the same columns; with four, warps
//                4 and 5 have the gate and 6 and 7 the up rows, which come to the others through shared memory
#include <cstdint>

#include "cuda/dependent_launch.cuh"
#include "fused/up_swiglu_quant/epilogue_sm90.cuh"

namespace sluice::up_swiglu_quant {

namespace {

namespace wgmma = grouped_gemm::wgmma;
using grouped_gemm::Tile;
using grouped_gemm::TileTable;
using grouped_gemm::TileWalk;

constexpr int kTokens = static_cast<int>(kClusterTokens);
constexpr int kColumns = static_cast<int>(kScaleBlock);
constexpr int kTokenBytes = kTokens * sm90::kSwizzleBytes;
constexpr int kScaleThreads = 96;
constexpr int kConsumerThreads = 128;
constexpr int kConsumerWarps = kConsumerThreads / 32;
static_assert(kClusterThreads == 32 + kScaleThreads + kConsumerThreads);

struct Shared {
  std::byte* weights;  // [stages]: gate rows, up rows
  std::byte* tokens;   // [stages]
  float* scales;       // [Kb][2][kTokens]: a_scale * w_scale
  float* up;           // [32][kTokens]: finished sums on their way to the warps of the gate
  float* amax;         // [kTokens], of the whole tile
  std::uint64_t* full;
  std::uint64_t* empty;
  TileTable table;
};

template <int kSplit>
struct Layout {
  static constexpr int kOwned = kColumns / kSplit;  // columns of this block
  static constexpr int kPartBytes = kOwned * sm90::kSwizzleBytes;
  static constexpr int kWeightBytes = 2 * kPartBytes;
  static constexpr int kChunks = kOwned == 64 ? 2 : 1;  // of 64 rows

  static __device__ __forceinline__ Shared carve(std::byte* memory, const FusedParams& p) {
    Shared s;
    s.weights = memory;
    s.tokens = s.weights + p.num_stages * kWeightBytes;
    s.scales = reinterpret_cast<float*>(s.tokens + p.num_stages * kTokenBytes);
    s.up = s.scales + p.num_k_steps * 2 * kTokens;
    s.amax = s.up + kClusterUpFloats;
    s.full = reinterpret_cast<std::uint64_t*>(s.amax + kTokens);
    s.empty = s.full + p.num_stages;
    s.table = TileTable::at(s.empty + p.num_stages, p.num_groups);
    return s;
  }
};

template <int kSplit>
__global__ void __launch_bounds__(kClusterThreads, 1) up_swiglu_quant_cluster(const __grid_constant__ FusedParams p) {
  extern __shared__ __align__(1024) std::byte memory[];
  using L = Layout<kSplit>;
  const Shared s = L::carve(memory, p);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto rank = static_cast<int>(sm90::cluster_rank());
  if (threadIdx.x == 32) {
    sm90::prefetch_map(&p.weights);
    sm90::prefetch_map(&p.tokens);
    for (std::uint32_t i = 0; i < p.num_stages; ++i) {
      sm90::barrier_init(s.full + i, 1);
      sm90::barrier_init(s.empty + i, kConsumerWarps);
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
  const std::int32_t own = column + rank * L::kOwned;
  const int rows = min(tile.end - tile.row, kTokens);

  float v[4] = {};        // activations of two tokens and of columns m + lane/4 and 8 more
  bool finishes = false;  // whether this warp has any
  int m = 0;
  if (warp == 0) {
    // ---- loads ----
    if (lane == 0) {
      sm90::RingPosition at;
      for (std::int32_t step = 0; step < p.num_k_steps; ++step, at.advance(p.num_stages)) {
        std::uint64_t* const full = s.full + at.stage;
        sm90::barrier_wait(s.empty + at.stage, at.parity ^ 1u);
        sm90::barrier_arrive_expect(full, L::kWeightBytes + kTokenBytes);
        std::byte* const weights = s.weights + at.stage * L::kWeightBytes;
        const std::int32_t k = step * sm90::kSwizzleBytes;
        sm90::tma_load_4d(&p.weights, full, weights, k, own, 0, tile.group);
        sm90::tma_load_4d(&p.weights, full, weights + L::kPartBytes, k, own, 1, tile.group);
        sm90::tma_load_2d(&p.tokens, full, s.tokens + at.stage * kTokenBytes, k, tile.row);
      }
    }
    __syncwarp();
  } else if (warp < 4) {
    // ---- scales ----
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
        const int i = first + j * kScaleThreads;
        if (i >= count) continue;
        const int step = i / rows;
        float* const to = s.scales + step * 2 * kTokens + i - step * rows;
        to[0] = __fmul_rn(a[j], gate[j]);
        to[kTokens] = __fmul_rn(a[j], up[j]);
      }
    }
    sm90::named_arrive<1>(kScaleThreads + kConsumerThreads);
  } else {
    // ---- sums ----
    const int g = lane / 4;
    const int q = lane % 4;
    const int m_warp = warp - 4;
    const int piece = L::kChunks == 2 ? 0 : m_warp / 2;  // gate or up, where a warp has one of them
    float acc[L::kChunks][4] = {};
    sm90::RingPosition at;
    // Several blocks of 128 k in flight; promoted in order.
    constexpr int kBatch = 4;
    float part[kBatch][L::kChunks][4];
    std::uint32_t stage[kBatch];
    const auto start = [&](int j) {
      sm90::barrier_wait(s.full + at.stage, at.parity);
      stage[j] = at.stage;
      const std::uint32_t n_side = sm90::descriptor_low(sm90::shared_address(s.tokens + at.stage * kTokenBytes));
      const std::uint32_t weights = sm90::shared_address(s.weights + at.stage * L::kWeightBytes);
      wgmma::fence();
#pragma unroll
      for (int c = 0; c < L::kChunks; ++c) {
        wgmma::multiply<wgmma::E4m3, kTokens>(sm90::descriptor_low(weights + c * L::kPartBytes), n_side, part[j][c],
                                              false);
      }
      wgmma::commit();
      at.advance(p.num_stages);
    };
    const auto promote = [&](int j, std::int32_t step) {
#pragma unroll
      for (int c = 0; c < L::kChunks; ++c) {
        wgmma::hold(part[j][c]);
        const float* const scales = s.scales + (step * 2 + (L::kChunks == 2 ? c : piece)) * kTokens + 2 * q;
        const float2 scale = *reinterpret_cast<const float2*>(scales);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[c][i] = __fmaf_rn(part[j][c][i], i % 2 == 0 ? scale.x : scale.y, acc[c][i]);
      }
      __syncwarp();
      if (lane == 0) sm90::barrier_arrive(s.empty + stage[j]);
    };
    sm90::named_barrier<1>(kScaleThreads + kConsumerThreads);
    std::int32_t step = 0;
    for (; step + kBatch <= p.num_k_steps; step += kBatch) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) start(j);
      wgmma::wait<0>();
#pragma unroll
      for (int j = 0; j < kBatch; ++j) promote(j, step + j);
    }
    for (; step < p.num_k_steps; ++step) {
      start(0);
      wgmma::wait<0>();
      promote(0, step);
    }

    // ---- activations ----
    float up[4];
    if constexpr (L::kChunks == 2) {
      m = m_warp * 16;
      finishes = true;
#pragma unroll
      for (int i = 0; i < 4; ++i) up[i] = acc[1][i];
    } else {
      m = m_warp % 2 * 16;
      finishes = piece == 0;
      if (!finishes) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.up[(m + g + i / 2 * 8) * kTokens + 2 * q + i % 2] = acc[0][i];
      }
      sm90::named_barrier<2>(kConsumerThreads);
#pragma unroll
      for (int i = 0; i < 4; ++i) up[i] = s.up[(m + g + i / 2 * 8) * kTokens + 2 * q + i % 2];
    }
    float most[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float gate = acc[0][i];
      const int at_column = own + m + g + i / 2 * 8;
      if (p.bias != nullptr && at_column < p.part_rows) {
        const float* const bias = p.bias + tile.group * p.bias_group + at_column;
        gate = __fadd_rn(gate, bias[0]);
        up[i] = __fadd_rn(up[i], bias[p.part_rows]);
      }
      v[i] = activation_of(p.activation, gate, up[i]);
      most[i % 2] = fmaxf(most[i % 2], finite_magnitude(v[i]));
    }
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      most[0] = fmaxf(most[0], __shfl_xor_sync(0xFFFFFFFFu, most[0], d));
      most[1] = fmaxf(most[1], __shfl_xor_sync(0xFFFFFFFFu, most[1], d));
    }
    // The blocks of the cluster have started, so their shared memory may be written; lane group g tells block g.
    sm90::cluster_wait();
    if (finishes && g < kSplit) {
      const std::uint32_t to = sm90::address_in(s.amax + 2 * q, static_cast<std::uint32_t>(g));
      sm90::raise_in_cluster(to, __float_as_uint(most[0]));
      sm90::raise_in_cluster(to + 4, __float_as_uint(most[1]));
    }
    __syncwarp();
  }
  if (warp < 4) sm90::cluster_wait();
  sm90::cluster_barrier();
  if (!finishes) return;
  const float2 most = *reinterpret_cast<const float2*>(s.amax + 2 * (lane % 4));
  store_eight_tokens(p, v, most, tile.row, tile.end, column, rank * L::kOwned + m, rank == 0 && m == 0, lane);
}

}  // namespace

Kernel cluster_kernel(const Config& config) {
  switch (config.split) {
    case 2: return up_swiglu_quant_cluster<2>;
    case 4: return up_swiglu_quant_cluster<4>;
    default: return nullptr;
  }
}

}  // namespace sluice::up_swiglu_quant
