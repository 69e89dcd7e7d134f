#include "io/synth.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fstream>

#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "io/unpack.h"

namespace sluice::io {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Sink = std::function<Status(std::span<const std::byte>)>;

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;
constexpr std::size_t kQuantiles = 65536;
constexpr std::int64_t kMxColumns = 32;

// ---- numbers ----

std::uint64_t mix(std::uint64_t z) {  // splitmix64's finaliser
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

std::uint64_t seed_of(std::uint64_t seed, std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a: each tensor has a stream of its own, whatever else is written
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return mix(hash ^ mix(seed));
}

// Four 16-bit draws per step.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : state_(seed) {}
  std::uint16_t next() {
    if (left_ == 0) {
      state_ += 0x9E3779B97F4A7C15u;
      word_ = mix(state_);
      left_ = 4;
    }
    const auto value = static_cast<std::uint16_t>(word_);
    word_ >>= 16;
    --left_;
    return value;
  }

 private:
  std::uint64_t state_, word_ = 0;
  int left_ = 0;
};

// The standard normal's quantiles at (i + 1/2) / 65536: a draw of 16 bits looks its value up, which is what lets a
// layer of 11 billion weights be written at the speed of the disk. The largest is 4.33.
const std::array<float, kQuantiles>& quantiles() {
  static const auto kTable = [] {
    std::array<float, kQuantiles> table{};
    for (std::size_t i = kQuantiles / 2; i < kQuantiles; ++i) {
      const double upper = 1.0 - (static_cast<double>(i) + 0.5) / kQuantiles;  // probability above the value
      double low = 0.0, high = 6.0;
      for (int step = 0; step < 40; ++step) {
        const double middle = 0.5 * (low + high);
        (0.5 * std::erfc(middle / std::sqrt(2.0)) > upper ? low : high) = middle;
      }
      table[i] = static_cast<float>(low);
      table[kQuantiles - 1 - i] = -table[i];
    }
    return table;
  }();
  return kTable;
}

// A block's amax in deviations: one of 16 levels above every quantile, so that the element that is set to the amax is
// it.
constexpr int kLevels = 16;
float level_amax(int level) { return 4.4f + 0.05f * static_cast<float>(level); }

const std::vector<std::array<std::uint8_t, kQuantiles>>& e4m3_codes() {
  static const auto kTable = [] {
    std::vector<std::array<std::uint8_t, kQuantiles>> table(kLevels);
    for (int level = 0; level < kLevels; ++level) {
      for (std::size_t i = 0; i < kQuantiles; ++i) {
        table[static_cast<std::size_t>(level)][i] = to_e4m3(quantiles()[i] * 448.0f / level_amax(level));
      }
    }
    return table;
  }();
  return kTable;
}

// Collects elements and hands them on in pieces.
template <class T>
class Pieces {
 public:
  explicit Pieces(const Sink& sink) : sink_(sink) { buffer_.reserve(kPieceBytes / sizeof(T)); }
  Status push(T value) {
    buffer_.push_back(value);
    return buffer_.size() == kPieceBytes / sizeof(T) ? flush() : Status::ok();
  }
  Status flush() {
    const Status status = sink_(std::as_bytes(std::span(buffer_)));
    buffer_.clear();
    return status;
  }

 private:
  const Sink& sink_;
  std::vector<T> buffer_;
};

template <class T, class Next>
Status produce(const Sink& sink, std::int64_t count, const Next& next) {
  Pieces<T> pieces(sink);
  for (std::int64_t i = 0; i < count; ++i) SLUICE_TRY(pieces.push(next(i)));
  return pieces.flush();
}

// ---- tensors ----

class Writer {
 public:
  Writer(const SynthRequest& request, const HfConfig& config, DType plain, bool nested)
      : request_(request), config_(config), family_(*config.family), plain_(plain), nested_(nested) {}

