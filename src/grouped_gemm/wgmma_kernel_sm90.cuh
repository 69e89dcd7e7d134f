// The grouped GEMM on Hopper's tensor cores: one persistent kernel, ragged rows, no padding.
//
//   warpgroup 0      warp 0 lets TMA fill a ring of stages with 128 bytes of K of both operands; with block scales, warps
//                    1 to 3 put a_scale * w_scale of every row beside them, so that consumers multiply once
//   the others       64 rows of the wgmma M side each; partial sums of 128 k are promoted into fp32 accumulators
//
// The weights are the M side and the tokens the N side, 8 to 96 of them, so that a few rows an expert fill no empty tile; for
// many rows an expert there is tokens_on_m_sm90.cuh. Rows that belong to the next expert are computed and never stored.
//
// One output is one chain over ascending k whatever the tile is, so its bits do not depend on the tile (docs/numerics.md).
// What becomes of a finished tile is the tiling's Epilogue: rows of bf16 here, the activation in src/fused.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/columns.cuh"
#include "cuda/dependent_launch.cuh"
#include "cuda/sm90.cuh"
#include "grouped_gemm/tile_memory.h"
#include "grouped_gemm/tile_table.cuh"
#include "grouped_gemm/wgmma.h"
#include "grouped_gemm/wgmma_sm90.cuh"

namespace sluice::grouped_gemm::wgmma {

constexpr int kScaleWarps = 3;
constexpr int kScalesAhead = 6;  // pairs of them a thread has asked for

// The epilogue of the grouped GEMM itself: values rounded to bf16, rows stored (wgmma_sm90.cuh).
struct StoreRows {
  using Params = wgmma::Params;
  static constexpr bool kPaired = false;
};

// An epilogue that is kPaired wants the same columns of two stacked matrices in one tile: half of its weight rows come from
// each, as one chunk each, so that a thread holds both values of a column.
template <class Operand_, Scaling kScaling_, int kTokens_, int kWeightRows_, class Epilogue_ = StoreRows>
struct Tiling {
  using Operand = Operand_;
  using Epilogue = Epilogue_;
  using Params = typename Epilogue::Params;
  static constexpr bool kPaired = Epilogue::kPaired;
  static constexpr Scaling kScaling = kScaling_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kWeightRows = kWeightRows_;
  static constexpr bool kPromote = Operand::kPromotes;

  // Consumer warpgroups. With few tokens a tile is a chain of latencies and registers are few: four are faster than two.
  static constexpr int kConsumers = consumers_of(kTokens, kWeightRows, kPaired);
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kThreads = (1 + kConsumers) * sm90::kWarpgroupThreads;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 224 : 104;
  // What the compiler gives each thread of the launch, and so what the warpgroups have to share: more would wait for ever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kLaunchRegisters);

  // A chunk is what one instruction covers of a warpgroup's share of the tile.
  static constexpr int kChunkRows = 64 * kConsumers;
  static constexpr int kChunks = kWeightRows / kChunkRows;
  static constexpr int kN = kTokens;    // wgmma N
  static constexpr int kRegs = kN / 2;  // accumulators a thread and chunk
  // Two sets of partial sums, one being promoted while the other is summed, where registers allow it.
  static constexpr bool kTwoSets = kPromote && kN <= (kConsumers == 4 ? 32 : kChunks == 1 ? 128 : 64);

