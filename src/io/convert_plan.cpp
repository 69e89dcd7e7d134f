// The plan of a conversion: which tensors are experts' matrices, what each becomes, where it goes, and what the new
// config.json says.
#include "io/convert_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "io/layer_files.h"
#include "io/text_file.h"
#include "io/unpack.h"

namespace sluice::io {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::int64_t kStripBytes = std::int64_t{16} << 20;
constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{64} << 20;

Status unsupported(std::string text) { return {StatusCode::kUnsupported, "convert: " + std::move(text)}; }
Status invalid(std::string text) { return {StatusCode::kInvalidArgument, "convert: " + std::move(text)}; }

// ---- the experts' matrices ----

struct NamedMatrix {
  std::string module;  // its name in the output; ".weight" and the scale follow
  StoredMatrix matrix;
};
using Matrices = std::map<const TensorEntry*, std::vector<NamedMatrix>>;

class Finder {
 public:
  explicit Finder(const Family& family) : family_(family) {}

  Status add_layer(const LayerFiles& files) {
    SLUICE_TRY(add_ffn(files, files.experts, "experts"));
    if (files.config.shared_intermediate > 0) SLUICE_TRY(add_ffn(files, files.shared, "shared expert"));
    return Status::ok();
  }

  Matrices matrices;

 private:
  Status add_ffn(const LayerFiles& files, const StoredFfn& ffn, std::string_view what) {
    if (ffn.format != StoredFormat::kPlain || !ffn.present) {
      return unsupported(fmt::format("layer {} ({}*): the {} are {}; bf16, f16 and f32 are converted", files.layer,
                                     files.prefix, what, ffn.present ? ffn.text : "not there"));
    }
    const std::int64_t H = files.config.hidden, I = ffn.intermediate;
    if (ffn.fused) return add_fused(files, ffn, H, I);
    for (const auto& [refs, rows, cols] :
         {std::tuple(&ffn.gate, I, H), std::tuple(&ffn.up, I, H), std::tuple(&ffn.down, H, I)}) {
      for (const TensorRef& ref : *refs) {
        SLUICE_TRY(check(files, ref, {rows, cols}));
        constexpr std::string_view kWeight = ".weight";
        const std::string& name = ref.entry->name;
        matrices[ref.entry].push_back({name.substr(0, name.size() - kWeight.size()), {ref, rows, cols, 0, cols, 1}});
      }
    }
    return Status::ok();
  }

  // Split into one tensor per expert and projection: scales per expert need names per expert.
  Status add_fused(const LayerFiles& files, const StoredFfn& ffn, std::int64_t H, std::int64_t I) {
    const auto layout = std::find_if(family_.layouts.begin(), family_.layouts.end(),
                                     [](const ExpertLayout& l) { return !l.is_fused(); });
    if (layout == family_.layouts.end() || ffn.gate_up_bias) {
      return unsupported(
          fmt::format("layer {} ({}*): the experts are fused, and the {} family has no names for single ones",
                      files.layer, files.prefix, family_.name));
    }
    const std::int64_t E = ffn.num_experts;
    const bool t = ffn.transposed;
    const TensorRef &gate_up = ffn.gate[0], &down = ffn.down[0];
    SLUICE_TRY(check(files, gate_up, t ? std::vector{E, H, 2 * I} : std::vector{E, 2 * I, H}));
    SLUICE_TRY(check(files, down, t ? std::vector{E, I, H} : std::vector{E, H, I}));
    // Stored rows of gate and of up, and the step between them.
    const std::int64_t step = ffn.order == GateUp::kInterleaved ? 2 : 1;
    const std::int64_t gate_row = ffn.order == GateUp::kUpFirst ? I : 0;
    const std::int64_t up_row = ffn.order == GateUp::kInterleaved ? 1 : I - gate_row;
    const std::int64_t n_stride = t ? 1 : H, k_stride = t ? 2 * I : 1;
    for (std::int64_t e = 0; e < E; ++e) {
      for (const auto& [pattern, row] : {std::pair(layout->gate, gate_row), std::pair(layout->up, up_row)}) {
        matrices[gate_up.entry].push_back({files.prefix + expand(pattern, e),
                                           {gate_up, I, H, e * 2 * I * H + row * n_stride, step * n_stride, k_stride}});
      }
      matrices[down.entry].push_back(
          {files.prefix + expand(layout->down, e), {down, H, I, e * H * I, t ? 1 : I, t ? H : 1}});
    }
    return Status::ok();
  }

