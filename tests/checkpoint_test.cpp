// Checkpoints end to end on crafted folders: which file counts, what a layer must hold, and that every weight arrives
// where it belongs. Expected values are read from the crafted bytes by the harness's own decoder.
#include "sluice/checkpoint.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "harness/checkpoint_files.h"
#include "harness/fill.h"
#include "io/catalog.h"
#include "io/layer_load.h"

namespace sluice {
namespace {

using test::FileTensor;
using test::FileTensors;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::int64_t kH = 160, kI = 136, kE = 4;
const std::string kMlp = "model.layers.1.mlp.";

class CheckpointTest : public ::testing::Test {
 protected:
  void write() {
    test::write_text(folder_ / "config.json", config_.dump());
    test::write_file(folder_ / "model.safetensors", tensors_);
  }
  Status open_status() {
    auto opened = Checkpoint::open(folder_.path());
    return opened.status();
  }
  // Status of the layer's judgement, which load must share.
  Status layer_status(std::int64_t layer = 1) {
    write();
    auto opened = Checkpoint::open(folder_.path());
    if (!opened.is_ok()) return opened.status();
    auto info = opened->layer_info(layer);
    auto loaded = opened->load(layer, {});
    EXPECT_EQ(info.status().message(), loaded.status().message());
    return info.status();
  }
  LoadedLayer load(Precision precision = Precision::kF32, bool routed_only = false) {
    write();
    auto opened = Checkpoint::open(folder_.path());
    if (!opened.is_ok()) throw std::runtime_error(opened.status().message());
    LoadOptions options;
    options.precision = precision;
    options.routed_only = routed_only;
    auto loaded = opened->load(1, options);
    if (!loaded.is_ok()) throw std::runtime_error(loaded.status().message());
    return std::move(*loaded);
  }
  const FileTensor& tensor(const std::string& name) const { return tensors_.at(kMlp + name); }

  // w13 and w2 of e4m3 or plain per-expert files, element by element.
  void expect_experts(const LayerWeights& w, bool dequantised) const {
    const auto w13 = test::to_doubles(w.experts.w13), w2 = test::to_doubles(w.experts.w2);
    for (std::int64_t e = 0; e < kE; ++e) {
      for (const auto& [name, offset, rows, cols, got] : {std::tuple("gate_proj", e * 2 * kI * kH, kI, kH, &w13),
                                                          std::tuple("up_proj", (e * 2 + 1) * kI * kH, kI, kH, &w13),
                                                          std::tuple("down_proj", e * kH * kI, kH, kI, &w2)}) {
        const FileTensor& weight = tensor(fmt::format("experts.{}.{}.weight", e, name));
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < rows * cols; ++i) {
          double want = weight.at(i);
          if (dequantised) {
            const FileTensor& scale = tensor(fmt::format("experts.{}.{}.weight_scale_inv", e, name));
            const std::int64_t block = (i / cols / 128) * ((cols + 127) / 128) + i % cols / 128;
            // One fp32 product, rounded once to bf16.
            const float product = static_cast<float>(want) * static_cast<float>(scale.at(block));
            want = test::decode(DType::kBF16, test::encode(DType::kBF16, product));
          }
          wrong += (*got)[static_cast<std::size_t>(offset + i)] == want ? 0 : 1;
        }
        EXPECT_EQ(wrong, 0) << name << " of expert " << e;
      }
    }
  }

