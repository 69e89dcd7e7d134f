#include "subject.h"

#include <fmt/format.h>

#include "io/hf_config.h"
#include "io/synth.h"
#include "layer/tensors.h"

namespace sluice::cli {

namespace {

Result<Subject> preset(const std::string& like, bool& usage) {
  Result<nlohmann::json> root = io::config_like(like);
  if (!root) {
    usage = root.status().code() == StatusCode::kInvalidArgument;  // no such preset
    return root.status().with_context("--like");
  }
  Result<io::HfConfig> config = io::parse_hf_config(*root, like);
  if (!config) return config.status();
  for (const auto& [layer, moe] : config->moe_layers) {
    if (config->cannot_run.count(layer) != 0) continue;
    Subject subject;
    subject.title = like;
    subject.config = moe;
    subject.experts = config->quant.method == "fp8" ? DType::kE4M3 : DType::kBF16;
    subject.shared = subject.experts;
    return subject;
  }
  return Status(StatusCode::kUnsupported,
                fmt::format("{}: no layer with experts that can run{}{}", like, config->cannot_run.empty() ? "" : ": ",
                            config->cannot_run.empty() ? "" : config->cannot_run.begin()->second));
}

DType dtype_of_format(const std::string& format) {
  if (format.rfind("e4m3", 0) == 0) return DType::kE4M3;
  if (format == "int8 per channel") return DType::kI8;
  return format == "f32" ? DType::kF32 : DType::kBF16;
}

bool has_row_scales(const std::string& format) {
  return format.ends_with("per channel") || format.ends_with("per tensor");
}

}  // namespace

std::string preset_list() {
  constexpr std::size_t kColumns = 84;
  std::string text, line;
  for (const std::string& name : io::preset_names()) {
    if (line.size() + name.size() + 2 > kColumns) text += std::exchange(line, "") + ",\n";
    line += (line.empty() ? "" : ", ") + name;
  }
  return text + line;
}

void add_subject(CLI::App& sub, SubjectOptions& options) {
  sub.add_option("--model", options.model, "Checkpoint folder or .safetensors file")->type_name("MODEL");
  sub.add_option("--layer", options.layer, "Layer number, with --model")
      ->check(whole_number(0, INT64_MAX))
      ->type_name("N");
  sub.add_option(
         "--like", options.like,
         fmt::format("A preset or the path of a config.json, instead of a checkpoint. Presets:\n{}", preset_list()))
      ->type_name("NAME");
}

Result<Subject> find_subject(const SubjectOptions& options, bool& usage) {
  const auto refuse = [&](const char* text) {
    usage = true;
    return Status(StatusCode::kInvalidArgument, text);
  };
  if (options.model.empty() == options.like.empty()) return refuse("give either --model with --layer, or --like");
  if (!options.like.empty()) {
    if (options.layer != -1) return refuse("--layer goes with --model, not with --like");
    return preset(options.like, usage);
  }
  if (options.layer == -1) return refuse("--model needs --layer");
  Result<ModelLayer> model = open_layer(options.model, options.layer);
  if (!model) return model.status();
  return subject_of(std::move(*model), fmt::format("{} layer {}", options.model, options.layer));
}

Subject subject_of(ModelLayer model, std::string title) {
  Subject subject;
  subject.title = std::move(title);
  subject.config = model.info.config;
  // Packed formats are dequantised to bf16 on load.
  subject.experts = dtype_of_format(model.info.expert_format);
  subject.shared = dtype_of_format(model.info.shared_format);
  subject.experts_by_row = has_row_scales(model.info.expert_format);
  subject.shared_by_row = has_row_scales(model.info.shared_format);
  subject.model = std::move(model);
  return subject;
}

Result<Layer> plan_layer(const MoeConfig& config, WeightForm experts, WeightForm shared, LayerOptions options) {
  Result<LayerWeights> weights = make_weights(config, experts, shared, Fill::kNone, 1, 1);
  if (!weights) return weights.status();
  for_each_tensor(*weights, [&](std::string_view, TensorView& view) { view.device = options.machine.device; });
  options.plan_only = true;
  return Layer::create(config, std::move(*weights), options);
}

namespace {

WeightForm loaded_for(Precision precision, DType dtype, bool by_row) {
  return {precision == Precision::kBF16 && size_bytes(dtype) == 1 ? DType::kBF16 : dtype, by_row};
}

}  // namespace

WeightForm Subject::experts_for(Precision precision) const { return loaded_for(precision, experts, experts_by_row); }
WeightForm Subject::shared_for(Precision precision) const { return loaded_for(precision, shared, shared_by_row); }

Precision Subject::default_precision() const {
  if (model) return cli::default_precision(model->info);
  LayerInfo info;
  info.expert_dtype = experts;
  for (Precision p : kAllPrecisions) {
    if (can_run(p).is_ok()) info.precisions.push_back(p);
  }
  return cli::default_precision(info);
}

Status Subject::can_run(Precision precision) const {
  if (model) return check_precision(model->info, precision);
  return data_path(precision, experts_for(precision).dtype).status();
}

}  // namespace sluice::cli
