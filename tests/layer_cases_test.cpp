// Cases from the field that need the whole layer, by their numbers.
#include "sluice/layer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "harness/compare.h"
#include "harness/layer_run.h"

namespace sluice::test {
namespace {

// Identity-like experts: g = 1e4 * x0 saturates silu to itself ... kept simple by reading the factor off the ratio of
// two layers.
TEST(LayerCases, Case90_ScalingFactorAppliesExactlyOnce) {
  for (float factor : {2.5f, 1.5f}) {
    MoeConfig config = small_config();
    config.shared_intermediate = 0;
    config.top_k = 2;
    config.gate.routed_scaling_factor = 1.0f;
    const RandomLayer m = random_layer(config, {.expert_dtype = DType::kF32});
    const Buffer x = random_x(8, 256);
    const std::vector<double> plain = run(make_layer(m, options_for(Precision::kF32, 8)), x.view()).out.to_doubles();
    RandomLayer scaled = random_layer(config, {.expert_dtype = DType::kF32});
    scaled.config.gate.routed_scaling_factor = factor;
    const Layer layer = make_layer(scaled, options_for(Precision::kF32, 8));
    const Outcome by_gate = run(layer, x.view());
    Buffer expected(DType::kF32, {8, 256});
    for (std::size_t i = 0; i < plain.size(); ++i) expected.set(static_cast<std::int64_t>(i), factor * plain[i]);
    EXPECT_LE(worst_row(by_gate.out.view(), expected.view()), 1e-6) << factor;
    // Given weights already carry the factor; the layer must not apply it again.
    Buffer out(DType::kF32, {8, 256});
    GuardedWorkspace workspace(layer.workspace_bytes());
    Ctx ctx;
    ctx.workspace = workspace.span();
    ASSERT_TRUE(
        layer.forward_routed({x.view(), {}, {by_gate.topk_idx.view()}, by_gate.topk_weight.view(), {}}, out.view(), ctx)
            .is_ok());
    EXPECT_TRUE(same_bits(out.view(), by_gate.out.view()));
  }
}

// The shared expert is added unscaled whatever the routed factor is, with one and with two shared experts' width.
TEST(LayerCases, Case92_SharedExpertIsNotWeighted) {
  for (std::int64_t width : {128, 256}) {
    MoeConfig config = small_config();
    config.shared_intermediate = width;
    config.gate.routed_scaling_factor = 2.5f;
    RandomLayer m = random_layer(config, {.expert_dtype = DType::kF32, .shared_dtype = DType::kF32});
    // Routed experts zero: what is left is the shared expert alone.
    fill_constant(m.weights.experts.w2, 0.0);
    const Buffer x = random_x(6, 256);
    const Outcome got = run(make_layer(m, options_for(Precision::kF32, 6)), x.view());
    const std::vector<double> xs = x.to_doubles();
    const std::vector<double> w13 = to_doubles(m.weights.shared.w13);
    const std::vector<double> w2 = to_doubles(m.weights.shared.w2);
    std::vector<double> want(6 * 256, 0.0);
    const std::size_t n = static_cast<std::size_t>(width);
    for (std::size_t t = 0; t < 6; ++t) {
      for (std::size_t i = 0; i < n; ++i) {
        double g = 0.0;
        double u = 0.0;
        for (std::size_t k = 0; k < 256; ++k) {
          g += xs[t * 256 + k] * w13[i * 256 + k];
          u += xs[t * 256 + k] * w13[(n + i) * 256 + k];
        }
        const double a = g / (1.0 + std::exp(-g)) * u;
        for (std::size_t h = 0; h < 256; ++h) want[t * 256 + h] += a * w2[h * n + i];
      }
    }
    Buffer expected(DType::kF32, {6, 256});
    expected.fill_values(want);
    EXPECT_LE(worst_row(got.out.view(), expected.view()), 1e-6) << width;
  }
}

TEST(LayerCases, Case96And97_SlotsThatAreNotHereLeaveNoTrace) {
  MoeConfig config = small_config();
  config.shared_intermediate = 0;
  const RandomLayer m = random_layer(config, {.expert_dtype = DType::kE4M3});
  const Layer layer = make_layer(m, options_for(Precision::kW8A8, 4));
  const Buffer x = random_x(4, 256);
  Buffer ids(DType::kI32, {4, 4});
  Buffer weights(DType::kF32, {4, 4});
  ids.fill_values({0, -1, -1, -1, 3, 5, -1, 2, -1, -1, -1, -1, 9, 1, 2, 3});
  weights.fill_constant(0.5);
  weights.set(1, NAN);  // the weight of an absent slot is not read
  Buffer out(DType::kF32, {4, 256});
  GuardedWorkspace workspace(layer.workspace_bytes());
  workspace.fill(0xFF);
  Ctx ctx;
  ctx.workspace = workspace.span();
  ASSERT_TRUE(layer.forward_routed({x.view(), {}, {ids.view()}, weights.view(), {}}, out.view(), ctx).is_ok());
  for (std::int64_t c = 0; c < 256; ++c) EXPECT_EQ(out.at(2 * 256 + c), 0.0);
  // Token 0 again, with its only expert in the first of one slot: bit-equal to top_k = 1.
  MoeConfig one = config;
  one.top_k = 1;
  Result<Layer> single = Layer::create(one, m.weights, options_for(Precision::kW8A8, 1));
  ASSERT_TRUE(single.is_ok());
  Buffer alone(DType::kF32, {1, 256});
  GuardedWorkspace small(single->workspace_bytes());
  ctx.workspace = small.span();
  ASSERT_TRUE(single
                  ->forward_routed({x.view().slice(0, 1),
                                    {},
                                    {ids.view().slice(0, 1).is_present()
                                         ? TensorView::dense(ids.as<std::int32_t>(), DType::kI32, {1, 1})
                                         : TensorView{}},
                                    TensorView::dense(weights.as<float>(), DType::kF32, {1, 1}),
                                    {}},
                                   alone.view(), ctx)
                  .is_ok());
  EXPECT_TRUE(same_bits(alone.view(), out.view().slice(0, 1)));
}

TEST(LayerCases, Case20_InvalidIdsAreSkippedAndCountedOrRefused) {
  MoeConfig config = small_config();
  config.shared_intermediate = 0;
  const RandomLayer m = random_layer(config, {});
  const Buffer x = random_x(2, 256);
  Buffer ids(DType::kI32, {2, 4});
  Buffer clean(DType::kI32, {2, 4});
  ids.fill_values({3, 16, 1 << 30, -2147483648.0, 1, 2, -7, 5});
  clean.fill_values({3, -1, -1, -1, 1, 2, -1, 5});
  Buffer weights(DType::kF32, {2, 4});
  weights.fill_constant(0.25);
  LayerOptions options = options_for(Precision::kBF16, 2);
  const Layer layer = make_layer(m, options);
  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  Buffer counters(DType::kI64, {kNumCounters});
  counters.fill_constant(0);
  Buffer got(DType::kF32, {2, 256});
  Buffer want(DType::kF32, {2, 256});
  ASSERT_TRUE(
      layer.forward_routed({x.view(), {}, {ids.view()}, weights.view(), counters.view()}, got.view(), ctx).is_ok());
  ASSERT_TRUE(layer.forward_routed({x.view(), {}, {clean.view()}, weights.view(), {}}, want.view(), ctx).is_ok());
  EXPECT_TRUE(same_bits(got.view(), want.view()));
  EXPECT_EQ(counters.at(static_cast<int>(Counter::kInvalidIds)), 4.0);
  options.checked = true;
  Buffer out(DType::kF32, {2, 256});
  const Layer strict = make_layer(m, options);
  const Status status = strict.forward_routed({x.view(), {}, {ids.view()}, weights.view(), {}}, out.view(), ctx);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("16"), std::string::npos) << status.message();
  EXPECT_TRUE(out.rows_untouched(0));
}

// The entry points that bring their own grouping: under `checked` every value is judged, otherwise nothing leads outside.
TEST(LayerCases, BadOffsetsAndCountsAreNamedOrClamped) {
  MoeConfig config = small_config();
  config.shared_intermediate = 0;
  const RandomLayer m = random_layer(config, {});
  LayerOptions options = options_for(Precision::kBF16, 8);
  options.max_rows_per_expert = 2;
  const Buffer x = random_x(32, 256);
  for (bool checked : {false, true}) {
    options.checked = checked;
    const Layer layer = make_layer(m, options);
    GuardedWorkspace workspace(layer.workspace_bytes());
    Ctx ctx;
    ctx.workspace = workspace.span();
    const auto grouped = [&](std::int64_t at, std::int32_t value) {
      std::vector<std::int32_t> offsets(17, 32);
      offsets[0] = 0;
      offsets[static_cast<std::size_t>(at)] = value;
      Buffer y(DType::kBF16, {32, 256});
      const Status status =
          layer.forward_grouped({x.view(), {}}, {TensorView::dense(offsets.data(), DType::kI32, {17})}, y.view(), ctx);
      EXPECT_TRUE(y.guards_intact());
      if (!status.is_ok()) {
        EXPECT_TRUE(y.rows_untouched(0));
      }
      return status;
    };
    const auto masked = [&](std::int32_t value) {
      std::vector<std::int32_t> counts(16, 1);
      counts[3] = value;
      Buffer y(DType::kBF16, {32, 256});
      const Status status =
          layer.forward_masked({x.view(), {}}, TensorView::dense(counts.data(), DType::kI32, {16}), y.view(), ctx);
      EXPECT_TRUE(y.guards_intact());
      if (!status.is_ok()) {
        EXPECT_TRUE(y.rows_untouched(0));
      }
      return status;
    };
    EXPECT_TRUE(grouped(1, 32).is_ok());
    EXPECT_TRUE(masked(2).is_ok());
    for (const auto& [status, words] :
         {std::pair{grouped(1, 500), "expert_offset[1] is 500, expected 0 to 32"},
          std::pair{grouped(1, -5), "expert_offset[1] is -5"},
          std::pair{grouped(9, 3), "expert_offset[9] is 3, expected 32 to 32"},
          std::pair{masked(9), "num_rows[3] is 9, expected 0 to 2"}, std::pair{masked(-1), "num_rows[3] is -1"}}) {
      EXPECT_EQ(status.is_ok(), !checked) << words;
      if (checked) {
        EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
      }
    }
  }
}

TEST(LayerCases, Case102_WeightOnInputIsAppliedOnceAndNowhereElse) {
  MoeConfig config = small_config();
  config.gate = gate_preset(GateId::kG6);
  config.top_k = 1;
  config.weight_on_input = true;
  config.shared_intermediate = 0;
  const RandomLayer m = random_layer(config, {.expert_dtype = DType::kF32});
  const Layer layer = make_layer(m, options_for(Precision::kF32, 1));
  MoeConfig unweighted = config;
  unweighted.weight_on_input = false;
  Result<Layer> plain = Layer::create(unweighted, m.weights, options_for(Precision::kF32, 1));
  ASSERT_TRUE(plain.is_ok());
  Buffer x(DType::kF32, {1, 256});
  x.fill_constant(2.0);
  Buffer half(DType::kF32, {1, 256});
  half.fill_constant(1.0);
  const std::int32_t id = 3;
  const float w = 0.5f;
  const float one = 1.0f;
  const ExpertIds ids{TensorView::dense(&id, DType::kI32, {1, 1})};
  Buffer got(DType::kF32, {1, 256});
  Buffer want(DType::kF32, {1, 256});
  GuardedWorkspace workspace(std::max(layer.workspace_bytes(), plain->workspace_bytes()));
  Ctx ctx;
  ctx.workspace = workspace.span();
  ASSERT_TRUE(layer.forward_routed({x.view(), {}, ids, TensorView::dense(&w, DType::kF32, {1, 1}), {}}, got.view(), ctx)
                  .is_ok());
  ASSERT_TRUE(
      plain->forward_routed({half.view(), {}, ids, TensorView::dense(&one, DType::kF32, {1, 1}), {}}, want.view(), ctx)
          .is_ok());
  EXPECT_TRUE(same_bits(got.view(), want.view()));
  config.top_k = 2;
  EXPECT_EQ(Layer::create(config, m.weights, options_for(Precision::kF32, 1)).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(LayerCases, Case76_DuplicateIdsAreBothCounted) {
  MoeConfig config = small_config();
  config.shared_intermediate = 0;
  config.top_k = 2;
  const RandomLayer m = random_layer(config, {.expert_dtype = DType::kF32});
  const Layer layer = make_layer(m, options_for(Precision::kF32, 1));
  const Buffer x = random_x(1, 256);
  const std::int32_t twice[2] = {5, 5};
  const std::int32_t once[2] = {5, -1};
  const float shares[2] = {0.25f, 0.75f};
  const float all[2] = {1.0f, 0.0f};
  Buffer got(DType::kF32, {1, 256});
  Buffer want(DType::kF32, {1, 256});
  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  const auto view = [](const void* p, DType d) { return TensorView::dense(p, d, {1, 2}); };
  ASSERT_TRUE(
      layer.forward_routed({x.view(), {}, {view(twice, DType::kI32)}, view(shares, DType::kF32), {}}, got.view(), ctx)
          .is_ok());
  ASSERT_TRUE(
      layer.forward_routed({x.view(), {}, {view(once, DType::kI32)}, view(all, DType::kF32), {}}, want.view(), ctx)
          .is_ok());
  EXPECT_LE(worst_row(got.view(), want.view()), 1e-6);
}

// An independent sum of the documented tensors; linear in tokens, and no rank or expert count hidden in it.
TEST(LayerCases, Case84_WorkspaceIsTheSumOfItsTensors) {
  MoeConfig config = small_config();
  const RandomLayer m = random_layer(config, {.expert_dtype = DType::kE4M3});
  const auto bytes_at = [&](std::int64_t tokens) {
    const Layer layer = make_layer(m, options_for(Precision::kW8A8, tokens, 1));
    std::int64_t sum = 0;
    std::int64_t scratch = 0;
    for (const WorkspaceItem& item : layer.workspace_items()) {
      sum += ceil_div(item.bytes, 64) * 64;
      if (item.name.starts_with("scratch")) scratch = item.bytes;
    }
    EXPECT_EQ(layer.workspace_bytes(), sum + 64);
    const std::int64_t rows = tokens * 4;
    const std::int64_t routed = rows * (256 + 2 * 4 + 256 * 2 + 128 + 1 * 4 + 256 * 2);
    const std::int64_t shared = tokens * (256 * 2 + 256 * 2 + 128 * 2 + 256 * 2);  // bf16 beside e4m3 experts
    const std::int64_t routing = tokens * (16 * 4) + rows * 4 * 5 + 17 * 4 + 4;
    const std::int64_t exact = routed + shared + routing + scratch;
    EXPECT_GE(layer.workspace_bytes(), exact);
    EXPECT_LE(layer.workspace_bytes(), exact + 64 * 24);
    return layer.workspace_bytes() - scratch;
  };
  const std::int64_t at_64 = bytes_at(64);
  const std::int64_t at_128 = bytes_at(128);
  const std::int64_t at_256 = bytes_at(256);
  EXPECT_NEAR(static_cast<double>(at_256 - at_128), 2.0 * static_cast<double>(at_128 - at_64), 64.0 * 48);
}

TEST(LayerCases, Case85_TooSmallAWorkspaceIsRefusedWithBothSizes) {
  const RandomLayer m = random_layer(small_config(), {});
  const Layer layer = make_layer(m, options_for(Precision::kBF16, 8));
  const Buffer x = random_x(8, 256);
  Buffer out(DType::kF32, {8, 256});
  std::vector<std::byte> workspace(static_cast<std::size_t>(layer.workspace_bytes() - 1));
  Ctx ctx;
  ctx.workspace = workspace;
  const Status status = layer.forward(x.view(), out.view(), ctx);
  EXPECT_EQ(status.code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_NE(status.message().find(std::to_string(layer.workspace_bytes())), std::string::npos);
  EXPECT_NE(status.message().find(std::to_string(layer.workspace_bytes() - 1)), std::string::npos);
  EXPECT_TRUE(out.rows_untouched(0));
  // All tokens on local experts, the worst case, in exactly that size: run() above does so between guard pages.
  EXPECT_GT(run(layer, x.view()).out.at(0), -HUGE_VAL);
}

TEST(LayerCases, Case81_SmallerRoutingAfterALargerOneReadsNothingStale) {
  const RandomLayer m = random_layer(small_config(), {.expert_dtype = DType::kE4M3});
  const Layer layer = make_layer(m, options_for(Precision::kW8A8, 64));
  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  for (std::int64_t tokens : {64, 9, 1, 40, 0, 3}) {
    const Buffer x = random_x(tokens, 256, static_cast<std::uint64_t>(tokens));
    Buffer out(DType::kF32, {tokens, 256});
    ASSERT_TRUE(layer.forward(x.view(), out.view(), ctx).is_ok());
    if (tokens == 0) continue;
    EXPECT_TRUE(same_bits(out.view(), run(layer, x.view()).out.view())) << tokens;
  }
}

TEST(LayerCases, Case4_RowsOfNaNAndInfinityDoNotTouchOthers) {
  const RandomLayer m = random_layer(small_config(), {.expert_dtype = DType::kE4M3});
  const Layer layer = make_layer(m, options_for(Precision::kW8A8, 3));
  const Buffer clean = random_x(3, 256);
  Buffer dirty = clean.clone();
  for (std::int64_t c = 0; c < 256; ++c) {
    dirty.set(256 + c, NAN);
    dirty.set(512 + c, INFINITY);
  }
  const Outcome want = run(layer, clean.view());
  const Outcome got = run(layer, dirty.view());
  EXPECT_TRUE(same_bits(got.out.view().slice(0, 1), want.out.view().slice(0, 1)));
  for (std::int64_t i = 0; i < 12; ++i) {
    EXPECT_GE(got.topk_idx.at(i), 0.0);
    EXPECT_LT(got.topk_idx.at(i), 16.0);
    EXPECT_TRUE(std::isfinite(got.topk_weight.at(i)));
  }
  EXPECT_GE(got.counters.at(static_cast<int>(Counter::kNonFiniteTokens)), 1.0);
}

}  // namespace
}  // namespace sluice::test