  test::TempFolder folder_;
  nlohmann::json config_ = test::dsv3_config();
  FileTensors tensors_ = test::dsv3_tensors();
};

// ---- what is loaded --------------------------------------------------------------------------------------------

TEST_F(CheckpointTest, InfoFromHeadersAlone) {
  write();
  auto opened = Checkpoint::open(folder_.path());
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  EXPECT_EQ(opened->family(), "deepseek_v3");
  EXPECT_EQ(opened->num_layers(), 2);
  EXPECT_THAT(opened->moe_layers(), ElementsAre(1));
  auto info = opened->layer_info(1);
  ASSERT_TRUE(info.is_ok()) << info.status().message();
  EXPECT_EQ(info->config.hidden, kH);
  EXPECT_EQ(info->config.intermediate, kI);
  EXPECT_EQ(info->config.num_experts, kE);
  EXPECT_EQ(info->config.top_k, 2);
  EXPECT_EQ(info->config.shared_intermediate, kI);
  EXPECT_EQ(info->gate, "sigmoid + bias, 2 groups keep 1 by top-2 sum, renormalised, x2.5");
  EXPECT_EQ(info->expert_format, "e4m3 128x128");
  EXPECT_EQ(info->shared_format, "bf16");
  EXPECT_EQ(info->expert_dtype, DType::kE4M3);
  EXPECT_EQ(info->gate_dtype, DType::kBF16);
  EXPECT_EQ(info->expert_bytes, 3 * kI * kH + 3 * 4 * 4);
  EXPECT_EQ(info->layer_bytes, kE * (3 * kI * kH + 3 * 4 * 4) + 3 * kI * kH * 2 + kE * kH * 2 + kE * 4);
  EXPECT_THAT(info->precisions, ElementsAre(Precision::kW8A8, Precision::kW8A16, Precision::kBF16, Precision::kF32));
  EXPECT_EQ(info->cannot_run, "");
}

TEST_F(CheckpointTest, E4M3ExpertsKeepTheirBytesAndScales) {
  for (Precision precision : {Precision::kW8A8, Precision::kW8A16, Precision::kF32}) {
    const LoadedLayer loaded = load(precision);
    const LayerWeights& w = loaded.weights;
    EXPECT_EQ(w.experts.w13.to_string(), "e4m3[4,272,160]");
    EXPECT_EQ(w.experts.w2.to_string(), "e4m3[4,160,136]");
    EXPECT_EQ(w.experts.w13_scale.to_string(), "f32[4,4,2]");
    EXPECT_EQ(w.experts.w2_scale.to_string(), "f32[4,2,2]");
    expect_experts(w, false);
    for (std::int64_t e = 0; e < kE; ++e) {
      for (std::int64_t i = 0; i < 4; ++i) {
        EXPECT_EQ(w.experts.w13_scale.as<float>()[e * 8 + i],
                  tensor(fmt::format("experts.{}.gate_proj.weight_scale_inv", e)).at(i));
        EXPECT_EQ(w.experts.w13_scale.as<float>()[e * 8 + 4 + i],
                  tensor(fmt::format("experts.{}.up_proj.weight_scale_inv", e)).at(i));
        EXPECT_EQ(w.experts.w2_scale.as<float>()[e * 4 + i],
                  tensor(fmt::format("experts.{}.down_proj.weight_scale_inv", e)).at(i));
      }
    }
    // The shared expert is bf16 and stays so.
    EXPECT_EQ(w.shared.w13.to_string(), "bf16[1,272,160]");
    EXPECT_FALSE(w.shared.w13_scale.is_present());
    EXPECT_EQ(std::memcmp(w.shared.w13.data, tensor("shared_experts.gate_proj.weight").bytes.data(), kI * kH * 2), 0);
    EXPECT_EQ(std::memcmp(w.shared.w13.as<std::byte>() + kI * kH * 2,
                          tensor("shared_experts.up_proj.weight").bytes.data(), kI * kH * 2),
              0);
    EXPECT_EQ(std::memcmp(w.shared.w2.data, tensor("shared_experts.down_proj.weight").bytes.data(), kI * kH * 2), 0);
    EXPECT_EQ(std::memcmp(w.w_gate.data, tensor("gate.weight").bytes.data(), kE * kH * 2), 0);
    for (const TensorView* view : {&w.w_gate, &w.experts.w13, &w.experts.w2, &w.experts.w13_scale, &w.shared.w13}) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view->data) % 64, 0u);
    }
    EXPECT_TRUE(check_weights(loaded.config, w).is_ok());
    EXPECT_EQ(num_bytes(w), kE * (3 * kI * kH + 12 * 4) + 3 * kI * kH * 2 + kE * kH * 2 + kE * 4);
    EXPECT_THAT(loaded.notes, IsEmpty());
  }
}

