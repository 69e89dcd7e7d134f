// `sluice bench --grid`: which rows, on what, and running them. bench_grid_print.cpp says what came out, grid_plot.cpp draws it.
#include "bench_grid.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <new>
#include <set>

#include "bench/grid_config.h"
#include "bench_cpu.h"
#include "bench_cuda.h"
#include "gnuplot.h"
#include "grid_plot.h"
#include "progress.h"
#include "subject.h"

namespace sluice::cli {

namespace {

constexpr int kFirstDraw = 0;  // of bench/grid.h: the routes whose rows the peers count too

Precision precision_of(const bench::GridRow& row) { return row.bf16 ? Precision::kBF16 : Precision::kW8A8; }
DType dtype_of(const bench::GridRow& row) { return bench_dtype(precision_of(row)); }

// The grid, or the part of it that was asked for. Refusals are mistakes on the command line.
Result<std::vector<GridCase>> choose_cases(const GridOptions& options) {
  std::vector<GridCase> all;
  for (const bench::GridRow& row : bench::grid()) all.push_back({row.shape, row});
  std::vector<GridCase> cases = all;
  bool names_rows = false;
  if (!options.rows.empty()) {
    cases.clear();
    std::set<std::string> wanted;
    for (const std::string& word : split(options.rows, ',')) {
      const auto is_meant = [&](const GridCase& c) { return c.shape == word || c.name() == word; };
      if (std::none_of(all.begin(), all.end(), is_meant)) {
        std::vector<std::string> shapes;
        for (const GridCase& c : all) {
          if (shapes.empty() || shapes.back() != c.shape) shapes.push_back(c.shape);
        }
        return Status(StatusCode::kInvalidArgument,
                      fmt::format("--rows: '{}' is no row of the grid; there are {}, each with :T for one batch size",
                                  word, fmt::join(shapes, ", ")));
      }
      wanted.insert(word);
      names_rows = names_rows || word.find(':') != std::string::npos;
    }
    std::copy_if(all.begin(), all.end(), std::back_inserter(cases),
                 [&](const GridCase& c) { return wanted.count(c.shape) != 0 || wanted.count(c.name()) != 0; });
  }
  if (!options.tokens.empty()) {
    if (names_rows) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--rows {} names batch sizes itself; leave --tokens out", options.rows));
    }
    Result<std::vector<std::int64_t>> tokens = parse_tokens(options.tokens, 1);
    if (!tokens) return tokens.status();
    std::vector<GridCase> other;
    for (const GridCase& c : cases) {
      if (!other.empty() && other.back().shape == c.shape) continue;
      for (const std::int64_t T : *tokens) {
        other.push_back(c);
        other.back().row.tokens = T;
      }
    }
    cases = std::move(other);
  }
  for (GridCase& c : cases) {
    if (options.experts == 0) break;
    bench::GridRow& row = c.row;
    if (options.experts > row.num_experts) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("--experts {}: {} has {}", options.experts, c.shape, row.num_experts));
    }
    // A rank's share stays the same share.
    row.local_experts = std::max<std::int64_t>(1, options.experts * row.local_experts / row.num_experts);
    row.num_experts = options.experts;
    c.shape += fmt::format("-e{}", options.experts);
    SLUICE_TRY(
        validate(bench::grid_config(row)).with_context(fmt::format("--experts {}: {}", options.experts, c.shape)));
  }
  return cases;
}

class Grid {
 public:
  Grid(const GridOptions& options, ChosenMachine chosen, std::map<std::string, Selection> selection, bool json)
      : options_(options), chosen_(std::move(chosen)), selection_(std::move(selection)), json_(json) {
    const Machine& machine = chosen_.machine;
    report_.is_gpu = chosen_.is_gpu();
    report_.device =
        report_.is_gpu ? machine.gpu.name : fmt::format("CPU, {} threads, {}", machine.num_threads, machine.simd);
    // Weights are made on the host and then sent.
    const auto free_bytes = static_cast<double>(available_bytes());
    memory_ = options.memory_gb > 0 ? options.memory_gb * 1e9
              : report_.is_gpu      ? std::min(static_cast<double>(machine.gpu.memory_bytes), free_bytes)
                                    : 0.5 * free_bytes;
  }

