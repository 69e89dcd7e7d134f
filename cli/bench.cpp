// `sluice bench`: stages and the layer against this machine's measured ceilings.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <set>

#include "bench_cuda.h"
#include "bench_rows.h"
#include "checker.h"
#include "commands.h"
#include "cpu/ceilings.h"
#include "progress.h"
#include "random.h"
#include "subject.h"

namespace sluice::cli {

namespace {

constexpr const char* kAbout =
    "Time stages and the layer against this machine's measured ceilings\n\n"
    "Measures memory stream bandwidth and the f32 FMA peak, checks the implementations it is about to time, then "
    "times\n"
    "every stage and the whole layer: median, p10 and p90 of the runs, the bytes and FLOPs that must at least be "
    "moved\n"
    "and done, and the share of the floor max(bytes / bandwidth, flops / peak). With --json one line per row.";

constexpr const char* kFooter =
    "Weights are random (--like) or the checkpoint's (--model). Runs rotate over copies of the weights and over sets "
    "of\n"
    "routed experts, so that weights come from memory and not from a cache where the machine has the room; with too\n"
    "little memory fewer experts are kept, as on one rank of several, and the row says how many.\n"
    "A row whose runs touch no more than the last-level cache in all is marked \"in cache\": it says nothing about\n"
    "memory, its share may exceed 100 %, and no goal is judged by it. The ceilings are measured twice, and a warning\n"
    "says when they disagree by more than 15 %: then so do the shares.\n"
    "Goals, where the rows they need are there: expert GEMMs at T=1 in w8a8 and w8a16 reach half the stream "
    "bandwidth,\n"
    "at T=512 in bf16 and f32 half the FMA peak; from T=512 on the layer in w8a8 is no slower than in bf16. A goal "
    "that\n"
    "is not met does not change the exit status: 0 when all was measured, 1 when a check before it failed.\n"
    "A: experts that have rows; R: routed rows. Bytes count weights of active experts once, inputs and outputs once.\n"
    "With --device cuda a row is the replay of a CUDA graph between two events, one for each stage and one for the "
    "layer.\n"
    "--like picks sizes only: w8a8 and w8a16 get e4m3 weights, bf16 and f32 get bf16 weights.\n"
    "\n"
    "Examples:\n"
    "  sluice bench --like qwen3-30b\n"
    "  sluice bench --like deepseek-v3 --tokens 1 --precision w8a8 --threads 2\n"
    "  sluice bench --model data/tiny-dsv3 --layer 1 --tokens 512 --route zipf --json\n";

struct BenchOptions {
  SubjectOptions subject;
  std::string tokens = "1,32,512";
  std::string precision = "all";
  std::string route = "uniform";
  bool stages = false;
  bool routed_only = false;
  double seconds = 1.0;
  double memory_gb = 0;
  std::uint64_t seed = 1;
  MachineOptions machine;
};

constexpr double kCheckProducts = 2e7;  // the reference's share of a bench; `sluice check` is the thorough one
constexpr int kMaxRuns = 400, kMinRuns = 5;
constexpr std::size_t kRouteSets = 64;  // T = 1 then reaches nearly all experts
constexpr std::int64_t kMaxCopies = 1024;
constexpr double kCopiesOverCache = 2.5;  // bytes of all copies, in last-level caches
constexpr double kSteadyCeiling = 0.15;   // repeated ceilings further apart than this are warned of

// Copies of one layer's weights, and how many experts they keep.
struct Weights {
  MoeConfig config;
  std::vector<LayerWeights> copies;
  std::int64_t bytes = 0;  // of one copy
};

// As many as put the weights far above the last-level cache, within the memory.
std::int64_t num_copies(std::int64_t bytes, double limit) {
  const double one = static_cast<double>(std::max<std::int64_t>(bytes, 1));
  const double wanted = std::ceil(kCopiesOverCache * static_cast<double>(cache_bytes()) / one);
  return static_cast<std::int64_t>(
      std::clamp(std::min(wanted, std::floor(limit / one)), 1.0, static_cast<double>(kMaxCopies)));
}

// Every tensor in memory of its own.
LayerWeights copy_weights(const LayerWeights& from) {
  LayerWeights to = from;
  to.owners.clear();
  for (TensorView* view :
       {&to.w_gate, &to.router_bias, &to.score_bias, &to.shared_gate, &to.experts.w13, &to.experts.w13_scale,
        &to.experts.w13_bias, &to.experts.w2, &to.experts.w2_scale, &to.experts.w2_bias, &to.shared.w13,
        &to.shared.w13_scale, &to.shared.w13_bias, &to.shared.w2, &to.shared.w2_scale, &to.shared.w2_bias}) {
    if (!view->is_present()) continue;
    const auto bytes = static_cast<std::size_t>(view->num_bytes());
    const std::shared_ptr<void> memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
    if (memory == nullptr) throw std::bad_alloc();
    std::memcpy(memory.get(), view->data, bytes);
    view->data = memory.get();
    to.owners.push_back(memory);
  }
  return to;
}

Result<Weights> make_copies(const Subject& subject, Precision precision, const BenchOptions& options, int num_threads) {
  Weights weights;
  weights.config = subject.config;
  const double limit = options.memory_gb > 0 ? options.memory_gb * 1e9 : 0.5 * static_cast<double>(available_bytes());
  if (subject.model) {
    Result<LoadedLayer> loaded = load_layer(*subject.model, precision, options.routed_only);
    if (!loaded) return loaded.status();
    weights.config = loaded->config;
    weights.bytes = num_bytes(loaded->weights);
    weights.copies.push_back(std::move(loaded->weights));
    const std::int64_t copies = num_copies(weights.bytes, limit);
    for (std::int64_t i = 1; i < copies; ++i) weights.copies.push_back(copy_weights(weights.copies[0]));
    return weights;
  }
  if (options.routed_only) weights.config.shared_intermediate = 0, weights.config.has_shared_gate = false;
  // A preset names sizes; the precision names the dtype of the weights.
  const DType dtype = precision == Precision::kW8A8 || precision == Precision::kW8A16 ? DType::kE4M3 : DType::kBF16;
  const std::int64_t L = num_local(weights.config);
  const double per_expert =
      3.0 * static_cast<double>(weights.config.hidden * weights.config.intermediate * size_bytes(dtype));
  const double rest =
      static_cast<double>(weights_bytes(weights.config, dtype, dtype)) - per_expert * static_cast<double>(L);
  const std::int64_t fit = static_cast<std::int64_t>((limit - rest) / per_expert);
  if (fit < weights.config.top_k) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{} experts of {} fit {} of memory, the layer needs at least S = {}",
                              std::max<std::int64_t>(fit, 0), format_bytes(static_cast<std::int64_t>(per_expert)),
                              format_bytes(static_cast<std::int64_t>(limit)), weights.config.top_k));
  }
  if (fit < L) weights.config.num_local = fit;
  weights.bytes = weights_bytes(weights.config, dtype, dtype);
  const std::int64_t copies = num_copies(weights.bytes, limit);
  Progress progress("making weights", Progress::Unit::kItems);
  for (std::int64_t i = 0; i < copies; ++i) {
    progress.update(i, copies);
    auto made = make_weights(weights.config, dtype, dtype, Fill::kRandom, options.seed + static_cast<std::uint64_t>(i),
                             num_threads);
    if (!made) return made.status();
    weights.copies.push_back(std::move(*made));
  }
  return weights;
}