TEST_F(CheckpointTest, PrecisionBf16Dequantises) {
  const LoadedLayer loaded = load(Precision::kBF16);
  EXPECT_EQ(loaded.weights.experts.w13.to_string(), "bf16[4,272,160]");
  EXPECT_FALSE(loaded.weights.experts.w13_scale.is_present());
  expect_experts(loaded.weights, true);
  EXPECT_THAT(loaded.notes, Contains(HasSubstr("e4m3 tensors were dequantised")));
}

TEST_F(CheckpointTest, RoutedOnlyLeavesTheSharedExpertUnread) {
  const LoadedLayer loaded = load(Precision::kF32, true);
  EXPECT_FALSE(loaded.weights.shared.w13.is_present());
  EXPECT_EQ(loaded.config.shared_intermediate, 0);
  EXPECT_TRUE(check_weights(loaded.config, loaded.weights).is_ok());
  tensors_.erase(kMlp + "shared_experts.up_proj.weight");
  EXPECT_THAT(layer_status().message(), HasSubstr("missing: " + kMlp + "shared_experts.up_proj.weight"))
      << "still accounted for";
}

TEST_F(CheckpointTest, Case2BiasBitsEqualTheFile) {
  // Above 4 the bf16 step is 0.03125: these would become equal.
  FileTensor& bias = tensors_[kMlp + "gate.e_score_correction_bias"];
  const float values[] = {4.010f, 4.014f, -0.0f, std::numeric_limits<float>::denorm_min()};
  std::memcpy(bias.bytes.data(), values, sizeof(values));
  for (Precision precision : {Precision::kW8A8, Precision::kBF16, Precision::kF32}) {
    const LoadedLayer loaded = load(precision);
    ASSERT_EQ(loaded.weights.score_bias.to_string(), "f32[4]");
    EXPECT_EQ(std::memcmp(loaded.weights.score_bias.data, values, sizeof(values)), 0);
  }
  // A file that stores it in bf16 is taken at its word.
  bias = test::make_tensor(DType::kBF16, {kE}, 5, 4, 5);
  const LoadedLayer loaded = load();
  for (std::int64_t i = 0; i < kE; ++i) EXPECT_EQ(loaded.weights.score_bias.as<float>()[i], bias.at(i));
  EXPECT_THAT(loaded.notes, Contains("bf16 tensors were converted exactly to f32"));
}

TEST_F(CheckpointTest, Bf16AndE8m0ScalesAreConvertedExactly) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kE8M0, DType::kU8}) {
    tensors_ = test::dsv3_tensors();
    for (auto& [name, t] : tensors_) {
      if (!name.ends_with("_scale_inv")) continue;
      t = test::make_tensor(dtype == DType::kU8 ? DType::kE8M0 : dtype, t.shape, std::hash<std::string>{}(name), 1e-3,
                            4.0);
      t.dtype = dtype;
    }
    const LoadedLayer loaded = load(Precision::kW8A8);
    for (std::int64_t e = 0; e < kE; ++e) {
      for (std::int64_t i = 0; i < 4; ++i) {
        FileTensor scale = tensor(fmt::format("experts.{}.down_proj.weight_scale_inv", e));
        if (dtype == DType::kU8) scale.dtype = DType::kE8M0;
        EXPECT_EQ(loaded.weights.experts.w2_scale.as<float>()[e * 4 + i], scale.at(i)) << to_string(dtype);
      }
    }
  }
}

