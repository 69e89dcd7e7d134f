// A few neighbouring columns of a row per thread: loads, the quantisation of docs/numerics.md, and stores. Columns or
// addresses that do not allow 16-byte accesses go element by element.
#pragma once

#include <cstdint>

#include "cuda/spec_math.cuh"
#include "sluice/config.h"

namespace sluice::cuda {

constexpr int kUnitColumns = 16;
constexpr int kUnitsPerBlock = static_cast<int>(kScaleBlock) / kUnitColumns;  // 8 neighbouring lanes share a scale
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// How many of `most` columns a row still has from `column` on.
__device__ __forceinline__ int columns_left(std::int64_t width, std::int64_t column, int most) {
  const std::int64_t left = width - column;
  return left <= 0 ? 0 : left < most ? static_cast<int>(left) : most;
}

__device__ __forceinline__ float f32_from_bf16(std::uint16_t bits) {
  return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
}

// Round to nearest even; a NaN keeps its upper bits and becomes quiet, as on the CPU.
__device__ __forceinline__ std::uint16_t bf16_from_f32(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  if (value != value) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Two values to bf16. The instruction makes 0x7FFF of every NaN, so those take the long way.
__device__ __forceinline__ std::uint32_t bf16x2_from_f32(float low, float high) {
  if (low == low && high == high) {
    std::uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  return bf16_from_f32(low) | static_cast<std::uint32_t>(bf16_from_f32(high)) << 16;
}

// ---------------------------------------------------------------------------------------------------------
// Loads and stores
// ---------------------------------------------------------------------------------------------------------

// v = columns [0, count) of a row of bf16 bits or floats, zeros behind. `wide`: 16-byte loads are legal, count is kN.
template <int kN>
__device__ __forceinline__ void load_unit(const std::uint16_t* from, int count, bool wide, float (&v)[kN]) {
  static_assert(kN % 8 == 0);
  if (wide) {
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from) + i);
      const std::uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[i * 8 + j * 2] = __uint_as_float(word[j] << 16);
        v[i * 8 + j * 2 + 1] = __uint_as_float(word[j] & 0xFFFF0000u);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) v[i] = i < count ? f32_from_bf16(from[i]) : 0.0f;
}
template <int kN>
__device__ __forceinline__ void load_unit(const float* from, int count, bool wide, float (&v)[kN]) {
  static_assert(kN % 4 == 0);
  if (wide) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      const float4 f = __ldg(reinterpret_cast<const float4*>(from) + i);
      v[i * 4] = f.x;
      v[i * 4 + 1] = f.y;
      v[i * 4 + 2] = f.z;
      v[i * 4 + 3] = f.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) v[i] = i < count ? from[i] : 0.0f;
}

template <int kN>
__device__ __forceinline__ void store_unit(const float (&v)[kN], float* to, int count, bool wide) {
  if (wide) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i)
      reinterpret_cast<float4*>(to)[i] = make_float4(v[i * 4], v[i * 4 + 1], v[i * 4 + 2], v[i * 4 + 3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    if (i < count) to[i] = v[i];
  }
}
template <int kN>
__device__ __forceinline__ void store_unit(const float (&v)[kN], std::uint16_t* to, int count, bool wide) {
  if (wide) {
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      std::uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) word[j] = bf16x2_from_f32(v[i * 8 + j * 2], v[i * 8 + j * 2 + 1]);
      reinterpret_cast<uint4*>(to)[i] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    if (i < count) to[i] = bf16_from_f32(v[i]);
  }
}

// The sixteen bytes of a quantised unit.
__device__ __forceinline__ void store_bytes(const uint4& q, void* to, int count, bool wide) {
  if (wide) {
    *static_cast<uint4*>(to) = q;
    return;
  }
  const std::uint32_t word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) {
    if (i < count) static_cast<std::uint8_t*>(to)[i] = static_cast<std::uint8_t>(word[i / 4] >> (i % 4 * 8));
  }
}

// ---------------------------------------------------------------------------------------------------------
// The amax of a group, and its scale
// ---------------------------------------------------------------------------------------------------------

// The larger one, or NaN where one of them is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

__device__ __forceinline__ bool is_finite(float magnitude) { return magnitude < __int_as_float(0x7F800000); }

// The largest magnitude: NaN or infinite where the unit holds one. One instruction an element; finite_amax is for then.
__device__ __forceinline__ float amax_of(const float (&v)[kUnitColumns]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) amax = max_nan(amax, fabsf(v[i]));
  return amax;
}
// The largest finite magnitude.
__device__ __forceinline__ float finite_amax(const float (&v)[kUnitColumns]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) {
    const float magnitude = fabsf(v[i]);
    if (is_finite(magnitude)) amax = fmaxf(amax, magnitude);  // false for NaN
  }
  return amax;
}

// value / scale in three operations, with y = RN(1/scale): the quotient or a neighbour of it that gives the same byte, see
// quantise_unit.
__device__ __forceinline__ float quotient(float value, float scale, float y) {
  const float q0 = __fmul_rn(value, y);
  return __fmaf_rn(-__fmaf_rn(q0, scale, -value), y, q0);
}

