// Synthetic checkpoints: every preset, written small, opened, loaded and compared with the bytes that were written.
#include "io/synth.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "harness/checkpoint_files.h"
#include "harness/fill.h"
#include "io/layer_load.h"
#include "io/safetensors.h"

namespace sluice::io {
namespace {

using test::FileTensor;
using test::FileTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

SynthRequest small(const std::string& like, const std::filesystem::path& out) {
  SynthRequest request;
  request.like = like;
  request.out = out;
  request.num_experts = 16;
  request.hidden = 160;
  request.intermediate = 96;
  if (like.starts_with("qwen2") || like.starts_with("qwen3-next")) request.shared_intermediate = 64;
  return request;
}

void must(const Status& status) {
  if (!status.is_ok()) throw std::runtime_error(status.message());
}

// The matrices of expert e as the file means it, found by the names and layout each family is
// known by, independently of the table.
class Written {
 public:
  Written(FileTensors tensors, std::int64_t H, std::int64_t I) : tensors_(std::move(tensors)), H_(H), I_(I) {}

  std::vector<double> matrix(std::int64_t e, int part) const {  // [rows, cols]; part 0 gate, 1 up, 2 down
    const std::int64_t rows = part == 2 ? H_ : I_, cols = part == 2 ? I_ : H_;
    std::vector<double> out;
    const auto fill = [&](const auto& value) {
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) out.push_back(value(r, c));
      }
      return out;
    };
    static const char* kNames[][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
    for (const auto& names : kNames) {
      const FileTensor* t = ends_with(fmt::format(".experts.{}.{}.weight", e, names[part]));
      if (t == nullptr) continue;
      const FileTensor* s = ends_with(fmt::format(".experts.{}.{}.weight_scale_inv", e, names[part]));
      return fill([&](std::int64_t r, std::int64_t c) {
        return t->at(r * cols + c) * (s != nullptr ? s->at(r / 128 * s->shape[1] + c / 128) : 1.0);
      });
    }
    const std::string fused = part == 2 ? "experts.down_proj" : "experts.gate_up_proj";
    if (const FileTensor* t = ends_with(fused)) {  // Llama 4 alone writes it, transposed
      return fill([&](std::int64_t r, std::int64_t c) {
        return t->at((e * t->shape[1] + c) * t->shape[2] + (part == 1 ? I_ : 0) + r);
      });
    }
    const FileTensor *blocks = ends_with(fused + "_blocks"), *scales = ends_with(fused + "_scales");  // gpt-oss
    return fill([&](std::int64_t r, std::int64_t c) {
      const std::int64_t n = e * blocks->shape[1] + (part == 2 ? r : 2 * r + part);
      const auto byte = std::to_integer<int>(blocks->bytes[static_cast<std::size_t>((n * cols + c) / 2)]);
      const int code = c % 2 == 0 ? byte & 15 : byte >> 4;
      const double magnitude[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const int scale = std::to_integer<int>(scales->bytes[static_cast<std::size_t>((n * cols + c) / 32)]);
      return ((code & 8) != 0 ? -1 : 1) * std::ldexp(magnitude[code & 7], scale - 127);
    });
  }
  const FileTensor* ends_with(const std::string& suffix) const {
    for (const auto& [name, t] : tensors_) {
      if (name.ends_with(suffix)) return &t;
    }
    return nullptr;
  }
  const FileTensors& tensors() const { return tensors_; }

 private:
  FileTensors tensors_;
  std::int64_t H_, I_;
};

class SynthPreset : public ::testing::TestWithParam<std::string> {
 protected:
  test::TempFolder folder_;
};

TEST_P(SynthPreset, RoundTrip) {
  must(synthesize(small(GetParam(), folder_ / "m")));
  auto opened = Checkpoint::open(folder_ / "m");
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  ASSERT_EQ(opened->moe_layers().size(), 1u);
  const std::int64_t layer = opened->moe_layers()[0];
  EXPECT_EQ(opened->num_layers(), layer + 1);
  auto info = opened->layer_info(layer);
  ASSERT_TRUE(info.is_ok()) << info.status().message();
  EXPECT_EQ(info->cannot_run, "");
  auto config = read_hf_config(folder_ / "m" / "config.json");
  auto catalog = Catalog::open(folder_ / "m");
  ASSERT_TRUE(config.is_ok() && catalog.is_ok());
  auto files = find_layer(*catalog, *config, layer);
  ASSERT_TRUE(files.is_ok());
  LoadOptions options;
  auto loaded = load_layer(*files, options, /*poison=*/true);
  ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
  EXPECT_EQ(loaded->num_nan, 0);

  const std::int64_t H = 160, I = 96, E = 16;
  const Written written(test::read_file(folder_ / "m" / "model.safetensors"), H, I);
  const FfnWeights& w = loaded->weights.experts;
  const auto w13 = test::to_doubles(w.w13), w2 = test::to_doubles(w.w2);
  const bool scaled = w.w13_scale.is_present();
  double sum_squares = 0;
  std::int64_t wrong = 0;
  for (std::int64_t e = 0; e < E; ++e) {
    for (int part = 0; part < 3; ++part) {
      const std::int64_t rows = part == 2 ? H : I, cols = part == 2 ? I : H;
      const std::vector<double> want = written.matrix(e, part);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          double got = part == 2 ? w2[static_cast<std::size_t>((e * H + r) * I + c)]
                                 : w13[static_cast<std::size_t>((e * 2 * I + part * I + r) * H + c)];
          if (scaled) {
            const std::int64_t Ib = 1, Hb = 2;
            got *= part == 2 ? w.w2_scale.as<float>()[(e * Hb + r / 128) * Ib + c / 128]
                             : w.w13_scale.as<float>()[(e * 2 * Ib + part * Ib + r / 128) * Hb + c / 128];
          }
          wrong += got == want[static_cast<std::size_t>(r * cols + c)] ? 0 : 1;
          sum_squares += got * got * static_cast<double>(cols);
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0);
  // N(0, 1/sqrt(fan_in)): the mean of squares times fan_in is 1; MXFP4's coarse grid moves it by a few percent.
  EXPECT_NEAR(sum_squares / static_cast<double>(E * 3 * H * I), 1.0, GetParam().starts_with("gpt-oss") ? 0.1 : 0.02);
  if (scaled) {
    // A block's scale is its amax / 448: some code of every block is +-448.
    for (const auto& [name, t] : written.tensors()) {
      if (t.dtype != DType::kE4M3) continue;
      for (std::int64_t rb = 0; rb * 128 < t.shape[0]; ++rb) {
        for (std::int64_t cb = 0; cb * 128 < t.shape[1]; ++cb) {
          double amax = 0;
          for (std::int64_t r = rb * 128; r < std::min(t.shape[0], rb * 128 + 128); ++r) {
            for (std::int64_t c = cb * 128; c < std::min(t.shape[1], cb * 128 + 128); ++c) {
              amax = std::max(amax, std::fabs(t.at(r * t.shape[1] + c)));
            }
          }
          EXPECT_EQ(amax, 448.0) << name;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SynthPreset, ::testing::ValuesIn(preset_names()), [](const auto& param_info) {
  std::string name = param_info.param;
  for (char& c : name) {
    if (c == '-' || c == '.') c = '_';
  }
  return name;
});

class SynthTest : public ::testing::Test {
 protected:
  static std::string content(const std::filesystem::path& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  test::TempFolder folder_;
};

TEST_F(SynthTest, SameSeedSameBytesAndShardsDoNotMatter) {
  SynthRequest request = small("deepseek-v3", folder_ / "a");
  must(synthesize(request));
  request.out = folder_ / "b";
  must(synthesize(request));
  EXPECT_EQ(content(folder_ / "a" / "model.safetensors"), content(folder_ / "b" / "model.safetensors"));
  request.out = folder_ / "c";
  request.seed = 2;
  must(synthesize(request));
  EXPECT_NE(content(folder_ / "a" / "model.safetensors"), content(folder_ / "c" / "model.safetensors"));

  request.out = folder_ / "shards";
  request.seed = 1;
  request.max_shard_bytes = 100'000;
  must(synthesize(request));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "shards" / "model.safetensors.index.json"));
  auto catalog = Catalog::open(folder_ / "shards");
  ASSERT_TRUE(catalog.is_ok()) << catalog.status().message();
  const FileTensors whole = test::read_file(folder_ / "a" / "model.safetensors");
  EXPECT_EQ(catalog->num_tensors(), whole.size());
  for (const auto& [name, t] : whole) {
    const TensorRef ref = catalog->find(name);
    ASSERT_TRUE(static_cast<bool>(ref)) << name;
    EXPECT_EQ(std::memcmp(ref.data(), t.bytes.data(), t.bytes.size()), 0) << name;
  }
}

TEST_F(SynthTest, SeveralLayersAreOfTheirOwnAndTheConfigIsCut) {
  SynthRequest request = small("llama4-scout", folder_ / "m");
  request.num_layers = 2;
  test::write_text(folder_ / "config.json", [] {
    nlohmann::json root = *config_like("llama4-scout");
    root["text_config"]["interleave_moe_layer_step"] = 2;
    root["text_config"]["moe_layers"] = {1, 3, 5, 7};
    root["text_config"]["layer_types"] = std::vector<std::string>(48, "full_attention");
    return root.dump();
  }());
  request.like = folder_ / "config.json";
  must(synthesize(request));
  auto opened = Checkpoint::open(folder_ / "m");
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  EXPECT_EQ(opened->num_layers(), 4);
  EXPECT_THAT(opened->moe_layers(), ElementsAre(1, 3));
  auto one = opened->load(1, {}), three = opened->load(3, {});
  ASSERT_TRUE(one.is_ok() && three.is_ok());
  EXPECT_NE(test::to_doubles(one->weights.w_gate), test::to_doubles(three->weights.w_gate));
  const auto root = nlohmann::json::parse(content(folder_ / "m" / "config.json"));
  EXPECT_EQ(root["text_config"]["layer_types"].size(), 4u);
}

TEST_F(SynthTest, WeightFormatsAndTheFusedLayout) {
  for (const auto& [weights, want] : {std::pair(SynthWeights::kBF16, "bf16"), std::pair(SynthWeights::kF32, "f32"),
                                      std::pair(SynthWeights::kE4M3, "e4m3 128x128")}) {
    for (const char* preset : {"deepseek-v3", "qwen3-30b"}) {
      SynthRequest request = small(preset, folder_ / fmt::format("{}{}", preset, static_cast<int>(weights)));
      request.weights = weights;
      must(synthesize(request));
      auto opened = Checkpoint::open(request.out);
      ASSERT_TRUE(opened.is_ok()) << opened.status().message();
      auto info = opened->layer_info(opened->moe_layers()[0]);
      ASSERT_TRUE(info.is_ok()) << info.status().message();
      EXPECT_EQ(info->expert_format, want);
    }
  }
  // A fused bf16 file is what the GEMMs want: its weights are used where they lie in the mapped file.
  SynthRequest request = small("qwen3-30b", folder_ / "fused");
  request.fused = true;
  must(synthesize(request));
  auto config = read_hf_config(folder_ / "fused" / "config.json");
  auto catalog = Catalog::open(folder_ / "fused");
  auto files = find_layer(*catalog, *config, 0);
  ASSERT_TRUE(files.is_ok()) << files.status().message();
  auto loaded = load_layer(*files, {});
  ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
  EXPECT_EQ(loaded->weights.experts.w13.data, files->experts.gate[0].data());
  EXPECT_EQ(loaded->weights.experts.w2.data, files->experts.down[0].data());
  const std::vector<double> before = test::to_doubles(loaded->weights.experts.w2);
  catalog = Status(StatusCode::kInternal, "");  // the layer keeps the mapping alive
  files = Status(StatusCode::kInternal, "");
  EXPECT_EQ(test::to_doubles(loaded->weights.experts.w2), before);
}

TEST_F(SynthTest, ScaleFmtIsKept) {
  nlohmann::json root = *config_like("deepseek-v3");
  root["quantization_config"]["scale_fmt"] = "ue8m0";
  test::write_text(folder_ / "config.json", root.dump());
  for (SynthWeights weights : {SynthWeights::kAsConfig, SynthWeights::kE4M3, SynthWeights::kBF16}) {
    SynthRequest request = small("deepseek-v3", folder_ / fmt::format("m{}", static_cast<int>(weights)));
    request.like = folder_ / "config.json";
    request.weights = weights;
    must(synthesize(request));
    auto opened = Checkpoint::open(request.out);
    ASSERT_TRUE(opened.is_ok()) << opened.status().message();
    auto info = opened->layer_info(opened->moe_layers()[0]);
    ASSERT_TRUE(info.is_ok()) << info.status().message();
    EXPECT_EQ(info->config.activation_scale, weights == SynthWeights::kBF16 ? ScaleFormat::kF32 : ScaleFormat::kUe8m0);
  }
}

TEST_F(SynthTest, RefusalsLeaveNothing) {
  const auto refusal = [](const SynthRequest& request) { return synthesize(request).message(); };
  SynthRequest request = small("nonsense", folder_ / "m");
  EXPECT_THAT(refusal(request), HasSubstr("'nonsense' is neither a config.json nor one of the presets: deepseek-v3"));
  request.like = "deepseek-v3";
  request.num_layers = 59;
  EXPECT_THAT(refusal(request), HasSubstr("num_layers = 59, but deepseek-v3 has 58 layers with experts"));
  request.num_layers = -1;
  EXPECT_THAT(refusal(request), HasSubstr("num_layers = -1 is negative"));
  request.num_layers = 1;
  request.num_experts = 15;
  EXPECT_THAT(refusal(request), HasSubstr("'n_routed_experts' = 15 is not divisible by 'n_group' = 8"));
  request.num_experts = 16;
  request.fused = true;
  EXPECT_THAT(refusal(request), HasSubstr("not in e4m3"));
  request.fused = false;
  request.max_shard_bytes = 0;
  EXPECT_THAT(refusal(request), HasSubstr("max_shard_bytes = 0"));
  request = small("gpt-oss-20b", folder_ / "m");
  request.hidden = 150;
  EXPECT_THAT(refusal(request), HasSubstr("multiples of 32 columns"));
  EXPECT_EQ(folder_.num_files(), 0u);
  test::write_text(folder_ / "f", "x");
  EXPECT_THAT(refusal(small("olmoe", folder_.path())), HasSubstr("is not an empty folder"));
  EXPECT_THAT(refusal(small("olmoe", folder_ / "f")), HasSubstr("is not an empty folder"));
  EXPECT_NE(refusal(small("olmoe", folder_ / "f" / "m")), "");
  EXPECT_EQ(folder_.num_files(), 1u);
}

// Whenever it is stopped, neither a file nor a folder that this call made stays, and what was there before does.
TEST_F(SynthTest, StoppedLeavesNothingBehind) {
  SynthRequest request = small("olmoe", folder_ / "a" / "b" / "m");
  request.max_shard_bytes = 1;  // every tensor a shard: the first ones are finished when the stop comes
  int calls = 0;
  request.stop = [&] { return ++calls < 0; };
  must(synthesize(request));
  const int all = calls;
  ASSERT_GT(all, 10);
  for (int last : {1, 2, all / 2, all}) {
    std::filesystem::remove_all(folder_ / "a");
    calls = 0;
    request.stop = [&] { return ++calls == last; };
    EXPECT_THAT(synthesize(request).message(), HasSubstr("stopped"));
    EXPECT_EQ(calls, last);
    EXPECT_FALSE(std::filesystem::exists(folder_ / "a"));
  }
  std::filesystem::create_directories(folder_ / "a" / "b");
  calls = 0;
  request.stop = [&] { return ++calls == 2; };  // the loop's variable is gone
  EXPECT_THAT(synthesize(request).message(), HasSubstr("stopped"));
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "a" / "b"));
}

TEST_F(SynthTest, ProgressRunsToTheEnd) {
  SynthRequest request = small("olmoe", folder_ / "m");
  std::int64_t last = 0, total = 0;
  request.progress = [&](std::int64_t done, std::int64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  };
  must(synthesize(request));
  EXPECT_GT(total, 0);
  EXPECT_EQ(last, total);
}

}  // namespace
}  // namespace sluice::io
