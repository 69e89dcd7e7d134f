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
#include "ranks.h"
#include "sluice/placement_plan.h"
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
  mpirun -n 4 sluice run --ep --model M --layer 3 --input x.npy --output y.safetensors --threads 8

With --ep the ranks that mpirun starts share the experts and the tokens; the first writes the output of all, to the bits
of a run of one. --threads is for each rank. A rank that fails or does not answer within --timeout ends the others with
an error, and nothing is written.
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
  RankOptions ranks;
  std::string placement;  // file; empty: the balanced split
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
  std::int64_t chunk;  // tokens of a rank at a time
};

// The largest chunk of tokens whose buffers fit, the same on every rank.
Result<Planned> plan(const MoeConfig& config, const LayerWeights& weights, LayerOptions options, const Ranks& ranks,
                     std::int64_t num_tokens, std::int64_t row_bytes) {
  const std::int64_t limit = options.machine.device.kind == DeviceKind::kCuda ? kGpuChunkBytes : kChunkBytes;
  options.transport = ranks.spread();
  options.tensor_transport = ranks.tensor();
  options.round_bytes = limit / 2;
  options.plan_only = true;
  options.max_tokens = std::clamp<std::int64_t>(ceil_div(num_tokens, ranks.spread()->num_ranks()), 1, kMaxChunk);
  Status fits;
  while (true) {
    Result<Layer> layer = Layer::create(config, weights, options);
    fits = layer.status();
    if (!layer || options.max_tokens == 1) break;
    // The first of several ranks holds the rows of all.
    if (layer->workspace_bytes() + options.max_tokens * ranks.num_ranks() * row_bytes <= limit) break;
    options.max_tokens = (options.max_tokens + 1) / 2;
  }
  SLUICE_TRY(ranks.agree(fits));
  Result<std::int64_t> chunk = ranks.smallest(options.max_tokens);
  if (!chunk) return chunk.status();
  options.max_tokens = *chunk;
  options.plan_only = false;
  Result<Layer> layer = Layer::create(config, weights, options);
  if (!layer) return layer.status();
  return Planned{std::move(*layer), *chunk};
}

struct Totals {
  std::int64_t nan_tokens = 0;
  std::int64_t counters[kNumCounters] = {};
  double seconds = 0;  // in the layer, without reading and writing
};

// This rank's share of the tokens [begin, begin + count), in a forward that all ranks make.
Status forward_share(const Planned& planned, const Ranks& ranks, LayerRunner& runner, TokenInput& input,
                     std::int64_t begin, std::int64_t count, std::vector<std::byte>& rows, LayerOutput& output,
                     Totals& totals) {
  const std::int64_t H = input.hidden(), S = planned.layer.config().top_k;
  // The balanced split of anything; the ranks of a tensor group bring the same tokens.
  const ExpertRange share = experts_of_rank(count, ranks.spread()->num_ranks(), ranks.spread()->rank());
  const std::int64_t tokens = share.end - share.begin;
  SLUICE_TRY(ranks.agree(is_interrupted() ? Status(StatusCode::kIoError, kInterrupted)
                                          : input.read(begin + share.begin, tokens, rows.data())));
  output.y.resize(static_cast<std::size_t>(tokens * H));
  output.topk_idx.resize(static_cast<std::size_t>(tokens * S));
  output.topk_weight.resize(output.topk_idx.size());
  const auto start = std::chrono::steady_clock::now();
  SLUICE_TRY(runner.forward(TensorView::dense(rows.data(), input.dtype(), {tokens, H}), output));
  totals.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return Status::ok();
}

