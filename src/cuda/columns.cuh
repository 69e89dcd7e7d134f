// Sixteen columns of a row per thread, eight threads to a block of 128: loads, the group quantisation of
// docs/numerics.md, and stores. A unit whose columns or addresses do not allow 16-byte accesses goes element by element.
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

// Two values to e4m3, round to nearest even, saturating, NaN 0x7F with its sign.
__device__ __forceinline__ std::uint16_t e4m3x2_from_f32(float low, float high) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  // The instruction drops the sign of a NaN.
  if (low != low)
    packed = static_cast<std::uint16_t>((packed & 0xFF00u) | 0x7Fu | ((__float_as_uint(low) >> 24) & 0x80u));
  if (high != high)
    packed = static_cast<std::uint16_t>((packed & 0x00FFu) | 0x7F00u | ((__float_as_uint(high) >> 16) & 0x8000u));
  return packed;
#else
  const auto one = [](float v) -> std::uint32_t {
    const std::uint32_t sign = (__float_as_uint(v) >> 24) & 0x80u;
    const float magnitude = fabsf(v);
    if (v != v) return sign | 0x7Fu;
    if (magnitude >= 448.0f) return sign | 0x7Eu;
    if (magnitude < 0x1p-6f)
      return sign | static_cast<std::uint32_t>(rintf(__fmul_rn(magnitude, 512.0f)));  // steps of 2^-9
    const std::uint32_t bits = __float_as_uint(magnitude);
    return sign | (((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - ((127u - 7u) << 3));
  };
  return static_cast<std::uint16_t>(one(low) | one(high) << 8);
#endif
}

// v = columns [0, count) of a row of T (bf16 bits or float), zeros behind. `wide`: 16-byte loads are legal and count is 16.
__device__ __forceinline__ void load_unit(const std::uint16_t* from, int count, bool wide, float (&v)[kUnitColumns]) {
  if (wide) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
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
  for (int i = 0; i < kUnitColumns; ++i) v[i] = i < count ? f32_from_bf16(from[i]) : 0.0f;
}
__device__ __forceinline__ void load_unit(const float* from, int count, bool wide, float (&v)[kUnitColumns]) {
  if (wide) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 f = __ldg(reinterpret_cast<const float4*>(from) + i);
      v[i * 4] = f.x;
      v[i * 4 + 1] = f.y;
      v[i * 4 + 2] = f.z;
      v[i * 4 + 3] = f.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) v[i] = i < count ? from[i] : 0.0f;
}

__device__ __forceinline__ void store_unit(const float (&v)[kUnitColumns], float* to, int count, bool wide) {
  if (wide) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      reinterpret_cast<float4*>(to)[i] = make_float4(v[i * 4], v[i * 4 + 1], v[i * 4 + 2], v[i * 4 + 3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) {
    if (i < count) to[i] = v[i];
  }
}
__device__ __forceinline__ void store_unit(const float (&v)[kUnitColumns], std::uint16_t* to, int count, bool wide) {
  if (wide) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        word[j] = bf16_from_f32(v[i * 8 + j * 2]) | static_cast<std::uint32_t>(bf16_from_f32(v[i * 8 + j * 2 + 1]))
                                                        << 16;
      }
      reinterpret_cast<uint4*>(to)[i] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) {
    if (i < count) to[i] = bf16_from_f32(v[i]);
  }
}

// The scale of the block this unit belongs to: the eight lanes of the block must call together.
__device__ __forceinline__ float block_scale(const float (&v)[kUnitColumns], ScaleFormat format) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) {
    const float magnitude = fabsf(v[i]);
    if (magnitude < __int_as_float(0x7F800000)) amax = fmaxf(amax, magnitude);  // false for NaN and infinity
  }
#pragma unroll
  for (int d = 1; d < kUnitsPerBlock; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, d));
  const float scale = __fdiv_rn(fmaxf(amax, 1e-10f), 448.0f);
  if (format == ScaleFormat::kF32) return scale;
  return __uint_as_float((__float_as_uint(scale) + 0x007FFFFFu) & 0xFF800000u);  // up to a power of two
}

// q = e4m3(v / scale) with an IEEE quotient in three operations instead of a division each: with y = RN(1/scale) and
// q0 = v*y, fma(fma(-q0, scale, v), y, q0) is RN(v/scale) (Markstein) wherever nothing underflows or overflows. scale is
// in [2.2e-13, 7.6e35]; a quotient small enough for the residual to underflow is below 2^-100 and rounds to an e4m3 zero
// either way; infinities and NaN (0*inf in the residual) take q0.
__device__ __forceinline__ void quantise_unit(const float (&v)[kUnitColumns], float scale, uint4& q) {
  const float y = __frcp_rn(scale);
  std::uint32_t word[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float t[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float value = v[j * 4 + k];
      const float q0 = __fmul_rn(value, y);
      const float residual = __fmaf_rn(-q0, scale, value);
      const float refined = __fmaf_rn(residual, y, q0);
      t[k] = copysignf(refined == refined ? refined : q0, value);  // the residual of -0 is +0
    }
    word[j] = e4m3x2_from_f32(t[0], t[1]) | static_cast<std::uint32_t>(e4m3x2_from_f32(t[2], t[3])) << 16;
  }
  q = make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ void store_bytes(const uint4& q, std::uint8_t* to, int count, bool wide) {
  if (wide) {
    *reinterpret_cast<uint4*>(to) = q;
    return;
  }
  const std::uint32_t word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) {
    if (i < count) to[i] = static_cast<std::uint8_t>(word[i / 4] >> (i % 4 * 8));
  }
}

// Whether 16-byte accesses at every unit of every row of this view are legal.
inline bool allows_wide(const TensorView& view) {
  const std::int64_t bytes = size_bytes(view.dtype);
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.stride[0] * bytes % 16 == 0;
}

}  // namespace sluice::cuda
