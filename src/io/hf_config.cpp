#include "io/hf_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "io/text_file.h"

namespace sluice::io {
namespace {

using nlohmann::json;

Status bad(std::string text) { return {StatusCode::kBadData, std::move(text)}; }

// A value long enough to be recognised and short enough for a message.
std::string shorten(const json& value) {
  std::string text = value.dump();
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

std::string quoted_names(const Names& names) {
  std::string text;
  for (std::string_view name : names) text += fmt::format("{}'{}'", text.empty() ? "" : " or ", name);
  return text;
}

// One layer's view of a config: lists with one entry per layer are indexed by it.
class Reader {
 public:
  Reader(const json& root, const std::string& where, std::string_view family, std::int64_t num_layers,
         std::int64_t layer)
      : root_(root), where_(where), family_(family), num_layers_(num_layers), layer_(layer) {}

  // Null counts as absent: configuration classes write null for "not set".
  const json* find(std::string_view name) const {
    const auto it = root_.find(name);
    return it == root_.end() || it->is_null() ? nullptr : &*it;
  }

  template <class T>
  Result<T> get(const Key<T>& key) const {
    std::optional<T> value;
    std::string_view from;
    for (std::string_view name : key.names) {
      const json* found = find(name);
      if (found == nullptr) continue;
      // A key of the whole model has no layer to index by, and is no list.
      if (found->is_array() && num_layers_ > 0) {
        if (static_cast<std::int64_t>(found->size()) != num_layers_) {
          return bad(fmt::format("{}: '{}' is a list of {} values, but num_hidden_layers = {}", where_, name,
                                 found->size(), num_layers_));
        }
        found = &(*found)[static_cast<std::size_t>(layer_)];
      }
      Result<T> converted = convert<T>(name, *found);
      if (!converted) return converted;
      if (value && *value != *converted) {
        return bad(fmt::format("{}: '{}' = {} and '{}' = {} mean the same in a {} config, but differ", where_, from,
                               *value, name, *converted, family_));
      }
      value = *converted;
      from = name;
    }
    if (value) return *value;
    if (key.absent) return *key.absent;
    return bad(fmt::format("{}: a {} config needs {}, which is absent", where_, family_, quoted_names(key.names)));
  }

  // The first key present, for messages; the first of all when none is.
  template <class T>
  std::string_view name_of(const Key<T>& key) const {
    for (std::string_view name : key.names) {
      if (find(name) != nullptr) return name;
    }
    return key.names.empty() ? std::string_view("(fixed)") : key.names.front();
  }

 private:
  template <class T>
  Result<T> convert(std::string_view name, const json& value) const {
    if constexpr (std::is_same_v<T, bool>) {
      if (value.is_boolean()) return value.get<bool>();
      return wrong(name, value, "true or false");
    } else if constexpr (std::is_same_v<T, double>) {
      if (value.is_number() && std::isfinite(value.get<double>())) return value.get<double>();
      return wrong(name, value, "a finite number");
    } else {
      if (value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() <= INT64_MAX)) {
        return value.get<std::int64_t>();
      }
      return wrong(name, value, "an integer");
    }
  }
  Status wrong(std::string_view name, const json& value, std::string_view expected) const {
    return bad(fmt::format("{}: '{}' is {}, expected {}", where_, name, shorten(value), expected));
  }

  const json& root_;
  const std::string& where_;
  std::string_view family_;
  std::int64_t num_layers_;
  std::int64_t layer_;
};

#define SLUICE_READ(target, key)                             \
  do {                                                       \
    auto sluice_read_ = reader.get(key);                     \
    if (!sluice_read_.is_ok()) return sluice_read_.status(); \
    (target) = *sluice_read_;                                \
  } while (false)

Status read_gate(const Reader& reader, const Family& family, const std::string& where, MoeConfig& config) {
  GateConfig& gate = config.gate;
  gate = gate_preset(family.gate);
  SLUICE_READ(gate.n_group, family.n_group);
  SLUICE_READ(gate.topk_group, family.topk_group);
  if (!family.topk_methods.empty()) {
    std::string method(family.topk_method_absent);
    if (const json* value = reader.find("topk_method"))
      method = value->is_string() ? value->get<std::string>() : shorten(*value);
    const TopkMethod* found = nullptr;
    std::string known;
    for (const TopkMethod& m : family.topk_methods) {
      if (m.name == method) found = &m;
      known += (known.empty() ? "" : ", ") + std::string(m.name);
    }
    if (found == nullptr)
      return bad(fmt::format("{}: 'topk_method' is '{}', expected one of {}", where, method, known));
    gate.group_score = found->group_score;
    gate.has_score_bias = found->has_score_bias;
    if (found->group_score == GroupScore::kNone) gate.n_group = gate.topk_group = 1;  // a method without groups
  }
  if (gate.n_group == 1) gate.group_score = GroupScore::kNone;
  if (family.reads_scoring_func) {
    if (const json* value = reader.find("scoring_func")) {
      const std::string score = value->is_string() ? value->get<std::string>() : shorten(*value);
      if (score == "softmax") {
        gate.score = Score::kSoftmax;
      } else if (score == "sigmoid" || score == "noaux_tc") {  // dots1 files carry the method's name here
        gate.score = Score::kSigmoid;
      } else if (score == "sqrtsoftplus") {
        gate.score = Score::kSqrtSoftplus;
      } else {
        return bad(fmt::format("{}: 'scoring_func' is '{}', expected softmax, sigmoid or sqrtsoftplus", where, score));
      }
    }
  }
  if (!family.use_score_bias.names.empty()) SLUICE_READ(gate.has_score_bias, family.use_score_bias);
  bool norm = false;
  SLUICE_READ(norm, family.norm);
  if (!norm) {
    gate.renorm = Renorm::kNone;
  } else if (gate.renorm == Renorm::kNone) {
    gate.renorm = Renorm::kSum;
  }
  if (!family.norm_min.names.empty()) {
    double norm_min = 0;
    SLUICE_READ(norm_min, family.norm_min);
    if (norm_min != 1e-12) {
      return bad(
          fmt::format("{}: '{}' is {}; only 1e-12 is implemented", where, reader.name_of(family.norm_min), norm_min));
    }
  }
  double factor = 0;
  SLUICE_READ(factor, family.factor);
  gate.routed_scaling_factor = static_cast<float>(factor);

  if (config.top_k > config.num_experts) {
    return bad(fmt::format("{}: '{}' = {} is more than '{}' = {}", where, reader.name_of(family.top_k), config.top_k,
                           reader.name_of(family.experts), config.num_experts));
  }
  if (gate.n_group < 1 || config.num_experts % gate.n_group != 0) {
    return bad(fmt::format("{}: '{}' = {} is not divisible by '{}' = {}", where, reader.name_of(family.experts),
                           config.num_experts, reader.name_of(family.n_group), gate.n_group));
  }
  if (gate.topk_group < 1 || gate.topk_group > gate.n_group) {
    return bad(fmt::format("{}: '{}' = {} is not between 1 and '{}' = {}", where, reader.name_of(family.topk_group),
                           gate.topk_group, reader.name_of(family.n_group), gate.n_group));
  }
  return Status::ok();
}

Result<MoeConfig> read_layer(const Reader& reader, const Family& family, const std::string& where) {
  MoeConfig config;
  SLUICE_READ(config.hidden, family.hidden);
  SLUICE_READ(config.intermediate, family.intermediate);
  SLUICE_READ(config.num_experts, family.experts);
  SLUICE_READ(config.top_k, family.top_k);
  const std::pair<std::int64_t, std::string_view> sizes[] = {{config.hidden, reader.name_of(family.hidden)},
                                                             {config.intermediate, reader.name_of(family.intermediate)},
                                                             {config.num_experts, reader.name_of(family.experts)},
                                                             {config.top_k, reader.name_of(family.top_k)}};
  for (const auto& [size, name] : sizes) {
    if (size < 1 || size > (std::int64_t{1} << 31))
      return bad(fmt::format("{}: '{}' = {} is not between 1 and 2^31", where, name, size));
  }
  if (!family.shared_width.names.empty()) {
    SLUICE_READ(config.shared_intermediate, family.shared_width);
  } else {
    std::int64_t count = 0;
    SLUICE_READ(count, family.shared_count);
    if (count < 0 || count > 1024) {
      return bad(
          fmt::format("{}: '{}' = {} is not between 0 and 1024", where, reader.name_of(family.shared_count), count));
    }
    config.shared_intermediate = count * config.intermediate;
  }
  if (config.shared_intermediate < 0) {
    return bad(fmt::format("{}: '{}' = {} is negative", where, reader.name_of(family.shared_width),
                           config.shared_intermediate));
  }
  config.has_shared_gate = family.has_shared_gate && config.shared_intermediate > 0;
  config.weight_on_input = family.weight_on_input;
  config.activation.kind = family.activation;
  double limit = 0, alpha = 0;
  SLUICE_READ(limit, family.limit);
  SLUICE_READ(alpha, family.alpha);
  config.activation.limit = static_cast<float>(limit);
  config.activation.alpha = static_cast<float>(alpha);
  SLUICE_TRY(read_gate(reader, family, where, config));
  SLUICE_TRY(validate(config).with_context(where));
  return config;
}

// Whether a layer has experts; "hash" layers do, but without a gate that could choose them.
enum class LayerKind : std::uint8_t { kDense, kMoe, kHash };

Result<LayerKind> kind_of_layer(const Reader& reader, const json& root, const Family& family, const std::string& where,
                                std::int64_t num_layers, std::int64_t layer) {
  const LayerRule& rule = family.layers;
  if (!rule.type_list.empty()) {
    if (const json* types = reader.find(rule.type_list)) {
      if (!types->is_array() || static_cast<std::int64_t>(types->size()) < num_layers) {
        return bad(
            fmt::format("{}: '{}' must list one word for each of the {} layers", where, rule.type_list, num_layers));
      }
      const json& word = (*types)[static_cast<std::size_t>(layer)];
      if (word == "dense") return LayerKind::kDense;
      if (word == "sparse" || word == "moe") return LayerKind::kMoe;
      if (word == "hash_moe") return LayerKind::kHash;
      return bad(fmt::format("{}: '{}'[{}] is {}, expected dense, sparse, moe or hash_moe", where, rule.type_list,
                             layer, shorten(word)));
    }
  }
  const auto listed = [&](std::string_view name) -> Result<bool> {
    const auto it = root.find(name);
    if (!it->is_array())
      return bad(fmt::format("{}: '{}' is {}, expected a list of layers", where, name, shorten(*it)));
    for (const json& entry : *it) {
      if (!entry.is_number_integer())
        return bad(fmt::format("{}: '{}' holds {}, expected layer numbers", where, name, shorten(entry)));
      if (entry.get<std::int64_t>() == layer) return true;
    }
    return false;
  };
  if (!rule.moe_list.empty() && reader.find(rule.moe_list) != nullptr) {
    auto in_list = listed(rule.moe_list);
    if (!in_list) return in_list.status();
    return *in_list ? LayerKind::kMoe : LayerKind::kDense;
  }
  if (!rule.dense_list.empty() && reader.find(rule.dense_list) != nullptr) {
    auto in_list = listed(rule.dense_list);
    if (!in_list) return in_list.status();
    if (*in_list) return LayerKind::kDense;
  }
  std::int64_t first_dense = 0, freq = 0, step = 0, start = 0, end = 0, hash_layers = 0;
  SLUICE_READ(first_dense, rule.first_dense);
  SLUICE_READ(freq, rule.freq);
  SLUICE_READ(step, rule.step);
  SLUICE_READ(start, rule.start);
  SLUICE_READ(end, rule.end);
  SLUICE_READ(hash_layers, rule.hash_layers);
  for (const auto& [value, name] :
       {std::pair(freq, reader.name_of(rule.freq)), std::pair(step, reader.name_of(rule.step))}) {
    if (value < 1) return bad(fmt::format("{}: '{}' = {} must be at least 1", where, name, value));
  }
  if (end == -1) end = num_layers - 1;
  const bool moe =
      layer >= first_dense && layer % freq == 0 && (layer + 1) % step == 0 && layer >= start && layer <= end;
  if (!moe) return LayerKind::kDense;
  return layer < hash_layers ? LayerKind::kHash : LayerKind::kMoe;
}

Status read_quant(const json& root, const std::string& where, QuantConfig& quant) {
  const auto found = root.find("quantization_config");
  if (found == root.end() || found->is_null()) return Status::ok();
  const json& q = *found;
  const auto wrong = [&](std::string_view key, std::string_view expected) {
    return bad(fmt::format("{}: quantization_config '{}' is {}, expected {}", where, key, shorten(q[std::string(key)]),
                           expected));
  };
  if (!q.is_object()) return bad(fmt::format("{}: 'quantization_config' is {}, expected an object", where, shorten(q)));
  const auto text = [&](const char* key, std::string& out) -> Status {
    if (!q.contains(key) || q[key].is_null()) return Status::ok();
    if (!q[key].is_string()) return wrong(key, "a string");
    out = q[key].get<std::string>();
    return Status::ok();
  };
  SLUICE_TRY(text("quant_method", quant.method));
  if (quant.method.empty()) return bad(fmt::format("{}: quantization_config has no 'quant_method'", where));
  SLUICE_TRY(text("fmt", quant.format));
  SLUICE_TRY(text("format", quant.format));
  std::string scale_format = "float";
  SLUICE_TRY(text("scale_fmt", scale_format));
  if (scale_format == "ue8m0") {
    quant.scale_format = ScaleFormat::kUe8m0;
  } else if (scale_format != "float") {
    return wrong("scale_fmt", "float or ue8m0");
  }
  const auto block = [&](const json& from, const char* key) -> Status {
    if (!from.contains(key) || from[key].is_null()) return Status::ok();
    const json& b = from[key];
    const auto positive = [](const json& v) { return v.is_number_integer() && v >= 1 && v <= 65536; };
    if (!b.is_array() || b.size() != 2 || !positive(b[0]) || !positive(b[1])) {
      return bad(
          fmt::format("{}: quantization_config '{}' is {}, expected two positive integers", where, key, shorten(b)));
    }
    quant.block_rows = b[0].get<std::int64_t>();
    quant.block_cols = b[1].get<std::int64_t>();
    return Status::ok();
  };
  SLUICE_TRY(block(q, "weight_block_size"));
  // Where compressed-tensors says the block of its scales, and integer formats their width.
  const auto integers = [&](const json& from) {
    for (const auto& [key, out] : {std::pair("bits", &quant.num_bits), std::pair("num_bits", &quant.num_bits),
                                   std::pair("group_size", &quant.group_size)}) {
      if (from.contains(key) && from[key].is_number_integer()) *out = from[key].get<std::int64_t>();
    }
  };
  integers(q);
  if (q.contains("config_groups") && q["config_groups"].is_object()) {
    for (const json& group : q["config_groups"]) {
      if (!group.is_object() || !group.contains("weights") || !group["weights"].is_object()) continue;
      const json& weights = group["weights"];
      integers(weights);
      if (quant.block_rows == 0) SLUICE_TRY(block(weights, "block_structure"));
      if (const auto it = weights.find("strategy"); it != weights.end() && it->is_string()) {
        // Groups that disagree make a word that is no strategy, which is then refused by name.
        const auto word = it->get<std::string>();
        if (quant.strategy.empty()) {
          quant.strategy = word;
        } else if (quant.strategy != word) {
          quant.strategy += " or " + word;
        }
      }
      if (const auto it = weights.find("symmetric"); it != weights.end() && it->is_boolean() && !it->get<bool>())
        quant.symmetric = false;
    }
  }
  for (const char* key : {"modules_to_not_convert", "ignore", "ignored_layers"}) {
    if (!q.contains(key) || q[key].is_null()) continue;
    if (!q[key].is_array()) return wrong(key, "a list of module names");
    for (const json& pattern : q[key]) {
      if (!pattern.is_string()) return wrong(key, "a list of module names");
      quant.ignored.push_back(pattern.get<std::string>());
    }
  }
  return Status::ok();
}

}  // namespace

Result<HfConfig> parse_hf_config(const json& root, const std::string& where) {
  if (!root.is_object()) return bad(fmt::format("{}: {} at the top, expected an object", where, shorten(root)));
  const auto model_type_of = [](const json& object) -> std::string {
    const auto it = object.find("model_type");
    return it != object.end() && it->is_string() ? it->get<std::string>() : "";
  };
  // Multimodal configs nest the language model's; it is then the only one that is read.
  const json* text = &root;
  if (const auto nested = root.find("text_config"); nested != root.end() && nested->is_object()) text = &*nested;
  HfConfig config;
  config.where = where;
  config.model_type = model_type_of(*text).empty() ? model_type_of(root) : model_type_of(*text);
  if (config.model_type.empty()) return bad(fmt::format("{}: 'model_type' is absent or no string", where));
  config.family = find_family(config.model_type);
  if (config.family == nullptr && text != &root) {  // a text_config with a name of its own inside a known family
    config.family = find_family(model_type_of(root));
  }
  if (config.family == nullptr) {
    return Status(StatusCode::kUnsupported, fmt::format("{}: model_type '{}' is not known; known are {}", where,
                                                        config.model_type, family_names()));
  }
  const Family& family = *config.family;
  const Reader model(*text, where, family.name, 0, 0);
  auto num_layers = model.get(IntKey{{"num_hidden_layers"}, {}});
  if (!num_layers) return num_layers.status();
  if (*num_layers < 1 || *num_layers > 100'000) {
    return bad(fmt::format("{}: 'num_hidden_layers' = {} is not between 1 and 100000", where, *num_layers));
  }
  config.num_layers = *num_layers;
  SLUICE_TRY(read_quant(root, where, config.quant));
  if (config.quant.method.empty() && text != &root) SLUICE_TRY(read_quant(*text, where, config.quant));

  std::string other_activation;
  if (const json* act = model.find("hidden_act"); act != nullptr && *act != "silu" && *act != "swish") {
    other_activation = fmt::format("{}: 'hidden_act' is {}; the experts of Sluice are silu(g)*u", where, shorten(*act));
  }
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const Reader reader(*text, where, family.name, config.num_layers, layer);
    auto kind = kind_of_layer(reader, *text, family, where, config.num_layers, layer);
    if (!kind) return kind.status();
    if (*kind == LayerKind::kDense) continue;
    auto moe = read_layer(reader, family, where);
    if (!moe) return moe.status().with_context(fmt::format("layer {}", layer));
    if (*kind == LayerKind::kHash) {
      moe->gate.has_score_bias = false;
      config.cannot_run[layer] = "the layer chooses its experts by token id (hash_moe), not by a gate";
    }
    if (!other_activation.empty()) config.cannot_run[layer] = other_activation;
    moe->activation_scale = config.quant.scale_format;
    config.moe_layers.emplace(layer, *moe);
  }
  return config;
}

