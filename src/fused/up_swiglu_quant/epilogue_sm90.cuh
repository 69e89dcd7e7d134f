// What becomes of a finished pair of tiles, gate and up: the activation, the amax of 128 columns, e4m3 and its scale.
#pragma once

#include <cstdint>

#include "cuda/activation.cuh"
#include "cuda/columns.cuh"
#include "cuda/sm90.cuh"
#include "fused/up_swiglu_quant/kernels.h"
#include "grouped_gemm/wgmma_kernel_sm90.cuh"

namespace sluice::up_swiglu_quant {

namespace sm90 = cuda::sm90;

// h is bf16 where it is a tensor, so gate and up are rounded as they would be there.
__device__ __forceinline__ float activation_of(const Activation& activation, float gate, float up) {
  std::uint32_t h;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(up), "f"(gate));
  const float g = __uint_as_float(h << 16);
  const float u = __uint_as_float(h & 0xFFFF0000u);
  return cuda::canonical(__fmul_rn(cuda::any_gate_factor(activation, g), cuda::up_factor(activation, u)));
}

__device__ __forceinline__ float finite_magnitude(float v) { return cuda::is_finite(fabsf(v)) ? fabsf(v) : 0.0f; }

// What is not finite needs no quotient: an infinity saturates, NaN stays NaN.
__device__ __forceinline__ float scaled(float v, float scale, float y) {
  return cuda::is_finite(fabsf(v)) ? cuda::quotient(v, scale, y) : v;
}

// Magnitudes are ordered as their bits are.
__device__ __forceinline__ void raise(float* amax, float magnitude) {
  atomicMax(reinterpret_cast<unsigned*>(amax), __float_as_uint(magnitude));
}

// Eight tokens from `row` on of this warp's 16 columns, which start `m` after `column`: register i of a thread holds column
// 8*(i/2) + lane/4 of those and token 2*(lane%4) + i%2, `most` the amax of these two tokens.
__device__ __forceinline__ void store_eight_tokens(const FusedParams& p, const float (&v)[4], float2 most,
                                                   std::int32_t row, std::int32_t end, std::int32_t column, int m,
                                                   bool brings_scales, int lane) {
  const int g = lane / 4;
  const int q = lane % 4;
  const float low_scale = cuda::scale_of<std::uint8_t>(most.x, p.format);
  const float high_scale = cuda::scale_of<std::uint8_t>(most.y, p.format);
  if (g == 0 && brings_scales) {
    float* const to = p.scale_out + column / static_cast<int>(kScaleBlock) * p.scale_out_block;
    if (row + 2 * q < end) to[(row + 2 * q) * p.scale_out_row] = low_scale;
    if (row + 2 * q + 1 < end) to[(row + 2 * q + 1) * p.scale_out_row] = high_scale;
  }
  const float low_y = __frcp_rn(low_scale), high_y = __frcp_rn(high_scale);
  // One 16-bit element a token: the bytes of columns g and g + 8.
  const std::uint32_t pair = cuda::e4m3x2_from_f32(scaled(v[0], low_scale, low_y), scaled(v[2], low_scale, low_y)) |
                             cuda::e4m3x2_from_f32(scaled(v[1], high_scale, high_y), scaled(v[3], high_scale, high_y))
                                 << 16;
  // Now token g, columns 2q, 2q+8, 2q+1, 2q+9; then four neighbours out of two lanes.
  const std::uint32_t bytes = __byte_perm(sm90::transpose_8x8(pair), 0, 0x3120);
  const int from = (lane & ~3) + (q & 1) * 2;
  const std::uint32_t first = __shfl_sync(0xFFFFFFFFu, bytes, from);
  const std::uint32_t second = __shfl_sync(0xFFFFFFFFu, bytes, from + 1);
  const std::uint32_t word = __byte_perm(first, second, q < 2 ? 0x5410 : 0x7632);
  if (row + g >= end) return;
  std::uint8_t* const to = p.a + (row + g) * p.a_row + column + m + 4 * q;
  const std::int32_t left = p.part_rows - column - m - 4 * q;  // of the four columns this lane stores
  if (left >= 4) {
    *reinterpret_cast<std::uint32_t*>(to) = word;
    return;
  }
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    if (c < left) to[c] = static_cast<std::uint8_t>(word >> (8 * c));
  }
}

template <int kRegs, int kTurnRegs>
__device__ __forceinline__ void rotate(float (&values)[kRegs], const float (&done)[kTurnRegs]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i)
    values[i] = i + kTurnRegs < kRegs ? values[i + kTurnRegs] : done[i + kTurnRegs - kRegs];
}

