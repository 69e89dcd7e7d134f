// A small DeepSeek-V3-style checkpoint written by hand, so that every part of it can be broken on purpose.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace sluice::test {

inline void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

inline std::string little_endian(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFF);
  return bytes;
}

// Values in (-1, 1) that a bf16 holds exactly: what they are does not matter here, only that they are finite.
inline std::uint16_t small_bf16(std::uint64_t i) {
  const std::uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
  return static_cast<std::uint16_t>((z >> 63 << 15) | (0x3C00 + (z >> 40 & 0x1FF)));
}

inline std::string bf16_values(std::size_t count, std::uint64_t seed = 0) {
  std::string bytes(2 * count, '\0');
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t value = small_bf16(seed + i);
    std::memcpy(bytes.data() + 2 * i, &value, 2);
  }
  return bytes;
}

inline std::string safetensors(const std::string& header, const std::string& data) {
  return little_endian(header.size()) + header + data;
}

struct Tensor {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};

inline std::string header_entry(const Tensor& tensor, std::size_t begin) {
  const nlohmann::json entry = {
      {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, begin + tensor.bytes.size()}}};
  return "\"" + tensor.name + "\":" + entry.dump();
}

inline std::string safetensors(const std::vector<Tensor>& tensors) {
  std::string header = "{", data;
  for (const Tensor& tensor : tensors) {
    header += (data.empty() && header.size() == 1 ? "" : ",") + header_entry(tensor, data.size());
    data += tensor.bytes;
  }
  return safetensors(header + "}", data);
}

inline std::string npy(const std::string& descr, bool fortran, const std::string& shape, const std::string& data) {
  std::string header =
      "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") + ", 'shape': " + shape + ", }";
  header.append((64 - (10 + header.size() + 1) % 64) % 64, ' ');
  header += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size() & 0xFF) +
         static_cast<char>(header.size() >> 8) + header + data;
}

// Two layers, the second with experts: H 64, I 32, E 8, S 2, 4 groups of which 2 are kept, one shared expert, bf16.
struct Crafted {
  static constexpr std::int64_t kHidden = 64, kIntermediate = 32, kExperts = 8, kTopK = 2;

  nlohmann::ordered_json config;
  std::vector<Tensor> tensors;
  std::string file;                  // model.safetensors, made by build()
  std::optional<std::string> index;  // model.safetensors.index.json

  Crafted() {
    config = {{"model_type", "deepseek_v3"},
              {"hidden_size", kHidden},
              {"intermediate_size", 128},
              {"moe_intermediate_size", kIntermediate},
              {"num_hidden_layers", 2},
              {"n_routed_experts", kExperts},
              {"n_shared_experts", 1},
              {"num_experts_per_tok", kTopK},
              {"n_group", 4},
              {"topk_group", 2},
              {"topk_method", "noaux_tc"},
              {"scoring_func", "sigmoid"},
              {"norm_topk_prob", true},
              {"routed_scaling_factor", 2.5},
              {"first_k_dense_replace", 1},
              {"hidden_act", "silu"},
              {"torch_dtype", "bfloat16"}};
    const std::string mlp = "model.layers.1.mlp.";
    add(mlp + "gate.weight", "BF16", {kExperts, kHidden});
    tensors.push_back({mlp + "gate.e_score_correction_bias", "F32", {kExperts}, std::string(4 * kExperts, '\0')});
    std::vector<std::string> experts = {"shared_experts."};
    for (std::int64_t j = 0; j < kExperts; ++j) experts.push_back("experts." + std::to_string(j) + ".");
    for (const std::string& expert : experts) {
      add(mlp + expert + "gate_proj.weight", "BF16", {kIntermediate, kHidden});
      add(mlp + expert + "up_proj.weight", "BF16", {kIntermediate, kHidden});
      add(mlp + expert + "down_proj.weight", "BF16", {kHidden, kIntermediate});
    }
    build();
  }

  void build() { file = safetensors(tensors); }
  // Length of the JSON header inside `file`.
  std::size_t header_bytes() const {
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), 8);
    return length;
  }
  std::string header() const { return file.substr(8, header_bytes()); }
  std::string data() const { return file.substr(8 + header_bytes()); }
  // The same data under another header.
  void set_header(const std::string& text) { file = safetensors(text, data()); }
  Tensor& tensor(const std::string& part) {
    for (Tensor& t : tensors) {
      if (t.name.find(part) != std::string::npos) return t;
    }
    throw std::out_of_range(part);
  }
  // Splits the names over an index that puts every tensor into `shard`.
  void set_index(const std::string& shard) {
    nlohmann::json map;
    for (const Tensor& t : tensors) map[t.name] = shard;
    index = nlohmann::json{{"weight_map", map}}.dump();
  }

  void write(const std::filesystem::path& folder) const {
    std::filesystem::create_directories(folder);
    write_file(folder / "config.json", config.dump(1));
    write_file(folder / "model.safetensors", file);
    if (index) write_file(folder / "model.safetensors.index.json", *index);
  }

 private:
  void add(const std::string& name, const std::string& dtype, std::vector<std::int64_t> shape) {
    std::size_t count = 1;
    for (std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    tensors.push_back({name, dtype, std::move(shape), bf16_values(count, tensors.size() * 131)});
  }
};

}  // namespace sluice::test
