// `sluice bench` on a GPU.
#pragma once

#include "bench/grid.h"
#include "bench_rows.h"
#include "random.h"

namespace sluice::cli {

// Ceilings of an H200 as measured for docs/performance.md: a read stream, and dense GEMMs on the tensor cores.
inline constexpr double kGpuStream = bench::kStreamBytesPerUs * 1e6, kGpuFp8 = bench::kFp8FlopsPerUs * 1e6,
                        kGpuBf16 = bench::kBf16FlopsPerUs * 1e6, kGpuCache = 60e6;

struct GpuBench {
  MoeConfig config;
  LayerWeights weights;  // on the GPU
  Precision precision = Precision::kW8A8;
  Machine machine, host;
  std::map<std::string, Selection> selection;
  Route route = Route::kUniform;
  DrawRoutes draw;  // instead of `route`, where there is one
  DType out = DType::kF32;
  bool routed_only = false;
  double seconds = 1;  // per measurement
  std::uint64_t seed = 1;
};

// A row for every stage, then one for the whole layer; times are of calls in a graph that holds many, on other experts
// each until more than the L2 was read. The layer's bits are first held against its stages'. Shares are the caller's to
// fill in.
Result<std::vector<BenchRow>> bench_on_gpu(const GpuBench& bench, std::int64_t tokens);

}  // namespace sluice::cli
