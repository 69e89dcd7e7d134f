// Runs a layer on tokens in memory, with an output and a workspace of its own.
#pragma once

#include <vector>

#include "sluice/sluice.h"

namespace sluice::cli {

struct LayerOutput {
  std::vector<float> y;                // [T,H]
  std::vector<std::int32_t> topk_idx;  // [T,S]
  std::vector<float> topk_weight;      // [T,S]
  std::int64_t counters[kNumCounters] = {};
};

Result<LayerOutput> run_layer(const MoeConfig& config, const LayerWeights& weights, const LayerOptions& options,
                              const TensorView& x);

// One forward into vectors sized by the caller.
Status forward_into(const Layer& layer, const TensorView& x, std::span<std::byte> workspace, LayerOutput& output);

}  // namespace sluice::cli
