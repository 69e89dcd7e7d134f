#include "layer_runner.h"

namespace sluice::cli {

Status forward_into(const Layer& layer, const TensorView& x, std::span<std::byte> workspace, LayerOutput& output) {
  const std::int64_t T = x.shape[0], H = layer.config().hidden, S = layer.config().top_k;
  Layer::Routing routing;
  routing.topk_idx = {TensorView::dense(output.topk_idx.data(), DType::kI32, {T, S})};
  routing.topk_weight = TensorView::dense(output.topk_weight.data(), DType::kF32, {T, S});
  routing.counters = TensorView::dense(output.counters, DType::kI64, {kNumCounters});
  Ctx ctx;
  ctx.workspace = workspace;
  ctx.num_threads = layer.options().machine.num_threads;
  return layer.forward(x, TensorView::dense(output.y.data(), DType::kF32, {T, H}), routing, ctx);
}

Result<LayerOutput> run_layer(const MoeConfig& config, const LayerWeights& weights, const LayerOptions& options,
                              const TensorView& x) {
  Result<Layer> layer = Layer::create(config, weights, options);
  if (!layer) return layer.status();
  const std::int64_t T = x.shape[0];
  LayerOutput output;
  output.y.resize(static_cast<std::size_t>(T * config.hidden));
  output.topk_idx.resize(static_cast<std::size_t>(T * config.top_k));
  output.topk_weight.resize(output.topk_idx.size());
  std::vector<std::byte> workspace(static_cast<std::size_t>(layer->workspace_bytes()));
  SLUICE_TRY(forward_into(*layer, x, workspace, output));
  return output;
}

}  // namespace sluice::cli
