// Selection: every implementation against the reference bit by bit, and both against a second definition in double.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "gate/runs.h"
#include "harness/targets.h"

namespace sluice::test {
namespace {

class GateSelect : public GateTest {};

const Impl<gate::SelectArgs>& reference() { return gate::select_impls().back(); }

enum class Fill { kNormal, kTies, kSpecial, kBits };
constexpr Fill kFills[] = {Fill::kNormal, Fill::kTies, Fill::kSpecial, Fill::kBits};

void fill(const Buffer& buffer, Fill kind, std::uint64_t seed) {
  const double inf = std::numeric_limits<double>::infinity();
  const double specials[] = {std::nan(""), inf, -inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, 88.8, -103.9, 500.0};
  Rng rng(seed);
  switch (kind) {
    case Fill::kNormal: fill_normal(buffer.view(), seed, 3.0); break;
    case Fill::kTies: fill_integers(buffer.view(), seed, -2, 2); break;
    case Fill::kBits: fill_random_bits(buffer.view(), seed); break;
    case Fill::kSpecial:
      fill_with(buffer.view(),
                [&](std::int64_t) { return rng.integer(0, 2) == 0 ? specials[rng.integer(0, 10)] : rng.normal(); });
      break;
  }
}

struct Grouping {
  std::int64_t n_group;
  std::int64_t topk_group;
};

std::vector<Grouping> groupings(std::int64_t num_experts) {
  std::vector<Grouping> all;
  for (std::int64_t n :
       {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{8}, num_experts / 2, num_experts}) {
    if (n < 1 || num_experts % n != 0) continue;
    for (std::int64_t kept : {std::int64_t{1}, (n + 1) / 2, n}) all.push_back({n, kept});
  }
  return all;
}

// Outputs that many runs share: poisoned before each, their guards judged once at the end.
struct Outputs {
  Outputs(std::int64_t num_tokens, std::int64_t num_slots)
      : idx(DType::kI32, {num_tokens, num_slots}, {.row_pitch_elems = num_slots + 3, .offset_elems = 1}),
        weight(DType::kF32, {num_tokens, num_slots}, {.row_pitch_elems = num_slots + 5, .offset_elems = 3}),
        counters(DType::kI64, {kNumCounters}) {}
  void run(const Impl<gate::SelectArgs>& impl, const GateConfig& config, const Buffer& logits, const Buffer* bias,
           int threads) {
    idx.poison();
    weight.poison();
    counters.fill_constant(1);
    const gate::SelectArgs args{config,       logits.view(), bias != nullptr ? bias->view() : TensorView{},
                                {idx.view()}, weight.view(), counters.view()};
    EXPECT_TRUE(gate::check(args).is_ok()) << gate::check(args).message();
    EXPECT_TRUE(run_row(impl, args, threads).is_ok());
  }
  void expect_legal(std::int64_t num_experts) const {
    const std::int64_t slots = idx.view().shape[1];
    for (std::int64_t t = 0; t < idx.view().shape[0]; ++t) {
      std::set<double> seen;
      for (std::int64_t s = 0; s < slots; ++s) {
        const double id = idx.at(t * slots + s);
        EXPECT_TRUE(id >= 0 && id < static_cast<double>(num_experts) && seen.insert(id).second)
            << "token " << t << " id " << id;
        EXPECT_FALSE(std::isnan(weight.at(t * slots + s))) << "token " << t << " slot " << s;
      }
    }
  }
  bool guards_intact() const { return idx.guards_intact() && weight.guards_intact() && counters.guards_intact(); }
  Buffer idx;       // [T,S]
  Buffer weight;    // [T,S]
  Buffer counters;  // [kCounters]
};

// Runs every gate over the sizes, implementation by implementation; returns how many configurations were legal.
std::int64_t sweep(const std::vector<std::int64_t>& expert_counts, std::int64_t num_tokens) {
  std::int64_t num_run = 0;
  std::uint64_t seed = 1;
  for (std::int64_t num_experts : expert_counts) {
    Buffer logits(DType::kF32, {num_tokens, num_experts}, {.row_pitch_elems = num_experts + 3, .offset_elems = 1});
    Buffer bias(DType::kF32, {num_experts}, {.offset_elems = 2});
    for (std::int64_t slots : {std::int64_t{1}, std::int64_t{7}, std::min<std::int64_t>(num_experts, 32)}) {
      Outputs want(num_tokens, slots);
      Outputs got(num_tokens, slots);
      for (GateId id : kAllGates) {
        for (const Grouping& grouping : groupings(num_experts)) {
          GateConfig config = preset(id, grouping.n_group, grouping.topk_group, 2.5f);
          // Presets fix one renormalisation; both kinds are to meet all scores.
          if (seed % 3 == 0) config.renorm = static_cast<Renorm>(seed / 3 % 3);
          if (!validate(config, num_experts, slots).is_ok()) continue;
          fill(logits, kFills[seed % 4], seed);
          fill(bias, kFills[seed / 4 % 3], seed + 7);
          ++seed;
          const auto logits_before = logits.bytes();
          want.run(reference(), config, logits, bias_for(config, bias), 1);
          want.expect_legal(num_experts);
          for (const auto& impl : select_rows()) {
            got.run(impl, config, logits, bias_for(config, bias), static_cast<int>(seed % 3) + 1);
            SCOPED_TRACE(std::string(impl.name) + " " + name_of(id) + " E=" + std::to_string(num_experts) +
                         " S=" + std::to_string(slots) + " groups " + std::to_string(grouping.n_group) + "/" +
                         std::to_string(grouping.topk_group));
            EXPECT_TRUE(same_bits(got.idx.view(), want.idx.view()));
            EXPECT_TRUE(same_bits(got.weight.view(), want.weight.view()));
            EXPECT_TRUE(same_bits(got.counters.view(), want.counters.view()));
          }
          EXPECT_TRUE(logits.bytes() == logits_before);
          ++num_run;
          if (testing::Test::HasFailure()) return num_run;
        }
      }
      EXPECT_TRUE(want.guards_intact());
      EXPECT_TRUE(got.guards_intact());
    }
    EXPECT_TRUE(logits.guards_intact());
    EXPECT_TRUE(bias.guards_intact());
  }
  return num_run;
}

#ifndef SLUICE_TEST_ON_GPU
TEST_F(GateSelect, TableEndsInTheReference) {
  ASSERT_GE(select_rows().size(), 2u);
  EXPECT_EQ(select_rows().back().name, "reference");
  EXPECT_EQ(select_rows()[0].name, "cpu");
}
#endif

TEST_F(GateSelect, EveryImplementationHasTheReferencesBits) {
  EXPECT_GT(sweep({1, 2, 3, 8, 31, 32, 33, 64, 72, 160, 255, 256, 257, 384, 511, 512, 896, 1024}, 3), 3000);
}

#ifndef SLUICE_TEST_ON_GPU
TEST_F(GateSelect, EveryTargetHasTheReferencesBits) {
  for (std::int64_t target : targets_under_test()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const ForcedTarget forced(target);
    EXPECT_GT(sweep({1, 6, 33, 72, 256}, 2), 500);
  }
}
#endif

// A second definition, in double and by counting rather than sorting: rank(i) = how many candidates come before i.
struct Definition {
  std::vector<std::int32_t> ids;
  std::vector<double> weights;
};

Definition define(const GateConfig& config, const std::vector<double>& logit, const std::vector<double>& bias,
                  std::int64_t slots) {
  const std::int64_t n = static_cast<std::int64_t>(logit.size());
  std::vector<double> score(logit.size());
  double total = 0;
  for (double l : logit) total += std::exp(l);
  for (std::size_t i = 0; i < logit.size(); ++i) {
    switch (config.score) {
      case Score::kSoftmax: score[i] = std::exp(logit[i]) / total; break;
      case Score::kSigmoid: score[i] = 1 / (1 + std::exp(-logit[i])); break;
      case Score::kSqrtSoftplus: score[i] = std::sqrt(std::log1p(std::exp(logit[i]))); break;
      case Score::kLogit: score[i] = logit[i]; break;
    }
  }
  std::vector<double> choice = score;
  if (config.has_score_bias) std::transform(score.begin(), score.end(), bias.begin(), choice.begin(), std::plus<>());
  const auto before = [](const std::vector<double>& v, std::int64_t a, std::int64_t b) {
    const double x = v[static_cast<std::size_t>(a)];
    const double y = v[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  const std::int64_t size = n / config.n_group;
  std::vector<double> group;
  for (std::int64_t g = 0; g < config.n_group; ++g) {
    std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    const auto top = std::max_element(members.begin(), members.end());
    double value = *top;
    *top = -1e300;
    if (config.group_score == GroupScore::kTop2Sum) value += *std::max_element(members.begin(), members.end());
    group.push_back(value);
  }
  std::vector<bool> kept(logit.size());
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t rank = 0;
    for (std::int64_t g = 0; g < config.n_group; ++g) rank += before(group, g, i / size) ? 1 : 0;
    kept[static_cast<std::size_t>(i)] = config.n_group == 1 || rank < config.topk_group;
  }
  Definition out{std::vector<std::int32_t>(static_cast<std::size_t>(slots)), {}};
  for (std::int64_t i = 0; i < n; ++i) {
    if (!kept[static_cast<std::size_t>(i)]) continue;
    std::int64_t rank = 0;
    for (std::int64_t j = 0; j < n; ++j) rank += kept[static_cast<std::size_t>(j)] && before(choice, j, i) ? 1 : 0;
    if (rank < slots) out.ids[static_cast<std::size_t>(rank)] = static_cast<std::int32_t>(i);
  }
  double chosen_exp = 0;
  for (std::int32_t id : out.ids) chosen_exp += std::exp(logit[static_cast<std::size_t>(id)]);
  double sum = 0;
  for (std::int32_t id : out.ids) {
    const std::size_t i = static_cast<std::size_t>(id);
    double w = score[i];
    if (config.weight_rule == WeightRule::kSoftmaxOfChosen) w = std::exp(logit[i]) / chosen_exp;
    if (config.weight_rule == WeightRule::kSigmoidOfLogit) w = 1 / (1 + std::exp(-logit[i]));
    out.weights.push_back(w);
    sum += w;
  }
  const bool either = config.scale_rule == ScaleRule::kUnlessRenorm;
  const bool renormalise = config.renorm != Renorm::kNone && !(either && slots == 1);
  for (double& w : out.weights) {
    if (renormalise) w /= config.renorm == Renorm::kSum ? sum + 1e-20 : std::max(sum, 1e-12);
    if (!either || !renormalise) w *= config.routed_scaling_factor;
  }
  return out;
}

TEST_F(GateSelect, MeansWhatTheRulesSay) {
  std::uint64_t seed = 100;
  std::int64_t num_run = 0;
  for (std::int64_t num_experts : {1, 8, 24, 64, 160, 257, 384}) {
    for (GateId id : kAllGates) {
      for (const Grouping& grouping : {Grouping{1, 1}, Grouping{2, 1}, Grouping{8, 3}, Grouping{8, 8}}) {
        for (std::int64_t slots : {1, 2, 6, 16}) {
          GateConfig config = preset(id, grouping.n_group, grouping.topk_group, 2.5f);
          if (id == GateId::kG2 && seed % 2 == 0) config.renorm = Renorm::kSum;
          if (!validate(config, num_experts, slots).is_ok()) continue;
          // A shuffled ladder: no two logits closer than 8/E, so that fp32 and double agree on the order.
          std::vector<double> ladder(static_cast<std::size_t>(num_experts));
          Rng rng(++seed);
          for (std::size_t i = 0; i < ladder.size(); ++i) {
            ladder[i] = 8.0 * (static_cast<double>(i) + 0.5) / static_cast<double>(num_experts) - 4.0;
            std::swap(ladder[i], ladder[static_cast<std::size_t>(rng.integer(0, static_cast<std::int64_t>(i)))]);
          }
          const Buffer logits = logits_of({ladder});
          Buffer bias(DType::kF32, {num_experts});
          bias.fill_normal(seed, 0.05);
          const Definition want = define(config, logits.to_doubles(), bias.to_doubles(), slots);
          for (const auto& impl : select_rows()) {
            const Selected got = run_select(impl, config, logits, bias_for(config, bias), slots);
            ASSERT_EQ(got.ids, want.ids) << impl.name << " " << name_of(id) << " E=" << num_experts << " S=" << slots;
            for (std::int64_t s = 0; s < slots; ++s) {
              const std::size_t i = static_cast<std::size_t>(s);
              // Some tens of roundings: E/32 + 5 in the softmax sum, S in the renormalisation, 3 ulp of the score.
              EXPECT_NEAR(got.weights[i], want.weights[i], 4e-6 * std::fabs(want.weights[i]))
                  << impl.name << " " << name_of(id) << " E=" << num_experts << " slot " << s;
            }
            EXPECT_EQ(got.num_short, 0);
          }
          ++num_run;
        }
      }
    }
  }
  EXPECT_GT(num_run, 400);
}

TEST_F(GateSelect, BatchAndThreadsAreInvisible) {
  constexpr std::int64_t kTokens = 67;
  constexpr std::int64_t kExperts = 160;
  constexpr std::int64_t kSlots = 6;
  Buffer logits(DType::kF32, {kTokens, kExperts});
  logits.fill_normal(3, 2.0);
  Buffer bias(DType::kF32, {kExperts});
  bias.fill_normal(4, 0.1);
  for (GateId id : kAllGates) {
    const GateConfig config = preset(id, 8, 3, 16.0f);
    for (const auto& impl : select_rows()) {
      const Selected all = run_select(impl, config, logits, bias_for(config, bias), kSlots);
      for (int threads : {2, 3, 8}) {
        EXPECT_TRUE(run_select(impl, config, logits, bias_for(config, bias), kSlots, threads).bits == all.bits);
      }
      for (std::int64_t t : {std::int64_t{0}, std::int64_t{15}, std::int64_t{16}, kTokens - 1}) {
        Buffer one(DType::kF32, {1, kExperts});
        one.fill_with([&](std::int64_t e) { return logits.at(t * kExperts + e); });
        const Selected alone = run_select(impl, config, one, bias_for(config, bias), kSlots);
        EXPECT_EQ(alone.ids, all.row_ids(t)) << impl.name << " token " << t;
        for (std::int64_t s = 0; s < kSlots; ++s) {
          EXPECT_EQ(std::bit_cast<std::uint32_t>(alone.weights[static_cast<std::size_t>(s)]),
                    std::bit_cast<std::uint32_t>(all.row_weights(t)[static_cast<std::size_t>(s)]));
        }
      }
    }
  }
}

TEST_F(GateSelect, TiesGoToTheLowerIndex) {
  // Nine equal best over both sides of the cut, and a negative zero that equals a positive one.
  GateConfig config = preset(GateId::kG5);
  Buffer logits =
      logits_of({{1, 7, 7, 0, 7, 7, 7, 7, 7, 7, 7, 2}, {-1, -0.0, 0.0, -0.0, 0.0, -1, -1, -1, -1, -1, -1, -1}});
  for (const auto& impl : select_rows()) {
    const Selected got = run_select(impl, config, logits, nullptr, 3);
    EXPECT_EQ(got.row_ids(0), (std::vector<std::int32_t>{1, 2, 4})) << impl.name;
    EXPECT_EQ(got.row_ids(1), (std::vector<std::int32_t>{1, 2, 3})) << impl.name;
  }
  // Groups 0, 2 and 3 tie in their top-2 sums (5+1, 3+3, 4+2); the two lowest are kept.
  config = preset(GateId::kG5, 4, 2);
  config.group_score = GroupScore::kTop2Sum;
  const Buffer grouped = logits_of({{5, 1, 0, 1, 1, 1, 3, 3, 0, 4, 2, 2}});
  for (const auto& impl : select_rows()) {
    EXPECT_EQ(run_select(impl, config, grouped, nullptr, 4).ids, (std::vector<std::int32_t>{0, 6, 7, 1})) << impl.name;
  }
}

TEST_F(GateSelect, CountersAreOptionalAndAddedTo) {
  const Buffer logits = logits_of({{std::nan(""), 1, 2}, {0, 1, 2}, {-std::numeric_limits<double>::infinity(), 1, 2}});
  Buffer idx(DType::kI32, {3, 3});
  Buffer weight(DType::kF32, {3, 3});
  for (const auto& impl : select_rows()) {
    gate::SelectArgs args{preset(GateId::kG8), logits.view(), {}, {idx.view()}, weight.view(), {}};
    ASSERT_TRUE(gate::check(args).is_ok());
    EXPECT_TRUE(run_row(impl, args, 1).is_ok()) << impl.name;
    EXPECT_EQ(run_select(impl, args.gate, logits, nullptr, 3).num_short, 2) << impl.name;
    EXPECT_EQ(run_select(impl, args.gate, logits, nullptr, 2).num_short, 0) << impl.name;
  }
}

}  // namespace
}  // namespace sluice::test
