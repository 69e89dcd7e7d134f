// `sluice bench`: stages and the layer against measured ceilings, of this CPU or of a GPU.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench_cpu.h"
#include "bench_cuda.h"
#include "bench_grid.h"
#include "bench_ranks.h"
#include "commands.h"
#include "progress.h"

namespace sluice::cli {

namespace {

constexpr const char* kAbout = R"(Time stages and the layer against measured ceilings, on the CPU or on a GPU

Checks what it is about to time, then times every stage and the whole layer: median, p10 and p90 of the runs, the
bytes and FLOPs that must at least be moved and done, and the share of the floor max(bytes / bandwidth, flops / peak).
On a CPU the ceilings are measured first: memory stream bandwidth and the f32 FMA peak. On a GPU they are those of an
H200: 4.5 TB/s, 1.49 PFLOP/s in e4m3, 0.79 in bf16. With --json one line per row.)";

constexpr const char* kFooter =
    R"(Columns: R, routed rows; A, experts that have rows; BYTES, weights of those experts once, inputs and outputs once;
WORK, FLOPs; SHARE, of the floor in the median; OF, the ceiling that sets the floor: stream (bandwidth) or fma
(arithmetic, of the tensor cores on a GPU).
Weights are random (--like) or the checkpoint's (--model). --like picks sizes only: w8a8 and w8a16 get e4m3 weights,
bf16 and f32 get bf16 weights.
The exit status is 0 when all was measured and 1 when a check before it failed, which is then not timed.

On a CPU, runs rotate over copies of the weights and over sets of routed experts, so that weights come from memory and
not from a cache where the machine has the room; with too little memory fewer experts are kept, as on one rank of
several, and the row says how many. A row whose runs touch no more than the last-level cache in all is marked "in
cache": it says nothing about memory, its share may exceed 100 %, and no goal is judged by it. The ceilings are
measured twice, and a warning says when they disagree by more than 15 %: then so do the shares.
Goals, where the rows they need are there: expert GEMMs at T=1 in w8a8 and w8a16 reach half the stream bandwidth, at
T=512 in bf16 and f32 half the FMA peak; from T=512 on the layer in w8a8 is no slower than in bf16. A goal that is not
met does not change the exit status.

On a GPU (--device cuda, and auto where GPU 0 can run the layer) a row is timed by replaying a CUDA graph between two
events: one for each stage and one for the layer, with as many calls in it as take about 2 ms, on other routed experts
each until more than the L2 was read. The layer must first have the bits of its stages. All experts are kept; --memory
(but for --grid) and --threads concern the CPU alone.

--grid runs the rows of docs/performance.md: shapes of DeepSeek-V3, Qwen3-30B and Mixtral, each at the batch sizes it is
judged at, routes uniform at random and the same that the peers' programs draw. For each row: the floor, the whole layer
from x to out with gate and sort, the two expert GEMMs, every stage alone. A floor of a layer counts the weights of the
experts that have rows once, the gate's, x and out, and 6 R H I FLOPs. A row whose weights do not fit the memory is listed
as not run, with both sizes. AGAINST BEST is the time of the fastest checked peer of this device over ours: above 1, ours
is faster. Peers are read from files (--peers), which bench/peers/ writes; figures of another run, and those of a record
of scripts/gpu-check always are, carry a star.

With --ep, under mpirun, the layer runs over the ranks, --tokens on each, with random weights. LAYER is the median of a
forward on rank 0; DISPATCH what of it went into telling counts and sending tokens, COMBINE into getting rows back, EXPERTS
the rest; BYTES THERE and BACK are what rank 0 sent to others; LINK is their sum over DISPATCH + COMBINE, as a share of what
a rank can send and receive at once, measured first.

Examples:
  sluice bench --like qwen3-30b
  mpirun -n 2 sluice bench --ep --like qwen3-30b --tokens 128 --precision w8a8 --threads 1
  sluice bench --like deepseek-v3 --tokens 1 --precision w8a8 --threads 2
  sluice bench --like deepseek-v3 --tokens 1,128,8192 --precision w8a8 --device cuda --stages
  sluice bench --model data/tiny-dsv3 --layer 1 --tokens 512 --route zipf --json
  sluice bench --grid --device cuda --peers peers.json --plot pictures
  sluice bench --grid --rows qwen3-30b:1,dsv3-tp8 --experts 16 --device cpu --json
)";

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
  RankOptions ranks;
  bool grid = false;
  GridOptions grid_options;  // what --grid alone takes
};