  // A layer that cannot be run is described as far as it is understood, not judged: so it is judged here.
  static Status check(const LayerFiles& files, const TensorRef& ref, const std::vector<std::int64_t>& shape) {
    if (!ref)
      return invalid(fmt::format("layer {} ({}*): a tensor of its experts is missing", files.layer, files.prefix));
    const TensorEntry& entry = *ref.entry;
    const bool plain = DTypeSet{DType::kF32, DType::kBF16, DType::kF16}.has(entry.dtype);
    if (entry.shape == shape && plain) return Status::ok();
    return unsupported(fmt::format("{} is {}{}, expected bf16, f16 or f32{}", entry.name, to_string(entry.dtype),
                                   shape_text(entry.shape), shape_text(shape)));
  }

  const Family& family_;
};

// ---- config.json ----

// What stays as it is, for readers that would otherwise expect scales there: every module with a matrix; the experts of
// a layer that was left alone count as one. lm_head may be tied and have no tensor of its own.
struct Untouched {
  std::set<std::string> modules{"lm_head"};
  std::set<std::string> parents;
};

Untouched untouched_modules(const ConvertPlan& plan) {
  const auto parent_of = [](const std::string& name) {
    const std::size_t at = name.find(".experts.");
    return at == std::string::npos ? std::string() : name.substr(0, at + 8);
  };
  std::set<std::string> quantised;
  for (const ConvertStep& step : plan.steps) {
    if (!step.is_copy()) quantised.insert(parent_of(plan.tensors[step.out].name));
  }
  Untouched result;
  for (const ConvertStep& step : plan.steps) {
    if (!step.is_copy() || step.copy.entry->shape.size() < 2) continue;
    const std::string& name = step.copy.entry->name;
    if (const std::string parent = parent_of(name); !parent.empty() && quantised.count(parent) == 0) {
      result.parents.insert(parent);
    } else if (name.ends_with(".weight")) {
      result.modules.insert(name.substr(0, name.size() - 7));
    }
  }
  return result;
}

std::string regex_below(const std::string& module) {
  std::string pattern = "re:";
  for (const char c : module) {
    const bool word = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
    pattern += word ? std::string(1, c) : std::string("\\") + c;
  }
  return pattern + "\\..*";
}

ordered_json quantization_config(const ConvertPlan& plan) {
  const Untouched untouched = untouched_modules(plan);
  ordered_json modules = ordered_json::array();
  for (const std::string& module : untouched.modules) modules.push_back(module);
  if (plan.format == WeightFormat::kFp8Block) {
    for (const std::string& parent : untouched.parents) modules.push_back(parent);
    return {{"quant_method", "fp8"},
            {"fmt", "e4m3"},
            {"activation_scheme", "dynamic"},
            {"weight_block_size", {kScaleBlock, kScaleBlock}},
            {"modules_to_not_convert", std::move(modules)}};
  }
  // Readers of this format match names whole, so what lies below a parent is said by a pattern.
  for (const std::string& parent : untouched.parents) modules.push_back(regex_below(parent));
  const bool int8 = plan.format == WeightFormat::kInt8Channel;
  const auto arguments = [&](const char* strategy, bool dynamic) {
    return ordered_json{
        {"num_bits", 8},      {"type", int8 ? "int" : "float"}, {"strategy", strategy},      {"symmetric", true},
        {"dynamic", dynamic}, {"group_size", nullptr},          {"block_structure", nullptr}};
  };
  return {{"quant_method", "compressed-tensors"},
          {"format", int8 ? "int-quantized" : "float-quantized"},
          {"quantization_status", "compressed"},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"weights", arguments("channel", false)},
              {"input_activations", arguments("token", true)},
              {"output_activations", nullptr}}}}},
          {"kv_cache_scheme", nullptr},
          {"ignore", std::move(modules)}};
}