  static constexpr TileMemory kMemory = TileMemory::of(kTokens, kWeightRows, kScaling == Scaling::kBlock, kPaired);
  static constexpr int kPieceRows = kMemory.piece_rows;
  static constexpr int kPieces = kMemory.pieces;
  static constexpr int kScaleFloats = kMemory.scale_floats;
  static constexpr int kWeightBytes = kMemory.weight_bytes;
  static constexpr int kTokenBytes = kMemory.token_bytes;
  static constexpr int kTileColumns = kPaired ? kWeightRows / 2 : kWeightRows;  // of the output
  static constexpr int kStepElems = sm90::kSwizzleBytes / static_cast<int>(sizeof(typename Operand::Element));
  static_assert(TileMemory::kStepBytes == sm90::kSwizzleBytes);
  static_assert(kWeightRows % 128 == 0);
  static_assert(!kPaired || kWeightRows == 256);
};

struct Shared {
  std::byte* weights;   // [stages][kWeightBytes]
  std::byte* tokens;    // [stages][kTokenBytes]
  float* scales;        // [stages][kPieces][kTokens]
  std::byte* epilogue;  // what a fused epilogue keeps
  std::uint64_t* full;
  std::uint64_t* empty;
  TileTable table;
};

template <class Tiling>
__device__ __forceinline__ Shared carve(std::byte* memory, const Params& p) {
  Shared s;
  s.weights = memory;
  s.tokens = s.weights + p.num_stages * Tiling::kWeightBytes;
  std::byte* const after = s.tokens + p.num_stages * Tiling::kTokenBytes;
  s.scales = reinterpret_cast<float*>(after);
  s.epilogue = after + p.num_stages * Tiling::kScaleFloats * 4;
  s.full = reinterpret_cast<std::uint64_t*>(s.epilogue + Tiling::kMemory.epilogue_bytes);
  s.empty = s.full + p.num_stages;
  s.table = TileTable::at(s.empty + p.num_stages, p.num_groups);
  return s;
}

// Where a column tile lies in the stacked matrices of w.
struct Columns {
  std::int32_t part, inside, first;  // matrix, first row inside it, first output column
};
__device__ __forceinline__ Columns columns_of(const Params& p, std::int32_t column_tile, int weight_rows) {
  // A division costs a short tile as much as a step of K.
  const std::int32_t part = column_tile < p.column_tiles_per_part ? 0 : column_tile / p.column_tiles_per_part;
  const std::int32_t inside = (column_tile - part * p.column_tiles_per_part) * weight_rows;
  return {part, inside, part * p.part_rows + inside};
}

// ---------------------------------------------------------------------------------------------------------
// Producers
// ---------------------------------------------------------------------------------------------------------

template <class Tiling>
__device__ __forceinline__ void load_weights(const Params& p, const Shared& s, const Tile& tile, const Columns& columns,
                                             std::int32_t step, std::uint32_t stage) {
  std::uint64_t* const full = s.full + stage;
  sm90::barrier_arrive_expect(full, Tiling::kWeightBytes + Tiling::kTokenBytes);
  const std::int32_t k = step * Tiling::kStepElems;
  std::byte* const to = s.weights + stage * Tiling::kWeightBytes;
  sm90::tma_load_4d(&p.weights, full, to, k, columns.inside, columns.part, tile.group);
  if constexpr (Tiling::kPaired) {
    sm90::tma_load_4d(&p.weights, full, to + Tiling::kWeightBytes / 2, k, columns.inside, 1, tile.group);
  }
}

template <class Tiling>
__device__ void produce_tiles(const Params& p, const Shared& s, TileWalk walk) {
  sm90::RingPosition at;
  const bool leader = threadIdx.x == 0;
  Tile tile;
  bool more = walk.next(tile);
  // Weights come while the kernel before still makes the tokens.
  std::int32_t ahead = more && p.groups_settled ? min(static_cast<std::int32_t>(p.num_stages), p.num_k_steps) : 0;
  if (leader) {
    for (std::int32_t step = 0; step < ahead; ++step) {
      const Columns columns = columns_of(p, tile.column_tile, Tiling::kTileColumns);
      load_weights<Tiling>(p, s, tile, columns, step, static_cast<std::uint32_t>(step));
    }
  }
  __syncwarp();
  cuda::follow_previous();
  while (more) {
    const Columns columns = columns_of(p, tile.column_tile, Tiling::kTileColumns);
    for (std::int32_t step = 0; step < p.num_k_steps; ++step, at.advance(p.num_stages)) {
      if (leader) {
        if (step >= ahead) {
          sm90::barrier_wait(s.empty + at.stage, at.parity ^ 1u);
          load_weights<Tiling>(p, s, tile, columns, step, at.stage);
        }
        sm90::tma_load_2d(&p.tokens, s.full + at.stage, s.tokens + at.stage * Tiling::kTokenBytes,
                          step * Tiling::kStepElems, tile.row);
      }
    }
    __syncwarp();
    ahead = 0;
    more = walk.next(tile);
  }
}

// A stage's scales by one of three warps in turn: the loads of three stages overlap, each has a latency of its own.
template <class Tiling>
__device__ void produce_scales(const Params& p, const Shared& s, TileWalk walk, int warp) {
  constexpr int kPieces = Tiling::kPieces;
  constexpr int kTokens = Tiling::kTokens;
  sm90::RingPosition at;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int turn = 0;
  Tile tile;
  while (walk.next(tile)) {
    const Columns columns = columns_of(p, tile.column_tile, Tiling::kTileColumns);
    const float* const w_scale =
        p.w_scale + tile.group * p.w_scale_group + columns.part * p.scale_rows_per_part * p.w_scale_row;
    const float* const a_scale = p.a_scale + tile.row * p.a_scale_row;
    const int rows = tile.end - tile.row;
    for (std::int32_t step = 0; step < p.num_k_steps; ++step, at.advance(p.num_stages)) {
      const bool mine = turn == warp;
      turn = turn + 1 == kScaleWarps ? 0 : turn + 1;
      if (!mine) continue;
      float a[(kTokens + 31) / 32];
#pragma unroll
      for (int i = 0; i < (kTokens + 31) / 32; ++i) {
        const int row = i * 32 + lane;
        a[i] = row < rows && row < kTokens ? a_scale[step * p.a_scale_step + row * p.a_scale_row] : 0.0f;
      }
      float w[kPieces];
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        const std::int32_t inside = columns.inside + (Tiling::kPaired ? 0 : c * Tiling::kPieceRows);
        const std::int32_t row = inside / static_cast<int>(kScaleBlock);
        const std::int32_t part_row = row + (Tiling::kPaired ? c * p.scale_rows_per_part : 0);
        w[c] = row < p.scale_rows_per_part ? w_scale[part_row * p.w_scale_row + step * p.w_scale_step] : 0.0f;
      }
      sm90::barrier_wait(s.empty + at.stage, at.parity ^ 1u);
      float* const to = s.scales + at.stage * Tiling::kScaleFloats;
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
#pragma unroll
        for (int i = 0; i < (kTokens + 31) / 32; ++i) {
          const int row = i * 32 + lane;
          if (row < kTokens) to[c * kTokens + row] = __fmul_rn(a[i], w[c]);
        }
      }
      sm90::barrier_arrive(s.full + at.stage);  // each lane for its own: racecheck knows no other order
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// Consumers
// ---------------------------------------------------------------------------------------------------------

// The scales of a chunk's columns as a thread needs them: two for every eight columns, a few asked for ahead. Loaded where
// they are used, each cost its latency.
template <class T>
class ColumnScales {
 public:
  __device__ __forceinline__ explicit ColumnScales(std::uint32_t address) : address_(address) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) scale_[j] = sm90::load_shared_pair(address_ + kStep * j);
  }
  // Of columns 8j + 2q and the next; j ascends by one from 0.
  __device__ __forceinline__ float2 take(int j) {
    const float2 scale = scale_[j % kAhead];
    if (j + kAhead < kCount) scale_[j % kAhead] = sm90::load_shared_pair(address_ + kStep * (j + kAhead));
    return scale;
  }

