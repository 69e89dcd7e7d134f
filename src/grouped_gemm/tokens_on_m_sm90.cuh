// The grouped GEMM for many rows an expert: 128 tokens on the M side by 256 weight rows, ragged, no padding, persistent.
//
//   producer warpgroup   warp 0  TMA fills a ring of three stages with 128 bytes of K of both operands
//                        warp 1  a_scale and w_scale of the stage by asynchronous copies, into the same barrier
//                        warp 2  finds tiles, two ahead of the others
//   two warpgroups       64 tokens each; sums of 128 k, half of the columns at a time, are promoted into fp32 accumulators;
//                        a warp's finished rows go to shared memory and from there by TMA, the last rows of an expert by hand
//
// The two warpgroups share a stage's weights and find each other's pace: while one promotes, the other's products keep the
// tensor cores busy. That works as long as what a warpgroup does between its products is shorter than the products of the
// other, so the loop is kept free of everything else: addresses are computed once, descriptors live in uniform registers
// (one divergent arrival without a __syncwarp behind it moves them into vector registers and adds 30 instructions a step),
// the next stage is looked at before the promotion, scales are read behind the products. docs/performance.md has the figures.
//
// Bits are those of every other tile: one chain over ascending k an output (docs/numerics.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90.cuh"
#include "grouped_gemm/row_tiles_sm90.cuh"
#include "grouped_gemm/tokens_on_m.h"
#include "grouped_gemm/wgmma_sm90.cuh"

namespace sluice::grouped_gemm::tokens_on_m {

using wgmma::Scaling;

template <class Operand_, Scaling kScaling_>
struct Tiling {
  using Operand = Operand_;
  using Accumulator = typename Operand::Accumulator;
  static constexpr Scaling kScaling = kScaling_;
  // Sums that are promoted take two sets of registers: one half of the columns at a time.
  static constexpr int kChunks = Operand::kPromotes ? 2 : 1;
  static constexpr int kN = kColumns / kChunks;
  static constexpr int kRegs = kN / 2;
  static constexpr int kStepElems = sm90::kSwizzleBytes / static_cast<int>(sizeof(typename Operand::Element));
  static_assert(kN == kScaleBlock || kChunks == 1);  // a chunk of a promoted sum has one w_scale
};

constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
// What the compiler gives each thread of the launch, and so what the warpgroups have to share: more would wait for ever.
constexpr int kLaunchRegisters = 65536 / wgmma::kThreads / 8 * 8;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (1 + kConsumers) * kLaunchRegisters);
constexpr int kTileReaders = 8 + 2;  // warps that take tiles

// ---------------------------------------------------------------------------------------------------------
// Producers
// ---------------------------------------------------------------------------------------------------------

// A warpgroup without a row of the expert multiplies zeros, which come from behind the last row of a: it keeps the pace of
// the others, as blocks that share weights in L2 must, and takes little power. Leaving the tensor cores to the other
// warpgroup made the blocks drift apart: 19 GB instead of 8.5 for 256 experts x 256 rows.
template <class T>
__device__ void load_operands(const Params& p, Memory& m, TileQueue tiles) {
  constexpr std::uint32_t kBytes = sizeof(m.weights[0]) + sizeof(m.tokens[0]);
  constexpr int kEachBytes = kRowsEach * sm90::kSwizzleBytes;
  static_assert(kConsumers == 2);
  sm90::RingPosition at;
  TileInfo tile = {};
  const auto load_weights = [&](std::int32_t step, std::uint32_t stage) {
    sm90::barrier_arrive_expect(m.full + stage, kBytes);
    sm90::tma_load_4d(&p.weights, m.full + stage, m.weights[stage], step * T::kStepElems, tile.inside, tile.part,
                      tile.group);
  };
  bool more = tiles.take(tile);
  // Weights come while the kernel before still makes the tokens.
  std::int32_t ahead = more && p.groups_settled ? min(kStages, p.num_k_steps) : 0;
  if (threadIdx.x % 32 == 0) {
    for (std::int32_t step = 0; step < ahead; ++step) load_weights(step, static_cast<std::uint32_t>(step));
  }
  __syncwarp();
  cuda::follow_previous();
  for (; more; more = tiles.take(tile)) {
    const std::int32_t second = tile.row + kRowsEach < tile.end ? tile.row + kRowsEach : p.num_rows;
    for (std::int32_t step = 0; step < p.num_k_steps; ++step, at.advance(kStages)) {
      if (threadIdx.x % 32 == 0) {
        if (step >= ahead) {
          sm90::barrier_wait(m.empty + at.stage, at.parity ^ 1u);
          load_weights(step, at.stage);
        }
        const std::int32_t k = step * T::kStepElems;
        sm90::tma_load_2d(&p.tokens, m.full + at.stage, m.tokens[at.stage], k, tile.row);
        sm90::tma_load_2d(&p.tokens, m.full + at.stage, m.tokens[at.stage] + kEachBytes, k, second);
      }
    }
    ahead = 0;
    __syncwarp();
  }
}

