// `sluice bench` on a CPU: every stage and the whole layer on rotating copies of the weights.
#include "bench_cpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <set>

#include "checker.h"
#include "cpu/ceilings.h"
#include "progress.h"

namespace sluice::cli {

namespace {

constexpr double kCheckProducts = 2e7;  // the reference's share of a bench; `sluice check` is the thorough one
constexpr int kMaxRuns = 400, kMinRuns = 5;
constexpr std::size_t kRouteSets = 64;  // T = 1 then reaches nearly all experts
constexpr std::int64_t kMaxCopies = 1024;
constexpr double kCopiesOverCache = 2.5;  // bytes of all copies, in last-level caches
constexpr double kSteadyCeiling = 0.15;   // repeated ceilings further apart than this are warned of

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

double seconds_of(const std::function<Status()>& body, Status& status) {
  const auto start = std::chrono::steady_clock::now();
  status = body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One (precision, T) of the grid.
class Case {
 public:
  Case(const CpuBench& bench, std::int64_t tokens) : bench_(bench), tokens_(tokens) {
    const MoeConfig& c = bench.config;
    x_bytes_ = random_normal_bf16(tokens * c.hidden, 1.0, bench.seed);
    x_ = TensorView::dense(x_bytes_.data(), DType::kBF16, {tokens, c.hidden});
    for (std::size_t i = 0; i < kRouteSets; ++i) {
      if (bench.draw) {
        routes_.push_back(bench.draw(tokens, i));
        continue;
      }
      routes_.push_back(random_ids(bench.route, tokens, c.top_k, num_local(c), bench.seed + i));
      for (std::int32_t& id : routes_.back()) id += static_cast<std::int32_t>(c.first_expert);
    }
    even_weight_.assign(static_cast<std::size_t>(tokens * c.top_k), 1.0f / static_cast<float>(c.top_k));
  }

  Result<CpuRows> run() {
    PipelineOptions options;
    options.precision = bench_.precision;
    options.machine = bench_.machine;
    options.selection = bench_.selection;
    options.routed_only = bench_.routed_only;
    options.out = bench_.out;
    auto buffers = std::make_shared<Buffers>();
    for (const LayerWeights& weights : bench_.copies) {
      Result<Pipeline> pipeline = Pipeline::create(bench_.config, weights, x_, options, buffers);
      if (!pipeline) return pipeline.status();
      pipelines_.push_back(std::move(*pipeline));
    }
    Result<std::vector<Finding>> findings = check_steps(pipelines_[0], Scope::kChosenOnly, kCheckProducts, {});
    if (!findings) return findings.status();
    for (const Finding& f : *findings) {
      if (!f.passed) result_.failures.push_back(fmt::format("{} {}: {}", f.step, f.impl, f.detail));
    }
    if (!result_.failures.empty()) return std::move(result_);
    SLUICE_TRY(time_stages(result_.rows));
    SLUICE_TRY(time_layer(result_.rows));
    for (BenchRow& row : result_.rows) {
      row.precision = to_string(bench_.precision);
      row.tokens = tokens_;
      row.local_experts = num_local(bench_.config);
      row.weight_bytes = bench_.copy_bytes * static_cast<std::int64_t>(bench_.copies.size());
      row.touched_bytes = touched_bytes(row);
    }
    return std::move(result_);
  }

 private:
  // What passes through the caches before the runs come round to the same bytes again: the routed experts of every
  // copy, once each, and what one run touches beside them.
  double touched_bytes(const BenchRow& row) const {
    const bool layer = row.kind == "layer", up = row.name == "up", down = row.name == "down";
    const LayerWeights& w = bench_.copies[0];
    const double copies = static_cast<double>(bench_.copies.size());
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
    const double per_expert = static_cast<double>(part) / static_cast<double>(num_local(bench_.config));
    double pairs = 0;  // of a copy and an expert that meet
    const std::size_t stride = std::gcd(bench_.copies.size(), kRouteSets);
    for (std::size_t first = 0; first < stride; ++first) {
      std::set<std::int32_t> met;
      for (std::size_t i = first; i < kRouteSets; i += stride) {
        for (const std::int32_t id : routes_[i]) {
          if (id >= bench_.config.first_expert && id < bench_.config.first_expert + num_local(bench_.config))
            met.insert(id);
        }
      }
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
    for (int run = -1; run < kMaxRuns && (run < kMinRuns || spent < bench_.seconds); ++run) {  // run -1 warms up
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
    options.precision = bench_.precision;
    options.max_tokens = tokens_;
    options.routed_only = bench_.routed_only;
    options.machine = bench_.machine;
    options.selection = bench_.selection;
    std::vector<Layer> layers;
    for (const LayerWeights& weights : bench_.copies) {
      Result<Layer> layer = Layer::create(bench_.config, weights, options);
      if (!layer) return layer.status();
      layers.push_back(std::move(*layer));
    }
    std::vector<std::byte> workspace(static_cast<std::size_t>(layers[0].workspace_bytes()));
    std::vector<std::byte> out(static_cast<std::size_t>(tokens_ * bench_.config.hidden * size_bytes(bench_.out)));
    const TensorView out_view = TensorView::dense(out.data(), bench_.out, {tokens_, bench_.config.hidden});
    Ctx ctx;
    ctx.workspace = workspace;
    ctx.num_threads = bench_.machine.num_threads;

    BenchRow row;
    row.kind = "layer";
    row.name = "layer";
    row.impl = "chosen";
    double spent = 0;
    for (int run = -1; run < kMaxRuns && (run < kMinRuns || spent < bench_.seconds); ++run) {
      const std::size_t copy = static_cast<std::size_t>(run + 1) % layers.size();
      Pipeline& pipeline = pipelines_[copy];
      const std::function<Status()> logits = pipeline.bind(pipeline.steps()[0]),
                                    select = pipeline.bind(pipeline.steps()[1]);
      const std::vector<std::int32_t>& ids = routes_[static_cast<std::size_t>(run + 1) % routes_.size()];
      Layer::RoutedInput input;
      input.x = x_;
      input.topk_idx = {TensorView::dense(ids.data(), DType::kI32, {tokens_, bench_.config.top_k})};
      input.topk_weight = TensorView::dense(even_weight_.data(), DType::kF32, {tokens_, bench_.config.top_k});
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
        if (!same.passed) result_.failures.push_back("layer against its stages: " + same.detail);
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

  const CpuBench& bench_;
  std::int64_t tokens_;
  std::vector<std::byte> x_bytes_;
  TensorView x_;
  std::vector<std::vector<std::int32_t>> routes_;
  std::vector<float> even_weight_;
  std::vector<Pipeline> pipelines_;
  CpuRows result_;
};

}  // namespace

Result<MoeConfig> config_to_bench(const Subject& subject, Precision precision, bool routed_only, double memory_bytes) {
  MoeConfig config = subject.config;
  if (routed_only) config.shared_intermediate = 0, config.has_shared_gate = false;
  if (subject.model) return config;
  const DType dtype = bench_dtype(precision);
  const std::int64_t L = num_local(config);
  const double per_expert = 3.0 * static_cast<double>(config.hidden * config.intermediate * size_bytes(dtype));
  const double rest = static_cast<double>(weights_bytes(config, dtype, dtype)) - per_expert * static_cast<double>(L);
  const double fit = std::floor((memory_bytes - rest) / per_expert);
  if (fit < static_cast<double>(config.top_k)) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{:.0f} experts of {} fit {} of memory, the layer needs at least S = {}",
                              std::max(fit, 0.0), format_bytes(static_cast<std::int64_t>(per_expert)),
                              format_bytes(static_cast<std::int64_t>(memory_bytes)), config.top_k));
  }
  if (fit < static_cast<double>(L)) config.num_local = static_cast<std::int64_t>(fit);
  return config;
}

Status make_copies(CpuBench& bench, const Subject& subject, double memory_bytes) {
  if (subject.model) {
    Result<LoadedLayer> loaded = load_layer(*subject.model, bench.precision, bench.routed_only);
    if (!loaded) return loaded.status();
    bench.config = loaded->config;
    bench.copy_bytes = num_bytes(loaded->weights);
    bench.copies.push_back(std::move(loaded->weights));
    const std::int64_t copies = num_copies(bench.copy_bytes, memory_bytes);
    for (std::int64_t i = 1; i < copies; ++i) bench.copies.push_back(copy_weights(bench.copies[0]));
    return {};
  }
  Result<MoeConfig> config = config_to_bench(subject, bench.precision, bench.routed_only, memory_bytes);
  if (!config) return config.status();
  bench.config = *config;
  return make_copies(bench, bench_dtype(bench.precision), memory_bytes);
}

Status make_copies(CpuBench& bench, DType dtype, double memory_bytes) {
  bench.copy_bytes = weights_bytes(bench.config, dtype, dtype);
  const std::int64_t copies = num_copies(bench.copy_bytes, memory_bytes);
  Progress progress("making weights", Progress::Unit::kItems);
  for (std::int64_t i = 0; i < copies; ++i) {
    progress.update(i, copies);
    auto made = make_weights(bench.config, dtype, dtype, Fill::kRandom, bench.seed + static_cast<std::uint64_t>(i),
                             bench.machine.num_threads);
    if (!made) return made.status();
    bench.copies.push_back(std::move(*made));
  }
  return {};
}

Ceilings measure_ceilings(int num_threads) {
  Ceilings ceilings;
  std::vector<std::string> unsteady;
  {
    Progress progress("measuring ceilings", Progress::Unit::kItems);
    const auto twice = [&](const char* name, int done, double (*measure)(int)) {
      progress.update(done, 4);
      const double first = measure(num_threads);
      progress.update(done + 1, 4);
      const double second = measure(num_threads), best = std::max(first, second);
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
  return ceilings;
}

Result<CpuRows> bench_on_cpu(const CpuBench& bench, std::int64_t tokens) { return Case(bench, tokens).run(); }

}  // namespace sluice::cli
