// The layer at precision w8a8 with activation scales that are powers of two, against stages put together by hand: the
// format must reach the pack and the activation of the routed and of the shared expert, at every entry point.
#include <gtest/gtest.h>

#include "harness/impls.h"
#include "harness/layer_run.h"
#include "sluice/stage/grouped_gemm.h"
#include "sluice/stage/pack.h"
#include "sluice/stage/swiglu_quant.h"

namespace sluice::test {
namespace {

constexpr std::int64_t kTokens = 20;

// Runs the stage's reference, or what a layer would choose.
template <class Args>
void run_stage(std::span<const Impl<Args>> impls, const Args& args, bool reference) {
  ASSERT_TRUE(check(args)) << check(args).message();
  const Impl<Args>& impl = reference ? impls.back() : on_cpu(impls).front();
  const Machine machine = Machine::detect_cpu(1);
  std::vector<std::byte> scratch(
      static_cast<std::size_t>(impl.scratch_bytes == nullptr ? 0 : impl.scratch_bytes(args, machine)));
  Ctx ctx;
  ctx.workspace = scratch;
  ctx.num_threads = 1;
  ASSERT_TRUE(impl.run(args, ctx));
}

// y [R,H] of rows x [R,H] that are grouped already, with the format given to each of the two quantisations.
Buffer ffn_by_hand(const FfnWeights& w, const TensorView& x, const RowGroups& groups, ScaleFormat rows_format,
                   ScaleFormat a_format, bool reference) {
  const std::int64_t R = x.shape[0], H = x.shape[1], I = w.w2.shape[2];
  Buffer rows(DType::kE4M3, {R, H}), rows_scale(DType::kF32, {ceil_div(H, 128), R});
  Buffer h(DType::kBF16, {R, 2 * I});
  Buffer a(DType::kE4M3, {R, I}), a_scale(DType::kF32, {ceil_div(I, 128), R});
  Buffer y(DType::kBF16, {R, H});
  const pack::Args pack{.x = x, .rows = rows.view(), .rows_scale = rows_scale.view(), .scale_format = rows_format};
  run_stage(pack::impls(), pack, reference);
  grouped_gemm::Args up;
  up.a = rows.view();
  up.a_scale = rows_scale.view();
  up.groups = groups;
  up.w = w.w13;
  up.w_scale = w.w13_scale;
  up.part_rows = I;
  up.out = h.view();
  run_stage(grouped_gemm::impls(), up, reference);
  swiglu_quant::Args act;
  act.h = h.view();
  act.groups = groups;
  act.a = a.view();
  act.a_scale = a_scale.view();
  act.scale_format = a_format;
  run_stage(swiglu_quant::impls(), act, reference);
  grouped_gemm::Args down;
  down.a = a.view();
  down.a_scale = a_scale.view();
  down.groups = groups;
  down.w = w.w2;
  down.w_scale = w.w2_scale;
  down.out = y.view();
  run_stage(grouped_gemm::impls(), down, reference);
  return y;
}

MoeConfig ue8m0_config() {
  MoeConfig config = small_config();
  config.activation_scale = ScaleFormat::kUe8m0;
  return config;
}

// Rows 0 to 7 are of expert 0, the others of the last.
std::vector<std::int32_t> two_experts(std::int64_t num_experts) {
  std::vector<std::int32_t> offsets(static_cast<std::size_t>(num_experts + 1), 8);
  offsets.front() = 0;
  offsets.back() = kTokens;
  return offsets;
}

Buffer grouped(const RandomLayer& m, const TensorView& x, const ExpertOffsets& offsets) {
  LayerOptions options = options_for(Precision::kW8A8, 1);
  options.max_rows = kTokens;
  const Layer layer = make_layer(m, options);
  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  Buffer y(DType::kBF16, {kTokens, m.config.hidden});
  const Status status = layer.forward_grouped({x, {}}, offsets, y.view(), ctx);
  EXPECT_TRUE(status.is_ok()) << status.message();
  return y;
}

// No token is routed: the shared expert alone.
Buffer shared_alone(const RandomLayer& m, const TensorView& x) {
  const Layer layer = make_layer(m, options_for(Precision::kW8A8, kTokens));
  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  Buffer ids(DType::kI32, {kTokens, m.config.top_k});
  ids.fill_constant(-1);
  Buffer weight(DType::kF32, {kTokens, m.config.top_k});
  weight.fill_constant(1);
  Buffer out(DType::kBF16, {kTokens, m.config.hidden});
  const Status status = layer.forward_routed({x, {}, {ids.view()}, weight.view(), {}}, out.view(), ctx);
  EXPECT_TRUE(status.is_ok()) << status.message();
  return out;
}

TEST(LayerUe8m0, EqualsTheStagesPutTogetherByHand) {
  constexpr ScaleFormat kF32 = ScaleFormat::kF32;
  constexpr ScaleFormat kUe8m0 = ScaleFormat::kUe8m0;
  const MoeConfig config = ue8m0_config();
  std::vector<std::int32_t> offsets = two_experts(config.num_experts);
  const ExpertOffsets expert_offset{TensorView::dense(offsets.data(), DType::kI32, {config.num_experts + 1})};
  const RowGroups groups = RowGroups::contiguous(expert_offset);
  for (bool exact : {true, false}) {
    SCOPED_TRACE(exact ? "exact values, references" : "real values");
    const RandomLayer m =
        random_layer(config, {.expert_dtype = DType::kE4M3, .shared_dtype = DType::kE4M3, .exact = exact});
    Buffer x(DType::kBF16, {kTokens, config.hidden});
    exact ? x.fill_integers(3, -4, 4) : x.fill_normal(3);
    const Buffer y = grouped(m, x.view(), expert_offset);
    const Buffer shared = shared_alone(m, x.view());
    EXPECT_TRUE(same_bits(y.view(), ffn_by_hand(m.weights.experts, x.view(), groups, kUe8m0, kUe8m0, exact).view()));
    EXPECT_TRUE(same_bits(shared.view(),
                          ffn_by_hand(m.weights.shared, x.view(), RowGroups::whole(), kUe8m0, kUe8m0, exact).view()));
    if (exact) continue;
    // Neither quantisation may be left out.
    for (const auto& [rows, a] : {std::pair(kF32, kUe8m0), {kUe8m0, kF32}}) {
      EXPECT_FALSE(same_bits(y.view(), ffn_by_hand(m.weights.experts, x.view(), groups, rows, a, false).view()));
      EXPECT_FALSE(
          same_bits(shared.view(), ffn_by_hand(m.weights.shared, x.view(), RowGroups::whole(), rows, a, false).view()));
    }
  }
}

TEST(LayerUe8m0, DiffersFromF32ScalesAndOnlyAtW8A8) {
  const Buffer x = random_x(kTokens, small_config().hidden);
  for (Precision precision : {Precision::kW8A8, Precision::kW8A16, Precision::kF32}) {
    const RandomLayer f32 = random_layer(small_config(), {.expert_dtype = DType::kE4M3, .shared_dtype = DType::kE4M3});
    const RandomLayer ue8m0 =
        random_layer(ue8m0_config(), {.expert_dtype = DType::kE4M3, .shared_dtype = DType::kE4M3});
    const Outcome want = run(make_layer(f32, options_for(precision, kTokens)), x.view());
    const Outcome got = run(make_layer(ue8m0, options_for(precision, kTokens)), x.view());
    EXPECT_TRUE(same_bits(got.topk_idx.view(), want.topk_idx.view()));
    EXPECT_EQ(static_cast<bool>(same_bits(got.out.view(), want.out.view())), precision != Precision::kW8A8);
    if (precision != Precision::kW8A8) continue;
    const Outcome truth = run(make_layer(f32, options_for(Precision::kF32, kTokens)), x.view());
    // Neither is the other's oracle: the errors of two roundings add. Each is held to the w8a8 budget
    // (docs/numerics.md).
    EXPECT_LE(worst_row(want.out.view(), truth.out.view()), 7e-2);
    EXPECT_LE(worst_row(got.out.view(), truth.out.view()), 7e-2);
  }
}

// Weight scales that are no powers of two stay what the file says: with 1.5 every y is 1.5 times that of 1, exactly (an
// entry of w2 per row, 4 significant bits of a and 2 of the factor), where a dropped mantissa would give 1 and a
// rounded one 2.
TEST(LayerUe8m0, Case40_WeightScalesAreUsedAsTheyAre) {
  const MoeConfig config = ue8m0_config();
  std::vector<std::int32_t> offsets = two_experts(config.num_experts);
  const ExpertOffsets expert_offset{TensorView::dense(offsets.data(), DType::kI32, {config.num_experts + 1})};
  const RandomLayer m = random_layer(config, {.expert_dtype = DType::kE4M3, .exact = true});
  Buffer x(DType::kBF16, {kTokens, config.hidden});
  x.fill_integers(3, -4, 4);
  fill_constant(m.weights.experts.w2_scale, 1.0);
  const Buffer plain = grouped(m, x.view(), expert_offset);
  fill_constant(m.weights.experts.w2_scale, 1.5);
  const Buffer scaled = grouped(m, x.view(), expert_offset);
  std::int64_t num_nonzero = 0;
  for (std::int64_t i = 0; i < kTokens * config.hidden; ++i) {
    ASSERT_EQ(scaled.at(i), 1.5 * plain.at(i)) << i;
    num_nonzero += plain.at(i) != 0.0;
  }
  EXPECT_GT(num_nonzero, kTokens * config.hidden / 8);
}

}  // namespace
}  // namespace sluice::test