// Rows behind an expert's last one take its scale; they are never stored.
__device__ inline void load_scales(const Params& p, Memory& m, TileQueue tiles) {
  constexpr int kRowsEachLane = kTokens / 32;
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  sm90::RingPosition at;
  TileInfo tile;
  while (tiles.take(tile)) {
    const float* a_scale[kRowsEachLane];
#pragma unroll
    for (int i = 0; i < kRowsEachLane; ++i)
      a_scale[i] = p.a_scale + min(tile.row + lane + 32 * i, tile.end - 1) * p.a_scale_row;
    const std::int32_t block = tile.inside / static_cast<int>(kScaleBlock) + lane;
    const std::int32_t scale_row = tile.part * p.scale_rows_per_part + min(block, p.scale_rows_per_part - 1);
    const float* w_scale = p.w_scale + tile.group * p.w_scale_group + scale_row * p.w_scale_row;
    for (std::int32_t step = 0; step < p.num_k_steps; ++step, at.advance(kStages)) {
      sm90::barrier_wait(m.empty + at.stage, at.parity ^ 1u);
      const std::uint32_t to = sm90::shared_address(m.a_scale[at.stage] + lane);
#pragma unroll
      for (int i = 0; i < kRowsEachLane; ++i) {
        sm90::copy_word(to + 4 * 32 * i, a_scale[i]);
        a_scale[i] += p.a_scale_step;
      }
      if (lane < kPieces) sm90::copy_word(sm90::shared_address(m.w_scale[at.stage] + lane), w_scale);
      w_scale += p.w_scale_step;
      sm90::arrive_with_copies(sm90::shared_address(m.full + at.stage));
    }
  }
  sm90::wait_for_copies();
}

// ---------------------------------------------------------------------------------------------------------
// Consumers
// ---------------------------------------------------------------------------------------------------------

// Register i of a thread holds row 8*(i/2%2) of the warp's rows and column 8*(i/4) + 2*(lane%4) + i%2 of the chunk.
template <class T>
__device__ __forceinline__ void promote(float (&acc)[T::kRegs], const float (&part)[T::kRegs], float low, float high) {
#pragma unroll
  for (int i = 0; i < T::kRegs; ++i) {
    if constexpr (T::kScaling == Scaling::kBlock) {
      acc[i] = __fmaf_rn(part[i], i / 2 % 2 == 0 ? low : high, acc[i]);
    } else {
      acc[i] = __fadd_rn(acc[i], part[i]);
    }
  }
}

// What a warpgroup knows of shared memory, in addresses that are computed once.
struct Addresses {
  std::uint32_t tokens, weights;  // lower halves of the descriptors of stage 0
  std::uint32_t full, empty;
  std::uint32_t a_scale, w_scale;
  std::uint32_t staging;  // the row and half of a 16-byte pair this lane addresses

  __device__ __forceinline__ Addresses(Memory& m, int warpgroup, int warp, int lane)
      : tokens(uniform(sm90::descriptor_low(sm90::shared_address(m.tokens[0] + warpgroup * kRowsEach * 128)))),
        weights(uniform(sm90::descriptor_low(sm90::shared_address(m.weights[0])))),
        full(uniform(sm90::shared_address(m.full))),
        empty(uniform(sm90::shared_address(m.empty))),
        a_scale(sm90::shared_address(m.a_scale[0] + warpgroup * kRowsEach + warp * 16 + lane / 4)),
        w_scale(uniform(sm90::shared_address(m.w_scale[0]))),
        staging(sm90::shared_address(m.staging[warpgroup][warp][0] + lane % kSlabRows * 128)) {}
};

