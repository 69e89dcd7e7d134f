// The C ABI: the same bits as the C++ layer, errors as text, nothing thrown.
#include "sluice/c_api.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "harness/compare.h"
#include "harness/random_layer.h"

namespace sluice::test {
namespace {

sluice_tensor to_c(const TensorView& view) {
  sluice_tensor t;
  std::memset(&t, 0, sizeof(t));
  if (!view.is_present()) return t;
  t.data = view.data;
  t.dtype = static_cast<std::int32_t>(view.dtype);
  t.rank = view.rank;
  for (int i = 0; i < view.rank; ++i) {
    t.shape[i] = view.shape[static_cast<std::size_t>(i)];
    t.stride[i] = view.stride[static_cast<std::size_t>(i)];
  }
  return t;
}

sluice_ffn_weights to_c(const FfnWeights& w) {
  return {to_c(w.w13), to_c(w.w13_scale), to_c(w.w13_bias), to_c(w.w2), to_c(w.w2_scale), to_c(w.w2_bias)};
}

class CApi : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(sluice_context_create(&context_), SLUICE_OK); }
  void TearDown() override { sluice_context_destroy(context_); }
  std::string error() const { return sluice_last_error(context_); }

  sluice_context* context_ = nullptr;
};

const std::string kModel = std::string(SLUICE_SOURCE_DIR) + "/data/tiny-dsv3";

TEST_F(CApi, LayerFromCheckpointRuns) {
  sluice_options options;
  SLUICE_INIT(options);
  options.precision = SLUICE_W8A8;
  options.max_tokens = 5;
  options.num_threads = 2;
  sluice_layer* layer = nullptr;
  ASSERT_EQ(sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 2, &options, &layer), SLUICE_OK) << error();
  std::int64_t hidden = 0;
  std::int64_t top_k = 0;
  sluice_layer_sizes(layer, &hidden, nullptr, nullptr, &top_k);
  EXPECT_EQ(hidden, 256);
  EXPECT_EQ(top_k, 4);
  Buffer x(DType::kBF16, {5, 256});
  x.fill_normal(1);
  Buffer out(DType::kF32, {5, 256});
  Buffer ids(DType::kI32, {5, 4});
  const sluice_tensor cx = to_c(x.view());
  sluice_tensor cout = to_c(out.view());
  cout.stride[0] = cout.stride[1] = 0;  // dense without saying so
  const sluice_tensor cids = to_c(ids.view());
  std::vector<std::byte> workspace(static_cast<std::size_t>(sluice_layer_workspace_bytes(layer)));
  ASSERT_EQ(
      sluice_layer_forward(context_, layer, &cx, &cout, &cids, nullptr, nullptr, workspace.data(), workspace.size()),
      SLUICE_OK)
      << error();
  for (double v : out.to_doubles()) EXPECT_TRUE(std::isfinite(v));
  for (double v : ids.to_doubles()) EXPECT_TRUE(v >= 0 && v < 32);
  sluice_layer_destroy(layer);
}

