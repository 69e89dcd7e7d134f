// Up to 128 columns of a row at a time, through a buffer of 128 f32 in L1: load, quantise, store. A shorter last
// block is padded with zeros in the buffer, so that loops run over whole vectors, no row is read or written past
// its end, and what lies past it never enters an amax.

#if defined(SLUICE_CPU_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_CPU_COLUMNS_INL_H_
#undef SLUICE_CPU_COLUMNS_INL_H_
#else
#define SLUICE_CPU_COLUMNS_INL_H_
#endif

#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu/bf16-inl.h"
#include "cpu/e4m3_encode-inl.h"
#include "hwy/highway.h"
#include "sluice/config.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {

inline constexpr size_t kColumns = 128;
// At most a quarter of a block, so that loops may take four vectors at a time.
using ColumnTag = hwy::HWY_NAMESPACE::CappedTag<float, kColumns / 4>;

HWY_INLINE hwy::HWY_NAMESPACE::Vec<ColumnTag> LoadAsF32(ColumnTag d, const uint16_t* from) { return LoadBF16(d, from); }
HWY_INLINE hwy::HWY_NAMESPACE::Vec<ColumnTag> LoadAsF32(ColumnTag d, const float* from) {
  return hwy::HWY_NAMESPACE::LoadU(d, from);
}
HWY_INLINE void StoreFromF32(ColumnTag d, hwy::HWY_NAMESPACE::Vec<ColumnTag> v, uint16_t* to) { StoreBF16(d, v, to); }
HWY_INLINE void StoreFromF32(ColumnTag d, hwy::HWY_NAMESPACE::Vec<ColumnTag> v, float* to) {
  hwy::HWY_NAMESPACE::StoreU(v, d, to);
}

// `from` itself for a whole block, else a copy in `padded` with zeros behind its n columns.
template <class T>
HWY_INLINE const T* WholeBlock(const T* from, size_t n, T* padded) {
  if (HWY_LIKELY(n == kColumns)) return from;
  std::memcpy(padded, from, n * sizeof(T));
  std::memset(padded + n, 0, (kColumns - n) * sizeof(T));
  return padded;
}

// buffer[i] = from[i], exact; T is uint16_t (bf16) or float.
template <class T>
HWY_INLINE void LoadColumns(const T* from, size_t n, float* HWY_RESTRICT buffer) {
  const ColumnTag d;
  HWY_ALIGN T padded[kColumns];
  from = WholeBlock(from, n, padded);
  for (size_t i = 0; i < kColumns; i += hwy::HWY_NAMESPACE::Lanes(d)) {
    hwy::HWY_NAMESPACE::Store(LoadAsF32(d, from + i), d, buffer + i);
  }
}

// to[i] = round(buffer[i]) for i < n.
template <class T>
HWY_INLINE void StoreColumns(const float* HWY_RESTRICT buffer, size_t n, T* to) {
  const ColumnTag d;
  HWY_ALIGN T padded[kColumns];
  T* const whole = HWY_LIKELY(n == kColumns) ? to : padded;
  for (size_t i = 0; i < kColumns; i += hwy::HWY_NAMESPACE::Lanes(d)) {
    StoreFromF32(d, hwy::HWY_NAMESPACE::Load(d, buffer + i), whole + i);
  }
  if (whole != to) std::memcpy(to, padded, n * sizeof(T));
}

// The largest finite magnitude of the block, 0 where there is none.
HWY_INLINE float AmaxColumns(const float* HWY_RESTRICT buffer) {
  namespace hn = hwy::HWY_NAMESPACE;
  const ColumnTag d;
  const auto inf = hn::BitCast(d, hn::Set(hn::RebindToUnsigned<ColumnTag>(), 0x7F800000u));
  auto largest = hn::Zero(d);
  for (size_t i = 0; i < kColumns; i += hn::Lanes(d)) {
    const auto magnitude = hn::Abs(hn::Load(d, buffer + i));
    largest = hn::Max(largest, hn::IfThenElseZero(hn::Lt(magnitude, inf), magnitude));  // false for NaN
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// The scale of values of this amax whose quantised form reaches `top`: 448 for e4m3, 127 for int8.
HWY_INLINE float ScaleOfAmax(float amax, float top) { return (amax > 1e-10f ? amax : 1e-10f) / top; }

// The scale of a group with this amax in e4m3 or i8, rounded as `format` says.
HWY_INLINE float ScaleOf(float amax, DType dtype, ScaleFormat format) {
  const float scale = ScaleOfAmax(amax, dtype == DType::kI8 ? 127.0f : 448.0f);
  if (format == ScaleFormat::kF32) return scale;
  // Between 2^-43 and 2^120: never subnormal, and the exponent has room to rise. A mantissa carries into it.
  return std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + 0x007FFFFFu) & 0xFF800000u);
}

// to[i] = the i8 byte of clamp(rint(v), -127, 127); 0 for NaN.
HWY_INLINE void StoreI8(ColumnTag d, hwy::HWY_NAMESPACE::Vec<ColumnTag> v, uint8_t* to) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToSigned<ColumnTag> di;
  const hn::Rebind<int8_t, ColumnTag> d8;
  v = hn::IfThenElseZero(hn::Eq(v, v), v);
  v = hn::Min(hn::Max(v, hn::Set(d, -127.0f)), hn::Set(d, 127.0f));
  // The unit in the last place of 1.5 * 2^23 is 1, so the addition rounds to an integer, ties to even, on every target.
  const auto magic = hn::Set(d, 12582912.0f);
  const auto integer = hn::Sub(hn::BitCast(di, hn::Add(v, magic)), hn::BitCast(di, magic));
  hn::StoreU(hn::DemoteTo(d8, integer), d8, reinterpret_cast<int8_t*>(to));
}

// to[i] = the e4m3 or i8 byte of buffer[i] / scale for i < n.
HWY_INLINE void EncodeColumns(const float* HWY_RESTRICT buffer, size_t n, DType dtype, float scale, uint8_t* to) {
  namespace hn = hwy::HWY_NAMESPACE;
  const ColumnTag d;
  const auto divisor = hn::Set(d, scale);
  HWY_ALIGN uint8_t padded[kColumns];
  uint8_t* const whole = HWY_LIKELY(n == kColumns) ? to : padded;
  if (dtype == DType::kI8) {
    for (size_t i = 0; i < kColumns; i += hn::Lanes(d))
      StoreI8(d, hn::Div(hn::Load(d, buffer + i), divisor), whole + i);
  } else {
    for (size_t i = 0; i < kColumns; i += hn::Lanes(d))
      StoreE4M3(d, hn::Div(hn::Load(d, buffer + i), divisor), whole + i);
  }
  if (whole != to) std::memcpy(to, padded, n);
}

HWY_INLINE void EncodeColumns(const float* HWY_RESTRICT buffer, size_t n, float scale, uint8_t* to) {
  EncodeColumns(buffer, n, DType::kE4M3, scale, to);
}
HWY_INLINE void EncodeColumns(const float* HWY_RESTRICT buffer, size_t n, float scale, int8_t* to) {
  EncodeColumns(buffer, n, DType::kI8, scale, reinterpret_cast<uint8_t*>(to));
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#endif  // SLUICE_CPU_COLUMNS_INL_H_
