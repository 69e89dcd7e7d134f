// Tensor maps (what TMA reads to find a tile), made without linking the driver.
#pragma once

#include <cuda.h>

#include <span>
#include <string_view>

#include "sluice/core.h"

namespace sluice::cuda {

// Of a K-major operand: extents and strides (of the outer axes, in bytes) from K outwards; boxes of 128 bytes of K by
// `box_rows` of the next axis and one of any further, in the 128-byte swizzle. Elements outside the extents arrive as
// zeros. The view's address and the strides must be multiples of 16 bytes. bf16, or one-byte elements.
Status make_operand_map(std::string_view what, const TensorView& view, std::span<const cuuint64_t> extent,
                        std::span<const cuuint64_t> stride_bytes, int box_rows, CUtensorMap& map);

// The same of a [rows, columns] view.
Status make_rows_map(std::string_view what, const TensorView& view, int box_rows, CUtensorMap& map);

// Of a bf16 output [rows, parts * part_columns] that is written tile by tile: [parts, part_columns/64, rows, 64], with boxes
// of `box_rows` rows by `box_blocks` blocks of 64 columns of one part, each block in the 128-byte swizzle. part_columns is a
// multiple of 64; blocks behind a part's end are not written.
Status make_output_map(std::string_view what, const TensorView& view, std::int64_t part_columns, std::int64_t parts,
                       int box_blocks, int box_rows, CUtensorMap& map);

}  // namespace sluice::cuda