Status make_config(ConvertPlan& plan) {
  const fs::path path = plan.folder / "config.json";
  const Result<std::string> text = read_text(path, kMaxConfigBytes);
  if (!text) return text.status();
  // Keys keep their order; the file was judged before, as the loader judges it.
  ordered_json root = ordered_json::parse(*text);
  root.erase("quantization_config");
  if (root.contains("text_config") && root["text_config"].is_object()) root["text_config"].erase("quantization_config");
  root["quantization_config"] = quantization_config(plan);
  plan.config_json = root.dump(2) + "\n";
  return Status::ok();
}

// Another name for a quantization_config, which the loader does not know.
Status refuse_quantised(const HfConfig& config, const fs::path& path) {
  const auto refuse = [&](const std::string& method) {
    return unsupported(fmt::format("{}: the checkpoint is quantised already ({}); bf16, f16 and f32 are converted",
                                   path.string(), method));
  };
  if (!config.quant.method.empty()) return refuse("quant_method " + config.quant.method);
  const auto root = read_json(path);
  if (!root) return root.status();
  for (const char* key : {"compression_config"}) {
    if (root->contains(key) && !(*root)[key].is_null()) return refuse(key);
  }
  return Status::ok();
}

// ---- files ----

bool holds_weights(const fs::path& file) {
  const std::string name = file.filename().string();
  for (const char* suffix : {".safetensors", ".safetensors.index.json", ".bin.index.json", ".pt", ".pth", ".gguf",
                             ".onnx", ".h5", ".msgpack", ".ckpt"}) {
    if (name.ends_with(suffix)) return true;
  }
  return name.starts_with("pytorch_model") && name.ends_with(".bin");
}

Status list_files(ConvertPlan& plan) {
  std::error_code error;
  auto it = fs::recursive_directory_iterator(plan.folder, error);  // follows no links to folders
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    const fs::path relative = it->path().lexically_relative(plan.folder);
    std::error_code ignored;
    if (it->is_directory(ignored)) {
      if (relative.filename().string().starts_with('.') || it->is_symlink(ignored)) {
        plan.left_out_files.push_back(relative.string() + "/");
        if (!it->is_symlink(ignored)) it.disable_recursion_pending();
      }
      continue;
    }
    if (relative == "config.json") continue;
    const bool used = std::any_of(plan.catalog.files().begin(), plan.catalog.files().end(),
                                  [&](const auto& file) { return file->path() == it->path(); });
    if (used || relative == "model.safetensors.index.json") continue;
    if (holds_weights(relative) || !it->is_regular_file(ignored)) {
      plan.left_out_files.push_back(relative.string());
    } else {
      plan.files.push_back(relative);
    }
  }
  if (error) return {StatusCode::kIoError, fmt::format("convert: {}: {}", plan.folder.string(), error.message())};
  std::sort(plan.files.begin(), plan.files.end());
  std::sort(plan.left_out_files.begin(), plan.left_out_files.end());
  return Status::ok();
}

bool is_inside(const fs::path& path, const fs::path& folder) {
  const auto [end, ignored] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end == folder.end();
}

// The source is never touched: not by writing into it, and not by replacing what holds it or the files it links to.
Status keep_apart(const ConvertPlan& plan, const fs::path& out) {
  std::error_code error;
  const fs::path in = fs::canonical(plan.folder, error);
  fs::path target = fs::weakly_canonical(fs::absolute(out), error);
  if (!target.has_filename()) target = target.parent_path();
  if (in == target) return invalid(fmt::format("the output '{}' is the model itself", out.string()));
  if (is_inside(target, in)) return invalid(fmt::format("the output '{}' lies in the model's folder", out.string()));
  if (is_inside(in, target)) return invalid(fmt::format("the model lies in the output's folder '{}'", out.string()));
  std::vector<fs::path> sources;
  for (const auto& file : plan.catalog.files()) sources.push_back(file->path());
  for (const fs::path& file : plan.files) sources.push_back(plan.folder / file);
  for (const fs::path& source : sources) {
    if (is_inside(fs::canonical(source, error), target))
      return invalid(fmt::format("'{}' of the model lies in the output's folder '{}'", source.string(), out.string()));
  }
  return Status::ok();
}

// ---- tensors and shards ----

void add_tensor(ConvertPlan& plan, std::string name, DType dtype, std::vector<std::int64_t> shape) {
  PlannedTensor tensor{std::move(name), dtype, std::move(shape)};
  tensor.num_bytes = *checked_num_bytes(tensor.shape, dtype);  // no larger than what is stored, or sixty-four bits know
  plan.tensors.push_back(std::move(tensor));
}

