// The specified score functions of docs/numerics.md for SIMD code, over any float descriptor: the same bits on
// every target, lane count and machine, and the same bits as src/reference/spec_math.h.
//
// Include from a .cpp after foreach_target.h and highway.h, like any -inl.h.

#if defined(SLUICE_CPU_SCORE_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_CPU_SCORE_MATH_INL_H_
#undef SLUICE_CPU_SCORE_MATH_INL_H_
#else
#define SLUICE_CPU_SCORE_MATH_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {

// fma(a, b, c) with one rounding. Highway's MulAdd rounds twice where the target has no such instruction; the
// lanes then go through libm, which is slow and right: routing must not depend on the machine.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V SpecFma(D d, V a, V b, V c) {
  namespace hn = hwy::HWY_NAMESPACE;
#if HWY_NATIVE_FMA
  (void)d;
  return hn::MulAdd(a, b, c);
#else
  constexpr size_t kMax = HWY_MAX_BYTES / sizeof(float);
  HWY_ALIGN float a_lanes[kMax];
  HWY_ALIGN float b_lanes[kMax];
  HWY_ALIGN float c_lanes[kMax];
  hn::Store(a, d, a_lanes);
  hn::Store(b, d, b_lanes);
  hn::Store(c, d, c_lanes);
  for (size_t i = 0; i < hn::Lanes(d); ++i) c_lanes[i] = std::fma(a_lanes[i], b_lanes[i], c_lanes[i]);
  return hn::Load(d, c_lanes);
#endif
}

// Every NaN becomes 0x7FC00000: which operand's payload and sign survive an operation is not specified.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V SpecCanonicalNaN(D d, V v) {
  namespace hn = hwy::HWY_NAMESPACE;
  const V nan = hn::BitCast(d, hn::Set(hn::RebindToUnsigned<D>(), uint32_t{0x7FC00000u}));
  return hn::IfThenElse(hn::Eq(v, v), v, nan);
}

template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V SpecExp(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToSigned<D> di;
  using VI = hn::Vec<hn::RebindToSigned<D>>;
  const V max_x = hn::Set(d, 88.72283935546875f);
  const V min_x = hn::Set(d, -103.97208404541015625f);
  // Keeps n small for lanes that are replaced below, NaN lanes included.
  const V safe = hn::IfThenElse(hn::Le(x, max_x), hn::IfThenElse(hn::Ge(x, min_x), x, min_x), max_x);
  // Adding 1.5 * 2^23 rounds to the nearest even integer and leaves it in the low mantissa bits. hn::NearestInt
  // is not exact on Highway's emulated target (0.49999997 becomes 1).
  const V magic = hn::Set(d, 12582912.0f);
  const V shifted = hn::Add(hn::Mul(safe, hn::Set(d, 1.44269502162933349609375f)), magic);
  const V n = hn::Sub(shifted, magic);
  const VI n_int = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
  V r = SpecFma(d, n, hn::Set(d, -0.693145751953125f), safe);
  r = SpecFma(d, n, hn::Set(d, -1.42860676533018704503775e-6f), r);
  V p = hn::Set(d, 1.0f / 5040.0f);
  p = SpecFma(d, p, r, hn::Set(d, 1.0f / 720.0f));
  p = SpecFma(d, p, r, hn::Set(d, 1.0f / 120.0f));
  p = SpecFma(d, p, r, hn::Set(d, 1.0f / 24.0f));
  p = SpecFma(d, p, r, hn::Set(d, 1.0f / 6.0f));
  p = SpecFma(d, p, r, hn::Set(d, 0.5f));
  p = SpecFma(d, p, r, hn::Set(d, 1.0f));
  p = SpecFma(d, p, r, hn::Set(d, 1.0f));
  // 2^n in two factors, as n reaches 128 and -150; the second product rounds once when it is subnormal.
  const VI bias = hn::Set(di, 127);
  const VI n1 = hn::ShiftRight<1>(n_int);
  const VI n2 = hn::Sub(n_int, n1);
  const V scale1 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n1, bias)));
  const V scale2 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n2, bias)));
  V y = hn::Mul(hn::Mul(p, scale1), scale2);
  const V inf = hn::BitCast(d, hn::Set(hn::RebindToUnsigned<D>(), uint32_t{0x7F800000u}));
  y = hn::IfThenElse(hn::Gt(x, max_x), inf, y);
  y = hn::IfThenElse(hn::Lt(x, min_x), hn::Zero(d), y);
  return SpecCanonicalNaN(d, hn::IfThenElse(hn::Eq(x, x), y, x));
}

template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V SpecSigmoid(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const V one = hn::Set(d, 1.0f);
  const V e = SpecExp(d, hn::Neg(hn::Abs(x)));
  // One division serves both signs; -0 counts as >= 0.
  const V numerator = hn::IfThenElse(hn::Ge(x, hn::Zero(d)), one, e);
  return SpecCanonicalNaN(d, hn::Div(numerator, hn::Add(one, e)));
}

template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V SpecSoftplus(D d, V x) {
  namespace hn = hwy::HWY_NAMESPACE;
  const V u = SpecExp(d, hn::Neg(hn::Abs(x)));
  // t before s: a subnormal u would lose its last bit in u / 2.
  const V t = hn::Div(hn::Add(u, u), hn::Add(hn::Set(d, 2.0f), u));
  const V s = hn::Mul(hn::Set(d, 0.5f), t);
  const V z = hn::Mul(s, s);
  V q = hn::Set(d, 1.0f / 17.0f);
  q = SpecFma(d, q, z, hn::Set(d, 1.0f / 15.0f));
  q = SpecFma(d, q, z, hn::Set(d, 1.0f / 13.0f));
  q = SpecFma(d, q, z, hn::Set(d, 1.0f / 11.0f));
  q = SpecFma(d, q, z, hn::Set(d, 1.0f / 9.0f));
  q = SpecFma(d, q, z, hn::Set(d, 1.0f / 7.0f));
  q = SpecFma(d, q, z, hn::Set(d, 1.0f / 5.0f));
  q = SpecFma(d, q, z, hn::Set(d, 1.0f / 3.0f));
  const V log1p = SpecFma(d, hn::Mul(t, z), q, t);
  const V positive_part = hn::IfThenElse(hn::Gt(x, hn::Zero(d)), x, hn::Zero(d));
  return SpecCanonicalNaN(d, hn::Add(positive_part, log1p));
}

template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V SpecSqrtSoftplus(D d, V x) {
  return SpecCanonicalNaN(d, hwy::HWY_NAMESPACE::Sqrt(SpecSoftplus(d, x)));
}

template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V SpecSilu(D d, V g) {
  // -inf * 0 is a NaN whose sign differs between machines.
  return SpecCanonicalNaN(d, hwy::HWY_NAMESPACE::Mul(g, SpecSigmoid(d, g)));
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#endif  // SLUICE_CPU_SCORE_MATH_INL_H_
