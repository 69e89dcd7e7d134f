// A build without CUDA: every function of device.h, refusing or doing nothing.
#ifndef SLUICE_WITH_CUDA
#include "device/device.h"

namespace sluice::device {
namespace {
Status refuse() { return judge({}, 0).status(); }
}  // namespace

struct Uploader::State {};
struct Graph::State {};

Findings find() { return {}; }

Result<Memory> memory_of(const void*) { return Memory{}; }

bool is_gpu_address(const void*) { return false; }

Result<Buffer> Buffer::allocate(Device, std::int64_t, std::string_view) { return refuse(); }
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  return *this;
}
Buffer::~Buffer() = default;

Status copy_to_device(Device, void*, const void*, std::int64_t) { return refuse(); }
Status copy_to_host(Device, void*, const void*, std::int64_t) { return refuse(); }
Status fill_bytes(Device, void*, int, std::int64_t) { return refuse(); }
Status synchronise(Device) { return refuse(); }

Uploader::Uploader(std::unique_ptr<State> state) : state_(std::move(state)) {}
Uploader::Uploader(Uploader&&) noexcept = default;
Uploader::~Uploader() = default;
Result<Uploader> Uploader::create(Device) { return refuse(); }
Status Uploader::copy(std::string_view, std::byte*, const std::byte*, std::int64_t,
                      const std::function<bool(std::int64_t)>&) {
  return refuse();
}
Status Uploader::finish() { return refuse(); }

Current::Current(Device device) {
  if (device.kind == DeviceKind::kCuda) status_ = refuse();
}
Current::~Current() = default;

Graph::Graph(std::unique_ptr<State> state) : state_(std::move(state)) {}
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
Graph::~Graph() = default;
Result<Graph> Graph::capture(Device, const std::function<Status(void*)>&) { return refuse(); }
Result<double> Graph::replay() { return refuse(); }

}  // namespace sluice::device
#endif
