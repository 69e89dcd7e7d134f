// `sluice bench` on a CPU.
#pragma once

#include "bench_rows.h"
#include "random.h"
#include "subject.h"

namespace sluice::cli {

struct CpuBench {
  MoeConfig config;
  std::vector<LayerWeights> copies;  // of one layer's weights; runs rotate over them
  std::int64_t copy_bytes = 0;
  Precision precision = Precision::kF32;
  Machine machine;
  std::map<std::string, Selection> selection;
  Route route = Route::kUniform;
  DrawRoutes draw;  // instead of `route`, where there is one
  DType out = DType::kF32;
  bool routed_only = false;
  double seconds = 1;  // per measurement
  std::uint64_t seed = 1;
};

// The config of the layer that is timed: without its shared expert where that was asked for, and of a preset with as many
// experts as fit `memory_bytes`; too few is an error.
Result<MoeConfig> config_to_bench(const Subject& subject, Precision precision, bool routed_only, double memory_bytes);
// As many copies of the weights as put them far above the last-level cache, within `memory_bytes`.
Status make_copies(CpuBench& bench, const Subject& subject, double memory_bytes);
// The same of random weights for bench.config.
Status make_copies(CpuBench& bench, DType dtype, double memory_bytes);

// Twice each, the better counts; warns of a machine that is not steady.
Ceilings measure_ceilings(int num_threads);

struct CpuRows {
  std::vector<BenchRow> rows;
  std::vector<std::string> failures;  // of the check before; then nothing was timed
};
// A row for every stage, then one for the expert GEMMs and one for the whole layer. The implementations and the layer are
// first checked. Shares are the caller's to fill in.
Result<CpuRows> bench_on_cpu(const CpuBench& bench, std::int64_t tokens);

}  // namespace sluice::cli
