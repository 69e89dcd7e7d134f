#include "options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "commands.h"
#include "device/device.h"
#include "interrupt.h"
#include "progress.h"

namespace sluice::cli {

namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 24;
constexpr int kMaxThreads = 4096;

template <class T>
std::string join_precisions(const T& precisions) {
  std::vector<std::string_view> names;
  for (Precision p : precisions) names.push_back(to_string(p));
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

CLI::Validator whole_number(std::int64_t low, std::int64_t high) {
  const bool bounded = high != INT64_MAX;
  const std::string range = bounded ? fmt::format("{} to {}", low, high) : fmt::format("{} or more", low);
  const auto judge = [=](const std::string& text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool fits = error == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
    return fits ? std::string() : fmt::format("'{}' is no whole number {}{}", text, bounded ? "from " : "of ", range);
  };
  return CLI::Validator(judge, bounded ? range : "");
}

CLI::Validator number(double low, double high) {
  const std::string range = fmt::format("{} to {}", low, high);
  const auto judge = [=](const std::string& text) {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool fits = error == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
    return fits ? std::string() : fmt::format("'{}' is no number from {}", text, range);
  };
  return CLI::Validator(judge, range);
}

CLI::Validator one_of(std::vector<std::string> words) {
  const auto judge = [words](const std::string& text) {
    const bool known = std::find(words.begin(), words.end(), text) != words.end();
    return known ? std::string() : fmt::format("'{}' is none of {}", text, fmt::join(words, ", "));
  };
  return CLI::Validator(judge, "");
}

void add_json(CLI::App& sub, Command& command) {
  sub.add_flag("--json", command.json, "Print one JSON document instead of text");
}

void add_threads(CLI::App& sub, MachineOptions& options) {
  sub.add_option("--threads", options.threads, "Worker threads; default: every usable core")
      ->check(whole_number(1, kMaxThreads))
      ->type_name("N");
}

void add_impl(CLI::App& sub, MachineOptions& options) {
  sub.add_option("--impl", options.impl,
                 "Force an implementation: NAME for every stage that has it, or STAGE=NAME for one stage;\n"
                 "may be repeated. `sluice explain` lists stages and names. One that cannot run is an error")
      ->type_name("[STAGE=]NAME")
      ->allow_extra_args(false);
}

void add_device(CLI::App& sub, MachineOptions& options) {
  sub.add_option(
         "--device", options.device,
         "Where the layer runs: auto, cpu, cuda or cuda:N [auto: GPU 0 where it can run the layer, else the CPU]")
      ->type_name("DEVICE");
}

Result<ChosenMachine> choose_machine(const MachineOptions& options, bool& usage) {
  const std::string& text = options.device;
  ChosenMachine chosen;
  if (text == "cpu") {
    chosen.machine = options.host();
    return chosen;
  }
  if (text == "auto") {
    Result<Machine> gpu = Machine::detect_cuda(0);
    const Status usable = gpu ? device::runs_hopper_kernels(*gpu) : gpu.status();
    chosen.machine = usable.is_ok() ? std::move(*gpu) : options.host();
    chosen.reason = usable.message();
    return chosen;
  }
  int index = 0;
  bool is_word = text == "cuda";
  if (text.rfind("cuda:", 0) == 0) {
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + 5, end, index);
    is_word = error == std::errc() && stop == end && index >= 0;
  }
  if (!is_word) {
    usage = true;
    return Status(StatusCode::kInvalidArgument, fmt::format("--device '{}' is none of auto, cpu, cuda, cuda:N", text));
  }
  Result<Machine> gpu = Machine::detect_cuda(index);
  if (!gpu) return gpu.status().with_context("--device " + text);
  chosen.machine = std::move(*gpu);
  return chosen;
}

std::string ChosenMachine::name() const {
  return is_gpu() ? fmt::format("cuda:{}", machine.device.index) : std::string("cpu");
}

std::string ChosenMachine::describe() const {
  if (is_gpu()) {
    const Gpu& gpu = machine.gpu;
    return fmt::format("GPU {}: {}, compute capability {}, {} SMs, {}, driver for CUDA {}, built with CUDA {}",
                       machine.device.index, gpu.name, to_string(gpu.capability), gpu.num_sms,
                       format_bytes(gpu.memory_bytes), to_string(gpu.driver), to_string(gpu.runtime));
  }
  return fmt::format("CPU: {} threads, {}{}", machine.num_threads, machine.simd,
                     reason.empty() ? "" : fmt::format(" (auto: {})", reason));
}

Json device_json(const ChosenMachine& chosen) {
  Json json = {{"device", chosen.name()}};
  if (!chosen.reason.empty()) json["why_not_cuda"] = chosen.reason;
  if (!chosen.is_gpu()) return json;
  const Gpu& gpu = chosen.machine.gpu;
  json["gpu"] = {{"name", gpu.name},
                 {"capability", to_string(gpu.capability)},
                 {"sms", gpu.num_sms},
                 {"memory_bytes", gpu.memory_bytes},
                 {"shared_bytes_per_block", gpu.shared_bytes_per_block},
                 {"driver", to_string(gpu.driver)},
                 {"runtime", to_string(gpu.runtime)}};
  return json;
}

Result<std::map<std::string, Selection>> parse_selection(const std::vector<std::string>& impl) {
  const std::vector<StageNames> tables = stage_names();
  std::map<std::string, Selection> selection;
  for (const std::string& text : impl) {
    const std::size_t equals = text.find('=');
    const std::string stage = equals == std::string::npos ? "" : text.substr(0, equals);
    const std::string name = equals == std::string::npos ? text : text.substr(equals + 1);
    bool stage_found = stage.empty();
    bool name_found = false;
    std::string known;
    for (const StageNames& table : tables) {
      if (!stage.empty() && table.stage != stage) continue;
      stage_found = true;
      known += fmt::format("{}{}: {}", known.empty() ? "" : "; ", table.stage, fmt::join(table.impls, ", "));
      if (std::find(table.impls.begin(), table.impls.end(), name) == table.impls.end()) continue;
      name_found = true;
      // The stage's own entry wins over a plain NAME, whatever their order.
      if (stage.empty() && selection.count(table.stage) != 0) continue;
      selection[table.stage].forced = name;
    }
    if (!stage_found) {
      std::vector<std::string> stages;
      for (const StageNames& table : tables) stages.push_back(table.stage);
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--impl {}: no stage '{}'; there are {}", text, stage, fmt::join(stages, ", ")));
    }
    if (!name_found) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--impl {}: no implementation '{}'; there are {}", text, name, known));
    }
  }
  SLUICE_TRY(disable_from_environment(selection));
  return selection;
}

