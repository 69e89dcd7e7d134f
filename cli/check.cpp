// `sluice check`: every implementation against the reference, on this machine, with this layer's weights.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checker.h"
#include "commands.h"
#include "input.h"
#include "layer_runner.h"
#include "options.h"
#include "progress.h"
#include "random.h"
#include "subject.h"

namespace sluice::cli {

namespace {

constexpr const char* kAbout = R"(Compare every implementation with the reference on this machine

Runs a layer's stages with every implementation that can run here, each against the plain double-precision
reference on the same inputs, and the whole layer in every precision it can run: against its own stages called one
by one (the same bits), with one thread, with a token alone in its batch (the same bits), and against the
layer in f32 made of references alone. Prints the worst row's error beside its bound (docs/numerics.md).)";

constexpr const char* kLegend =
    R"(WORST ROW: relative L2 error of the row that is nearest to its bound; BOUND: what that row may have; OF BOUND: the
largest share of its own bound that any element uses (of the whole layer: any row). Above 100 % a line fails.
)";

constexpr const char* kFooter =
    R"(Columns: WORST ROW is the relative L2 error |got - want| / |want| of the row that is nearest to its bound, BOUND what
that row may have. OF BOUND is the verdict: the largest share of its own bound that any element uses (in the line
`reference in f32`: any row); above 100 % the line fails. It may be far above WORST ROW / BOUND: one element may use
all of its bound in a row that is close as a whole. ROWS is how many rows were compared.
Rules: `bitwise` stages have defined bits; `derived bound` is gamma(128 + ceil(K/128) + 2) * sum|a||w| plus output
rounding, per element, for the roundings of 128 products, of ceil(K/128) block sums, of a_scale * w_scale and of
the bias; `budget` is the whole layer's per-row relative L2 error: f32 2e-6, bf16 and w8a16 1e-2, w8a8 7e-2, times
the token's cancellation |parts| / |out| where that exceeds 1.
Large layers: the reference recomputes a sample of rows, so that it ends in seconds; the ROWS column says how many.
Exit code 1 when any line fails.

Examples:
  sluice check --model data/tiny-dsv3 --layer 1
  sluice check --model data/tiny-dsv3 --layer 2 --input data/tiny-dsv3/golden.safetensors:layer2.x --precision w8a8
)";

struct CheckOptions {
  std::string model;
  std::int64_t layer = 0;
  std::int64_t tokens = 32;
  std::string input;
  std::string precision = "all";
  std::uint64_t seed = 1;
  bool routed_only = false;
  MachineOptions machine;
};

double budget(Precision precision) {
  switch (precision) {
    case Precision::kF32: return 2e-6;
    case Precision::kW8A8: return 7e-2;
    default: return 1e-2;
  }
}

double value(const TensorView& view, std::int64_t row, std::int64_t column) {
  const std::byte* p = view.row(row);
  if (view.dtype == DType::kF32) return reinterpret_cast<const float*>(p)[column];
  const std::uint32_t bits = static_cast<std::uint32_t>(reinterpret_cast<const std::uint16_t*>(p)[column]) << 16;
  float decoded;
  std::memcpy(&decoded, &bits, sizeof(decoded));
  return decoded;
}

double norm(const TensorView& view, std::int64_t row, double weight) {
  double sum = 0;
  for (std::int64_t h = 0; h < view.shape[1]; ++h) sum += value(view, row, h) * value(view, row, h);
  return std::fabs(weight) * std::sqrt(sum);
}

