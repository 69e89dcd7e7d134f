// Tensor maps (what TMA reads to find a tile), made without linking the driver.
#pragma once

#include <cuda.h>

#include <string_view>

#include "sluice/core.h"

namespace sluice::cuda {

// Of a [rows, columns] bf16 view: boxes of 128 bytes of columns by `box_rows`, in the 128-byte swizzle. Elements outside
// the view arrive as zeros. The view's address and row pitch must be multiples of 16 bytes.
Status make_rows_map(std::string_view what, const TensorView& view, int box_rows, CUtensorMap& map);

}  // namespace sluice::cuda