  Status add_layer(std::int64_t layer, const MoeConfig& moe) {
    prefix_ = expand(nested_ ? "language_model.model.layers.{n}." : kLayerPrefixes[0], layer) +
              std::string(family_.modules.front());
    const std::int64_t H = moe.hidden, I = moe.intermediate, E = moe.num_experts;
    normal(family_.router.front(), plain_, {E, H}, H);
    if (moe.gate.has_router_bias) normal(family_.router_bias.front(), plain_, {E}, 64);
    if (moe.gate.has_score_bias) {
      const bool batched = family_.score_bias.front().find("moe_statics") != std::string_view::npos;
      normal(family_.score_bias.front(), DType::kF32,
             batched ? std::vector<std::int64_t>{1, E} : std::vector<std::int64_t>{E}, 400);
    }
    SLUICE_TRY(add_experts(E, H, I));
    if (moe.shared_intermediate > 0) {
      const std::int64_t Is = moe.shared_intermediate;
      SLUICE_TRY(matrix(std::string(family_.shared.gate), Is, H));
      SLUICE_TRY(matrix(std::string(family_.shared.up), Is, H));
      SLUICE_TRY(matrix(std::string(family_.shared.down), H, Is));
    }
    if (moe.has_shared_gate) normal(family_.shared_expert_gate, plain_, {1, H}, H);
    return Status::ok();
  }

  Status set_ignored() {
    auto list = IgnoreList::compile(config_.quant.ignored);
    if (!list) return list.status();
    ignored_ = std::move(*list);
    return Status::ok();
  }

  std::vector<TensorToWrite> tensors;

 private:
  const ExpertLayout* layout(bool fused) const {
    for (const ExpertLayout& l : family_.layouts) {
      if (l.is_fused() == fused) return &l;
    }
    return nullptr;
  }

  Status add_experts(std::int64_t E, std::int64_t H, std::int64_t I) {
    const bool mxfp4 = config_.quant.method == "mxfp4";
    const ExpertLayout* chosen = request_.fused ? layout(true) : family_.layouts.begin();
    if (chosen == nullptr)
      return {StatusCode::kUnsupported, fmt::format("synth: {} has no fused layout", family_.name)};
    if (!chosen->is_fused()) {
      for (std::int64_t j = 0; j < E; ++j) {
        SLUICE_TRY(matrix(expand(chosen->gate, j), I, H));
        SLUICE_TRY(matrix(expand(chosen->up, j), I, H));
        SLUICE_TRY(matrix(expand(chosen->down, j), H, I));
      }
      return Status::ok();
    }
    if (config_.quant.method == "fp8") {
      return {StatusCode::kUnsupported,
              fmt::format("synth: {}'s fused layout is written in bf16, f32 or MXFP4, not in e4m3", family_.name)};
    }
    if (!chosen->gate_up_bias.empty()) {
      normal(chosen->gate_up_bias, plain_, {E, 2 * I}, 64);
      normal(chosen->down_bias, plain_, {E, H}, 64);
    }
    if (mxfp4) {
      SLUICE_TRY(mxfp4_tensor(std::string(chosen->fused_gate_up), E, 2 * I, H));
      return mxfp4_tensor(std::string(chosen->fused_down), E, H, I);
    }
    normal(chosen->fused_gate_up, plain_, chosen->transposed ? std::vector{E, H, 2 * I} : std::vector{E, 2 * I, H}, H);
    normal(chosen->fused_down, plain_, chosen->transposed ? std::vector{E, I, H} : std::vector{E, H, I}, I);
    return Status::ok();
  }

  // A module's weight, in e4m3 with scales where the config quantises it.
  Status matrix(const std::string& module, std::int64_t rows, std::int64_t cols) {
    if (config_.quant.method == "fp8") {
      auto ignored = ignored_.covers(prefix_ + module);
      if (!ignored) return ignored.status();
      if (!*ignored) return e4m3_matrix(module, rows, cols), Status::ok();
    }
    normal(module + ".weight", plain_, {rows, cols}, cols);
    return Status::ok();
  }

