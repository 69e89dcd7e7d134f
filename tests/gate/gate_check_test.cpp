// Every sentence of the gate's checks, once, with the values it must name.
#include <limits>

#include "gate/runs.h"

namespace sluice::test {
namespace {

using testing::AssertionResult;

AssertionResult refused(const Status& status, const std::vector<std::string>& parts) {
  if (status.is_ok()) return testing::AssertionFailure() << "was accepted";
  if (status.code() != StatusCode::kInvalidArgument) return testing::AssertionFailure() << to_string(status.code());
  for (const std::string& part : parts) {
    if (status.message().find(part) == std::string::npos) {
      return testing::AssertionFailure() << "'" << status.message() << "' lacks '" << part << "'";
    }
  }
  return testing::AssertionSuccess();
}

GateConfig grouped(std::int64_t n_group, std::int64_t topk_group, GroupScore rule = GroupScore::kMax) {
  GateConfig config;
  config.n_group = n_group;
  config.topk_group = topk_group;
  config.group_score = rule;
  return config;
}

TEST(GateValidate, ImpossibleGatesNameTheirFields) {
  EXPECT_TRUE(refused(validate(GateConfig{}, 0, 1), {"num_experts = 0"}));
  EXPECT_TRUE(refused(validate(GateConfig{}, 1025, 1), {"num_experts = 1025", "1024"}));
  EXPECT_TRUE(refused(validate(GateConfig{}, 8, 0), {"top_k = 0"}));
  EXPECT_TRUE(refused(validate(GateConfig{}, 8, -1), {"top_k = -1"}));
  EXPECT_TRUE(refused(validate(GateConfig{}, 64, 33), {"top_k = 33", "32"}));
  EXPECT_TRUE(refused(validate(GateConfig{}, 8, 9), {"top_k = 9", "num_experts = 8"}));
  EXPECT_TRUE(refused(validate(grouped(0, 1), 8, 1), {"n_group = 0"}));
  EXPECT_TRUE(refused(validate(grouped(3, 1), 8, 1), {"num_experts = 8", "n_group = 3"}));
  EXPECT_TRUE(refused(validate(grouped(16, 1), 8, 1), {"num_experts = 8", "n_group = 16"}));
  EXPECT_TRUE(refused(validate(grouped(4, 0), 8, 1), {"topk_group = 0"}));
  EXPECT_TRUE(refused(validate(grouped(4, 5), 8, 1), {"topk_group = 5", "n_group = 4"}));
  EXPECT_TRUE(refused(validate(grouped(4, 2, GroupScore::kNone), 8, 1), {"group_score is none", "n_group = 4"}));
  EXPECT_TRUE(refused(validate(grouped(8, 4, GroupScore::kTop2Sum), 8, 1),
                      {"top-2 sum", "num_experts = 8", "n_group = 8", "1 expert per group"}));
  EXPECT_TRUE(refused(validate(grouped(4, 1), 8, 3), {"top_k = 3", "2 experts", "topk_group = 1", "n_group = 4"}));
  GateConfig config;
  config.routed_scaling_factor = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(refused(validate(config, 8, 1), {"routed_scaling_factor = inf"}));
  config.routed_scaling_factor = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(refused(validate(config, 8, 1), {"routed_scaling_factor = nan"}));
}

TEST(GateValidate, EnumsOutOfRange) {
  const auto with = [](auto GateConfig::*field, int value) {
    GateConfig config;
    config.*field = static_cast<std::remove_reference_t<decltype(config.*field)>>(value);
    return validate(config, 8, 1);
  };
  EXPECT_TRUE(refused(with(&GateConfig::score, 4), {"score = 4"}));
  EXPECT_TRUE(refused(with(&GateConfig::group_score, 3), {"group_score = 3"}));
  EXPECT_TRUE(refused(with(&GateConfig::weight_rule, 3), {"weight_rule = 3"}));
  EXPECT_TRUE(refused(with(&GateConfig::renorm, 3), {"renorm = 3"}));
  EXPECT_TRUE(refused(with(&GateConfig::scale_rule, 2), {"scale_rule = 2"}));
}

TEST(GateValidate, LimitsThemselvesAreLegal) {
  EXPECT_TRUE(validate(GateConfig{}, 1, 1).is_ok());
  EXPECT_TRUE(validate(GateConfig{}, 1024, 32).is_ok());
  EXPECT_TRUE(validate(GateConfig{}, 32, 32).is_ok());
  EXPECT_TRUE(validate(grouped(8, 8), 8, 8).is_ok());
  EXPECT_TRUE(validate(grouped(4, 2, GroupScore::kTop2Sum), 8, 4).is_ok());
  EXPECT_TRUE(validate(grouped(4, 4), 8, 8).is_ok());
  // One group is not scored, so a rule for it needs nothing.
  EXPECT_TRUE(validate(grouped(1, 1, GroupScore::kTop2Sum), 1, 1).is_ok());
}

struct SelectTensors {
  Buffer logits{DType::kF32, {3, 8}};
  Buffer bias{DType::kF32, {8}};
  Buffer idx{DType::kI32, {3, 2}};
  Buffer weight{DType::kF32, {3, 2}};
  Buffer counters{DType::kI64, {kNumCounters}};
  gate::SelectArgs args(bool biased = false) {
    GateConfig config = gate_preset(biased ? GateId::kG7 : GateId::kG8);
    return {config, logits.view(), biased ? bias.view() : TensorView{}, {idx.view()}, weight.view(), counters.view()};
  }
};

TEST(GateCheck, Select) {
  SelectTensors t;
  ASSERT_TRUE(gate::check(t.args()).is_ok());
  ASSERT_TRUE(gate::check(t.args(true)).is_ok());

  gate::SelectArgs args = t.args(true);
  args.score_bias = {};
  EXPECT_TRUE(refused(gate::check(args), {"gate.select", "has_score_bias is true", "absent"}));
  args = t.args();
  args.score_bias = t.bias.view();
  EXPECT_TRUE(refused(gate::check(args), {"has_score_bias is false", "f32[8]"}));

  const Buffer other_bias(DType::kF32, {9});
  args = t.args(true);
  args.score_bias = other_bias.view();
  EXPECT_TRUE(refused(gate::check(args), {"score_bias[E]", "9", "8"}));
  const Buffer bf16_bias(DType::kBF16, {8});
  args.score_bias = bf16_bias.view();
  EXPECT_TRUE(refused(gate::check(args), {"score_bias", "f32", "bf16[8]"}));

  args = t.args();
  args.logits = {};
  EXPECT_TRUE(refused(gate::check(args), {"logits[T,E]", "missing"}));
  const Buffer bf16_logits(DType::kBF16, {3, 8});
  args.logits = bf16_logits.view();
  EXPECT_TRUE(refused(gate::check(args), {"logits", "f32", "bf16[3,8]"}));

  const Buffer other_idx(DType::kI32, {4, 2});
  args = t.args();
  args.topk_idx.view = other_idx.view();
  EXPECT_TRUE(refused(gate::check(args), {"topk_idx[T,S]", "4", "3"}));
  const Buffer other_weight(DType::kF32, {3, 3});
  args = t.args();
  args.topk_weight = other_weight.view();
  EXPECT_TRUE(refused(gate::check(args), {"topk_weight[T,S]", "3", "2"}));
  const Buffer i64_idx(DType::kI64, {3, 2});
  args = t.args();
  args.topk_idx.view = i64_idx.view();
  EXPECT_TRUE(refused(gate::check(args), {"topk_idx", "i32", "i64[3,2]"}));
  const Buffer other_counters(DType::kI64, {kNumCounters + 1});
  args = t.args();
  args.counters = other_counters.view();
  EXPECT_TRUE(refused(gate::check(args), {"counters"}));

  args = t.args();
  args.topk_weight.data = nullptr;
  EXPECT_TRUE(refused(gate::check(args), {"topk_weight", "null pointer"}));
  EXPECT_TRUE(gate::check(args, Phase::kPlan).is_ok());
  args = t.args();
  args.logits.stride = {1, 3, 0};
  EXPECT_TRUE(refused(gate::check(args), {"logits[T,E]", "stride"}));
}

TEST(GateCheck, SelectSharesValidate) {
  SelectTensors t;
  gate::SelectArgs args = t.args();
  args.gate.n_group = 3;
  EXPECT_TRUE(refused(gate::check(args), {"gate.select", "num_experts = 8", "n_group = 3"}));
  const Buffer idx(DType::kI32, {3, 9});
  const Buffer weight(DType::kF32, {3, 9});
  args = t.args();
  args.topk_idx.view = idx.view();
  args.topk_weight = weight.view();
  EXPECT_TRUE(refused(gate::check(args), {"top_k = 9", "num_experts = 8"}));
}

TEST(GateCheck, Logits) {
  const Buffer x(DType::kBF16, {3, 16});
  const Buffer w(DType::kF32, {5, 16});
  const Buffer bias(DType::kF32, {5});
  const Buffer out(DType::kF32, {3, 5});
  const gate::LogitsArgs good{x.view(), w.view(), bias.view(), out.view()};
  ASSERT_TRUE(gate::check(good).is_ok());

  const Buffer other_w(DType::kF32, {5, 17});
  gate::LogitsArgs args = good;
  args.w_gate = other_w.view();
  EXPECT_TRUE(refused(gate::check(args), {"gate.logits", "w_gate[E,H]", "17", "16"}));
  const Buffer other_bias(DType::kF32, {4});
  args = good;
  args.router_bias = other_bias.view();
  EXPECT_TRUE(refused(gate::check(args), {"router_bias[E]", "4", "5"}));
  const Buffer other_out(DType::kF32, {2, 5});
  args = good;
  args.logits = other_out.view();
  EXPECT_TRUE(refused(gate::check(args), {"logits[T,E]", "2", "3"}));
  const Buffer f16_x(DType::kF16, {3, 16});
  args = good;
  args.x = f16_x.view();
  EXPECT_TRUE(refused(gate::check(args), {"x must be", "bf16", "f16[3,16]"}));
  const Buffer bf16_out(DType::kBF16, {3, 5});
  args = good;
  args.logits = bf16_out.view();
  EXPECT_TRUE(refused(gate::check(args), {"logits", "f32", "bf16[3,5]"}));
  args = good;
  args.w_gate = {};
  EXPECT_TRUE(refused(gate::check(args), {"w_gate", "missing"}));
  args = good;
  args.router_bias = {};
  EXPECT_TRUE(gate::check(args).is_ok());
}

TEST(GateCheck, BothStagesShareOneTensor) {
  SelectTensors t;
  const Buffer x(DType::kBF16, {3, 16}), w(DType::kBF16, {8, 16});
  gate::BothArgs args{{x.view(), w.view(), {}, t.logits.view()}, t.args()};
  ASSERT_TRUE(gate::check(args).is_ok()) << gate::check(args).message();
  const Buffer other(DType::kF32, {3, 8});
  args.select.logits = other.view();
  EXPECT_TRUE(refused(gate::check(args), {"gate:", "the router GEMM writes", "one tensor"}));
  args.select = t.args();
  args.select.topk_weight = {};
  EXPECT_TRUE(refused(gate::check(args), {"gate.select", "topk_weight"}));
  args.select = t.args();
  args.logits.x = {};
  EXPECT_TRUE(refused(gate::check(args), {"gate.logits", "x[T,H]"}));
  EXPECT_TRUE(gate::both_replaces("cuda-wgmma", "cuda"));
  EXPECT_FALSE(gate::both_replaces("cuda", "cuda"));
  EXPECT_FALSE(gate::both_replaces("cuda-wgmma", "cpu"));
}

}  // namespace
}  // namespace sluice::test
