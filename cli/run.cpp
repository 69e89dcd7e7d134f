// `sluice run`: one layer on a file of activations, streamed in chunks into a safetensors file.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <set>

#include "commands.h"
#include "expert_load.h"
#include "input.h"
#include "interrupt.h"
#include "io/hf_config.h"
#include "io/safetensors.h"
#include "layer_runner.h"
#include "options.h"
#include "progress.h"
#include "subject.h"

namespace sluice::cli {

namespace {

namespace fs = std::filesystem;

constexpr const char* kAbout = R"(Run one MoE layer on activations from a file

Reads x [T,H] (bf16 or f32) and writes a safetensors file with y f32 [T,H] (shared experts included),
topk_idx i32 [T,S] and topk_weight f32 [T,S] (routed_scaling_factor included). x is what the MoE block itself
receives, after the layer's norm. Tokens go through in chunks that bound the memory; the result does not depend on
their size, on --threads, or on the other tokens, to the bit.)";

constexpr const char* kFooter =
    R"(The output appears whole or not at all: it is written beside its place and renamed at the end. It may not be the
input or a file of the model. T = 0 gives empty tensors. Memory: at most twice the layer's bytes + 200 MB.

Precisions (default: w8a8 for e4m3 experts, else bf16, f32 for f32 experts):
  w8a8   e4m3 weights, activations quantised to e4m3 per token and 128 columns
  w8a16  e4m3 weights, bf16 activations
  bf16   bf16 weights and activations (e4m3 weights are dequantised while loading)
  f32    f32 activations and arithmetic on any weights

Examples:
  sluice run --model data/tiny-dsv3 --layer 1 --input data/tiny-dsv3/golden.safetensors:layer1.x --output y.safetensors
  sluice run --model M --layer 3 --input x.npy --output y.safetensors --precision f32 --impl grouped_gemm=reference
)";

struct RunOptions {
  std::string model;
  std::int64_t layer = 0;
  std::string input;
  std::string output;
  std::string record_load;
  std::string precision;
  bool routed_only = false;
  MachineOptions machine;
};

// Scratch the run may use beside the weights; with input and output chunks it stays well inside the promised 200 MB. On a
// GPU it is the GPU's memory, which the host promises nothing about.
constexpr std::int64_t kChunkBytes = 96'000'000;
constexpr std::int64_t kGpuChunkBytes = 2'000'000'000;
constexpr std::int64_t kMaxChunk = 4096;
constexpr const char* kInterrupted = "interrupted; nothing was written";

Status check_output(const std::string& output, const std::string& input, const std::string& model) {
  const auto refuse = [&](std::string why) {
    return Status(StatusCode::kInvalidArgument, fmt::format("--output {}: {}", output, why));
  };
  std::error_code ec;
  if (fs::is_directory(output, ec)) return refuse("is a folder");
  if (fs::path(output).filename().empty()) return refuse("names no file");
  // Under another name (y.npy) the bytes would be taken for another format.
  if (fs::path(output).extension() != ".safetensors") {
    return refuse("the file is written in the safetensors format, so its name must end in .safetensors");
  }
  fs::path parent = fs::path(output).parent_path();
  if (parent.empty()) parent = ".";
  if (!fs::is_directory(parent, ec)) return refuse(fmt::format("the folder {} does not exist", parent.string()));
  if (!fs::exists(output, ec)) return {};
  if (!fs::is_regular_file(output, ec)) return refuse("exists and is no regular file");
  if (fs::equivalent(output, input, ec)) return refuse("is the input itself");
  if (fs::equivalent(output, model, ec)) return refuse("is the model itself");
  const fs::path folder = fs::is_directory(model, ec) ? fs::path(model) : fs::path(model).parent_path();
  for (const auto& entry : fs::directory_iterator(folder.empty() ? fs::path(".") : folder, ec)) {
    if (!entry.is_regular_file(ec) || !fs::equivalent(entry.path(), output, ec)) continue;
    const std::string name = entry.path().filename().string();
    if (name.find(".safetensors") != std::string::npos || name == "config.json") {
      return refuse(fmt::format("is {} of the model's folder", name));
    }
  }
  // An index may name shards in folders below.
  const fs::path index = folder / "model.safetensors.index.json";
  if (!fs::is_regular_file(index, ec)) return {};
  const auto document = io::read_json(index);
  if (!document) return document.status();
  std::set<std::string> shards;
  if (const auto map = document->find("weight_map"); map != document->end() && map->is_object()) {
    for (const auto& shard : *map) {
      if (shard.is_string()) shards.insert(shard.get<std::string>());
    }
  }
  for (const std::string& shard : shards) {
    if (fs::equivalent(folder / shard, output, ec)) return refuse(fmt::format("is {}, a shard of the model", shard));
  }
  return {};
}

