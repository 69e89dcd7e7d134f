// The trained checkpoint of data/tiny-dsv3, dequantised by plain loops and converted: fp8-block gives its own bytes
// back, and every format computes the layers within the budget of what it rounds.
#include "convert/fixture.h"
#include "sluice/layer.h"

namespace sluice::io {
namespace {

const fs::path kModel = fs::path(SLUICE_SOURCE_DIR) / "data" / "tiny-dsv3";

class ConvertTiny : public Convert {
 protected:
  // Every e4m3 tensor times its scales, in f32: 8 significant bits times 24 are rounded once.
  void SetUp() override {
    for (const auto& entry : fs::directory_iterator(kModel)) {
      if (!entry.path().filename().string().starts_with("model-")) continue;
      for (auto& [name, t] : test::read_file(entry.path())) trained_[name] = std::move(t);
    }
    FileTensors plain;
    for (const auto& [name, t] : trained_) {
      if (name.ends_with("_scale_inv")) continue;
      FileTensor& to = plain[name] = t;
      if (t.dtype != DType::kE4M3) continue;
      const FileTensor& scale = trained_.at(name + "_scale_inv");
      to.dtype = DType::kF32;
      to.bytes.resize(t.bytes.size() * 4);
      const std::int64_t cols = t.shape[1];
      for (std::int64_t i = 0; i < t.shape[0] * cols; ++i) {
        to.set(i, t.at(i) * scale.at(i / cols / 128 * scale.shape[1] + i % cols / 128));
      }
    }
    config_ = nlohmann::json::parse(text_of(kModel / "config.json"));
    config_.erase("quantization_config");
    write(plain);
  }

  // Worst and mean over the rows of the relative L2 distance from what the public implementation computes.
  std::pair<double, double> errors(std::int64_t index, Precision precision) const {
    const FileTensors golden = test::read_file(kModel / "golden.safetensors");
    const std::string prefix = fmt::format("layer{}.", index);
    const FileTensor &x = golden.at(prefix + "x"), &want = golden.at(prefix + "y_fp32");
    auto opened = Checkpoint::open(out());
    if (!opened) throw std::runtime_error(opened.status().message());
    LoadOptions load;
    load.precision = precision;
    auto loaded = opened->load(index, load);
    if (!loaded) throw std::runtime_error(loaded.status().message());
    LayerOptions options;
    options.precision = precision;
    options.max_tokens = x.shape[0];
    auto layer = Layer::create(loaded->config, loaded->weights, options);
    if (!layer) throw std::runtime_error(layer.status().message());
    std::vector<float> y(static_cast<std::size_t>(x.shape[0] * x.shape[1]));
    std::vector<std::byte> workspace(static_cast<std::size_t>(layer->workspace_bytes()));
    Ctx ctx;
    ctx.workspace = workspace;
    const Status status = layer->forward(TensorView::dense(x.bytes.data(), x.dtype, {x.shape[0], x.shape[1]}),
                                         TensorView::dense(y.data(), DType::kF32, {x.shape[0], x.shape[1]}), ctx);
    if (!status.is_ok()) throw std::runtime_error(status.message());
    double worst = 0, mean = 0;
    for (std::int64_t r = 0; r < x.shape[0]; ++r) {
      double error = 0, norm = 0;
      for (std::int64_t i = r * x.shape[1]; i < (r + 1) * x.shape[1]; ++i) {
        const double w = want.at(i);
        error += (static_cast<double>(y[static_cast<std::size_t>(i)]) - w) *
                 (static_cast<double>(y[static_cast<std::size_t>(i)]) - w);
        norm += w * w;
      }
      const double relative = std::sqrt(error / norm);
      worst = std::isfinite(relative) ? std::max(worst, relative) : HUGE_VAL;
      mean += relative / static_cast<double>(x.shape[0]);
    }
    return {worst, mean};
  }

  FileTensors trained_;
};

TEST_F(ConvertTiny, Fp8BlockGivesTheTrainedBytesBack) {
  must(request());
  const FileTensors got = read_all(out());
  std::int64_t num_quantised = 0;
  for (const auto& [name, t] : trained_) {
    if (name.find(".mlp.") == std::string::npos || t.dtype != DType::kE4M3) continue;
    const auto it = got.find(name);
    ASSERT_NE(it, got.end()) << name;
    if (it->second.dtype == DType::kF32) continue;  // a dense layer's, not converted
    ++num_quantised;
    const FileTensor &want_scale = trained_.at(name + "_scale_inv"), &scale = got.at(name + "_scale_inv");
    ASSERT_EQ(scale.shape, want_scale.shape);
    std::int64_t other_bytes = 0;
    for (std::int64_t i = 0; i < scale.shape[0] * scale.shape[1]; ++i)
      EXPECT_NEAR(scale.at(i) / want_scale.at(i), 1.0, 0x1p-23) << name;
    for (std::size_t i = 0; i < t.bytes.size(); ++i) other_bytes += it->second.bytes[i] == t.bytes[i] ? 0 : 1;
    EXPECT_EQ(other_bytes, 0) << name;
  }
  EXPECT_EQ(num_quantised, 3 * 32 * 3);  // three layers of 32 experts; the shared one was trained in bf16
}

// Budgets, as for whole layers in docs/numerics.md: what rounding the weights costs on top of the precision's own. With
// f32 activations 3.0e-2, 5.1e-2 and 1.3e-2 are found, with w8a8 5.5e-2, 6.7e-2 and 2.6e-2.
TEST_F(ConvertTiny, EveryFormatComputesTheLayers) {
  struct Budget {
    WeightFormat format;
    double exact, w8a8;  // worst row with f32 activations, and with quantised ones
  };
  for (const Budget& budget :
       {Budget{WeightFormat::kFp8Block, 4e-2, 7e-2}, Budget{WeightFormat::kFp8Channel, 7e-2, 9e-2},
        Budget{WeightFormat::kInt8Channel, 2e-2, 4e-2}}) {
    ConvertRequest r = request(budget.format);
    r.replace = true;
    must(r);
    for (std::int64_t layer : {1, 2, 3}) {
      for (Precision precision : {Precision::kW8A8, Precision::kW8A16, Precision::kBF16, Precision::kF32}) {
        SCOPED_TRACE(fmt::format("{}, layer {}, {}", to_string(budget.format), layer, to_string(precision)));
        const auto [worst, mean] = errors(layer, precision);
        EXPECT_LE(worst, precision == Precision::kW8A8 ? budget.w8a8 : budget.exact);
        EXPECT_LE(mean, 0.8 * (precision == Precision::kW8A8 ? budget.w8a8 : budget.exact));
        EXPECT_GT(worst, 5e-3);  // nothing was rounded otherwise
      }
    }
  }
}

}  // namespace
}  // namespace sluice::io