TEST_F(CheckpointTest, E8m0Per32ColumnsBecomesBf16Exactly) {
  config_["quantization_config"]["weight_block_size"] = {1, 32};
  for (auto& [name, t] : tensors_) {
    if (!name.ends_with("_scale_inv")) continue;
    const auto& weight = tensors_.at(name.substr(0, name.size() - std::strlen("_scale_inv")));
    t = test::make_tensor(DType::kE8M0, {weight.shape[0], (weight.shape[1] + 31) / 32}, std::hash<std::string>{}(name),
                          1e-3, 4.0);
    t.dtype = DType::kU8;
  }
  const LoadedLayer loaded = load(Precision::kBF16);
  const auto w2 = test::to_doubles(loaded.weights.experts.w2);
  for (std::int64_t e = 0; e < kE; ++e) {
    const FileTensor& weight = tensor(fmt::format("experts.{}.down_proj.weight", e));
    FileTensor scale = tensor(fmt::format("experts.{}.down_proj.weight_scale_inv", e));
    scale.dtype = DType::kE8M0;
    for (std::int64_t i = 0; i < kH * kI; ++i) {
      ASSERT_EQ(w2[static_cast<std::size_t>(e * kH * kI + i)], weight.at(i) * scale.at(i / kI * 5 + i % kI / 32))
          << e << " " << i;
    }
  }
  // A product below what bf16 holds is refused, not rounded: 2^-9 * 2^-127.
  FileTensor& weight = tensors_[kMlp + "experts.2.up_proj.weight"];
  FileTensor& scale = tensors_[kMlp + "experts.2.up_proj.weight_scale_inv"];
  weight.set_bits(0, 1);
  scale.set_bits(0, 0);
  EXPECT_THAT(([&] { load(Precision::kBF16); }),
              ::testing::ThrowsMessage<std::runtime_error>(HasSubstr("experts.2.up_proj.weight: row 0")));
  auto opened = Checkpoint::open(folder_.path());
  LoadOptions w8a8;
  w8a8.precision = Precision::kW8A8;
  EXPECT_THAT(opened->load(1, w8a8).status().message(), AllOf(HasSubstr("run in bf16, f32"), HasSubstr("not in w8a8")));
}

TEST_F(CheckpointTest, F16WeightsBecomeF32Exactly) {
  config_.erase("quantization_config");
  FileTensors plain;
  for (auto& [name, t] : tensors_) {
    if (name.ends_with("_scale_inv")) continue;
    plain[name] = name.starts_with(kMlp) ? test::make_tensor(DType::kF16, t.shape, std::hash<std::string>{}(name)) : t;
  }
  plain[kMlp + "experts.0.gate_proj.weight"].set_bits(0, 1);       // the smallest subnormal
  plain[kMlp + "experts.0.gate_proj.weight"].set_bits(1, 0x7BFF);  // 65504
  tensors_ = plain;
  const LoadedLayer loaded = load();
  EXPECT_EQ(loaded.weights.experts.w13.dtype, DType::kF32);
  EXPECT_EQ(loaded.weights.w_gate.dtype, DType::kF32);
  expect_experts(loaded.weights, false);
}

TEST_F(CheckpointTest, NanWeightsAreCountedByTensor) {
  tensors_[kMlp + "experts.1.up_proj.weight"].set_bits(17, 0x7F);
  tensors_[kMlp + "experts.1.up_proj.weight"].set_bits(18, 0xFF);
  tensors_[kMlp + "experts.3.down_proj.weight_scale_inv"].set_bits(1, 0x7FC00000);
  tensors_[kMlp + "shared_experts.down_proj.weight"].set_bits(5, 0x7FC1);
  tensors_[kMlp + "gate.weight"].set_bits(6, 0xFFC0);
  const LoadedLayer loaded = load(Precision::kW8A8);
  EXPECT_EQ(loaded.num_nan, 5);
  EXPECT_THAT(loaded.nan_tensors, ElementsAre(kMlp + "gate.weight: 1 NaN", kMlp + "experts.1.up_proj.weight: 2 NaN",
                                              kMlp + "experts.3.down_proj.weight_scale_inv: 1 NaN",
                                              kMlp + "shared_experts.down_proj.weight: 1 NaN"));
  EXPECT_EQ(load(Precision::kBF16).num_nan, 5);
}

TEST_F(CheckpointTest, ProgressRunsFromZeroToAllBytes) {
  write();
  auto opened = Checkpoint::open(folder_.path());
  ASSERT_TRUE(opened.is_ok());
  std::vector<std::int64_t> done;
  std::int64_t total = 0;
  LoadOptions options;
  options.progress = [&](std::int64_t d, std::int64_t t) {
    done.push_back(d);
    total = t;
  };
  ASSERT_TRUE(opened->load(1, options).is_ok());
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_EQ(done.back(), total);
  EXPECT_EQ(total, opened->layer_info(1)->layer_bytes);
}

