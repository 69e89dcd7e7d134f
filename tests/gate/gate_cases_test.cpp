// Faults that other engines had in their gates. Each test is one of them; the number says which.
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "gate/runs.h"

namespace sluice::test {
namespace {

class GateCases : public GateTest {};

using Ids = std::vector<std::int32_t>;

const double kNaN = std::nan("");
const double kInf = std::numeric_limits<double>::infinity();

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

TEST_F(GateCases, Case1_RuledOutGroupsNeverWinOverNegativeScores) {
  const GateConfig config = preset(GateId::kG3, 2, 1);
  const Buffer logits = logits_of({std::vector<double>(8, 0.0)});
  const Buffer bias = vector_of({-0.6, -0.7, -0.8, -0.9, -1.0, -1.1, -1.2, -1.3});
  for (const auto& impl : select_rows()) {
    const Selected got = run_select(impl, config, logits, &bias, 2);
    EXPECT_EQ(got.ids, (Ids{0, 1})) << impl.name;
    EXPECT_EQ(got.weights, (std::vector<float>{0.5f, 0.5f})) << impl.name;
  }
}

TEST_F(GateCases, Case2_TheBiasDecidesInF32) {
  // Both biases are 4.0 in bf16, where the step is 1/32.
  GateConfig config = preset(GateId::kG3);
  config.renorm = Renorm::kNone;
  const Buffer logits = logits_of({{0.0, -0.0120}});
  const Buffer bias = vector_of({4.010, 4.014});
  for (const auto& impl : select_rows()) {
    const Selected got = run_select(impl, config, logits, &bias, 1);
    EXPECT_EQ(got.ids, (Ids{1})) << impl.name;
    // From the unbiased score: (s + b) - b would have lost its last bits.
    EXPECT_NEAR(got.weights[0], sigmoid(logits.at(1)), 1e-7) << impl.name;
  }
}

TEST_F(GateCases, Case4_BadRowsHaveDistinctIdsAndLeaveTheirNeighboursAlone) {
  const std::vector<double> ordinary{0.3, -1.2, 2.0, 0.7, -0.4, 1.1, 0.0, -2.5};
  const Buffer three = logits_of({ordinary, std::vector<double>(8, kNaN), std::vector<double>(8, kInf)});
  const Buffer one = logits_of({ordinary});
  Buffer bias(DType::kF32, {8});
  bias.fill_normal(5, 0.1);
  for (GateId id : kAllGates) {
    for (std::int64_t n_group : {1, 2}) {
      const GateConfig config = preset(id, n_group, 1);
      for (const auto& impl : select_rows()) {
        const Selected all = run_select(impl, config, three, bias_for(config, bias), 4);
        const Selected alone = run_select(impl, config, one, bias_for(config, bias), 4);
        EXPECT_EQ(all.row_ids(0), alone.ids) << impl.name << " " << name_of(id);
        for (std::size_t s = 0; s < 4; ++s) {
          EXPECT_EQ(std::bit_cast<std::uint32_t>(all.weights[s]), std::bit_cast<std::uint32_t>(alone.weights[s]));
        }
        EXPECT_EQ(all.row_ids(1), (Ids{0, 1, 2, 3})) << impl.name << " " << name_of(id);
        EXPECT_EQ(all.row_weights(1), std::vector<float>(4, 0.0f)) << impl.name << " " << name_of(id);
        for (float w : all.weights) EXPECT_TRUE(std::isfinite(w)) << impl.name << " " << name_of(id);
        EXPECT_EQ(all.num_short, 1);
      }
    }
  }
}

TEST_F(GateCases, Case5_NaNExpertsAreIgnoredAndPaddingIsNeverChosen) {
  const Buffer logits = logits_of({std::vector<double>(6, kNaN), {kNaN, 1, 2, 3, 0, 0}});
  const double sum = std::exp(-2) + std::exp(-1) + 1 + 2 * std::exp(-3);
  for (const auto& impl : select_rows()) {
    const Selected got = run_select(impl, preset(GateId::kG1), logits, nullptr, 2);
    EXPECT_EQ(got.row_ids(0), (Ids{0, 1})) << impl.name;
    EXPECT_EQ(got.row_ids(1), (Ids{3, 2})) << impl.name;
    EXPECT_NEAR(got.row_weights(1)[0], 1 / sum, 1e-6) << impl.name;
    EXPECT_NEAR(got.row_weights(1)[1], std::exp(-1) / sum, 1e-6) << impl.name;
    EXPECT_EQ(got.num_short, 1) << impl.name;
  }
}

TEST_F(GateCases, Case6_SlotsWithoutAFiniteExpertAreFilled) {
  const Buffer logits = logits_of({{-kInf, -kInf, 5, -kInf}, {-kInf, -kInf, -kInf, -kInf}, {7, -kInf, -kInf, -kInf}});
  for (GateId id : {GateId::kG1, GateId::kG4, GateId::kG5}) {
    for (const auto& impl : select_rows()) {
      const Selected got = run_select(impl, preset(id), logits, nullptr, 2);
      EXPECT_EQ(got.ids, (Ids{2, 0, 0, 1, 0, 1})) << impl.name;
      EXPECT_EQ(got.weights, (std::vector<float>{1, 0, 0, 0, 1, 0})) << impl.name;
      EXPECT_EQ(got.num_short, 3) << impl.name;
    }
  }
}

TEST_F(GateCases, Case8_FillersComeFromTheKeptGroup) {
  std::vector<double> row(24, -20.0);
  for (int i = 8; i < 16; ++i) row[static_cast<std::size_t>(i)] = -kInf;
  row[8] = 5;
  row[9] = 4;
  const Buffer logits = logits_of({row});
  GateConfig config = preset(GateId::kG8, 3, 1);
  config.group_score = GroupScore::kTop2Sum;
  for (Score score : {Score::kSigmoid, Score::kSoftmax, Score::kSqrtSoftplus, Score::kLogit}) {
    config.score = score;
    for (const auto& impl : select_rows()) {
      const Selected got = run_select(impl, config, logits, nullptr, 4);
      EXPECT_EQ(got.ids, (Ids{8, 9, 10, 11})) << impl.name;
      EXPECT_EQ(got.weights[2], 0.0f) << impl.name;
      EXPECT_EQ(got.weights[3], 0.0f) << impl.name;
      EXPECT_EQ(got.num_short, 1) << impl.name;
    }
  }
}

TEST_F(GateCases, Case9_EveryExpertIndexIsConsidered) {
  for (const auto& impl : select_rows()) {
    std::vector<double> row(512, 0.0);
    Ids want;
    for (int i = 0; i < 10; ++i) {
      row[static_cast<std::size_t>(300 + i)] = 10.0 - i * 0.25;
      want.push_back(300 + i);
    }
    EXPECT_EQ(run_select(impl, preset(GateId::kG1), logits_of({row}), nullptr, 10).ids, want) << impl.name;
    for (std::int64_t num_experts : {1, 2, 31, 32, 33, 255, 256, 257, 511, 512, 896, 1024}) {
      for (GateId id : kAllGates) {
        const GateConfig config = preset(id);
        const Buffer bias = vector_of(std::vector<double>(static_cast<std::size_t>(num_experts), 0.0));
        std::vector<double> last(static_cast<std::size_t>(num_experts), 0.0);
        last.back() = 1.0;
        const Selected got = run_select(impl, config, logits_of({last}), bias_for(config, bias), 1);
        EXPECT_EQ(got.ids, (Ids{static_cast<std::int32_t>(num_experts - 1)})) << impl.name << " " << name_of(id);
      }
    }
  }
  EXPECT_FALSE(validate(GateConfig{}, 1025, 8).is_ok());
}

TEST_F(GateCases, Case10_SizesThatAreNoPowersOfTwo) {
  struct Size {
    std::int64_t num_experts, n_group, topk_group, slots;
  };
  for (const Size& size :
       {Size{64, 1, 1, 6}, {384, 1, 1, 8}, {160, 8, 3, 6}, {72, 1, 1, 6}, {896, 1, 1, 16}, {256, 8, 4, 8}}) {
    Buffer logits(DType::kF32, {4, size.num_experts});
    logits.fill_normal(static_cast<std::uint64_t>(size.num_experts), 2.0);
    Buffer bias(DType::kF32, {size.num_experts});
    bias.fill_normal(9, 0.1);
    const GateConfig config = preset(GateId::kG3, size.n_group, size.topk_group);
    const Selected want = run_select(select_rows().back(), config, logits, &bias, size.slots);
    for (const auto& impl : select_rows()) {
      const Selected got = run_select(impl, config, logits, &bias, size.slots);
      EXPECT_TRUE(got.bits == want.bits) << impl.name << " E=" << size.num_experts;
      // Ids must be those of kept groups: no more than topk_group of them.
      std::set<std::int64_t> groups;
      for (std::int32_t id : got.row_ids(0)) groups.insert(id / (size.num_experts / size.n_group));
      EXPECT_LE(static_cast<std::int64_t>(groups.size()), size.topk_group) << impl.name;
    }
  }
}

TEST_F(GateCases, Case12_NoTokens) {
  const Buffer logits(DType::kF32, {0, 512});
  const Buffer bias(DType::kF32, {512});
  for (GateId id : kAllGates) {
    const GateConfig config = preset(id);
    for (const auto& impl : select_rows()) {
      const Selected got = run_select(impl, config, logits, bias_for(config, bias), 10, 4);
      EXPECT_TRUE(got.ids.empty()) << impl.name;
      EXPECT_EQ(got.num_short, 0);
    }
  }
}

TEST_F(GateCases, Case13_GroupsTooSmallAreRefused) {
  GateConfig config = preset(GateId::kG3, 8, 4);
  EXPECT_FALSE(validate(config, 8, 2).is_ok());
  EXPECT_NE(validate(config, 8, 2).message().find("n_group = 8"), std::string::npos);
  config = preset(GateId::kG3, 4, 1);
  EXPECT_FALSE(validate(config, 8, 4).is_ok());
  EXPECT_NE(validate(config, 8, 4).message().find("top_k = 4"), std::string::npos);
  config = preset(GateId::kG3, 4, 4);
  EXPECT_FALSE(validate(config, 10, 2).is_ok());
  EXPECT_NE(validate(config, 10, 2).message().find("num_experts = 10"), std::string::npos);
}

TEST_F(GateCases, Case14_MoreSlotsThanExpertsIsRefused) {
  GateConfig config = preset(GateId::kG4);
  const Status status = validate(config, 4, 5);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("top_k = 5 is more than num_experts = 4"), std::string::npos) << status.message();
}

TEST_F(GateCases, Case16_TheGuardShrinksTinyWeightsAsInTheReferenceModels) {
  const GateConfig config = preset(GateId::kG3);
  const Buffer bias = vector_of(std::vector<double>(8, 0.0));
  const Buffer logits =
      logits_of({std::vector<double>(8, -50), std::vector<double>(8, -100), std::vector<double>(8, -1e8)});
  for (const auto& impl : select_rows()) {
    const Selected got = run_select(impl, config, logits, &bias, 8);
    const auto row = got.row_weights(0);
    EXPECT_NEAR(std::accumulate(row.begin(), row.end(), 0.0), 0.1337, 5e-5) << impl.name;
    for (float w : row) EXPECT_EQ(w, row[0]) << impl.name;
    for (float w : got.row_weights(1)) EXPECT_LT(w, 1e-22) << impl.name;
    for (float w : got.row_weights(2)) EXPECT_EQ(w, 0.0f) << impl.name;
    EXPECT_EQ(got.num_short, 0) << impl.name;
  }
}

TEST_F(GateCases, Case17_TiesAreBrokenByIndexAtBothLevels) {
  std::vector<double> nine(384, -1.0);
  for (int i : {3, 50, 51, 52, 100, 200, 300, 382, 383}) nine[static_cast<std::size_t>(i)] = 1.0;
  const Buffer two = logits_of({std::vector<double>(384, 0.0), nine});
  const Buffer one = logits_of({nine});
  const Buffer bias = vector_of(std::vector<double>(384, 0.0));
  std::vector<double> level(16, 0.0);
  level[4] = level[5] = level[8] = level[9] = level[12] = level[13] = 2.0;
  const Buffer groups = logits_of({level});
  const Buffer group_bias = vector_of(std::vector<double>(16, 0.0));
  for (GateId id : kAllGates) {
    const GateConfig config = preset(id);
    for (const auto& impl : select_rows()) {
      const Selected got = run_select(impl, config, two, bias_for(config, bias), 8);
      EXPECT_EQ(got.row_ids(0), (Ids{0, 1, 2, 3, 4, 5, 6, 7})) << impl.name << " " << name_of(id);
      EXPECT_EQ(got.row_ids(1), (Ids{3, 50, 51, 52, 100, 200, 300, 382})) << impl.name << " " << name_of(id);
      EXPECT_EQ(run_select(impl, config, one, bias_for(config, bias), 8).ids, got.row_ids(1)) << impl.name;
      // Three equal groups, two kept.
      const GateConfig grouped = preset(id, 4, 2);
      EXPECT_EQ(run_select(impl, grouped, groups, bias_for(grouped, group_bias), 5).ids, (Ids{4, 5, 8, 9, 6}))
          << impl.name << " " << name_of(id);
    }
  }
}

TEST_F(GateCases, Case18_RenormalisationFollowsTheFlag) {
  const Buffer logits = logits_of({{2, 1, 0, -1}});
  GateConfig config = preset(GateId::kG1);
  EXPECT_EQ(config.renorm, Renorm::kNone);
  for (const auto& impl : select_rows()) {
    config.renorm = Renorm::kSum;
    Selected got = run_select(impl, config, logits, nullptr, 2);
    EXPECT_NEAR(got.weights[0], 0.7311, 5e-5) << impl.name;
    EXPECT_NEAR(got.weights[1], 0.2689, 5e-5) << impl.name;
    config.renorm = Renorm::kNone;
    got = run_select(impl, config, logits, nullptr, 2);
    EXPECT_NEAR(got.weights[0], 0.6439, 5e-5) << impl.name;
    EXPECT_NEAR(got.weights[1], 0.2369, 5e-5) << impl.name;
  }
}

}  // namespace
}  // namespace sluice::test