Result<Precision> parse_one_precision(const std::string& text) {
  Result<Precision> precision = parse_precision(text);
  if (precision) return precision;
  return Status(StatusCode::kInvalidArgument,
                fmt::format("--precision: '{}' is none of {}", text, join_precisions(kAllPrecisions)));
}

Result<std::vector<Precision>> parse_precisions(const std::string& text) {
  std::vector<Precision> precisions;
  if (text.empty() || text == "all") return precisions;
  for (const std::string& part : split(text, ',')) {
    Result<Precision> precision = parse_one_precision(part);
    if (!precision) return precision.status();
    if (std::find(precisions.begin(), precisions.end(), *precision) == precisions.end())
      precisions.push_back(*precision);
  }
  return precisions;
}

Result<std::vector<std::int64_t>> parse_tokens(const std::string& text, std::int64_t low) {
  return parse_counts("--tokens", text, low, kMaxTokens);
}

Result<std::vector<std::int64_t>> parse_counts(std::string_view option, const std::string& text, std::int64_t low,
                                               std::int64_t high) {
  std::vector<std::int64_t> counts;
  for (const std::string& part : split(text, ',')) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc() || end != part.data() + part.size() || value < low || value > high) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} {}: '{}' is not a count in [{}, {}]", option, text, part, low, high));
    }
    counts.push_back(value);
  }
  return counts;
}

Precision default_precision(const LayerInfo& info) {
  // The first that fits in the order of fidelity to the checkpoint's own recipe: FP8 checkpoints name dynamic FP8
  // activations, bf16 ones run in bf16, f32 ones in f32.
  const auto has = [&](Precision p) {
    return std::find(info.precisions.begin(), info.precisions.end(), p) != info.precisions.end();
  };
  if (info.expert_dtype == DType::kF32 && has(Precision::kF32)) return Precision::kF32;
  for (Precision p : {Precision::kW8A8, Precision::kBF16, Precision::kW8A16, Precision::kF32}) {
    if (has(p)) return p;
  }
  return Precision::kF32;
}

Status check_precision(const LayerInfo& info, Precision precision) {
  if (info.precisions.empty()) {
    return Status(StatusCode::kUnsupported, fmt::format("layer {} cannot run: {}", info.layer, info.cannot_run));
  }
  if (std::find(info.precisions.begin(), info.precisions.end(), precision) != info.precisions.end()) return {};
  const Status why = data_path(precision, info.expert_dtype).status();
  return Status(
      StatusCode::kUnsupported,
      fmt::format("layer {} cannot run in {}: its experts are {}{}{}; it runs in {}", info.layer, to_string(precision),
                  info.expert_format, why.is_ok() ? "" : ", ", why.message(), join_precisions(info.precisions)));
}

Result<ModelLayer> open_layer(const std::string& model, std::int64_t layer) {
  Result<Checkpoint> checkpoint = Checkpoint::open(model);
  if (!checkpoint) return checkpoint.status();
  Result<LayerInfo> info = checkpoint->layer_info(layer);
  if (!info) return info.status();
  return ModelLayer{std::move(*checkpoint), std::move(*info)};
}

Result<LoadedLayer> load_layer(const ModelLayer& model, Precision precision, bool routed_only, LoadOptions part) {
  Progress progress(fmt::format("loading layer {}", model.info.layer), Progress::Unit::kBytes);
  LoadOptions options = std::move(part);
  options.precision = precision;
  options.routed_only = routed_only;
  options.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  options.stop = is_interrupted;  // commands that do not catch signals are ended by them as ever
  return model.checkpoint.load(model.info.layer, options);
}

Result<LayerWeights> place_weights(LayerWeights weights, const ChosenMachine& chosen) {
  if (!chosen.is_gpu()) return weights;
  Progress progress(fmt::format("uploading to {}", chosen.name()), Progress::Unit::kBytes);
  UploadOptions options;
  options.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  options.stop = is_interrupted;
  return upload(weights, chosen.machine.device, options);
}

Json config_json(const MoeConfig& config) {
  return {{"hidden", config.hidden},
          {"intermediate", config.intermediate},
          {"num_experts", config.num_experts},
          {"top_k", config.top_k},
          {"gate", describe(config.gate)},
          {"n_group", config.gate.n_group},
          {"topk_group", config.gate.topk_group},
          {"routed_scaling_factor", config.gate.routed_scaling_factor},
          {"activation", describe(config.activation)},
          {"activation_scale", to_string(config.activation_scale)},
          {"weight_on_input", config.weight_on_input},
          {"shared_intermediate", config.shared_intermediate},
          {"has_shared_gate", config.has_shared_gate}};
}

}  // namespace sluice::cli
