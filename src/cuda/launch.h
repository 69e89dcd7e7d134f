// What every CUDA implementation needs on the host side: the right device, a checked launch, errors with names.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string_view>

#include "sluice/core.h"

namespace sluice::cuda {

// A CUDA error as a Status that names what was called.
Status to_status(cudaError_t error, std::string_view what);

// Makes a device current for its lifetime and puts the caller's back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int previous_ = -1;
  int device_ = -1;
  cudaError_t error_ = cudaSuccess;
};

inline cudaStream_t stream_of(const Ctx& ctx) { return static_cast<cudaStream_t>(ctx.stream); }

// Launches `kernel` with one Params struct, in clusters of `cluster` blocks, and says which kernel failed.
template <class Params>
Status launch(std::string_view name, void (*kernel)(Params), dim3 grid, dim3 block, std::size_t shared_bytes,
              cudaStream_t stream, const Params& params, int cluster = 1) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return to_status(cudaLaunchKernelEx(&config, kernel, params), name);
}

}  // namespace sluice::cuda