TEST_F(CheckpointTest, LoadIsStoppedWhenAskedTo) {
  write();
  auto opened = Checkpoint::open(folder_.path());
  ASSERT_TRUE(opened.is_ok());
  LoadOptions options;
  int calls = 0;
  options.stop = [&] { return ++calls == 3; };
  const auto loaded = opened->load(1, options);
  ASSERT_FALSE(loaded.is_ok());
  EXPECT_EQ(loaded.status().code(), StatusCode::kIoError);
  EXPECT_THAT(loaded.status().message(), testing::HasSubstr("stopped"));
  EXPECT_EQ(calls, 3);
}

TEST_F(CheckpointTest, Case125UnalignedTensorsLoad) {
  // One byte before everything else: every wider tensor starts at an odd address.
  tensors_["a.marker"] = test::make_tensor(DType::kU8, {1}, 1);
  for (Precision precision : {Precision::kW8A8, Precision::kBF16})
    expect_experts(load(precision).weights, precision == Precision::kBF16);
}

TEST_F(CheckpointTest, Case134NoPoisonIsLeftInAnyLayout) {
  for (Precision precision : {Precision::kW8A8, Precision::kBF16, Precision::kF32}) {
    write();
    auto config = io::read_hf_config(folder_ / "config.json");
    auto catalog = io::Catalog::open(folder_.path());
    ASSERT_TRUE(config.is_ok() && catalog.is_ok());
    auto files = io::find_layer(*catalog, *config, 1);
    ASSERT_TRUE(files.is_ok()) << files.status().message();
    LoadOptions options;
    options.precision = precision;
    auto loaded = io::load_layer(*files, options, /*poison=*/true);
    ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
    expect_experts(loaded->weights, precision == Precision::kBF16);
    for (const TensorView* view :
         {&loaded->weights.w_gate, &loaded->weights.score_bias, &loaded->weights.experts.w13_scale,
          &loaded->weights.experts.w2_scale, &loaded->weights.shared.w13, &loaded->weights.shared.w2}) {
      for (double value : test::to_doubles(*view)) ASSERT_FALSE(std::isnan(value)) << view->to_string();
    }
  }
}

TEST_F(CheckpointTest, Case134FusedLayoutHoldsTheSameWeights) {
  // The same bf16 experts, once by one and once fused.
  config_.erase("quantization_config");
  FileTensors split, fused;
  for (auto& [name, t] : tensors_) {
    if (name.ends_with("_scale_inv")) continue;
    split[name] = test::make_tensor(DType::kBF16, t.shape, std::hash<std::string>{}(name));
    if (!name.starts_with(kMlp + "experts.")) fused[name] = split[name];
  }
  FileTensor gate_up{DType::kBF16, {kE, 2 * kI, kH}, {}}, down{DType::kBF16, {kE, kH, kI}, {}};
  for (std::int64_t e = 0; e < kE; ++e) {
    for (const char* name : {"gate_proj", "up_proj"}) {
      const auto& bytes = split[fmt::format("{}experts.{}.{}.weight", kMlp, e, name)].bytes;
      gate_up.bytes.insert(gate_up.bytes.end(), bytes.begin(), bytes.end());
    }
    const auto& bytes = split[fmt::format("{}experts.{}.down_proj.weight", kMlp, e)].bytes;
    down.bytes.insert(down.bytes.end(), bytes.begin(), bytes.end());
  }
  tensors_ = split;
  const LoadedLayer want = load();
  expect_experts(want.weights, false);
  fused[kMlp + "experts.gate_up_proj"] = gate_up;
  fused[kMlp + "experts.down_proj"] = down;
  tensors_ = fused;
  // At every alignment of the fused tensors in the file: views where they fit, copies where they do not.
  for (std::int64_t pad : {1, 2, 33, 64}) {
    tensors_["a.pad"] = test::make_tensor(DType::kU8, {pad}, 1);
    const LoadedLayer got = load();
    EXPECT_EQ(std::memcmp(got.weights.experts.w13.data, want.weights.experts.w13.data,
                          static_cast<std::size_t>(want.weights.experts.w13.num_bytes())),
              0);
    EXPECT_EQ(std::memcmp(got.weights.experts.w2.data, want.weights.experts.w2.data,
                          static_cast<std::size_t>(want.weights.experts.w2.num_bytes())),
              0);
  }
  // Both forms in one file: one of them would be ignored.
  tensors_.insert(split.begin(), split.end());
  EXPECT_THAT(layer_status().message(),
              HasSubstr("unknown to the family: " + kMlp + "experts.down_proj, " + kMlp + "experts.gate_up_proj"));
}

