// Device guard and error texts.
#include "cuda/launch.h"

#include <fmt/format.h>

namespace sluice::cuda {

Status to_status(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return Status::ok();
  return {StatusCode::kInternal,
          fmt::format("cuda: {}: {} ({})", what, cudaGetErrorName(error), cudaGetErrorString(error))};
}

DeviceGuard::DeviceGuard(int device) : device_(device) {
  error_ = cudaGetDevice(&previous_);
  if (error_ == cudaSuccess && previous_ != device) error_ = cudaSetDevice(device);
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0 && previous_ != device_) cudaSetDevice(previous_);
}

}  // namespace sluice::cuda
