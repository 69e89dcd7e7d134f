// Where a tensor is: what its view says against where the layer is, and the address against both.
#pragma once

#include <string_view>

#include "sluice/core.h"

namespace sluice {

// Refuses a view that names another device than `device`, and, on a GPU, an address that is not that GPU's memory: host
// memory labelled as device memory would fault inside a kernel, long after the call. Absent and empty tensors pass.
Status check_place(std::string_view where, std::string_view name, const TensorView& view, Device device);
// The same for plain bytes, which carry no label.
Status check_place(std::string_view where, std::string_view name, const void* address, Device device);

}  // namespace sluice