// ---- what a layer must hold --------------------------------------------------------------------------------------

TEST_F(CheckpointTest, MissingSurplusAndWrongTensorsAreNamed) {
  tensors_.erase(kMlp + "experts.3.up_proj.weight");
  tensors_.erase(kMlp + "gate.weight");
  tensors_[kMlp + "experts.4.up_proj.weight"] = test::make_tensor(DType::kE4M3, {1}, 1);
  tensors_[kMlp + "experts.2.gate_proj.weight"].shape = {kH, kI};
  tensors_[kMlp + "experts.1.down_proj.weight"] = test::make_tensor(DType::kBF16, {kH, kI}, 1);
  const Status status = layer_status();
  EXPECT_EQ(status.code(), StatusCode::kBadData);
  EXPECT_THAT(
      status.message(),
      AllOf(HasSubstr("config.json: " + kMlp + "*: layer 1 of a deepseek_v3 checkpoint (H = 160, I = 136, E = 4)"),
            HasSubstr("missing: " + kMlp + "gate.weight, " + kMlp + "experts.3.up_proj.weight;"),
            HasSubstr(kMlp + "experts.1.down_proj.weight is bf16[160,136], expected e4m3[160,136]"),
            HasSubstr(kMlp + "experts.2.gate_proj.weight is e4m3[160,136], expected e4m3[136,160]"),
            HasSubstr("unknown to the family: " + kMlp + "experts.4.up_proj.weight")));
}

TEST_F(CheckpointTest, MissingOnesBeyondTheFirstFewAreCounted) {
  for (std::int64_t j = 1; j < kE; ++j) {
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      tensors_.erase(fmt::format("{}experts.{}.{}.weight", kMlp, j, name));
      tensors_.erase(fmt::format("{}experts.{}.{}.weight_scale_inv", kMlp, j, name));
    }
  }
  EXPECT_THAT(layer_status().message(), HasSubstr("and 14 more"));
}

TEST_F(CheckpointTest, Case53MissingAndPlaceholderScalesAreNamed) {
  FileTensor saved = tensors_[kMlp + "experts.2.up_proj.weight_scale_inv"];
  tensors_.erase(kMlp + "experts.2.up_proj.weight_scale_inv");
  EXPECT_THAT(layer_status().message(),
              HasSubstr("missing: " + kMlp + "experts.2.up_proj.weight_scale_inv (scale not loaded)"));
  for (double placeholder : {-3.4e38, static_cast<double>(std::numeric_limits<float>::infinity()), -1.0}) {
    for (Precision precision : {Precision::kW8A8, Precision::kBF16}) {
      FileTensor scale = saved;
      scale.set(3, placeholder);
      tensors_[kMlp + "experts.2.up_proj.weight_scale_inv"] = scale;
      EXPECT_THAT(([&] { load(precision); }),
                  ::testing::ThrowsMessage<std::runtime_error>(
                      AllOf(HasSubstr("scale not loaded"), HasSubstr("experts.2.up_proj.weight_scale_inv"))));
    }
  }
}

