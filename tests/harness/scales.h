// Oracles for activation scales that are powers of two.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

namespace sluice::test {

// The least power of two >= value, found by walking: no exponent fields, no logarithm.
inline float least_power_of_two(float value) {
  double power = 1;
  while (power < static_cast<double>(value)) power *= 2;
  while (power / 2 >= static_cast<double>(value)) power /= 2;
  return static_cast<float>(power);
}

// Whether `scale` is the power of two in [f32_scale, 2 * f32_scale).
inline void expect_rounded_up(float scale, float f32_scale) {
  int exponent = 0;
  EXPECT_EQ(std::frexp(scale, &exponent), 0.5f) << scale << " is no power of two";
  EXPECT_GE(scale, f32_scale);
  EXPECT_LT(scale, 2 * f32_scale);
}

}  // namespace sluice::test
