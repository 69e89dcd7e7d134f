// `sluice bench` on a GPU.
#pragma once

#include "bench_rows.h"
#include "random.h"

namespace sluice::cli {

// Ceilings of an H200 as measured for docs/performance.md: a read stream, and dense GEMMs on the tensor cores.
inline constexpr double kGpuStream = 4.5e12, kGpuFp8 = 1.49e15, kGpuBf16 = 0.79e15, kGpuCache = 60e6;

struct GpuBench {
  MoeConfig config;
  LayerWeights weights;  // on the GPU
  Precision precision = Precision::kW8A8;
  Machine machine, host;
  std::map<std::string, Selection> selection;
  Route route = Route::kUniform;
  bool routed_only = false;
  double seconds = 1;  // per measurement
  std::uint64_t seed = 1;
};

// A row for every stage, then one for the whole layer; times are of graph replays. The layer's bits are first held against
// its stages'. Shares are the caller's to fill in.
Result<std::vector<BenchRow>> bench_on_gpu(const GpuBench& bench, std::int64_t tokens);

}  // namespace sluice::cli
