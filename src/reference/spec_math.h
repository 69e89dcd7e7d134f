// The specified functions of docs/numerics.md as plain scalar code, for the reference implementations and tests.
// Written apart from src/cpu/score_math-inl.h on purpose, in other means where the document allows them (rint,
// ldexp): the two check each other bit by bit.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace sluice::reference {

// The one NaN these functions return.
inline float spec_nan() { return std::bit_cast<float>(std::uint32_t{0x7FC00000}); }

inline float spec_exp(float x) {
  if (std::isnan(x)) return spec_nan();
  if (x > 88.72283935546875f) return std::numeric_limits<float>::infinity();
  if (x < -103.97208404541015625f) return 0.0f;
  const float n = std::rint(x * std::bit_cast<float>(std::uint32_t{0x3FB8AA3B}));
  float r = std::fma(n, -std::bit_cast<float>(std::uint32_t{0x3F317200}), x);
  r = std::fma(n, -std::bit_cast<float>(std::uint32_t{0x35BFBE8E}), r);
  float p = 1.0f / 5040;
  for (float divisor : {720.0f, 120.0f, 24.0f, 6.0f, 2.0f, 1.0f, 1.0f}) p = std::fma(p, r, 1.0f / divisor);
  return std::ldexp(p, static_cast<int>(n));  // exact, or one rounding when subnormal
}

inline float spec_sigmoid(float x) {
  if (std::isnan(x)) return spec_nan();
  const float e = spec_exp(-std::fabs(x));
  return x >= 0 ? 1.0f / (1.0f + e) : e / (1.0f + e);
}

inline float spec_softplus(float x) {
  if (std::isnan(x)) return spec_nan();
  const float u = spec_exp(-std::fabs(x));
  const float t = (u + u) / (2.0f + u);
  const float z = (t / 2) * (t / 2);
  float q = 1.0f / 17;
  for (int odd = 15; odd >= 3; odd -= 2) q = std::fma(q, z, 1.0f / static_cast<float>(odd));
  const float log1p_u = std::fma(t * z, q, t);
  return x > 0 ? x + log1p_u : 0.0f + log1p_u;
}

inline float spec_sqrt_softplus(float x) { return std::isnan(x) ? spec_nan() : std::sqrt(spec_softplus(x)); }

inline float spec_silu(float g) {
  const float y = g * spec_sigmoid(g);
  return std::isnan(y) ? spec_nan() : y;
}

}  // namespace sluice::reference
