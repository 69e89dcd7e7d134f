// Answers to Impl::can_run that several stages share.
#pragma once

#include "sluice/core.h"
#ifdef SLUICE_WITH_CUDA
#include "device/device.h"
#endif

namespace sluice {

template <class Args>
Status always(const Args&, const Machine&) {
  return Status::ok();
}

#ifdef SLUICE_WITH_CUDA
// On every GPU the portable kernels are compiled for.
template <class Args>
Status on_gpu(const Args&, const Machine& machine) {
  return device::runs_plain_kernels(machine);
}
#endif

}  // namespace sluice
