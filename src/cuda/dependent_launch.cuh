// Launches that overlap the start of a kernel with the end of the one before it in the stream (programmatic dependent
// launch, sm_90). It hides a launch, never an order: such a kernel calls wait_for_previous() before it touches memory,
// which returns when everything before it in the stream is complete and visible.
#pragma once

#include "cuda/launch.h"

namespace sluice::cuda {

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may be put onto multiprocessors as soon as every block of this one got here.
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// As launch(), overlapping with the previous kernel where the device can.
template <class Params>
Status launch_after(std::string_view name, void (*kernel)(Params), dim3 grid, dim3 block, std::size_t shared_bytes,
                    cudaStream_t stream, const Params& params) {
  int device = 0;
  int major = 0;
  SLUICE_TRY(to_status(cudaGetDevice(&device), name));
  SLUICE_TRY(to_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), name));
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[1] = {};
  config.attrs = attributes;
  if (major >= 9) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  return to_status(cudaLaunchKernelEx(&config, kernel, params), name);
}

}  // namespace sluice::cuda
