// One line of a benchmark: times, the work they are held against, the share of the ceiling.
#pragma once

#include <string>
#include <vector>

#include "output.h"
#include "pipeline.h"

namespace sluice::cli {

struct Ceilings {
  double bytes_per_s = 0;  // read from memory, all threads
  double flops_per_s = 0;  // f32 fma, all threads
};

struct BenchRow {
  std::string kind;  // "stage", "expert GEMMs" or "layer"
  std::string name, impl, precision, route;
  std::int64_t tokens = 0;
  std::int64_t routed_rows = 0, active_experts = 0, local_experts = 0;
  std::int64_t weight_bytes = 0;  // of all copies the runs rotate over
  std::vector<double> seconds;    // one per run
  double touched_bytes = 0;       // by all runs, before they come round to the same bytes
  bool in_cache = false;          // touched_bytes fit the last-level cache
  Cost cost;                      // bytes and FLOPs: mean over the runs
  double median = 0, p10 = 0, p90 = 0;
  double floor = 0;     // seconds no implementation can beat: max(bytes / bandwidth, flops / peak)
  std::string ceiling;  // which of the two
  double share = 0;     // floor / median
  double stream_share = 0, fma_share = 0;
};

// Of values in ascending order, between neighbours where it falls between them.
double quantile(const std::vector<double>& sorted, double q);
void add_run(BenchRow& row, double seconds, const Cost& cost);
void finish(BenchRow& row, const Ceilings& ceilings);
Json to_json(const BenchRow& row);
// Column titles, then rows as they are ready, under them by fixed widths; each call reaches a pipe at once.
void print_header();
void print_rows(const std::vector<BenchRow>& rows, bool stages);
// What bytes and FLOPs of the rows count, once per name.
void print_formulas(const std::vector<BenchRow>& rows, std::string_view precision, bool stages);

// What the project promises of a CPU with two cores and AVX2, judged where it was measured.
struct Goal {
  std::string text;
  double value = 0, at_least = 0;
  bool met = false;
  bool in_cache = false;  // a row it needs was served by the cache: no verdict
};
std::vector<Goal> judge(const std::vector<BenchRow>& rows);

// --like names sizes, the precision the dtype of the weights that are made for them: e4m3 where it reads eight bits, else bf16.
DType bench_dtype(Precision precision);

std::int64_t available_bytes();  // memory free for programs
std::int64_t cache_bytes();      // last-level cache; 0 when unknown

}  // namespace sluice::cli