Status make_steps(ConvertPlan& plan, const Matrices& matrices) {
  // In the order of the files, so that they are read from front to back.
  std::vector<TensorRef> refs(plan.catalog.tensors().begin(), plan.catalog.tensors().end());
  std::sort(refs.begin(), refs.end(), [](const TensorRef& a, const TensorRef& b) {
    return a.file != b.file ? a.file->path() < b.file->path()
                            : std::pair(a.entry->begin, a.entry->end) < std::pair(b.entry->begin, b.entry->end);
  });
  const std::string_view scale_suffix = plan.format == WeightFormat::kFp8Block ? ".weight_scale_inv" : ".weight_scale";
  for (const TensorRef& ref : refs) {
    const auto found = matrices.find(ref.entry);
    if (found == matrices.end()) {
      plan.steps.push_back({ref, {}, plan.tensors.size()});
      add_tensor(plan, ref.entry->name, ref.entry->dtype, ref.entry->shape);
      continue;
    }
    for (const NamedMatrix& m : found->second) {
      plan.steps.push_back({{}, m.matrix, plan.tensors.size()});
      const auto [scale_rows, scale_cols] = scale_shape(plan.format, m.matrix.rows, m.matrix.cols);
      add_tensor(plan, m.module + ".weight", weight_dtype(plan.format), {m.matrix.rows, m.matrix.cols});
      add_tensor(plan, m.module + std::string(scale_suffix), DType::kF32, {scale_rows, scale_cols});
    }
  }
  std::set<std::string_view> names;
  for (const PlannedTensor& tensor : plan.tensors) {
    if (!names.insert(tensor.name).second)
      return unsupported(fmt::format("the output would have two tensors '{}'", tensor.name));
  }
  return Status::ok();
}

// A weight and its scale stay together.
void make_shards(ConvertPlan& plan, std::int64_t max_bytes) {
  std::int64_t filled = 0;
  std::size_t slot = 0;
  for (const ConvertStep& step : plan.steps) {
    const std::size_t count = step.is_copy() ? 1 : 2;
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) bytes += plan.tensors[step.out + i].num_bytes;
    if (plan.num_shards == 0 || (slot > 0 && filled + bytes > max_bytes)) {
      ++plan.num_shards;
      filled = 0;
      slot = 0;
    }
    for (std::size_t i = 0; i < count; ++i) {
      plan.tensors[step.out + i].shard = plan.num_shards - 1;
      plan.tensors[step.out + i].slot = slot++;
    }
    filled += bytes;
    plan.total_bytes += bytes;
    plan.source_bytes += step.source_bytes();
  }
}

template <class T>
void gather(const StoredMatrix& m, std::int64_t begin, std::int64_t count, T* out) {
  constexpr std::int64_t kTile = 32;  // squares that keep a cache line of both sides in use
  const std::byte* const data = m.ref.data();
  for (std::int64_t r0 = 0; r0 < count; r0 += kTile) {
    for (std::int64_t c0 = 0; c0 < m.cols; c0 += kTile) {
      for (std::int64_t r = r0; r < std::min(count, r0 + kTile); ++r) {
        for (std::int64_t c = c0; c < std::min(m.cols, c0 + kTile); ++c) {
          const std::int64_t at = m.first + (begin + r) * m.row_stride + c * m.col_stride;
          std::memcpy(out + r * m.cols + c, data + at * std::int64_t{sizeof(T)}, sizeof(T));
        }
      }
    }
  }
}

}  // namespace

std::string StoredMatrix::element(std::int64_t row, std::int64_t col) const {
  std::int64_t at = first + row * row_stride + col * col_stride;
  std::string text;
  for (std::size_t i = ref.entry->shape.size(); i-- > 0;) {
    const std::int64_t extent = ref.entry->shape[i];
    text = fmt::format("{}{}{}", at % extent, text.empty() ? "" : ",", text);
    at /= extent;
  }
  return fmt::format("{}[{}]", ref.entry->name, text);
}

std::int64_t rows_per_strip(const StoredMatrix& matrix) {
  const std::int64_t row_bytes = std::max<std::int64_t>(matrix.cols * 4, 1);
  return std::max<std::int64_t>(kStripBytes / row_bytes / kScaleBlock, 1) * kScaleBlock;
}

