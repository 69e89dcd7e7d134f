#include "harness/checkpoint_files.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <stdexcept>

#include "harness/fill.h"
#include "io/safetensors.h"

namespace sluice::test {

TempFolder::TempFolder() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string name = fmt::format("sluice_{}_{}_{}", ::getpid(), info->test_suite_name(), info->name());
  for (char& c : name) {
    if (c == '/') c = '_';
  }
  path_ = std::filesystem::path(::testing::TempDir()) / name;
  std::filesystem::remove_all(path_);
  std::filesystem::create_directories(path_);
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::size_t TempFolder::num_files() const {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::recursive_directory_iterator(path_)) ++count;
  return count;
}

FileTensor make_tensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed, double low, double high) {
  FileTensor tensor{dtype, std::move(shape), {}};
  std::int64_t count = 1;
  for (std::int64_t extent : tensor.shape) count *= extent;
  tensor.bytes.resize(static_cast<std::size_t>(count * size_bytes(dtype)));
  Rng rng(seed);
  for (std::int64_t i = 0; i < count; ++i) tensor.set(i, rng.uniform(low, high));
  return tensor;
}

void write_file(const std::filesystem::path& path, const FileTensors& tensors) {
  std::string header = "{", data;
  for (const auto& [name, t] : tensors) {
    std::string shape;
    for (std::int64_t extent : t.shape) shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    header +=
        fmt::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", header.size() > 1 ? "," : "",
                    name, io::dtype_name(t.dtype), shape, data.size(), data.size() + t.bytes.size());
    data.append(reinterpret_cast<const char*>(t.bytes.data()), t.bytes.size());
  }
  header += "}";
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
  write_text(path, length + header + data);
}

FileTensors read_file(const std::filesystem::path& path) {
  auto file = io::SafetensorsFile::open(path);
  if (!file) throw std::runtime_error(file.status().message());
  FileTensors tensors;
  for (const io::TensorEntry& entry : (*file)->tensors()) {
    const std::byte* data = (*file)->data(entry);
    tensors[entry.name] = {entry.dtype, entry.shape, {data, data + (entry.end - entry.begin)}};
  }
  return tensors;
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream stream(path, std::ios::binary);
  stream << text;
  stream.close();
  if (!stream) throw std::runtime_error("cannot write " + path.string());
}

void write_index(const std::filesystem::path& folder, const std::map<std::string, std::string>& weight_map) {
  write_text(folder / "model.safetensors.index.json",
             nlohmann::json{{"metadata", {{"total_size", 1}}}, {"weight_map", weight_map}}.dump());
}

nlohmann::json dsv3_config() {
  return nlohmann::json::parse(
      R"({"model_type":"deepseek_v3","num_hidden_layers":2,"hidden_size":160,"intermediate_size":64,
    "moe_intermediate_size":136,"n_routed_experts":4,"n_shared_experts":1,"num_experts_per_tok":2,"n_group":2,"topk_group":1,
    "topk_method":"noaux_tc","scoring_func":"sigmoid","norm_topk_prob":true,"routed_scaling_factor":2.5,"first_k_dense_replace":1,
    "moe_layer_freq":1,"hidden_act":"silu","quantization_config":{"activation_scheme":"dynamic","fmt":"e4m3","quant_method":"fp8",
    "weight_block_size":[128,128]}})");
}

FileTensors dsv3_tensors() {
  const std::int64_t H = 160, I = 136, E = 4;
  const std::string mlp = "model.layers.1.mlp.";
  FileTensors tensors;
  std::uint64_t seed = 1;
  tensors[mlp + "gate.weight"] = make_tensor(DType::kBF16, {E, H}, seed++);
  tensors[mlp + "gate.e_score_correction_bias"] = make_tensor(DType::kF32, {E}, seed++, 4.0, 4.1);
  for (std::int64_t j = 0; j < E; ++j) {
    for (const auto& [name, rows, cols] :
         {std::tuple("gate_proj", I, H), std::tuple("up_proj", I, H), std::tuple("down_proj", H, I)}) {
      const std::string module = fmt::format("{}experts.{}.{}", mlp, j, name);
      tensors[module + ".weight"] = make_tensor(DType::kE4M3, {rows, cols}, seed++, -448, 448);
      tensors[module + ".weight_scale_inv"] =
          make_tensor(DType::kF32, {(rows + 127) / 128, (cols + 127) / 128}, seed++, 1e-4, 1e-3);
    }
  }
  tensors[mlp + "shared_experts.gate_proj.weight"] = make_tensor(DType::kBF16, {I, H}, seed++);
  tensors[mlp + "shared_experts.up_proj.weight"] = make_tensor(DType::kBF16, {I, H}, seed++);
  tensors[mlp + "shared_experts.down_proj.weight"] = make_tensor(DType::kBF16, {H, I}, seed++);
  // Other tensors of the model that are no business of the layer's.
  tensors["model.layers.0.mlp.gate_proj.weight"] = make_tensor(DType::kBF16, {64, H}, seed++);
  tensors["model.layers.1.input_layernorm.weight"] = make_tensor(DType::kBF16, {H}, seed++);
  tensors["model.layers.11.mlp.gate.weight"] = make_tensor(DType::kBF16, {1}, seed++);
  tensors["lm_head.weight"] = make_tensor(DType::kBF16, {8, H}, seed++);
  return tensors;
}

}  // namespace sluice::test
