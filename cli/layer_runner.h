// Runs a layer on tokens in host memory, wherever the layer is: workspace and, on a GPU, copies of inputs and outputs.
#pragma once

#include <vector>

#include "device/device.h"
#include "sluice/sluice.h"

namespace sluice::cli {

struct LayerOutput {
  std::vector<float> y;                // [T,H]
  std::vector<std::int32_t> topk_idx;  // [T,S]
  std::vector<float> topk_weight;      // [T,S]
  std::int64_t counters[kNumCounters] = {};
};

class LayerRunner {
 public:
  static Result<LayerRunner> create(const Layer& layer);
  // One forward into vectors sized by the caller; returns when it is done.
  Status forward(const TensorView& x, LayerOutput& output);

 private:
  // Memory of the layer's device for one tensor; it grows.
  Result<TensorView> place(device::Buffer& buffer, const TensorView& host, bool copy);
  const Layer* layer_ = nullptr;
  std::vector<std::byte> host_workspace_;
  device::Buffer workspace_, x_, y_, topk_idx_, topk_weight_, counters_;
};

// `weights` are where options.machine is.
Result<LayerOutput> run_layer(const MoeConfig& config, const LayerWeights& weights, const LayerOptions& options,
                              const TensorView& x);

}  // namespace sluice::cli