 private:
  static constexpr int kCount = T::kN / 8;
  static constexpr int kAhead = kCount < kScalesAhead ? kCount : kScalesAhead;
  static constexpr std::uint32_t kStep = 8 * sizeof(float);
  std::uint32_t address_;
  float2 scale_[kAhead];
};
template <class T>
struct NoScales {
  __device__ __forceinline__ explicit NoScales(std::uint32_t) {}
};
template <class T>
using ScalesOf = std::conditional_t<T::kScaling == Scaling::kBlock, ColumnScales<T>, NoScales<T>>;

// acc = acc + part, or fma(part, scale, acc). Register i of a thread holds row 8*(i/2%2) of its M rows and column
// 8*(i/4) + 2*(lane%4) + i%2 of N.
template <class T>
__device__ __forceinline__ void promote(float (&acc)[T::kRegs], const float (&part)[T::kRegs], ScalesOf<T>& scales) {
  if constexpr (T::kScaling != Scaling::kBlock) {
#pragma unroll
    for (int i = 0; i < T::kRegs; ++i) acc[i] = __fadd_rn(acc[i], part[i]);
  } else {
#pragma unroll
    for (int j = 0; j < T::kN / 8; ++j) {
      const float2 s = scales.take(j);
      acc[4 * j] = __fmaf_rn(part[4 * j], s.x, acc[4 * j]);
      acc[4 * j + 1] = __fmaf_rn(part[4 * j + 1], s.y, acc[4 * j + 1]);
      acc[4 * j + 2] = __fmaf_rn(part[4 * j + 2], s.x, acc[4 * j + 2]);
      acc[4 * j + 3] = __fmaf_rn(part[4 * j + 3], s.y, acc[4 * j + 3]);
    }
  }
}