  // What can be refused before anything is measured.
  Status plan(std::vector<GridCase> cases) {
    std::map<std::string, bool> known;
    for (const bench::GridRow& row : bench::grid()) known[fmt::format("{}:{}", row.shape, row.tokens)] = row.bf16;
    for (GridCase& c : cases) {
      known[c.name()] = c.row.bf16;
      GridResult result;
      result.routed_rows = bench::expert_offsets(c.row, kFirstDraw).back();
      result.needed_bytes =
          static_cast<double>(weights_bytes(bench::grid_config(c.row), dtype_of(c.row), dtype_of(c.row)));
      result.had_bytes = memory_;
      result.what = std::move(c);
      if (result.needed_bytes > memory_) {
        result.not_run =
            fmt::format("needs {} of weights, {} had", format_bytes(static_cast<std::int64_t>(result.needed_bytes)),
                        format_bytes(static_cast<std::int64_t>(memory_)));
      }
      report_.results.push_back(std::move(result));
    }
    for (const GridResult& result : report_.results) {
      if (!result.not_run.empty()) continue;
      LayerOptions options;
      options.precision = precision_of(result.what.row);
      options.max_tokens = result.what.row.tokens;
      options.machine = chosen_.machine;
      options.selection = selection_;
      SLUICE_TRY(
          plan_layer(bench::grid_config(result.what.row), dtype_of(result.what.row), dtype_of(result.what.row), options)
              .status()
              .with_context(result.what.name()));
    }
    Result<Peers> peers =
        read_peers(options_.peers, known, std::time(nullptr), report_.is_gpu ? report_.device : "cpu");
    if (!peers) return peers.status().with_context("--peers");
    report_.sources = std::move(peers->sources);
    for (GridResult& result : report_.results) {
      for (PeerFigure& figure : peers->figures) {
        if (figure.row != result.what.name()) continue;
        const bool comparable = figure.checked && !report_.sources[figure.source].another_device;
        result.rivals.push_back({figure, comparable});
      }
    }
    if (options_.plot.empty()) return {};
    SLUICE_TRY(find_gnuplot().with_context("--plot"));
    std::error_code error;
    std::filesystem::create_directories(options_.plot, error);
    if (!error && ::access(options_.plot.c_str(), W_OK) != 0) error = {errno, std::generic_category()};
    if (!error && !std::filesystem::is_directory(options_.plot))
      error = std::make_error_code(std::errc::not_a_directory);
    if (error) return {StatusCode::kIoError, fmt::format("--plot {}: {}", options_.plot, error.message())};
    return {};
  }

  Outcome run() {
    measure();
    if (json_) {
      print_grid_json(report_);
    } else {
      fmt::print("{}\n", chosen_.describe());
      std::fflush(stdout);
    }
    auto& results = report_.results;
    for (auto first = results.begin(); first != results.end();) {
      const auto end =
          std::find_if(first, results.end(), [&](const GridResult& r) { return r.what.shape != first->what.shape; });
      if (first->not_run.empty()) {
        SLUICE_TRY(run_shape(&*first, static_cast<std::size_t>(end - first)));
      } else if (json_) {
        std::for_each(first, end, [&](const GridResult& result) { print_grid_json(report_, result); });
      }
      first = end;
    }
    if (!json_) print_grid(report_);
    if (!options_.plot.empty()) {
      Result<std::vector<std::string>> names = plot_grid(report_, options_.plot);
      if (!names) return names.status().with_context("--plot");
      if (!json_) fmt::print("\nin {}: {}\n", options_.plot, fmt::join(*names, ", "));
    }
    const bool failed = std::any_of(results.begin(), results.end(), [](const GridResult& r) { return r.failed; });
    return failed ? kExitCheckFailed : kExitOk;
  }

 private:
  void measure() {
    if (report_.is_gpu) {
      report_.bytes_per_s = kGpuStream;
      report_.flops_per_s = kGpuFp8;
      report_.bf16_flops_per_s = kGpuBf16;
      return;
    }
    const bool any = std::any_of(report_.results.begin(), report_.results.end(),
                                 [](const GridResult& result) { return result.not_run.empty(); });
    const Ceilings ceilings = any ? measure_ceilings(chosen_.machine.num_threads) : Ceilings{};
    report_.bytes_per_s = ceilings.bytes_per_s;
    report_.flops_per_s = report_.bf16_flops_per_s = ceilings.flops_per_s;
  }

