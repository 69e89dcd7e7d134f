// The choices, and what they ask of a call.
#include "gate/gpu_config.h"

#include <fmt/format.h>

#include <algorithm>

namespace sluice::gate {

std::string LogitsTile::to_string() const {
  return fmt::format("tiles of {} tokens x {} experts, K in {}", tokens, experts, split);
}

LogitsTile choose_logits_tile(std::int64_t num_tokens, std::int64_t hidden, std::int64_t num_experts, int num_sms) {
  const std::int64_t chunks = std::max<std::int64_t>(ceil_div(hidden, kChunkColumns), 1);
  const auto blocks = [&](std::int64_t tokens, std::int64_t experts) {
    return ceil_div(std::max<std::int64_t>(num_tokens, 1), tokens) * ceil_div(num_experts, experts);
  };
  LogitsTile tile;
  if (num_tokens <= kMaxSplitTokens) {
    // Every multiprocessor loads a part of the weights: the widest tile that leaves a block for each.
    tile.tokens = 64;
    tile.experts = 64;
    while (tile.experts > 8 &&
           (tile.experts / 2 >= num_experts || blocks(tile.tokens, tile.experts) * chunks < num_sms * 3 / 4)) {
      tile.experts /= 2;
    }
    const std::int64_t most = std::clamp<std::int64_t>(num_sms / blocks(tile.tokens, tile.experts), 1, chunks);
    // 14 chunks in 11 blocks take as long as in 7.
    tile.split = static_cast<int>(ceil_div(chunks, ceil_div(chunks, most)));
  } else {
    // No split: the largest tile that leaves nearly every multiprocessor a block.
    const LogitsTile largest_first[] = {{128, 128}, {64, 128}, {64, 64}, {64, 32}, {64, 16}, {64, 8}};
    for (const LogitsTile& t : largest_first) {
      tile = t;
      if (blocks(t.tokens, t.experts) >= num_sms * 3 / 4 && t.experts < 2 * num_experts) break;
    }
  }
  return tile;
}

std::int64_t logits_scratch_bytes(std::int64_t num_tokens, std::int64_t hidden, std::int64_t num_experts) {
  return ceil_div(hidden, kChunkColumns) * std::min(num_tokens, kMaxSplitTokens) * ceil_div(num_experts, 4) * 4 *
         static_cast<std::int64_t>(sizeof(float));
}

}  // namespace sluice::gate
