// What every CUDA implementation needs on the host side: a checked launch, errors with names, what is known of the
// device. The device itself is made current by device::Current (device/device.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>

#include "device/device.h"
#include "sluice/core.h"

namespace sluice::cuda {

// A CUDA error as a Status that names what was called.
Status to_status(cudaError_t error, std::string_view what);

// What launches need to know of a device. Read once a process and device: a forward asks the driver nothing.
struct DeviceFacts {
  int num_sms = 0;
  int capability_major = 0;
};
Status facts_of(int device, DeviceFacts& facts);
// Of the current device.
Status facts_of_current(DeviceFacts& facts);

inline cudaStream_t stream_of(const Ctx& ctx) { return static_cast<cudaStream_t>(ctx.stream); }

// Allows `kernel` on the current device so many bytes of dynamic shared memory. The driver is asked once a kernel and
// device (a process that calls cudaDeviceReset loses what was allowed). Any number of threads may call it.
Status allow_shared_bytes(std::string_view name, const void* kernel, std::size_t bytes);

constexpr std::size_t kUnaskedSharedBytes = 48 << 10;  // what every kernel may have without being allowed it

// Launches `kernel` with one Params struct and says which kernel failed.
template <class Params>
Status launch_with(std::string_view name, void (*kernel)(Params), dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, const Params& params, cudaLaunchAttribute* attributes,
                   unsigned num_attributes) {
  if (shared_bytes > kUnaskedSharedBytes) {
    SLUICE_TRY(allow_shared_bytes(name, reinterpret_cast<const void*>(kernel), shared_bytes));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  return to_status(cudaLaunchKernelEx(&config, kernel, params), name);
}

// The same in clusters of `cluster` blocks.
template <class Params>
Status launch(std::string_view name, void (*kernel)(Params), dim3 grid, dim3 block, std::size_t shared_bytes,
              cudaStream_t stream, const Params& params, int cluster = 1) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  return launch_with(name, kernel, grid, block, shared_bytes, stream, params, &attribute, cluster > 1 ? 1 : 0);
}

}  // namespace sluice::cuda
