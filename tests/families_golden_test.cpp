// Every family's fixture (tests/oracle/families.py): a tiny checkpoint as the public PyTorch implementation saves it,
// and what its MoE block computes from x. Wrong names, orientations, orders of gate and up, activations or gate rules
// in the family table show here.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "harness/codec.h"
#include "harness/fill.h"
#include "io/safetensors.h"
#include "sluice/checkpoint.h"
#include "sluice/layer.h"

namespace sluice {
namespace {

// fp32 arithmetic against fp32 arithmetic, summed in different orders over H and I of at most 64: about sqrt(K) units
// of 2^-24 per product sum, three deep.
constexpr double kMaxRelL2 = 2e-6;

std::vector<std::string> fixture_names() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(SLUICE_SOURCE_DIR) / "tests/fixtures/families")) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

struct Golden {
  std::vector<double> x, y, logits, weight;
  std::vector<std::int64_t> idx;
  std::int64_t T = 0, S = 0;
};

std::vector<double> values(const io::SafetensorsFile& file, std::string_view name) {
  const io::TensorEntry* entry = file.find(name);
  if (entry == nullptr) throw std::runtime_error(fmt::format("{} lacks {}", file.path().string(), name));
  std::vector<double> out;
  const std::int64_t size = size_bytes(entry->dtype);
  for (std::int64_t i = 0; i < (entry->end - entry->begin) / size; ++i) {
    out.push_back(test::decode(entry->dtype, test::load_bits(entry->dtype, file.data(*entry) + i * size)));
  }
  return out;
}

class FamiliesGolden : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const auto folder = std::filesystem::path(SLUICE_SOURCE_DIR) / "tests/fixtures/families" / GetParam();
    auto checkpoint = Checkpoint::open(folder);
    ASSERT_TRUE(checkpoint.is_ok()) << checkpoint.status().message();
    // The fixture keeps one layer of those the config describes: the last with experts.
    const auto layers = checkpoint->moe_layers();
    ASSERT_FALSE(layers.empty());
    auto loaded = checkpoint->load(layers.back(), {});
    ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
    layer_ = std::move(*loaded);
    EXPECT_EQ(layer_.num_nan, 0);

    auto file = io::SafetensorsFile::open(folder / "golden.safetensors");
    ASSERT_TRUE(file.is_ok()) << file.status().message();
    golden_.x = values(**file, "x");
    golden_.y = values(**file, "y");
    golden_.logits = values(**file, "router_logits");
    golden_.weight = values(**file, "topk_weight");
    for (double id : values(**file, "topk_idx_sorted")) golden_.idx.push_back(static_cast<std::int64_t>(id));
    golden_.T = (*file)->find("x")->shape[0];
    golden_.S = layer_.config.top_k;
    ASSERT_EQ(static_cast<std::int64_t>(golden_.idx.size()), golden_.T * golden_.S);
  }

  static double relative_l2(const double* got, const double* want, std::int64_t n) {
    double error = 0, norm = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
    return std::sqrt(error / norm);
  }

  // One expert's output for one row, in double, straight from the definition.
  std::vector<double> ffn(const FfnWeights& w, std::int64_t e, const double* x) const {
    const std::int64_t H = layer_.config.hidden, I = w.w2.shape[2];
    const auto at = [](const TensorView& view, std::int64_t i) {
      return test::decode(view.dtype, test::load_bits(view.dtype, view.as<std::byte>() + i * size_bytes(view.dtype)));
    };
    std::vector<double> a(static_cast<std::size_t>(I)), y(static_cast<std::size_t>(H));
    for (std::int64_t i = 0; i < I; ++i) {
      double g = w.w13_bias.is_present() ? at(w.w13_bias, e * 2 * I + i) : 0.0;
      double u = w.w13_bias.is_present() ? at(w.w13_bias, e * 2 * I + I + i) : 0.0;
      for (std::int64_t h = 0; h < H; ++h) {
        g += x[h] * at(w.w13, (e * 2 * I + i) * H + h);
        u += x[h] * at(w.w13, (e * 2 * I + I + i) * H + h);
      }
      const Activation& act = layer_.config.activation;
      if (act.kind != ActivationKind::kSilu) {
        g = std::min<double>(g, act.limit);
        u = std::clamp<double>(u, -act.limit, act.limit);
      }
      a[static_cast<std::size_t>(i)] = act.kind == ActivationKind::kGptOss
                                           ? (u + 1) * g / (1 + std::exp(-static_cast<double>(act.alpha) * g))
                                           : u * g / (1 + std::exp(-g));
    }
    for (std::int64_t h = 0; h < H; ++h) {
      double sum = w.w2_bias.is_present() ? at(w.w2_bias, e * H + h) : 0.0;
      for (std::int64_t i = 0; i < I; ++i) sum += a[static_cast<std::size_t>(i)] * at(w.w2, (e * H + h) * I + i);
      y[static_cast<std::size_t>(h)] = sum;
    }
    return y;
  }

  LoadedLayer layer_;
  Golden golden_;
};

