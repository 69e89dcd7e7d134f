#include "layer_runner.h"

namespace sluice::cli {

Result<LayerRunner> LayerRunner::create(const Layer& layer) {
  LayerRunner runner;
  runner.layer_ = &layer;
  const Device device = layer.options().machine.device;
  if (device.kind == DeviceKind::kCpu) {
    runner.host_workspace_.resize(static_cast<std::size_t>(layer.workspace_bytes()));
    return runner;
  }
  Result<device::Buffer> workspace = device::Buffer::allocate(device, layer.workspace_bytes(), "the workspace");
  if (!workspace) return workspace.status();
  runner.workspace_ = std::move(*workspace);
  return runner;
}

Result<TensorView> LayerRunner::place(device::Buffer& buffer, const TensorView& host, bool copy) {
  const Device device = layer_->options().machine.device;
  if (device.kind == DeviceKind::kCpu) return host;
  if (buffer.bytes() < host.num_bytes()) {
    Result<device::Buffer> grown = device::Buffer::allocate(device, host.num_bytes(), host.to_string());
    if (!grown) return grown.status();
    buffer = std::move(*grown);
  }
  TensorView view = host;
  view.data = buffer.data();
  view.device = device;
  if (copy) SLUICE_TRY(device::copy_to_device(device, view.data, host.data, host.num_bytes()));
  return view;
}

Status LayerRunner::forward(const TensorView& x, LayerOutput& output) {
  const std::int64_t T = x.shape[0], H = layer_->config().hidden, S = layer_->config().top_k;
  struct Part {
    TensorView host;
    device::Buffer* buffer;
    bool is_input, is_output;
    TensorView place;
  };
  Part parts[] = {{x, &x_, true, false, {}},
                  {TensorView::dense(output.y.data(), DType::kF32, {T, H}), &y_, false, true, {}},
                  {TensorView::dense(output.topk_idx.data(), DType::kI32, {T, S}), &topk_idx_, false, true, {}},
                  {TensorView::dense(output.topk_weight.data(), DType::kF32, {T, S}), &topk_weight_, false, true, {}},
                  {TensorView::dense(output.counters, DType::kI64, {kNumCounters}), &counters_, true, true, {}}};
  for (Part& part : parts) {
    Result<TensorView> placed = place(*part.buffer, part.host, part.is_input);
    if (!placed) return placed.status();
    part.place = *placed;
  }
  Ctx ctx;
  ctx.workspace = host_workspace_.empty() ? workspace_.span() : std::span(host_workspace_);
  ctx.num_threads = layer_->options().machine.num_threads;
  SLUICE_TRY(layer_->forward(parts[0].place, parts[1].place, {{parts[2].place}, parts[3].place, parts[4].place}, ctx));
  const Device device = layer_->options().machine.device;
  if (device.kind == DeviceKind::kCpu) return {};
  for (const Part& part : parts) {
    if (part.is_output)
      SLUICE_TRY(device::copy_to_host(device, part.host.data, part.place.data, part.host.num_bytes()));
  }
  return device::synchronise(device);
}

Result<LayerOutput> run_layer(const MoeConfig& config, const LayerWeights& weights, const LayerOptions& options,
                              const TensorView& x) {
  Result<Layer> layer = Layer::create(config, weights, options);
  if (!layer) return layer.status();
  Result<LayerRunner> runner = LayerRunner::create(*layer);
  if (!runner) return runner.status();
  const std::int64_t T = x.shape[0];
  LayerOutput output;
  output.y.resize(static_cast<std::size_t>(T * config.hidden));
  output.topk_idx.resize(static_cast<std::size_t>(T * config.top_k));
  output.topk_weight.resize(output.topk_idx.size());
  SLUICE_TRY(runner->forward(x, output));
  return output;
}

}  // namespace sluice::cli
