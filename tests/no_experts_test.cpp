// A rank without experts (E = 3 over 4 ranks): every stage succeeds, reads no weight and writes no row, and the layer is the
// gate and the shared expert.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/every_way.h"
#include "harness/layer_run.h"
#include "sluice/stage/combine.h"
#include "sluice/stage/grouped_gemm.h"
#include "sluice/stage/pack.h"
#include "sluice/stage/route.h"
#include "sluice/stage/swiglu_quant.h"

namespace sluice::test {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kT = 5, kS = 2, kE = 3, kHidden = 200, kInter = 136;

struct Way {
  const char* name;
  Precision precision;
  DType weights;
  bool row_scales;
};
constexpr Way kWays[] = {
    {"blocks", Precision::kW8A8, DType::kE4M3, false}, {"channels", Precision::kW8A8, DType::kE4M3, true},
    {"int8", Precision::kW8A8, DType::kI8, true},      {"w8a16", Precision::kW8A16, DType::kE4M3, false},
    {"bf16", Precision::kBF16, DType::kBF16, false},   {"f32", Precision::kF32, DType::kF32, false}};

// The plan of kT tokens whose experts are all elsewhere, as every implementation of route gives it.
struct EmptyPlan {
  Buffer ids{DType::kI32, {kT, kS}}, expert_offset{DType::kI32, {1}}, row_token{DType::kI32, {kT * kS}},
      row_slot{DType::kI32, {kT * kS}}, slot_row{DType::kI32, {kT, kS}}, num_rows{DType::kI32, {1}};

