// GPUs: which there are, and weights on one.
#pragma once

#include <functional>

#include "sluice/weights.h"

namespace sluice {

// Every GPU CUDA shows this process, in the order of their indices; or why none can be used (Machine::detect_cuda).
Result<std::vector<Machine>> cuda_machines();

struct UploadOptions {
  // Called with bytes done and in all, from the calling thread; may be empty.
  std::function<void(std::int64_t done, std::int64_t total)> progress = {};
  // Asked between chunks; true ends the upload with kIoError and frees what was allocated. May be empty.
  std::function<bool()> stop = {};
};

// The same weights on a GPU: every tensor in memory of its own, bits, strides and gaps kept, freed with the last copy of
// the owners. `weights` must be host memory and is not needed afterwards. num_bytes(result) is what it takes, rounded up to
// 512 bytes a tensor by CUDA. Too little memory is kOutOfMemory, naming the tensor, its bytes and the free bytes; nothing
// stays allocated then.
Result<LayerWeights> upload(const LayerWeights& weights, Device device, const UploadOptions& options = {});

}  // namespace sluice
