// Which rows of an implementation table a test on the CPU runs.
#pragma once

#include <span>

#include "sluice/core.h"

namespace sluice::test {

// The rows of a table that run here: those of a GPU come first.
template <class Args>
std::span<const Impl<Args>> on_cpu(std::span<const Impl<Args>> impls) {
  std::size_t first = 0;
  while (impls[first].device != DeviceKind::kCpu) ++first;
  return impls.subspan(first);
}

}  // namespace sluice::test