struct Planned {
  Layer layer;
  std::int64_t chunk;
};

// The largest chunk of tokens whose buffers fit.
Result<Planned> plan(const MoeConfig& config, const LayerWeights& weights, LayerOptions options,
                     std::int64_t num_tokens, std::int64_t row_bytes) {
  const std::int64_t limit = options.machine.device.kind == DeviceKind::kCuda ? kGpuChunkBytes : kChunkBytes;
  std::int64_t chunk = std::min(std::max<std::int64_t>(num_tokens, 1), kMaxChunk);
  while (true) {
    options.max_tokens = chunk;
    Result<Layer> layer = Layer::create(config, weights, options);
    if (!layer) return layer.status();
    if (chunk == 1 || layer->workspace_bytes() + chunk * row_bytes <= limit) return Planned{std::move(*layer), chunk};
    chunk = (chunk + 1) / 2;
  }
}

struct Totals {
  std::int64_t nan_tokens = 0;
  std::int64_t counters[kNumCounters] = {};
  double seconds = 0;  // in the layer, without reading and writing
};

Status run_tokens(const Planned& planned, TokenInput& input, const RunOptions& options, Totals& totals) {
  const std::int64_t T = input.num_tokens(), H = input.hidden(), S = planned.layer.config().top_k;
  Result<LayerRunner> runner = LayerRunner::create(planned.layer);
  if (!runner) return runner.status();
  std::vector<std::byte> rows(static_cast<std::size_t>(planned.chunk * H * size_bytes(input.dtype())));
  std::vector<std::int32_t> topk_idx(static_cast<std::size_t>(T * S));
  std::vector<float> topk_weight(topk_idx.size());
  LayerOutput chunk;
  Progress progress("tokens", Progress::Unit::kItems);

  const auto produce = [&](const std::function<Status(std::span<const std::byte>)>& sink) -> Status {
    for (std::int64_t begin = 0; begin < T; begin += planned.chunk) {
      const std::int64_t count = std::min(planned.chunk, T - begin);
      if (is_interrupted()) return Status(StatusCode::kIoError, kInterrupted);
      progress.update(begin, T);
      SLUICE_TRY(input.read(begin, count, rows.data()));
      chunk.y.resize(static_cast<std::size_t>(count * H));
      chunk.topk_idx.resize(static_cast<std::size_t>(count * S));
      chunk.topk_weight.resize(chunk.topk_idx.size());
      const auto start = std::chrono::steady_clock::now();
      SLUICE_TRY(runner->forward(TensorView::dense(rows.data(), input.dtype(), {count, H}), chunk));
      totals.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      std::copy(chunk.topk_idx.begin(), chunk.topk_idx.end(), topk_idx.begin() + begin * S);
      std::copy(chunk.topk_weight.begin(), chunk.topk_weight.end(), topk_weight.begin() + begin * S);
      for (std::int64_t t = 0; t < count; ++t) {
        const float* y = chunk.y.data() + t * H;
        totals.nan_tokens += std::any_of(y, y + H, [](float v) { return !std::isfinite(v); }) ? 1 : 0;
      }
      SLUICE_TRY(sink(std::as_bytes(std::span(chunk.y))));
    }
    return {};
  };
  // y comes first: by the time the other two are written, the forwards have filled them.
  std::vector<io::TensorToWrite> tensors(3);
  tensors[0] = {"y", DType::kF32, {T, H}, produce, nullptr};
  tensors[1] = {"topk_idx", DType::kI32, {T, S}, {}, topk_idx.data()};
  tensors[2] = {"topk_weight", DType::kF32, {T, S}, {}, topk_weight.data()};
  const Status status = io::write_safetensors(options.output, tensors);
  if (status.is_ok() && !options.record_load.empty())
    SLUICE_TRY(record_load(options.record_load, options.layer, planned.layer.config().num_experts, topk_idx));
  std::copy(chunk.counters, chunk.counters + kNumCounters, totals.counters);
  return status;
}

