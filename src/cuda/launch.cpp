// Error texts, and what the driver is asked only once.
#include "cuda/launch.h"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <mutex>

namespace sluice::cuda {
namespace {

constexpr int kMaxDevices = 16;   // remembered; any further one is asked each time
constexpr int kMaxKernels = 512;  // the same; a power of two
constexpr std::uint32_t kKnown = 1u << 31;

// kKnown, the major version in bits 16 to 30, the multiprocessors below.
std::array<std::atomic<std::uint32_t>, kMaxDevices> known_facts{};

// Bytes that a kernel is allowed on each device. Slots are taken for ever, by the first free one behind the hash.
struct Allowed {
  std::atomic<const void*> kernel{nullptr};
  std::array<std::atomic<std::size_t>, kMaxDevices> bytes{};
};
std::array<Allowed, kMaxKernels> allowed{};
std::mutex allow_mutex;

Allowed* find_allowed(const void* kernel) {
  const std::size_t hash = reinterpret_cast<std::uintptr_t>(kernel) / 16 * 0x9E3779B97F4A7C15u >> 40;
  for (std::size_t i = 0; i < kMaxKernels; ++i) {
    Allowed& slot = allowed[(hash + i) % kMaxKernels];
    const void* holder = slot.kernel.load(std::memory_order_acquire);
    if (holder == nullptr && slot.kernel.compare_exchange_strong(holder, kernel)) return &slot;
    if (holder == kernel) return &slot;
  }
  return nullptr;
}

}  // namespace

Status to_status(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return Status::ok();
  return {StatusCode::kInternal, fmt::format("{}: {} ({})", what, cudaGetErrorName(error), cudaGetErrorString(error))};
}

Status facts_of(int device, DeviceFacts& facts) {
  const bool remembered = device >= 0 && device < kMaxDevices;
  const std::uint32_t known = remembered ? known_facts[static_cast<std::size_t>(device)].load() : 0;
  if (known != 0) {
    facts = {static_cast<int>(known & 0xFFFFu), static_cast<int>((known & ~kKnown) >> 16)};
    return Status::ok();
  }
  DeviceFacts read;
  SLUICE_TRY(to_status(cudaDeviceGetAttribute(&read.num_sms, cudaDevAttrMultiProcessorCount, device),
                       "number of multiprocessors"));
  SLUICE_TRY(to_status(cudaDeviceGetAttribute(&read.capability_major, cudaDevAttrComputeCapabilityMajor, device),
                       "compute capability"));
  if (remembered) {
    known_facts[static_cast<std::size_t>(device)] =
        kKnown | static_cast<std::uint32_t>(read.capability_major) << 16 | static_cast<std::uint32_t>(read.num_sms);
  }
  facts = read;
  return Status::ok();
}

Status facts_of_current(DeviceFacts& facts) {
  int device = 0;
  SLUICE_TRY(to_status(cudaGetDevice(&device), "cudaGetDevice"));
  return facts_of(device, facts);
}

Status allow_shared_bytes(std::string_view name, const void* kernel, std::size_t bytes) {
  int device = 0;
  SLUICE_TRY(to_status(cudaGetDevice(&device), name));
  Allowed* const slot = device < kMaxDevices ? find_allowed(kernel) : nullptr;
  std::atomic<std::size_t>* const most = slot == nullptr ? nullptr : &slot->bytes[static_cast<std::size_t>(device)];
  if (most != nullptr && most->load(std::memory_order_acquire) >= bytes) return Status::ok();
  // One at a time: the driver keeps the last value it was given, which must be the largest one.
  const std::lock_guard lock(allow_mutex);
  if (most != nullptr && most->load(std::memory_order_relaxed) >= bytes) return Status::ok();
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return to_status(error, fmt::format("{}: {} bytes of shared memory", name, bytes));
  }
  if (most != nullptr) most->store(bytes, std::memory_order_release);
  return Status::ok();
}

}  // namespace sluice::cuda