struct Position {
  std::uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0 ? 1u : 0u;
  }
};

// One chunk of a stage as a group in flight.
template <class T>
__device__ __forceinline__ void start(const Addresses& at, std::uint32_t stage, int chunk,
                                      typename T::Accumulator (&d)[T::kRegs], bool add) {
  constexpr std::uint32_t kTokenStep = sizeof(Memory::tokens[0]) >> 4;
  constexpr std::uint32_t kWeightStep = sizeof(Memory::weights[0]) >> 4;
  const std::uint32_t tokens = at.tokens + stage * kTokenStep;
  const std::uint32_t weights = at.weights + stage * kWeightStep + chunk * (T::kN * 128 >> 4);
  sm90::fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    T::Operand::template multiply<T::kN>(sm90::descriptor(tokens + k * sm90::kDescriptorStep),
                                         sm90::descriptor(weights + k * sm90::kDescriptorStep), d, add || k > 0);
  }
  sm90::commit();
}

// This warp is done with a stage.
__device__ __forceinline__ void release(const Addresses& at, std::uint32_t stage, int lane) {
  __syncwarp();
  if (lane == 0) sm90::barrier_arrive(at.empty + stage * 8);
}

template <class T>
__device__ __forceinline__ void sum_promoted(std::int32_t num_steps, const Addresses& at, Position& position, int lane,
                                             float (&acc)[T::kChunks][T::kRegs]) {
  if (num_steps == 0) return;
  sm90::barrier_wait(at.full + position.stage * 8, position.parity);
  for (;;) {
    const std::uint32_t stage = position.stage;
    float low = 1.0f, high = 1.0f;
    float w[kPieces] = {};
    float part[T::kRegs];
    bool ready = false;
    --num_steps;
#pragma unroll
    for (int c = 0; c < T::kChunks; ++c) {
      sm90::hold(part);
      start<T>(at, stage, c, part, false);
      if (c == 0 && T::kScaling == Scaling::kBlock) {
        low = sm90::load_shared(at.a_scale + stage * static_cast<std::uint32_t>(sizeof(Memory::a_scale[0])));
        high = sm90::load_shared(at.a_scale + stage * static_cast<std::uint32_t>(sizeof(Memory::a_scale[0])) + 4 * 8);
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          w[i] = sm90::load_shared(at.w_scale + stage * static_cast<std::uint32_t>(sizeof(Memory::w_scale[0])) + 4 * i);
      }
      if (c == T::kChunks - 1) position.advance();
      sm90::wait<0>();
      if (c == T::kChunks - 1) {
        release(at, stage, lane);
        ready = sm90::barrier_test(at.full + position.stage * 8, position.parity);
      }
      sm90::hold(part);
      promote<T>(acc[c], part, __fmul_rn(low, w[c]), __fmul_rn(high, w[c]));
    }
    if (num_steps == 0) return;
    if (!ready) sm90::barrier_wait(at.full + position.stage * 8, position.parity);
  }
}

// The tensor cores accumulate in place; the stage before is free once this one's group is alone in flight.
template <class T>
__device__ __forceinline__ void sum_in_place(std::int32_t num_steps, const Addresses& at, Position& position, int lane,
                                             typename T::Accumulator (&acc)[T::kRegs]) {
  std::uint32_t before = 0;
  for (std::int32_t step = 0; step < num_steps; ++step) {
    sm90::barrier_wait(at.full + position.stage * 8, position.parity);
    start<T>(at, position.stage, 0, acc, true);
    sm90::wait<1>();
    if (step > 0) release(at, before, lane);
    before = position.stage;
    position.advance();
  }
  sm90::wait<0>();
  if (num_steps > 0) release(at, before, lane);
}

// An accumulator's register as the finished value it holds.
__device__ __forceinline__ float finished(float v) { return v; }
__device__ __forceinline__ float finished(std::uint32_t v) { return __uint_as_float(v); }
__device__ __forceinline__ void set_finished(float& acc, float v) { acc = v; }
__device__ __forceinline__ void set_finished(std::uint32_t& acc, float v) { acc = __float_as_uint(v); }

