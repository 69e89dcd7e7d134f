// How a grouped GEMM is cut into work items, as a pure function of the problem.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "sluice/core.h"

namespace sluice::grouped_gemm {

// Offsets are 64-bit by type: the largest index of a shipping layer times its stride passes 2^32 elements.
constexpr std::int64_t offset_elems(std::int64_t index, std::int64_t stride_elems) { return index * stride_elems; }

struct Problem {
  std::int64_t num_rows = 0;        // rows of all groups together
  std::int64_t max_group_rows = 0;  // rows of the largest group
  std::int64_t num_active = 0;      // groups that have rows
  std::int64_t n = 0, k = 0;
  std::int64_t part_rows = 0;  // n, or the rows of one of the stacked matrices
  int num_threads = 1;
};

// Limits of a work item; scratch is booked for them.
inline constexpr std::int64_t kMaxChunkRows = 256;
inline constexpr std::int64_t kMaxChunkCols = 256;
inline constexpr std::int64_t kMinChunkCols = 32;
inline constexpr std::int64_t kABlockElems = 32768;  // f32 of A held at a time: 128 KiB, a quarter of a small L2
inline constexpr std::int64_t kAPadElems = 16;       // between rows of the A block: keeps them out of one cache set

struct Config {
  std::int64_t chunk_rows = 0;  // rows of an item
  std::int64_t chunk_cols = 0;  // columns of an item: a power of two from kMinChunkCols to kMaxChunkCols
  std::int64_t num_items = 0;   // at most; ragged parts may make some of them empty

  std::string to_string() const;
};

// One scale row of w: up to 128 columns of one part.
constexpr std::int64_t num_scale_rows(std::int64_t n, std::int64_t part_rows) {
  return n / part_rows * ceil_div(part_rows, kScaleBlock);
}

// Items per row chunk. A chunk is whole scale rows, or an even fraction of one.
constexpr std::int64_t num_col_chunks(std::int64_t n, std::int64_t part_rows, std::int64_t chunk_cols) {
  const std::int64_t scale_rows = num_scale_rows(n, part_rows);
  return chunk_cols >= kScaleBlock ? ceil_div(scale_rows, chunk_cols / kScaleBlock)
                                   : scale_rows * (kScaleBlock / chunk_cols);
}

// Columns [begin, begin + count) that share one row of scales.
struct ColRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t scale_row = 0;
};

// Piece `i` of column chunk `chunk`, i in [0, max(chunk_cols/128, 1)); count is 0 past the end.
constexpr ColRange col_range(std::int64_t n, std::int64_t part_rows, std::int64_t chunk_cols, std::int64_t chunk,
                             std::int64_t i) {
  const std::int64_t per_part = ceil_div(part_rows, kScaleBlock);
  const std::int64_t per_chunk = std::max<std::int64_t>(chunk_cols / kScaleBlock, 1);
  const std::int64_t per_row = std::max<std::int64_t>(kScaleBlock / chunk_cols, 1);
  const std::int64_t scale_row = chunk / per_row * per_chunk + i;
  if (scale_row >= num_scale_rows(n, part_rows)) return {0, 0, scale_row};
  const std::int64_t in_part = scale_row % per_part * kScaleBlock;
  const std::int64_t piece = chunk % per_row * chunk_cols;  // 0 unless a scale row is cut
  const std::int64_t length = std::min(kScaleBlock, part_rows - in_part);
  const std::int64_t cols = per_row > 1 ? chunk_cols : kScaleBlock;
  return {scale_row / per_part * part_rows + in_part + piece, std::clamp<std::int64_t>(length - piece, 0, cols),
          scale_row};
}

// Columns of A decoded at a time for an item of `rows` rows, a multiple of 128: the deeper, the longer each row of
// w is read in one go; with few rows it is all of K.
constexpr std::int64_t a_block_cols(std::int64_t rows, std::int64_t k) {
  const std::int64_t fits = kABlockElems / std::max<std::int64_t>(rows, 1) / kScaleBlock * kScaleBlock;
  return std::min(std::max(fits, kScaleBlock), ceil_div(k, kScaleBlock) * kScaleBlock);
}

Config choose_config(const Problem& problem);

// f32 elements of one worker's scratch, for any config of a problem with that many rows per group at most.
struct ScratchElems {
  std::int64_t a = 0, c = 0, scale = 0, panel = 0;
  constexpr std::int64_t total() const { return a + c + scale + panel; }
};
constexpr ScratchElems worker_scratch(std::int64_t max_group_rows, std::int64_t k) {
  const std::int64_t rows = std::clamp<std::int64_t>(max_group_rows, 1, kMaxChunkRows);
  const std::int64_t padded_k = ceil_div(k, kScaleBlock) * kScaleBlock;
  constexpr std::int64_t kMost = kABlockElems + kMaxChunkRows * kAPadElems;
  const std::int64_t a = std::min(kMost, rows * (padded_k + kAPadElems));
  // Every part is a multiple of 16 elements, so that all of them start on a 64-byte boundary.
  return {ceil_div(a, 16) * 16, rows * kMaxChunkCols, ceil_div(a, 16 * kScaleBlock) * 16, kScaleBlock * kMinChunkCols};
}

}  // namespace sluice::grouped_gemm