  // The rows of one shape share their weights.
  Status run_shape(GridResult* results, std::size_t count) {
    const bench::GridRow& shape = results[0].what.row;
    const MoeConfig config = bench::grid_config(shape);
    const DType dtype = dtype_of(shape);
    CpuBench cpu;
    GpuBench gpu;
    if (report_.is_gpu) {
      gpu.host = options_.machine.host();
      Result<LayerWeights> made =
          make_weights(config, dtype, dtype, Fill::kRandom, options_.seed, gpu.host.num_threads);
      if (!made) return made.status();
      Result<LayerWeights> placed = place_weights(std::move(*made), chosen_);
      if (!placed) return placed.status();
      gpu.weights = std::move(*placed);
      set_up(gpu, shape);
    } else {
      cpu.config = config;
      set_up(cpu, shape);
      SLUICE_TRY(make_copies(cpu, dtype, memory_));
    }
    for (GridResult* result = results; result != results + count; ++result) {
      const bench::GridRow& row = result->what.row;
      Progress progress(result->what.name(), Progress::Unit::kItems);
      progress.update(0, 1);
      const DrawRoutes draw = [&row](std::int64_t, std::size_t set) {
        return bench::expert_ids(row, static_cast<int>(set));
      };
      cpu.draw = gpu.draw = draw;
      try {
        if (report_.is_gpu) {
          Result<std::vector<BenchRow>> rows = bench_on_gpu(gpu, row.tokens);
          rows ? keep(*result, std::move(*rows)) : give_up(*result, rows.status());
        } else {
          Result<CpuRows> measured = bench_on_cpu(cpu, row.tokens);
          if (!measured) {
            give_up(*result, measured.status());
          } else if (!measured->failures.empty()) {
            give_up(*result,
                    {StatusCode::kInternal, fmt::format("the check failed: {}", fmt::join(measured->failures, "; "))});
          } else {
            keep(*result, std::move(measured->rows));
          }
        }
      } catch (const std::bad_alloc&) {
        give_up(*result, {StatusCode::kOutOfMemory, "its tensors do not fit the memory"});
      }
      if (json_) print_grid_json(report_, *result);
    }
    return {};
  }

  template <class Bench>
  void set_up(Bench& bench, const bench::GridRow& shape) const {
    bench.config = bench::grid_config(shape);
    bench.precision = precision_of(shape);
    bench.machine = chosen_.machine;
    bench.selection = selection_;
    bench.out = DType::kBF16;
    bench.seconds = options_.seconds;
    bench.seed = options_.seed;
  }

  static void give_up(GridResult& result, const Status& why) {
    result.not_run = why.message();
    result.failed = why.code() != StatusCode::kOutOfMemory;
  }

  void keep(GridResult& result, std::vector<BenchRow> rows) const {
    const bench::GridRow& shape = result.what.row;
    const Ceilings ceilings{report_.bytes_per_s, shape.bf16 ? report_.bf16_flops_per_s : report_.flops_per_s};
    const auto cache = report_.is_gpu ? kGpuCache : static_cast<double>(cache_bytes());
    for (BenchRow& row : rows) {
      row.route = "uniform";
      row.in_cache = row.touched_bytes <= cache;
      // The floor of a layer counts the experts' FLOPs alone, 6 R H I, as that of the records does.
      if (row.kind == "layer") {
        row.cost.flops -= 2 * static_cast<double>(shape.tokens) * static_cast<double>(shape.hidden * shape.num_experts);
        row.cost.flops_formula = "6*R*H*I";
      }
      finish(row, ceilings);
      if (row.kind == "layer") {
        result.layer = std::move(row);
      } else if (row.kind == "stage") {
        if (row.name == "up" || row.name == "down") {
          result.gemms += row.median;
          result.gemms_floor += row.floor;
        }
        result.stages.push_back(std::move(row));
      }
    }
  }

  const GridOptions& options_;
  ChosenMachine chosen_;
  std::map<std::string, Selection> selection_;
  bool json_;
  double memory_ = 0;
  GridReport report_;
};

}  // namespace

std::string GridCase::name() const { return fmt::format("{}:{}", shape, row.tokens); }

const PeerFigure* GridResult::best(Covers covers) const {
  const PeerFigure* best = nullptr;
  for (const GridRival& rival : rivals) {
    if (!rival.comparable || rival.figure.covers != covers) continue;
    if (best == nullptr || rival.figure.us < best->us) best = &rival.figure;
  }
  return best;
}

Outcome bench_grid(const GridOptions& options, bool json) {
  Result<std::map<std::string, Selection>> selection = parse_selection(options.machine.impl);
  if (!selection) return Outcome::usage(selection.status().message());
  Result<std::vector<GridCase>> cases = choose_cases(options);
  if (!cases) return Outcome::usage(cases.status().message());
  bool usage = false;
  Result<ChosenMachine> chosen = choose_machine(options.machine, usage);
  if (!chosen) return usage ? Outcome::usage(chosen.status().message()) : Outcome(chosen.status());
  Grid grid(options, std::move(*chosen), std::move(*selection), json);
  SLUICE_TRY(grid.plan(std::move(*cases)));
  return grid.run();
}

}  // namespace sluice::cli