// Chunk after chunk, the first rank writing what all of them made.
Status run_tokens(const Planned& planned, const Ranks& ranks, TokenInput& input, const RunOptions& options,
                  Totals& totals) {
  const std::int64_t T = input.num_tokens(), H = input.hidden(), S = planned.layer.config().top_k;
  const std::int64_t step = planned.chunk * ranks.spread()->num_ranks();
  Result<LayerRunner> runner = LayerRunner::create(planned.layer);
  SLUICE_TRY(ranks.agree(runner.status()));
  std::vector<std::byte> rows(static_cast<std::size_t>(planned.chunk * H * size_bytes(input.dtype())));
  LayerOutput mine;
  std::vector<float> y;  // of all ranks, on the first
  std::vector<std::int32_t> topk_idx(ranks.is_first() ? static_cast<std::size_t>(T * S) : 0);
  std::vector<float> topk_weight(topk_idx.size());
  Progress progress("tokens", Progress::Unit::kItems);

  const auto chunk = [&](std::int64_t begin, std::int64_t count) -> Status {
    if (ranks.is_first()) progress.update(begin, T);
    SLUICE_TRY(forward_share(planned, ranks, *runner, input, begin, count, rows, mine, totals));
    const std::int64_t tokens = ranks.tensor()->rank() == 0 ? std::ssize(mine.topk_idx) / S : 0;
    std::byte* const idx_rows = reinterpret_cast<std::byte*>(topk_idx.data() + (ranks.is_first() ? begin * S : 0));
    std::byte* const weight_rows =
        reinterpret_cast<std::byte*>(topk_weight.data() + (ranks.is_first() ? begin * S : 0));
    const auto collect = [&](const void* part, std::int64_t row_bytes, std::byte* whole) {
      return ranks.collect(static_cast<const std::byte*>(part), tokens, row_bytes, whole);
    };
    if (ranks.num_ranks() == 1) {
      y.swap(mine.y);  // by far the most bytes: not copied where they are all
    } else {
      if (ranks.is_first()) y.resize(static_cast<std::size_t>(count * H));
      SLUICE_TRY(collect(mine.y.data(), H * 4, reinterpret_cast<std::byte*>(y.data())));
    }
    SLUICE_TRY(collect(mine.topk_idx.data(), S * 4, idx_rows));
    SLUICE_TRY(collect(mine.topk_weight.data(), S * 4, weight_rows));
    for (std::int64_t t = 0; ranks.is_first() && t < count; ++t) {
      const float* token = y.data() + t * H;
      totals.nan_tokens += std::any_of(token, token + H, [](float v) { return !std::isfinite(v); }) ? 1 : 0;
    }
    return Status::ok();
  };
  // Every rank stops at the first failure that all have heard of; one that only the first knows of is told at the end.
  Status status;
  bool all_know = false;
  if (ranks.is_first()) {
    const auto produce = [&](const std::function<Status(std::span<const std::byte>)>& sink) -> Status {
      for (std::int64_t begin = 0; begin < T; begin += step) {
        Status done = chunk(begin, std::min(step, T - begin));
        if (done.is_ok()) done = ranks.agree(sink(std::as_bytes(std::span(y))));
        all_know = !done.is_ok();
        SLUICE_TRY(done);
      }
      return {};
    };
    // y comes first: by the time the other two are written, the forwards have filled them.
    std::vector<io::TensorToWrite> tensors(3);
    tensors[0] = {"y", DType::kF32, {T, H}, produce, nullptr};
    tensors[1] = {"topk_idx", DType::kI32, {T, S}, {}, topk_idx.data()};
    tensors[2] = {"topk_weight", DType::kF32, {T, S}, {}, topk_weight.data()};
    status = io::write_safetensors(options.output, tensors);
    if (status.is_ok() && !options.record_load.empty())
      status = record_load(options.record_load, options.layer, planned.layer.config().num_experts, topk_idx);
  } else {
    for (std::int64_t begin = 0; begin < T && status.is_ok(); begin += step) {
      status = chunk(begin, std::min(step, T - begin));
      if (status.is_ok()) status = ranks.agree({});
    }
    all_know = !status.is_ok();
  }
  SLUICE_TRY(all_know ? status : ranks.agree(status));
  for (int i = 0; i < kNumCounters; ++i) {
    const Result<std::int64_t> sum = ranks.sum(ranks.tensor()->rank() == 0 ? mine.counters[i] : 0);
    if (!sum) return sum.status();
    totals.counters[i] = *sum;
  }
  return Status::ok();
}