// What a warpgroup knows of shared memory, in addresses that are computed once.
template <class T>
struct Addresses {
  std::uint32_t weights, tokens;  // lower halves of the descriptors of stage 0
  std::uint32_t scales;           // of stage 0, this lane's first columns
  std::uint32_t full, empty;

  __device__ __forceinline__ Addresses(const Shared& s, int warpgroup, int lane)
      : weights(sm90::uniform(
            sm90::descriptor_low(sm90::shared_address(s.weights + warpgroup * 64 * sm90::kSwizzleBytes)))),
        tokens(sm90::uniform(sm90::descriptor_low(sm90::shared_address(s.tokens)))),
        scales(sm90::shared_address(s.scales + warpgroup * 64 / T::kPieceRows * T::kTokens + lane % 4 * 2)),
        full(sm90::uniform(sm90::shared_address(s.full))),
        empty(sm90::uniform(sm90::shared_address(s.empty))) {}

  __device__ __forceinline__ std::uint32_t scales_of(std::uint32_t stage, int chunk) const {
    return scales + stage * (T::kScaleFloats * 4) + static_cast<std::uint32_t>(chunk) * (T::kTokens * 4);
  }
  __device__ __forceinline__ void wait(sm90::RingPosition at) const {
    sm90::barrier_wait(full + at.stage * 8, at.parity);
  }
  __device__ __forceinline__ bool is_full(sm90::RingPosition at) const {
    return sm90::barrier_test(full + at.stage * 8, at.parity);
  }
  // A warp is done with a stage: all of its lanes have read their scales before one says so for them.
  __device__ __forceinline__ void release(std::uint32_t stage, int lane) const {
    __syncwarp();
    if (lane == 0) sm90::barrier_arrive(empty + stage * 8);
    __syncwarp();
  }
};

// Four steps of 32 bytes of K: one block of 128 for eight-bit operands. The lower halves of the descriptors.
template <class Operand, int kN, class Accumulator>
__device__ __forceinline__ void multiply(std::uint32_t m_side, std::uint32_t n_side, Accumulator (&d)[kN / 2],
                                         bool add) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    Operand::template multiply<kN>(sm90::descriptor(m_side + k * sm90::kDescriptorStep),
                                   sm90::descriptor(n_side + k * sm90::kDescriptorStep), d, add || k > 0);
  }
}

// The chunk c of a stage, as a part of the group in flight.
template <class T, class Accumulator>
__device__ __forceinline__ void start(const Addresses<T>& at, std::uint32_t stage, int c, Accumulator (&d)[T::kRegs],
                                      bool add) {
  constexpr std::uint32_t kChunkStep = T::kChunkRows * sm90::kSwizzleBytes >> 4;
  const std::uint32_t weights =
      at.weights + stage * (T::kWeightBytes >> 4) + static_cast<std::uint32_t>(c) * kChunkStep;
  const std::uint32_t tokens = at.tokens + stage * (T::kTokenBytes >> 4);
  multiply<typename T::Operand, T::kN>(weights, tokens, d, add);
}

