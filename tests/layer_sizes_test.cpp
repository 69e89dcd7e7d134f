// The layer at sizes nobody ships: one of everything, odd widths, the limits of S and E, groups that are no powers of
// two. Small-integer layers make the paths exact, so the CPU's bits must be the references' bits.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "harness/compare.h"
#include "harness/layer_run.h"

namespace sluice::test {
namespace {

struct Size {
  std::int64_t experts, slots, hidden, intermediate, shared, n_group, topk_group, tokens;
};
constexpr Size kSizes[] = {
    {1, 1, 1, 1, 0, 1, 1, 1},         {1, 1, 1, 1, 1, 1, 1, 3},          {2, 2, 127, 129, 127, 1, 1, 5},
    {9, 4, 129, 127, 1, 3, 2, 7},     {15, 6, 1000, 136, 257, 5, 3, 4},  {32, 32, 33, 31, 0, 1, 1, 3},
    {1024, 32, 32, 16, 0, 16, 7, 2},  {1023, 3, 7, 5, 3, 11, 2, 9},      {105, 7, 64, 64, 64, 7, 5, 9},
    {36, 5, 128, 384, 128, 9, 4, 17}, {160, 6, 3420 / 4, 46, 0, 8, 3, 2}};

MoeConfig config_of(const Size& s) {
  MoeConfig config;
  config.hidden = s.hidden;
  config.intermediate = s.intermediate;
  config.num_experts = s.experts;
  config.top_k = s.slots;
  config.shared_intermediate = s.shared;
  config.has_shared_gate = s.shared % 2 == 1;
  config.gate = gate_preset(GateId::kG3);
  config.gate.n_group = s.n_group;
  config.gate.topk_group = s.topk_group;
  if (s.n_group == 1) config.gate.group_score = GroupScore::kNone;
  return config;
}

struct Path {
  Precision precision;
  DType experts, shared;
};
constexpr Path kPaths[] = {{Precision::kW8A8, DType::kE4M3, DType::kE4M3},
                           {Precision::kW8A8, DType::kE4M3, DType::kBF16},
                           {Precision::kW8A16, DType::kE4M3, DType::kF32},
                           {Precision::kBF16, DType::kBF16, DType::kBF16},
                           {Precision::kF32, DType::kF32, DType::kE4M3}};

TEST(LayerSizes, EverySizeHasTheReferencesBits) {
  for (const Size& s : kSizes) {
    for (const Path& path : kPaths) {
      SCOPED_TRACE(fmt::format("E{} S{} H{} I{} shared {} groups {}/{} T{} {} {} {}", s.experts, s.slots, s.hidden,
                               s.intermediate, s.shared, s.topk_group, s.n_group, s.tokens, to_string(path.precision),
                               to_string(path.experts), to_string(path.shared)));
      const RandomLayer m =
          random_layer(config_of(s), {.expert_dtype = path.experts, .shared_dtype = path.shared, .exact = true});
      LayerOptions options = options_for(path.precision, s.tokens, 1);
      options.selection["*"].forced = "reference";
      options.selection["gate.logits"].forced = "cpu";  // its reference rounds once, and the weights would follow
      Buffer x(DType::kBF16, {s.tokens, s.hidden});
      x.fill_integers(3, -2, 2);
      const Outcome want = run(make_layer(m, options), x.view());
      for (const int threads : {2, 37}) {
        const Outcome got = run(make_layer(m, options_for(path.precision, s.tokens, threads)), x.view());
        EXPECT_TRUE(same_bits(got.topk_idx.view(), want.topk_idx.view())) << threads << " threads";
        EXPECT_TRUE(same_bits(got.topk_weight.view(), want.topk_weight.view())) << threads << " threads";
        // The scales of quantised rows are no powers of two: over several blocks of H or I their sums round.
        if (path.precision == Precision::kW8A8 && std::max(s.hidden, s.intermediate) > kScaleBlock) {
          EXPECT_LE(worst_row(got.out.view(), want.out.view()), 1e-2) << threads << " threads";
        } else {
          EXPECT_TRUE(same_bits(got.out.view(), want.out.view())) << threads << " threads";
        }
      }
      EXPECT_TRUE(m.guards_intact());
    }
  }
}

}  // namespace
}  // namespace sluice::test
