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

struct ActivateAndQuantise {
  using Params = FusedParams;
  static constexpr bool kPaired = true;

  // The amax of every token, three times: while one tile's is read, the next tile's is made and the one after's is zero.
  template <class T>
  static __device__ __forceinline__ void prepare(std::byte* staging) {
    for (int i = static_cast<int>(threadIdx.x); i < 3 * T::kTokens; i += static_cast<int>(blockDim.x))
      reinterpret_cast<float*>(staging)[i] = 0.0f;
  }

  // Of 128 columns from `column` on; this warp's 16 start at `m`. Register i of a thread holds column 8*(i/2%2) + lane/4 of
  // those and token 8*(i/4) + 2*(lane%4) + i%2.
  template <class T>
  static __device__ __forceinline__ void finish(const Params& p, float (&gate)[T::kRegs], const float (&up)[T::kRegs],
                                                std::byte* staging, const grouped_gemm::Tile& tile, std::int32_t column,
                                                int m, int lane, int turn) {
    constexpr int kTokens = T::kTokens;
    constexpr int kEights = kTokens / 8;
    const int g = lane / 4;
    const int q = lane % 4;
    const std::int32_t limit = p.part_rows - column;
    float* const amax = reinterpret_cast<float*>(staging) + turn * kTokens;
    float* const cleared = reinterpret_cast<float*>(staging) + (turn == 0 ? 2 : turn - 1) * kTokens;

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
#pragma unroll
    for (int i = 0; i < T::kRegs; ++i) {
      const int half = i / 2 % 2;
      const float b = p.bias != nullptr ? __fadd_rn(gate[i], gate_bias[half]) : gate[i];
      const float u = p.bias != nullptr ? __fadd_rn(up[i], up_bias[half]) : up[i];
      gate[i] = activation_of(p.activation, b, u);
    }
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      float most[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Columns behind the last are zeros, unless their row holds NaN: never finite, and so never counted.
        most[i] = fmaxf(finite_magnitude(gate[4 * j + i]), finite_magnitude(gate[4 * j + 2 + i]));
#pragma unroll
        for (int d = 4; d < 32; d *= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], d));
      }
      if (g == 0) {
        raise(amax + 8 * j + 2 * q, most[0]);
        raise(amax + 8 * j + 2 * q + 1, most[1]);
      }
    }
    sm90::named_barrier<1>(grouped_gemm::wgmma::kConsumers * sm90::kWarpgroupThreads);
    for (int i = m / 16 * 32 + lane; i < kTokens; i += grouped_gemm::wgmma::kConsumers * sm90::kWarpgroupThreads)
      cleared[i] = 0.0f;

    std::uint8_t* const out = p.a + column + m + 4 * q;
    float* const scale_out = p.scale_out + column / static_cast<int>(kScaleBlock) * p.scale_out_block;
    const std::int32_t left = limit - m - 4 * q;  // of the four columns this lane stores
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const int token = tile.row + 8 * j;
      if (token >= tile.end) break;
      const float2 most = *reinterpret_cast<const float2*>(amax + 8 * j + 2 * q);
      const float low_scale = cuda::scale_of<std::uint8_t>(most.x, p.format);
      const float high_scale = cuda::scale_of<std::uint8_t>(most.y, p.format);
      if (g == 0 && m / 16 == j % 8) {
        if (token + 2 * q < tile.end) scale_out[(token + 2 * q) * p.scale_out_row] = low_scale;
        if (token + 2 * q + 1 < tile.end) scale_out[(token + 2 * q + 1) * p.scale_out_row] = high_scale;
      }
      const float low_y = __frcp_rn(low_scale), high_y = __frcp_rn(high_scale);
      // One 16-bit element a token: the bytes of columns g and g + 8.
      const std::uint32_t pair =
          cuda::e4m3x2_from_f32(scaled(gate[4 * j], low_scale, low_y), scaled(gate[4 * j + 2], low_scale, low_y)) |
          cuda::e4m3x2_from_f32(scaled(gate[4 * j + 1], high_scale, high_y),
                                scaled(gate[4 * j + 3], high_scale, high_y))
              << 16;
      // Now token g, columns 2q, 2q+8, 2q+1, 2q+9; then four neighbours out of two lanes.
      const std::uint32_t bytes = __byte_perm(sm90::transpose_8x8(pair), 0, 0x3120);
      const int from = (lane & ~3) + (q & 1) * 2;
      const std::uint32_t first = __shfl_sync(0xFFFFFFFFu, bytes, from);
      const std::uint32_t second = __shfl_sync(0xFFFFFFFFu, bytes, from + 1);
      const std::uint32_t word = __byte_perm(first, second, q < 2 ? 0x5410 : 0x7632);
      if (token + g >= tile.end) continue;
      std::uint8_t* const to = out + (token + g) * p.a_row;
      if (left >= 4) {
        *reinterpret_cast<std::uint32_t*>(to) = word;
      } else {
#pragma unroll
        for (int c = 0; c < 3; ++c) {
          if (c < left) to[c] = static_cast<std::uint8_t>(word >> (8 * c));
        }
      }
    }
  }
};

}  // namespace sluice::up_swiglu_quant
