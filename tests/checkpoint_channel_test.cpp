// Checkpoints with one weight scale per output channel, e4m3 and int8, as compressed-tensors writes them: what is
// loaded, element by element against the crafted bytes, and what is refused by name.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/checkpoint_files.h"
#include "harness/fill.h"
#include "io/catalog.h"
#include "io/layer_load.h"
#include "sluice/checkpoint.h"

namespace sluice {
namespace {

using test::FileTensor;
using test::FileTensors;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::int64_t kH = 160, kI = 136, kE = 4;
const std::string kMlp = "model.layers.1.mlp.";

nlohmann::json channel_config(DType dtype) {
  nlohmann::json config = test::dsv3_config();
  config["quantization_config"] = nlohmann::json::parse(fmt::format(
      R"({{"quant_method":"compressed-tensors","format":"{}","quantization_status":"compressed","ignore":["lm_head"],
    "config_groups":{{"group_0":{{"targets":["Linear"],"output_activations":null,
    "weights":{{"num_bits":8,"type":"{}","strategy":"channel","symmetric":true,"dynamic":false,"block_structure":null}},
    "input_activations":{{"num_bits":8,"type":"{}","strategy":"token","symmetric":true,"dynamic":true}}}}}}}})",
      dtype == DType::kI8 ? "int-quantized" : "float-quantized", dtype == DType::kI8 ? "int" : "float",
      dtype == DType::kI8 ? "int" : "float"));
  return config;
}

// The harness's model with its experts' blocks replaced by channels.
FileTensors channel_tensors(DType dtype, DType scale) {
  FileTensors tensors;
  std::uint64_t seed = 100;
  for (const auto& [name, t] : test::dsv3_tensors()) {
    if (name.ends_with("_scale_inv")) continue;
    tensors[name] = t;
    if (!name.starts_with(kMlp + "experts.")) continue;
    tensors[name] =
        test::make_tensor(dtype, t.shape, seed++, dtype == DType::kI8 ? -127 : -448, dtype == DType::kI8 ? 127 : 448);
    tensors[name + "_scale"] = test::make_tensor(scale, {t.shape[0], 1}, seed++, 1e-4, 1e-3);
  }
  return tensors;
}

class CheckpointChannel : public ::testing::TestWithParam<DType> {
 protected:
  Result<Checkpoint> open() {
    test::write_text(folder_ / "config.json", config_.dump());
    test::write_file(folder_ / "model.safetensors", tensors_);
    return Checkpoint::open(folder_.path());
  }
  Result<LoadedLayer> load(Precision precision) {
    auto opened = open();
    if (!opened) return opened.status();
    LoadOptions options;
    options.precision = precision;
    return opened->load(1, options);
  }
  std::string info_message() {
    auto opened = open();
    return opened ? opened->layer_info(1).status().message() : opened.status().message();
  }
  LayerInfo info() {
    auto opened = open();
    if (!opened) throw std::runtime_error(opened.status().message());
    auto layer = opened->layer_info(1);
    if (!layer) throw std::runtime_error(layer.status().message());
    return *layer;
  }
  const FileTensor& tensor(const std::string& name) const { return tensors_.at(kMlp + "experts." + name); }

  test::TempFolder folder_;
  nlohmann::json config_ = channel_config(GetParam());
  FileTensors tensors_ = channel_tensors(GetParam(), DType::kF32);
};

TEST_P(CheckpointChannel, IsInspectedByName) {
  const LayerInfo layer = info();
  EXPECT_EQ(layer.expert_format, GetParam() == DType::kI8 ? "int8 per channel" : "e4m3 per channel");
  EXPECT_EQ(layer.expert_dtype, GetParam());
  EXPECT_EQ(layer.shared_format, "bf16");
  EXPECT_EQ(layer.expert_bytes, 3 * kI * kH + (2 * kI + kH) * 4);
  EXPECT_EQ(layer.cannot_run, "");
  EXPECT_THAT(layer.precisions, ElementsAre(Precision::kW8A8, Precision::kW8A16, Precision::kBF16, Precision::kF32));
}