// The tensor cores accumulate in place; the stage before is free once this one's group is alone in flight.
template <class T, class Accumulator>
__device__ __forceinline__ void sum_in_place(std::int32_t num_steps, const Addresses<T>& at, sm90::RingPosition& ring,
                                             std::uint32_t num_stages, int lane,
                                             Accumulator (&acc)[T::kChunks][T::kRegs]) {
  std::uint32_t previous = 0;
  for (std::int32_t step = 0; step < num_steps; ++step, ring.advance(num_stages)) {
    at.wait(ring);
    fence();
#pragma unroll
    for (int c = 0; c < T::kChunks; ++c) start<T>(at, ring.stage, c, acc[c], true);
    commit();
    wait<1>();
    if (step > 0) at.release(previous, lane);
    previous = ring.stage;
  }
  wait<0>();
  at.release(previous, lane);
}

// One chunk of 256 or more products a stage: two blocks of 128 k in flight, the first promoted while the second is summed. A
// pipeline across turns of the loop would leave no gap, but ptxas gives up on it and serialises everything (C7514).
template <class T>
__device__ __forceinline__ void sum_two_steps(std::int32_t num_steps, const Addresses<T>& at, sm90::RingPosition& ring,
                                              std::uint32_t num_stages, int lane, float (&acc)[T::kRegs]) {
  float part[2][T::kRegs];
  for (; num_steps >= 2; num_steps -= 2) {
    const std::uint32_t first = ring.stage;
    at.wait(ring);
    fence();
    start<T>(at, first, 0, part[0], false);
    commit();
    ring.advance(num_stages);
    at.wait(ring);
    const std::uint32_t second = ring.stage;
    fence();
    start<T>(at, second, 0, part[1], false);
    commit();
    ScalesOf<T> scales(at.scales_of(first, 0));
    wait<1>();
    hold(part[0]);
    promote<T>(acc, part[0], scales);
    at.release(first, lane);
    ScalesOf<T> more(at.scales_of(second, 0));
    wait<0>();
    hold(part[1]);
    promote<T>(acc, part[1], more);
    at.release(second, lane);
    ring.advance(num_stages);
  }
  if (num_steps == 1) {
    at.wait(ring);
    fence();
    start<T>(at, ring.stage, 0, part[0], false);
    commit();
    ScalesOf<T> scales(at.scales_of(ring.stage, 0));
    wait<0>();
    hold(part[0]);
    promote<T>(acc, part[0], scales);
    at.release(ring.stage, lane);
    ring.advance(num_stages);
  }
}

// Chunk by chunk, in two sets of partial sums where registers allow it. The next stage is looked at before the last
// promotion.
template <class T>
__device__ __forceinline__ void sum_chunks(std::int32_t num_steps, const Addresses<T>& at, sm90::RingPosition& ring,
                                           std::uint32_t num_stages, int lane, float (&acc)[T::kChunks][T::kRegs]) {
  bool ready = false;
  for (std::int32_t step = 0; step < num_steps; ++step) {
    if (!ready) at.wait(ring);
    const std::uint32_t stage = ring.stage;
    if constexpr (T::kTwoSets) {
      static_assert(T::kChunks == 2);
      float part[2][T::kRegs];
      fence();
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        start<T>(at, stage, c, part[c], false);
        commit();
      }
      ScalesOf<T> scales(at.scales_of(stage, 0));
      wait<1>();
      hold(part[0]);
      promote<T>(acc[0], part[0], scales);
      ScalesOf<T> more(at.scales_of(stage, 1));
      ring.advance(num_stages);
      wait<0>();
      ready = at.is_full(ring);
      hold(part[1]);
      promote<T>(acc[1], part[1], more);
    } else {
      float part[T::kRegs];
#pragma unroll
      for (int c = 0; c < T::kChunks; ++c) {
        hold(part);
        fence();
        start<T>(at, stage, c, part, false);
        commit();
        ScalesOf<T> scales(at.scales_of(stage, c));
        if (c == T::kChunks - 1) ring.advance(num_stages);
        wait<0>();
        if (c == T::kChunks - 1) ready = at.is_full(ring);
        hold(part);
        promote<T>(acc[c], part, scales);
      }
    }
    at.release(stage, lane);
  }
}