// Q: std::uint8_t for e4m3, std::int8_t for i8.
template <class Q>
__device__ __forceinline__ float scale_of(float amax, ScaleFormat format) {
  constexpr float kLargest = static_cast<Q>(-1) > 0 ? 448.0f : 127.0f;
  // By these two the three operations are an IEEE division for every float (tests/gpu/fast_math_test.cu).
  const float scale = quotient(fmaxf(amax, 1e-10f), kLargest, 1.0f / kLargest);
  if (format == ScaleFormat::kF32) return scale;
  return __uint_as_float((__float_as_uint(scale) + 0x007FFFFFu) & 0xFF800000u);  // up to a power of two
}

struct GroupAmax {
  float amax;   // of the finite values
  bool finite;  // whether all are
};
// Of the 128 columns that eight neighbouring lanes hold; the whole warp calls.
__device__ __forceinline__ GroupAmax block_amax(const float (&v)[kUnitColumns]) {
  float amax = amax_of(v);
#pragma unroll
  for (int d = 1; d < kUnitsPerBlock; d *= 2) amax = max_nan(amax, __shfl_xor_sync(kAllLanes, amax, d));
  const bool finite = is_finite(amax);
  if (__all_sync(kAllLanes, finite)) return {amax, true};
  amax = finite_amax(v);
#pragma unroll
  for (int d = 1; d < kUnitsPerBlock; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, d));
  return {amax, finite};
}

// ---------------------------------------------------------------------------------------------------------
// Encoding
// ---------------------------------------------------------------------------------------------------------

// Two values to e4m3, round to nearest even, saturating; NaN is 0x7F without its sign.
__device__ __forceinline__ std::uint32_t e4m3x2_from_f32(float low, float high) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
#else
  const auto one = [](float v) -> std::uint32_t {
    const std::uint32_t sign = (__float_as_uint(v) >> 24) & 0x80u;
    const float magnitude = fabsf(v);
    if (v != v) return 0x7Fu;
    if (magnitude >= 448.0f) return sign | 0x7Eu;
    if (magnitude < 0x1p-6f)
      return sign | static_cast<std::uint32_t>(rintf(__fmul_rn(magnitude, 512.0f)));  // steps of 2^-9
    const std::uint32_t bits = __float_as_uint(magnitude);
    return sign | (((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - ((127u - 7u) << 3));
  };
  return one(low) | one(high) << 8;
#endif
}

// Four quotients to four bytes.
__device__ __forceinline__ std::uint32_t pack_bytes(const float (&t)[4], std::uint8_t) {
  return e4m3x2_from_f32(t[0], t[1]) | e4m3x2_from_f32(t[2], t[3]) << 16;
}
// Within +-127.5; the unit in the last place of 1.5 * 2^23 is 1, so the addition rounds, and leaves the low byte.
__device__ __forceinline__ std::uint32_t pack_bytes(const float (&t)[4], std::int8_t) {
  std::uint32_t bits[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) bits[k] = __float_as_uint(__fadd_rn(t[k], 12582912.0f));
  return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

// q = the bytes of v / scale, as an IEEE quotient rounds to them, in three operations instead of a division each: with
// y = RN(1/scale) and q0 = RN(v*y), t = fma(-fma(q0, scale, -v), y, q0). Why the byte is the same: every operation is
// within 2^-24, so t = RN(Q + d) with Q = v/scale and |d| <= 2^-46 Q, about 2^-22 of a unit in the last place. t is then
// RN(Q) unless a midpoint of two floats lies within d of Q; an exact tie of the byte, Q being a float, stays exact. Where
// it does, t and RN(Q) are neighbours, and their bytes differ only if one of them is a boundary B of the format, which has
// at most 5 bits (e4m3) or 8 (int8). v = scale * (B + half a unit + d) then leaves for scale only mantissas within 16 of
// a multiple of 2^17: few enough to try them all, and the bytes of all are right (tests/gpu/quantise_test.cu).
// Nothing overflows, as scale is in [2.2e-13, 2.7e36]; a quotient small enough for the residual to underflow is below
// 2^-60 and becomes a zero either way. The residual is negated so that -0 / scale stays -0. `finite` says that the whole
// group is.
template <class Q>
__device__ __forceinline__ uint4 quantise_unit(const float (&v)[kUnitColumns], float scale, bool finite) {
  const float y = __frcp_rn(scale);
  std::uint32_t word[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float t[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) t[k] = quotient(v[j * 4 + k], scale, y);
    word[j] = pack_bytes(t, Q());
  }
  if (!finite) {
    // What is not finite has a NaN quotient above: 0 * inf in its residual.
#pragma unroll
    for (int i = 0; i < kUnitColumns; ++i) {
      if (is_finite(fabsf(v[i]))) continue;
      const bool nan = v[i] != v[i];
      const std::uint32_t sign = __float_as_uint(v[i]) >> 31;
      std::uint32_t byte;
      if constexpr (static_cast<Q>(-1) > 0) {
        byte = sign << 7 | (nan ? 0x7Fu : 0x7Eu);
      } else {
        byte = nan ? 0u : sign != 0 ? 0x81u : 0x7Fu;
      }
      word[i / 4] = (word[i / 4] & ~(0xFFu << (i % 4 * 8))) | byte << (i % 4 * 8);
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Whether 16-byte accesses at every unit of every row of this view are legal.
inline bool allows_wide(const TensorView& view) {
  const std::int64_t bytes = size_bytes(view.dtype);
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.stride[0] * bytes % 16 == 0;
}

}  // namespace sluice::cuda
