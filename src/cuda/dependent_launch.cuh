// Launches that overlap the start of a kernel with the end of the one before it in the stream (programmatic dependent
// launch, sm_90). It hides a launch, never an order: such a kernel calls wait_for_previous() before it touches memory that
// the kernel before it may touch, which returns when everything before it in the stream is complete and visible.
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
// Both, for kernels that have nothing else to do in between.
__device__ __forceinline__ void follow_previous() {
  wait_for_previous();
  allow_next();
}

// As launch(), overlapping with the previous kernel where the device can.
template <class Params>
Status launch_after(std::string_view name, void (*kernel)(Params), dim3 grid, dim3 block, std::size_t shared_bytes,
                    cudaStream_t stream, const Params& params, int cluster = 1) {
  DeviceFacts facts;
  SLUICE_TRY(facts_of_current(facts));
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (facts.capability_major >= 9) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  return launch_with(name, kernel, grid, block, shared_bytes, stream, params, attributes, count);
}

}  // namespace sluice::cuda