  void normal(std::string_view name, DType dtype, std::vector<std::int64_t> shape, std::int64_t fan_in) {
    std::int64_t count = 1;
    for (std::int64_t extent : shape) count *= extent;
    const std::string full = prefix_ + std::string(name);
    const std::uint64_t seed = seed_of(request_.seed, full);
    const auto sigma = static_cast<float>(1.0 / std::sqrt(static_cast<double>(fan_in)));
    tensors.push_back({full, dtype, std::move(shape), [=](const Sink& sink) {
                         Draws draws(seed);
                         if (dtype == DType::kF32) {
                           return produce<float>(sink, count,
                                                 [&](std::int64_t) { return quantiles()[draws.next()] * sigma; });
                         }
                         std::vector<std::uint16_t> table(kQuantiles);
                         for (std::size_t i = 0; i < kQuantiles; ++i) table[i] = to_bf16(quantiles()[i] * sigma);
                         return produce<std::uint16_t>(sink, count, [&](std::int64_t) { return table[draws.next()]; });
                       }});
  }

  // Level and place of the amax of a block follow from its number alone: weights and scales are written apart.
  void e4m3_matrix(const std::string& module, std::int64_t rows, std::int64_t cols) {
    const std::string full = prefix_ + module;
    const std::uint64_t seed = seed_of(request_.seed, full);
    const std::int64_t row_blocks = ceil_div(rows, kScaleBlock), col_blocks = ceil_div(cols, kScaleBlock);
    const auto sigma = static_cast<float>(1.0 / std::sqrt(static_cast<double>(cols)));
    const auto block_hash = [=](std::int64_t block) { return mix(seed ^ mix(static_cast<std::uint64_t>(block) + 1)); };
    tensors.push_back(
        {full + ".weight", DType::kE4M3, {rows, cols}, [=](const Sink& sink) -> Status {
           Draws draws(seed);
           std::vector<std::uint8_t> strip(static_cast<std::size_t>(kScaleBlock * cols));
           for (std::int64_t rb = 0; rb < row_blocks; ++rb) {
             const std::int64_t height = std::min(kScaleBlock, rows - rb * kScaleBlock);
             for (std::int64_t r = 0; r < height; ++r) {
               for (std::int64_t c = 0; c < cols; ++c) {
                 const auto level = block_hash(rb * col_blocks + c / kScaleBlock) % kLevels;
                 const auto& codes = e4m3_codes()[level];
                 const std::int64_t end = std::min(cols, (c / kScaleBlock + 1) * kScaleBlock);
                 for (; c < end; ++c) strip[static_cast<std::size_t>(r * cols + c)] = codes[draws.next()];
                 --c;
               }
             }
             for (std::int64_t cb = 0; cb < col_blocks; ++cb) {
               const std::uint64_t hash = block_hash(rb * col_blocks + cb);
               const std::int64_t width = std::min(kScaleBlock, cols - cb * kScaleBlock);
               const auto r = static_cast<std::int64_t>(hash >> 8 & 0xFFFF) % height;
               const auto c = static_cast<std::int64_t>(hash >> 24 & 0xFFFF) % width;
               strip[static_cast<std::size_t>(r * cols + cb * kScaleBlock + c)] = (hash >> 40 & 1) != 0 ? 0xFE : 0x7E;
             }
             SLUICE_TRY(sink(std::as_bytes(std::span(strip).first(static_cast<std::size_t>(height * cols)))));
           }
           return Status::ok();
         }});
    tensors.push_back({full + ".weight_scale_inv", DType::kF32, {row_blocks, col_blocks}, [=](const Sink& sink) {
                         return produce<float>(sink, row_blocks * col_blocks, [&](std::int64_t block) {
                           return level_amax(static_cast<int>(block_hash(block) % kLevels)) * sigma / 448.0f;
                         });
                       }});
  }

