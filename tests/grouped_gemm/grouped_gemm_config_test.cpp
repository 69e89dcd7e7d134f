// The cut of a grouped GEMM into items: every output exactly once, enough items, scratch that holds every choice.
#include "grouped_gemm/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace sluice::grouped_gemm {
namespace {

Problem problem(std::int64_t rows_each, std::int64_t active, std::int64_t n, std::int64_t k, int threads) {
  return {rows_each * active, rows_each, active, n, k, n, threads};
}

TEST(GroupedGemmConfig, EveryColumnIsInExactlyOnePieceAndNoPieceCrossesAScaleRow) {
  for (std::int64_t part : {1, 31, 32, 33, 96, 127, 128, 129, 192, 320, 704, 1408}) {
    for (std::int64_t parts : {1, 2}) {
      for (std::int64_t cols : {32, 64, 128, 256}) {
        const std::int64_t n = part * parts;
        std::vector<int> seen(static_cast<std::size_t>(n));
        for (std::int64_t chunk = 0; chunk < num_col_chunks(n, part, cols); ++chunk) {
          std::int64_t in_chunk = 0;
          for (std::int64_t i = 0; i < std::max<std::int64_t>(cols / 128, 1); ++i) {
            const ColRange range = col_range(n, part, cols, chunk, i);
            in_chunk += range.count;
            for (std::int64_t c = range.begin; c < range.begin + range.count; ++c) {
              ++seen[static_cast<std::size_t>(c)];
              EXPECT_EQ(range.scale_row, c / part * ((part + 127) / 128) + c % part / 128);
            }
          }
          EXPECT_LE(in_chunk, cols);
        }
        EXPECT_THAT(seen, testing::Each(1)) << "part " << part << " x " << parts << ", " << cols << " columns";
      }
    }
  }
}

TEST(GroupedGemmConfig, ManyCoresGetEnoughItemsFromOneTokenAndFewExperts) {
  for (int threads : {1, 2, 8, 32}) {
    for (std::int64_t active : {1, 2, 8}) {
      const Config c = choose_config(problem(1, active, 4096, 7168, threads));
      EXPECT_GE(c.num_items, threads) << c.to_string();
      EXPECT_EQ(c.chunk_rows, 1);
    }
  }
  EXPECT_GE(choose_config(problem(512, 1, 2048, 7168, 64)).num_items, 4 * 64);
  EXPECT_GE(choose_config(problem(1, 1, 4096, 7168, 128)).num_items, 128);
}

TEST(GroupedGemmConfig, LargeItemsWhereThereIsEnoughWork) {
  const Config c = choose_config(problem(512, 8, 4096, 7168, 2));
  EXPECT_EQ(c.chunk_cols, kMaxChunkCols);
  EXPECT_EQ(c.chunk_rows, kMaxChunkRows);
  EXPECT_THAT(c.to_string(), testing::HasSubstr("256 rows x 256 columns"));
}

TEST(GroupedGemmConfig, ScratchHoldsEveryBlockAnItemMayTake) {
  for (std::int64_t k : {1, 127, 128, 129, 2048, 7168, 100000}) {
    for (std::int64_t most = 1; most <= 300; ++most) {
      const ScratchElems s = worker_scratch(most, k);
      for (std::int64_t part : {s.a, s.c, s.scale, s.panel}) EXPECT_EQ(part % 16, 0);
      for (std::int64_t rows = 1; rows <= std::min(most, kMaxChunkRows); ++rows) {
        const std::int64_t cols = a_block_cols(rows, k);
        EXPECT_EQ(cols % 128, 0);
        ASSERT_LE(rows * (cols + kAPadElems), s.a) << rows << " of " << most << " rows, K " << k;
        ASSERT_LE(rows * (cols / 128), s.scale);
        ASSERT_LE(rows * kMaxChunkCols, s.c);
      }
    }
  }
}

TEST(GroupedGemmConfig, ScratchGrowsWithTheProblemAndNotBeyondTheLimits) {
  EXPECT_LT(worker_scratch(1, 128).total(), worker_scratch(64, 128).total());
  EXPECT_EQ(worker_scratch(256, 7168).total(), worker_scratch(100000, 7168).total());
}

// The numbers of the reports, each past 2^31 or 2^32.
TEST(GroupedGemmConfig, Case56_OutputOffsets) {
  EXPECT_EQ(offset_elems(56000 * 8, 7168), 3211264000LL);
  EXPECT_EQ(offset_elems(1525201, 2816) + 2815, 4294968831LL);
}

TEST(GroupedGemmConfig, Case57_ExpertOffsets) {
  constexpr std::int64_t kStride = 2LL * 1024 * 4096;
  EXPECT_EQ(offset_elems(255, kStride), 2139095040LL);
  EXPECT_EQ(offset_elems(256, kStride), 2147483648LL);
  EXPECT_EQ(offset_elems(511, kStride), 4286578688LL);
}

TEST(GroupedGemmConfig, Case58_TokenOffsets) {
  EXPECT_EQ(offset_elems(61680, 2 * 17408), 2147450880LL);
  EXPECT_EQ(offset_elems(61681, 2 * 17408), 2147485696LL);
  EXPECT_EQ(offset_elems(65536, 2 * 17408), 2281701376LL);
}

TEST(GroupedGemmConfig, Case60_ShapeArithmeticDoesNotOverflow) {
  const Config c = choose_config(problem(23491, 1, 128256, 128, 64));
  EXPECT_EQ(c.num_items,
            ceil_div(23491, c.chunk_rows) * (128256 / c.chunk_cols + (128256 % c.chunk_cols != 0 ? 1 : 0)));
  const Config huge = choose_config(problem(1LL << 40, 1, 1LL << 30, 128, 64));
  EXPECT_EQ(huge.num_items, ((1LL << 40) / kMaxChunkRows) * ((1LL << 30) / kMaxChunkCols));
}

}  // namespace
}  // namespace sluice::grouped_gemm
