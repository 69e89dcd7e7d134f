// A layer that takes one kernel for up and the activation has the bits of one that takes two, at every entry point, needs no
// memory for h where it never makes it, and says what it took and why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "gpu/gpu_layer.h"

namespace sluice::test {
namespace {

using testing::HasSubstr;

class LayerFusedCuda : public GpuTest {};

constexpr const char* kVariantNames[] = {"w8a8", "w8a8_ue8m0", "w8a8_bf16_shared"};

Layer layer_of(const RandomLayer& m, std::int64_t max_tokens, const char* form, bool routed_only = false) {
  LayerOptions options = gpu_options(Precision::kW8A8, max_tokens);
  options.routed_only = routed_only;
  options.max_rows_per_expert = routed_only ? 20 : 0;
  options.selection["up_swiglu_quant"].forced = form;
  Result<Layer> layer = make_gpu_layer(m, options);
  EXPECT_TRUE(layer.is_ok()) << layer.status().message();
  return std::move(layer).value();
}

const StageReport* report_of(const Layer& layer, std::string_view stage) {
  for (const StageReport& report : layer.stages()) {
    if (report.stage == stage) return &report;
  }
  return nullptr;
}
bool books_h(const Layer& layer) {
  for (const WorkspaceItem& item : layer.workspace_items()) {
    if (item.name.find("h[R,2I]") != std::string::npos) return true;
  }
  return false;
}

TEST_F(LayerFusedCuda, HasTheBitsOfTheTwoStages) {
  for (const char* name : kVariantNames) {
    for (const Activation& activation : {Activation{}, Activation{ActivationKind::kSiluClamped, 0.5f, 0.0f},
                                         Activation{ActivationKind::kGptOss, 7.0f, 1.7f}}) {
      MoeConfig config = small_config();
      config.activation = activation;
      config.intermediate = 320;
      const RandomLayer m = model_of(variant(name), config);
      const Layer fused = layer_of(m, 700, "");
      const Layer composed = layer_of(m, 700, "composed");
      for (std::int64_t tokens : {1, 2, 9, 100, 512, 513, 700}) {
        const Buffer x = random_x(tokens, config.hidden, static_cast<std::uint64_t>(tokens));
        EXPECT_TRUE(same_bits(run_on_gpu(fused, x.view()).out.view(), run_on_gpu(composed, x.view()).out.view()))
            << name << ", " << describe(activation) << ", T = " << tokens;
      }
    }
  }
}

TEST_F(LayerFusedCuda, MaskedRowsHaveTheBitsOfTheTwoStages) {
  MoeConfig config = small_config();
  config.shared_intermediate = 0;
  const RandomLayer m = model_of(variant("w8a8"), config);
  const std::int64_t experts = config.num_experts, per_expert = 20;
  Buffer x(DType::kBF16, {experts * per_expert, config.hidden});
  x.fill_normal(5);
  Buffer counts(DType::kI32, {experts});
  counts.fill_integers(3, 0, per_expert);
  std::vector<Buffer> outs;
  for (const char* form : {"", "composed"}) {
    const Layer layer = layer_of(m, 8, form, true);
    const Twin x_twin(x), counts_twin(counts);
    outs.emplace_back(DType::kBF16, std::vector<std::int64_t>{x.view().shape[0], config.hidden});
    const Twin out(outs.back());
    const GpuWorkspace workspace(layer);
    const Status status = layer.forward_masked({x_twin.view(), {}}, counts_twin.view(), out.view(), workspace.ctx());
    ASSERT_TRUE(status.is_ok()) << status.message();
    out.fetch();
    workspace.expect_guards();
  }
  EXPECT_TRUE(same_bits(outs[0].view(), outs[1].view()));
}

// Route and pack in one kernel: few slots take it, more do not, in one layer; plan, counters and rows of strange ids too.
TEST_F(LayerFusedCuda, FewTokensHaveTheBitsOfRouteAndPack) {
  MoeConfig config = small_config();
  const RandomLayer m = model_of(variant("w8a8"), config);
  const auto create = [&](const char* form) {
    LayerOptions options = gpu_options(Precision::kW8A8, 64);
    options.selection["route_pack"].forced = form;
    Result<Layer> layer = make_gpu_layer(m, options);
    EXPECT_TRUE(layer.is_ok()) << layer.status().message();
    return std::move(layer).value();
  };
  const Layer fused = create("");
  const Layer composed = create("composed");
  ASSERT_NE(report_of(fused, "route+pack: route_pack"), nullptr);
  EXPECT_EQ(report_of(fused, "route+pack: route_pack")->impl, "cuda-fused");
  EXPECT_EQ(report_of(composed, "route+pack: route_pack")->impl, "composed");
  for (std::int64_t tokens : {1, 2, 3, 4, 5, 64}) {
    const Buffer x = random_x(tokens, config.hidden, static_cast<std::uint64_t>(tokens));
    EXPECT_TRUE(same_bits(run_on_gpu(fused, x.view()).out.view(), run_on_gpu(composed, x.view()).out.view()))
        << "T = " << tokens;
    Buffer ids(DType::kI32, {tokens, config.top_k});
    ids.fill_integers(static_cast<std::uint64_t>(tokens), -2, config.num_experts);
    Buffer weights(DType::kF32, {tokens, config.top_k});
    weights.fill_uniform(9, 0.1, 1.0);
    std::vector<Buffer> outs, counts;
    for (const Layer* layer : {&fused, &composed}) {
      outs.emplace_back(DType::kF32, std::vector<std::int64_t>{tokens, config.hidden});
      counts.emplace_back(DType::kI64, std::vector<std::int64_t>{kNumCounters});
      counts.back().fill_constant(0);
      const Twin x_twin(x), id_twin(ids), weight_twin(weights), out(outs.back()), counters(counts.back());
      const GpuWorkspace workspace(*layer);
      const Status status = layer->forward_routed(
          {x_twin.view(), {}, {id_twin.view()}, weight_twin.view(), counters.view()}, out.view(), workspace.ctx());
      ASSERT_TRUE(status.is_ok()) << status.message();
      out.fetch();
      counters.fetch();
      workspace.expect_guards();
    }
    EXPECT_TRUE(same_bits(outs[0].view(), outs[1].view())) << "T = " << tokens;
    EXPECT_EQ(counts[0].bytes(), counts[1].bytes()) << "T = " << tokens;
  }
}

TEST_F(LayerFusedCuda, WhereItIsAlwaysTakenThereIsNoH) {
  MoeConfig config = small_config();
  config.shared_intermediate = 0;
  const RandomLayer m = model_of(variant("w8a8"), config);
  const Layer few = layer_of(m, 64, "");
  const StageReport* const report = report_of(few, "up+swiglu_quant: up_swiglu_quant");
  ASSERT_NE(report, nullptr);
  EXPECT_EQ(report->impl, "cuda-fused");
  EXPECT_FALSE(report->configuration.empty());
  EXPECT_EQ(report_of(few, "up: grouped_gemm"), nullptr);
  EXPECT_FALSE(books_h(few));
  // More rows than it is the better one for: both are there.
  const Layer many = layer_of(m, 4096, "");
  ASSERT_NE(report_of(many, "up+swiglu_quant: up_swiglu_quant"), nullptr);
  EXPECT_THAT(report_of(many, "up+swiglu_quant: up_swiglu_quant")->configuration, HasSubstr("the two stages beyond"));
  EXPECT_NE(report_of(many, "up: grouped_gemm"), nullptr);
  EXPECT_TRUE(books_h(many));
  EXPECT_TRUE(books_h(layer_of(m, 64, "composed")));
}

TEST_F(LayerFusedCuda, IsTurnedOffByNameOrByWhatItReplaces) {
  const RandomLayer m = model_of(variant("w8a8"));
  const auto create = [&](const std::function<void(LayerOptions&)>& change) {
    LayerOptions options = gpu_options(Precision::kW8A8, 8);
    change(options);
    return make_gpu_layer(m, options);
  };
  const auto reason = [&](const Result<Layer>& layer) {
    EXPECT_TRUE(layer.is_ok()) << layer.status().message();
    const StageReport* const report = report_of(*layer, "up+swiglu_quant: up_swiglu_quant");
    EXPECT_NE(report, nullptr);
    if (report == nullptr || report->impl != "composed" || report->declined.empty()) return std::string("not declined");
    return report->declined.front().reason;
  };
  setenv("SLUICE_DISABLE", "cuda-fused", 1);
  const Result<Layer> by_environment = create([](LayerOptions&) {});
  unsetenv("SLUICE_DISABLE");
  EXPECT_THAT(reason(by_environment), HasSubstr("SLUICE_DISABLE"));
  EXPECT_THAT(reason(create([](LayerOptions& o) { o.selection["grouped_gemm"].forced = "cuda-simt"; })),
              HasSubstr("cuda-simt"));
  EXPECT_THAT(reason(create([](LayerOptions& o) { o.selection["up_swiglu_quant"].forced = "composed"; })),
              HasSubstr("composed was forced"));
  // A forced one that cannot run is an error with its reason.
  LayerOptions rows = gpu_options(Precision::kBF16, 8);
  rows.selection["up_swiglu_quant"].forced = "cuda-fused";
  const Status refused = make_gpu_layer(model_of(variant("bf16")), rows).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_THAT(refused.message(), testing::AllOf(HasSubstr("up_swiglu_quant"), HasSubstr("bf16")));
}

}  // namespace
}  // namespace sluice::test