  Status mxfp4_tensor(const std::string& name, std::int64_t E, std::int64_t rows, std::int64_t cols) {
    if (cols % kMxColumns != 0) {
      return {StatusCode::kInvalidArgument,
              fmt::format("synth: MXFP4 needs multiples of 32 columns, {} has {}", name, cols)};
    }
    const std::string full = prefix_ + name;
    const std::uint64_t seed = seed_of(request_.seed, full);
    const double sigma = 1.0 / std::sqrt(static_cast<double>(cols));
    // The largest of 32 normals is near 2 deviations, and 4 or 6 are the top codes: two neighbouring exponents occur.
    const int base = static_cast<int>(std::floor(std::log2(2.0 * sigma))) - 2;
    const std::int64_t groups = E * rows * cols / kMxColumns;
    const auto step = [=](std::int64_t group) {
      return static_cast<int>(mix(seed ^ mix(static_cast<std::uint64_t>(group) + 1)) & 1);
    };
    tensors.push_back(
        {full + "_blocks", DType::kU8, {E, rows, cols / kMxColumns, kMxColumns / 2}, [=](const Sink& sink) {
           constexpr double kBounds[] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};  // halfway between the magnitudes
           std::array<std::vector<std::uint8_t>, 2> codes;
           for (int s = 0; s < 2; ++s) {
             for (float z : quantiles()) {
               const double value = static_cast<double>(z) * sigma / std::ldexp(1.0, base + s);
               const auto code =
                   std::upper_bound(std::begin(kBounds), std::end(kBounds), std::fabs(value)) - std::begin(kBounds);
               codes[static_cast<std::size_t>(s)].push_back(static_cast<std::uint8_t>(code | (value < 0 ? 8 : 0)));
             }
           }
           Draws draws(seed);
           return produce<std::uint8_t>(sink, groups * kMxColumns / 2, [&](std::int64_t byte) {
             const auto& table = codes[static_cast<std::size_t>(step(byte / (kMxColumns / 2)))];
             const std::uint8_t low = table[draws.next()];
             return static_cast<std::uint8_t>(low | table[draws.next()] << 4);
           });
         }});
    tensors.push_back({full + "_scales", DType::kU8, {E, rows, cols / kMxColumns}, [=](const Sink& sink) {
                         return produce<std::uint8_t>(sink, groups, [&](std::int64_t g) {
                           return static_cast<std::uint8_t>(127 + base + step(g));
                         });
                       }});
    return Status::ok();
  }

  const SynthRequest& request_;
  const HfConfig& config_;
  const Family& family_;
  DType plain_;
  bool nested_;
  IgnoreList ignored_;
  std::string prefix_;
};

// ---- the config ----

void override_key(json& config, const IntKey& key, std::int64_t value) {
  if (value == 0 || key.names.empty()) return;
  bool any = false;
  for (std::string_view name : key.names) {
    if (!config.contains(name)) continue;
    config[std::string(name)] = value;
    any = true;
  }
  if (!any) config[std::string(key.names.front())] = value;
}

// Keeps the first `layers` layers: the count, and every list that has one entry per layer or names layers.
void cut_layers(json& config, const Family& family, std::int64_t old_layers, std::int64_t layers) {
  config["num_hidden_layers"] = layers;
  for (auto& [key, value] : config.items()) {
    if (!value.is_array()) continue;
    if (key == family.layers.moe_list || key == family.layers.dense_list) {
      json kept = json::array();
      for (const json& entry : value) {
        if (entry.is_number_integer() && entry.get<std::int64_t>() < layers) kept.push_back(entry);
      }
      value = kept;
    } else if (static_cast<std::int64_t>(value.size()) == old_layers) {
      value.erase(value.begin() + layers, value.end());
    }
  }
  for (std::string_view name : family.layers.end.names) {
    if (config.contains(name) && config[std::string(name)].is_number_integer() &&
        config[std::string(name)].get<std::int64_t>() >= layers) {
      config[std::string(name)] = layers - 1;
    }
  }
}

Result<DType> plain_dtype(const json& root, const json& text) {
  for (const json* from : {&text, &root}) {
    for (const char* key : {"dtype", "torch_dtype"}) {
      if (!from->contains(key) || !(*from)[key].is_string()) continue;
      const auto name = (*from)[key].get<std::string>();
      if (name == "bfloat16" || name == "float16") return DType::kBF16;
      if (name == "float32") return DType::kF32;
      return Status(StatusCode::kUnsupported,
                    fmt::format("synth: '{}' is '{}', expected bfloat16, float16 or float32", key, name));
    }
  }
  return DType::kBF16;
}