template <class T>
__device__ void consume(const typename T::Params& p, const Shared& s, TileWalk walk) {
  using Accumulator = typename T::Operand::Accumulator;
  constexpr int kChunks = T::kChunks;
  const int thread = static_cast<int>(threadIdx.x) - sm90::kWarpgroupThreads;
  // Every lane knows the same warpgroup and finds the same end of the walk, but only shuffles tell the compiler, and only a
  // __syncwarp() behind what single lanes do tells it that they are together again. Without them the descriptors live in
  // vector registers, 30 instructions a step more.
  const int warpgroup = sm90::uniform(thread / sm90::kWarpgroupThreads);
  const int lane = thread % 32;
  const int warp_row = warpgroup * 64 + sm90::uniform(thread / 32 % 4) * 16;  // of the M side
  const Addresses<T> at(s, warpgroup, lane);
  sm90::RingPosition ring;
  [[maybe_unused]] int turn = 0;
  Tile tile;
  for (;;) {
    const bool more = walk.next(tile);
    if (sm90::uniform(more ? 1 : 0) == 0) break;
    const Columns columns = columns_of(p, tile.column_tile, T::kTileColumns);
    Accumulator acc[kChunks][T::kRegs];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < T::kRegs; ++i) acc[c][i] = 0;
    }
    if constexpr (!T::kPromote) {
      sum_in_place<T>(p.num_k_steps, at, ring, p.num_stages, lane, acc);
    } else if constexpr (T::kTwoSets && kChunks == 1) {
      sum_two_steps<T>(p.num_k_steps, at, ring, p.num_stages, lane, acc[0]);
    } else {
      sum_chunks<T>(p.num_k_steps, at, ring, p.num_stages, lane, acc);
    }
    if constexpr (T::kPaired) {
      T::Epilogue::template finish<T>(p, acc[0], acc[1], s.epilogue, tile, columns.inside, warp_row, lane, turn);
      turn = turn == 2 ? 0 : turn + 1;
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) store<T>(p, acc[c], tile, columns, c * T::kChunkRows + warp_row, lane);
    }
    __syncwarp();
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) grouped_gemm_wgmma(const __grid_constant__ typename T::Params p) {
  extern __shared__ __align__(1024) std::byte memory[];
  const Shared s = carve<T>(memory, p);
  constexpr bool kScaled = T::kScaling == Scaling::kBlock;
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (threadIdx.x == 32) {
    sm90::prefetch_map(&p.weights);
    sm90::prefetch_map(&p.tokens);
    for (std::uint32_t i = 0; i < p.num_stages; ++i) {
      sm90::barrier_init(s.full + i, kScaled ? 1 + 32 : 1);
      sm90::barrier_init(s.empty + i, T::kConsumerWarps);
    }
    sm90::barrier_init_fence();
  }
  if constexpr (T::kPaired) T::Epilogue::template prepare<T>(s.epilogue);
  if (!p.groups_settled) cuda::wait_for_previous();
  s.table.fill(p.groups, p.num_rows, T::kTokens, p.column_tiles);
  const TileWalk walk{s.table, T::kTokens, static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(gridDim.x)};
  if (warp < 4) {
    sm90::registers_shrink<T::kProducerRegisters>();
    if (warp == 0) {
      produce_tiles<T>(p, s, walk);
    } else {
      cuda::follow_previous();
      if constexpr (kScaled) produce_scales<T>(p, s, walk, warp - 1);
    }
  } else {
    cuda::follow_previous();
    sm90::registers_grow<T::kConsumerRegisters>();
    consume<T>(p, s, walk);
  }
}

}  // namespace sluice::grouped_gemm::wgmma
