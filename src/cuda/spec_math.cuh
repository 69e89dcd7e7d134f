// The specified functions of docs/numerics.md on the device: the same fp32 operations, hence the same bits as on the
// CPU. Every rounding is an intrinsic, so that no compiler flag can contract or approximate one. NaN results are made
// the one specified NaN where a stage stores them (canonical), not in every function.
#pragma once

#include <cstdint>

namespace sluice::cuda {

__device__ __forceinline__ float canonical(float v) { return v == v ? v : __int_as_float(0x7FC00000); }

// exp(x - n ln 2) for |x - n ln 2| <= ln 2 / 2: steps 2 and 4 of docs/numerics.md.
__device__ __forceinline__ float exp_of_rest(float x, float n) {
  float r = __fmaf_rn(n, -__int_as_float(0x3F317200), x);
  r = __fmaf_rn(n, -__int_as_float(0x35BFBE8E), r);
  float p = 1.0f / 5040;
  p = __fmaf_rn(p, r, 1.0f / 720);
  p = __fmaf_rn(p, r, 1.0f / 120);
  p = __fmaf_rn(p, r, 1.0f / 24);
  p = __fmaf_rn(p, r, 1.0f / 6);
  p = __fmaf_rn(p, r, 1.0f / 2);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  return p;
}

__device__ __forceinline__ float spec_exp(float x) {
  const float n = rintf(__fmul_rn(x, __int_as_float(0x3FB8AA3B)));
  const float p = exp_of_rest(x, n);
  const int whole = static_cast<int>(n);  // |n| <= 150 where the result is used
  const int half = whole >> 1;
  const float scaled =
      __fmul_rn(__fmul_rn(p, __int_as_float((half + 127) << 23)), __int_as_float((whole - half + 127) << 23));
  if (x > 88.72283935546875f) return __int_as_float(0x7F800000);
  if (x < -103.97208404541015625f) return 0.0f;
  return scaled;  // NaN stays NaN
}

__device__ __forceinline__ float spec_sigmoid(float x) {
  const float e = spec_exp(-fabsf(x));
  return __fdiv_rn(x >= 0.0f ? 1.0f : e, __fadd_rn(1.0f, e));
}

__device__ __forceinline__ float spec_softplus(float x) {
  const float u = spec_exp(-fabsf(x));
  const float t = __fdiv_rn(__fadd_rn(u, u), __fadd_rn(2.0f, u));
  const float s = __fmul_rn(t, 0.5f);
  const float z = __fmul_rn(s, s);
  float q = 1.0f / 17;
  q = __fmaf_rn(q, z, 1.0f / 15);
  q = __fmaf_rn(q, z, 1.0f / 13);
  q = __fmaf_rn(q, z, 1.0f / 11);
  q = __fmaf_rn(q, z, 1.0f / 9);
  q = __fmaf_rn(q, z, 1.0f / 7);
  q = __fmaf_rn(q, z, 1.0f / 5);
  q = __fmaf_rn(q, z, 1.0f / 3);
  const float log1p_u = __fmaf_rn(__fmul_rn(t, z), q, t);
  return __fadd_rn(x > 0.0f ? x : 0.0f, log1p_u);
}

__device__ __forceinline__ float spec_sqrt_softplus(float x) { return __fsqrt_rn(spec_softplus(x)); }

__device__ __forceinline__ float spec_silu(float g) { return __fmul_rn(g, spec_sigmoid(g)); }

}  // namespace sluice::cuda