TEST_P(CheckpointChannel, BytesAndScalesArriveWhereTheyBelong) {
  for (DType scale_dtype : {DType::kF32, DType::kBF16}) {
    for (bool flat : {false, true}) {
      tensors_ = channel_tensors(GetParam(), scale_dtype);
      // Some tools leave out the axis of one.
      for (auto& [name, t] : tensors_) {
        if (flat && name.ends_with("_scale")) t.shape.pop_back();
      }
      for (Precision precision : {Precision::kW8A8, Precision::kW8A16, Precision::kF32}) {
        const auto loaded = load(precision);
        ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
        const FfnWeights& w = loaded->weights.experts;
        const std::string dtype(to_string(GetParam()));
        EXPECT_EQ(w.w13.to_string(), dtype + "[4,272,160]");
        EXPECT_EQ(w.w2.to_string(), dtype + "[4,160,136]");
        EXPECT_EQ(w.w13_scale.to_string(), "f32[4,272,1]");
        EXPECT_EQ(w.w2_scale.to_string(), "f32[4,160,1]");
        const auto w13 = test::to_doubles(w.w13), w2 = test::to_doubles(w.w2);
        const auto s13 = test::to_doubles(w.w13_scale), s2 = test::to_doubles(w.w2_scale);
        for (std::int64_t e = 0; e < kE; ++e) {
          for (const auto& [name, first_row, rows, cols, got, got_scale] :
               {std::tuple("gate_proj", e * 2 * kI, kI, kH, &w13, &s13),
                std::tuple("up_proj", (e * 2 + 1) * kI, kI, kH, &w13, &s13),
                std::tuple("down_proj", e * kH, kH, kI, &w2, &s2)}) {
            const FileTensor& weight = tensor(fmt::format("{}.{}.weight", e, name));
            const FileTensor& scale = tensor(fmt::format("{}.{}.weight_scale", e, name));
            std::int64_t wrong = 0;
            for (std::int64_t i = 0; i < rows * cols; ++i)
              wrong += (*got)[static_cast<std::size_t>(first_row * cols + i)] == weight.at(i) ? 0 : 1;
            for (std::int64_t n = 0; n < rows; ++n)
              wrong += (*got_scale)[static_cast<std::size_t>(first_row + n)] == scale.at(n) ? 0 : 1;
            EXPECT_EQ(wrong, 0) << name << " of expert " << e;
          }
        }
      }
    }
  }
}

TEST_P(CheckpointChannel, PrecisionBf16Dequantises) {
  const auto loaded = load(Precision::kBF16);
  ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
  const FfnWeights& w = loaded->weights.experts;
  EXPECT_EQ(w.w13.to_string(), "bf16[4,272,160]");
  EXPECT_FALSE(w.w13_scale.is_present());
  EXPECT_FALSE(w.w2_scale.is_present());
  const auto w13 = test::to_doubles(w.w13), w2 = test::to_doubles(w.w2);
  for (std::int64_t e = 0; e < kE; ++e) {
    for (const auto& [name, first_row, rows, cols, got] :
         {std::tuple("gate_proj", e * 2 * kI, kI, kH, &w13), std::tuple("up_proj", (e * 2 + 1) * kI, kI, kH, &w13),
          std::tuple("down_proj", e * kH, kH, kI, &w2)}) {
      const FileTensor& weight = tensor(fmt::format("{}.{}.weight", e, name));
      const FileTensor& scale = tensor(fmt::format("{}.{}.weight_scale", e, name));
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < rows * cols; ++i) {
        // One fp32 product, rounded once to bf16.
        const float product = static_cast<float>(weight.at(i)) * static_cast<float>(scale.at(i / cols));
        const double want = test::decode(DType::kBF16, test::encode(DType::kBF16, static_cast<double>(product)));
        wrong += (*got)[static_cast<std::size_t>(first_row * cols + i)] == want ? 0 : 1;
      }
      EXPECT_EQ(wrong, 0) << name << " of expert " << e;
    }
  }
}