  RoutePlan view() const {
    return {{expert_offset.view()}, row_token.view(), row_slot.view(), slot_row.view(), num_rows.view()};
  }
  EmptyPlan() {
    ids.fill_integers(11, -1, kE - 1);
    for (std::int64_t first : {0, 2, 3}) {
      const route::Args args{
          .topk_idx = {ids.view()}, .num_experts = kE, .first_expert = first, .plan = view(), .counters = {}};
      expect_same_every_way(on_cpu(route::impls()), args, {&ids},
                            {&expert_offset, &row_token, &row_slot, &slot_row, &num_rows});
    }
  }
};

TEST(NoExperts, Case114RouteFindsNoRows) {
  const EmptyPlan plan;
  EXPECT_EQ(plan.num_rows.at(0), 0);
  EXPECT_EQ(plan.expert_offset.at(0), 0);
  for (std::int64_t i = 0; i < kT * kS; ++i) EXPECT_EQ(plan.slot_row.at(i), -1);
  EXPECT_TRUE(plan.row_token.rows_untouched(0));
  EXPECT_TRUE(plan.row_slot.rows_untouched(0));
}

TEST(NoExperts, Case114PackLeavesEveryRow) {
  const EmptyPlan plan;
  Buffer x(DType::kBF16, {kT, kHidden});
  x.fill_normal(3);
  for (const Way& way : kWays) {
    const DataPath path = data_path(way.precision, way.weights, way.row_scales).value();
    Buffer rows(path.rows, {kT * kS, kHidden}), scale(DType::kF32, {path.scale_blocks(kHidden), kT * kS});
    pack::Args args;
    args.x = x.view();
    args.row_token = plan.row_token.view();
    args.row_slot = plan.row_slot.view();
    args.slot_row = plan.slot_row.view();
    args.num_rows = plan.num_rows.view();
    args.rows = rows.view();
    if (is_quantised(path.rows)) args.rows_scale = scale.view();
    expect_same_every_way(on_cpu(pack::impls()), args, {&x}, {&rows, &scale});
    EXPECT_TRUE(rows.rows_untouched(0)) << way.name;
    EXPECT_TRUE(scale.rows_untouched(0)) << way.name;
  }
}

// Rows there is room for, and no expert that owns one: by offsets, by counts (then there are none), and with T = 0.
TEST(NoExperts, Case114TheGemmsAndTheActivationTouchNothing) {
  Buffer offset(DType::kI32, {1}), counts(DType::kI32, {0});
  offset.fill_constant(0);
  for (const Way& way : kWays) {
    const DataPath path = data_path(way.precision, way.weights, way.row_scales).value();
    const bool scaled = is_quantised(way.weights);
    for (const std::int64_t num_rows : {kT * kS, std::int64_t{0}}) {
      for (const bool masked : {false, true}) {
        if (masked && num_rows > 0) continue;
        const RowGroups groups = masked ? RowGroups::masked(counts.view(), 0) : RowGroups::contiguous({offset.view()});
        SCOPED_TRACE(std::string(way.name) + (masked ? " masked" : " contiguous"));
        Buffer rows(path.rows, {num_rows, kHidden}), rows_scale(DType::kF32, {path.scale_blocks(kHidden), num_rows});
        Buffer h(path.h, {num_rows, 2 * kInter});
        Buffer a(path.a, {num_rows, kInter}), a_scale(DType::kF32, {path.scale_blocks(kInter), num_rows});
        grouped_gemm::Args up;
        up.a = rows.view();
        if (is_quantised(path.rows)) up.a_scale = rows_scale.view();
        up.groups = groups;
        up.w = TensorView::dense(nullptr, way.weights, {0, 2 * kInter, kHidden});
        if (scaled && way.row_scales) up.w_scale = TensorView::dense(nullptr, DType::kF32, {0, 2 * kInter, 1});
        if (scaled && !way.row_scales) up.w_scale = TensorView::dense(nullptr, DType::kF32, {0, 4, 2});
        up.bias = TensorView::dense(nullptr, DType::kF32, {0, 2 * kInter});
        up.part_rows = kInter;
        up.out = h.view();
        expect_same_every_way(on_cpu(grouped_gemm::impls()), up, {&rows, &rows_scale}, {&h});
        swiglu_quant::Args act;
        act.h = h.view();
        act.groups = groups;
        act.a = a.view();
        if (is_quantised(path.a)) act.a_scale = a_scale.view();
        expect_same_every_way(on_cpu(swiglu_quant::impls()), act, {&h}, {&a, &a_scale});
        EXPECT_TRUE(h.rows_untouched(0));
        EXPECT_TRUE(a.rows_untouched(0));
        EXPECT_TRUE(a_scale.rows_untouched(0));
      }
    }
  }
}

TEST(NoExperts, Case114CombineGivesZeroOrTheSharedExpertAlone) {
  const EmptyPlan plan;
  Buffer y(DType::kBF16, {kT * kS, kHidden}), weight(DType::kF32, {kT, kS}), shared(DType::kF32, {kT, kHidden});
  Buffer out(DType::kF32, {kT, kHidden});
  weight.fill_uniform(2, 0, 1);
  shared.fill_normal(4);
  combine::Args args;
  args.y = y.view();
  args.slot_row = plan.slot_row.view();
  args.topk_weight = weight.view();
  args.out = out.view();
  expect_same_every_way(on_cpu(combine::impls()), args, {&y, &weight}, {&out});
  for (const double v : out.to_doubles()) ASSERT_EQ(v, 0.0);
  args.shared = shared.view();
  expect_same_every_way(on_cpu(combine::impls()), args, {&y, &weight, &shared}, {&out});
  EXPECT_EQ(out.to_doubles(), shared.to_doubles());
}

// ---- the layer ----

MoeConfig config_of(std::int64_t num_local, bool shared) {
  MoeConfig config;
  config.hidden = kHidden;
  config.intermediate = kInter;
  config.num_experts = kE;
  config.top_k = kS;
  config.gate = gate_preset(GateId::kG4);
  config.shared_intermediate = shared ? 72 : 0;
  config.first_expert = num_local == kNoExperts ? kE : 0;
  config.num_local = num_local;
  return config;
}

RandomLayer layer_of(const Way& way, std::int64_t num_local, bool shared) {
  return random_layer(config_of(num_local, shared), {.expert_dtype = way.weights,
                                                     .shared_dtype = way.weights,
                                                     .row_scales = way.row_scales && way.weights == DType::kE4M3});
}

TEST(NoExperts, Case114TheLayerIsItsGateAndItsSharedExpert) {
  for (const Way& way : kWays) {
    for (const bool shared : {false, true}) {
      for (const char* impl : {"cpu", "reference"}) {
        SCOPED_TRACE(std::string(way.name) + (shared ? ", shared, " : ", ") + impl);
        LayerOptions options = options_for(way.precision, kT);
        options.selection["*"].forced = impl;
        const RandomLayer none = layer_of(way, kNoExperts, shared);
        ASSERT_EQ(none.weights.experts.w13.shape[0], 0);
        EXPECT_EQ(num_local(none.config), 0);
        const Layer layer = make_layer(none, options);
        const Buffer x = random_x(kT, kHidden);
        const Outcome got = run(layer, x.view());
        // The same layer with all experts, and every slot sent nowhere.
        RandomLayer all = layer_of(way, 0, shared);
        all.weights.w_gate = none.weights.w_gate;
        all.weights.shared = none.weights.shared;
        const Layer whole = make_layer(all, options);
        const Outcome routed = run(whole, x.view());
        EXPECT_TRUE(same_bits(got.topk_idx.view(), routed.topk_idx.view()));
        EXPECT_TRUE(same_bits(got.topk_weight.view(), routed.topk_weight.view()));
        Buffer nowhere(DType::kI32, {kT, kS}), want(DType::kF32, {kT, kHidden});
        nowhere.fill_constant(-1);
        GuardedWorkspace workspace(whole.workspace_bytes());
        workspace.fill(0xFF);
        Ctx ctx;
        ctx.workspace = workspace.span();
        const Status status =
            whole.forward_routed({x.view(), {}, {nowhere.view()}, routed.topk_weight.view(), {}}, want.view(), ctx);
        ASSERT_TRUE(status.is_ok()) << status.message();
        EXPECT_TRUE(same_bits(got.out.view(), want.view()));
        const auto values = got.out.to_doubles();
        EXPECT_EQ(std::any_of(values.begin(), values.end(), [](double v) { return v != 0.0; }), shared);
      }
    }
  }
}

TEST(NoExperts, Case114EveryEntryPointTakesNoTokensAndNoRows) {
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    for (const std::int64_t max_tokens : {kT, std::int64_t{0}}) {
      LayerOptions options = options_for(way.precision, max_tokens);
      options.max_rows_per_expert = 7;
      options.checked = true;
      const RandomLayer m = layer_of(way, kNoExperts, true);
      const Layer layer = make_layer(m, options);
      GuardedWorkspace workspace(layer.workspace_bytes());
      Ctx ctx;
      ctx.workspace = workspace.span();
      const auto null = [](DType dtype, std::initializer_list<std::int64_t> shape) {
        return TensorView::dense(nullptr, dtype, shape);
      };
      const TensorView x = null(DType::kBF16, {0, kHidden}), out = null(DType::kF32, {0, kHidden});
      EXPECT_TRUE(layer.forward(x, out, ctx).is_ok());
      EXPECT_TRUE(layer.forward_routed({x, {}, {null(DType::kI32, {0, kS})}, null(DType::kF32, {0, kS}), {}}, out, ctx)
                      .is_ok());
      const TensorView y = null(data_path(way.precision, m.weights.experts)->y, {0, kHidden});
      Buffer offset(DType::kI32, {1}), counts(DType::kI32, {0});
      offset.fill_constant(0);
      EXPECT_TRUE(layer.forward_grouped({x, {}}, {offset.view()}, y, ctx).is_ok());
      Status masked = layer.forward_masked({x, {}}, counts.view(), y, ctx);
      EXPECT_TRUE(masked.is_ok()) << masked.message();
      if (max_tokens == 0) continue;
      // Rows that no expert owns are not touched; the padded layout has none at all.
      const Buffer rows = random_x(4, kHidden);
      Buffer untouched(y.dtype, {4, kHidden});
      EXPECT_TRUE(layer.forward_grouped({rows.view(), {}}, {offset.view()}, untouched.view(), ctx).is_ok());
      EXPECT_TRUE(untouched.rows_untouched(0));
      masked = layer.forward_masked({rows.view(), {}}, counts.view(), untouched.view(), ctx);
      EXPECT_THAT(masked.message(), HasSubstr("4 rows are not a multiple of L = 0 experts"));
      EXPECT_TRUE(untouched.rows_untouched(0));
    }
  }
}