// Configs are read into a document, which the JSON library copies and prints by recursion: deeper ones than any real
// config would overflow the stack.
constexpr int kMaxDepth = 64;
constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{64} << 20;

Result<json> read_json(const std::filesystem::path& path) {
  std::vector<std::set<std::string>> keys;
  std::string twice;
  bool too_deep = false;
  const json::parser_callback_t watch = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      twice = value.get<std::string>();
    too_deep = too_deep || depth > kMaxDepth;
    return depth <= kMaxDepth;
  };
  try {
    const Result<std::string> text = read_text(path, kMaxConfigBytes);
    if (!text) return text.status();
    json root = json::parse(*text, watch);
    if (too_deep) return bad(fmt::format("{}: values are nested more than {} deep", path.string(), kMaxDepth));
    if (!twice.empty()) return bad(fmt::format("{}: the key '{}' appears twice", path.string(), twice));
    return root;
  } catch (const json::parse_error& e) {
    return bad(fmt::format("{}: JSON error at byte {}: {}", path.string(), e.byte, e.what()));
  } catch (const std::exception& e) {
    return bad(fmt::format("{}: {}", path.string(), e.what()));
  }
}

Result<HfConfig> read_hf_config(const std::filesystem::path& path) {
  auto root = read_json(path);
  if (!root) return root.status();
  try {
    return parse_hf_config(*root, path.string());
  } catch (const std::exception& e) {  // a text that is not UTF-8 in a message
    return bad(fmt::format("{}: {}", path.string(), e.what()));
  }
}