TEST_P(CheckpointChannel, Case134NoPoisonIsLeft) {
  ASSERT_TRUE(open().is_ok());
  const auto config = io::read_hf_config(folder_ / "config.json");
  const auto catalog = io::Catalog::open(folder_.path());
  ASSERT_TRUE(config.is_ok() && catalog.is_ok());
  const auto files = io::find_layer(*catalog, *config, 1);
  ASSERT_TRUE(files.is_ok()) << files.status().message();
  LoadOptions options;
  options.precision = Precision::kW8A8;
  const auto clean = io::load_layer(*files, options, false), poisoned = io::load_layer(*files, options, true);
  ASSERT_TRUE(clean.is_ok() && poisoned.is_ok()) << clean.status().message();
  const FfnWeights &a = clean->weights.experts, &b = poisoned->weights.experts;
  for (const auto& [x, y] : {std::pair(&a.w13, &b.w13), std::pair(&a.w2, &b.w2), std::pair(&a.w13_scale, &b.w13_scale),
                             std::pair(&a.w2_scale, &b.w2_scale)}) {
    EXPECT_EQ(std::memcmp(x->data, y->data, static_cast<std::size_t>(x->num_bytes())), 0);
  }
}

TEST_P(CheckpointChannel, TheSharedExpertMayBeQuantisedToo) {
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    const std::string module = kMlp + "shared_experts." + name;
    FileTensor& weight = tensors_.at(module + ".weight");
    weight = test::make_tensor(GetParam(), weight.shape, 7, -100, 100);
    tensors_[module + ".weight_scale"] = test::make_tensor(DType::kF32, {weight.shape[0], 1}, 8, 1e-4, 1e-3);
  }
  EXPECT_EQ(info().shared_format, info().expert_format);
  const auto loaded = load(Precision::kW8A8);
  ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
  EXPECT_EQ(loaded->weights.shared.w13.dtype, GetParam());
  EXPECT_EQ(loaded->weights.shared.w13_scale.to_string(), "f32[1,272,1]");
  const FileTensor& up = tensors_.at(kMlp + "shared_experts.up_proj.weight_scale");
  EXPECT_EQ(loaded->weights.shared.w13_scale.as<float>()[kI + 5], static_cast<float>(up.at(5)));
}

TEST_P(CheckpointChannel, FaultsAreNamed) {
  const FileTensors whole = tensors_;
  tensors_.erase(kMlp + "experts.2.up_proj.weight_scale");
  EXPECT_THAT(info_message(), HasSubstr("missing: " + kMlp + "experts.2.up_proj.weight_scale (scale not loaded)"));
  // Of another width: a scale per tensor, and scales of the inputs.
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{1}, {1, kH}, {kI, 2}}) {
    tensors_ = whole;
    tensors_[kMlp + "experts.2.up_proj.weight_scale"] = test::make_tensor(DType::kF32, shape, 1, 0.5, 1);
    EXPECT_THAT(info_message(), AllOf(HasSubstr("experts.2.up_proj.weight_scale is f32["), HasSubstr("[136")));
  }
  tensors_ = whole;
  tensors_[kMlp + "experts.2.up_proj.weight_scale"].set(3, -1.0);
  EXPECT_THAT(load(Precision::kW8A8).status().message(),
              AllOf(HasSubstr("scale not loaded"), HasSubstr("experts.2.up_proj.weight_scale holds -1")));
  tensors_ = whole;
  tensors_[kMlp + "experts.2.up_proj.weight_zero_point"] = test::make_tensor(DType::kI8, {kI, 1}, 1);
  EXPECT_THAT(info_message(), HasSubstr("experts.2.up_proj.weight_zero_point"));
  tensors_ = whole;
  config_["quantization_config"]["ignore"] = {"re:.*experts[.]3[.].*"};
  EXPECT_THAT(info_message(), HasSubstr("experts.3.gate_proj is quantised in the file, but quantization_config lists"));
}

TEST_P(CheckpointChannel, OtherGranularitiesAreInspectedAndNotRun) {
  nlohmann::json& weights = config_["quantization_config"]["config_groups"]["group_0"]["weights"];
  for (const char* strategy : {"token", "group", "nonsense"}) {
    weights["strategy"] = strategy;
    const LayerInfo layer = info();
    EXPECT_THAT(layer.precisions, IsEmpty());
    EXPECT_THAT(layer.cannot_run, HasSubstr(fmt::format("a scale per {}", strategy)));
    EXPECT_EQ(load(Precision::kBF16).status().code(), StatusCode::kUnsupported);
  }
  // Two groups that disagree are no granularity.
  weights["strategy"] = "channel";
  auto& groups = config_["quantization_config"]["config_groups"];
  groups["group_1"] = groups["group_0"];
  EXPECT_EQ(info().cannot_run, "");
  groups["group_1"]["weights"]["strategy"] = "tensor";
  EXPECT_THAT(info().cannot_run, HasSubstr("a scale per channel or tensor"));
  groups.erase("group_1");
  config_.erase("quantization_config");
  EXPECT_THAT(info().precisions, IsEmpty());
  EXPECT_THAT(info().cannot_run, Not(IsEmpty()));
}