TEST_F(CApi, LayerFromPointersGivesTheBitsOfTheCppLayer) {
  MoeConfig ue8m0 = small_config();
  ue8m0.activation_scale = ScaleFormat::kUe8m0;
  const RandomLayer m = random_layer(ue8m0, {.expert_dtype = DType::kE4M3});
  sluice_moe_config config;
  SLUICE_INIT(config);
  config.hidden = 256;
  config.intermediate = 128;
  config.num_experts = 16;
  config.top_k = 4;
  config.shared_intermediate = 128;
  config.score = 1;
  config.group_score = 2;
  config.renorm = 1;
  config.has_score_bias = 1;
  config.n_group = 4;
  config.topk_group = 2;
  config.routed_scaling_factor = 2.5f;
  config.activation_scale = 2;
  sluice_layer_weights weights;
  SLUICE_INIT(weights);
  weights.w_gate = to_c(m.weights.w_gate);
  weights.score_bias = to_c(m.weights.score_bias);
  weights.experts = to_c(m.weights.experts);
  weights.shared = to_c(m.weights.shared);
  sluice_options options;
  SLUICE_INIT(options);
  options.precision = SLUICE_W8A8;
  options.max_tokens = 6;
  options.max_rows_per_expert = 4;
  options.num_threads = 1;
  sluice_layer* layer = nullptr;
  EXPECT_EQ(sluice_layer_create(context_, &config, &weights, &options, &layer), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "config.activation_scale = 2, expected 0..1");
  config.struct_bytes = offsetof(sluice_moe_config, activation_scale);  // a caller that does not know the field
  ASSERT_EQ(sluice_layer_create(context_, &config, &weights, &options, &layer), SLUICE_OK) << error();
  sluice_layer_destroy(layer);
  config.struct_bytes = sizeof(config);
  config.activation_scale = 1;
  ASSERT_EQ(sluice_layer_create(context_, &config, &weights, &options, &layer), SLUICE_OK) << error();

  LayerOptions cpp;
  cpp.precision = Precision::kW8A8;
  cpp.max_tokens = 6;
  cpp.max_rows_per_expert = 4;
  cpp.machine = Machine::detect_cpu(1);
  Result<Layer> same = Layer::create(m.config, m.weights, cpp);
  ASSERT_TRUE(same.is_ok());
  EXPECT_EQ(same->workspace_bytes(), sluice_layer_workspace_bytes(layer));

  Buffer x(DType::kBF16, {6, 256});
  x.fill_normal(2);
  Buffer want(DType::kBF16, {6, 256});
  Buffer ids(DType::kI32, {6, 4});
  Buffer weight(DType::kF32, {6, 4});
  std::vector<std::byte> workspace(static_cast<std::size_t>(same->workspace_bytes()));
  Ctx ctx;
  ctx.workspace = workspace;
  ASSERT_TRUE(same->forward(x.view(), want.view(), {{ids.view()}, weight.view(), {}}, ctx).is_ok());
  const sluice_tensor cx = to_c(x.view());
  const sluice_tensor cids = to_c(ids.view());
  const sluice_tensor cweight = to_c(weight.view());
  for (bool routed : {false, true}) {
    Buffer got(DType::kBF16, {6, 256});
    const sluice_tensor cout = to_c(got.view());
    const sluice_status status = routed
                                     ? sluice_layer_forward_routed(context_, layer, &cx, nullptr, &cids, &cweight,
                                                                   nullptr, &cout, workspace.data(), workspace.size())
                                     : sluice_layer_forward(context_, layer, &cx, &cout, nullptr, nullptr, nullptr,
                                                            workspace.data(), workspace.size());
    ASSERT_EQ(status, SLUICE_OK) << error();
    EXPECT_TRUE(same_bits(got.view(), want.view()));
  }

  // Entry points for rows.
  std::vector<std::int32_t> offsets(17, 3);
  offsets[0] = 0;
  std::vector<std::int32_t> counts(16, 0);
  counts[0] = 3;
  Buffer grouped(DType::kBF16, {3, 256});
  Buffer masked(DType::kBF16, {64, 256});
  Buffer padded(DType::kBF16, {64, 256});
  for (std::int64_t i = 0; i < 3 * 256; ++i) padded.set(i, x.at(i));
  const sluice_tensor crows = to_c(x.view().slice(0, 3));
  const sluice_tensor coffsets = to_c(TensorView::dense(offsets.data(), DType::kI32, {17}));
  const sluice_tensor ccounts = to_c(TensorView::dense(counts.data(), DType::kI32, {16}));
  const sluice_tensor cgrouped = to_c(grouped.view());
  const sluice_tensor cmasked = to_c(masked.view());
  const sluice_tensor cpadded = to_c(padded.view());
  ASSERT_EQ(sluice_layer_forward_grouped(context_, layer, &crows, nullptr, &coffsets, &cgrouped, workspace.data(),
                                         workspace.size()),
            SLUICE_OK)
      << error();
  ASSERT_EQ(sluice_layer_forward_masked(context_, layer, &cpadded, nullptr, &ccounts, &cmasked, workspace.data(),
                                        workspace.size()),
            SLUICE_OK)
      << error();
  EXPECT_TRUE(same_bits(masked.view().slice(0, 3), grouped.view()));
  EXPECT_TRUE(is_poison(masked.view().slice(3, 61)));
  sluice_layer_destroy(layer);
}