namespace {

std::vector<std::string_view> components(std::string_view path) {
  std::vector<std::string_view> parts;
  while (true) {
    const auto dot = path.find('.');
    parts.push_back(path.substr(0, dot));
    if (dot == std::string_view::npos) return parts;
    path.remove_prefix(dot + 1);
  }
}

}  // namespace

constexpr std::size_t kMaxPatternBytes = 1024;
// Patterns come with the file. libstdc++'s default matcher backtracks, in time exponential in the text for some; its
// other one is polynomial and lacks only back-references, which it refuses by name.
#ifdef __GLIBCXX__
constexpr auto kRegexFlags = std::regex_constants::ECMAScript | std::regex_constants::__polynomial;
#else
constexpr auto kRegexFlags = std::regex_constants::ECMAScript;
#endif

Result<IgnoreList> IgnoreList::compile(const std::vector<std::string>& patterns) {
  IgnoreList list;
  for (const std::string& pattern : patterns) {
    if (pattern.starts_with("re:")) {
      // The standard library parses by recursion.
      if (pattern.size() > kMaxPatternBytes) {
        return bad(fmt::format("quantization_config: a regular expression of {} bytes, the limit is {}: '{}...'",
                               pattern.size(), kMaxPatternBytes, pattern.substr(0, 40)));
      }
      try {
        list.regexes_.emplace_back(pattern.substr(3), kRegexFlags);
      } catch (const std::regex_error& e) {
        return bad(fmt::format("quantization_config: '{}' is no regular expression: {}", pattern, e.what()));
      }
    } else if (!pattern.empty()) {
      const auto parts = components(pattern);
      list.words_.emplace_back(parts.begin(), parts.end());
    }
  }
  return list;
}