void print_report(const RunOptions& options, bool json, const Ranks& ranks, const Planned& planned,
                  const TokenInput& input, const ChosenMachine& chosen, Precision precision, const LoadedLayer& loaded,
                  std::int64_t weight_bytes, const Totals& totals) {
  const std::int64_t T = input.num_tokens(), H = input.hidden();
  const std::int64_t non_finite = totals.counters[static_cast<int>(Counter::kNonFiniteTokens)];
  const double rate = totals.seconds > 0 ? static_cast<double>(T) / totals.seconds : 0;
  if (json) {
    Json impls = Json::object();
    for (const StageReport& stage : planned.layer.stages()) impls[stage.stage] = stage.impl;
    print_json({{"model", options.model},
                {"layer", options.layer},
                {"precision", to_string(precision)},
                {"input", input.name()},
                {"output", options.output},
                {"tokens", T},
                {"hidden", H},
                {"top_k", loaded.config.top_k},
                {"chunk_tokens", planned.chunk},
                {"device", device_json(chosen)},
                {"threads", planned.layer.options().machine.num_threads},
                {"ranks", ranks.num_ranks()},
                {"tensor_ranks", ranks.tensor()->num_ranks()},
                {"transport", ranks.transport()->name()},
                {"weight_bytes", weight_bytes},
                {"seconds", totals.seconds},
                {"tokens_per_s", rate},
                {"workspace_bytes", planned.layer.workspace_bytes()},
                {"non_finite_output_tokens", totals.nan_tokens},
                {"non_finite_score_tokens", non_finite},
                {"invalid_ids", totals.counters[static_cast<int>(Counter::kInvalidIds)]},
                {"nan_weights", loaded.num_nan},
                {"notes", loaded.notes},
                {"implementations", impls}});
    return;
  }
  for (const std::string& note : loaded.notes) fmt::print("note: {}\n", note);
  fmt::print("{}: y[{},{}] f32, topk_idx, topk_weight\n", options.output, T, H);
  if (!options.record_load.empty()) fmt::print("{}: tokens per expert, for `sluice eplb`\n", options.record_load);
  const std::string of_first = ranks.num_ranks() == 1 ? "" : " on rank 0";
  if (ranks.num_ranks() > 1) {
    fmt::print("{} ranks over {}, {} of {} experts on rank 0{}\n", ranks.num_ranks(), ranks.transport()->name(),
               num_local(loaded.config), loaded.config.num_experts,
               ranks.tensor()->num_ranks() == 1 ? ""
                                                : fmt::format(", {} of I cut over {} ranks", loaded.config.intermediate,
                                                              ranks.tensor()->num_ranks()));
  }
  fmt::print("{}\n{}: weights {}, workspace {}{}\n", chosen.describe(), chosen.name(), format_bytes(weight_bytes),
             format_bytes(planned.layer.workspace_bytes()), of_first);
  // Nothing ran for no tokens: there is no rate to tell.
  const std::string timing = T == 0
                                 ? ""
                                 : fmt::format(" in {} ({:.0f} tok/s{}), chunks of {}", format_seconds(totals.seconds),
                                               rate, chosen.is_gpu() ? ", copies included" : "", planned.chunk);
  fmt::print("layer {} in {}, {} tokens{}\n", options.layer, to_string(precision), format_count(T), timing);
}

// What a rank needs before the weights are read.
struct Ready {
  ChosenMachine chosen;
  std::unique_ptr<TokenInput> input;
  Precision precision;
  LayerOptions layer_options;
  Subject subject;
};

Result<Ready> prepare(const RunOptions& options, const std::map<std::string, Selection>& selection,
                      const std::optional<Precision>& asked, bool& usage) {
  Result<ChosenMachine> chosen = choose_machine(options.machine, usage);
  if (!chosen) return chosen.status();
  Result<ModelLayer> model = open_layer(options.model, options.layer);
  if (!model) return model.status();
  auto input = TokenInput::open(options.input, model->info.config.hidden);
  if (!input) return input.status();
  if (Status s = check_output(options.output, (*input)->path(), options.model); !s.is_ok()) {
    usage = true;
    return s;
  }
  if (!options.record_load.empty()) {
    if (Status s = check_json_output("--record-load", options.record_load, is_load_file); !s.is_ok()) {
      usage = true;
      return s;
    }
  }
  const Precision precision = asked.value_or(default_precision(model->info));
  SLUICE_TRY(check_precision(model->info, precision));
  LayerOptions layer_options;
  layer_options.precision = precision;
  layer_options.routed_only = options.routed_only;
  layer_options.machine = chosen->machine;
  layer_options.selection = selection;
  layer_options.max_tokens = 1;
  Subject subject = subject_of(std::move(*model), options.model);
  SLUICE_TRY(plan_layer(subject.config, subject.experts_for(precision), subject.shared_for(precision), layer_options)
                 .status());
  return Ready{std::move(*chosen), std::move(*input), precision, std::move(layer_options), std::move(subject)};
}

// The slots of `rank`, of the placement or of the balanced split.
LoadOptions part_of(const Placement& placement, std::int64_t num_experts, std::int64_t num_ranks, std::int64_t rank) {
  LoadOptions part;
  if (placement.slot_expert.empty()) {
    const ExpertRange range = experts_of_rank(num_experts, num_ranks, rank);
    part.num_local = range.num_local();
    if (part.num_local != kNoExperts) part.first_expert = range.begin;
    return part;
  }
  const std::span<const std::int32_t> experts = placement.experts_of(rank);
  part.experts.assign(experts.begin(), experts.end());
  if (experts.empty()) part.num_local = kNoExperts;
  return part;
}

