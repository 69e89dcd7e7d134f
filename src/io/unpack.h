// From the bytes of a file to the layouts the GEMMs want: exact conversions, dequantisation, transposes, and the order
// of gate and up. Sources may lie at any address; destinations are aligned for their dtype. Functions that see every
// weight return how many of them were NaN.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io/families.h"

namespace sluice::io {

// Row of w13 (gate rows first, then up) that row `n` of a stored [2I, ...] tensor becomes.
std::int64_t w13_row(GateUp order, std::int64_t n, std::int64_t intermediate);

float bf16_value(std::uint16_t bits);
float f16_value(std::uint16_t bits);  // exact
float e4m3_value(std::uint8_t byte);
float e8m0_value(std::uint8_t byte);  // 2^(byte-127); 255 is NaN
std::uint16_t to_bf16(float value);   // nearest even, NaN stays NaN
std::uint8_t to_e4m3(float value);    // nearest even, saturating, NaN is 0x7F with the sign

// `count` elements of dtype f32, bf16, f16, e4m3 or int8, as they are.
std::int64_t copy_elements(DType dtype, const std::byte* src, std::int64_t count, void* dst);
std::int64_t count_nan(DType dtype, const std::byte* src, std::int64_t count);
// f32, bf16, f16 or e8m0 (also as u8) -> f32, exact.
std::int64_t to_f32(DType dtype, const std::byte* src, std::int64_t count, float* dst);

// [rows, cols] -> dst with the columns of src as rows: dst[w13_row(order, c) * dst_stride + r]. `order` is kGateFirst
// with intermediate = 0 for a plain transpose. dtype f32, bf16, or f16 (which becomes f32).
// src may be columns of a wider matrix, `pitch` elements from row to row.
struct Transpose {
  DType dtype = DType::kBF16;
  std::int64_t rows = 0, cols = 0;
  GateUp order = GateUp::kGateFirst;
  std::int64_t intermediate = 0;
  std::int64_t pitch = 0;  // 0: cols
};
std::int64_t transpose(const Transpose& shape, const std::byte* src, void* dst);

// e4m3 [rows, cols] times scale [ceil(rows/128), ceil(cols/128)] -> bf16, rounded once.
std::int64_t dequantise_blocks(const std::byte* src, const float* scale, std::int64_t rows, std::int64_t cols,
                               std::uint16_t* dst);

// e4m3 or int8 [rows, cols] times scale [rows] -> bf16: the f32 product, rounded, as for blocks.
std::int64_t dequantise_channels(DType dtype, const std::byte* src, const float* scale, std::int64_t rows,
                                 std::int64_t cols, std::uint16_t* dst);

// One row of `cols` e4m3 with an e8m0 scale per 32 columns -> bf16. Exact; a value that bf16 cannot hold exactly is
// reported by `exact` = false and must be refused.
struct Dequantised {
  std::int64_t num_nan = 0;
  bool exact = true;
};
Dequantised dequantise_mx_row(const std::byte* src, const std::byte* scale, std::int64_t cols, std::uint16_t* dst);

// One row of MXFP4: cols/2 bytes of e2m1 pairs, the low nibble first, and an e8m0 scale per 32 columns -> bf16, exact.
Dequantised dequantise_mxfp4_row(const std::byte* blocks, const std::byte* scale, std::int64_t cols,
                                 std::uint16_t* dst);

}  // namespace sluice::io