struct ActivateAndQuantise {
  using Params = FusedParams;
  static constexpr bool kPaired = true;

  // The amax of every token, three times: while one tile's is read, the next tile's is made and the one after's is zero.
  template <class T>
  static __device__ __forceinline__ void prepare(std::byte* memory) {
    for (int i = static_cast<int>(threadIdx.x); i < 3 * T::kTokens; i += static_cast<int>(blockDim.x))
      reinterpret_cast<float*>(memory)[i] = 0.0f;
  }

  // Of 128 columns from `column` on; this warp's 16 start at `m`. Register i of a thread holds column 8*(i/2%2) + lane/4 of
  // those and token 8*(i/4) + 2*(lane%4) + i%2.
  template <class T>
  static __device__ __forceinline__ void finish(const Params& p, float (&gate)[T::kRegs], float (&up)[T::kRegs],
                                                std::byte* memory, const grouped_gemm::Tile& tile, std::int32_t column,
                                                int m, int lane, int turn) {
    constexpr int kTokens = T::kTokens;
    // Sixteen tokens a turn of a loop that is not unrolled: all of them in line are more code than the instruction caches
    // hold. What is done moves to the back of the registers, so that each turn finds its own in front.
    constexpr int kTurnTokens = kTokens < 16 ? kTokens : 16;
    constexpr int kTurnRegs = kTurnTokens / 2;
    const int g = lane / 4;
    const int q = lane % 4;
    const std::int32_t limit = p.part_rows - column;
    float* const amax = reinterpret_cast<float*>(memory) + turn * kTokens;
    float* const cleared = reinterpret_cast<float*>(memory) + (turn == 0 ? 2 : turn - 1) * kTokens;

    float gate_bias[2] = {}, up_bias[2] = {};
    if (p.bias != nullptr) {
      const float* const bias = p.bias + tile.group * p.bias_group + column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = m + g + 8 * half;
        gate_bias[half] = at < limit ? bias[at] : 0.0f;
        up_bias[half] = at < limit ? bias[p.part_rows + at] : 0.0f;
      }
    }
#pragma unroll 1
    for (int first = 0; first < kTokens; first += kTurnTokens) {
      float v[kTurnRegs];
#pragma unroll
      for (int i = 0; i < kTurnRegs; ++i) {
        const int half = i / 2 % 2;
        const float b = p.bias != nullptr ? __fadd_rn(gate[i], gate_bias[half]) : gate[i];
        const float u = p.bias != nullptr ? __fadd_rn(up[i], up_bias[half]) : up[i];
        v[i] = activation_of(p.activation, b, u);
      }
#pragma unroll
      for (int j = 0; j < kTurnTokens / 8; ++j) {
        float most[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Columns behind the last are zeros, unless their row holds NaN: never finite, and so never counted.
          most[i] = fmaxf(finite_magnitude(v[4 * j + i]), finite_magnitude(v[4 * j + 2 + i]));
#pragma unroll
          for (int d = 4; d < 32; d *= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], d));
        }
        if (g == 0) {
          raise(amax + first + 8 * j + 2 * q, most[0]);
          raise(amax + first + 8 * j + 2 * q + 1, most[1]);
        }
      }
      rotate<T::kRegs>(gate, v);
      rotate<T::kRegs>(up, v);
    }
    sm90::named_barrier<1>(T::kConsumers * sm90::kWarpgroupThreads);
    for (int i = m / 16 * 32 + lane; i < kTokens; i += T::kConsumers * sm90::kWarpgroupThreads) cleared[i] = 0.0f;

#pragma unroll 1
    for (int first = 0; first < kTokens && tile.row + first < tile.end; first += kTurnTokens) {
      float v[kTurnRegs];
#pragma unroll
      for (int i = 0; i < kTurnRegs; ++i) v[i] = gate[i];
#pragma unroll
      for (int j = 0; j < kTurnTokens / 8; ++j) {
        const float2 most = *reinterpret_cast<const float2*>(amax + first + 8 * j + 2 * q);
        const float eight[4] = {v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]};
        store_eight_tokens(p, eight, most, tile.row + first + 8 * j, tile.end, column, m, m / 16 == (first / 8 + j) % 8,
                           lane);
      }
      rotate<T::kRegs>(gate, v);
    }
  }
};

}  // namespace sluice::up_swiglu_quant
