// The device interface on the CUDA runtime.
#include "device/device.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "cuda/launch.h"

namespace sluice::device {
namespace {

using cuda::to_status;

Version version_of(int encoded) { return {encoded / 1000, encoded % 1000 / 10}; }

// A failed call leaves its error behind for the next one that asks; it has been reported by then.
Status report(cudaError_t error, std::string_view what) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return to_status(error, what);
}

#define SLUICE_CUDA_TRY(call, what) SLUICE_TRY(report((call), (what)))

Result<Gpu> read_gpu(int index) {
  cudaDeviceProp properties;
  SLUICE_CUDA_TRY(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  Gpu gpu;
  gpu.name = properties.name;
  gpu.capability = {properties.major, properties.minor};
  gpu.num_sms = properties.multiProcessorCount;
  gpu.shared_bytes_per_block = static_cast<std::int64_t>(properties.sharedMemPerBlockOptin);
  gpu.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  return gpu;
}

}  // namespace

Findings find() {
  Findings f;
  f.has_cuda = true;
  f.runtime = version_of(CUDART_VERSION);
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  f.driver = version_of(driver);
  int count = 0;
  const cudaError_t error = driver == 0 ? cudaErrorInsufficientDriver : cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (error == cudaErrorNoDevice) return f;
  if (error != cudaSuccess) {
    f.error = cudaGetErrorString(error);
    return f;
  }
  for (int i = 0; i < count; ++i) {
    Result<Gpu> gpu = read_gpu(i);
    if (!gpu) {
      f.error = gpu.status().message();
      f.gpus.clear();
      return f;
    }
    gpu->driver = f.driver;
    gpu->runtime = f.runtime;
    f.gpus.push_back(std::move(*gpu));
  }
  return f;
}

Result<Memory> memory_of(const void* address) {
  cudaPointerAttributes attributes = {};
  SLUICE_CUDA_TRY(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
  switch (attributes.type) {
    case cudaMemoryTypeDevice: return Memory{MemoryKind::kDevice, attributes.device};
    case cudaMemoryTypeManaged: return Memory{MemoryKind::kManaged, attributes.device};
    case cudaMemoryTypeHost: return Memory{MemoryKind::kPinned, 0};
    default: return Memory{MemoryKind::kHost, 0};
  }
}

bool is_gpu_address(const void* address) {
  using Query = int (*)(void* value, int attribute, std::uintptr_t address);
  constexpr int kMemoryType = 2, kIsManaged = 8;  // CU_POINTER_ATTRIBUTE_*
  constexpr unsigned kDeviceMemory = 2;           // CU_MEMORYTYPE_DEVICE
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return false;
  const auto query = reinterpret_cast<Query>(dlsym(driver, "cuPointerGetAttribute"));
  unsigned type = 0;
  unsigned managed = 0;
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const bool is_known = query != nullptr && query(&type, kMemoryType, at) == 0;
  if (is_known) (void)query(&managed, kIsManaged, at);
  dlclose(driver);
  return is_known && type == kDeviceMemory && managed == 0;
}

// ---------------------------------------------------------------------------------------------------------
// Memory
// ---------------------------------------------------------------------------------------------------------

Result<Buffer> Buffer::allocate(Device device, std::int64_t bytes, std::string_view what) {
  Buffer buffer;
  buffer.device_ = device;
  if (bytes == 0) return buffer;
  const Current current(device);
  SLUICE_TRY(current.status());
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, static_cast<std::size_t>(bytes));
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    return Status(StatusCode::kOutOfMemory, fmt::format("{} needs {} bytes on GPU {}, {} of its {} bytes are free",
                                                        what, bytes, device.index, free_bytes, total_bytes));
  }
  SLUICE_CUDA_TRY(error, fmt::format("cudaMalloc for {}", what));
  buffer.data_ = static_cast<std::byte*>(data);
  buffer.bytes_ = bytes;
  return buffer;
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  const Current current(device_);
  (void)cudaFree(data_);  // fails when the process is ending and CUDA went first; nothing is lost then
}

namespace {

Status copy(Device device, void* to, const void* from, std::int64_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return Status::ok();
  const Current current(device);
  SLUICE_TRY(current.status());
  return report(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), kind), "cudaMemcpy");
}

}  // namespace

Status copy_to_device(Device device, void* to, const void* from, std::int64_t bytes) {
  SLUICE_TRY(copy(device, to, from, bytes, cudaMemcpyHostToDevice));
  return synchronise(device);  // from pageable memory the call may return before the last bytes arrived
}

Status copy_to_host(Device device, void* to, const void* from, std::int64_t bytes) {
  return copy(device, to, from, bytes, cudaMemcpyDeviceToHost);
}

Status fill_bytes(Device device, void* to, int byte, std::int64_t bytes) {
  if (bytes == 0) return Status::ok();
  {
    const Current current(device);
    SLUICE_TRY(current.status());
    SLUICE_CUDA_TRY(cudaMemset(to, byte, static_cast<std::size_t>(bytes)), "cudaMemset");
  }
  return synchronise(device);
}