void set_weights(json& root, json& text, SynthWeights weights) {
  if (weights == SynthWeights::kAsConfig) return;
  json scale_format;  // how activations are quantised outlives the weights' format
  for (const json* from : {&text, &root}) {
    const auto quant = from->find("quantization_config");
    if (quant != from->end() && quant->is_object()) scale_format = quant->value("scale_fmt", scale_format);
  }
  root.erase("quantization_config");
  text.erase("quantization_config");
  root.erase("dtype");
  root.erase("torch_dtype");
  text.erase("torch_dtype");
  text["dtype"] = weights == SynthWeights::kF32 ? "float32" : "bfloat16";
  if (weights == SynthWeights::kE4M3) {
    root["quantization_config"] = {
        {"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"}, {"weight_block_size", {128, 128}}};
    if (!scale_format.is_null()) root["quantization_config"]["scale_fmt"] = scale_format;
  }
}

// Removes what was written unless told that all went well.
class Cleanup {
 public:
  // To be made before the folders are.
  explicit Cleanup(const fs::path& folder) {
    std::error_code ignored;
    for (fs::path path = fs::absolute(folder, ignored).lexically_normal(); !fs::exists(path, ignored);
         path = path.parent_path()) {
      if (path == path.parent_path()) break;
      if (!path.filename().empty()) new_folders_.push_back(path);  // a trailing slash ends in an empty name
    }
  }
  ~Cleanup() {
    if (done) return;
    std::error_code ignored;
    for (const fs::path& file : written) fs::remove(file, ignored);
    for (const fs::path& folder : new_folders_) fs::remove(folder, ignored);  // innermost first; empty ones only
  }
  Cleanup(const Cleanup&) = delete;
  Cleanup& operator=(const Cleanup&) = delete;
  std::vector<fs::path> written;
  bool done = false;

 private:
  std::vector<fs::path> new_folders_;
};

Status write_text(const fs::path& path, const std::string& text) {
  std::ofstream stream(path, std::ios::binary);
  stream << text;
  stream.close();
  return stream ? Status::ok() : Status(StatusCode::kIoError, fmt::format("{}: cannot be written", path.string()));
}

Status write_all(const SynthRequest& request, const json& root, std::vector<TensorToWrite> tensors, Cleanup& cleanup) {
  std::int64_t total = 0, finished = 0;
  std::vector<std::vector<TensorToWrite>> shards(1);
  std::int64_t shard_bytes = 0;
  for (TensorToWrite& tensor : tensors) {
    auto bytes = checked_num_bytes(tensor.shape, tensor.dtype);
    if (!bytes) return bytes.status();
    if (shard_bytes > 0 && shard_bytes + *bytes > request.max_shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shard_bytes += *bytes;
    total += *bytes;
    tensor.produce = [&request, &finished, &total, inner = std::move(tensor.produce)](const Sink& sink) {
      return inner([&](std::span<const std::byte> piece) {
        if (request.stop && request.stop()) return Status(StatusCode::kIoError, "synth: stopped when asked to");
        SLUICE_TRY(sink(piece));
        finished += static_cast<std::int64_t>(piece.size());
        if (request.progress) request.progress(finished, total);
        return Status::ok();
      });
    };
    shards.back().push_back(std::move(tensor));
  }
  json weight_map = json::object();
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const std::string name = shards.size() == 1 ? "model.safetensors"
                                                : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards.size());
    SLUICE_TRY(write_safetensors(request.out / name, shards[s], {{"format", "pt"}}));
    cleanup.written.push_back(request.out / name);
    for (const TensorToWrite& tensor : shards[s]) weight_map[tensor.name] = name;
  }
  const auto write_json = [&](const fs::path& path, const json& value) {
    cleanup.written.push_back(path);
    return write_text(path, value.dump(1) + "\n");
  };
  if (shards.size() > 1) {
    SLUICE_TRY(write_json(request.out / "model.safetensors.index.json",
                          {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}}));
  }
  return write_json(request.out / "config.json", root);
}

