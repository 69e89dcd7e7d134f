// The tile of the tokens-on-M kernel and what a block keeps in shared memory, for the kernel and for the host that books it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/core.h"

namespace sluice::grouped_gemm::tokens_on_m {

// Tokens and weight rows of a tile. 256 weight rows are what two warpgroups have registers for: 128 sums a thread and, of
// one half of the columns at a time, 64 partial sums.
constexpr int kTokens = 128;
constexpr int kColumns = 256;
constexpr int kStages = 3;  // of the ring; what is left of 227 KiB holds a finished tile
constexpr int kConsumers = 2;
constexpr int kRowsEach = kTokens / kConsumers;  // rows of a consumer warpgroup
constexpr int kBlockColumns = 64;                // of the staged output: 128 bytes, the swizzle's row
constexpr int kBlocks = kColumns / kBlockColumns;
constexpr int kSlabRows = 16;  // of the staged output: a warp's
constexpr int kPieces = kColumns / static_cast<int>(kScaleBlock);
constexpr int kTilesAhead = 2;

// What a tile is, as the scheduling warp hands it out.
struct alignas(16) TileInfo {
  std::int32_t group;  // -1: there is none any more
  std::int32_t row, end;
  std::int32_t part, inside;  // matrix of the stack, first row inside it
  std::int32_t unused[3];
};

struct Memory {
  alignas(1024) std::byte weights[kStages][kColumns * 128];
  std::byte tokens[kStages][kTokens * 128];
  std::byte staging[kConsumers][4][kBlocks][kSlabRows * 128];  // a warp's rows, bf16, blocks in the 128-byte swizzle
  float a_scale[kStages][kTokens];
  float w_scale[kStages][kPieces];
  TileInfo tile[kTilesAhead];
  std::uint64_t full[kStages], empty[kStages];
  std::uint64_t tile_full[kTilesAhead], tile_empty[kTilesAhead];
  // Behind it: row tiles before each expert, [L+1].
};

constexpr std::int64_t shared_bytes(std::int64_t num_groups) {
  return static_cast<std::int64_t>(sizeof(Memory)) + 4 * (num_groups + 1);
}

}  // namespace sluice::grouped_gemm::tokens_on_m
