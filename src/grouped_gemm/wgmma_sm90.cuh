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
__device__ __forceinline__ std::uint32_t pack_bf16_fast(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// The same, with 0x7FC0 for a NaN as specified.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed = pack_bf16_fast(low, high);
  if (low != low) packed = (packed & 0xFFFF0000u) | 0x7FC0u;
  if (high != high) packed = (packed & 0x0000FFFFu) | 0x7FC00000u;
  return packed;
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

// With tokens on M a warp owns sixteen rows of the tile: it writes them to shared memory, and the copy engine takes them
// away row by row while the next tile is summed. With weights on M a row is spread over all warps, and waiting for each
// other cost more than it gave (docs/performance.md): values go straight to memory, eight columns a lane.

// The copies of the tile before have read the staging area.
template <class T>
__device__ __forceinline__ void await_staging() {
  if constexpr (T::kStaged) {
    sm90::bulk_wait_read();
    __syncwarp();
  }
}

template <class T, class Columns>
__device__ __forceinline__ void flush(const Params& p, const std::byte* staging, const Tile& tile,
                                      const Columns& columns, int warp_row, int lane) {
  if constexpr (T::kStaged) {
    if (!p.wide) return;
    sm90::async_fence();
    __syncwarp();
    const int row = warp_row + lane;
    if (lane < 16 && tile.row + row < tile.end) {
      const int width = min(T::kWeightRows, p.part_rows - columns.inside);
      sm90::bulk_store(p.out + (tile.row + row) * p.out_row + columns.first, staging + row * T::kStagingPitch,
                       static_cast<std::uint32_t>(2 * width));
    }
    sm90::bulk_commit();
  }
}

// Eight neighbouring columns of one row of the tile, those below `limit`.
template <class T>
__device__ __forceinline__ void store_eight(const Params& p, std::byte* staging, const Tile& tile, int row,
                                            std::int32_t first, std::int32_t column, std::int32_t limit,
                                            const std::uint32_t (&w)[4]) {
  const uint4 bits = make_uint4(w[0], w[1], w[2], w[3]);
  if (T::kStaged && p.wide) {
    *reinterpret_cast<uint4*>(staging + row * T::kStagingPitch + 2 * column) = bits;
    return;
  }
  if (tile.row + row >= tile.end) return;
  std::uint16_t* const to = p.out + (tile.row + row) * p.out_row + first + column;
  if (p.wide && column < limit) {
    *reinterpret_cast<uint4*>(to) = bits;  // limit is a multiple of eight
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < limit) to[i] = static_cast<std::uint16_t>(w[i / 2] >> (i % 2 * 16));
  }
}

// One chunk of a finished tile: scales of rows and channels, bias, one rounding. `m` and `n` are where the warp's and the
// chunk's values start on the two sides, in rows of the tile.
template <class T, class Accumulator, class Columns>
__device__ __forceinline__ void store(const Params& p, const Accumulator (&acc)[T::kRegs], std::byte* staging,
                                      const Tile& tile, const Columns& columns, int m, int n, int lane) {
  constexpr Scaling kScaling = T::kScaling;
  constexpr bool kTokensOnM = T::kTokensOnM;
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
    if constexpr (kScaling == Scaling::kRow) m_scale[i] = kTokensOnM ? token_scale(at) : channel_scale(at);
    if constexpr (!kTokensOnM) m_bias[i] = channel_bias(at);
  }
  // Values (8j + 2q, 8j + 2q + 1) of N in row 8*half of M, finished and packed.
  const auto packed = [&](int j, int half) {
    float v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = n + 8 * j + 2 * q + i;
      v[i] = as_f32(acc[4 * j + 2 * half + i]);
      if constexpr (kScaling == Scaling::kRow) {
        const float n_scale = kTokensOnM ? channel_scale(at) : token_scale(at);
        v[i] = __fmul_rn(v[i], __fmul_rn(m_scale[half], n_scale));
      }
      if (bias != nullptr) v[i] = __fadd_rn(v[i], kTokensOnM ? channel_bias(at) : m_bias[half]);
    }
    return pack_bf16(v[0], v[1]);
  };

  if constexpr (kTokensOnM) {
    static_assert(kN % 32 == 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kN / 8; j += 4) {
        std::uint32_t w[4] = {packed(j, half), packed(j + 1, half), packed(j + 2, half), packed(j + 3, half)};
        transpose_quad(w);
        store_eight<T>(p, staging, tile, m + g + 8 * half, columns.first, n + 8 * (j + q), limit, w);
      }
    }
  } else {
    // Token-major after the transposition: two blocks of eight weight rows for each of two blocks of eight tokens.
#pragma unroll
    for (int j = 0; j < kN / 8; j += 2) {
      constexpr bool kSingle = kN == 8;
      std::uint32_t w[4];
      w[0] = sm90::transpose_8x8(packed(j, 0));
      w[1] = sm90::transpose_8x8(packed(j, 1));
      w[2] = kSingle ? 0u : sm90::transpose_8x8(packed(kSingle ? j : j + 1, 0));
      w[3] = kSingle ? 0u : sm90::transpose_8x8(packed(kSingle ? j : j + 1, 1));
      transpose_quad(w);
      const int token = n + 8 * (j + q / 2) + g;
      if (!kSingle || q < 2) store_eight<T>(p, staging, tile, token, columns.first, m + 8 * (q % 2), limit, w);
    }
  }
}

}  // namespace sluice::grouped_gemm::wgmma
