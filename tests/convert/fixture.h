// Crafted checkpoints to convert, and what must come of them: plain loops over the harness's own codec, and the names
// experts have everywhere, independent of the family table.
#pragma once

#include "io/convert.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <regex>

#include "harness/checkpoint_files.h"
#include "harness/codec.h"
#include "io/convert_plan.h"
#include "io/output_folder.h"
#include "io/synth.h"
#include "sluice/checkpoint.h"

namespace sluice::io {

namespace fs = std::filesystem;
using test::FileTensor;
using test::FileTensors;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// ---- the oracle ------------------------------------------------------------------------------------------------

// A matrix as the format wants it: weight and scale.
inline std::pair<FileTensor, FileTensor> quantised(WeightFormat format, std::int64_t rows, std::int64_t cols,
                                                   const std::function<double(std::int64_t, std::int64_t)>& value) {
  const bool block = format == WeightFormat::kFp8Block, int8 = format == WeightFormat::kInt8Channel;
  const std::int64_t scale_cols = block ? (cols + 127) / 128 : 1;
  const std::int64_t scale_rows = block ? (rows + 127) / 128 : rows;
  FileTensor q{
      int8 ? DType::kI8 : DType::kE4M3, {rows, cols}, std::vector<std::byte>(static_cast<std::size_t>(rows * cols))};
  FileTensor s{DType::kF32,
               {scale_rows, scale_cols},
               std::vector<std::byte>(static_cast<std::size_t>(scale_rows * scale_cols * 4))};
  std::vector<float> amax(static_cast<std::size_t>(scale_rows * scale_cols), 0.0f);
  const auto group = [&](std::int64_t r, std::int64_t c) { return block ? r / 128 * scale_cols + c / 128 : r; };
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      float& a = amax[static_cast<std::size_t>(group(r, c))];
      a = std::max(a, static_cast<float>(std::fabs(value(r, c))));
    }
  }
  for (std::size_t i = 0; i < amax.size(); ++i) {
    const float scale = std::max(amax[i], 1e-10f) / (int8 ? 127.0f : 448.0f);
    s.set(static_cast<std::int64_t>(i), static_cast<double>(scale));
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const float quotient = static_cast<float>(value(r, c)) / static_cast<float>(s.at(group(r, c)));
      q.set(r * cols + c, int8 ? std::nearbyint(static_cast<double>(quotient)) : static_cast<double>(quotient));
    }
  }
  return {q, s};
}

// What a conversion must write of these tensors, by the names experts have everywhere.
inline FileTensors expected(const FileTensors& source, WeightFormat format, bool transposed = false) {
  static const std::regex single(
      R"((.*\.(experts\.\d+|shared_experts?|shared_mlp)\.(gate_proj|up_proj|down_proj|w[123]))\.weight)");
  static const std::regex fused(R"((.*\.experts)\.(gate_up_proj|down_proj))");
  const char* suffix = format == WeightFormat::kFp8Block ? ".weight_scale_inv" : ".weight_scale";
  FileTensors out;
  std::smatch match;
  for (const auto& [name, t] : source) {
    const FileTensor& tensor = t;
    const auto put = [&](const std::string& module, std::int64_t rows, std::int64_t cols, const auto& index) {
      auto [q, s] =
          quantised(format, rows, cols, [&](std::int64_t r, std::int64_t c) { return tensor.at(index(r, c)); });
      out[module + ".weight"] = std::move(q);
      out[module + suffix] = std::move(s);
    };
    if (std::regex_match(name, match, single)) {
      const std::int64_t cols = t.shape[1];
      put(match[1], t.shape[0], cols, [=](std::int64_t r, std::int64_t c) { return r * cols + c; });
    } else if (std::regex_match(name, match, fused)) {
      const std::int64_t E = t.shape[0], A = t.shape[1], B = t.shape[2];  // of an expert: [A, B] as stored
      const std::int64_t rows = transposed ? B : A, cols = transposed ? A : B;
      const bool is_down = match[2] == "down_proj";
      for (std::int64_t e = 0; e < E; ++e) {
        const auto at = [=](std::int64_t r, std::int64_t c) {
          return e * A * B + (transposed ? c * B + r : r * B + c);
        };
        const std::string expert = fmt::format("{}.{}.", match[1].str(), e);
        if (is_down) {
          put(expert + "down_proj", rows, cols, at);
        } else {
          put(expert + "gate_proj", rows / 2, cols, at);
          put(expert + "up_proj", rows / 2, cols, [=](std::int64_t r, std::int64_t c) { return at(r + rows / 2, c); });
        }
      }
    } else {
      out[name] = t;
    }
  }
  return out;
}

inline FileTensors read_all(const fs::path& folder) {
  FileTensors all;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    for (auto& [name, t] : test::read_file(entry.path())) {
      EXPECT_EQ(all.count(name), 0u) << name << " is there twice";
      all[name] = std::move(t);
    }
  }
  return all;
}

inline void expect_equal(const FileTensors& got, const FileTensors& want) {
  for (const auto& [name, t] : want) {
    const auto it = got.find(name);
    ASSERT_NE(it, got.end()) << name << " is missing";
    EXPECT_EQ(it->second.dtype, t.dtype) << name;
    EXPECT_EQ(it->second.shape, t.shape) << name;
    EXPECT_TRUE(it->second.bytes == t.bytes) << name << " differs";
  }
  for (const auto& [name, t] : got) EXPECT_EQ(want.count(name), 1u) << name << " is surplus";
}

