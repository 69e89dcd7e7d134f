// The specified functions where their argument leaves nothing to guard against: the same bits in half the instructions.
// A caller proves the domain for a whole warp and falls back to spec_math.cuh otherwise.
#pragma once

#include "cuda/spec_math.cuh"

namespace sluice::cuda {

// Inside this nothing below is subnormal, and neither are the residuals of the quotients.
constexpr float kFastLimit = 60.0f;

// exp(x) for -kFastLimit <= x <= 0. Adding 1.5 * 2^23 rounds to the nearest even integer, as rintf does, and leaves it in
// the low mantissa bits, from where it goes into p's exponent: an exact multiplication, as the result is normal.
__device__ __forceinline__ float fast_exp(float x) {
  constexpr float kShift = 12582912.0f;
  const float shifted = __fadd_rn(__fmul_rn(x, __int_as_float(0x3FB8AA3B)), kShift);
  const float n = __fsub_rn(shifted, kShift);
  const float p = exp_of_rest(x, n);
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

// a / b for 2^-100 < a <= 2^24 and 1 <= b <= 2^24, with y = RN(1/b) made once. The first step leaves the quotient within
// one unit in the last place; from there the residual step rounds correctly (Markstein).
__device__ __forceinline__ float fast_divide(float a, float b, float y) {
  float q = __fmul_rn(a, y);
  q = __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
}

// sigmoid(x) for |x| <= kFastLimit. On sm_90 one residual step after a Newton step on the approximate reciprocal gives the
// IEEE quotient for every float of the domain (tests/gpu/fast_math_cuda_test.cu compares all of them); other
// architectures have another approximate reciprocal and divide.
__device__ __forceinline__ float fast_sigmoid(float x) {
  const float e = fast_exp(-fabsf(x));
  const float d = __fadd_rn(1.0f, e);
  const float a = x >= 0.0f ? 1.0f : e;
#if __CUDA_ARCH__ == 900
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
  y = __fmaf_rn(__fmaf_rn(-d, y, 1.0f), y, y);
  const float q = __fmul_rn(a, y);
  return __fmaf_rn(__fmaf_rn(-d, q, a), y, q);
#else
  return __fdiv_rn(a, d);
#endif
}

// sigmoid(x) for every x, without a branch: for a warp whose arguments are all over the place. Its exponential has the two
// scalings of spec_exp; from |x| = 18 on the divisor is 1 and the dividend the quotient, below that nothing is subnormal.
__device__ __forceinline__ float any_sigmoid(float x) {
  constexpr float kShift = 12582912.0f;
  float magnitude = fabsf(x);
  if (magnitude > 104.0f) magnitude = 104.0f;  // e is zero from 103.98 on; NaN stays
  const float shifted = __fadd_rn(__fmul_rn(-magnitude, __int_as_float(0x3FB8AA3B)), kShift);
  const float p = exp_of_rest(-magnitude, __fsub_rn(shifted, kShift));
  const int whole = __float_as_int(shifted) - __float_as_int(kShift);
  const int half = whole >> 1;
  float e = __fmul_rn(__fmul_rn(p, __int_as_float((half + 127) << 23)), __int_as_float((whole - half + 127) << 23));
  if (-magnitude < -103.97208404541015625f) e = 0.0f;
  const float d = __fadd_rn(1.0f, e);
  const float a = x >= 0.0f ? 1.0f : e;
#if __CUDA_ARCH__ == 900
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
  y = __fmaf_rn(__fmaf_rn(-d, y, 1.0f), y, y);
  const float q = __fmul_rn(a, y);
  return d == 1.0f ? a : __fmaf_rn(__fmaf_rn(-d, q, a), y, q);
#else
  return __fdiv_rn(a, d);
#endif
}

}  // namespace sluice::cuda
