// The trained checkpoint in data/tiny-dsv3 against values of the public PyTorch implementation (golden.safetensors).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "harness/buffer.h"
#include "io/safetensors.h"
#include "sluice/checkpoint.h"
#include "sluice/layer.h"
#include "sluice/stage/gate.h"

namespace sluice::test {
namespace {

const std::filesystem::path kModel = std::filesystem::path(SLUICE_SOURCE_DIR) / "data" / "tiny-dsv3";

TensorView view_of(const io::SafetensorsFile& file, const std::string& name) {
  const io::TensorEntry* entry = file.find(name);
  EXPECT_NE(entry, nullptr) << name;
  return TensorView::dense(file.data(*entry), entry->dtype, {entry->shape[0], entry->shape[1]});
}

struct RowErrors {
  double worst = 0.0;
  double mean = 0.0;
};
RowErrors relative_l2(const TensorView& got, const TensorView& want) {
  const std::vector<double> g = to_doubles(got);
  const std::vector<double> w = to_doubles(want);
  const std::size_t rows = static_cast<std::size_t>(want.shape[0]);
  const std::size_t cols = static_cast<std::size_t>(want.shape[1]);
  RowErrors errors;
  for (std::size_t r = 0; r < rows; ++r) {
    double error = 0.0;
    double norm = 0.0;
    for (std::size_t c = r * cols; c < (r + 1) * cols; ++c) {
      error += (g[c] - w[c]) * (g[c] - w[c]);
      norm += w[c] * w[c];
    }
    const double relative = std::sqrt(error / norm);
    errors.worst = std::isfinite(relative) ? std::max(errors.worst, relative) : HUGE_VAL;
    errors.mean += relative / static_cast<double>(rows);
  }
  return errors;
}

struct Case {
  const char* name;
  Precision precision;
  double worst;  // bounds on the relative L2 error of a row
  double mean;
};
constexpr Case kCases[] = {{"f32", Precision::kF32, 2e-6, 2e-6},
                           {"w8a16", Precision::kW8A16, 1e-2, 1e-2},
                           {"w8a8", Precision::kW8A8, 7e-2, 3.5e-2}};
void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

class Golden : public testing::TestWithParam<std::tuple<std::int64_t, Case, const char*>> {};
INSTANTIATE_TEST_SUITE_P(TinyDsv3, Golden,
                         testing::Combine(testing::Values(1, 2, 3), testing::ValuesIn(kCases),
                                          testing::Values("", "reference")),
                         [](const auto& p) {
                           const std::string impl = std::get<2>(p.param);
                           return "layer" + std::to_string(std::get<0>(p.param)) + "_" + std::get<1>(p.param).name +
                                  (impl.empty() ? "" : "_" + impl);
                         });

TEST_P(Golden, LayerOutputsEqualThePublicImplementation) {
  const auto& [index, precision_case, impl] = GetParam();
  auto golden = io::SafetensorsFile::open(kModel / "golden.safetensors");
  ASSERT_TRUE(golden.is_ok()) << golden.status().message();
  const io::SafetensorsFile& file = **golden;
  const std::string prefix = "layer" + std::to_string(index) + ".";
  // The reference is slow and says nothing new after a few dozen tokens.
  const std::int64_t tokens = impl[0] == '\0' ? 256 : 24;
  const TensorView x = view_of(file, prefix + "x").slice(0, tokens);

  Result<Checkpoint> checkpoint = Checkpoint::open(kModel);
  ASSERT_TRUE(checkpoint.is_ok()) << checkpoint.status().message();
  for (bool routed_only : {false, true}) {
    LoadOptions load;
    load.precision = precision_case.precision;
    load.routed_only = routed_only;
    Result<LoadedLayer> loaded = checkpoint->load(index, load);
    ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
    EXPECT_EQ(loaded->num_nan, 0);
    LayerOptions options;
    options.precision = precision_case.precision;
    options.max_tokens = x.shape[0];
    options.routed_only = routed_only;
    options.machine = Machine::detect_cpu(2);
    options.selection["*"].forced = impl;
    Result<Layer> layer = Layer::create(loaded->config, loaded->weights, options);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();

    Buffer out(DType::kF32, {tokens, x.shape[1]});
    Buffer ids(DType::kI32, {tokens, 4});
    Buffer weights(DType::kF32, {tokens, 4});
    std::vector<std::byte> workspace(static_cast<std::size_t>(layer->workspace_bytes()));
    Ctx ctx;
    ctx.workspace = workspace;
    const Status status = layer->forward(x, out.view(), {{ids.view()}, weights.view(), {}}, ctx);
    ASSERT_TRUE(status.is_ok()) << status.message();

    const RowErrors errors =
        relative_l2(out.view(), view_of(file, prefix + (routed_only ? "y_routed_fp32" : "y_fp32")).slice(0, tokens));
    EXPECT_LE(errors.worst, precision_case.worst) << (routed_only ? "routed only" : "with the shared expert");
    EXPECT_LE(errors.mean, precision_case.mean);

    // The file lists ids ascending; the gate lists them by value.
    const TensorView want_ids = view_of(file, prefix + "topk_idx_sorted");
    const TensorView want_weights = view_of(file, prefix + "topk_weight");
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<std::pair<std::int32_t, float>> got;
      for (std::int64_t s = 0; s < 4; ++s)
        got.emplace_back(ids.as<std::int32_t>()[t * 4 + s], weights.as<float>()[t * 4 + s]);
      std::sort(got.begin(), got.end());
      for (std::int64_t s = 0; s < 4; ++s) {
        ASSERT_EQ(got[static_cast<std::size_t>(s)].first, want_ids.as<std::int32_t>()[t * 4 + s]) << "token " << t;
        ASSERT_NEAR(got[static_cast<std::size_t>(s)].second, want_weights.as<float>()[t * 4 + s], 1e-6)
            << "token " << t;
      }
    }
  }
}

TEST(GoldenGate, LogitsAreThePublicOnes) {
  auto golden = io::SafetensorsFile::open(kModel / "golden.safetensors");
  ASSERT_TRUE(golden.is_ok());
  Result<Checkpoint> checkpoint = Checkpoint::open(kModel);
  ASSERT_TRUE(checkpoint.is_ok());
  for (int index : {1, 2, 3}) {
    Result<LoadedLayer> loaded = checkpoint->load(index, {});
    ASSERT_TRUE(loaded.is_ok());
    const std::string prefix = "layer" + std::to_string(index) + ".";
    const TensorView want = view_of(**golden, prefix + "router_logits");
    Buffer logits(DType::kF32, {want.shape[0], want.shape[1]});
    for (const auto& impl : gate::logits_impls()) {
      if (impl.device != DeviceKind::kCpu) continue;  // tests/gpu runs those
      ASSERT_TRUE(impl.run({view_of(**golden, prefix + "x"), loaded->weights.w_gate, {}, logits.view()}, {}).is_ok());
      const RowErrors errors = relative_l2(logits.view(), want);
      EXPECT_LE(errors.worst, 1e-6) << impl.name;
    }
  }
}

}  // namespace
}  // namespace sluice::test
