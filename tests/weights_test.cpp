// check_weights: every tensor taken away, added, of the wrong shape and of the wrong dtype, one at a time.
#include "sluice/weights.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice {
namespace {

using ::testing::HasSubstr;

// One layer with everything a layer can have: E = 6, H = 200, I = 136, a shared expert of 72 with its gate, biases.
struct Case {
  MoeConfig config;
  LayerWeights weights;
  std::vector<std::vector<std::byte>> memory;

  TensorView view(DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView v = TensorView::dense(nullptr, dtype, shape);
    memory.emplace_back(static_cast<std::size_t>(v.num_bytes()));
    v.data = memory.back().data();
    return v;
  }
  explicit Case(DType dtype) {
    config.hidden = 200;
    config.intermediate = 136;
    config.num_experts = 6;
    config.top_k = 2;
    config.gate.has_score_bias = config.gate.has_router_bias = true;
    config.shared_intermediate = 72;
    config.has_shared_gate = true;
    weights.w_gate = view(DType::kBF16, {6, 200});
    weights.router_bias = view(DType::kF32, {6});
    weights.score_bias = view(DType::kF32, {6});
    weights.shared_gate = view(DType::kF32, {1, 200});
    weights.experts = ffn(dtype, 6, 136);
    weights.shared = ffn(dtype, 1, 72);
  }
  FfnWeights ffn(DType dtype, std::int64_t L, std::int64_t I) {
    FfnWeights f;
    f.w13 = view(dtype, {L, 2 * I, 200});
    f.w2 = view(dtype, {L, 200, I});
    if (dtype == DType::kE4M3) {
      f.w13_scale = view(DType::kF32, {L, 2 * ceil_div(I, 128), 2});
      f.w2_scale = view(DType::kF32, {L, 2, ceil_div(I, 128)});
    }
    if (dtype == DType::kI8) {
      f.w13_scale = view(DType::kF32, {L, 2 * I, 1});
      f.w2_scale = view(DType::kF32, {L, 200, 1});
    }
    f.w13_bias = view(DType::kF32, {L, 2 * I});
    f.w2_bias = view(DType::kF32, {L, 200});
    return f;
  }
  std::string refusal() const { return check_weights(config, weights).message(); }
};

TEST(CheckWeights, CompleteLayersPass) {
  for (DType dtype : {DType::kE4M3, DType::kBF16, DType::kF32})
    EXPECT_EQ(Case(dtype).refusal(), "") << to_string(dtype);
  Case plain(DType::kBF16);
  plain.weights.experts.w13_bias = plain.weights.experts.w2_bias = {};
  EXPECT_EQ(plain.refusal(), "") << "biases are optional";
}

TEST(CheckWeights, EveryTensorInTurn) {
  struct Row {
    const char* name;
    TensorView LayerWeights::*top;
    TensorView FfnWeights::*part;
    bool required;
  };
  const Row rows[] = {{"w_gate", &LayerWeights::w_gate, nullptr, true},
                      {"router_bias", &LayerWeights::router_bias, nullptr, true},
                      {"score_bias", &LayerWeights::score_bias, nullptr, true},
                      {"shared_gate", &LayerWeights::shared_gate, nullptr, true},
                      {"w13", nullptr, &FfnWeights::w13, true},
                      {"w2", nullptr, &FfnWeights::w2, true},
                      {"w13_scale", nullptr, &FfnWeights::w13_scale, true},
                      {"w2_scale", nullptr, &FfnWeights::w2_scale, true},
                      {"w13_bias", nullptr, &FfnWeights::w13_bias, false},
                      {"w2_bias", nullptr, &FfnWeights::w2_bias, false}};
  for (const Row& row : rows) {
    for (FfnWeights LayerWeights::*ffn : {&LayerWeights::experts, &LayerWeights::shared}) {
      const auto pick = [&](Case& c) -> TensorView& {
        return row.top != nullptr ? c.weights.*row.top : (c.weights.*ffn).*row.part;
      };
      Case missing(DType::kE4M3);
      pick(missing) = {};
      if (row.required) {
        EXPECT_THAT(missing.refusal(), HasSubstr(row.name));
        EXPECT_THAT(missing.refusal(), HasSubstr("missing"));
      } else {
        EXPECT_EQ(missing.refusal(), "");
      }
      for (int axis = 0; axis < pick(missing).rank; ++axis) {
        Case shape(DType::kE4M3);
        pick(shape).shape[static_cast<std::size_t>(axis)] += 1;
        EXPECT_THAT(shape.refusal(), HasSubstr(row.name)) << axis;
      }
      Case dtype(DType::kE4M3);
      pick(dtype).dtype = DType::kI8;
      EXPECT_THAT(dtype.refusal(), HasSubstr(row.name));
      Case null(DType::kE4M3);
      pick(null).data = nullptr;
      EXPECT_THAT(null.refusal(), HasSubstr(row.name));
    }
  }
}

TEST(CheckWeights, TensorsTooManyAreRefused) {
  Case c(DType::kBF16);
  c.weights.experts.w13_scale = c.view(DType::kF32, {6, 4, 2});
  EXPECT_THAT(c.refusal(), HasSubstr("w13_scale is given, but bf16 weights have no scales"));
  Case bias(DType::kBF16);
  bias.config.gate.has_score_bias = false;
  EXPECT_THAT(bias.refusal(), HasSubstr("score_bias is given, but gate.has_score_bias is not set"));
  Case shared(DType::kBF16);
  shared.config.shared_intermediate = 0;
  shared.config.has_shared_gate = false;
  EXPECT_THAT(shared.refusal(), HasSubstr("shared.w13 is given, but shared_intermediate = 0"));
  Case mixed(DType::kBF16);
  mixed.weights.experts.w2 = mixed.view(DType::kF32, {6, 200, 136});
  EXPECT_THAT(mixed.refusal(), HasSubstr("both must be of one dtype"));
}

// One scale a row: weights of int8 always, of e4m3 in both tensors or in neither.
TEST(CheckWeights, RowScales) {
  for (DType dtype : {DType::kE4M3, DType::kI8}) {
    Case c(dtype);
    EXPECT_EQ(has_row_scales(c.weights.experts), dtype == DType::kI8);
    for (FfnWeights* f : {&c.weights.experts, &c.weights.shared}) {
      const std::int64_t L = f->w13.shape[0];
      f->w13_scale = c.view(DType::kF32, {L, f->w13.shape[1], 1});
      f->w2_scale = c.view(DType::kF32, {L, 200, 1});
    }
    EXPECT_EQ(c.refusal(), "") << to_string(dtype);
    EXPECT_TRUE(has_row_scales(c.weights.experts));
    const Result<DataPath> path = data_path(Precision::kW8A8, c.weights.experts);
    ASSERT_TRUE(path.is_ok());
    EXPECT_TRUE(path->row_scales);
    EXPECT_EQ(path->a, dtype);
    FfnWeights one = c.weights.experts;
    c.weights.experts.w13_scale.stride = c.weights.experts.w2_scale.stride = {1, 0, 0};
    EXPECT_EQ(c.refusal(), "") << "a scale for each expert";
    c.weights.experts = one;
    c.weights.experts.w2_scale.shape[1] = 199;
    EXPECT_THAT(c.refusal(), HasSubstr("w2_scale"));
    EXPECT_THAT(c.refusal(), HasSubstr("199"));
    c.weights.experts = one;
    c.weights.experts.w2_scale = c.view(DType::kF32, {6, 2, 2});
    EXPECT_THAT(
        c.refusal(),
        HasSubstr(dtype == DType::kI8 ? "w2_scale[L,H,1] f32 axis 1 (H) is 2, expected 200"
                                      : "w13_scale is f32[6,272,1] and w2_scale is f32[6,2,2]: one has a scale for "
                                        "128x128, the other for a row"));
  }
  EXPECT_FALSE(has_row_scales(Case(DType::kBF16).weights.experts));
}

TEST(CheckWeights, Case53ScalesNotLoaded) {
  Case c(DType::kE4M3);
  c.weights.experts.w2_scale = {};
  EXPECT_THAT(c.refusal(), HasSubstr("experts: weights: w2_scale is missing, but the weights are e4m3"));
}

TEST(CheckWeights, NumBytesCountsWhatIsPresent) {
  const Case c(DType::kE4M3);
  const std::int64_t experts = 6 * (3 * 136 * 200 + (4 * 2 + 2 * 2) * 4 + (2 * 136 + 200) * 4);
  const std::int64_t shared = 3 * 72 * 200 + (2 * 2 + 2) * 4 + (2 * 72 + 200) * 4;
  EXPECT_EQ(num_bytes(c.weights.experts), experts);
  EXPECT_EQ(num_bytes(c.weights), experts + shared + 6 * 200 * 2 + 2 * 6 * 4 + 200 * 4);
  EXPECT_EQ(num_bytes(LayerWeights{}), 0);
}

}  // namespace
}  // namespace sluice
