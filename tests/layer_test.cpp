// The layer: against the composed reference, against itself in every way the contract promises equality, and its
// refusals.
#include "sluice/layer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <thread>

#include "harness/allocations.h"
#include "harness/compare.h"
#include "harness/layer_run.h"
#include "sluice/stage/pack.h"

namespace sluice::test {
namespace {

struct Variant {
  const char* name;
  Precision precision;
  DType expert_dtype;
  DType shared_dtype;
  ScaleFormat activation_scale = ScaleFormat::kF32;
  bool row_scales = false;
};
constexpr Variant kVariants[] = {
    {"w8a8", Precision::kW8A8, DType::kE4M3, DType::kE4M3},
    {"w8a8_ue8m0", Precision::kW8A8, DType::kE4M3, DType::kE4M3, ScaleFormat::kUe8m0},
    {"w8a8_bf16_shared", Precision::kW8A8, DType::kE4M3, DType::kBF16},
    {"w8a8_rows", Precision::kW8A8, DType::kE4M3, DType::kE4M3, ScaleFormat::kF32, true},
    {"w8a8_rows_ue8m0", Precision::kW8A8, DType::kE4M3, DType::kE4M3, ScaleFormat::kUe8m0, true},
    {"w8a8_i8", Precision::kW8A8, DType::kI8, DType::kI8},
    {"w8a8_i8_bf16_shared", Precision::kW8A8, DType::kI8, DType::kBF16},
    {"w8a8_i8_e4m3_shared", Precision::kW8A8, DType::kI8, DType::kE4M3},
    {"w8a16", Precision::kW8A16, DType::kE4M3, DType::kE4M3},
    {"w8a16_i8", Precision::kW8A16, DType::kI8, DType::kI8},
    {"f32_of_i8", Precision::kF32, DType::kI8, DType::kI8},
    {"bf16", Precision::kBF16, DType::kBF16, DType::kBF16},
    {"f32_of_e4m3", Precision::kF32, DType::kE4M3, DType::kBF16},
    {"f32_of_bf16", Precision::kF32, DType::kBF16, DType::kBF16},
    {"f32", Precision::kF32, DType::kF32, DType::kF32},
};
void PrintTo(const Variant& v, std::ostream* os) { *os << v.name; }

class LayerVariants : public testing::TestWithParam<Variant> {
 protected:
  RandomLayer model(MoeConfig config, bool exact = false) const {
    config.activation_scale = GetParam().activation_scale;
    // acc * s of a row scale that is no power of two is rounded to fp32 and then to bf16; the reference rounds once.
    if (exact && GetParam().row_scales) config.activation_scale = ScaleFormat::kUe8m0;
    return random_layer(config, {.expert_dtype = GetParam().expert_dtype,
                                 .shared_dtype = GetParam().shared_dtype,
                                 .exact = exact,
                                 .row_scales = GetParam().row_scales});
  }
  LayerOptions options(std::int64_t max_tokens, int num_threads = 2) const {
    return options_for(GetParam().precision, max_tokens, num_threads);
  }
  LayerOptions reference(std::int64_t max_tokens) const {
    LayerOptions o = options(max_tokens);
    o.selection["*"].forced = "reference";
    return o;
  }
};
INSTANTIATE_TEST_SUITE_P(Paths, LayerVariants, testing::ValuesIn(kVariants),
                         [](const auto& p) { return std::string(p.param.name); });

// Every rounding point sees an exactly representable sum, so the order of additions cannot matter: bitwise.
TEST_P(LayerVariants, ExactValuesEqualTheComposedReferenceBitwise) {
  MoeConfig config = small_config();
  config.gate.routed_scaling_factor = 1.0f;
  const RandomLayer m = model(config, true);
  Buffer x(DType::kBF16, {33, config.hidden});
  x.fill_integers(3, -4, 4);
  // The same routing for both, so that only the expert path is compared.
  const Outcome want = run(make_layer(m, reference(33)), x.view());
  const Layer layer = make_layer(m, options(33));
  Buffer out(DType::kF32, {33, config.hidden});
  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  ASSERT_TRUE(layer.forward_routed({x.view(), {}, {want.topk_idx.view()}, want.topk_weight.view(), {}}, out.view(), ctx)
                  .is_ok());
  EXPECT_TRUE(same_bits(out.view(), want.out.view()));
}

// Real values: the GEMMs differ from the reference by fp32 summation. In f32 that is all; a bf16 rounding flips for
// about one element in a thousand by 2^-8, and a flipped group maximum requantises its 128 values.
TEST_P(LayerVariants, RealValuesAreCloseToTheComposedReference) {
  const MoeConfig config = small_config();
  const RandomLayer m = model(config);
  const Buffer x = random_x(24, config.hidden);
  const Outcome got = run(make_layer(m, options(24)), x.view());
  const Outcome want = run(make_layer(m, reference(24)), x.view());
  EXPECT_TRUE(same_bits(got.topk_idx.view(), want.topk_idx.view()));
  const double bound = GetParam().precision == Precision::kF32    ? 1e-6
                       : GetParam().precision == Precision::kW8A8 ? 1e-2
                                                                  : 1e-3;
  EXPECT_LE(worst_row(got.out.view(), want.out.view()), bound);
  EXPECT_TRUE(m.guards_intact());
}

TEST_P(LayerVariants, SameBitsForAnyThreadCountBatchAndRun) {
  const MoeConfig config = small_config();
  const RandomLayer m = model(config);
  const Buffer x = random_x(40, config.hidden);
  const std::vector<std::byte> before = x.bytes();
  const Outcome first = run(make_layer(m, options(40, 1)), x.view());
  for (int threads : {1, 2, 7}) {
    const Outcome again = run(make_layer(m, options(40, threads)), x.view());
    EXPECT_TRUE(same_bits(again.out.view(), first.out.view())) << threads << " threads";
    EXPECT_TRUE(same_bits(again.topk_idx.view(), first.topk_idx.view())) << threads << " threads";
    EXPECT_TRUE(same_bits(again.topk_weight.view(), first.topk_weight.view())) << threads << " threads";
  }
  const Layer layer = make_layer(m, options(64));
  for (std::int64_t chunk : {1, 13, 39}) {
    for (std::int64_t begin = 0; begin < 40; begin += chunk) {
      const std::int64_t count = std::min<std::int64_t>(chunk, 40 - begin);
      const Outcome part = run(layer, x.view().slice(begin, count));
      EXPECT_TRUE(same_bits(part.out.view(), first.out.view().slice(begin, count)))
          << "tokens " << begin << "+" << count;
    }
  }
  EXPECT_TRUE(x.unchanged_since(before));
}

TEST_P(LayerVariants, TheFourEntryPointsAgree) {
  const MoeConfig config = small_config();
  const RandomLayer m = model(config);
  const std::int64_t tokens = 21;
  LayerOptions o = options(tokens);
  o.max_rows_per_expert = 30;
  o.max_rows = 512;
  o.routed_only = true;
  const Layer layer = make_layer(m, o);
  const Buffer x = random_x(tokens, config.hidden);
  const Outcome whole = run(layer, x.view());

  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  workspace.fill(0xFF);
  Buffer routed(DType::kF32, {tokens, config.hidden});
  ASSERT_TRUE(
      layer.forward_routed({x.view(), {}, {whole.topk_idx.view()}, whole.topk_weight.view(), {}}, routed.view(), ctx)
          .is_ok());
  EXPECT_TRUE(same_bits(routed.view(), whole.out.view()));

  // Group the rows by hand, run them without a plan, and weigh them by hand in fp32: the same bits again.
  const auto* ids = whole.topk_idx.as<std::int32_t>();
  const std::int64_t slots = config.top_k;
  const DataPath path = *data_path(GetParam().precision, GetParam().expert_dtype);
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int64_t> row_of(static_cast<std::size_t>(tokens * slots), -1);
  std::vector<std::int64_t> token_of;
  std::vector<std::int32_t> counts;
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    for (std::int64_t i = 0; i < tokens * slots; ++i) {
      if (ids[i] != e) continue;
      row_of[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(token_of.size());
      token_of.push_back(i / slots);
    }
    counts.push_back(static_cast<std::int32_t>(token_of.size()) - offsets.back());
    offsets.push_back(static_cast<std::int32_t>(token_of.size()));
  }
  const std::int64_t rows = static_cast<std::int64_t>(token_of.size());
  ASSERT_EQ(rows, tokens * slots);
  Buffer grouped_x(DType::kBF16, {rows + 3, config.hidden});  // three rows nobody owns stay poison
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < config.hidden; ++c)
      grouped_x.set(r * config.hidden + c, x.at(token_of[static_cast<std::size_t>(r)] * config.hidden + c));
  }
  const ExpertOffsets expert_offset{TensorView::dense(offsets.data(), DType::kI32, {config.num_experts + 1})};
  Buffer grouped_y(path.y, {rows + 3, config.hidden});
  const Status grouped = layer.forward_grouped({grouped_x.view(), {}}, expert_offset, grouped_y.view(), ctx);
  ASSERT_TRUE(grouped.is_ok()) << grouped.message();
  EXPECT_TRUE(grouped_y.rows_untouched(rows));
  const auto* weight = whole.topk_weight.as<float>();
  Buffer by_hand(DType::kF32, {tokens, config.hidden});
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t c = 0; c < config.hidden; ++c) {
      float acc = 0.0f;
      for (std::int64_t s = 0; s < slots; ++s) {
        const std::int64_t r = row_of[static_cast<std::size_t>(t * slots + s)];
        acc = std::fma(weight[t * slots + s], static_cast<float>(grouped_y.at(r * config.hidden + c)), acc);
      }
      by_hand.set(t * config.hidden + c, acc);
    }
  }
  EXPECT_TRUE(same_bits(by_hand.view(), whole.out.view()));

  // The padded layout.
  const std::int64_t per_expert = 25;
  Buffer masked_x(DType::kBF16, {config.num_experts * per_expert, config.hidden});
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    ASSERT_LE(counts[static_cast<std::size_t>(e)], per_expert);
    for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(e)]; ++i) {
      for (std::int64_t c = 0; c < config.hidden; ++c) {
        masked_x.set((e * per_expert + i) * config.hidden + c,
                     grouped_x.at((offsets[static_cast<std::size_t>(e)] + i) * config.hidden + c));
      }
    }
  }
  Buffer masked_y(path.y, {config.num_experts * per_expert, config.hidden});
  const TensorView num_rows = TensorView::dense(counts.data(), DType::kI32, {config.num_experts});
  const Status masked = layer.forward_masked({masked_x.view(), {}}, num_rows, masked_y.view(), ctx);
  ASSERT_TRUE(masked.is_ok()) << masked.message();
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    const std::int64_t count = counts[static_cast<std::size_t>(e)];
    EXPECT_TRUE(same_bits(masked_y.view().slice(e * per_expert, count),
                          grouped_y.view().slice(offsets[static_cast<std::size_t>(e)], count)));
    EXPECT_TRUE(is_poison(masked_y.view().slice(e * per_expert + count, per_expert - count))) << "expert " << e;
  }
}

