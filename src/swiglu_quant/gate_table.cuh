// What the gates of bf16 rows contribute, by a table in shared memory.
//
// The specified sigmoid is some thirty operations, more than there is time for while memory delivers an element. But a
// bf16 gate has few values: those of magnitude [2^-20, 2^7) fill a table, made by the same operations when a thread block
// starts, and the rest is computed where it occurs.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/columns.cuh"

namespace sluice::swiglu_quant {

using namespace sluice::cuda;  // NOLINT: the device helpers; only kernels of this stage include this

// The upper half of an f32 is a bf16: magnitudes [2^-20, 2^7) are these bit patterns. Negative gates lie 4096 further.
constexpr int kTableBegin = (127 - 20) << 7;
constexpr int kTableCount = 27 << 7;
constexpr int kTableNegative = 4096;

constexpr int kPiece = 8;  // columns of a 16-byte load

// Sixteen columns of both halves, as they come from memory: two pieces of eight, so that neighbouring lanes read
// neighbouring bytes.
struct RawUnit {
  uint4 g[2], u[2];
};

// Gates of one, inside the table.
__device__ __forceinline__ RawUnit ones() {
  constexpr std::uint32_t k = 0x3F803F80u;
  return {{{k, k, k, k}, {k, k, k, k}}, {{k, k, k, k}, {k, k, k, k}}};
}

// Fills the table of gate factors; the whole block calls.
__device__ __forceinline__ void make_table(const Activation& activation, float* table) {
  for (int i = static_cast<int>(threadIdx.x); i < kTableNegative + kTableCount; i += static_cast<int>(blockDim.x)) {
    const int magnitude = i % kTableNegative;
    if (magnitude >= kTableCount) continue;
    const std::uint32_t bits = static_cast<std::uint32_t>(kTableBegin + magnitude) << 16;
    table[i] = gate_factor(activation, __uint_as_float(i < kTableNegative ? bits : bits | 0x80000000u));
  }
  __syncthreads();
}

// kPlainUp: the up column is taken as it is (kSilu); asking p for every element costs as much as the table saves.
template <bool kPlainUp>
__device__ __forceinline__ void activate_raw(const Activation& activation, const float* table, const RawUnit& raw,
                                             float (&v)[kUnitColumns]) {
  constexpr std::uint32_t kBegin = static_cast<std::uint32_t>(kTableBegin) * 0x10001u;
  const std::uint32_t g[8] = {raw.g[0].x, raw.g[0].y, raw.g[0].z, raw.g[0].w,
                              raw.g[1].x, raw.g[1].y, raw.g[1].z, raw.g[1].w};
  const std::uint32_t u[8] = {raw.u[0].x, raw.u[0].y, raw.u[0].z, raw.u[0].w,
                              raw.u[1].x, raw.u[1].y, raw.u[1].z, raw.u[1].w};
  // Two gates at a time. A magnitude below the table wraps round to a large number, as does what it borrows from.
  std::uint32_t furthest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) furthest = __vmaxu2(furthest, (g[i] & 0x7FFF7FFFu) - kBegin);
  const bool inside = (furthest & 0xFFFFu) < kTableCount && (furthest >> 16) < kTableCount;
  if (inside) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t index = ((g[i] & 0x7FFF7FFFu) - kBegin) | ((g[i] >> 3) & 0x10001000u);
      v[2 * i] = table[index & 0xFFFFu];
      v[2 * i + 1] = table[index >> 16];
    }
  } else {
    // By way of local memory on purpose: rare, and in registers it would cost the common way spills.
    std::uint32_t word[8];
    float factor[kUnitColumns];
#pragma unroll
    for (int i = 0; i < 8; ++i) word[i] = g[i];
#pragma unroll 1
    for (int i = 0; i < kUnitColumns; ++i)
      factor[i] = gate_factor(activation, __uint_as_float(word[i / 2] << (i % 2 == 0 ? 16 : 0) & 0xFFFF0000u));
#pragma unroll
    for (int i = 0; i < kUnitColumns; ++i) v[i] = factor[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float low = __uint_as_float(u[i] << 16);
    const float high = __uint_as_float(u[i] & 0xFFFF0000u);
    v[2 * i] = __fmul_rn(v[2 * i], kPlainUp ? low : up_factor(activation, low));
    v[2 * i + 1] = __fmul_rn(v[2 * i + 1], kPlainUp ? high : up_factor(activation, high));
  }
}

}  // namespace sluice::swiglu_quant