TEST_F(CheckpointTest, Case45BlockSizeComesFromTheConfig) {
  // [1000,256] with 8 x 2 scales: 128 rows a block, the last of 104; a guess from the shapes would say 125.
  config_["hidden_size"] = 1000;
  config_["moe_intermediate_size"] = 256;
  for (auto& [name, t] : tensors_) {
    for (std::int64_t& extent : t.shape) extent = extent == kH ? 1000 : extent == kI ? 256 : extent;
    if (name.ends_with("down_proj.weight_scale_inv")) t.shape = {8, 2};
    if (name.ends_with("gate_proj.weight_scale_inv") || name.ends_with("up_proj.weight_scale_inv")) t.shape = {2, 8};
    t = test::make_tensor(t.dtype, t.shape, std::hash<std::string>{}(name), t.dtype == DType::kF32 ? 0.5 : -400,
                          t.dtype == DType::kF32 ? 2 : 400);
  }
  const LoadedLayer loaded = load(Precision::kBF16);
  const auto w2 = test::to_doubles(loaded.weights.experts.w2);
  const FileTensor &weight = tensor("experts.0.down_proj.weight"),
                   &scale = tensor("experts.0.down_proj.weight_scale_inv");
  for (std::int64_t row : {0, 124, 125, 127, 128, 895, 896, 999}) {
    const std::int64_t i = row * 256 + 200;
    const float product = static_cast<float>(weight.at(i)) * static_cast<float>(scale.at(row / 128 * 2 + 1));
    EXPECT_EQ(w2[static_cast<std::size_t>(i)], test::decode(DType::kBF16, test::encode(DType::kBF16, product))) << row;
  }
  // Config and shape that do not fit each other.
  tensors_[kMlp + "experts.0.down_proj.weight_scale_inv"].shape = {2, 8};
  EXPECT_THAT(layer_status().message(), HasSubstr("experts.0.down_proj.weight_scale_inv is f32[2,8], expected"));
  // Another block size is understood and refused, not approximated.
  config_["quantization_config"]["weight_block_size"] = {125, 128};
  write();
  auto info = Checkpoint::open(folder_.path())->layer_info(1);
  ASSERT_TRUE(info.is_ok()) << info.status().message();
  EXPECT_THAT(info->cannot_run, HasSubstr("weight_block_size is [125,128]"));
  EXPECT_THAT(info->precisions, IsEmpty());
}

TEST_F(CheckpointTest, E4M3WithoutABlockSizeIsInspectedAndNotRun) {
  for (bool with_config : {true, false}) {
    if (with_config) {
      config_["quantization_config"].erase("weight_block_size");
    } else {
      config_.erase("quantization_config");
    }
    write();
    auto opened = Checkpoint::open(folder_.path());
    ASSERT_TRUE(opened.is_ok()) << opened.status().message();
    auto info = opened->layer_info(1);
    ASSERT_TRUE(info.is_ok()) << info.status().message();
    EXPECT_THAT(info->cannot_run, HasSubstr("no weight_block_size"));
    EXPECT_EQ(opened->load(1, {}).status().code(), StatusCode::kUnsupported);
  }
}

TEST_F(CheckpointTest, Case49PackedIntegersAreInspectedAndNotRun) {
  // Kimi K2-Thinking's form of routed experts.
  config_["quantization_config"] =
      nlohmann::json::parse(R"({"quant_method":"compressed-tensors","format":"pack-quantized","ignore":["lm_head"],
    "config_groups":{"group_0":{"weights":{"num_bits":4,"group_size":32,"type":"int"}}}})");
  FileTensors packed;
  for (auto& [name, t] : tensors_) {
    if (name.ends_with("_scale_inv")) continue;
    if (!name.starts_with(kMlp + "experts.")) {
      packed[name] = t;
      continue;
    }
    packed[name + "_packed"] = test::make_tensor(DType::kI32, {t.shape[0], t.shape[1] / 8}, 1);
    packed[name + "_scale"] = test::make_tensor(DType::kBF16, {t.shape[0], t.shape[1] / 32}, 1);
    packed[name + "_shape"] = test::make_tensor(DType::kI32, {2}, 1);
  }
  tensors_ = packed;
  write();
  auto opened = Checkpoint::open(folder_.path());
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  auto info = opened->layer_info(1);
  ASSERT_TRUE(info.is_ok()) << info.status().message();
  EXPECT_EQ(info->expert_format, "int4 g32");
  EXPECT_THAT(info->cannot_run,
              AllOf(HasSubstr("packed integers"), HasSubstr("compressed-tensors, pack-quantized, int4 g32")));
  EXPECT_THAT(info->precisions, IsEmpty());
  EXPECT_GT(info->expert_bytes, 0);
  EXPECT_THAT(opened->load(1, {}).status().message(),
              HasSubstr("layer 1 cannot be run: the experts are packed integers"));
}