// The layer's rows against the same tokens and routing in f32, references only.
Result<Finding> against_exact(const MoeConfig& config, const LayerWeights& weights, const TensorView& x,
                              const LayerOutput& got, const CheckOptions& options, Precision precision,
                              const Machine& machine) {
  const std::int64_t T = x.shape[0], H = config.hidden, S = config.top_k;
  const double per_token =
      3.0 * static_cast<double>(H) * static_cast<double>(config.intermediate * S + config.shared_intermediate);
  const std::vector<std::int64_t> tokens = sample(T, static_cast<std::int64_t>(kReferenceProducts / per_token) + 2);
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  const std::size_t row_bytes = static_cast<std::size_t>(H * size_bytes(x.dtype));
  std::vector<std::byte> rows(static_cast<std::size_t>(n) * row_bytes);
  for (std::int64_t i = 0; i < n; ++i) {
    std::memcpy(rows.data() + static_cast<std::size_t>(i) * row_bytes, x.row(tokens[static_cast<std::size_t>(i)]),
                row_bytes);
  }
  PipelineOptions exact;
  exact.machine = machine;
  exact.routed_only = options.routed_only;
  exact.with_gate = false;  // the gate is held to its own reference; near ties must not be judged twice
  for (const StageNames& table : stage_names()) exact.selection[table.stage].forced = table.impls.back();
  Result<Pipeline> pipeline = Pipeline::create(config, weights, TensorView::dense(rows.data(), x.dtype, {n, H}), exact,
                                               std::make_shared<Buffers>());
  if (!pipeline) return pipeline.status();
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t t = tokens[static_cast<std::size_t>(i)];
    std::memcpy(pipeline->topk_idx().row(i), got.topk_idx.data() + t * S, static_cast<std::size_t>(S) * 4);
    std::memcpy(pipeline->topk_weight().row(i), got.topk_weight.data() + t * S, static_cast<std::size_t>(S) * 4);
  }
  SLUICE_TRY(pipeline->run_all());

  Finding finding;
  finding.rule = "budget";
  finding.rows = n;
  finding.of_rows = T;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t t = tokens[static_cast<std::size_t>(i)];
    double error2 = 0, want2 = 0, parts2 = 0;
    for (std::int64_t h = 0; h < H; ++h) {
      const double want = value(pipeline->out(), i, h), y = got.y[static_cast<std::size_t>(t * H + h)];
      // NaN weights give NaN in both: that is agreement, and says nothing about the other columns.
      if (y == want || (std::isnan(y) && std::isnan(want))) {
        want2 += std::isfinite(want) ? want * want : 0;
        continue;
      }
      error2 += (y - want) * (y - want);
      want2 += want * want;
    }
    for (std::int64_t s = 0; s < S; ++s) {
      const std::int32_t row = pipeline->plan().slot_row.as<std::int32_t>()[i * S + s];
      if (row < 0) continue;
      const double weight = config.weight_on_input ? 1.0 : got.topk_weight[static_cast<std::size_t>(t * S + s)];
      const double part = norm(pipeline->y(), row, weight);
      parts2 += part * part;
    }
    if (pipeline->y_shared().is_present()) {
      // A sigmoid gate only shrinks it; leaving that out loosens the bound by the shrinkage.
      const double part = norm(pipeline->y_shared(), i, 1);
      parts2 += part * part;
    }
    const double scale = std::sqrt(std::max(want2, 1e-300));
    const double error = std::sqrt(error2) / scale;
    const double bound = budget(precision) * std::max(1.0, std::sqrt(parts2) / scale);
    const double share = std::isfinite(error) ? error / bound : HUGE_VAL;
    if (i > 0 && share <= finding.of_bound) continue;
    finding.of_bound = share;
    finding.error = error;
    finding.bound = bound;
    finding.passed = share <= 1;
    if (!finding.passed)
      finding.detail = fmt::format("token {}: relative L2 error {:.3g}, budget {:.3g}", t, error, bound);
  }
  return finding;
}

LayerOptions layer_options(const CheckOptions& options, Precision precision,
                           const std::map<std::string, Selection>& selection, const ChosenMachine& chosen) {
  LayerOptions layer;
  layer.precision = precision;
  layer.max_tokens = 1;
  layer.routed_only = options.routed_only;
  layer.machine = chosen.machine;
  layer.selection = selection;
  return layer;
}

