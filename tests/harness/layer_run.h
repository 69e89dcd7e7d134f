// Running a layer in a test: from poisoned buffers, in a workspace of exactly the asked size between guard pages.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "harness/compare.h"
#include "harness/random_layer.h"

namespace sluice::test {

inline LayerOptions options_for(Precision precision, std::int64_t max_tokens, int num_threads = 2) {
  LayerOptions options;
  options.precision = precision;
  options.max_tokens = max_tokens;
  options.machine = Machine::detect_cpu(num_threads);
  return options;
}

inline Layer make_layer(const RandomLayer& model, const LayerOptions& options) {
  Result<Layer> layer = Layer::create(model.config, model.weights, options);
  EXPECT_TRUE(layer.is_ok()) << layer.status().message();
  return std::move(layer).value();
}

// One forward into a poisoned out, from a NaN-filled workspace of exactly the asked size between guard pages.
struct Outcome {
  Buffer out;
  Buffer topk_idx;
  Buffer topk_weight;
  Buffer counters;
};
inline Outcome run(const Layer& layer, const TensorView& x, DType out_dtype = DType::kF32) {
  const std::int64_t tokens = x.shape[0];
  Outcome o{Buffer(out_dtype, {tokens, layer.config().hidden}), Buffer(DType::kI32, {tokens, layer.config().top_k}),
            Buffer(DType::kF32, {tokens, layer.config().top_k}), Buffer(DType::kI64, {kNumCounters})};
  o.counters.fill_constant(0);
  GuardedWorkspace workspace(layer.workspace_bytes());
  workspace.fill(0xFF);
  Ctx ctx;
  ctx.workspace = workspace.span();
  const Status status =
      layer.forward(x, o.out.view(), {{o.topk_idx.view()}, o.topk_weight.view(), o.counters.view()}, ctx);
  EXPECT_TRUE(status.is_ok()) << status.message();
  EXPECT_TRUE(o.out.guards_intact());
  EXPECT_TRUE(o.topk_idx.guards_intact());
  EXPECT_TRUE(o.topk_weight.guards_intact());
  return o;
}

inline Buffer random_x(std::int64_t tokens, std::int64_t hidden, std::uint64_t seed = 7, DType dtype = DType::kBF16) {
  Buffer x(dtype, {tokens, hidden});
  x.fill_normal(seed);
  return x;
}

// Worst relative L2 error of a row.
inline double worst_row(const TensorView& got, const TensorView& want) {
  const std::vector<double> g = to_doubles(got);
  const std::vector<double> w = to_doubles(want);
  const std::size_t cols = static_cast<std::size_t>(want.shape[1]);
  double worst = 0.0;
  for (std::size_t r = 0; r * cols < w.size(); ++r) {
    double error = 0.0;
    double norm = 0.0;
    for (std::size_t c = 0; c < cols; ++c) {
      const double d = g[r * cols + c] - w[r * cols + c];
      error += d * d;
      norm += w[r * cols + c] * w[r * cols + c];
    }
    const double relative = norm > 0.0 ? std::sqrt(error / norm) : (error == 0.0 ? 0.0 : HUGE_VAL);
    worst = std::isnan(relative) ? HUGE_VAL : std::max(worst, relative);
  }
  return worst;
}

}  // namespace sluice::test