Status synthesize_checked(const SynthRequest& request) {
  const auto invalid = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, "synth: " + std::move(text));
  };
  for (const auto& [value, name] :
       {std::pair(request.num_layers, "num_layers"), std::pair(request.num_experts, "num_experts"),
        std::pair(request.hidden, "hidden"), std::pair(request.intermediate, "intermediate"),
        std::pair(request.top_k, "top_k"), std::pair(request.shared_intermediate, "shared_intermediate")}) {
    if (value < 0) return invalid(fmt::format("{} = {} is negative", name, value));
  }
  if (request.max_shard_bytes < 1)
    return invalid(fmt::format("max_shard_bytes = {} must be at least 1", request.max_shard_bytes));
  auto root = config_like(request.like);
  if (!root) return root.status();
  const std::string where = "config of " + request.like;
  auto before = parse_hf_config(*root, where);
  if (!before) return before.status();
  const Family& family = *before->family;
  const bool nested = root->contains("text_config") && (*root)["text_config"].is_object();
  json& text = nested ? (*root)["text_config"] : *root;

  override_key(text, family.experts, request.num_experts);
  override_key(text, family.hidden, request.hidden);
  override_key(text, family.intermediate, request.intermediate);
  override_key(text, family.top_k, request.top_k);
  override_key(text, family.shared_width, request.shared_intermediate);
  set_weights(*root, text, request.weights);
  std::vector<std::int64_t> layers;
  for (const auto& [layer, moe] : before->moe_layers) layers.push_back(layer);
  const auto wanted = static_cast<std::size_t>(request.num_layers);
  if (layers.empty() || wanted > layers.size()) {
    return invalid(fmt::format("num_layers = {}, but {} has {} layers with experts", request.num_layers, request.like,
                               layers.size()));
  }
  if (wanted > 0) cut_layers(text, family, before->num_layers, layers[wanted - 1] + 1);
  auto config = parse_hf_config(*root, where);
  if (!config) return invalid(config.status().message());  // it was sound before the request's own numbers
  const std::string& method = config->quant.method;
  const bool blocks_128 = config->quant.block_rows == kScaleBlock && config->quant.block_cols == kScaleBlock;
  if (!method.empty() && !(method == "fp8" && blocks_128) && method != "mxfp4") {
    return Status(
        StatusCode::kUnsupported,
        fmt::format("synth: quantization_config of {} asks for {} {}; fp8 with [128,128] blocks and mxfp4 are written",
                    request.like, method, config->quant.format));
  }
  auto plain = plain_dtype(*root, text);
  if (!plain) return plain.status();

  std::error_code error;
  const bool exists = fs::exists(request.out, error);
  if (request.out.empty() || (exists && (!fs::is_directory(request.out, error) || !fs::is_empty(request.out, error)))) {
    return invalid(fmt::format("'{}' exists and is not an empty folder", request.out.string()));
  }
  Cleanup cleanup(request.out);
  if (!exists && !fs::create_directories(request.out, error)) {
    return Status(StatusCode::kIoError, fmt::format("{}: {}", request.out.string(), error.message()));
  }
  Writer writer(request, *config, *plain, nested);
  SLUICE_TRY(writer.set_ignored());
  for (const auto& [layer, moe] : config->moe_layers) SLUICE_TRY(writer.add_layer(layer, moe));
  SLUICE_TRY(write_all(request, *root, std::move(writer.tensors), cleanup));
  cleanup.done = true;
  return Status::ok();
}

}  // namespace

Status synthesize(const SynthRequest& request) {
  try {
    return synthesize_checked(request);
  } catch (const std::exception& e) {  // the JSON and file system libraries, or memory
    return {StatusCode::kInternal, fmt::format("synth: {}", e.what())};
  }
}

}  // namespace sluice::io
