// wgmma instructions by operand type and N (the PTX of each shape comes from CuTe's arch header), and the fences around
// them. Only for sources compiled for sm_90a.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

namespace sluice::cuda::sm90 {

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of registers across a wait it cannot see through.
template <int kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kN>
struct E4m3Shape;
template <int kN>
struct Bf16Shape;
template <int kN>
struct Int8Shape;
#define SLUICE_WGMMA_SHAPE(N)                                                                                     \
  template <>                                                                                                     \
  struct E4m3Shape<N> {                                                                                           \
    using Instruction = cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<>;                                    \
  };                                                                                                              \
  template <>                                                                                                     \
  struct Bf16Shape<N> {                                                                                           \
    using Instruction =                                                                                           \
        cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>; \
  };                                                                                                              \
  template <>                                                                                                     \
  struct Int8Shape<N> {                                                                                           \
    using Instruction = cute::SM90::GMMA::MMA_64x##N##x32_S32S8S8_SS_TN;                                          \
  };
SLUICE_WGMMA_SHAPE(8)
SLUICE_WGMMA_SHAPE(16)
SLUICE_WGMMA_SHAPE(32)
SLUICE_WGMMA_SHAPE(64)
SLUICE_WGMMA_SHAPE(96)
SLUICE_WGMMA_SHAPE(128)
SLUICE_WGMMA_SHAPE(192)
SLUICE_WGMMA_SHAPE(256)
#undef SLUICE_WGMMA_SHAPE

// d = a b, or d + a b: the N/2 accumulators of a thread as the instruction's separate operands.
template <class Instruction, class Accumulator, std::size_t... kIndex>
__device__ __forceinline__ void issue(std::uint64_t m_side, std::uint64_t n_side, Accumulator* d, bool add,
                                      std::index_sequence<kIndex...>) {
  Instruction::fma(m_side, n_side, d[kIndex]...,
                   add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

}  // namespace sluice::cuda::sm90