double seconds_of(const std::function<Status()>& body, Status& status) {
  const auto start = std::chrono::steady_clock::now();
  status = body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One (precision, T) of the grid.
class Case {
 public:
  Case(const Weights& weights, Precision precision, std::int64_t tokens, Route route, const BenchOptions& options,
       const std::map<std::string, Selection>& selection)
      : weights_(weights), precision_(precision), tokens_(tokens), options_(options), machine_(options.machine.host()) {
    const MoeConfig& c = weights.config;
    x_bytes_ = random_normal_bf16(tokens * c.hidden, 1.0, options.seed);
    x_ = TensorView::dense(x_bytes_.data(), DType::kBF16, {tokens, c.hidden});
    for (std::size_t i = 0; i < kRouteSets; ++i) {
      routes_.push_back(random_ids(route, tokens, c.top_k, num_local(c), options.seed + i));
      for (std::int32_t& id : routes_.back()) id += static_cast<std::int32_t>(c.first_expert);
    }
    even_weight_.assign(static_cast<std::size_t>(tokens * c.top_k), 1.0f / static_cast<float>(c.top_k));
    pipeline_options_.precision = precision;
    pipeline_options_.machine = machine_;
    pipeline_options_.selection = selection;
    pipeline_options_.routed_only = options.routed_only;
  }

  Result<std::vector<BenchRow>> run(const Ceilings& ceilings) {
    auto buffers = std::make_shared<Buffers>();
    for (const LayerWeights& weights : weights_.copies) {
      Result<Pipeline> pipeline = Pipeline::create(weights_.config, weights, x_, pipeline_options_, buffers);
      if (!pipeline) return pipeline.status();
      pipelines_.push_back(std::move(*pipeline));
    }
    Result<std::vector<Finding>> findings = check_steps(pipelines_[0], Scope::kChosenOnly, kCheckProducts, {});
    if (!findings) return findings.status();
    for (const Finding& f : *findings) {
      if (!f.passed) failures_.push_back(fmt::format("{} {}: {}", f.step, f.impl, f.detail));
    }
    std::vector<BenchRow> rows;
    if (!failures_.empty()) return rows;
    SLUICE_TRY(time_stages(rows));
    SLUICE_TRY(time_layer(rows));
    for (BenchRow& row : rows) {
      row.precision = to_string(precision_);
      row.tokens = tokens_;
      row.touched_bytes = touched_bytes(row);
      row.in_cache = row.touched_bytes <= static_cast<double>(cache_bytes());
      finish(row, ceilings);
    }
    return rows;
  }
  const std::vector<std::string>& failures() const { return failures_; }

 private:
  // What passes through the caches before the runs come round to the same bytes again: the routed experts of every
  // copy, once each, and what one run touches beside them.
  double touched_bytes(const BenchRow& row) const {
    const bool layer = row.kind == "layer", up = row.name == "up", down = row.name == "down";
    const LayerWeights& w = weights_.copies[0];
    const double copies = static_cast<double>(weights_.copies.size());
    if (row.name.rfind("shared ", 0) == 0) {
      return row.cost.bytes + (copies - 1) * static_cast<double>(row.name == "shared up"     ? w.shared.w13.num_bytes()
                                                                 : row.name == "shared down" ? w.shared.w2.num_bytes()
                                                                                             : 0);
    }
    if (row.name == "gate.logits") return row.cost.bytes + (copies - 1) * static_cast<double>(w.w_gate.num_bytes());
    if (!layer && !up && !down && row.kind != "expert GEMMs") return row.cost.bytes;
    const std::int64_t part = up     ? w.experts.w13.num_bytes() + w.experts.w13_scale.num_bytes()
                              : down ? w.experts.w2.num_bytes() + w.experts.w2_scale.num_bytes()
                                     : num_bytes(w.experts);
    const double per_expert = static_cast<double>(part) / static_cast<double>(num_local(weights_.config));
    double pairs = 0;  // of a copy and an expert that meet
    const std::size_t stride = std::gcd(weights_.copies.size(), kRouteSets);
    for (std::size_t first = 0; first < stride; ++first) {
      std::set<std::int32_t> met;
      for (std::size_t i = first; i < kRouteSets; i += stride) met.insert(routes_[i].begin(), routes_[i].end());
      pairs += static_cast<double>(met.size()) * copies / static_cast<double>(stride);
    }
    const double rest = layer ? static_cast<double>(num_bytes(w) - num_bytes(w.experts)) : 0;
    return row.cost.bytes + (pairs - static_cast<double>(row.active_experts)) * per_expert + (copies - 1) * rest;
  }

  void inject(Pipeline& pipeline, std::size_t run) {
    const std::vector<std::int32_t>& ids = routes_[run % routes_.size()];
    std::memcpy(pipeline.topk_idx().data, ids.data(), ids.size() * sizeof(ids[0]));
    std::memcpy(pipeline.topk_weight().data, even_weight_.data(), even_weight_.size() * sizeof(float));
  }

  // All stages once per run, in order, so that each finds the caches as the layer leaves them.
  Status time_stages(std::vector<BenchRow>& rows) {
    const std::size_t num_steps = pipelines_[0].steps().size();
    rows.resize(num_steps + 1);
    BenchRow& gemms = rows[num_steps];
    gemms.kind = "expert GEMMs";
    gemms.name = "up + down";
    double spent = 0;
    for (int run = -1; run < kMaxRuns && (run < kMinRuns || spent < options_.seconds); ++run) {  // run -1 warms up
      Pipeline& pipeline = pipelines_[static_cast<std::size_t>(run + 1) % pipelines_.size()];
      double gemm_seconds = 0;
      Cost gemm_cost;
      for (std::size_t i = 0; i < num_steps; ++i) {
        const Step& step = pipeline.steps()[i];
        if (step.stage == "route") inject(pipeline, static_cast<std::size_t>(run + 1));
        const std::function<Status()> body = pipeline.bind(step);
        Status status;
        const double seconds = seconds_of(body, status);
        if (!status.is_ok()) return status.with_context(step.name);
        if (run < 0) continue;
        spent += seconds;
        const Cost cost = pipeline.cost(step);
        BenchRow& row = rows[i];
        row.kind = "stage";
        row.name = step.name;
        row.impl = step.impl;
        add_run(row, seconds, cost);
        if (step.name != "up" && step.name != "down") continue;
        gemms.impl = step.impl;
        gemm_seconds += seconds;
        gemm_cost.bytes += cost.bytes;
        gemm_cost.flops += cost.flops;
        gemm_cost.bytes_formula += (gemm_cost.bytes_formula.empty() ? "" : " + ") + cost.bytes_formula;
        gemm_cost.flops_formula = "6*R*H*I";
      }
      if (run < 0) continue;
      add_run(gemms, gemm_seconds, gemm_cost);
      gemms.routed_rows = *pipeline.plan().num_rows.as<std::int32_t>();
      gemms.active_experts = pipeline.num_active();
    }
    for (BenchRow& row : rows) {
      row.routed_rows = gemms.routed_rows;
      row.active_experts = gemms.active_experts;
    }
    return {};
  }

  // The layer: its gate, and everything after it on prescribed routes (the gate's own choice cannot be steered).
  Status time_layer(std::vector<BenchRow>& rows) {
    LayerOptions options;
    options.precision = precision_;
    options.max_tokens = tokens_;
    options.routed_only = options_.routed_only;
    options.machine = machine_;
    options.selection = pipeline_options_.selection;
    std::vector<Layer> layers;
    for (const LayerWeights& weights : weights_.copies) {
      Result<Layer> layer = Layer::create(weights_.config, weights, options);
      if (!layer) return layer.status();
      layers.push_back(std::move(*layer));
    }
    std::vector<std::byte> workspace(static_cast<std::size_t>(layers[0].workspace_bytes()));
    std::vector<float> out(static_cast<std::size_t>(tokens_ * weights_.config.hidden));
    const TensorView out_view = TensorView::dense(out.data(), DType::kF32, {tokens_, weights_.config.hidden});
    Ctx ctx;
    ctx.workspace = workspace;
    ctx.num_threads = machine_.num_threads;

    BenchRow row;
    row.kind = "layer";
    row.name = "layer";
    row.impl = "chosen";
    double spent = 0;
    for (int run = -1; run < kMaxRuns && (run < kMinRuns || spent < options_.seconds); ++run) {
      const std::size_t copy = static_cast<std::size_t>(run + 1) % layers.size();
      Pipeline& pipeline = pipelines_[copy];
      const std::function<Status()> logits = pipeline.bind(pipeline.steps()[0]),
                                    select = pipeline.bind(pipeline.steps()[1]);
      const std::vector<std::int32_t>& ids = routes_[static_cast<std::size_t>(run + 1) % routes_.size()];
      Layer::RoutedInput input;
      input.x = x_;
      input.topk_idx = {TensorView::dense(ids.data(), DType::kI32, {tokens_, weights_.config.top_k})};
      input.topk_weight = TensorView::dense(even_weight_.data(), DType::kF32, {tokens_, weights_.config.top_k});
      Status status;
      const double seconds = seconds_of(
          [&]() -> Status {
            SLUICE_TRY(logits());
            SLUICE_TRY(select());
            return layers[copy].forward_routed(input, out_view, ctx);
          },
          status);
      if (!status.is_ok()) return status.with_context("layer");
      inject(pipeline, static_cast<std::size_t>(run + 1));
      SLUICE_TRY(pipeline.run(*std::find_if(pipeline.steps().begin(), pipeline.steps().end(),
                                            [](const Step& step) { return step.stage == "route"; })));
      if (run < 0) {
        // What is timed is what was checked: the same bits as the checked stages.
        for (std::size_t i = 2; i < pipeline.steps().size(); ++i) SLUICE_TRY(pipeline.run(pipeline.steps()[i]));
        const Finding same = compare_bytes("out", out_view, pipeline.out());
        if (!same.passed) failures_.push_back("layer against its stages: " + same.detail);
        continue;
      }
      spent += seconds;
      add_run(row, seconds, pipeline.layer_cost());
      row.routed_rows = *pipeline.plan().num_rows.as<std::int32_t>();
      row.active_experts = pipeline.num_active();
    }
    rows.push_back(std::move(row));
    return {};
  }

  const Weights& weights_;
  Precision precision_;
  std::int64_t tokens_;
  const BenchOptions& options_;
  Machine machine_;
  PipelineOptions pipeline_options_;
  std::vector<std::byte> x_bytes_;
  TensorView x_;
  std::vector<std::vector<std::int32_t>> routes_;
  std::vector<float> even_weight_;
  std::vector<Pipeline> pipelines_;
  std::vector<std::string> failures_;
};

Outcome bench_gpu(const BenchOptions& options, const Subject& subject, const std::vector<Precision>& precisions,
                  bool is_asked, const std::vector<std::int64_t>& tokens, Route route,
                  const std::map<std::string, Selection>& selection, const ChosenMachine& chosen, bool json) {
  if (json) {
    const Json config = config_json(subject.config);
    print_json({{"row", "device"}, {"subject", subject.title}, {"device", device_json(chosen)}, {"config", config}},
               true);
  } else {
    fmt::print("{}\nshares are of 4.5 TB/s, 1.49 PFLOP/s in e4m3 and 0.79 in bf16, as measured on an H200\n",
               chosen.describe());
  }
  std::fflush(stdout);
  for (Precision precision : precisions) {
    GpuBench bench;
    bench.config = subject.config;
    bench.precision = precision;
    bench.machine = chosen.machine;
    bench.host = options.machine.host();
    bench.selection = selection;
    bench.route = route;
    bench.routed_only = options.routed_only;
    bench.seconds = options.seconds;
    bench.seed = options.seed;
    if (options.routed_only && !subject.model)
      bench.config.shared_intermediate = 0, bench.config.has_shared_gate = false;
    LayerWeights host;
    if (subject.model) {
      const Status can = subject.can_run(precision);
      if (!can.is_ok() && is_asked) return can;
      if (!can.is_ok()) continue;
      Result<LoadedLayer> loaded = load_layer(*subject.model, precision, options.routed_only);
      if (!loaded) return loaded.status();
      bench.config = loaded->config;
      host = std::move(loaded->weights);
    } else {
      const DType dtype = precision == Precision::kW8A8 || precision == Precision::kW8A16 ? DType::kE4M3 : DType::kBF16;
      Result<LayerWeights> made =
          make_weights(bench.config, dtype, dtype, Fill::kRandom, options.seed, bench.host.num_threads);
      if (!made) return made.status();
      host = std::move(*made);
    }
    Result<LayerWeights> placed = place_weights(std::move(host), chosen);
    if (!placed) return placed.status();
    bench.weights = std::move(*placed);
    if (!json) {
      fmt::print("\n{}: {} of weights\n", to_string(precision), format_bytes(num_bytes(bench.weights)));
      print_header();
    }
    const Ceilings ceilings{kGpuStream, precision == Precision::kW8A8 ? kGpuFp8 : kGpuBf16};
    std::vector<BenchRow> all;
    for (std::int64_t T : tokens) {
      Result<std::vector<BenchRow>> rows = bench_on_gpu(bench, T);
      if (!rows) return rows.status().with_context(fmt::format("{} T={}", to_string(precision), T));
      for (BenchRow& row : *rows) {
        row.route = options.route;
        row.in_cache = row.touched_bytes <= kGpuCache;
        finish(row, ceilings);
        if (json && (row.kind != "stage" || options.stages)) print_json(to_json(row), true);
      }
      if (!json) print_rows(*rows, options.stages);
      std::move(rows->begin(), rows->end(), std::back_inserter(all));
    }
    if (!json) print_formulas(all, to_string(precision), options.stages);
  }
  return kExitOk;
}

Outcome bench(const BenchOptions& options, bool json) {
  Result<std::map<std::string, Selection>> selection = parse_selection(options.machine.impl);
  if (!selection) return Outcome::usage(selection.status().message());
  Result<std::vector<Precision>> asked = parse_precisions(options.precision);
  if (!asked) return Outcome::usage(asked.status().message());
  Result<std::vector<std::int64_t>> tokens = parse_tokens(options.tokens, 1);
  if (!tokens) return Outcome::usage(tokens.status().message());
  bool usage = false;
  Result<Subject> subject = find_subject(options.subject, usage);
  if (!subject) return usage ? Outcome::usage(subject.status().message()) : Outcome(subject.status());
  const Route route = options.route == "zipf"         ? Route::kZipf
                      : options.route == "one-expert" ? Route::kOneExpert
                                                      : Route::kUniform;

  Result<ChosenMachine> chosen = choose_machine(options.machine, usage);
  if (!chosen) return usage ? Outcome::usage(chosen.status().message()) : Outcome(chosen.status());
  const std::vector<Precision> precisions =
      asked->empty() ? std::vector<Precision>(std::begin(kAllPrecisions), std::end(kAllPrecisions)) : *asked;
  const Machine machine = options.machine.host();
  const MoeConfig& c = subject->config;
  if (!json) {
    fmt::print("{}: E={} S={} H={} I={} shared I={}, route {}\n", subject->title, c.num_experts, c.top_k, c.hidden,
               c.intermediate, c.shared_intermediate, options.route);
    std::fflush(stdout);
  }
  if (chosen->is_gpu()) {
    return bench_gpu(options, *subject, precisions, !asked->empty(), *tokens, route, *selection, *chosen, json);
  }
  Ceilings ceilings;
  std::vector<std::string> unsteady;
  {
    Progress progress("measuring ceilings", Progress::Unit::kItems);
    const auto twice = [&](const char* name, int done, double (*measure)(int)) {
      progress.update(done, 4);
      const double first = measure(machine.num_threads);
      progress.update(done + 1, 4);
      const double second = measure(machine.num_threads), best = std::max(first, second);
      const double apart = 1 - std::min(first, second) / best;
      if (apart > kSteadyCeiling) {
        unsteady.push_back(
            fmt::format("two measurements of the {} differ by {:.0f} %: something else uses this "
                        "machine, and every share below is uncertain",
                        name, 100 * apart));
      }
      return best;
    };
    ceilings.bytes_per_s = twice("stream bandwidth", 0, [](int n) { return cpu::measure_stream_bytes_per_s(n); });
    ceilings.flops_per_s = twice("FMA peak", 2, [](int n) { return cpu::measure_fma_flops_per_s(n); });
  }
  for (const std::string& text : unsteady) warn(text);
  if (json) {
    print_json({{"row", "ceilings"},
                {"subject", subject->title},
                {"simd", machine.simd},
                {"threads", machine.num_threads},
                {"stream_bytes_per_s", ceilings.bytes_per_s},
                {"fma_flops_per_s", ceilings.flops_per_s},
                {"last_level_cache_bytes", cache_bytes()},
                {"config", config_json(c)}},
               true);
  } else {
    fmt::print("CPU: {} threads, {}; stream {:.1f} GB/s, f32 FMA {:.1f} GFLOP/s, last-level cache {}\n",
               machine.num_threads, machine.simd, ceilings.bytes_per_s / 1e9, ceilings.flops_per_s / 1e9,
               cache_bytes() > 0 ? format_bytes(cache_bytes()) : "unknown");
    std::fflush(stdout);
  }

  std::vector<BenchRow> all;
  std::vector<std::string> failures;
  for (Precision precision : precisions) {
    if (subject->model) {
      if (const Status can = subject->can_run(precision); !can.is_ok()) {
        if (!asked->empty()) return can;
        continue;
      }
    }
    Result<Weights> weights = make_copies(*subject, precision, options, machine.num_threads);
    if (!weights) return weights.status();
    if (!json) {
      fmt::print("\n{}: {} x {} of weights{}\n", to_string(precision), weights->copies.size(),
                 format_bytes(weights->bytes),
                 num_local(weights->config) < c.num_experts
                     ? fmt::format(", {} of {} experts (memory)", num_local(weights->config), c.num_experts)
                     : "");
      print_header();
    }
    for (std::int64_t T : *tokens) {
      Progress progress(fmt::format("{} T={}", to_string(precision), T), Progress::Unit::kItems);
      progress.update(0, 1);
      Case bench_case(*weights, precision, T, route, options, *selection);
      Result<std::vector<BenchRow>> rows = bench_case.run(ceilings);
      if (!rows) return rows.status().with_context(fmt::format("{} T={}", to_string(precision), T));
      for (const std::string& failure : bench_case.failures()) {
        failures.push_back(fmt::format("{} T={}: {}", to_string(precision), T, failure));
      }
      for (BenchRow& row : *rows) {
        row.route = options.route;
        row.local_experts = num_local(weights->config);
        row.weight_bytes = weights->bytes * static_cast<std::int64_t>(weights->copies.size());
        if (row.kind != "stage" || options.stages) {
          if (json) print_json(to_json(row), true);
        }
      }
      if (!json) print_rows(*rows, options.stages);
      std::move(rows->begin(), rows->end(), std::back_inserter(all));
    }
    if (!json) print_formulas(all, to_string(precision), options.stages);
  }
  const std::vector<Goal> goals = judge(all);
  for (const Goal& goal : goals) {
    if (goal.in_cache) {
      if (json) {
        print_json({{"row", "goal"}, {"goal", goal.text}, {"met", nullptr}, {"why", "in cache"}}, true);
      } else {
        fmt::print("{}{}: no verdict, in cache\n", &goal == goals.data() ? "\n" : "", goal.text);
      }
      continue;
    }
    if (json) {
      print_json(
          {{"row", "goal"}, {"goal", goal.text}, {"value", goal.value}, {"at_least", goal.at_least}, {"met", goal.met}},
          true);
    } else {
      fmt::print("{}{}: {:.2f}, wanted at least {:.2f}: {}\n", &goal == goals.data() ? "\n" : "", goal.text, goal.value,
                 goal.at_least, goal.met ? "met" : "NOT met");
    }
  }
  if (failures.empty()) return kExitOk;
  for (const std::string& failure : failures) {
    if (json) {
      print_json({{"row", "failed"}, {"detail", failure}}, true);
    }
    say(fmt::format("sluice: not timed, the check failed: {}\n", failure));
  }
  return kExitCheckFailed;
}

}  // namespace