inline std::string text_of(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

// Every path below a folder with its bytes: what must not change.
inline std::map<std::string, std::string> snapshot(const fs::path& folder) {
  std::map<std::string, std::string> all;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    all[entry.path().string()] = entry.is_regular_file() ? text_of(entry.path()) : "";
  return all;
}

// ---- the crafted model -----------------------------------------------------------------------------------------

// DeepSeek-V3's layers 1 and 2 of 3: H = 160, I = 136, so that blocks are partial, four experts and a shared one.
inline nlohmann::json plain_config() {
  nlohmann::json config = test::dsv3_config();
  config.erase("quantization_config");
  config["num_hidden_layers"] = 3;
  return config;
}

inline FileTensors plain_tensors(DType dtype) {
  constexpr std::int64_t H = 160, I = 136, E = 4;
  FileTensors tensors;
  std::uint64_t seed = 1;
  for (int layer : {1, 2}) {
    const std::string mlp = fmt::format("model.layers.{}.mlp.", layer);
    tensors[mlp + "gate.weight"] = test::make_tensor(dtype, {E, H}, seed++);
    tensors[mlp + "gate.e_score_correction_bias"] = test::make_tensor(DType::kF32, {E}, seed++);
    std::vector<std::string> experts = {"shared_experts."};
    for (std::int64_t j = 0; j < E; ++j) experts.push_back(fmt::format("experts.{}.", j));
    for (const std::string& expert : experts) {
      tensors[mlp + expert + "gate_proj.weight"] = test::make_tensor(dtype, {I, H}, seed++);
      tensors[mlp + expert + "up_proj.weight"] = test::make_tensor(dtype, {I, H}, seed++);
      tensors[mlp + expert + "down_proj.weight"] = test::make_tensor(dtype, {H, I}, seed++);
    }
    tensors[fmt::format("model.layers.{}.self_attn.q_proj.weight", layer)] = test::make_tensor(dtype, {8, H}, seed++);
    tensors[fmt::format("model.layers.{}.input_layernorm.weight", layer)] = test::make_tensor(dtype, {H}, seed++);
  }
  tensors["model.layers.0.mlp.gate_proj.weight"] = test::make_tensor(dtype, {64, H}, seed++);
  tensors["model.embed_tokens.weight"] = test::make_tensor(dtype, {8, H}, seed++);
  // A layer for speculative decoding, past those the config counts.
  tensors["model.layers.3.mlp.experts.0.gate_proj.weight"] = test::make_tensor(dtype, {I, H}, seed++);
  return tensors;
}

// The experts of each layer stacked as [E,2I,H] and [E,H,I], or transposed.
inline FileTensors fuse(const FileTensors& split, bool transposed) {
  static const std::regex expert(R"((.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight)");
  FileTensors out;
  std::smatch match;
  for (const auto& [name, t] : split) {
    if (!std::regex_match(name, match, expert) || name.find("layers.3.") != std::string::npos) {
      out[name] = t;
      continue;
    }
    const bool is_down = match[3] == "down";
    const std::int64_t rows = t.shape[0], cols = t.shape[1], all_rows = is_down ? rows : 2 * rows, E = 4;
    FileTensor& f = out[match[1].str() + (is_down ? ".down_proj" : ".gate_up_proj")];
    f.dtype = t.dtype;
    f.shape = transposed ? std::vector{E, cols, all_rows} : std::vector{E, all_rows, cols};
    f.bytes.resize(static_cast<std::size_t>(E * all_rows * cols * size_bytes(t.dtype)));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        const std::int64_t n = r + (match[3] == "up" ? rows : 0);
        const std::int64_t at = std::stoll(match[2]) * all_rows * cols + (transposed ? c * all_rows + n : n * cols + c);
        f.set_bits(at, test::load_bits(t.dtype, t.bytes.data() + (r * cols + c) * size_bytes(t.dtype)));
      }
    }
  }
  return out;
}

class Convert : public ::testing::Test {
 protected:
  void write(const FileTensors& tensors) {
    fs::create_directories(in());
    test::write_text(in() / "config.json", config_.dump(1));
    test::write_file(in() / "model.safetensors", tensors);
  }
  fs::path in() const { return folder_ / "in"; }
  fs::path out() const { return folder_ / "out"; }
  ConvertRequest request(WeightFormat format = WeightFormat::kFp8Block) const {
    ConvertRequest r;
    r.model = in();
    r.out = out();
    r.format = format;
    return r;
  }
  // The conversion must be refused with these words, change nothing and leave nothing.
  void expect_refused(const ConvertRequest& r, StatusCode code, const std::vector<std::string>& words) {
    const auto before = snapshot(folder_.path());
    const auto report = convert(r);
    ASSERT_FALSE(report.is_ok());
    EXPECT_EQ(report.status().code(), code) << report.status().message();
    for (const std::string& word : words) EXPECT_THAT(report.status().message(), HasSubstr(word));
    EXPECT_TRUE(snapshot(folder_.path()) == before) << "something changed: " << report.status().message();
  }
  ConvertReport must(const ConvertRequest& r) {
    const auto before = snapshot(in());
    auto report = convert(r);
    if (!report) throw std::runtime_error(report.status().message());
    EXPECT_THAT(report->violations, IsEmpty());
    EXPECT_TRUE(snapshot(in()) == before) << "the source changed";
    return std::move(*report);
  }

  test::TempFolder folder_;
  nlohmann::json config_ = plain_config();
};

}  // namespace sluice::io