// What was asked for, understood and found possible.
struct Work {
  const BenchOptions& options;
  Subject subject;
  std::vector<Precision> precisions;  // that can run
  std::vector<std::int64_t> tokens;
  Route route;
  std::map<std::string, Selection> selection;
  ChosenMachine chosen;
  double memory_bytes;  // for weights, on a CPU
  bool json;
};

// Every refusal that needs no weights comes before the first measurement.
Status check_plan(const Work& work, Precision precision) {
  const BenchOptions& o = work.options;
  Result<MoeConfig> config = config_to_bench(work.subject, precision, o.routed_only, work.memory_bytes);
  if (!config) return config.status();
  const bool from_file = work.subject.model.has_value();
  const WeightForm made = bench_dtype(precision);
  LayerOptions options;
  options.precision = precision;
  options.max_tokens = *std::max_element(work.tokens.begin(), work.tokens.end());
  options.routed_only = o.routed_only;
  options.machine = work.chosen.machine;
  options.selection = work.selection;
  return plan_layer(*config, from_file ? work.subject.experts_for(precision) : made,
                    from_file ? work.subject.shared_for(precision) : made, options)
      .status();
}

// The rows of one T, finished: as JSON lines, or in the table under print_header().
void emit(const Work& work, const std::vector<BenchRow>& rows) {
  if (!work.json) return print_rows(rows, work.options.stages);
  for (const BenchRow& row : rows) {
    if (row.kind != "stage" || work.options.stages) print_json(to_json(row), true);
  }
}

Outcome bench_gpu(const Work& work) {
  const BenchOptions& options = work.options;
  const Subject& subject = work.subject;
  if (work.json) {
    const Json config = config_json(subject.config);
    print_json(
        {{"row", "device"}, {"subject", subject.title}, {"device", device_json(work.chosen)}, {"config", config}},
        true);
  } else {
    fmt::print("{}\nshares are of 4.5 TB/s, 1.49 PFLOP/s in e4m3 and 0.79 in bf16, as measured on an H200\n",
               work.chosen.describe());
  }
  std::fflush(stdout);
  for (Precision precision : work.precisions) {
    GpuBench bench;
    bench.config = subject.config;
    bench.precision = precision;
    bench.machine = work.chosen.machine;
    bench.host = options.machine.host();
    bench.selection = work.selection;
    bench.route = work.route;
    bench.routed_only = options.routed_only;
    bench.seconds = options.seconds;
    bench.seed = options.seed;
    LayerWeights host;
    if (subject.model) {
      Result<LoadedLayer> loaded = load_layer(*subject.model, precision, options.routed_only);
      if (!loaded) return loaded.status();
      bench.config = loaded->config;
      host = std::move(loaded->weights);
    } else {
      if (options.routed_only) bench.config.shared_intermediate = 0, bench.config.has_shared_gate = false;
      const DType dtype = bench_dtype(precision);
      Result<LayerWeights> made =
          make_weights(bench.config, dtype, dtype, Fill::kRandom, options.seed, bench.host.num_threads);
      if (!made) return made.status();
      host = std::move(*made);
    }
    Result<LayerWeights> placed = place_weights(std::move(host), work.chosen);
    if (!placed) return placed.status();
    bench.weights = std::move(*placed);
    if (!work.json) {
      fmt::print("\n{}: {} of weights\n", to_string(precision), format_bytes(num_bytes(bench.weights)));
      print_header();
    }
    const Ceilings ceilings{kGpuStream, precision == Precision::kW8A8 ? kGpuFp8 : kGpuBf16};
    std::vector<BenchRow> all;
    for (std::int64_t T : work.tokens) {
      Result<std::vector<BenchRow>> rows = bench_on_gpu(bench, T);
      if (!rows) return rows.status().with_context(fmt::format("{} T={}", to_string(precision), T));
      for (BenchRow& row : *rows) {
        row.route = options.route;
        row.in_cache = row.touched_bytes <= kGpuCache;
        finish(row, ceilings);
      }
      emit(work, *rows);
      std::move(rows->begin(), rows->end(), std::back_inserter(all));
    }
    if (!work.json) print_formulas(all, to_string(precision), options.stages);
  }
  return kExitOk;
}

void print_goals(const std::vector<Goal>& goals, bool json) {
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
}

