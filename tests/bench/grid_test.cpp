// The benchmark grid: its routes are those of bench/peers/routes.py, its floors are the formula of docs/performance.md.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

#include "../../bench/grid.h"

namespace sluice::test {
namespace {

using namespace sluice::bench;  // NOLINT: the subject of this file

TEST(BenchGrid, RoutesAreThoseOfThePeersInPython) {
  std::uint64_t digest = 0xCBF29CE484222325ULL;
  for (const GridRow& row : grid()) {
    for (std::int32_t offset : expert_offsets(row, 0))
      digest = (digest ^ static_cast<std::uint64_t>(offset)) * 0x100000001B3ULL;
  }
  EXPECT_EQ(digest, 0xBE5FB5E7B9673CB2ULL);  // tests/scripts/routes_test.py expects the same of the other side
}

TEST(BenchGrid, EveryTokenGoesToItsNumberOfExperts) {
  for (const GridRow& row : grid()) {
    const auto offset = expert_offsets(row, 1);
    ASSERT_EQ(static_cast<std::int64_t>(offset.size()), row.local_experts + 1) << row.shape;
    EXPECT_EQ(offset.front(), 0);
    for (std::size_t e = 1; e < offset.size(); ++e) {
      EXPECT_GE(offset[e], offset[e - 1]);
      EXPECT_LE(offset[e] - offset[e - 1], row.tokens) << "an id came twice in a token";
    }
    if (row.local_experts == row.num_experts) {
      EXPECT_EQ(offset.back(), row.tokens * row.top_k) << row.shape;
    } else {
      // A share of the draws: within six standard deviations of its mean.
      const double p = static_cast<double>(row.local_experts) / static_cast<double>(row.num_experts);
      const double draws = static_cast<double>(row.tokens * row.top_k);
      EXPECT_NEAR(offset.back(), draws * p, 6 * std::sqrt(draws * p * (1 - p))) << row.shape;
    }
  }
}

TEST(BenchGrid, AnotherVariantIsAnotherDraw) {
  for (const GridRow& row : grid()) EXPECT_NE(expert_offsets(row, 0), expert_offsets(row, 1)) << row.shape;
}

TEST(BenchGrid, FloorsAreTheFormula) {
  const GridRow row{"x", 2, 4, 4, 256, 128, 2, false};
  const std::vector<std::int32_t> offset = {0, 3, 3, 4, 4};
  const GemmShape up = gemms(row)[0];
  EXPECT_EQ(up.n, 256);
  EXPECT_EQ(up.k, 256);
  const Floor floor = gemm_floor(row, up, offset);
  // Two experts have rows: weights and 2x2 scales of each; four rows of 256 bytes and 2 scales; out in bf16.
  EXPECT_DOUBLE_EQ(floor.bytes, 2 * (256 * 256 + 4 * 4) + 4 * (256 + 2 * 4) + 4 * 256 * 2);
  EXPECT_DOUBLE_EQ(floor.flops, 2.0 * 4 * 256 * 256);
  EXPECT_DOUBLE_EQ(floor.us, floor.bytes / 4.5e6);
  GridRow in_bf16 = row;
  in_bf16.bf16 = true;
  EXPECT_DOUBLE_EQ(gemm_floor(in_bf16, up, offset).bytes, 2 * 256 * 256 * 2 + 4 * 256 * 2 + 4 * 256 * 2);
}

TEST(BenchGrid, WeightsThatFitTheCacheAreRotated) {
  for (const GridRow& row : grid()) {
    for (const GemmShape& gemm : gemms(row)) {
      const Floor floor = gemm_floor(row, gemm, expert_offsets(row, 0));
      EXPECT_GE(floor.bytes * num_variants(floor), 120e6) << row.shape << " T=" << row.tokens << " " << gemm.name;
    }
  }
}

}  // namespace
}  // namespace sluice::test