Result<std::vector<Finding>> check_precision_of(const MoeConfig& config, const LayerWeights& weights,
                                                const TensorView& x, const CheckOptions& options, Precision precision,
                                                const std::map<std::string, Selection>& selection,
                                                const ChosenMachine& chosen) {
  const Machine& machine = chosen.machine;
  const Machine host = options.machine.host();
  PipelineOptions pipeline_options;
  pipeline_options.precision = precision;
  pipeline_options.machine = machine;
  pipeline_options.host = host;
  pipeline_options.selection = selection;
  pipeline_options.routed_only = options.routed_only;
  Result<Pipeline> pipeline = Pipeline::create(config, weights, x, pipeline_options, std::make_shared<Buffers>());
  if (!pipeline) return pipeline.status();
  Progress progress(fmt::format("checking {}", to_string(precision)), Progress::Unit::kItems);
  Result<std::vector<Finding>> findings =
      check_steps(*pipeline, Scope::kAll, kReferenceProducts,
                  [&](std::int64_t done, std::int64_t total) { progress.update(done, total); });
  if (!findings) return findings;

  const std::int64_t T = x.shape[0], H = config.hidden, S = config.top_k;
  LayerOptions full_batch = layer_options(options, precision, selection, chosen);
  full_batch.max_tokens = T;
  const auto add = [&](Finding finding, std::string against) {
    finding.step = "layer";
    finding.impl = "layer";
    finding.against = std::move(against);
    findings->push_back(std::move(finding));
  };
  const auto same = [&](const LayerOutput& output, std::int64_t first, std::int64_t count, const LayerOutput& all) {
    const auto view = [](const auto& v, DType dtype, std::int64_t begin, std::int64_t rows, std::int64_t columns) {
      return TensorView::dense(v.data() + begin * columns, dtype, {rows, columns});
    };
    Finding y = compare_bytes("y", view(output.y, DType::kF32, 0, count, H), view(all.y, DType::kF32, first, count, H));
    if (!y.passed) return y;
    Finding idx = compare_bytes("topk_idx", view(output.topk_idx, DType::kI32, 0, count, S),
                                view(all.topk_idx, DType::kI32, first, count, S));
    if (!idx.passed) return idx;
    Finding weight = compare_bytes("topk_weight", view(output.topk_weight, DType::kF32, 0, count, S),
                                   view(all.topk_weight, DType::kF32, first, count, S));
    return weight.passed ? y : weight;
  };

  Result<LayerWeights> placed = place_weights(weights, chosen);
  if (!placed) return placed.status();
  Result<LayerOutput> full = run_layer(config, *placed, full_batch, x);
  if (!full) return full.status();
  LayerOutput composed = *full;
  std::memcpy(composed.y.data(), pipeline->out().data, composed.y.size() * 4);
  std::memcpy(composed.topk_idx.data(), pipeline->topk_idx().data, composed.topk_idx.size() * 4);
  std::memcpy(composed.topk_weight.data(), pipeline->topk_weight().data, composed.topk_weight.size() * 4);
  add(same(*full, 0, T, composed), "its stages one by one");

  LayerOptions one_thread = full_batch;
  if (!chosen.is_gpu()) one_thread.machine = Machine::detect_cpu(1);
  one_thread.max_tokens = std::min<std::int64_t>(T, 8);
  Result<LayerOutput> alone = run_layer(config, *placed, one_thread, x.slice(0, one_thread.max_tokens));
  if (!alone) return alone.status();
  add(same(*alone, 0, one_thread.max_tokens, *full), chosen.is_gpu() ? "fewer tokens" : "one thread, fewer tokens");
  Result<LayerOutput> last = run_layer(config, *placed, full_batch, x.slice(T - 1, 1));
  if (!last) return last.status();
  add(same(*last, T - 1, 1, *full), "the last token alone");

  Result<Finding> exact = against_exact(config, weights, x, *full, options, precision, host);
  if (!exact) return exact.status();
  add(std::move(*exact), "reference in f32");
  return findings;
}

