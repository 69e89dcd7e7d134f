// e4m3, i8, bf16 and f32 values to exact f32 vectors, along a row or across many rows (one row per lane).
//
// e4m3 -> f32 goes through f16: sign and magnitude placed at bits 15 and 13..7 of an f16 are the value times 2^-8,
// exactly, subnormals included, and F16C converts subnormals at full speed. The alternative, placing the bits in an
// f32 and multiplying by 2^120, takes a microcode assist for every vector with a subnormal (127 cycles where 0.6 is
// normal).

// Highway's per-target include guard.
#if defined(SLUICE_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_CPU_DECODE_INL_H_
#undef SLUICE_CPU_DECODE_INL_H_
#else
#define SLUICE_CPU_DECODE_INL_H_
#endif

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

#ifndef SLUICE_CPU_DECODE_ONCE_
#define SLUICE_CPU_DECODE_ONCE_
namespace sluice::cpu {
inline constexpr float kE4M3HalfInverse = 256.0F;  // what the f16 route leaves to multiply

// Tags of the element types a decoder is written for.
struct E4M3 {
  static constexpr std::int64_t kBytes = 1;
};
struct BF16 {
  static constexpr std::int64_t kBytes = 2;
};
struct F32 {
  static constexpr std::int64_t kBytes = 4;
};
struct I8 {
  static constexpr std::int64_t kBytes = 1;
};

constexpr float e4m3_value(unsigned byte) {
  const unsigned magnitude = byte & 0x7FU;
  if (magnitude == 0x7FU) return std::bit_cast<float>(0x7FF00000U | ((byte & 0x80U) << 24));
  const unsigned exponent = magnitude >> 3;
  const unsigned mantissa = magnitude & 7U;
  const float unit = exponent == 0 ? 0x1p-9F : std::bit_cast<float>((exponent + 127 - 10) << 23);
  const float value = static_cast<float>(exponent == 0 ? mantissa : mantissa + 8U) * unit;
  return (byte & 0x80U) != 0 ? -value : value;
}
inline constexpr std::array<float, 256> kE4M3Values = [] {
  std::array<float, 256> table{};
  for (unsigned i = 0; i < 256; ++i) table[i] = e4m3_value(i);
  return table;
}();

inline float decode_one(E4M3, const std::uint8_t* p) { return kE4M3Values[*p]; }
inline float decode_one(I8, const std::uint8_t* p) { return static_cast<float>(static_cast<std::int8_t>(*p)); }
inline float decode_one(BF16, const std::uint8_t* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}
inline float decode_one(F32, const std::uint8_t* p) {
  float value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}
}  // namespace sluice::cpu
#endif  // SLUICE_CPU_DECODE_ONCE_

// Targets with F16C and vectors of two or four 128-bit blocks; the others decode element by element.
#undef SLUICE_VECTOR_DECODE
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
#define SLUICE_VECTOR_DECODE 1
#else
#define SLUICE_VECTOR_DECODE 0
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;

// ---------------------------------------------------------------------------------------------------------
// Along a row
// ---------------------------------------------------------------------------------------------------------

#if SLUICE_VECTOR_DECODE
using DU16 = hn::ScalableTag<std::uint16_t>;
using VU16 = hn::Vec<DU16>;

// f16 bits of value * 2^-8 from the e4m3 byte in the upper half of each u16; the lower half is ignored.
HWY_INLINE VU16 E4M3ToHalf(VU16 upper) {
  const DU16 d;
  const hn::RebindToSigned<DU16> di;
  // The arithmetic shift keeps the sign at bit 15; its copy at bit 14 is masked off.
  const VU16 t = hn::And(hn::BitCast(d, hn::ShiftRight<1>(hn::BitCast(di, upper))), hn::Set(d, 0xBF80));
  // NaN (magnitude 0x7F) alone carries into bit 14, which makes the f16 exponent all ones.
  return hn::OrAnd(t, hn::Add(t, hn::Set(d, 0x0080)), hn::Set(d, 0x4000));
}

// Lanes(DF) halves at p.
HWY_INLINE VF HalfToF32(const std::uint16_t* p) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  const hn::Rebind<std::uint16_t, DF> du;
  return hn::PromoteTo(DF(), hn::BitCast(dh, hn::LoadU(du, p)));
}