TEST_P(LayerVariants, ForwardAllocatesNothing) {
  const MoeConfig config = small_config();
  const RandomLayer m = model(config);
  // One thread: oneTBB keeps pools of task objects of its own, which it fills when it likes.
  const Layer layer = make_layer(m, options(16, 1));
  const Buffer x = random_x(16, config.hidden);
  Buffer out(DType::kF32, {16, config.hidden});
  std::vector<std::byte> workspace(static_cast<std::size_t>(layer.workspace_bytes()));
  Ctx ctx;
  ctx.workspace = workspace;
  ASSERT_TRUE(layer.forward(x.view(), out.view(), ctx).is_ok());
  const std::int64_t before = g_num_allocations;
  const Status status = layer.forward(x.view(), out.view(), ctx);
  EXPECT_EQ(g_num_allocations - before, 0);
  EXPECT_TRUE(status.is_ok());
}

TEST_P(LayerVariants, ZeroTokensSucceedWithNullPointers) {
  const RandomLayer m = model(small_config());
  const Layer layer = make_layer(m, options(4));
  Ctx ctx;
  const TensorView empty = TensorView::dense(nullptr, DType::kBF16, {0, 256});
  const TensorView ids = TensorView::dense(nullptr, DType::kI32, {0, 4});
  const TensorView weights = TensorView::dense(nullptr, DType::kF32, {0, 4});
  EXPECT_TRUE(layer.forward(empty, empty, ctx).is_ok());
  EXPECT_TRUE(layer.forward_routed({empty, {}, {ids}, weights, {}}, empty, ctx).is_ok());
}