TEST_P(FamiliesGolden, LoadedWeightsComputeTheBlock) {
  const MoeConfig& config = layer_.config;
  const std::int64_t H = config.hidden, E = config.num_experts, S = golden_.S;
  const auto w_gate = test::to_doubles(layer_.weights.w_gate);
  for (std::int64_t t = 0; t < golden_.T; ++t) {
    const double* x = golden_.x.data() + t * H;
    std::vector<double> logits;
    for (std::int64_t e = 0; e < E; ++e) {
      double l =
          config.gate.has_router_bias ? test::to_doubles(layer_.weights.router_bias)[static_cast<std::size_t>(e)] : 0.0;
      for (std::int64_t h = 0; h < H; ++h) l += x[h] * w_gate[static_cast<std::size_t>(e * H + h)];
      logits.push_back(l);
    }
    EXPECT_LE(relative_l2(logits.data(), golden_.logits.data() + t * E, E), kMaxRelL2) << "logits of token " << t;

    std::vector<double> y(static_cast<std::size_t>(H), 0.0);
    for (std::int64_t s = 0; s < S; ++s) {
      const double weight = golden_.weight[static_cast<std::size_t>(t * S + s)];
      std::vector<double> in(x, x + H);
      if (config.weight_on_input) {
        for (double& v : in) v *= weight;
      }
      const auto out = ffn(layer_.weights.experts, golden_.idx[static_cast<std::size_t>(t * S + s)], in.data());
      for (std::size_t h = 0; h < y.size(); ++h) y[h] += (config.weight_on_input ? 1.0 : weight) * out[h];
    }
    if (config.shared_intermediate > 0) {
      double gate = 1.0;
      if (config.has_shared_gate) {
        const auto w = test::to_doubles(layer_.weights.shared_gate);
        double dot = 0;
        for (std::size_t h = 0; h < w.size(); ++h) dot += w[h] * x[h];
        gate = 1 / (1 + std::exp(-dot));
      }
      const auto out = ffn(layer_.weights.shared, 0, x);
      for (std::size_t h = 0; h < y.size(); ++h) y[h] += gate * out[h];
    }
    EXPECT_LE(relative_l2(y.data(), golden_.y.data() + t * H, H), kMaxRelL2) << "token " << t;
  }
}

TEST_P(FamiliesGolden, LayerForwardEqualsTheBlock) {
  const std::int64_t T = golden_.T, S = golden_.S, H = layer_.config.hidden;
  LayerOptions options;
  options.precision = Precision::kF32;
  options.max_tokens = T;
  auto layer = Layer::create(layer_.config, layer_.weights, options);
  ASSERT_TRUE(layer.is_ok()) << layer.status().message();
  std::vector<float> x(golden_.x.begin(), golden_.x.end());
  std::vector<float> y(static_cast<std::size_t>(T * H), NAN);
  std::vector<std::int32_t> idx(static_cast<std::size_t>(T * S), -7);
  std::vector<float> weight(static_cast<std::size_t>(T * S), NAN);
  std::vector<std::byte> workspace(static_cast<std::size_t>(layer->workspace_bytes() + 64));
  void* aligned = workspace.data();
  std::size_t space = workspace.size();
  ASSERT_NE(std::align(64, static_cast<std::size_t>(layer->workspace_bytes()), aligned, space), nullptr);
  Ctx ctx;
  ctx.workspace = {static_cast<std::byte*>(aligned), static_cast<std::size_t>(layer->workspace_bytes())};
  Layer::Routing routing;
  routing.topk_idx = {TensorView::dense(idx.data(), DType::kI32, {T, S})};
  routing.topk_weight = TensorView::dense(weight.data(), DType::kF32, {T, S});
  const Status done = layer->forward(TensorView::dense(x.data(), DType::kF32, {T, H}),
                                     TensorView::dense(y.data(), DType::kF32, {T, H}), routing, ctx);
  ASSERT_TRUE(done.is_ok()) << done.message();
  for (std::int64_t t = 0; t < T; ++t) {
    std::vector<std::pair<std::int64_t, double>> chosen;
    for (std::int64_t s = 0; s < S; ++s) {
      chosen.emplace_back(idx[static_cast<std::size_t>(t * S + s)], weight[static_cast<std::size_t>(t * S + s)]);
    }
    std::sort(chosen.begin(), chosen.end());
    for (std::int64_t s = 0; s < S; ++s) {
      EXPECT_EQ(chosen[static_cast<std::size_t>(s)].first, golden_.idx[static_cast<std::size_t>(t * S + s)])
          << "token " << t;
      const double want = golden_.weight[static_cast<std::size_t>(t * S + s)];
      EXPECT_NEAR(chosen[static_cast<std::size_t>(s)].second, want, 2e-6 * std::abs(want))
          << "token " << t << " slot " << s;
    }
    const std::vector<double> row(y.begin() + t * H, y.begin() + (t + 1) * H);
    EXPECT_LE(relative_l2(row.data(), golden_.y.data() + t * H, H), kMaxRelL2) << "token " << t;
  }
}

INSTANTIATE_TEST_SUITE_P(All, FamiliesGolden, ::testing::ValuesIn(fixture_names()),
                         [](const auto& param_info) { return param_info.param; });

TEST(FamiliesGoldenCoverage, EveryFamilyOfTheTableButOneHasAFixture) {
  // Kimi K2's configuration class is DeepSeek-V3's; the public implementation has no other.
  const std::vector<std::string> wanted = {"deepseek_v2",    "deepseek_v2_groups", "deepseek_v3", "deepseek_v4",
                                           "dots1",          "ernie4_5_moe",       "glm4_moe",    "gpt_oss",
                                           "hunyuan_v1_moe", "llama4_text",        "minimax_m2",  "mixtral",
                                           "olmoe",          "qwen2_moe",          "qwen3_moe",   "qwen3_next"};
  EXPECT_EQ(fixture_names(), wanted);
}

}  // namespace
}  // namespace sluice