void drop_rows(const StoredMatrix& m, std::int64_t begin, std::int64_t count) {
  if (!m.is_dense()) return m.ref.file->drop(*m.ref.entry);
  const std::int64_t size = size_bytes(m.ref.entry->dtype), at = (m.first + begin * m.cols) * size;
  m.ref.file->drop(*m.ref.entry, at, at + count * m.cols * size);
}

TensorView rows_of(const StoredMatrix& m, std::int64_t begin, std::int64_t count, std::vector<std::byte>& buffer) {
  const DType from = m.ref.entry->dtype;
  const std::int64_t size = size_bytes(from);
  const std::byte* const dense = m.ref.data() + (m.first + begin * m.row_stride) * size;
  const bool aligned = reinterpret_cast<std::uintptr_t>(dense) % static_cast<std::uintptr_t>(size) == 0;
  if (m.is_dense() && aligned && from != DType::kF16) return TensorView::dense(dense, from, {count, m.cols});
  const DType to = from == DType::kF16 ? DType::kF32 : from;
  buffer.resize(static_cast<std::size_t>(count * m.cols * size_bytes(to)));
  if (from == DType::kF32) {
    gather(m, begin, count, reinterpret_cast<std::uint32_t*>(buffer.data()));
  } else if (from == DType::kBF16) {
    gather(m, begin, count, reinterpret_cast<std::uint16_t*>(buffer.data()));
  } else {
    std::vector<std::uint16_t> halves(static_cast<std::size_t>(count * m.cols));
    gather(m, begin, count, halves.data());
    to_f32(DType::kF16, reinterpret_cast<const std::byte*>(halves.data()), count * m.cols,
           reinterpret_cast<float*>(buffer.data()));
  }
  return TensorView::dense(buffer.data(), to, {count, m.cols});
}

std::int64_t ConvertStep::source_bytes() const {
  return is_copy() ? copy.num_bytes() : matrix.rows * matrix.cols * size_bytes(matrix.ref.entry->dtype);
}

std::string ConvertPlan::shard_name(std::size_t shard) const {
  return num_shards == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, num_shards);
}

Result<ConvertPlan> plan_convert(const ConvertRequest& request) {
  std::error_code error;
  if (!fs::exists(request.model, error))
    return Status(StatusCode::kNotFound, fmt::format("{}: there is no such folder", request.model.string()));
  if (!fs::is_directory(request.model, error))
    return invalid(fmt::format("{} is no folder; a whole checkpoint is converted", request.model.string()));
  if (request.out.empty()) return invalid("'' is no path to write to");
  if (request.max_shard_bytes < 1)
    return invalid(fmt::format("max_shard_bytes = {} must be at least 1", request.max_shard_bytes));
  ConvertPlan plan;
  plan.format = request.format;
  plan.folder = request.model;
  auto config = read_hf_config(plan.folder / "config.json");
  if (!config) return config.status();
  plan.config = std::move(*config);
  SLUICE_TRY(refuse_quantised(plan.config, plan.folder / "config.json"));
  auto catalog = Catalog::open(plan.folder);
  if (!catalog) return catalog.status();
  plan.catalog = std::move(*catalog);

  plan.layers = request.layers;
  if (plan.layers.empty()) {
    for (const auto& [layer, moe] : plan.config.moe_layers) plan.layers.push_back(layer);
  }
  std::sort(plan.layers.begin(), plan.layers.end());
  plan.layers.erase(std::unique(plan.layers.begin(), plan.layers.end()), plan.layers.end());
  if (plan.layers.empty()) return unsupported(fmt::format("{} has no layers with experts", request.model.string()));
  Finder finder(*plan.config.family);
  for (const std::int64_t layer : plan.layers) {
    const auto files = find_layer(plan.catalog, plan.config, layer);
    if (!files) return files.status();
    SLUICE_TRY(finder.add_layer(*files));
  }
  SLUICE_TRY(make_steps(plan, finder.matrices));
  make_shards(plan, request.max_shard_bytes);
  SLUICE_TRY(make_config(plan));
  SLUICE_TRY(list_files(plan));
  SLUICE_TRY(keep_apart(plan, request.out));
  return plan;
}

}  // namespace sluice::io
