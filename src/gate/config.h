// How the CPU gate cuts its work: pure functions of the problem, printable, never visible in a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sluice/core.h"

namespace sluice::gate {

// Router GEMM: a task is a panel of experts (two SIMD vectors wide) times a chunk of tokens (whole register tiles).
inline constexpr std::int64_t kTileTokens = 6;  // 6 x 2 accumulators, 2 weights and 1 broadcast fit 16 vector registers
inline constexpr std::int64_t kVectorsPerPanel = 2;
// With 128 columns of a 32-expert panel (16 KB) and 126 tokens of sums (16 KB) a task stays in a 48 KB L1.
inline constexpr std::int64_t kMaxChunkTokens = 21 * kTileTokens;
// Below this the transposition of the panel costs more than the products it feeds.
inline constexpr std::int64_t kMinChunkTokens = 4 * kTileTokens;

struct LogitsConfig {
  std::int64_t panel_experts = 0;
  std::int64_t chunk_tokens = 0;
  std::int64_t num_panels = 0;
  std::int64_t num_chunks = 0;
  std::int64_t num_tasks() const { return num_panels * num_chunks; }
};

inline LogitsConfig logits_config(std::int64_t num_tokens, std::int64_t num_experts, std::int64_t lanes,
                                  int num_threads) {
  LogitsConfig config;
  config.panel_experts = lanes * kVectorsPerPanel;
  config.num_panels = ceil_div(num_experts, config.panel_experts);
  // Two tasks a thread even out the ends; chunks only shrink as far as packing stays cheap.
  const std::int64_t wanted_tasks = 2 * std::max(num_threads, 1);
  const std::int64_t wanted_chunks = ceil_div(wanted_tasks, std::max<std::int64_t>(config.num_panels, 1));
  const std::int64_t chunk = ceil_div(ceil_div(num_tokens, wanted_chunks), kTileTokens) * kTileTokens;
  config.chunk_tokens = std::clamp(chunk, kMinChunkTokens, kMaxChunkTokens);
  config.num_chunks = ceil_div(num_tokens, config.chunk_tokens);
  return config;
}

// Selection: tokens handed to a thread at a time.
inline constexpr std::int64_t kSelectGrainTokens = 16;

}  // namespace sluice::gate
