// The work of a grouped GEMM as a list of tiles, made by every CTA for itself from the row groups on the device: the
// host never knows the row counts. Tiles are numbered expert by expert; inside an expert the row tile moves fastest, so
// that CTAs that run side by side share the weights in L2.
#pragma once

#include <cstdint>

#include "cuda/row_groups.cuh"
#include "grouped_gemm/tile_memory.h"

namespace sluice::grouped_gemm {

// In shared memory, for L experts: first row, end row, and the number of tiles before each expert.
struct TileTable {
  std::int32_t* begin;   // [L]
  std::int32_t* end;     // [L]
  std::int32_t* before;  // [L+1]
  std::int32_t num_groups;

  static constexpr std::int64_t bytes(std::int64_t num_groups) { return tile_table_bytes(num_groups); }

  __device__ static TileTable at(void* memory, std::int32_t num_groups) {
    auto* const words = static_cast<std::int32_t*>(memory);
    return {words, words + num_groups, words + 2 * num_groups, num_groups};
  }

  // The whole block fills it and is synchronised afterwards. All threads read the groups at once: one warp walking through
  // hundreds of experts would wait for memory at every 32. Offsets and counts are clamped so that no content of the
  // arrays leads outside the R rows (include/sluice/plan.h, row_range).
  __device__ void fill(const cuda::DeviceRowGroups& groups, std::int32_t num_rows, std::int32_t tile_rows,
                       std::int32_t column_tiles) const {
    for (auto e = static_cast<std::int32_t>(threadIdx.x); e < num_groups; e += static_cast<std::int32_t>(blockDim.x)) {
      const cuda::DeviceRowRange range = groups.range(e, num_rows);
      begin[e] = range.begin;
      end[e] = range.end;
    }
    __syncthreads();
    if (threadIdx.x < 32) sum_up(tile_rows, column_tiles);
    __syncthreads();
  }

  __device__ __forceinline__ std::int32_t num_tiles() const { return before[num_groups]; }

 private:
  __device__ void sum_up(std::int32_t tile_rows, std::int32_t column_tiles) const {
    const auto lane = static_cast<std::int32_t>(threadIdx.x);
    std::int32_t total = 0;
    for (std::int32_t first = 0; first < num_groups; first += 32) {
      const std::int32_t e = first + lane;
      const std::int32_t rows = e < num_groups ? end[e] - begin[e] : 0;
      const std::int32_t tiles = (rows + tile_rows - 1) / tile_rows * column_tiles;
      std::int32_t sum = tiles;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const std::int32_t left = __shfl_up_sync(0xFFFFFFFFu, sum, d);
        if (lane >= d) sum += left;
      }
      if (e < num_groups) before[e] = total + sum - tiles;
      total += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (lane == 0) before[num_groups] = total;
  }
};

struct Tile {
  std::int32_t group, row, end, column_tile;
};

// Walks the tiles of one CTA; every role of the CTA walks for itself. A whole warp calls next() together.
struct TileWalk {
  TileTable table;
  std::int32_t tile_rows;
  std::int32_t tile;
  std::int32_t stride;  // of the next tile of the same walk
  std::int32_t group = 0;

  // The group of a tile is the last one whose count of earlier tiles does not exceed it; empty groups share that count
  // with their successor and lose to it.
  __device__ __forceinline__ bool next(Tile& t) {
    if (tile >= table.num_tiles()) return false;
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (;;) {
      const std::int32_t e = group + 1 + lane;
      const bool passed = e <= table.num_groups && table.before[e] <= tile;
      const int steps = __popc(__ballot_sync(0xFFFFFFFFu, passed));
      group += steps;
      if (steps < 32) break;
    }
    const std::int32_t inside = tile - table.before[group];
    const std::int32_t begin = table.begin[group];
    t.group = group;
    t.end = table.end[group];
    const std::int32_t row_tiles = (t.end - begin + tile_rows - 1) / tile_rows;
    t.column_tile =
        row_tiles == 1 ? inside : inside / row_tiles;  // a division costs a short tile as much as a step of K
    t.row = begin + (inside - t.column_tile * row_tiles) * tile_rows;
    tile += stride;
    return true;
  }
};

}  // namespace sluice::grouped_gemm
