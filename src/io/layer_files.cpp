#include "io/layer_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace sluice::io {
namespace {

constexpr std::int64_t kMxColumns = 32;

// Names under which the scale of `<module>.weight` is found. What it means is the config's to say, not the name's.
constexpr std::string_view kScaleSuffixes[] = {".weight_scale_inv", ".weight_scale", ".scale"};
// Tensors that come with quantised modules and change nothing for dynamically quantised activations.
constexpr std::string_view kUnusedSuffixes[] = {".input_scale", ".activation_scale", "_input_scale",
                                                "_activation_scale"};

const DTypeSet kFloats = {DType::kF32, DType::kBF16, DType::kF16};
const DTypeSet kScaleTypes = {DType::kF32, DType::kBF16, DType::kF16, DType::kE8M0, DType::kU8};

std::string describe_tensor(const TensorRef& ref) {
  return fmt::format("{}{}", to_string(ref.entry->dtype), shape_text(ref.entry->shape));
}

// Looks tensors up and keeps the account: what was used, what is missing, what is wrong.
class Finder {
 public:
  Finder(const Catalog& catalog, const HfConfig& config, const IgnoreList& ignored)
      : catalog_(catalog), config_(config), ignored_(ignored) {}

  const Catalog& catalog() const { return catalog_; }
  const HfConfig& config() const { return config_; }

  // A tensor that must be there, of one of these dtypes and exactly this shape.
  TensorRef need(const std::string& name, const DTypeSet& dtypes, const std::vector<std::int64_t>& shape,
                 std::string_view what = {}) {
    const TensorRef ref = catalog_.find(name);
    if (!ref) {
      missing_.push_back(what.empty() ? name : fmt::format("{} ({})", name, what));
      return ref;
    }
    used_.insert(ref.entry);
    if (!dtypes.has(ref.entry->dtype) || ref.entry->shape != shape) {
      wrong_.push_back(
          fmt::format("{} is {}, expected {}{}", name, describe_tensor(ref), dtypes.to_string(), shape_text(shape)));
    }
    return ref;
  }
  // The first name that exists, or the first of all for the message.
  std::string choose(const std::string& prefix, const Names& names) const {
    for (std::string_view name : names) {
      if (catalog_.find(prefix + std::string(name))) return prefix + std::string(name);
    }
    return prefix + std::string(names.front());
  }
  void use(const TensorRef& ref) { used_.insert(ref.entry); }
  void complain(std::string text) { wrong_.push_back(std::move(text)); }
  // A module the config lists as left alone cannot be quantised in the file.
  void must_not_be_ignored(const std::string& module) {
    if (ignored_.empty()) return;
    auto covered = ignored_.covers(module);
    if (!covered) {
      complain(covered.status().message());
    } else if (*covered) {
      complain(fmt::format("{} is quantised in the file, but quantization_config lists it as not converted", module));
    }
  }

  Status account(const std::string& prefix, bool strict, LayerFiles& files) const {
    std::vector<std::string> surplus;
    for (const TensorRef& ref : catalog_.with_prefix(prefix)) {
      files.layer_bytes += ref.num_bytes();
      if (used_.count(ref.entry) > 0) continue;
      const std::string& name = ref.entry->name;
      const bool unused = std::any_of(std::begin(kUnusedSuffixes), std::end(kUnusedSuffixes),
                                      [&](std::string_view suffix) { return name.ends_with(suffix); });
      if (unused) {
        files.notes.push_back(fmt::format("{} is known and not used", name));
      } else {
        surplus.push_back(name);
      }
    }
    if (!strict) return Status::ok();
    std::string text = list("missing: ", missing_) + list("not as expected: ", wrong_) +
                       list("in the file, but unknown to the family: ", surplus);
    if (text.empty()) return Status::ok();
    text.pop_back();  // the last separator
    text.pop_back();
    return {StatusCode::kBadData, fmt::format("{}*: layer {} of a {} checkpoint (H = {}, I = {}, E = {}): {}", prefix,
                                              files.layer, config_.family->name, files.config.hidden,
                                              files.config.intermediate, files.config.num_experts, text)};
  }

 private:
  static std::string list(std::string_view what, const std::vector<std::string>& items) {
    if (items.empty()) return "";
    std::string text(what);
    for (std::size_t i = 0; i < items.size() && i < 4; ++i) text += (i > 0 ? ", " : "") + items[i];
    if (items.size() > 4) text += fmt::format(" and {} more", items.size() - 4);
    return text + "; ";
  }

