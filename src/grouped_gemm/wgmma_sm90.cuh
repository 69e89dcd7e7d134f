// wgmma by operand type, and the store of a finished tile.
#pragma once

#include <cstdint>
#include <utility>

#include "cuda/columns.cuh"
#include "cuda/sm90.cuh"
#include "cuda/wgmma.cuh"
#include "grouped_gemm/tile_table.cuh"
#include "grouped_gemm/wgmma.h"

namespace sluice::grouped_gemm::wgmma {

namespace sm90 = cuda::sm90;

// ---------------------------------------------------------------------------------------------------------
// Instructions
// ---------------------------------------------------------------------------------------------------------

using sm90::commit;
using sm90::fence;
using sm90::hold;
using sm90::issue;
using sm90::wait;

// Tensor cores keep 14 bits or so of an e4m3 sum, so sums of 128 are promoted to fp32; int32 and bf16 sums stay there.
struct E4m3 {
  using Element = std::uint8_t;
  using Accumulator = float;
  static constexpr bool kPromotes = true;
  template <int kN>
  static __device__ __forceinline__ void multiply(std::uint64_t m, std::uint64_t n, float (&d)[kN / 2], bool add) {
    issue<typename sm90::E4m3Shape<kN>::Instruction>(m, n, d, add, std::make_index_sequence<kN / 2>());
  }
};
struct Bf16 {
  using Element = std::uint16_t;
  using Accumulator = float;
  static constexpr bool kPromotes = false;
  template <int kN>
  static __device__ __forceinline__ void multiply(std::uint64_t m, std::uint64_t n, float (&d)[kN / 2], bool add) {
    issue<typename sm90::Bf16Shape<kN>::Instruction>(m, n, d, add, std::make_index_sequence<kN / 2>());
  }
};
struct Int8 {
  using Element = std::int8_t;
  using Accumulator = std::uint32_t;  // the instruction's type; the bits are an int32
  static constexpr bool kPromotes = false;
  template <int kN>
  static __device__ __forceinline__ void multiply(std::uint64_t m, std::uint64_t n, std::uint32_t (&d)[kN / 2],
                                                  bool add) {
    issue<typename sm90::Int8Shape<kN>::Instruction>(m, n, d, add, std::make_index_sequence<kN / 2>());
  }
};

// ---------------------------------------------------------------------------------------------------------
// Store
// ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float as_f32(float v) { return v; }
__device__ __forceinline__ float as_f32(std::uint32_t v) { return __int2float_rn(static_cast<int>(v)); }

// Two values to bf16, nearest even. Any NaN becomes 0x7FFF.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Of two packed pairs, by halves: the larger, or 0x7FFF where one is NaN.
__device__ __forceinline__ std::uint32_t max_or_nan(std::uint32_t x, std::uint32_t y) {
  std::uint32_t larger;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
  return larger;
}
// 0x7FC0 for a NaN as specified, in what the two functions above give.
__device__ __forceinline__ std::uint32_t with_specified_nan(std::uint32_t packed) {
  return packed ^ (__vcmpeq2(packed, 0x7FFF7FFFu) & 0x003F003Fu);
}
// Lane q of four holds words w[0..3]; afterwards it holds word q of all four lanes.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = got;
  }
}

// Eight neighbouring columns of one row of the tile, those below `limit`. A row is spread over all warps; collecting it in
// shared memory made them wait for each other, which cost more than it gave (docs/performance.md).
__device__ __forceinline__ void store_eight(const Params& p, const Tile& tile, int row, std::int32_t first,
                                            std::int32_t column, std::int32_t limit, const std::uint32_t (&w)[4]) {
  if (tile.row + row >= tile.end) return;
  std::uint16_t* const to = p.out + (tile.row + row) * p.out_row + first + column;
  if (p.wide && column < limit) {
    *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);  // limit is a multiple of eight
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < limit) to[i] = static_cast<std::uint16_t>(w[i / 2] >> (i % 2 * 16));
  }
}

// One chunk of a finished tile: scales of rows and channels, bias, one rounding. `m` is where the warp's values of the chunk
// start, in weight rows of the tile.
template <class T, class Accumulator, class Columns>
__device__ __forceinline__ void store(const Params& p, const Accumulator (&acc)[T::kRegs], const Tile& tile,
                                      const Columns& columns, int m, int lane) {
  constexpr Scaling kScaling = T::kScaling;
  constexpr int kN = T::kN;
  const int g = lane / 4;
  const int q = lane % 4;
  const std::int32_t limit = p.part_rows - columns.inside;  // weight rows left in this matrix
  const float* const w_scale = p.w_scale + tile.group * p.w_scale_group + columns.first * p.w_scale_row;
  const float* const bias = p.bias == nullptr ? nullptr : p.bias + tile.group * p.bias_group + columns.first;
  const auto token_scale = [&](int token) {
    return tile.row + token < tile.end ? p.a_scale[(tile.row + token) * p.a_scale_row] : 0.0f;
  };
  const auto channel_scale = [&](int channel) { return channel < limit ? w_scale[channel * p.w_scale_row] : 0.0f; };
  const auto channel_bias = [&](int channel) { return bias != nullptr && channel < limit ? bias[channel] : 0.0f; };

  float m_scale[2] = {1.0f, 1.0f};
  float m_bias[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = m + g + 8 * i;
    if constexpr (kScaling == Scaling::kRow) m_scale[i] = channel_scale(at);
    m_bias[i] = channel_bias(at);
  }
  // word[2j + half]: values 8j + 2q and the next of N in row 8*half of M, finished and rounded.
  std::uint32_t word[kN / 4];
  std::uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    float n_scale[2] = {1.0f, 1.0f};
    if constexpr (kScaling == Scaling::kRow) {
#pragma unroll
      for (int i = 0; i < 2; ++i) n_scale[i] = token_scale(8 * j + 2 * q + i);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        v[i] = as_f32(acc[4 * j + 2 * half + i]);
        if constexpr (kScaling == Scaling::kRow) v[i] = __fmul_rn(v[i], __fmul_rn(m_scale[half], n_scale[i]));
        if (bias != nullptr) v[i] = __fadd_rn(v[i], m_bias[half]);
      }
      word[2 * j + half] = pack_bf16(v[0], v[1]);
      largest = max_or_nan(largest, word[2 * j + half]);
    }
  }
  if (__any_sync(0xFFFFFFFFu, with_specified_nan(largest) != largest)) {
#pragma unroll
    for (std::uint32_t& w : word) w = with_specified_nan(w);
  }

  // Token-major after the transposition: two blocks of eight weight rows for each of two blocks of eight tokens.
#pragma unroll
  for (int j = 0; j < kN / 8; j += 2) {
    const bool pair = j + 1 < kN / 8;  // else the last block is alone
    std::uint32_t w[4] = {};
#pragma unroll
    for (int i = 0; i < (pair ? 4 : 2); ++i) w[i] = sm90::transpose_8x8(word[2 * j + i]);
    transpose_quad(w);
    const int token = 8 * (j + q / 2) + g;
    if (pair || q < 2) store_eight(p, tile, token, columns.first, m + 8 * (q % 2), limit, w);
  }
}

}  // namespace sluice::grouped_gemm::wgmma