Status synchronise(Device device) {
  const Current current(device);
  SLUICE_TRY(current.status());
  return report(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

struct Uploader::State {
  static constexpr std::int64_t kChunkBytes = 16 << 20;  // large enough for full PCIe speed, small beside any layer
  Device device;
  cudaStream_t stream = nullptr;
  std::array<void*, 2> pinned{};
  std::array<cudaEvent_t, 2> sent{};
  std::size_t next = 0;

  ~State() {
    const Current current(device);
    if (stream != nullptr) (void)cudaStreamSynchronize(stream);
    for (void* p : pinned) (void)cudaFreeHost(p);
    for (cudaEvent_t e : sent) {
      if (e != nullptr) (void)cudaEventDestroy(e);
    }
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
};

Uploader::Uploader(std::unique_ptr<State> state) : state_(std::move(state)) {}
Uploader::Uploader(Uploader&&) noexcept = default;
Uploader::~Uploader() = default;

Result<Uploader> Uploader::create(Device device) {
  const Current current(device);
  SLUICE_TRY(current.status());
  auto state = std::make_unique<State>();
  state->device = device;
  SLUICE_CUDA_TRY(cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking), "cudaStreamCreate");
  for (std::size_t i = 0; i < state->pinned.size(); ++i) {
    SLUICE_CUDA_TRY(cudaMallocHost(&state->pinned[i], State::kChunkBytes), "cudaMallocHost of a staging buffer");
    SLUICE_CUDA_TRY(cudaEventCreateWithFlags(&state->sent[i], cudaEventDisableTiming), "cudaEventCreate");
  }
  return Uploader(std::move(state));
}

Status Uploader::copy(std::string_view what, std::byte* to, const std::byte* from, std::int64_t bytes,
                      const std::function<bool(std::int64_t)>& step) {
  State& s = *state_;
  const Current current(s.device);
  SLUICE_TRY(current.status());
  for (std::int64_t at = 0; at < bytes; at += State::kChunkBytes) {
    const std::int64_t count = std::min(bytes - at, State::kChunkBytes);
    const auto size = static_cast<std::size_t>(count);
    SLUICE_CUDA_TRY(cudaEventSynchronize(s.sent[s.next]), what);
    std::memcpy(s.pinned[s.next], from + at, size);
    SLUICE_CUDA_TRY(cudaMemcpyAsync(to + at, s.pinned[s.next], size, cudaMemcpyHostToDevice, s.stream), what);
    SLUICE_CUDA_TRY(cudaEventRecord(s.sent[s.next], s.stream), what);
    s.next = 1 - s.next;
    if (!step(count)) return {StatusCode::kIoError, fmt::format("{}: the upload was stopped", what)};
  }
  return Status::ok();
}

Status Uploader::finish() {
  const Current current(state_->device);
  return report(cudaStreamSynchronize(state_->stream), "upload");
}

Current::Current(Device device) {
  if (device.kind != DeviceKind::kCuda) return;
  int previous = -1;
  cudaError_t error = cudaGetDevice(&previous);
  if (error == cudaSuccess && previous != device.index) {
    error = cudaSetDevice(device.index);
    previous_ = previous;
  }
  status_ = report(error, "cudaSetDevice");
}

Current::~Current() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

// ---------------------------------------------------------------------------------------------------------
// Timing
// ---------------------------------------------------------------------------------------------------------

struct Graph::State {
  Device device;
  cudaStream_t stream = nullptr;
  cudaGraphExec_t graph = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;

  ~State() {
    const Current current(device);
    if (graph != nullptr) (void)cudaGraphExecDestroy(graph);
    if (begin != nullptr) (void)cudaEventDestroy(begin);
    if (end != nullptr) (void)cudaEventDestroy(end);
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
};

Graph::Graph(std::unique_ptr<State> state) : state_(std::move(state)) {}
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
Graph::~Graph() = default;

Result<Graph> Graph::capture(Device device, const std::function<Status(void*)>& body) {
  const Current current(device);
  SLUICE_TRY(current.status());
  auto state = std::make_unique<State>();
  state->device = device;
  SLUICE_CUDA_TRY(cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking), "cudaStreamCreate");
  SLUICE_CUDA_TRY(cudaEventCreate(&state->begin), "cudaEventCreate");
  SLUICE_CUDA_TRY(cudaEventCreate(&state->end), "cudaEventCreate");
  SLUICE_CUDA_TRY(cudaStreamBeginCapture(state->stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  const Status recorded = body(state->stream);
  cudaGraph_t graph = nullptr;
  const cudaError_t error = cudaStreamEndCapture(state->stream, &graph);
  if (!recorded.is_ok() || error != cudaSuccess) {
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    SLUICE_TRY(recorded);
    return report(error, "cudaStreamEndCapture");
  }
  const cudaError_t made = cudaGraphInstantiate(&state->graph, graph, 0);
  (void)cudaGraphDestroy(graph);
  SLUICE_CUDA_TRY(made, "cudaGraphInstantiate");
  return Graph(std::move(state));
}

Result<double> Graph::replay() {
  State& s = *state_;
  const Current current(s.device);
  SLUICE_CUDA_TRY(cudaEventRecord(s.begin, s.stream), "cudaEventRecord");
  SLUICE_CUDA_TRY(cudaGraphLaunch(s.graph, s.stream), "cudaGraphLaunch");
  SLUICE_CUDA_TRY(cudaEventRecord(s.end, s.stream), "cudaEventRecord");
  SLUICE_CUDA_TRY(cudaEventSynchronize(s.end), "replay");
  float milliseconds = 0;
  SLUICE_CUDA_TRY(cudaEventElapsedTime(&milliseconds, s.begin, s.end), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace sluice::device