  const Catalog& catalog_;
  const HfConfig& config_;
  const IgnoreList& ignored_;
  std::set<const TensorEntry*> used_;
  std::vector<std::string> missing_, wrong_;
};

// What one stored module is, seen at its first instance.
struct Found {
  bool exists = false;
  StoredFormat format = StoredFormat::kPlain;
  DType dtype = DType::kBF16;
  std::string scale_suffix;
  std::string text, cannot_run;
};

// Granularity of e4m3 scales, by the config alone: a shape would fit several.
void judge_e4m3(const QuantConfig& quant, Found& found) {
  const bool mx = quant.block_rows == 1 && quant.block_cols == kMxColumns;
  if (quant.block_rows == kScaleBlock && quant.block_cols == kScaleBlock) {
    found.format = StoredFormat::kE4M3Block;
    found.text = "e4m3 128x128";
  } else if (mx || (quant.block_rows == 0 && quant.method == "mxfp8")) {
    found.format = StoredFormat::kE4M3Mx;
    found.text = "e4m3 e8m0 1x32";
  } else if (quant.block_rows == 0 && quant.strategy == "channel") {
    found.format = StoredFormat::kE4M3Channel;
    found.text = "e4m3 per channel";
  } else if (quant.block_rows == 0 && quant.strategy == "tensor") {
    found.format = StoredFormat::kE4M3Tensor;
    found.text = "e4m3 per tensor";
  } else if (quant.block_rows == 0 && !quant.strategy.empty()) {
    found.format = StoredFormat::kOther;
    found.text = fmt::format("e4m3 per {}", quant.strategy);
    found.cannot_run = fmt::format(
        "the weights are e4m3 with a scale per {}; Sluice runs a scale per 128x128 block, channel or tensor",
        quant.strategy);
  } else {
    found.format = StoredFormat::kOther;
    found.text =
        quant.block_rows > 0 ? fmt::format("e4m3 {}x{}", quant.block_rows, quant.block_cols) : "e4m3, unknown scales";
    found.cannot_run = quant.block_rows > 0
                           ? fmt::format("weight_block_size is [{},{}]; Sluice runs [128,128] and dequantises [1,32]",
                                         quant.block_rows, quant.block_cols)
                           : "the weights are e4m3, but quantization_config gives no weight_block_size (scales per "
                             "tensor or per channel?)";
  }
}

void judge_int8(const QuantConfig& quant, Found& found) {
  if (quant.strategy == "channel" && quant.symmetric && quant.block_rows == 0) {
    found.format = StoredFormat::kInt8Channel;
    found.text = "int8 per channel";
    return;
  }
  found.format = StoredFormat::kOther;
  found.text = "int8";
  const std::string what = quant.block_rows > 0
                               ? fmt::format(" with a scale per {}x{}", quant.block_rows, quant.block_cols)
                           : !quant.symmetric        ? " with zero points"
                           : !quant.strategy.empty() ? fmt::format(" with a scale per {}", quant.strategy)
                                                     : ", and the config does not say what shares a scale";
  found.cannot_run = fmt::format("the weights are int8{} (quant_method {}); Sluice runs symmetric int8 per channel",
                                 what, quant.method.empty() ? "absent" : quant.method);
}

Found look_at(const Finder& finder, const std::string& module, bool is_tensor) {
  const Catalog& catalog = finder.catalog();
  const QuantConfig& quant = finder.config().quant;
  Found found;
  if (const TensorRef weight = catalog.find(is_tensor ? module : module + ".weight")) {
    found.exists = true;
    found.dtype = weight.entry->dtype;
    found.text = to_string(found.dtype);
    if (found.dtype == DType::kE4M3 || found.dtype == DType::kI8) {
      found.dtype == DType::kE4M3 ? judge_e4m3(quant, found) : judge_int8(quant, found);
      found.scale_suffix = is_tensor ? "_scale_inv" : kScaleSuffixes[0];
      for (std::string_view suffix : kScaleSuffixes) {
        if (!is_tensor && catalog.find(module + std::string(suffix))) {
          found.scale_suffix = suffix;
          break;
        }
      }
    } else if (!kFloats.has(found.dtype)) {
      found.format = StoredFormat::kOther;
      found.cannot_run = fmt::format("the weights are stored as {}{}", to_string(found.dtype),
                                     quant.method.empty() ? "" : fmt::format(" (quant_method {})", quant.method));
    }
    return found;
  }
  if (is_tensor && catalog.find(module + "_blocks")) {
    found.exists = true;
    found.format = StoredFormat::kMxfp4;
    found.dtype = DType::kU8;
    found.text = "mxfp4";
    return found;
  }
  for (std::string_view suffix : {".weight_packed", ".qweight"}) {
    if (!is_tensor && catalog.find(module + std::string(suffix))) {
      found.exists = true;
      found.format = StoredFormat::kOther;
      found.dtype = catalog.find(module + std::string(suffix)).entry->dtype;
      found.text = quant.num_bits > 0 ? fmt::format("int{} g{}", quant.num_bits, quant.group_size) : "packed integers";
      found.cannot_run =
          fmt::format("the experts are packed integers ({}{}{}); Sluice runs e4m3, MXFP4, bf16, f16 and f32",
                      quant.method.empty() ? "no quantization_config" : quant.method,
                      quant.format.empty() ? "" : ", " + quant.format, ", " + found.text);
      return found;
    }
  }
  return found;
}

// The shape of the scales of a [rows, cols] weight.
std::vector<std::int64_t> scale_shape(StoredFormat format, std::int64_t rows, std::int64_t cols) {
  if (is_per_channel(format)) return {rows, 1};
  if (format == StoredFormat::kE4M3Mx) return {rows, ceil_div(cols, kMxColumns)};
  return {ceil_div(rows, kScaleBlock), ceil_div(cols, kScaleBlock)};
}

DTypeSet scale_dtypes(StoredFormat format) {
  return format == StoredFormat::kE4M3Mx ? DTypeSet{DType::kE8M0, DType::kU8} : kScaleTypes;
}

void take_found(const Found& found, StoredFfn& ffn) {
  ffn.present = true;
  ffn.format = found.format;
  ffn.dtype = found.dtype;
  ffn.text = found.text;
  ffn.cannot_run = found.cannot_run;
}

struct ModuleNames {
  std::string gate, up, down;
};

// Three modules per expert, each with its own weight and scale.
void take_split(Finder& finder, const Found& found, const std::vector<ModuleNames>& names, std::int64_t hidden,
                StoredFfn& ffn) {
  take_found(found, ffn);
  if (found.format == StoredFormat::kOther) return;
  const auto take = [&](const std::string& module, std::int64_t rows, std::int64_t cols,
                        std::vector<TensorRef>& weights, std::vector<TensorRef>& scales) {
    weights.push_back(finder.need(module + ".weight", found.dtype, {rows, cols}));
    if (found.format == StoredFormat::kPlain) return;
    finder.must_not_be_ignored(module);
    auto shape = scale_shape(found.format, rows, cols);
    // Some tools leave out an axis of one.
    const TensorRef scale = finder.catalog().find(module + found.scale_suffix);
    const std::size_t rank = scale ? scale.entry->shape.size() : 1;
    if (found.format == StoredFormat::kE4M3Tensor) {
      shape.assign(std::min<std::size_t>(rank, 2), 1);
    } else if (is_per_channel(found.format) && rank == 1) {
      shape = {rows};
    }
    scales.push_back(finder.need(module + found.scale_suffix, scale_dtypes(found.format), shape, "scale not loaded"));
  };
  for (const ModuleNames& n : names) {
    take(n.gate, ffn.intermediate, hidden, ffn.gate, ffn.gate_scale);
    take(n.up, ffn.intermediate, hidden, ffn.up, ffn.up_scale);
    take(n.down, hidden, ffn.intermediate, ffn.down, ffn.down_scale);
  }
}

void take_fused(Finder& finder, const Found& found, const std::string& prefix, const ExpertLayout& layout,
                std::int64_t hidden, StoredFfn& ffn) {
  take_found(found, ffn);
  ffn.fused = true;
  ffn.order = layout.order;
  const std::int64_t E = ffn.num_experts, I = ffn.intermediate, H = hidden;
  const std::string gate_up = prefix + std::string(layout.fused_gate_up),
                    down = prefix + std::string(layout.fused_down);
  if (!layout.gate_up_bias.empty()) {
    ffn.gate_up_bias = finder.need(prefix + std::string(layout.gate_up_bias), kFloats, {E, 2 * I});
    ffn.down_bias = finder.need(prefix + std::string(layout.down_bias), kFloats, {E, H});
  }
  switch (found.format) {
    case StoredFormat::kPlain:
      ffn.transposed = layout.transposed;
      ffn.gate = {
          finder.need(gate_up, found.dtype, ffn.transposed ? std::vector{E, H, 2 * I} : std::vector{E, 2 * I, H})};
      ffn.down = {finder.need(down, found.dtype, ffn.transposed ? std::vector{E, I, H} : std::vector{E, H, I})};
      return;
    case StoredFormat::kMxfp4:
      if (H % kMxColumns != 0 || I % kMxColumns != 0) {
        finder.complain(
            fmt::format("{}_blocks is MXFP4, which needs H = {} and I = {} divisible by 32", gate_up, H, I));
        return;
      }
      ffn.gate = {finder.need(gate_up + "_blocks", DType::kU8, {E, 2 * I, H / kMxColumns, 16})};
      ffn.gate_scale = {
          finder.need(gate_up + "_scales", {DType::kU8, DType::kE8M0}, {E, 2 * I, H / kMxColumns}, "scale not loaded")};
      ffn.down = {finder.need(down + "_blocks", DType::kU8, {E, H, I / kMxColumns, 16})};
      ffn.down_scale = {
          finder.need(down + "_scales", {DType::kU8, DType::kE8M0}, {E, H, I / kMxColumns}, "scale not loaded")};
      return;
    case StoredFormat::kE4M3Block:
    case StoredFormat::kE4M3Mx: {
      const bool mx = found.format == StoredFormat::kE4M3Mx;
      if (layout.transposed || (!mx && layout.order == GateUp::kInterleaved)) {
        ffn.format = StoredFormat::kOther;
        ffn.cannot_run = fmt::format("{} is e4m3 with gate and up {}; its scales cannot follow", gate_up,
                                     layout.transposed ? "transposed" : "interleaved");
        return;
      }
      // One scale row would belong to gate and up alike.
      if (!mx && I % kScaleBlock != 0) {
        ffn.format = StoredFormat::kOther;
        ffn.cannot_run = fmt::format(
            "{} is fused e4m3 with I = {}: a 128-row scale block spans the boundary of gate and up", gate_up, I);
        return;
      }
      const auto batched = [&](std::int64_t rows, std::int64_t cols) {
        auto shape = scale_shape(found.format, rows, cols);
        shape.insert(shape.begin(), E);
        return shape;
      };
      finder.must_not_be_ignored(gate_up);
      finder.must_not_be_ignored(down);
      const DTypeSet dtypes = scale_dtypes(found.format);
      ffn.gate = {finder.need(gate_up, found.dtype, {E, 2 * I, H})};
      ffn.gate_scale = {finder.need(gate_up + found.scale_suffix, dtypes, batched(2 * I, H), "scale not loaded")};
      ffn.down = {finder.need(down, found.dtype, {E, H, I})};
      ffn.down_scale = {finder.need(down + found.scale_suffix, dtypes, batched(H, I), "scale not loaded")};
      return;
    }
    case StoredFormat::kE4M3Channel:
    case StoredFormat::kInt8Channel:
    case StoredFormat::kE4M3Tensor:
      ffn.format = StoredFormat::kOther;
      ffn.cannot_run =
          fmt::format("{} is fused and {}; such weights are read from one tensor per expert", gate_up, found.text);
      return;
    case StoredFormat::kOther: return;
  }
}

Status take_experts(Finder& finder, const Family& family, LayerFiles& files) {
  StoredFfn& ffn = files.experts;
  ffn.num_experts = files.config.num_experts;
  ffn.intermediate = files.config.intermediate;
  std::string tried;
  for (const ExpertLayout& layout : family.layouts) {
    const std::string first = files.prefix + expand(layout.is_fused() ? layout.fused_gate_up : layout.gate, 0);
    tried += fmt::format("{}{}{}", tried.empty() ? "" : ", ", first, layout.is_fused() ? "" : ".weight");
    const Found found = look_at(finder, first, layout.is_fused());
    if (!found.exists) continue;
    if (layout.is_fused()) {
      take_fused(finder, found, files.prefix, layout, files.config.hidden, ffn);
      for (const auto* refs : {&ffn.gate, &ffn.down, &ffn.gate_scale, &ffn.down_scale}) {
        for (const TensorRef& ref : *refs) files.expert_bytes += ref ? ref.num_bytes() / ffn.num_experts : 0;
      }
      for (const TensorRef& ref : {ffn.gate_up_bias, ffn.down_bias})
        files.expert_bytes += ref ? ref.num_bytes() / ffn.num_experts : 0;
      return Status::ok();
    }
    std::vector<ModuleNames> names;
    for (std::int64_t j = 0; j < ffn.num_experts; ++j) {
      names.push_back({files.prefix + expand(layout.gate, j), files.prefix + expand(layout.up, j),
                       files.prefix + expand(layout.down, j)});
    }
    take_split(finder, found, names, files.config.hidden, ffn);
    const std::string expert_prefix = first.substr(0, first.find_last_of('.') + 1);
    for (const TensorRef& ref : finder.catalog().with_prefix(expert_prefix)) files.expert_bytes += ref.num_bytes();
    return Status::ok();
  }
  return {StatusCode::kBadData, fmt::format("layer {}: no expert weights; looked for {}", files.layer, tried)};
}

}  // namespace

