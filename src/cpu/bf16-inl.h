// bf16 <-> f32 for SIMD code: nearest even, overflow to infinity, NaN kept and made quiet. The same bits on every
// target; Highway's own conversion truncates where the machine has no instruction for it.

#if defined(SLUICE_CPU_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_CPU_BF16_INL_H_
#undef SLUICE_CPU_BF16_INL_H_
#else
#define SLUICE_CPU_BF16_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {

// Lanes(d) values from any address; exact.
template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> LoadBF16(D d, const uint16_t* HWY_RESTRICT from) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> du16;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from))));
}

// The bf16 bits of each lane, in the low half of 32.
template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<hwy::HWY_NAMESPACE::RebindToUnsigned<D>> BF16Bits(D, V v) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, v);
  const auto high = hn::ShiftRight<16>(bits);
  // Just under half a unit, plus one more where the kept part is odd: exact halves then go to even.
  const auto bump = hn::Add(hn::Set(du, 0x7FFFu), hn::And(high, hn::Set(du, 1u)));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, bump));
  // The bump could carry a NaN's payload into its sign.
  const auto quiet = hn::Or(high, hn::Set(du, 0x40u));
  return hn::IfThenElse(hn::RebindMask(du, hn::Eq(v, v)), rounded, quiet);
}

template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE void StoreBF16(D d, V v, uint16_t* HWY_RESTRICT to) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToSigned<D> di;  // the narrowing from signed lanes is the one Highway 1.0.3 has
  const hn::Rebind<uint16_t, D> du16;
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, BF16Bits(d, v))), du16, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#endif  // SLUICE_CPU_BF16_INL_H_
