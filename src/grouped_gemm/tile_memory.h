// What a tile of the weights-on-M kernel keeps in shared memory: one formula for the kernel, which carves it, and for the
// host, which books it.
#pragma once

#include <cstdint>

#include "sluice/core.h"

namespace sluice::grouped_gemm {

// TileTable of `num_groups` experts.
constexpr std::int64_t tile_table_bytes(std::int64_t num_groups) { return 4 * (3 * num_groups + 1); }

// Consumer warpgroups of a tile of the weights-on-M kernel. `paired`: a fused activation (src/fused) wants both values of a
// column in one thread, and so two shares of the tile's rows in one warpgroup.
constexpr int consumers_of(int tokens, int weight_rows, bool paired) {
  return !paired && weight_rows == 256 && tokens <= 64 ? 4 : 2;
}

struct TileMemory {
  // Of each stage of the ring: 128 bytes of K of both operands, the scales of 128 of K, and two barriers.
  int weight_bytes = 0;
  int token_bytes = 0;
  int piece_rows = 0;  // weight rows that share a scale
  int pieces = 0;
  int scale_floats = 0;  // [pieces][tokens]
  int epilogue_bytes = 0;

  static constexpr int kStepBytes = 128;
  static constexpr int kAlignBytes = 1024;  // memory starts at a swizzle atom

  // `paired`: the epilogue is a fused activation (src/fused), which keeps the amax of every token, three turns of it.
  static constexpr TileMemory of(int tokens, int weight_rows, bool block_scales, bool paired = false) {
    TileMemory m;
    m.weight_bytes = weight_rows * kStepBytes;
    m.token_bytes = tokens * kStepBytes;
    m.piece_rows = weight_rows % kScaleBlock == 0 ? static_cast<int>(kScaleBlock) : 64;
    m.pieces = weight_rows / m.piece_rows;
    m.scale_floats = block_scales ? m.pieces * tokens : 0;
    m.epilogue_bytes = paired ? 3 * 4 * tokens : 0;
    return m;
  }
  constexpr std::int64_t stage_bytes() const { return weight_bytes + token_bytes + 4 * scale_floats + 2 * 8; }
  constexpr std::int64_t fixed_bytes(std::int64_t num_groups) const {
    return kAlignBytes + epilogue_bytes + tile_table_bytes(num_groups);
  }
};

}  // namespace sluice::grouped_gemm