Outcome run(const RunOptions& options, bool json) {
  Result<std::map<std::string, Selection>> selection = parse_selection(options.machine.impl);
  if (!selection) return Outcome::usage(selection.status().message());
  std::optional<Precision> asked;
  if (!options.precision.empty()) {
    Result<Precision> parsed = parse_one_precision(options.precision);
    if (!parsed) return Outcome::usage(parsed.status().message());
    asked = *parsed;
  }
  bool usage = false;
  Result<ChosenMachine> chosen = choose_machine(options.machine, usage);
  if (!chosen) return usage ? Outcome::usage(chosen.status().message()) : Outcome(chosen.status());
  Result<ModelLayer> model = open_layer(options.model, options.layer);
  if (!model) return model.status();
  auto input = TokenInput::open(options.input, model->info.config.hidden);
  if (!input) return input.status();
  if (Status s = check_output(options.output, (*input)->path(), options.model); !s.is_ok())
    return Outcome::usage(s.message());
  if (!options.record_load.empty()) {
    if (Status s = check_json_output("--record-load", options.record_load, is_load_file); !s.is_ok())
      return Outcome::usage(s.message());
  }
  const Precision precision = asked.value_or(default_precision(model->info));
  SLUICE_TRY(check_precision(model->info, precision));
  LayerOptions layer_options;
  layer_options.precision = precision;
  layer_options.routed_only = options.routed_only;
  layer_options.machine = chosen->machine;
  layer_options.selection = *selection;
  layer_options.max_tokens = 1;
  const Subject subject = subject_of(std::move(*model), options.model);
  SLUICE_TRY(plan_layer(subject.config, subject.experts_for(precision), subject.shared_for(precision), layer_options)
                 .status());

  catch_interrupts();
  Result<LoadedLayer> loaded = load_layer(*subject.model, precision, options.routed_only);
  if (!loaded) return is_interrupted() ? interrupted(Status(StatusCode::kIoError, kInterrupted)) : loaded.status();
  for (const std::string& tensor : loaded->nan_tensors) warn("NaN weights: " + tensor);
  const std::int64_t weight_bytes = num_bytes(loaded->weights);
  Result<LayerWeights> weights = place_weights(std::move(loaded->weights), *chosen);
  if (!weights)
    return is_interrupted() ? interrupted(Status(StatusCode::kIoError, kInterrupted)) : Outcome(weights.status());
  loaded->weights = {};

  const std::int64_t H = (*input)->hidden();
  Result<Planned> planned =
      plan(loaded->config, *weights, layer_options, (*input)->num_tokens(), H * (4 + size_bytes((*input)->dtype())));
  if (!planned) return planned.status();
  Totals totals;
  if (Status s = run_tokens(*planned, **input, options, totals); !s.is_ok()) {
    return is_interrupted() ? interrupted(s) : s;
  }

  const std::int64_t T = (*input)->num_tokens();
  const std::int64_t non_finite = totals.counters[static_cast<int>(Counter::kNonFiniteTokens)];
  if (totals.nan_tokens > 0) warn(fmt::format("{} of {} tokens have NaN or infinite outputs", totals.nan_tokens, T));
  if (non_finite > 0) {
    warn(fmt::format("{} of {} tokens had fewer than {} experts of finite score", non_finite, T, loaded->config.top_k));
  }
  const double rate = totals.seconds > 0 ? static_cast<double>(T) / totals.seconds : 0;
  if (json) {
    Json impls = Json::object();
    for (const StageReport& stage : planned->layer.stages()) impls[stage.stage] = stage.impl;
    print_json({{"model", options.model},
                {"layer", options.layer},
                {"precision", to_string(precision)},
                {"input", (*input)->name()},
                {"output", options.output},
                {"tokens", T},
                {"hidden", H},
                {"top_k", loaded->config.top_k},
                {"chunk_tokens", planned->chunk},
                {"device", device_json(*chosen)},
                {"threads", layer_options.machine.num_threads},
                {"weight_bytes", weight_bytes},
                {"seconds", totals.seconds},
                {"tokens_per_s", rate},
                {"workspace_bytes", planned->layer.workspace_bytes()},
                {"non_finite_output_tokens", totals.nan_tokens},
                {"non_finite_score_tokens", non_finite},
                {"invalid_ids", totals.counters[static_cast<int>(Counter::kInvalidIds)]},
                {"nan_weights", loaded->num_nan},
                {"notes", loaded->notes},
                {"implementations", impls}});
    return kExitOk;
  }
  for (const std::string& note : loaded->notes) fmt::print("note: {}\n", note);
  fmt::print("{}: y[{},{}] f32, topk_idx, topk_weight\n", options.output, T, H);
  if (!options.record_load.empty()) fmt::print("{}: tokens per expert, for `sluice eplb`\n", options.record_load);
  fmt::print("{}\n{}: weights {}, workspace {}\n", chosen->describe(), chosen->name(), format_bytes(weight_bytes),
             format_bytes(planned->layer.workspace_bytes()));
  // Nothing ran for no tokens: there is no rate to tell.
  const std::string timing = T == 0
                                 ? ""
                                 : fmt::format(" in {} ({:.0f} tok/s{}), chunks of {}", format_seconds(totals.seconds),
                                               rate, chosen->is_gpu() ? ", copies included" : "", planned->chunk);
  fmt::print("layer {} in {}, {} tokens{}\n", options.layer, to_string(precision), format_count(T), timing);
  return kExitOk;
}

}  // namespace