// ---------------------------------------------------------------------------------------------------------

TEST(Layer, EveryGateRunsEndToEndAsTheReferenceDoes) {
  for (int id = 0; id < 10; ++id) {
    MoeConfig config = small_config();
    config.gate = gate_preset(static_cast<GateId>(id));
    if (config.gate.group_score != GroupScore::kNone) {
      config.gate.n_group = 4;
      config.gate.topk_group = 2;
    }
    if (static_cast<GateId>(id) == GateId::kG6) {
      config.top_k = 1;
      config.weight_on_input = true;
    }
    config.has_shared_gate = id % 2 == 0;
    if (static_cast<GateId>(id) == GateId::kG5) config.activation = {ActivationKind::kGptOss, 7.0f, 1.702f};
    if (static_cast<GateId>(id) == GateId::kG9) config.activation = {ActivationKind::kSiluClamped, 10.0f, 0.0f};
    const RandomLayer m = random_layer(config, {.expert_bias = static_cast<GateId>(id) == GateId::kG5});
    const Buffer x = random_x(19, config.hidden, 11);
    LayerOptions reference = options_for(Precision::kF32, 19);
    reference.selection["*"].forced = "reference";
    const Outcome got = run(make_layer(m, options_for(Precision::kF32, 19)), x.view());
    const Outcome want = run(make_layer(m, reference), x.view());
    EXPECT_TRUE(same_bits(got.topk_idx.view(), want.topk_idx.view())) << "G" << id + 1;
    EXPECT_LE(worst_row(got.out.view(), want.out.view()), 1e-6) << "G" << id + 1;
  }
}

