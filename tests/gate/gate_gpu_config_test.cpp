// How the router GEMM on tensor cores cuts its work: judged without a GPU.
#include <gtest/gtest.h>

#include <algorithm>

#include "gate/gpu_config.h"

namespace sluice::test {
namespace {

TEST(GateGpuConfig, AWorkspaceForTheLargestBatchServesAllSmallerOnes) {
  for (std::int64_t num_experts : {1, 8, 128, 256, 384, 1024}) {
    for (std::int64_t hidden : {1, 512, 513, 2048, 7168}) {
      std::int64_t before = 0;
      for (std::int64_t t = 0; t < 9000; t += t < 600 ? 1 : 97) {
        const gate::LogitsTile tile = gate::choose_logits_tile(t, hidden, num_experts, 132);
        const std::int64_t bytes = gate::logits_scratch_bytes(t, hidden, num_experts);
        EXPECT_GE(bytes, before);
        before = bytes;
        EXPECT_GE(tile.split, 1);
        EXPECT_LE(tile.split, std::max<std::int64_t>(ceil_div(hidden, gate::kChunkColumns), 1));
        if (tile.split > 1) {
          EXPECT_GE(bytes, ceil_div(hidden, gate::kChunkColumns) * t * num_experts * 4);
        }
      }
    }
  }
}

TEST(GateGpuConfig, SaysWhatItChose) {
  const gate::LogitsTile tile = gate::choose_logits_tile(128, 7168, 256, 132);
  EXPECT_EQ(tile, (gate::LogitsTile{64, 64, 14}));
  EXPECT_EQ(tile.to_string(), "tiles of 64 tokens x 64 experts, K in 14");
}

// The weights of few tokens are loaded by all multiprocessors; a large batch needs no split.
TEST(GateGpuConfig, BlocksForEveryMultiprocessorAndNoMoreThanNeeded) {
  for (std::int64_t t : {1, 8, 64, 128, 512}) {
    const gate::LogitsTile tile = gate::choose_logits_tile(t, 7168, 256, 132);
    const std::int64_t blocks = ceil_div(t, tile.tokens) * ceil_div(256, tile.experts) * tile.split;
    EXPECT_GE(blocks, 99) << t;
    EXPECT_LE(blocks, 132) << t;
  }
  EXPECT_EQ(gate::choose_logits_tile(8192, 7168, 256, 132), (gate::LogitsTile{128, 128, 1}));
}

}  // namespace
}  // namespace sluice::test