// Scales of the whole sum and bias, in place. `row` is the first of the warp's rows.
template <class T>
__device__ __forceinline__ void finish(const Params& p, const TileInfo& tile, int row, int lane, int chunk,
                                       typename T::Accumulator (&acc)[T::kRegs]) {
  const std::int32_t first = tile.part * p.part_rows + tile.inside + chunk * T::kN + lane % 4 * 2;
  const std::int32_t width = p.part_rows - tile.inside - chunk * T::kN - lane % 4 * 2;
  float token[2] = {};
  const float* w_scale = nullptr;
  if constexpr (T::kScaling == Scaling::kRow) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t at = tile.row + row + lane / 4 + 8 * i;
      token[i] = at < tile.end ? p.a_scale[at * p.a_scale_row] : 0.0f;
    }
    w_scale = p.w_scale + tile.group * p.w_scale_group + first * p.w_scale_row;
  }
  const float* const bias = p.bias == nullptr ? nullptr : p.bias + tile.group * p.bias_group + first;
#pragma unroll
  for (int j = 0; j < T::kN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t column = 8 * j + i;
      float scale = 1.0f;
      if constexpr (T::kScaling == Scaling::kRow) scale = column < width ? w_scale[column * p.w_scale_row] : 0.0f;
      const float added = bias != nullptr && column < width ? bias[column] : 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        typename T::Accumulator& a = acc[4 * j + 2 * half + i];
        float v = wgmma::as_f32(a);
        if constexpr (T::kScaling == Scaling::kRow) v = __fmul_rn(v, __fmul_rn(token[half], scale));
        if (bias != nullptr) v = __fadd_rn(v, added);
        set_finished(a, v);
      }
    }
    if (j % 8 == 7) __syncwarp();  // all loads at once would take more registers than there are
  }
}

// Rounds a finished chunk and puts it into the staged tile. Whether a value is NaN is asked once for all, of the rounded
// ones: a test each, which the exact conversion shared, came to 590 instructions a tile where this takes 220.
template <class T>
__device__ __forceinline__ void stage_chunk(const typename T::Accumulator (&acc)[T::kRegs], std::uint32_t row, int lane,
                                            int chunk) {
  constexpr auto kBlockBytes = static_cast<std::uint32_t>(sizeof(Memory::staging[0][0][0]));
  std::uint32_t word[T::kRegs / 2];
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < T::kRegs / 2; ++i) {
    word[i] = wgmma::pack_bf16(finished(acc[2 * i]), finished(acc[2 * i + 1]));
    largest = wgmma::max_or_nan(largest, word[i]);
  }
  if (__any_sync(kAllLanes, wgmma::with_specified_nan(largest) != largest)) {
#pragma unroll
    for (std::uint32_t& w : word) w = wgmma::with_specified_nan(w);
  }
  const auto flip = static_cast<std::uint32_t>((lane / 16) ^ (lane % 8));  // 16-byte unit of the row, in the swizzle
#pragma unroll
  for (int j = 0; j < T::kN / 8; j += 2) {
    const std::uint32_t pair[4] = {word[2 * j], word[2 * j + 1], word[2 * j + 2], word[2 * j + 3]};
    const std::uint32_t block = static_cast<std::uint32_t>(chunk * T::kN / kBlockColumns + j / 8);
    sm90::store_matrices(row + block * kBlockBytes + (flip ^ static_cast<std::uint32_t>(j % 8)) * 16, pair);
  }
}