HWY_INLINE VF DecodeLanes(E4M3, const std::uint8_t* p) {
  const hn::Rebind<std::uint8_t, DF> d8;
  const hn::Rebind<std::uint16_t, DF> d16;
  const hn::Rebind<std::int16_t, DF> di16;
  const hn::Rebind<hwy::float16_t, DF> dh;
  const auto upper = hn::ShiftLeft<8>(hn::PromoteTo(d16, hn::LoadU(d8, p)));
  const auto t = hn::And(hn::BitCast(d16, hn::ShiftRight<1>(hn::BitCast(di16, upper))), hn::Set(d16, 0xBF80));
  const auto half = hn::OrAnd(t, hn::Add(t, hn::Set(d16, 0x0080)), hn::Set(d16, 0x4000));
  return hn::Mul(hn::PromoteTo(DF(), hn::BitCast(dh, half)), hn::Set(DF(), kE4M3HalfInverse));
}
HWY_INLINE VF DecodeLanes(I8, const std::uint8_t* p) {
  const hn::Rebind<std::int8_t, DF> d8;
  const hn::RebindToSigned<DF> d32;
  return hn::ConvertTo(DF(), hn::PromoteTo(d32, hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(p))));
}
HWY_INLINE VF DecodeLanes(BF16, const std::uint8_t* p) {
  const hn::Rebind<std::uint16_t, DF> d16;
  const hn::RebindToUnsigned<DF> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(p)));
  return hn::BitCast(DF(), hn::ShiftLeft<16>(bits));
}
HWY_INLINE VF DecodeLanes(F32, const std::uint8_t* p) { return hn::LoadU(DF(), reinterpret_cast<const float*>(p)); }
#endif  // SLUICE_VECTOR_DECODE

// out[i] = value i of `count` values at p, times `multiplier`. Returns the largest finite magnitude's f32 bits, before
// the multiplication. Reads nothing past the last value.
template <class T>
HWY_INLINE std::uint32_t DecodeRow(T type, const std::uint8_t* p, std::int64_t count, float multiplier, float* out) {
  std::int64_t i = 0;
  std::uint32_t largest = 0;
#if SLUICE_VECTOR_DECODE
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const VF scale = hn::Set(d, multiplier);
  auto top = hn::Zero(du);
  for (; i + lanes <= count; i += lanes) {
    const VF v = DecodeLanes(type, p + i * T::kBytes);
    const auto magnitude = hn::And(hn::BitCast(du, v), hn::Set(du, 0x7FFFFFFFU));
    const auto finite = hn::Lt(magnitude, hn::Set(du, 0x7F800000U));
    top = hn::Max(top, hn::IfThenElseZero(finite, magnitude));
    hn::StoreU(hn::Mul(v, scale), d, out + i);
  }
  largest = hn::GetLane(hn::MaxOfLanes(du, top));
#endif
  for (; i < count; ++i) {
    const float v = decode_one(type, p + i * T::kBytes);
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(v) & 0x7FFFFFFFU;
    if (magnitude < 0x7F800000U && magnitude > largest) largest = magnitude;
    out[i] = v * multiplier;
  }
  return largest;
}

// ---------------------------------------------------------------------------------------------------------
// Across rows: two vectors of f32 lanes, one row per lane
// ---------------------------------------------------------------------------------------------------------

// Rows decoded side by side.
HWY_INLINE std::int64_t NumPanelRows() { return 2 * static_cast<std::int64_t>(hn::Lanes(DF())); }
inline constexpr std::int64_t kMaxPanelRows = 2 * HWY_MAX_BYTES / 4;

#if SLUICE_VECTOR_DECODE
inline constexpr int kBlocks = HWY_MAX_BYTES / 16;  // 128-bit blocks of a vector
inline constexpr int kLanes = HWY_MAX_BYTES / 4;
inline constexpr int kUnitBytes = 16;  // of every row, decoded by one call

// Load order: vector v takes its block b from rows[v * kBlocks + b]. These maps make the transposes below, which stay
// inside 128-bit blocks, leave the lanes in row order.
HWY_INLINE int RowOfSlot(E4M3, int slot) { return 8 * (slot % kBlocks) + slot / kBlocks; }
HWY_INLINE int RowOfSlot(I8, int slot) { return RowOfSlot(E4M3(), slot); }
HWY_INLINE int RowOfSlot(BF16, int slot) {
  // Even u16 lanes become the first vector (shift), odd ones the second (mask): no widening shuffle.
  const int v = slot / kBlocks;
  return (v & 1) * kLanes + 4 * (slot % kBlocks) + v / 2;
}
HWY_INLINE int RowOfSlot(F32, int slot) {
  const int v = slot / kBlocks;
  return v / 4 * kLanes + 4 * (slot % kBlocks) + v % 4;
}