Result<LoadedLayer> load_part(const Ready& ready, const Ranks& ranks, bool routed_only) {
  LoadOptions part;
  if (ranks.num_ranks() > 1) {
    part = part_of(ready.layer_options.placement, ready.subject.config.num_experts, ranks.spread()->num_ranks(),
                   ranks.spread()->rank());
    part.tensor_shard = {ranks.tensor()->rank(), ranks.tensor()->num_ranks()};
  }
  return load_layer(*ready.subject.model, ready.precision, routed_only, std::move(part));
}

// The placement of the layer in a file that `sluice eplb` made.
Result<Placement> read_placement(const std::string& file, std::int64_t layer, const Ranks& ranks) {
  Result<std::vector<LayerPlacement>> placements = read_placements(file);
  if (!placements) return placements.status().with_context("--placement");
  for (LayerPlacement& of_layer : *placements) {
    if (of_layer.layer != layer) continue;
    if (of_layer.placement.num_ranks() == ranks.spread()->num_ranks()) return std::move(of_layer.placement);
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("--placement {}: it is for {} ranks, the experts are spread over {}", file,
                              of_layer.placement.num_ranks(), ranks.spread()->num_ranks()));
  }
  return Status(StatusCode::kNotFound, fmt::format("--placement {}: it has no layer {}", file, layer));
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
  Result<Ranks> ranks = Ranks::start(options.ranks);
  if (!ranks) return ranks.status();
  bool usage = false;
  Result<Ready> ready = prepare(options, *selection, asked, usage);
  if (ready && !options.placement.empty()) {
    Result<Placement> placement = read_placement(options.placement, options.layer, *ranks);
    if (placement) {
      ready->layer_options.placement = std::move(*placement);
    } else {
      ready = placement.status();
    }
  }
  if (Status s = ranks->agree(ready.status()); !s.is_ok()) return usage ? Outcome::usage(s.message()) : Outcome(s);

  SLUICE_TRY(ranks->same(ready->input->num_tokens(), "tokens in its input"));

  catch_interrupts();
  const auto or_interrupted = [](const Status& status) {
    return is_interrupted() ? interrupted(Status(StatusCode::kIoError, kInterrupted)) : Outcome(status);
  };
  Result<LoadedLayer> loaded = load_part(*ready, *ranks, options.routed_only);
  if (Status s = ranks->agree(loaded.status()); !s.is_ok()) return or_interrupted(s);
  for (const std::string& tensor : loaded->nan_tensors) warn("NaN weights: " + tensor);
  const std::int64_t weight_bytes = num_bytes(loaded->weights);
  Result<LayerWeights> weights = place_weights(std::move(loaded->weights), ready->chosen);
  if (Status s = ranks->agree(weights.status()); !s.is_ok()) return or_interrupted(s);
  loaded->weights = {};

  ready->layer_options.shared_is_whole = loaded->shared_is_whole;
  TokenInput& input = *ready->input;
  Result<Planned> planned = plan(loaded->config, *weights, ready->layer_options, *ranks, input.num_tokens(),
                                 input.hidden() * (4 + size_bytes(input.dtype())));
  if (!planned) return planned.status();
  Totals totals;
  if (Status s = run_tokens(*planned, *ranks, input, options, totals); !s.is_ok())
    return is_interrupted() ? interrupted(s) : Outcome(s);
  if (!ranks->is_first()) return kExitOk;

  const std::int64_t T = input.num_tokens();
  const std::int64_t non_finite = totals.counters[static_cast<int>(Counter::kNonFiniteTokens)];
  if (totals.nan_tokens > 0) warn(fmt::format("{} of {} tokens have NaN or infinite outputs", totals.nan_tokens, T));
  if (non_finite > 0) {
    warn(fmt::format("{} of {} tokens had fewer than {} experts of finite score", non_finite, T, loaded->config.top_k));
  }
  print_report(options, json, *ranks, *planned, input, ready->chosen, ready->precision, *loaded, weight_bytes, totals);
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
  add_ranks(*sub, o->ranks);
  add_tensor_ranks(*sub, o->ranks);
  sub->add_option("--placement", o->placement,
                  "With --ep: which rank holds which experts, a file of `sluice eplb` [the balanced split]")
      ->needs(sub->get_option("--ep"))
      ->type_name("FILE");
  add_json(*sub, command);
  sub->callback([&command, o] { command.run = [&command, o] { return run(*o, command.json); }; });
}

}  // namespace sluice::cli
