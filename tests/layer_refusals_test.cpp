// What a layer refuses: each refusal names the tensor and the values, and nothing is written.
#include "sluice/layer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <functional>

#include "harness/compare.h"
#include "harness/layer_run.h"

namespace sluice::test {
namespace {

struct Refusal {
  const char* what;
  std::function<Status()> attempt;
  std::vector<std::string> words;
};

void expect_refusals(const std::vector<Refusal>& refusals) {
  for (const Refusal& r : refusals) {
    const Status status = r.attempt();
    EXPECT_FALSE(status.is_ok()) << r.what;
    for (const std::string& word : r.words) {
      EXPECT_NE(status.message().find(word), std::string::npos)
          << r.what << ": '" << word << "' is not in: " << status.message();
    }
  }
}

TEST(LayerRefusals, CreateRefusesWhatCannotRun) {
  const RandomLayer bf16 = random_layer(small_config(), {});
  const RandomLayer fp8 = random_layer(small_config(), {.expert_dtype = DType::kE4M3});
  const auto with = [&](const RandomLayer& m, auto change, Precision precision = Precision::kF32) {
    MoeConfig config = m.config;
    LayerWeights weights = m.weights;
    LayerOptions options = options_for(precision, 4);
    change(config, weights, options);
    return Layer::create(config, weights, options).status();
  };
  using C = MoeConfig;
  using W = LayerWeights;
  using O = LayerOptions;
  const Result<Machine> gpu = Machine::detect_cuda(0);
  expect_refusals({
      {"S > E", [&] { return with(bf16, [](C& c, W&, O&) { c.top_k = 17; }); }, {"17", "16"}},
      {"groups", [&] { return with(bf16, [](C& c, W&, O&) { c.gate.n_group = 5; }); }, {"5", "16"}},
      {"topk_group", [&] { return with(bf16, [](C& c, W&, O&) { c.gate.topk_group = 5; }); }, {"5", "4"}},
      {"local range", [&] { return with(bf16, [](C& c, W&, O&) { c.first_expert = 3; }); }, {"3", "16"}},
      {"w8a8 of bf16",
       [&] {
         return with(
             bf16, [](C&, W&, O&) {}, Precision::kW8A8);
       },
       {"w8a8", "bf16"}},
      {"bf16 of e4m3",
       [&] {
         return with(
             fp8, [](C&, W&, O&) {}, Precision::kBF16);
       },
       {"bf16", "e4m3"}},
      {"missing scale",
       [&] {
         return with(
             fp8, [](C&, W& w, O&) { w.experts.w13_scale = {}; }, Precision::kW8A8);
       },
       {"w13_scale"}},
      {"wrong w2", [&] { return with(bf16, [](C&, W& w, O&) { w.experts.w2.shape[2] = 127; }); }, {"w2", "127", "128"}},
      {"missing shared", [&] { return with(bf16, [](C&, W& w, O&) { w.shared = {}; }); }, {"shared"}},
      {"surplus bias", [&] { return with(bf16, [](C& c, W&, O&) { c.gate.has_score_bias = false; }); }, {"score_bias"}},
      {"threads", [&] { return with(bf16, [](C&, W&, O& o) { o.machine.num_threads = 0; }); }, {"num_threads", "0"}},
      {"tokens", [&] { return with(bf16, [](C&, W&, O& o) { o.max_tokens = -1; }); }, {"max_tokens", "-1"}},
      {"rows", [&] { return with(bf16, [](C&, W&, O& o) { o.max_tokens = 1LL << 30; }); }, {"1073741824", "4"}},
      // Sizes whose products would leave 64 bits.
      {"hidden beyond 2^31",
       [&] { return with(bf16, [](C& c, W&, O&) { c.hidden = INT64_MAX; }); },
       {"hidden", "2^31"}},
      {"intermediate beyond 2^31",
       [&] { return with(bf16, [](C& c, W&, O&) { c.intermediate = INT64_MAX - 1; }); },
       {"intermediate", "2^31"}},
      {"shared beyond 2^31",
       [&] { return with(bf16, [](C& c, W&, O&) { c.shared_intermediate = INT64_MAX; }); },
       {"shared_intermediate", "2^31"}},
      {"first expert huge",
       [&] { return with(bf16, [](C& c, W&, O&) { c.first_expert = INT64_MAX; }); },
       {"local experts [9223372036854775807, 9223372036854775807)"}},
      {"local huge",
       [&] { return with(bf16, [](C& c, W&, O&) { c.num_local = INT64_MAX; }); },
       {"local experts [0, 92"}},
      {"local negative", [&] { return with(bf16, [](C& c, W&, O&) { c.num_local = -2; }); }, {"num_local", "-2"}},
      {"tokens huge", [&] { return with(bf16, [](C&, W&, O& o) { o.max_tokens = INT64_MAX; }); }, {"max_tokens"}},
      {"rows huge", [&] { return with(bf16, [](C&, W&, O& o) { o.max_rows = INT64_MAX; }); }, {"max_rows"}},
      {"rows per expert huge",
       [&] { return with(bf16, [](C&, W&, O& o) { o.max_rows_per_expert = INT64_MAX; }); },
       {"max_rows_per_expert"}},
      {"rows per expert times L",
       [&] { return with(bf16, [](C&, W&, O& o) { o.max_rows_per_expert = INT32_MAX; }); },
       {"34359738352 rows"}},
      {"threads huge",
       [&] { return with(bf16, [](C&, W&, O& o) { o.machine.num_threads = INT_MAX; }); },
       {"num_threads", "4096"}},
      {"unknown impl",
       [&] { return with(bf16, [](C&, W&, O& o) { o.selection["*"].forced = "abacus"; }); },
       {"abacus", "reference"}},
      {"unknown stage",
       [&] { return with(bf16, [](C&, W&, O& o) { o.selection["gat"].forced = "reference"; }); },
       {"gat", "gate.logits"}},
      {"all disabled",
       [&] { return with(bf16, [](C&, W&, O& o) {
               o.selection["route"].disabled = {"cpu", "reference"};
             }); },
       {"route", "disabled"}},
      {"other device",
       [&] { return with(bf16, [](C&, W&, O& o) { o.machine.device.kind = DeviceKind::kCuda; }); },
       // With a GPU here it is the weights that are elsewhere.
       {gpu ? "the layer is on GPU 0" : "options.machine: " + gpu.status().message()}},
  });
}

// A gate and weights that exist only as sizes: planning them may not overflow, whatever they claim.
TEST(LayerRefusals, WorkspaceBeyondAnyMemoryIsRefused) {
  MoeConfig config;
  config.hidden = config.intermediate = std::int64_t{1} << 31;
  config.num_experts = config.top_k = 1;
  LayerWeights weights;
  float nothing = 0;
  weights.w_gate = TensorView::dense(&nothing, DType::kF32, {1, config.hidden});
  weights.experts.w13 = TensorView::dense(&nothing, DType::kF32, {1, 2 * config.intermediate, config.hidden});
  weights.experts.w2 = TensorView::dense(&nothing, DType::kF32, {1, config.hidden, config.intermediate});
  LayerOptions options;
  options.max_tokens = INT32_MAX;
  const Status status = Layer::create(config, weights, options).status();
  EXPECT_FALSE(status.is_ok());
  EXPECT_THAT(status.message(), testing::AnyOf(testing::HasSubstr("2^60"), testing::HasSubstr("can be addressed")));
}

TEST(LayerRefusals, AMovedFromLayerSaysSo) {
  const RandomLayer m = random_layer(small_config(), {});
  Layer layer = make_layer(m, options_for(Precision::kBF16, 8));
  const Layer taken = std::move(layer);
  const Buffer x = random_x(1, 256);
  Buffer out(DType::kF32, {1, 256});
  const std::string said = "the layer was moved from";
  EXPECT_THAT(layer.forward(x.view(), out.view(), {}).message(), testing::HasSubstr(said));        // NOLINT
  EXPECT_THAT(layer.forward_routed({}, out.view(), {}).message(), testing::HasSubstr(said));       // NOLINT
  EXPECT_THAT(layer.forward_grouped({}, {}, out.view(), {}).message(), testing::HasSubstr(said));  // NOLINT
  EXPECT_THAT(layer.forward_masked({}, {}, out.view(), {}).message(), testing::HasSubstr(said));   // NOLINT
}

TEST(LayerRefusals, ForwardRefusesBadTensors) {
  const RandomLayer m = random_layer(small_config(), {});
  LayerOptions options = options_for(Precision::kBF16, 8);
  options.max_rows_per_expert = 2;
  const Layer layer = make_layer(m, options);
  const Buffer x = random_x(8, 256);
  Buffer out(DType::kF32, {8, 256});
  Buffer y(DType::kBF16, {32, 256});
  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  const auto changed = [](TensorView v, auto change) {
    change(v);
    return v;
  };
  const TensorView ok = x.view();
  Buffer ids(DType::kI32, {8, 4});
  ids.fill_constant(0);
  Buffer weights(DType::kF32, {8, 4});
  weights.fill_constant(1);
  Buffer long_x = random_x(9, 256);
  Buffer long_out(DType::kF32, {9, 256});
  Buffer e4m3(DType::kE4M3, {8, 256});
  e4m3.fill_constant(1);
  std::vector<std::int32_t> offsets(17, 0);
  const TensorView offset_view = TensorView::dense(offsets.data(), DType::kI32, {17});
  expect_refusals({
      {"width",
       [&] { return layer.forward(changed(ok, [](TensorView& v) { v.shape[1] = 255; }), out.view(), ctx); },
       {"x", "255", "256"}},
      {"tokens", [&] { return layer.forward(long_x.view(), long_out.view(), ctx); }, {"9", "8"}},
      {"null x",
       [&] { return layer.forward(changed(ok, [](TensorView& v) { v.data = nullptr; }), out.view(), ctx); },
       {"x", "null"}},
      {"null out",
       [&] { return layer.forward(ok, changed(out.view(), [](TensorView& v) { v.data = nullptr; }), ctx); },
       {"out", "null"}},
      {"absent out", [&] { return layer.forward(ok, {}, ctx); }, {"out", "missing"}},
      {"every other column",
       [&] {
         return layer.forward(changed(ok,
                                      [](TensorView& v) {
                                        v.stride[1] = 2;
                                        v.shape[0] = 4;
                                      }),
                              out.view().slice(0, 4), ctx);
       },
       {"x", "stride 2"}},
      {"broadcast",
       [&] { return layer.forward(changed(ok, [](TensorView& v) { v.stride[0] = 0; }), out.view(), ctx); },
       {"x", "stride 0"}},
      {"negative stride",
       [&] { return layer.forward(changed(ok, [](TensorView& v) { v.stride[0] = -256; }), out.view(), ctx); },
       {"x", "-256"}},
      {"3-D",
       [&] {
         return layer.forward(TensorView::dense(x.view().data, DType::kBF16, {2, 4, 256}), out.view(), ctx);
       },
       {"x", "2,4,256"}},
      {"misaligned",
       [&] {
         return layer.forward(changed(ok,
                                      [](TensorView& v) {
                                        v.data = static_cast<std::byte*>(v.data) + 1;
                                        v.shape[0] = 7;
                                      }),
                              out.view().slice(0, 7), ctx);
       },
       {"x", "1 bytes off"}},
      {"dtype",
       [&] { return layer.forward(changed(ok, [](TensorView& v) { v.dtype = DType::kF16; }), out.view(), ctx); },
       {"x", "f16"}},
      {"e4m3 into the gate",
       [&] { return layer.forward(e4m3.view(), out.view(), ctx); },
       {"x must be f32 or bf16", "e4m3"}},
      {"rows differ", [&] { return layer.forward(ok, out.view().slice(0, 7), ctx); }, {"out", "7", "8"}},
      {"i64 ids",
       [&] {
         return layer.forward_routed(
             {ok, {}, {changed(ids.view(), [](TensorView& v) { v.dtype = DType::kI64; })}, weights.view(), {}},
             out.view(), ctx);
       },
       {"topk_idx", "i64", "i32"}},
      {"u32 ids",
       [&] {
         return layer.forward_routed(
             {ok, {}, {changed(ids.view(), [](TensorView& v) { v.dtype = DType::kU32; })}, weights.view(), {}},
             out.view(), ctx);
       },
       {"topk_idx", "u32"}},
      {"no weights",
       [&] {
         return layer.forward_routed({ok, {}, {ids.view()}, {}, {}}, out.view(), ctx);
       },
       {"topk_weight"}},
      {"no ids",
       [&] {
         return layer.forward_routed({ok, {}, {}, weights.view(), {}}, out.view(), ctx);
       },
       {"topk_idx"}},
      {"e4m3 rows",
       [&] {
         return layer.forward_routed({e4m3.view(), {}, {ids.view()}, weights.view(), {}}, out.view(), ctx);
       },
       {"e4m3", "bf16"}},
      {"offsets",
       [&] {
         return layer.forward_grouped({ok, {}}, {offset_view.slice(0, 16)}, y.view().slice(0, 8), ctx);
       },
       {"expert_offset", "16", "17"}},
      {"out dtype",
       [&] {
         return layer.forward_grouped({ok, {}}, {offset_view}, out.view(), ctx);
       },
       {"out", "bf16[8,256]"}},
      {"mask rows",
       [&] {
         return layer.forward_masked({ok.slice(0, 7), {}}, offset_view.slice(0, 16), y.view().slice(0, 7), ctx);
       },
       {"7", "16"}},
  });
  EXPECT_TRUE(out.rows_untouched(0));
  EXPECT_TRUE(y.rows_untouched(0));
}

}  // namespace
}  // namespace sluice::test