// 16 bytes from each of kBlocks rows. Broadcast and blend run on any port, where inserting a block would need the
// shuffle port that the transposes keep busy.
HWY_INLINE VU16 LoadBlocks(const std::uint8_t* const* HWY_RESTRICT rows, std::int64_t offset) {
  const DU16 d;
  const auto at = [&](int b)
                      HWY_ATTR { return hn::LoadDup128(d, reinterpret_cast<const std::uint16_t*>(rows[b] + offset)); };
#if HWY_MAX_BYTES == 64
  return hn::ConcatUpperLower(d, hn::OddEvenBlocks(at(3), at(2)), hn::OddEvenBlocks(at(1), at(0)));
#else
  return hn::ConcatUpperLower(d, at(1), at(0));
#endif
}

// In every 128-bit block: t[q] lane i = r[i] lane q, as three perfect shuffles.
HWY_INLINE void Transpose8x8(VU16 (&r)[8]) {
  const DU16 d;
  VU16 s[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    s[2 * i] = hn::InterleaveLower(d, r[i], r[i + 4]);
    s[2 * i + 1] = hn::InterleaveUpper(d, r[i], r[i + 4]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[2 * i] = hn::InterleaveLower(d, s[i], s[i + 4]);
    r[2 * i + 1] = hn::InterleaveUpper(d, s[i], s[i + 4]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    s[2 * i] = hn::InterleaveLower(d, r[i], r[i + 4]);
    s[2 * i + 1] = hn::InterleaveUpper(d, r[i], r[i + 4]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = s[i];
}

// One unit: kUnitBytes at rows[..] + offset. Calls sink(k, first, second) in ascending k for k < num_k; the f32 lanes
// of `first` and `second` are the panel's rows. e4m3 arrives times 2^-8.
template <class Sink>
HWY_INLINE void DecodeUnit(E4M3, const std::uint8_t* const* HWY_RESTRICT rows, std::int64_t offset, int num_k,
                           const Sink& sink) {
  const DU16 d;
  VU16 r[8];
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) r[v] = LoadBlocks(rows + v * kBlocks, offset);
  Transpose8x8(r);
  // Through memory: a conversion from a register would spend a shuffle on each half, from memory it spends none.
  HWY_ALIGN std::uint16_t half[16 * 2 * kLanes];
#pragma GCC unroll 8
  for (int q = 0; q < 8; ++q) {
    hn::Store(E4M3ToHalf(hn::ShiftLeft<8>(r[q])), d, half + (2 * q) * 2 * kLanes);
    hn::Store(E4M3ToHalf(r[q]), d, half + (2 * q + 1) * 2 * kLanes);
  }
#pragma GCC unroll 16
  for (int k = 0; k < num_k; ++k) {
    sink(k, HalfToF32(half + k * 2 * kLanes), HalfToF32(half + k * 2 * kLanes + kLanes));
  }
}

template <class Sink>
HWY_INLINE void DecodeUnit(I8, const std::uint8_t* const* HWY_RESTRICT rows, std::int64_t offset, int num_k,
                           const Sink& sink) {
  const DU16 d;
  const hn::RebindToSigned<DU16> di;
  const hn::Rebind<std::int16_t, DF> dhalf;
  const hn::RebindToSigned<DF> d32;
  VU16 r[8];
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) r[v] = LoadBlocks(rows + v * kBlocks, offset);
  Transpose8x8(r);
  HWY_ALIGN std::int16_t wide[16 * 2 * kLanes];
#pragma GCC unroll 8
  for (int q = 0; q < 8; ++q) {
    hn::Store(hn::ShiftRight<8>(hn::BitCast(di, hn::ShiftLeft<8>(r[q]))), di, wide + (2 * q) * 2 * kLanes);
    hn::Store(hn::ShiftRight<8>(hn::BitCast(di, r[q])), di, wide + (2 * q + 1) * 2 * kLanes);
  }
  const auto at = [&](int i) HWY_ATTR { return hn::ConvertTo(DF(), hn::PromoteTo(d32, hn::LoadU(dhalf, wide + i))); };
#pragma GCC unroll 16
  for (int k = 0; k < num_k; ++k) sink(k, at(k * 2 * kLanes), at(k * 2 * kLanes + kLanes));
}

template <class Sink>
HWY_INLINE void DecodeUnit(BF16, const std::uint8_t* const* HWY_RESTRICT rows, std::int64_t offset, int num_k,
                           const Sink& sink) {
  const hn::RebindToUnsigned<DF> du;
  VU16 r[8];
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) r[v] = LoadBlocks(rows + v * kBlocks, offset);
  Transpose8x8(r);
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    if (k >= num_k) return;
    const auto both = hn::BitCast(du, r[k]);
    sink(k, hn::BitCast(DF(), hn::ShiftLeft<16>(both)), hn::BitCast(DF(), hn::And(both, hn::Set(du, 0xFFFF0000U))));
  }
}