void add_run(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("run", kAbout);
  sub->footer(kFooter);
  auto o = std::make_shared<RunOptions>();
  sub->add_option("--model", o->model, "Checkpoint folder or .safetensors file")->required()->type_name("MODEL");
  sub->add_option("--layer", o->layer, "Layer number, as in the checkpoint")
      ->required()
      ->check(whole_number(0, INT64_MAX))
      ->type_name("N");
  sub->add_option("--input", o->input,
                  "FILE[:TENSOR], .safetensors or .npy; TENSOR may be left out when there is only one")
      ->required()
      ->type_name("FILE");
  sub->add_option("--output", o->output, "File to write, named *.safetensors; an existing one is replaced")
      ->required()
      ->type_name("FILE");
  sub->add_option("--record-load", o->record_load,
                  "Also write how many tokens each expert got, for `sluice eplb`; a file named *.json")
      ->type_name("FILE");
  sub->add_option("--precision", o->precision, "w8a8, w8a16, bf16 or f32")->type_name("P");
  sub->add_flag("--routed-only", o->routed_only, "Leave the shared expert out of y");
  add_impl(*sub, o->machine);
  add_device(*sub, o->machine);
  add_threads(*sub, o->machine);
  add_json(*sub, command);
  sub->callback([&command, o] { command.run = [&command, o] { return run(*o, command.json); }; });
}

}  // namespace sluice::cli