std::vector<Precision> LayerFiles::precisions() const {
  if (!cannot_run.empty()) return {};
  // Every FFN of the layer must have a path; kBF16 dequantises what is kept otherwise.
  const auto has_path = [](Precision precision, const StoredFfn& ffn) {
    if (!ffn.present || precision == Precision::kBF16) return true;
    return data_path(precision, is_kept(ffn.format) ? ffn.dtype : DType::kBF16).is_ok();
  };
  std::vector<Precision> all;
  for (Precision p : {Precision::kW8A8, Precision::kW8A16, Precision::kBF16, Precision::kF32}) {
    // A shared expert in bf16 runs in bf16 beside eight-bit experts.
    const bool eight_bit = p == Precision::kW8A8 || p == Precision::kW8A16;
    if (eight_bit && !is_kept(experts.format)) continue;
    if (has_path(p, experts) && (eight_bit || has_path(p, shared))) all.push_back(p);
  }
  return all;
}

Result<LayerFiles> find_layer(const Catalog& catalog, const HfConfig& config, std::int64_t layer) {
  const auto moe = config.moe_layers.find(layer);
  if (moe == config.moe_layers.end()) {
    const bool inside = layer >= 0 && layer < config.num_layers;
    return Status(StatusCode::kNotFound,
                  inside ? fmt::format("layer {} of {} has no experts (it is dense)", layer, config.num_layers)
                         : fmt::format("there is no layer {}; the model has {} layers", layer, config.num_layers));
  }
  const Family& family = *config.family;
  LayerFiles files;
  files.layer = layer;
  files.config = moe->second;

  std::string tried;
  for (std::string_view pattern : kLayerPrefixes) {
    for (std::string_view module : family.modules) {
      const std::string prefix = expand(pattern, layer) + std::string(module);
      tried += fmt::format("{}{}*", tried.empty() ? "" : ", ", prefix);
      if (catalog.with_prefix(prefix).empty()) continue;
      if (!files.prefix.empty()) {
        return Status(StatusCode::kBadData,
                      fmt::format("layer {} is in the files twice, as {}* and as {}*", layer, files.prefix, prefix));
      }
      files.prefix = prefix;
    }
  }
  if (files.prefix.empty()) {
    return Status(StatusCode::kNotFound,
                  fmt::format("layer {}: the files hold none of its tensors; looked for {}", layer, tried));
  }
  auto ignored = IgnoreList::compile(config.quant.ignored);
  if (!ignored) return ignored.status().with_context(config.where);
  Finder finder(catalog, config, *ignored);

  const std::int64_t H = files.config.hidden, E = files.config.num_experts;
  files.router = finder.need(finder.choose(files.prefix, family.router), kFloats, {E, H});
  if (files.config.gate.has_router_bias)
    files.router_bias = finder.need(finder.choose(files.prefix, family.router_bias), kFloats, {E});
  if (files.config.gate.has_score_bias) {
    const std::string name = finder.choose(files.prefix, family.score_bias);
    // Ernie keeps a leading axis of one.
    const TensorRef found = catalog.find(name);
    const bool batched = found && found.entry->shape.size() == 2;
    files.score_bias =
        finder.need(name, kFloats, batched ? std::vector<std::int64_t>{1, E} : std::vector<std::int64_t>{E});
  }
  SLUICE_TRY(take_experts(finder, family, files));

  if (files.config.shared_intermediate > 0) {
    files.shared.num_experts = 1;
    files.shared.intermediate = files.config.shared_intermediate;
    const std::string alone[] = {files.prefix + std::string(family.shared.gate),
                                 files.prefix + std::string(family.shared.up),
                                 files.prefix + std::string(family.shared.down)};
    take_split(finder, look_at(finder, alone[0], false), {{alone[0], alone[1], alone[2]}}, H, files.shared);
  }
  if (files.config.has_shared_gate) {
    files.shared_gate = finder.need(files.prefix + std::string(family.shared_expert_gate), kFloats, {1, H});
  }

  if (const auto it = config.cannot_run.find(layer); it != config.cannot_run.end()) files.cannot_run = it->second;
  if (files.cannot_run.empty()) files.cannot_run = files.experts.cannot_run;
  if (files.cannot_run.empty() && !files.shared.cannot_run.empty())
    files.cannot_run = "shared expert: " + files.shared.cannot_run;
  // A layer that cannot run is described as far as it is understood; one that can must be complete.
  SLUICE_TRY(finder.account(files.prefix, files.cannot_run.empty(), files).with_context(config.where));
  return files;
}

}  // namespace sluice::io