template <class Sink>
HWY_INLINE void DecodeUnit(F32, const std::uint8_t* const* HWY_RESTRICT rows, std::int64_t offset, int num_k,
                           const Sink& sink) {
  const DF d;
  VF t[2][4];
#pragma GCC unroll 2
  for (int g = 0; g < 2; ++g) {
    VF r[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) r[v] = hn::BitCast(d, LoadBlocks(rows + (4 * g + v) * kBlocks, offset));
    const VF s0 = hn::InterleaveLower(d, r[0], r[2]), s1 = hn::InterleaveUpper(d, r[0], r[2]);
    const VF s2 = hn::InterleaveLower(d, r[1], r[3]), s3 = hn::InterleaveUpper(d, r[1], r[3]);
    t[g][0] = hn::InterleaveLower(d, s0, s2);
    t[g][1] = hn::InterleaveUpper(d, s0, s2);
    t[g][2] = hn::InterleaveLower(d, s1, s3);
    t[g][3] = hn::InterleaveUpper(d, s1, s3);
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    if (k >= num_k) return;
    sink(k, t[0][k], t[1][k]);
  }
}

// num_k consecutive values of every row from byte `offset` on, in ascending k. The unit that is not full is copied
// first, so that nothing past a row's end is read. Lines `ahead_bytes` further are prefetched, each once: 16 to 32
// row streams at a time are more than the hardware prefetchers follow.
template <class T, class Sink>
HWY_INLINE void DecodeRows(T type, const std::uint8_t* const* HWY_RESTRICT rows, std::int64_t offset,
                           std::int64_t num_k, std::int64_t ahead_bytes, const Sink& sink) {
  constexpr int kUnit = kUnitBytes / static_cast<int>(T::kBytes);
  constexpr int kSlots = 8 * kBlocks;
  std::int64_t k = 0;
  for (int unit = 0; k + kUnit <= num_k; k += kUnit, unit = (unit + 1) & 3) {
    const std::int64_t at = offset + k * T::kBytes;
    // A quarter of the rows per unit: a line lasts four units.
#pragma GCC unroll 8
    for (int i = 0; i < kSlots / 4; ++i) {
      __builtin_prefetch(rows[unit * (kSlots / 4) + i] + at + ahead_bytes, 0, 3);
    }
    DecodeUnit(type, rows, at, kUnit, [&](int i, VF first, VF second) HWY_ATTR { sink(k + i, first, second); });
  }
  if (k == num_k) return;
  const std::int64_t rest = num_k - k;
  HWY_ALIGN std::uint8_t staged[kSlots][kUnitBytes] = {};
  const std::uint8_t* staged_rows[kSlots];
  for (int s = 0; s < kSlots; ++s) {
    std::memcpy(staged[s], rows[s] + offset + k * T::kBytes, static_cast<std::size_t>(rest * T::kBytes));
    staged_rows[s] = staged[s];
  }
  DecodeUnit(type, staged_rows, 0, static_cast<int>(rest),
             [&](int i, VF first, VF second) HWY_ATTR { sink(k + i, first, second); });
}
#endif  // SLUICE_VECTOR_DECODE

}  // namespace HWY_NAMESPACE
}  // namespace sluice::cpu
HWY_AFTER_NAMESPACE();
#endif  // per-target guard