// The warp's rows of the staged tile to memory. A warp of its own that did this for all came to 540 instead of 430 us on
// tiles of two steps: it freed the rows of both warpgroups when those of the slower one were read.
__device__ __forceinline__ void store_rows(const Params& p, const Memory& m, const TileInfo& tile, int warpgroup,
                                           int warp, int lane) {
  static_assert(kColumns / 8 == 32);  // a lane eight columns
  const std::int32_t width = p.part_rows - tile.inside;
  const std::int32_t first = tile.row + warpgroup * kRowsEach + warp * kSlabRows;
  sm90::async_fence();
  __syncwarp();
  if (p.slabs && tile.end - first >= kSlabRows) {
    if (lane == 0) {
      sm90::tma_store_4d(&p.out_slabs, m.staging[warpgroup][warp], 0, first, tile.inside / kBlockColumns, tile.part);
      sm90::bulk_commit();
    }
  } else {
    const int rows = min(tile.end - first, kSlabRows);
    for (int row = 0; row < rows; ++row) {
      const std::byte* const block = m.staging[warpgroup][warp][lane / 8] + row * 128;
      const uint4 bits = *reinterpret_cast<const uint4*>(block + ((lane % 8) ^ (row % 8)) * 16);
      std::uint16_t* const to = p.out + (first + row) * p.out_row + tile.part * p.part_rows + tile.inside + 8 * lane;
      if (p.wide) {
        if (8 * lane < width) *reinterpret_cast<uint4*>(to) = bits;
      } else {
        const std::uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (8 * lane + i < width) to[i] = static_cast<std::uint16_t>(word[i / 2] >> (i % 2 * 16));
        }
      }
    }
  }
  __syncwarp();
}

template <class T>
__device__ void consume(const Params& p, Memory& m, TileQueue tiles) {
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / sm90::kWarpgroupThreads - 1);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32 % 4);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const Addresses at(m, warpgroup, warp, lane);
  Position position;
  TileInfo tile;
  while (tiles.take(tile)) {
    typename T::Accumulator acc[T::kChunks][T::kRegs];
#pragma unroll
    for (int c = 0; c < T::kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < T::kRegs; ++i) acc[c][i] = 0;
    }
    if constexpr (T::Operand::kPromotes) {
      sum_promoted<T>(p.num_k_steps, at, position, lane, acc);
    } else {
      sum_in_place<T>(p.num_k_steps, at, position, lane, acc[0]);
    }
    if (lane == 0) sm90::bulk_wait_read();  // the copies of the tile before
    __syncwarp();
#pragma unroll
    for (int c = 0; c < T::kChunks; ++c) {
      if (T::kScaling == Scaling::kRow || p.bias != nullptr)
        finish<T>(p, tile, warpgroup * kRowsEach + warp * 16, lane, c, acc[c]);
      stage_chunk<T>(acc[c], at.staging, lane, c);
    }
    store_rows(p, m, tile, warpgroup, warp, lane);
  }
  sm90::bulk_wait_all();
}

template <class T>
__global__ void __launch_bounds__(wgmma::kThreads, 1) grouped_gemm_tokens_on_m(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) std::byte bytes[];
  Memory& m = *reinterpret_cast<Memory*>(bytes);
  auto* const before = reinterpret_cast<std::int32_t*>(bytes + sizeof(Memory));
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 32) {
    sm90::prefetch_map(&p.weights);
    sm90::prefetch_map(&p.tokens);
    for (int i = 0; i < kStages; ++i) {
      sm90::barrier_init(m.full + i, T::kScaling == Scaling::kBlock ? 1 + 32 : 1);
      sm90::barrier_init(m.empty + i, 4 * kConsumers);
    }
    for (int i = 0; i < kTilesAhead; ++i) {
      sm90::barrier_init(m.tile_full + i, 1);
      sm90::barrier_init(m.tile_empty + i, T::kScaling == Scaling::kBlock ? kTileReaders : kTileReaders - 1);
    }
    sm90::barrier_init_fence();
  }
  if (!p.groups_settled) cuda::wait_for_previous();
  count_row_tiles(p, before);
  TileQueue tiles(m);
  if (warp < 4) {
    sm90::registers_shrink<kProducerRegisters>();
    if (warp == 0) {
      load_operands<T>(p, m, tiles);
    } else if (warp == 1) {
      cuda::follow_previous();
      if constexpr (T::kScaling == Scaling::kBlock) load_scales(p, m, tiles);
    } else if (warp == 2) {
      tiles.give_all(p, before);
      cuda::follow_previous();
    } else {
      cuda::follow_previous();
    }
  } else {
    cuda::follow_previous();
    sm90::registers_grow<kConsumerRegisters>();
    consume<T>(p, m, tiles);
  }
}

}  // namespace sluice::grouped_gemm::tokens_on_m