TEST(Layer, OutIsRoundedOnceToBf16) {
  const RandomLayer m = random_layer(small_config(), {});
  const Layer layer = make_layer(m, options_for(Precision::kBF16, 9));
  const Buffer x = random_x(9, 256);
  const Outcome f32 = run(layer, x.view());
  const Outcome bf16 = run(layer, x.view(), DType::kBF16);
  Buffer rounded(DType::kBF16, {9, 256});
  rounded.fill_values(f32.out.to_doubles());
  EXPECT_TRUE(same_bits(bf16.out.view(), rounded.view()));
}

TEST(Layer, PitchedInputAndOutputGiveTheSameBits) {
  const RandomLayer m = random_layer(small_config(), {});
  const Layer layer = make_layer(m, options_for(Precision::kBF16, 9));
  const Buffer x = random_x(9, 256);
  const Outcome dense = run(layer, x.view());
  Buffer wide(DType::kBF16, {9, 256}, {.row_pitch_elems = 263, .offset_elems = 1});
  wide.fill_values(x.to_doubles());
  Buffer out(DType::kF32, {9, 256}, {.row_pitch_elems = 301, .offset_elems = 3});
  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  ASSERT_TRUE(layer.forward(wide.view(), out.view(), ctx).is_ok());
  EXPECT_TRUE(same_bits(out.view(), dense.out.view()));
  EXPECT_TRUE(out.guards_intact());
}

TEST(Layer, F32InputIsNotRoundedOnTheF32Path) {
  const RandomLayer m = random_layer(small_config(), {});
  const Layer layer = make_layer(m, options_for(Precision::kF32, 5));
  const Buffer fine = random_x(5, 256, 7, DType::kF32);
  Buffer coarse(DType::kF32, {5, 256});
  Buffer as_bf16(DType::kBF16, {5, 256});
  as_bf16.fill_values(fine.to_doubles());
  coarse.fill_values(as_bf16.to_doubles());
  EXPECT_TRUE(same_bits(run(layer, coarse.view()).out.view(), run(layer, as_bf16.view()).out.view()));
  EXPECT_FALSE(same_bits(run(layer, fine.view()).out.view(), run(layer, coarse.view()).out.view()));
}