TEST(NoExperts, WeightsAndConfigAgree) {
  const RandomLayer none = layer_of(kWays[0], kNoExperts, false);
  const RandomLayer all = layer_of(kWays[0], 0, false);
  const LayerOptions options = options_for(Precision::kW8A8, kT);
  EXPECT_THAT(Layer::create(none.config, all.weights, options).status().message(), HasSubstr("w13"));
  EXPECT_THAT(Layer::create(all.config, none.weights, options).status().message(), HasSubstr("w13"));
  LayerWeights missing = none.weights;
  missing.experts.w13 = {};
  EXPECT_THAT(Layer::create(none.config, missing, options).status().message(), HasSubstr("w13"));
  // The ranks agree on dtypes; one that has no expert too.
  LayerWeights other = none.weights;
  other.experts.w13.dtype = DType::kBF16;
  EXPECT_THAT(Layer::create(none.config, other, options).status().message(), HasSubstr("both must be of one dtype"));
  for (const std::int64_t first : {0, 1, 3}) {
    MoeConfig config = none.config;
    config.first_expert = first;
    EXPECT_TRUE(Layer::create(config, none.weights, options).is_ok()) << first;
  }
  MoeConfig beyond = none.config;
  beyond.first_expert = kE + 1;
  EXPECT_THAT(Layer::create(beyond, none.weights, options).status().message(), HasSubstr("local experts [4, 4)"));
  MoeConfig negative = none.config;
  negative.num_local = -2;
  EXPECT_THAT(validate(negative).message(), HasSubstr("num_local = -2"));
}

}  // namespace
}  // namespace sluice::test
