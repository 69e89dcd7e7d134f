// The fused up GEMM and activation without a GPU: what is legal, how a kernel is laid out for a problem, what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fused/up_swiglu_quant/config.h"
#include "grouped_gemm/tile_memory.h"

namespace sluice::test {
namespace {

using grouped_gemm::GpuProblem;
using testing::HasSubstr;
using up_swiglu_quant::Args;
using up_swiglu_quant::Config;

constexpr Device kGpu{DeviceKind::kCuda, 0};

struct Sizes {
  std::int64_t experts, hidden, intermediate, rows;
};

Args args_of(const Sizes& s) {
  const auto plan = [](DType dtype, std::initializer_list<std::int64_t> shape) {
    return TensorView::dense(nullptr, dtype, shape, kGpu);
  };
  Args args;
  args.up.a = plan(DType::kE4M3, {s.rows, s.hidden});
  args.up.a_scale = plan(DType::kF32, {ceil_div(s.hidden, 128), s.rows});
  args.up.groups = RowGroups::contiguous({plan(DType::kI32, {s.experts + 1})});
  args.up.w = plan(DType::kE4M3, {s.experts, 2 * s.intermediate, s.hidden});
  args.up.w_scale = plan(DType::kF32, {s.experts, 2 * ceil_div(s.intermediate, 128), ceil_div(s.hidden, 128)});
  args.up.part_rows = s.intermediate;
  args.up.out = plan(DType::kBF16, {s.rows, 2 * s.intermediate});
  args.act.h = args.up.out;
  args.act.groups = args.up.groups;
  args.act.a = plan(DType::kE4M3, {s.rows, s.intermediate});
  args.act.a_scale = plan(DType::kF32, {ceil_div(s.intermediate, 128), s.rows});
  return args;
}

Machine hopper() {
  Machine machine;
  machine.device = kGpu;
  machine.gpu.name = "a Hopper";
  machine.gpu.capability = {9, 0};
  return machine;
}

TEST(UpSwigluQuant, AnyProblemHasALayoutThatFits) {
  for (std::int64_t experts : {1, 8, 32, 128, 256, 384, 1024}) {
    for (std::int64_t hidden : {128, 144, 2048, 7168, 16384}) {
      for (std::int64_t intermediate : {77, 128, 256, 768, 2048, 16384}) {
        for (std::int64_t rows : {1, 8, 9, 64, 256, 1024, 4096, 65536}) {
          const GpuProblem p = grouped_gemm::problem_of(args_of({experts, hidden, intermediate, rows}).up);
          const Config config = up_swiglu_quant::choose_config(p);
          const std::string what = config.to_string();
          EXPECT_TRUE(config.tile.paired) << what;
          EXPECT_EQ(config.tile.weight_rows * config.split, 256) << what;
          EXPECT_GE(config.tile.stages, 2) << what;
          EXPECT_LE(config.tile.shared_bytes, p.shared_bytes) << what;
          if (config.split == 1) continue;
          // All clusters run at once, and a consumer holds four stages.
          EXPECT_GT(config.tile.stages, 4) << what;
          const std::int64_t active = std::min(experts, rows);
          EXPECT_LE((rows + 7 * active) / 8 * ceil_div(intermediate, 128) * config.split, p.num_sms) << what;
        }
      }
    }
  }
}

TEST(UpSwigluQuant, MoreRowsAnExpertNeverMeanSmallerTiles) {
  std::int64_t last = 0;
  for (std::int64_t rows = 8; rows <= 256 * 128; rows *= 2) {
    const Config config = up_swiglu_quant::choose_config(grouped_gemm::problem_of(args_of({256, 7168, 2048, rows}).up));
    EXPECT_GE(config.tile.tokens, last) << rows;
    last = config.tile.tokens;
  }
  EXPECT_GT(last, 8);
}

TEST(UpSwigluQuant, ReasonsOfARefusalAreNamed) {
  const Sizes sizes{8, 256, 256, 16};
  EXPECT_TRUE(up_swiglu_quant::can_run_cuda(args_of(sizes), hopper()).is_ok());
  const auto expect = [&](const char* word, const auto& change, Machine machine = hopper()) {
    Args args = args_of(sizes);
    change(args);
    EXPECT_THAT(up_swiglu_quant::can_run_cuda(args, machine).message(), HasSubstr(word));
  };
  Machine old = hopper();
  old.gpu.capability = {8, 0};
  expect(
      "8.0", [](Args&) {}, old);
  expect("bf16", [](Args& a) {
    a.up.a.dtype = a.up.w.dtype = DType::kBF16;
    a.up.a_scale = a.up.w_scale = {};
  });
  expect("one scale a row", [](Args& a) {
    a.up.a_scale.shape[0] = 1;
    a.up.w_scale.shape = {8, 512, 1};
    a.up.w_scale.stride = {512, 1, 1};
  });
  expect("one scale a row", [](Args& a) { a.act.a_scale.shape[0] = 1; });
  expect("a is bf16", [](Args& a) { a.act.a.dtype = DType::kBF16, a.act.a_scale = {}; });
  expect("gate and up stacked", [](Args& a) { a.up.part_rows = 512; });
  expect("16-byte boundaries", [](Args& a) { a.act.a.stride[0] = 264; });
}

TEST(UpSwigluQuant, ChecksWhatTheTwoStagesMustShare) {
  const Sizes sizes{8, 256, 256, 16};
  EXPECT_TRUE(up_swiglu_quant::check(args_of(sizes), Phase::kPlan).is_ok());
  const auto expect = [&](const char* word, Phase phase, const auto& change) {
    Args args = args_of(sizes);
    change(args);
    const Status status = up_swiglu_quant::check(args, phase);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(word));
  };
  expect("both stand for h", Phase::kPlan, [](Args& a) { a.up.out.dtype = DType::kF32; });
  expect("different row groups", Phase::kPlan, [](Args& a) { a.act.groups = RowGroups::whole(); });
  expect("is null", Phase::kRun, [](Args&) {});
  expect("grouped_gemm", Phase::kPlan, [](Args& a) { a.up.a.shape[1] = 128; });
  expect("swiglu_quant", Phase::kPlan, [](Args& a) { a.act.activation.limit = 3.0f; });
}

TEST(UpSwigluQuant, StandsForTheTwoWhoseBitsItHasAlone) {
  EXPECT_TRUE(up_swiglu_quant::replaces("cuda-wgmma", "cuda"));
  EXPECT_FALSE(up_swiglu_quant::replaces("cuda-simt", "cuda"));
  EXPECT_FALSE(up_swiglu_quant::replaces("cuda-wgmma", "cpu"));
}

}  // namespace
}  // namespace sluice::test
