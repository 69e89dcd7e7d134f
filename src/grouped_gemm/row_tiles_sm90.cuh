// The work of the tokens-on-M kernel: which tile comes when, and how one warp tells the others.
#pragma once

#include <cstdint>

#include "cuda/row_groups.cuh"
#include "cuda/sm90.cuh"
#include "grouped_gemm/tokens_on_m.h"

namespace sluice::grouped_gemm::tokens_on_m {

namespace sm90 = cuda::sm90;

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

using sm90::uniform;

// before[e]: row tiles of the experts before e, [L+1]. The whole block calls.
__device__ inline void count_row_tiles(const Params& p, std::int32_t* before) {
  for (auto e = static_cast<std::int32_t>(threadIdx.x); e < p.num_groups; e += static_cast<std::int32_t>(blockDim.x)) {
    const cuda::DeviceRowRange range = p.groups.range(e, p.num_rows);
    before[e + 1] = (range.end - range.begin + kTokens - 1) / kTokens;
  }
  if (threadIdx.x == 0) before[0] = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x);
    std::int32_t total = 0;
    for (std::int32_t first = 1; first <= p.num_groups; first += 32) {
      const std::int32_t e = first + lane;
      std::int32_t sum = e <= p.num_groups ? before[e] : 0;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const std::int32_t left = __shfl_up_sync(kAllLanes, sum, d);
        if (lane >= d) sum += left;
      }
      if (e <= p.num_groups) before[e] = total + sum;
      total += __shfl_sync(kAllLanes, sum, 31);
    }
  }
  __syncthreads();
}

// The row tiles of an expert are walked together, all columns of those before the next expert: blocks that run side by side
// share the weights of a column and the rows of a tile in L2. Groups of eight row tiles that cut across experts read most
// weights twice from memory: 2.28 GB instead of 1.46 for 32 experts x 1021 rows. An expert of more is walked in equal groups.
constexpr std::int32_t kRowTilesTogether = 12;

// The number-th tile. A whole warp calls.
__device__ inline bool find_tile(const Params& p, const std::int32_t* before, std::int32_t number, TileInfo& info) {
  if (number >= before[p.num_groups] * p.column_tiles) return false;
  const std::int32_t row_tiles_before = number / p.column_tiles;  // at least those of the experts before

  // The expert is the last one whose count of earlier tiles does not exceed the tile: 32 times 32 of them are looked at.
  // An empty expert shares that count with its successor and loses to it.
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  std::int32_t group = 0;
  for (std::int32_t span = 1024; span > 0; span /= 32) {
    for (;;) {
      const std::int32_t e = group + (lane + 1) * span;
      const bool passed = e < p.num_groups && before[e] <= row_tiles_before;
      const int steps = __popc(__ballot_sync(kAllLanes, passed));
      group += steps * span;
      if (steps < 32) break;
    }
  }
  const cuda::DeviceRowRange range = p.groups.range(group, p.num_rows);
  const std::int32_t row_tiles = before[group + 1] - before[group];
  const std::int32_t num_walks = (row_tiles + kRowTilesTogether - 1) / kRowTilesTogether;
  const std::int32_t each = (row_tiles + num_walks - 1) / num_walks;
  const std::int32_t inside = number - before[group] * p.column_tiles;  // of the expert's tiles
  const std::int32_t first = inside / (each * p.column_tiles) * each;
  const std::int32_t together = min(each, row_tiles - first);
  const std::int32_t column_tile = (inside - first * p.column_tiles) / together;
  const std::int32_t row_tile = inside - first * p.column_tiles - column_tile * together + first;
  info.group = group;
  info.row = range.begin + row_tile * kTokens;
  info.end = range.end;
  info.part = column_tile / p.column_tiles_per_part;
  info.inside = (column_tile - info.part * p.column_tiles_per_part) * kColumns;
  return true;
}

// One warp finds tiles, two ahead; the others take them in the same order.
class TileQueue {
 public:
  __device__ __forceinline__ explicit TileQueue(Memory& memory) : memory_(memory) {}

  __device__ __forceinline__ bool take(TileInfo& info) {
    sm90::barrier_wait(memory_.tile_full + slot_, parity_);
    const TileInfo& from = memory_.tile[slot_];
    info.group = uniform(from.group);
    info.row = uniform(from.row);
    info.end = uniform(from.end);
    info.part = uniform(from.part);
    info.inside = uniform(from.inside);
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(memory_.tile_empty + slot_);
    __syncwarp();
    advance();
    return info.group >= 0;
  }

  // What the finding warp does; ends with a tile that says so.
  __device__ void give_all(const Params& p, const std::int32_t* before) {
    bool more = true;
    for (auto number = static_cast<std::int32_t>(blockIdx.x); more; number += static_cast<std::int32_t>(gridDim.x)) {
      TileInfo info = {};
      more = find_tile(p, before, number, info);
      if (!more) info.group = -1;
      sm90::barrier_wait(memory_.tile_empty + slot_, parity_ ^ 1u);
      if (threadIdx.x % 32 == 0) {
        memory_.tile[slot_] = info;
        sm90::barrier_arrive(memory_.tile_full + slot_);
      }
      __syncwarp();
      advance();
    }
  }

 private:
  __device__ __forceinline__ void advance() {
    slot_ = slot_ + 1 == kTilesAhead ? 0 : slot_ + 1;
    parity_ ^= slot_ == 0 ? 1u : 0u;
  }

  Memory& memory_;
  std::uint32_t slot_ = 0;
  std::uint32_t parity_ = 0;
};

}  // namespace sluice::grouped_gemm::tokens_on_m
