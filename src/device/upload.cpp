// Weights to a GPU: tensor by tensor, in the layout they have.
#include "device/device.h"
#include "layer/tensors.h"
#include "sluice/device.h"

namespace sluice {
namespace {

// Bytes from the first element to the last, gaps between rows included.
std::int64_t span_bytes(const TensorView& view) {
  if (view.num_elements() == 0) return 0;
  std::int64_t last = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(view.rank); ++i) last += (view.shape[i] - 1) * view.stride[i];
  return (last + 1) * size_bytes(view.dtype);
}

}  // namespace

Result<LayerWeights> upload(const LayerWeights& weights, Device device, const UploadOptions& options) {
  if (device.kind != DeviceKind::kCuda)
    return Status(StatusCode::kInvalidArgument, "upload: the device must be a GPU, got cpu");
  if (Result<Machine> machine = Machine::detect_cuda(device.index); !machine)
    return machine.status().with_context("upload");
  std::int64_t total = 0;
  Status status;
  for_each_tensor(weights, [&](std::string_view name, const TensorView& view) {
    total += span_bytes(view);
    if (status.is_ok() && view.device.kind != DeviceKind::kCpu) {
      status = {StatusCode::kInvalidArgument,
                "upload: " + std::string(name) + " is on a GPU already; host memory is needed"};
    }
  });
  SLUICE_TRY(status);
  Result<device::Uploader> uploader = device::Uploader::create(device);
  if (!uploader) return uploader.status();

  LayerWeights result = weights;
  result.owners.clear();
  std::int64_t done = 0;
  const auto step = [&](std::int64_t bytes) {
    done += bytes;
    if (options.progress) options.progress(done, total);
    return !options.stop || !options.stop();
  };
  for_each_tensor(result, [&](std::string_view name, TensorView& view) {
    if (!status.is_ok()) return;
    view.device = device;
    const std::int64_t bytes = span_bytes(view);
    if (bytes == 0) return;
    Result<device::Buffer> memory = device::Buffer::allocate(device, bytes, name);
    if (!memory) {
      status = memory.status();
      return;
    }
    status = uploader->copy(name, memory->data(), static_cast<const std::byte*>(view.data), bytes, step);
    view.data = memory->data();
    result.owners.push_back(std::make_shared<device::Buffer>(std::move(*memory)));
  });
  if (status.is_ok()) status = uploader->finish();
  if (!status.is_ok()) return status.with_context("upload");
  return result;
}

}  // namespace sluice