Outcome check(const CheckOptions& options, bool json) {
  Result<std::map<std::string, Selection>> selection = parse_selection(options.machine.impl);
  if (!selection) return Outcome::usage(selection.status().message());
  Result<std::vector<Precision>> asked = parse_precisions(options.precision);
  if (!asked) return Outcome::usage(asked.status().message());
  bool usage = false;
  Result<ChosenMachine> chosen = choose_machine(options.machine, usage);
  if (!chosen) return usage ? Outcome::usage(chosen.status().message()) : Outcome(chosen.status());
  Result<ModelLayer> model = open_layer(options.model, options.layer);
  if (!model) return model.status();
  if (model->info.precisions.empty()) return check_precision(model->info, Precision::kF32);
  for (Precision precision : *asked) SLUICE_TRY(check_precision(model->info, precision));
  const std::vector<Precision> precisions = asked->empty() ? model->info.precisions : *asked;
  const Subject subject = subject_of(std::move(*model), options.model);
  for (Precision precision : precisions) {
    const LayerOptions plan = layer_options(options, precision, *selection, *chosen);
    SLUICE_TRY(plan_layer(subject.config, subject.experts_for(precision), subject.shared_for(precision), plan)
                   .status()
                   .with_context(to_string(precision)));
  }

  const std::int64_t H = subject.config.hidden;
  std::vector<std::byte> rows;
  TensorView x;
  std::string source = fmt::format("random normal, seed {}", options.seed);
  if (options.input.empty()) {
    rows = random_normal_bf16(options.tokens * H, 1.0, options.seed);
    x = TensorView::dense(rows.data(), DType::kBF16, {options.tokens, H});
  } else {
    auto input = TokenInput::open(options.input, H);
    if (!input) return input.status();
    const std::int64_t T = std::min((*input)->num_tokens(), options.tokens);
    if (T == 0) return Status(StatusCode::kBadData, (*input)->name() + " has no tokens; there is nothing to check");
    rows.resize(static_cast<std::size_t>(T * H * size_bytes((*input)->dtype())));
    SLUICE_TRY((*input)->read(0, T, rows.data()));
    x = TensorView::dense(rows.data(), (*input)->dtype(), {T, H});
    source = fmt::format("{}, {} of {} tokens", (*input)->name(), T, (*input)->num_tokens());
  }

  Json document = {{"model", options.model},
                   {"layer", options.layer},
                   {"tokens", x.shape[0]},
                   {"input", source},
                   {"simd", options.machine.host().simd},
                   {"threads", options.machine.host().num_threads},
                   {"device", device_json(*chosen)}};
  Json& results = document["precisions"] = Json::array();
  if (!json) {
    fmt::print("{} layer {}: T={} ({})\n{}\n", options.model, options.layer, x.shape[0], source, chosen->describe());
    fmt::print("{}", kLegend);
  }
  std::optional<LoadedLayer> loaded;
  int failed = 0, passed = 0;
  for (Precision precision : precisions) {
    // Precisions that read the same weights share one load.
    if (!loaded || !data_path(precision, loaded->weights.experts.w13.dtype)) {
      loaded.reset();
      Result<LoadedLayer> load = load_layer(*subject.model, precision, options.routed_only);
      if (!load) return load.status();
      loaded = std::move(*load);
      for (const std::string& tensor : loaded->nan_tensors) warn("NaN weights: " + tensor);
    }
    auto findings = check_precision_of(loaded->config, loaded->weights, x, options, precision, *selection, *chosen);
    if (!findings) return findings.status().with_context(std::string(to_string(precision)));
    Json rows_json = Json::array();
    Table table({{"STEP"},
                 {"IMPLEMENTATION"},
                 {"AGAINST"},
                 {"ROWS", true},
                 {"RULE"},
                 {"WORST ROW", true},
                 {"BOUND", true},
                 {"OF BOUND", true},
                 {""}});
    std::vector<std::string> notes;
    for (const Finding& f : *findings) {
      rows_json.push_back(to_json(f));
      if (!f.skipped.empty()) {
        table.add({f.step, f.impl, f.against, "", "not run", "", "", "", "-"});
        notes.push_back(fmt::format("{} {}: {}", f.step, f.impl, f.skipped));
        continue;
      }
      (f.passed ? passed : failed) += 1;
      const std::string rows_text =
          f.rows == f.of_rows ? fmt::format("{}", f.rows) : fmt::format("{} of {}", f.rows, f.of_rows);
      const bool bitwise = f.rule == "bitwise";
      table.add({f.step, f.impl, f.against, rows_text, f.rule,
                 bitwise ? (f.passed ? "0" : "differs") : fmt::format("{:.2e}", f.error),
                 bitwise ? "0" : fmt::format("{:.2e}", f.bound),
                 bitwise ? "" : fmt::format("{:.0f} %", 100 * f.of_bound), f.passed ? "ok" : "FAILED"});
      if (!f.passed) notes.push_back(fmt::format("FAILED {} {} against {}: {}", f.step, f.impl, f.against, f.detail));
    }
    results.push_back({{"precision", to_string(precision)}, {"findings", std::move(rows_json)}});
    if (json) continue;
    fmt::print("\n{}\n", to_string(precision));
    table.print();
    for (const std::string& note : notes) fmt::print("  {}\n", note);
  }
  if (loaded->num_nan > 0) document["num_nan_weights"] = loaded->num_nan;
  document["passed"] = passed;
  document["failed"] = failed;
  if (json) {
    print_json(document);
  } else {
    fmt::print("\n{} passed, {} failed\n", passed, failed);
  }
  return failed == 0 ? kExitOk : kExitCheckFailed;
}

}  // namespace

void add_check(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("check", kAbout);
  sub->footer(kFooter);
  auto o = std::make_shared<CheckOptions>();
  sub->add_option("--model", o->model, "Checkpoint folder or .safetensors file")->required()->type_name("MODEL");
  sub->add_option("--layer", o->layer, "Layer number, as in the checkpoint")
      ->required()
      ->check(whole_number(0, INT64_MAX))
      ->type_name("N");
  sub->add_option("--tokens", o->tokens, "Tokens to run [32]; of --input, the first ones")
      ->check(whole_number(1, 65536))
      ->type_name("T");
  sub->add_option("--input", o->input, "Activations [T,H] instead of random ones: FILE[:TENSOR], .safetensors or .npy")
      ->type_name("FILE");
  sub->add_option("--precision", o->precision, "all, or a list of w8a8, w8a16, bf16, f32 [all]")->type_name("LIST");
  sub->add_option("--seed", o->seed, "Of the random activations [1]")
      ->check(whole_number(0, INT64_MAX))
      ->type_name("N");
  sub->add_flag("--routed-only", o->routed_only, "Leave the shared expert out");
  add_impl(*sub, o->machine);
  add_device(*sub, o->machine);
  add_threads(*sub, o->machine);
  add_json(*sub, command);
  sub->callback([&command, o] { command.run = [&command, o] { return check(*o, command.json); }; });
}

}  // namespace sluice::cli
