// How the router GEMM on tensor cores cuts its work: pure functions of the problem, printable, never visible in a result.
#pragma once

#include <cstdint>
#include <string>

#include "sluice/core.h"

namespace sluice::gate {

// Columns a chain of wgmma sums up before its sum is added in fp32. Part of the result's definition (docs/numerics.md),
// and so no choice: 14 chunks at H = 7168 keep 112 blocks busy at few tokens, and cost a large batch nothing.
inline constexpr std::int64_t kChunkColumns = 512;
// The chunks' sums of more tokens than this would be more bytes than what a split of K saves.
inline constexpr std::int64_t kMaxSplitTokens = 512;

// A compiled kernel, and how many blocks share K.
struct LogitsTile {
  int tokens = 0;   // 64 per warpgroup
  int experts = 0;  // the N of wgmma
  int split = 1;
  std::string to_string() const;  // "tiles of 64 tokens x 32 experts, K in 14"
  friend bool operator==(const LogitsTile&, const LogitsTile&) = default;
};

LogitsTile choose_logits_tile(std::int64_t num_tokens, std::int64_t hidden, std::int64_t num_experts, int num_sms);

// Workspace of the split: grows with T up to kMaxSplitTokens, so that what a layer books for its planned T serves every
// smaller T.
std::int64_t logits_scratch_bytes(std::int64_t num_tokens, std::int64_t hidden, std::int64_t num_experts);

}  // namespace sluice::gate
