// What the GPU rows of the table refuse, and the tiles they choose: host functions, judged without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "grouped_gemm/gpu_config.h"

namespace sluice::grouped_gemm {
namespace {

using testing::HasSubstr;

Machine gpu(int major, int minor) {
  Machine machine;
  machine.device = {DeviceKind::kCuda, 0};
  machine.gpu.name = "Test GPU";
  machine.gpu.capability = {major, minor};
  return machine;
}

Args legal(DType dtype = DType::kE4M3) {
  const Device cuda{DeviceKind::kCuda, 0};
  Args args;
  args.a = TensorView::dense(nullptr, dtype, {64, 512}, cuda);
  args.w = TensorView::dense(nullptr, dtype, {4, 256, 512}, cuda);
  args.out = TensorView::dense(nullptr, DType::kBF16, {64, 256}, cuda);
  args.groups = RowGroups::contiguous({TensorView::dense(nullptr, DType::kI32, {5}, cuda)});
  if (dtype == DType::kE4M3) {
    args.a_scale = TensorView::dense(nullptr, DType::kF32, {4, 64}, cuda);
    args.w_scale = TensorView::dense(nullptr, DType::kF32, {4, 2, 4}, cuda);
  }
  if (dtype == DType::kI8) {
    args.a_scale = TensorView::dense(nullptr, DType::kF32, {1, 64}, cuda);
    args.w_scale = TensorView::dense(nullptr, DType::kF32, {4, 256, 1}, cuda);
  }
  return args;
}

TEST(GroupedGemmGpuRules, HopperRunsAllThreeOperandTypes) {
  for (DType dtype : {DType::kE4M3, DType::kI8, DType::kBF16}) {
    EXPECT_TRUE(can_run_wgmma(legal(dtype), gpu(9, 0)).is_ok()) << to_string(dtype);
    EXPECT_TRUE(can_run_simt(legal(dtype), gpu(9, 0)).is_ok()) << to_string(dtype);
  }
}

TEST(GroupedGemmGpuRules, OtherGpusAreRefusedWithBothCapabilities) {
  for (const auto& [major, minor] : {std::pair(8, 0), std::pair(8, 9), std::pair(10, 0), std::pair(12, 0)}) {
    for (const auto can_run : {can_run_wgmma, can_run_simt}) {
      const Status status = can_run(legal(), gpu(major, minor));
      EXPECT_EQ(status.code(), StatusCode::kUnsupported);
      EXPECT_THAT(status.message(), HasSubstr("9.x"));
      EXPECT_THAT(status.message(), HasSubstr(std::to_string(major) + "." + std::to_string(minor)));
      EXPECT_THAT(status.message(), HasSubstr("Test GPU"));
    }
  }
}

TEST(GroupedGemmGpuRules, RefusalsNameTheTensorAndItsNumbers) {
  Args args = legal();
  args.w.dtype = DType::kBF16;
  EXPECT_THAT(can_run_wgmma(args, gpu(9, 0)).message(), HasSubstr("a is e4m3 and w is bf16"));
  args = legal(DType::kF32);
  EXPECT_THAT(can_run_wgmma(args, gpu(9, 0)).message(), HasSubstr("f32"));
  args = legal();
  args.out.dtype = DType::kF32;
  EXPECT_THAT(can_run_wgmma(args, gpu(9, 0)).message(), HasSubstr("out must be bf16, it is f32"));
  args = legal();
  args.a.stride[0] = 513;
  EXPECT_THAT(can_run_wgmma(args, gpu(9, 0)).message(), HasSubstr("stride of 513 elements"));
  args = legal(DType::kBF16);
  args.w.stride[1] = 516;
  EXPECT_THAT(can_run_wgmma(args, gpu(9, 0)).message(), HasSubstr("w = bf16[4,256,512]"));
}

TEST(GroupedGemmGpuRules, OperandsStartOnSixteenBytes) {
  alignas(64) static std::byte memory[64];
  for (std::int64_t past : {0, 1, 8, 15, 16}) {
    Args args = legal();
    args.a.data = memory;
    args.w.data = memory + past;
    const Status status = check_alignment(args);
    EXPECT_EQ(status.is_ok(), past % 16 == 0) << past;
    if (past % 16 == 0) continue;
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("starts " + std::to_string(past) + " bytes past a 16-byte boundary"));
  }
}

// Every tile that can be chosen was compiled, fits the shared memory of a block and leaves a pipeline to work with.
TEST(GroupedGemmGpuRules, ChosenTilesFit) {
  for (std::int64_t groups : {1, 2, 8, 32, 128, 256, 384, 1024}) {
    for (std::int64_t rows = 1; rows < (std::int64_t{1} << 22); rows = rows * 3 + 1) {
      for (std::int64_t n : {1, 128, 512, 1536, 4096, 7168, 28672}) {
        for (std::int64_t k : {16, 256, 2048, 7168}) {
          for (bool block_scales : {false, true}) {
            GpuProblem p;
            p.num_groups = groups;
            p.num_rows = rows;
            p.n = n;
            p.k = k;
            p.part_rows = n % 2 == 0 ? n / 2 : n;
            p.block_scales = block_scales;
            const GpuTile tile = choose_tile(p);
            EXPECT_GE(tile.stages, 3) << tile.to_string();
            EXPECT_LE(tile.shared_bytes, p.shared_bytes) << tile.to_string();
            EXPECT_TRUE(tile.weight_rows == 128 || tile.weight_rows == 256) << tile.to_string();
            EXPECT_TRUE(tile.tokens_on_m ? tile.tokens == 128 : 128 % tile.tokens == 0 || tile.tokens == 96)
                << tile.to_string();
          }
        }
      }
    }
  }
}

// DeepSeek-V3's two GEMMs, and its down GEMM cut over eight ranks, as docs/performance.md measured them.
TEST(GroupedGemmGpuRules, FewRowsGetTheTilesThatWereFastest) {
  const auto tile = [](std::int64_t rows, std::int64_t n, std::int64_t k, std::int64_t part_rows) {
    GpuProblem p;
    p.num_groups = 256;
    p.num_rows = rows;
    p.n = n;
    p.k = k;
    p.part_rows = part_rows;
    p.block_scales = true;
    return choose_tile(p);
  };
  const auto is = [](const GpuTile& t, std::int64_t tokens, std::int64_t weight_rows, unsigned threads) {
    EXPECT_EQ(t.tokens, tokens) << t.to_string();
    EXPECT_EQ(t.weight_rows, weight_rows) << t.to_string();
    EXPECT_EQ(t.threads(), threads) << t.to_string();
  };
  is(tile(256, 4096, 7168, 2048), 8, 256, 640);    // up, a row an expert: four consumer warpgroups
  is(tile(256, 7168, 2048, 7168), 8, 128, 384);    // down
  is(tile(4096, 7168, 2048, 7168), 32, 256, 640);  // down, 16 rows an expert
  is(tile(1024, 7168, 256, 7168), 16, 256, 640);   // down, two steps of K
  is(tile(4096, 7168, 256, 7168), 32, 128, 384);
  is(tile(16384, 4096, 7168, 2048), 96, 256, 384);  // too many sums for four
  is(tile(65536, 4096, 7168, 2048), 128, 256, 384);
  EXPECT_TRUE(tile(65536, 4096, 7168, 2048).tokens_on_m);
  EXPECT_EQ(tile(65536, 4096, 7168, 2048).box_tokens(), 64);
  EXPECT_EQ(tile(256, 4096, 7168, 2048).box_tokens(), 8);
}

TEST(GroupedGemmGpuRules, MoreRowsAnExpertNeverGetASmallerTile) {
  GpuProblem p;
  p.num_groups = 256;
  p.n = 4096;
  p.k = 7168;
  p.part_rows = 2048;
  p.block_scales = true;
  std::int64_t before = 0;
  for (p.num_rows = 8; p.num_rows < 400000; p.num_rows += p.num_rows / 2) {
    const std::int64_t tokens = choose_tile(p).tokens;
    EXPECT_GE(tokens, before) << p.num_rows;
    before = tokens;
  }
}

}  // namespace
}  // namespace sluice::grouped_gemm
