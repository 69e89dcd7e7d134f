// Scalar conversions of the test harness.
#include "harness/codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace sluice::test {
namespace {

// A binary format narrower than double: sign, exponent, mantissa from the top.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // IEEE rules for the top exponent; otherwise (e4m3) only the all-ones code is NaN
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint64_t sign_bit() const { return std::uint64_t{1} << (exponent_bits + mantissa_bits); }
  std::uint64_t infinity() const { return ((std::uint64_t{1} << exponent_bits) - 1) << mantissa_bits; }
  std::uint64_t largest() const { return has_infinity ? infinity() - 1 : sign_bit() - 2; }
  std::uint64_t quiet_nan() const {
    return has_infinity ? infinity() | (std::uint64_t{1} << (mantissa_bits - 1)) : sign_bit() - 1;
  }
};

constexpr Format kBF16Format{8, 7, true};
constexpr Format kF16Format{5, 10, true};
constexpr Format kE5M2Format{5, 2, true};
constexpr Format kE4M3Format{4, 3, false};

double decode_format(const Format& f, std::uint64_t bits) {
  const bool negative = (bits & f.sign_bit()) != 0;
  const std::uint64_t magnitude = bits & (f.sign_bit() - 1);
  const auto exponent = static_cast<int>(magnitude >> f.mantissa_bits);
  const std::uint64_t mantissa = magnitude & ((std::uint64_t{1} << f.mantissa_bits) - 1);
  double value = 0;
  if (magnitude > f.largest()) {
    value = f.has_infinity && magnitude == f.infinity() ? std::numeric_limits<double>::infinity()
                                                        : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<double>(mantissa), 1 - f.bias() - f.mantissa_bits);
  } else {
    const std::uint64_t significand = mantissa | (std::uint64_t{1} << f.mantissa_bits);
    value = std::ldexp(static_cast<double>(significand), exponent - f.bias() - f.mantissa_bits);
  }
  return std::copysign(value, negative ? -1.0 : 1.0);
}

std::uint64_t encode_format(const Format& f, double value) {
  const std::uint64_t sign = std::signbit(value) ? f.sign_bit() : 0;
  if (std::isnan(value)) return sign | f.quiet_nan();
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | (f.has_infinity ? f.infinity() : f.largest());
  // The spacing of the format at this magnitude; below the smallest normal it stays what it is there. Dividing by
  // a power of two is exact, so the only rounding is rint's.
  const int exponent = std::max(std::ilogb(magnitude), 1 - f.bias());
  const auto steps = static_cast<std::uint64_t>(std::rint(std::ldexp(magnitude, f.mantissa_bits - exponent)));
  const std::uint64_t one = std::uint64_t{1} << f.mantissa_bits;
  // A subnormal's steps are its code. A normal's carry (steps == 2 * one) runs into the exponent by itself.
  const std::uint64_t code =
      steps < one ? steps : (static_cast<std::uint64_t>(exponent + f.bias()) << f.mantissa_bits) + (steps - one);
  if (code > f.largest()) return sign | (f.has_infinity ? f.infinity() : f.largest());
  return sign | code;
}

template <class T>
std::uint64_t encode_integer(double value) {
  if (std::isnan(value)) return 0;
  const double rounded = std::rint(value);
  T result{};
  if (rounded <= static_cast<double>(std::numeric_limits<T>::min())) {
    result = std::numeric_limits<T>::min();
  } else if (rounded >= static_cast<double>(std::numeric_limits<T>::max())) {
    result = std::numeric_limits<T>::max();
  } else {
    result = static_cast<T>(rounded);
  }
  return static_cast<std::uint64_t>(result);
}

std::uint64_t encode_e8m0(double value) {
  if (std::isnan(value) || value < 0) return 255;
  if (value == 0) return 0;
  if (std::isinf(value)) return 254;
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);  // in [0.5, 1)
  const int code = (fraction == 0.5 ? exponent - 1 : exponent) + 127;
  return static_cast<std::uint64_t>(std::min(std::max(code, 0), 254));
}

}  // namespace

double decode(DType dtype, std::uint64_t bits) {
  switch (dtype) {
    case DType::kF32: return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    case DType::kF64: return std::bit_cast<double>(bits);
    case DType::kBF16: return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);  // the top half of an fp32
    case DType::kF16: return decode_format(kF16Format, bits);
    case DType::kE4M3: return decode_format(kE4M3Format, bits);
    case DType::kE5M2: return decode_format(kE5M2Format, bits);
    case DType::kE8M0:
      return bits == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, static_cast<int>(bits) - 127);
    case DType::kI8: return static_cast<std::int8_t>(bits);
    case DType::kI16: return static_cast<std::int16_t>(bits);
    case DType::kI32: return static_cast<std::int32_t>(bits);
    case DType::kI64: return static_cast<double>(static_cast<std::int64_t>(bits));
    case DType::kU8:
    case DType::kU16:
    case DType::kU32:
    case DType::kU64:
    case DType::kBool: return static_cast<double>(bits);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

std::uint64_t encode(DType dtype, double value) {
  switch (dtype) {
    case DType::kF32: return std::bit_cast<std::uint32_t>(static_cast<float>(value));
    case DType::kF64: return std::bit_cast<std::uint64_t>(value);
    case DType::kBF16: return encode_format(kBF16Format, value);
    case DType::kF16: return encode_format(kF16Format, value);
    case DType::kE4M3: return encode_format(kE4M3Format, value);
    case DType::kE5M2: return encode_format(kE5M2Format, value);
    case DType::kE8M0: return encode_e8m0(value);
    case DType::kI8: return encode_integer<std::int8_t>(value) & 0xFF;
    case DType::kI16: return encode_integer<std::int16_t>(value) & 0xFFFF;
    case DType::kI32: return encode_integer<std::int32_t>(value) & 0xFFFFFFFF;
    case DType::kI64: return encode_integer<std::int64_t>(value);
    case DType::kU8: return encode_integer<std::uint8_t>(value);
    case DType::kU16: return encode_integer<std::uint16_t>(value);
    case DType::kU32: return encode_integer<std::uint32_t>(value);
    case DType::kU64: return encode_integer<std::uint64_t>(value);
    case DType::kBool: return value != 0 ? 1 : 0;
  }
  return 0;
}

// memcpy into the low bytes: every machine the project runs on is little-endian.
static_assert(std::endian::native == std::endian::little);

std::uint64_t load_bits(DType dtype, const void* element) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, element, static_cast<std::size_t>(size_bytes(dtype)));
  return bits;
}

void store_bits(DType dtype, void* element, std::uint64_t bits) {
  std::memcpy(element, &bits, static_cast<std::size_t>(size_bytes(dtype)));
}

}  // namespace sluice::test