void add_bench(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("bench", kAbout);
  sub->footer(kFooter);
  auto o = std::make_shared<BenchOptions>();
  add_subject(*sub, o->subject);
  sub->add_option("--tokens", o->tokens, "Batch sizes [1,32,512]")->type_name("LIST");
  sub->add_option("--precision", o->precision, "all, or a list of w8a8, w8a16, bf16, f32 [all]")->type_name("LIST");
  sub->add_option("--route", o->route, "How tokens spread over experts: uniform, zipf or one-expert [uniform]")
      ->check(CLI::IsMember({"uniform", "zipf", "one-expert"}))
      ->type_name("KIND");
  sub->add_flag("--stages", o->stages, "A row for every stage, not only the expert GEMMs and the layer");
  sub->add_flag("--routed-only", o->routed_only, "Leave the shared expert out");
  sub->add_option("--seconds", o->seconds, "Time budget per measurement [1]; at least 5 runs are made")
      ->check(CLI::Range(0.01, 600.0))
      ->type_name("S");
  sub->add_option("--memory", o->memory_gb, "Memory for weights in GB [half of what is free]")
      ->check(CLI::Range(0.01, 1e6))
      ->type_name("GB");
  sub->add_option("--seed", o->seed, "Of weights, activations and routes [1]")->type_name("N");
  add_impl(*sub, o->machine);
  add_device(*sub, o->machine);
  add_threads(*sub, o->machine);
  sub->add_flag("--json", command.json, "Print one JSON object per line: ceilings, then a row each, then the goals");
  sub->callback([&command, o] { command.run = [&command, o] { return bench(*o, command.json); }; });
}

}  // namespace sluice::cli