TEST_F(CheckpointTest, Case136IgnoredModulesCannotBeQuantised) {
  auto& quant = config_["quantization_config"];
  quant["modules_to_not_convert"] = {"mlp.gate", "lm_head", "re:.*self_attn.*", "shared_experts"};
  EXPECT_TRUE(layer_status().is_ok()) << layer_status().message();
  quant["modules_to_not_convert"] = {"experts.2.up_proj"};
  EXPECT_THAT(layer_status().message(),
              HasSubstr(kMlp + "experts.2.up_proj is quantised in the file, but quantization_config lists it"));
  quant["modules_to_not_convert"] = {"re:model[.]layers[.]1[.]mlp[.]experts[.]3"};
  EXPECT_THAT(layer_status().message(), HasSubstr("experts.3.gate_proj is quantised in the file"));
  quant["modules_to_not_convert"] = {"re:("};
  EXPECT_THAT(layer_status().message(), HasSubstr("'re:(' is no regular expression"));
}

TEST_F(CheckpointTest, StaticActivationScalesAreKnownAndNotUsed) {
  tensors_[kMlp + "experts.0.gate_proj.input_scale"] = test::make_tensor(DType::kF32, {1}, 1);
  const LoadedLayer loaded = load();
  EXPECT_THAT(loaded.notes, Contains(kMlp + "experts.0.gate_proj.input_scale is known and not used"));
}

TEST_F(CheckpointTest, LayersThatAreNotThere) {
  EXPECT_THAT(layer_status(0).message(), HasSubstr("layer 0 of 2 has no experts"));
  EXPECT_THAT(layer_status(2).message(), HasSubstr("there is no layer 2; the model has 2 layers"));
  EXPECT_THAT(layer_status(-1).message(), HasSubstr("there is no layer -1"));
  FileTensors rest;
  for (auto& [name, t] : tensors_) {
    if (!name.starts_with(kMlp)) rest[name] = t;
  }
  tensors_ = rest;
  EXPECT_THAT(layer_status().message(),
              AllOf(HasSubstr("the files hold none of its tensors"), HasSubstr("model.layers.1.mlp.*"),
                    HasSubstr("language_model.model.layers.1.mlp.*")));
  EXPECT_EQ(layer_status().code(), StatusCode::kNotFound);
}

TEST_F(CheckpointTest, PrefixVariants) {
  const FileTensors original = tensors_;
  for (const char* prefix : {"model.language_model.layers.1.", "language_model.model.layers.1.", "layers.1."}) {
    tensors_.clear();
    for (const auto& [name, t] : original) {
      if (name.starts_with("model.layers.1.")) tensors_[prefix + name.substr(15)] = t;
    }
    EXPECT_TRUE(layer_status().is_ok()) << layer_status().message();
  }
  tensors_.insert(original.begin(), original.end());
  EXPECT_THAT(layer_status().message(), HasSubstr("layer 1 is in the files twice"));
}

TEST_F(CheckpointTest, FoldersThatAreNoCheckpoints) {
  EXPECT_THAT(Checkpoint::open(folder_ / "absent").status().message(), HasSubstr("there is no such file or folder"));
  EXPECT_THAT(open_status().message(), HasSubstr("config.json: No such file or directory"));
  test::write_text(folder_ / "config.json", config_.dump());
  EXPECT_THAT(open_status().message(), HasSubstr("there is no .safetensors file in the folder"));
  test::write_text(folder_ / "model.safetensors", "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_THAT(open_status().message(), HasSubstr("Git LFS pointer"));
}

TEST(TinyDsv3, TheRealCheckpointLoadsInEveryPrecision) {
  auto opened = Checkpoint::open(std::filesystem::path(SLUICE_SOURCE_DIR) / "data/tiny-dsv3");
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  EXPECT_THAT(opened->moe_layers(), ElementsAre(1, 2, 3));
  for (std::int64_t layer : opened->moe_layers()) {
    auto info = opened->layer_info(layer);
    ASSERT_TRUE(info.is_ok()) << info.status().message();
    EXPECT_EQ(info->expert_format, "e4m3 128x128");
    EXPECT_EQ(info->shared_format, "bf16");
    for (Precision precision : info->precisions) {
      LoadOptions options;
      options.precision = precision;
      auto loaded = opened->load(layer, options);
      ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
      EXPECT_EQ(loaded->num_nan, 0);
    }
  }
}

}  // namespace
}  // namespace sluice