bool IgnoreList::matches(std::string_view module) const {
  const auto path = components(module);
  for (const auto& wanted : words_) {
    const auto same = [](std::string_view part, std::string_view pattern) { return pattern == "*" || part == pattern; };
    if (std::search(path.begin(), path.end(), wanted.begin(), wanted.end(), same) != path.end()) return true;
  }
  const std::string text(module);
  // As the tools that write such lists do: anchored at the start of the path, not at its end.
  return std::any_of(regexes_.begin(), regexes_.end(), [&](const std::regex& regex) {
    return std::regex_search(text, regex, std::regex_constants::match_continuous);
  });
}

Result<bool> IgnoreList::covers(std::string_view module) const {
  if (matches(module)) return true;
  constexpr std::string_view kFusedName = "gate_up_proj";
  if (!module.ends_with(kFusedName)) return false;
  const std::string parent(module.substr(0, module.size() - kFusedName.size()));
  const bool gate = matches(parent + "gate_proj"), up = matches(parent + "up_proj");
  if (gate != up) {
    return bad(fmt::format("quantization_config ignores {}{} but not {}{}, which are fused in {}", parent,
                           gate ? "gate_proj" : "up_proj", parent, gate ? "up_proj" : "gate_proj", module));
  }
  return gate;
}

}  // namespace sluice::io