Outcome bench_cpu(const Work& work) {
  const BenchOptions& options = work.options;
  const MoeConfig& c = work.subject.config;
  const Machine& machine = work.chosen.machine;
  const Ceilings ceilings = measure_ceilings(machine.num_threads);
  if (work.json) {
    print_json({{"row", "ceilings"},
                {"subject", work.subject.title},
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
  for (Precision precision : work.precisions) {
    CpuBench bench;
    bench.precision = precision;
    bench.machine = machine;
    bench.selection = work.selection;
    bench.route = work.route;
    bench.routed_only = options.routed_only;
    bench.seconds = options.seconds;
    bench.seed = options.seed;
    SLUICE_TRY(make_copies(bench, work.subject, work.memory_bytes));
    if (!work.json) {
      fmt::print("\n{}: {} x {} of weights{}\n", to_string(precision), bench.copies.size(),
                 format_bytes(bench.copy_bytes),
                 num_local(bench.config) < c.num_experts
                     ? fmt::format(", {} of {} experts (memory)", num_local(bench.config), c.num_experts)
                     : "");
      print_header();
    }
    for (std::int64_t T : work.tokens) {
      Progress progress(fmt::format("{} T={}", to_string(precision), T), Progress::Unit::kItems);
      progress.update(0, 1);
      Result<CpuRows> measured = bench_on_cpu(bench, T);
      if (!measured) return measured.status().with_context(fmt::format("{} T={}", to_string(precision), T));
      for (const std::string& failure : measured->failures) {
        failures.push_back(fmt::format("{} T={}: {}", to_string(precision), T, failure));
      }
      for (BenchRow& row : measured->rows) {
        row.route = options.route;
        row.in_cache = row.touched_bytes <= static_cast<double>(cache_bytes());
        finish(row, ceilings);
      }
      emit(work, measured->rows);
      std::move(measured->rows.begin(), measured->rows.end(), std::back_inserter(all));
    }
    if (!work.json) print_formulas(all, to_string(precision), options.stages);
  }
  print_goals(judge(all), work.json);
  if (failures.empty()) return kExitOk;
  for (const std::string& failure : failures) {
    if (work.json) print_json({{"row", "failed"}, {"detail", failure}}, true);
    say(fmt::format("sluice: not timed, the check failed: {}\n", failure));
  }
  return kExitCheckFailed;
}

// Over the ranks that mpirun started. What cannot run is refused by each layer's creation, on every rank.
Outcome bench_spread(const Work& work) {
  const BenchOptions& o = work.options;
  if (work.chosen.is_gpu()) return Outcome::usage("--ep: rows go between ranks on CPUs so far; --device cpu");
  Result<Ranks> ranks = Ranks::start(o.ranks);
  if (!ranks) return ranks.status();
  const RanksBench bench{work.subject,        work.precisions, work.tokens, work.selection,
                         work.chosen.machine, o.routed_only,   o.seconds,   o.seed};
  return bench_ranks(bench, *ranks, work.json);
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
  Result<ChosenMachine> chosen = choose_machine(options.machine, usage);
  if (!chosen) return usage ? Outcome::usage(chosen.status().message()) : Outcome(chosen.status());
  const Route route = options.route == "zipf"         ? Route::kZipf
                      : options.route == "one-expert" ? Route::kOneExpert
                                                      : Route::kUniform;
  const double memory_bytes = chosen->is_gpu()        ? HUGE_VAL
                              : options.memory_gb > 0 ? options.memory_gb * 1e9
                                                      : 0.5 * static_cast<double>(available_bytes());
  Work work{options,
            std::move(*subject),
            {},
            std::move(*tokens),
            route,
            std::move(*selection),
            std::move(*chosen),
            memory_bytes,
            json};
  const bool all = asked->empty();
  const std::vector<Precision> wanted =
      all ? std::vector<Precision>(std::begin(kAllPrecisions), std::end(kAllPrecisions)) : *asked;
  for (Precision precision : wanted) {
    if (const Status can = work.subject.model ? work.subject.can_run(precision) : Status::ok(); !can.is_ok()) {
      if (!all) return can;
      continue;
    }
    if (!options.ranks.spread) SLUICE_TRY(check_plan(work, precision).with_context(to_string(precision)));
    work.precisions.push_back(precision);
  }
  if (options.ranks.spread) return bench_spread(work);
  if (!json) {
    const MoeConfig& c = work.subject.config;
    fmt::print("{}: E={} S={} H={} I={} shared I={}, route {}\n", work.subject.title, c.num_experts, c.top_k, c.hidden,
               c.intermediate, c.shared_intermediate, options.route);
    std::fflush(stdout);
  }
  return work.chosen.is_gpu() ? bench_gpu(work) : bench_cpu(work);
}

// The grid fixes layers, precisions and routes; a layer of one's own has no rows of the grid.
Outcome bench_any(const CLI::App& sub, const BenchOptions& options, bool json) {
  const std::vector<const char*> others = {"--model", "--layer",  "--like",        "--precision",
                                           "--route", "--stages", "--routed-only", "--ep"};
  const std::vector<const char*> of_grid = {"--rows", "--experts", "--peers", "--plot"};
  for (const char* name : options.grid ? others : of_grid) {
    if (sub.count(name) == 0) continue;
    return Outcome::usage(
        options.grid ? fmt::format("{} does not go with --grid, whose rows are given (see sluice bench --help)", name)
                     : fmt::format("{} goes with --grid alone", name));
  }
  if (!options.grid) return bench(options, json);
  GridOptions grid = options.grid_options;
  if (sub.count("--tokens") != 0) grid.tokens = options.tokens;
  if (grid.tokens.empty() && sub.count("--tokens") != 0)
    return Outcome::usage("--tokens: '' is no list of batch sizes");
  if (grid.rows.empty() && sub.count("--rows") != 0) return Outcome::usage("--rows: '' names no row");
  if (grid.plot.empty() && sub.count("--plot") != 0) return Outcome::usage("--plot: '' is no folder");
  grid.seconds = options.seconds;
  grid.memory_gb = options.memory_gb;
  grid.seed = options.seed;
  grid.machine = options.machine;
  return bench_grid(grid, json);
}

}  // namespace

void add_bench(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("bench", kAbout);
  sub->footer(kFooter);
  auto o = std::make_shared<BenchOptions>();
  add_subject(*sub, o->subject);
  sub->add_option("--tokens", o->tokens, "Batch sizes [1,32,512; with --grid those of the grid]")->type_name("LIST");
  sub->add_option("--precision", o->precision, "all, or a list of w8a8, w8a16, bf16, f32 [all]")->type_name("LIST");
  sub->add_option("--route", o->route, "How tokens spread over experts: uniform, zipf or one-expert [uniform]")
      ->check(one_of({"uniform", "zipf", "one-expert"}))
      ->type_name("KIND");
  sub->add_flag("--stages", o->stages, "A row for every stage, not only the expert GEMMs and the layer");
  sub->add_flag("--routed-only", o->routed_only, "Leave the shared expert out");
  sub->add_option("--seconds", o->seconds, "Time budget per measurement [1]; at least 5 runs are made")
      ->check(number(0.01, 600))
      ->type_name("S");
  sub->add_option("--memory", o->memory_gb,
                  "Memory for weights on a CPU in GB [half of what is free];\nwith --grid on a GPU too [all of it]")
      ->check(number(0.01, 1e6))
      ->type_name("GB");
  sub->add_option("--seed", o->seed, "Of weights, activations and routes [1]")
      ->check(whole_number(0, INT64_MAX))
      ->type_name("N");
  add_impl(*sub, o->machine);
  add_device(*sub, o->machine);
  add_threads(*sub, o->machine);
  add_ranks(*sub, o->ranks);
  sub->add_flag("--grid", o->grid, "The rows of bench/grid.h instead of one layer: floor, ours, peers, ratios (below)");
  GridOptions& grid = o->grid_options;
  sub->add_option("--rows", grid.rows, "With --grid: SHAPE or SHAPE:T, comma-separated [all]")->type_name("LIST");
  sub->add_option("--experts", grid.experts,
                  "With --grid: layers of N experts, with sizes as they are, for machines that cannot hold\nall; "
                  "their shapes are named SHAPE-eN")
      ->check(whole_number(1, kMaxExperts))
      ->type_name("N");
  sub->add_option(
         "--peers", grid.peers,
         "With --grid: figures of alternatives, a peers file or a record of scripts/gpu-check;\nmay be repeated")
      ->type_name("FILE")
      ->allow_extra_args(false);
  sub->add_option("--plot", grid.plot,
                  "With --grid: a roofline and a bar chart per shape, as SVG, into this folder (by gnuplot)")
      ->type_name("DIR");
  sub->add_flag("--json", command.json, "Print one JSON object per line: ceilings, then a row each, then the goals");
  sub->callback([&command, o, sub] { command.run = [&command, o, sub] { return bench_any(*sub, *o, command.json); }; });
}

}  // namespace sluice::cli