TEST_F(CApi, ErrorsAreCodesWithText) {
  sluice_options options;
  SLUICE_INIT(options);
  options.precision = SLUICE_PRECISION_F32;
  options.max_tokens = 2;
  sluice_layer* layer = nullptr;
  EXPECT_EQ(sluice_layer_create_from_checkpoint(context_, "no/such/model", 1, &options, &layer), SLUICE_NOT_FOUND);
  EXPECT_NE(error().find("no/such/model"), std::string::npos) << error();
  EXPECT_EQ(layer, nullptr);
  EXPECT_NE(sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 0, &options, &layer), SLUICE_OK);
  EXPECT_NE(error().find("0"), std::string::npos) << error();
  EXPECT_EQ(sluice_layer_create_from_checkpoint(context_, nullptr, 1, &options, &layer), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 1, nullptr, &layer), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 1, &options, nullptr),
            SLUICE_INVALID_ARGUMENT);
  options.precision = 9;
  EXPECT_EQ(sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 1, &options, &layer),
            SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(error().find("precision = 9"), std::string::npos) << error();
  options.precision = SLUICE_W8A8;
  options.struct_bytes = 0;
  EXPECT_EQ(sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 1, &options, &layer),
            SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(error().find("struct_bytes"), std::string::npos) << error();
  options.struct_bytes = sizeof(options) + 8;
  EXPECT_EQ(sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 1, &options, &layer),
            SLUICE_INVALID_ARGUMENT);

  options.struct_bytes = sizeof(options);
  ASSERT_EQ(sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 1, &options, &layer), SLUICE_OK) << error();
  Buffer x(DType::kBF16, {2, 256});
  x.fill_normal(2);
  Buffer out(DType::kF32, {2, 256});
  sluice_tensor cx = to_c(x.view());
  const sluice_tensor cout = to_c(out.view());
  std::vector<std::byte> workspace(static_cast<std::size_t>(sluice_layer_workspace_bytes(layer)));
  const auto forward = [&](const sluice_tensor* in, std::size_t bytes) {
    return sluice_layer_forward(context_, layer, in, &cout, nullptr, nullptr, nullptr, workspace.data(), bytes);
  };
  EXPECT_EQ(forward(&cx, 10), SLUICE_WORKSPACE_TOO_SMALL);
  EXPECT_NE(error().find("10"), std::string::npos);
  EXPECT_EQ(forward(nullptr, workspace.size()), SLUICE_INVALID_ARGUMENT);
  cx.dtype = 99;
  EXPECT_EQ(forward(&cx, workspace.size()), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(error().find("99"), std::string::npos);
  cx = to_c(x.view());
  cx.rank = 7;
  EXPECT_EQ(forward(&cx, workspace.size()), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_layer_forward(context_, nullptr, &cx, &cout, nullptr, nullptr, nullptr, workspace.data(),
                                 workspace.size()),
            SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(
      sluice_layer_forward(nullptr, layer, &cx, &cout, nullptr, nullptr, nullptr, workspace.data(), workspace.size()),
      SLUICE_INVALID_ARGUMENT);
  EXPECT_TRUE(out.rows_untouched(0));
  sluice_layer_destroy(layer);
}

TEST_F(CApi, OlderCallersWithShorterStructsAreServed) {
  sluice_options options;
  SLUICE_INIT(options);
  options.precision = SLUICE_PRECISION_F32;
  options.max_tokens = 1;
  options.checked = -1;  // beyond what the caller says it knows
  options.struct_bytes = offsetof(sluice_options, routed_only);
  sluice_layer* layer = nullptr;
  EXPECT_EQ(sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 1, &options, &layer), SLUICE_OK) << error();
  sluice_layer_destroy(layer);
}

TEST_F(CApi, NullHandlesAreHarmless) {
  sluice_layer_destroy(nullptr);
  sluice_context_destroy(nullptr);
  EXPECT_EQ(sluice_layer_workspace_bytes(nullptr), 0);
  EXPECT_STREQ(sluice_last_error(nullptr), "");
  EXPECT_EQ(sluice_context_create(nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_STREQ(sluice_status_name(SLUICE_BAD_DATA), "bad data");
  EXPECT_STRNE(sluice_version(), "");
}

}  // namespace
}  // namespace sluice::test