// Rows that arrive in e4m3 with their scales are the rows the layer would have made itself, in either stride order of
// the scales.
TEST(Layer, QuantisedInputEqualsQuantisingInside) {
  MoeConfig config = small_config();
  config.shared_intermediate = 0;
  const RandomLayer m = random_layer(config, {.expert_dtype = DType::kE4M3});
  const Layer layer = make_layer(m, options_for(Precision::kW8A8, 12));
  const Buffer x = random_x(12, 256);
  const Outcome want = run(layer, x.view());
  Buffer x_q(DType::kE4M3, {12, 256});
  for (bool row_major : {false, true}) {
    Buffer scale(DType::kF32, row_major ? std::vector<std::int64_t>{12, 2} : std::vector<std::int64_t>{2, 12});
    const TensorView scale_view = row_major ? scale.transposed() : scale.view();
    Ctx ctx;
    ASSERT_TRUE(pack::impls().back().run({.x = x.view(), .rows = x_q.view(), .rows_scale = scale_view}, ctx).is_ok());
    Buffer out(DType::kF32, {12, 256});
    GuardedWorkspace workspace(layer.workspace_bytes());
    ctx.workspace = workspace.span();
    const Status status = layer.forward_routed(
        {x_q.view(), scale_view, {want.topk_idx.view()}, want.topk_weight.view(), {}}, out.view(), ctx);
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_TRUE(same_bits(out.view(), want.out.view()));
  }
}

TEST(Layer, OneLayerServesThreadsWithTheirOwnWorkspaces) {
  const RandomLayer m = random_layer(small_config(), {.expert_dtype = DType::kE4M3});
  const Layer layer = make_layer(m, options_for(Precision::kW8A8, 24));
  std::vector<Buffer> inputs;
  std::vector<Outcome> want;
  for (int i = 0; i < 4; ++i) {
    inputs.push_back(random_x(24 - i, 256, static_cast<std::uint64_t>(i)));
    want.push_back(run(layer, inputs.back().view()));
  }
  std::atomic<int> num_equal{0};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 5; ++repeat) {
        if (same_bits(run(layer, inputs[i].view()).out.view(), want[i].out.view())) ++num_equal;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(num_equal, 20);
}

// The sum over the balanced shards of the experts is the whole layer: each rank skips what it does not hold.
TEST(Layer, ShardsOfTheExpertsAddUpToTheWhole) {
  MoeConfig config = small_config();
  config.num_experts = 15;
  config.gate = gate_preset(GateId::kG4);
  config.shared_intermediate = 0;
  const RandomLayer m = random_layer(config, {.expert_dtype = DType::kF32});
  const Buffer x = random_x(17, 256);
  const Outcome whole = run(make_layer(m, options_for(Precision::kF32, 17)), x.view());
  std::vector<double> sum(static_cast<std::size_t>(17 * 256), 0.0);
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    const ExpertRange range = experts_of_rank(15, 4, rank);
    MoeConfig shard = config;
    shard.first_expert = range.begin;
    shard.num_local = range.end - range.begin;
    LayerWeights weights = m.weights;
    weights.experts.w13 = weights.experts.w13.slice(range.begin, shard.num_local);
    weights.experts.w2 = weights.experts.w2.slice(range.begin, shard.num_local);
    Result<Layer> layer = Layer::create(shard, weights, options_for(Precision::kF32, 17));
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    const Outcome part = run(*layer, x.view());
    const std::vector<double> values = part.out.to_doubles();
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
  Buffer summed(DType::kF32, {17, 256});
  summed.fill_values(sum);
  EXPECT_LE(worst_row(summed.view(), whole.out.view()), 1e-6);
}

TEST(Layer, ReportsNameEveryStageAndWhyOthersDeclined) {
  const RandomLayer m = random_layer(small_config(), {});
  const Layer layer = make_layer(m, options_for(Precision::kBF16, 8));
  std::vector<std::string> stages;
  for (const StageReport& report : layer.stages()) {
    stages.push_back(report.stage);
    EXPECT_FALSE(report.impl.empty());
    EXPECT_FALSE(report.tensors.empty());
    for (const Declined& d : report.declined) EXPECT_FALSE(d.reason.empty()) << report.stage << " " << d.name;
  }
  EXPECT_EQ(stages,
            (std::vector<std::string>{"gate.logits", "gate.select", "route", "pack", "up: grouped_gemm", "swiglu_quant",
                                      "down: grouped_gemm", "shared pack: pack", "shared up: grouped_gemm",
                                      "shared swiglu_quant: swiglu_quant", "shared down: grouped_gemm", "combine"}));
}

}  // namespace
}  // namespace sluice::test
