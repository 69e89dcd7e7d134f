// Conversions for the reference implementations alone: by searching for the nearest value, not by moving bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace sluice::reference {

inline float f32_from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// The nearer of the two bf16 neighbours, the even one at the same distance. Where the upper one is the infinity it
// stands for 2^128 in the comparison.
inline std::uint16_t bf16_from_f32(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto below = static_cast<std::uint16_t>(bits >> 16);  // towards zero
  if (std::isnan(value)) return static_cast<std::uint16_t>(below | 0x40);
  if (std::isinf(value)) return below;
  const auto above = static_cast<std::uint16_t>(below + 1);
  const double magnitude = std::fabs(static_cast<double>(value));
  const double low = std::fabs(static_cast<double>(f32_from_bf16(below)));
  const double high =
      std::isinf(f32_from_bf16(above)) ? std::ldexp(1.0, 128) : std::fabs(static_cast<double>(f32_from_bf16(above)));
  if (magnitude - low < high - magnitude) return below;
  if (magnitude - low > high - magnitude) return above;
  return below % 2 == 0 ? below : above;
}

// The smallest power of two that is not below a positive value.
inline float power_of_two_from(float value) {
  int exponent = 0;
  const float half_to_one = std::frexp(value, &exponent);
  return half_to_one == 0.5f ? value : std::ldexp(1.0f, exponent);
}

inline double e4m3_value(int code) {  // code 0 to 126, the finite magnitudes
  const int exponent = code / 8;
  const int mantissa = code % 8;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

inline std::uint8_t e4m3_from_f32(float value) {
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7F);
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 448) return static_cast<std::uint8_t>(sign | 0x7E);
  int below = 0;  // the largest code whose value does not exceed the magnitude
  for (int step = 64; step > 0; step /= 2) {
    if (below + step <= 126 && e4m3_value(below + step) <= magnitude) below += step;
  }
  const double to_below = magnitude - e4m3_value(below);
  const double to_above = e4m3_value(below + 1) - magnitude;
  const bool up = to_above < to_below || (to_above == to_below && below % 2 == 1);
  return static_cast<std::uint8_t>(sign | (below + (up ? 1 : 0)));
}

// The byte of the nearest integer in [-127, 127], the even one at the same distance; NaN becomes 0.
inline std::uint8_t i8_from_f32(float value) {
  if (std::isnan(value)) return 0;
  const double clamped = std::fmin(std::fmax(static_cast<double>(value), -127.0), 127.0);
  const double below = std::floor(clamped);
  const double distance = clamped - below;
  const bool up = distance > 0.5 || (distance == 0.5 && std::fmod(below, 2.0) != 0.0);
  const int nearest = static_cast<int>(below) + (up ? 1 : 0);
  return static_cast<std::uint8_t>(nearest < 0 ? nearest + 256 : nearest);
}

}  // namespace sluice::reference