INSTANTIATE_TEST_SUITE_P(Both, CheckpointChannel, ::testing::Values(DType::kE4M3, DType::kI8),
                         [](const auto& p) { return p.param == DType::kI8 ? "Int8" : "E4M3"; });

// One scale of a whole tensor is that of each of its rows, gate's and up's apart.
TEST(CheckpointTensor, OneScaleIsRepeated) {
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{}, {1}, {1, 1}}) {
    test::TempFolder folder;
    nlohmann::json config = channel_config(DType::kE4M3);
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "tensor";
    FileTensors tensors = channel_tensors(DType::kE4M3, DType::kF32);
    std::uint64_t seed = 500;
    for (auto& [name, t] : tensors) {
      if (name.ends_with("_scale")) t = test::make_tensor(DType::kF32, shape, seed++, 1e-4, 1e-3);
    }
    test::write_text(folder / "config.json", config.dump());
    test::write_file(folder / "model.safetensors", tensors);
    const auto opened = Checkpoint::open(folder.path());
    ASSERT_TRUE(opened.is_ok());
    const auto info = opened->layer_info(1);
    ASSERT_TRUE(info.is_ok()) << info.status().message();
    EXPECT_EQ(info->expert_format, "e4m3 per tensor");
    LoadOptions options;
    options.precision = Precision::kW8A8;
    const auto kept = opened->load(1, options);
    ASSERT_TRUE(kept.is_ok()) << kept.status().message();
    options.precision = Precision::kBF16;
    const auto dequantised = opened->load(1, options);
    ASSERT_TRUE(dequantised.is_ok()) << dequantised.status().message();
    for (std::int64_t e = 0; e < kE; ++e) {
      const auto scale = [&](const char* name) {
        return static_cast<float>(tensors.at(fmt::format("{}experts.{}.{}.weight_scale", kMlp, e, name)).at(0));
      };
      for (std::int64_t n = 0; n < 2 * kI; ++n) {
        ASSERT_EQ(kept->weights.experts.w13_scale.as<float>()[e * 2 * kI + n],
                  n < kI ? scale("gate_proj") : scale("up_proj"));
      }
      for (std::int64_t n = 0; n < kH; ++n) {
        ASSERT_EQ(kept->weights.experts.w2_scale.as<float>()[e * kH + n], scale("down_proj"));
      }
      const FileTensor& up = tensors.at(fmt::format("{}experts.{}.up_proj.weight", kMlp, e));
      const float product = static_cast<float>(up.at(135 * kH + 3)) * scale("up_proj");
      EXPECT_EQ(dequantised->weights.experts.w13.as<std::uint16_t>()[((e * 2 + 1) * kI + 135) * kH + 3],
                test::encode(DType::kBF16, static_cast<double>(product)));
    }
    // As many scales as rows are no scale of a tensor.
    tensors[kMlp + "experts.0.up_proj.weight_scale"] = test::make_tensor(DType::kF32, {kI, 1}, 1, 0.5, 1);
    test::write_file(folder / "model.safetensors", tensors);
    EXPECT_THAT(Checkpoint::open(folder.path())->layer_info(1).status().message(),
                HasSubstr("experts.0.up_proj.weight_scale is f32[136,1], expected"));
  }
}

TEST(CheckpointChannelInt8, ZeroPointsAreRefused) {
  test::TempFolder folder;
  nlohmann::json config = channel_config(DType::kI8);
  config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = false;
  test::write_text(folder / "config.json", config.dump());
  test::write_file(folder / "model.safetensors", channel_tensors(DType::kI8, DType::kF32));
  const auto opened = Checkpoint::open(folder.path());
  ASSERT_TRUE(opened.is_ok());
  EXPECT_THAT(opened->layer_info(1)->cannot_run, HasSubstr("int8 with zero points"));
}

}  // namespace
}  // namespace sluice
