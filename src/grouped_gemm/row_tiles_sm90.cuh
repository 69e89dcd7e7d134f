// The work of the tokens-on-M kernel: which tile comes when, and how one warp tells the others.
#pragma once

#include <cstdint>

#include "cuda/row_groups.cuh"
#include "cuda/sm90.cuh"
#include "grouped_gemm/tokens_on_m.h"

namespace sluice::grouped_gemm::tokens_on_m {

namespace sm90 = cuda::sm90;

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The value of lane 0. Values from memory are the same in every lane, but only a shuffle tells the compiler: descriptors
// then stay in uniform registers, where wgmma wants them.
template <class T>
__device__ __forceinline__ T uniform(T value) {
  return __shfl_sync(kAllLanes, value, 0);
}

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

// Row tiles are walked eight at a time, all columns of those before the next eight: blocks that run side by side share
// the weights of a column and the rows of a tile in L2. Four to sixteen gave the same times.
constexpr std::int32_t kRowTilesTogether = 8;

// The number-th tile. A whole warp calls.
__device__ inline bool find_tile(const Params& p, const std::int32_t* before, std::int32_t number, TileInfo& info) {
  const std::int32_t num_row_tiles = before[p.num_groups];
  if (number >= num_row_tiles * p.column_tiles) return false;
  const std::int32_t each = kRowTilesTogether * p.column_tiles;
  const std::int32_t first_row_tile = number / each * kRowTilesTogether;
  const std::int32_t together = min(kRowTilesTogether, num_row_tiles - first_row_tile);
  const std::int32_t inside = number % each;
  const std::int32_t column_tile = inside / together;
  const std::int32_t row_tile = first_row_tile + inside - column_tile * together;

  // The expert is the last one whose count of earlier tiles does not exceed the tile: 32 times 32 of them are looked at.
  // An empty expert shares that count with its successor and loses to it.
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  std::int32_t group = 0;
  for (std::int32_t span = 1024; span > 0; span /= 32) {
    for (;;) {
      const std::int32_t e = group + (lane + 1) * span;
      const bool passed = e < p.num_groups && before[e] <= row_tile;
      const int steps = __popc(__ballot_sync(kAllLanes, passed));
      group += steps * span;
      if (steps < 32) break;
    }
  }
  const cuda::DeviceRowRange range = p.groups.range(group, p.num_rows);
  info.group = group;
  info.row = range.begin + (row_tile - before[group]) * kTokens;
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
