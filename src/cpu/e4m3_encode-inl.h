// f32 -> e4m3 for SIMD code, as docs/numerics.md specifies it: nearest even, saturating at 448, NaN kept with its
// sign, subnormals exact.

#if defined(SLUICE_CPU_E4M3_ENCODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_CPU_E4M3_ENCODE_INL_H_
#undef SLUICE_CPU_E4M3_ENCODE_INL_H_
#else
#define SLUICE_CPU_E4M3_ENCODE_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {

// The e4m3 byte of each lane, in the low quarter of 32 bits.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<hwy::HWY_NAMESPACE::RebindToSigned<D>> E4M3Bits(D d, V v) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const auto sign = hn::BitCast(di, hn::ShiftLeft<7>(hn::ShiftRight<31>(hn::BitCast(du, v))));
  const V magnitude_value = hn::Abs(v);
  const auto magnitude = hn::BitCast(di, magnitude_value);

  // Normal results: keep 3 of 23 mantissa bits, then move the exponent's bias from 127 to 7. A carry out of the
  // mantissa raises the exponent, which is the right neighbour. NaN wraps to a negative number and is replaced.
  const auto odd = hn::And(hn::ShiftRight<20>(magnitude), hn::Set(di, 1));
  const auto rounded = hn::ShiftRight<20>(hn::Add(magnitude, hn::Add(odd, hn::Set(di, 0x7FFFF))));
  const auto normal = hn::Min(hn::Sub(rounded, hn::Set(di, (127 - 7) << 3)), hn::Set(di, 0x7E));

  // Below 2^-6 the result is a count of 2^-9: the unit in the last place of 2^14, so the addition rounds to it.
  const V two_14 = hn::Set(d, 16384.0f);
  const auto subnormal = hn::Sub(hn::BitCast(di, hn::Add(magnitude_value, two_14)), hn::BitCast(di, two_14));

  auto byte = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, (127 - 6) << 23)), subnormal, normal);
  byte = hn::IfThenElse(hn::RebindMask(di, hn::Eq(v, v)), byte, hn::Set(di, 0x7F));
  return hn::Or(byte, sign);
}

// Lanes(d) bytes to any address.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE void StoreE4M3(D d, V v, uint8_t* HWY_RESTRICT to) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Rebind<uint8_t, D> du8;
  hn::StoreU(hn::DemoteTo(du8, E4M3Bits(d, v)), du8, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#endif  // SLUICE_CPU_E4M3_ENCODE_INL_H_
