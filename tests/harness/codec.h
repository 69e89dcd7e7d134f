// What the bytes of each dtype mean, written for the tests alone: one plain scalar conversion per direction, sharing
// nothing with the library's codecs, so that neither can hide a mistake of the other.
#pragma once

#include <cstdint>

#include "sluice/core.h"

namespace sluice::test {

// Value of an element, given its bytes as an unsigned integer. Exact for every dtype but i64 and u64 beyond 2^53.
double decode(DType dtype, std::uint64_t bits);

// Bytes of `value`: round to nearest, ties to even, one rounding from double. Overflow: e4m3 saturates (it has no
// infinity), f32, bf16, f16 and e5m2 become infinite, integers clamp. e8m0 takes the least power of two >= value.
// NaN keeps its sign and becomes the quiet NaN of the format (e4m3: 0x7F or 0xFF); in an integer it becomes 0.
std::uint64_t encode(DType dtype, double value);

// One element, wherever it lies.
std::uint64_t load_bits(DType dtype, const void* element);
void store_bits(DType dtype, void* element, std::uint64_t bits);

inline float bf16_to_float(std::uint16_t bits) { return static_cast<float>(decode(DType::kBF16, bits)); }
inline std::uint16_t float_to_bf16(float value) { return static_cast<std::uint16_t>(encode(DType::kBF16, value)); }
inline float f16_to_float(std::uint16_t bits) { return static_cast<float>(decode(DType::kF16, bits)); }
inline std::uint16_t float_to_f16(float value) { return static_cast<std::uint16_t>(encode(DType::kF16, value)); }
inline float e4m3_to_float(std::uint8_t bits) { return static_cast<float>(decode(DType::kE4M3, bits)); }
inline std::uint8_t float_to_e4m3(float value) { return static_cast<std::uint8_t>(encode(DType::kE4M3, value)); }
inline float e8m0_to_float(std::uint8_t bits) { return static_cast<float>(decode(DType::kE8M0, bits)); }
inline std::uint8_t float_to_e8m0(float value) { return static_cast<std::uint8_t>(encode(DType::kE8M0, value)); }

}  // namespace sluice::test
