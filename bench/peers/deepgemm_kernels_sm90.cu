// Instances of DeepGEMM's sm_90 FP8 kernel, compiled ahead of time from its headers (SLUICE_DEEPGEMM_DIR). Its launcher
// chooses block, cluster and stages from the shape; these are its choices for the rows of bench/grid.h on 132 SMs, as
// its heuristics of the time give them, with the shapes compiled in as its launcher does. All that fit a row are timed
// and the fastest counts.
#include <array>

#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>

#include "deepgemm.h"

namespace sluice::bench {

namespace {

constexpr int kNumSms = 132;

// Bytes of swizzle of the output tile: the widest that divides a row of it.
constexpr int swizzle_bytes(int block_n) { return block_n * 2 % 128 == 0 ? 128 : block_n * 2 % 64 == 0 ? 64 : 32; }

template <int n, int k, int groups, int block_m, int block_n, int stages, int cluster, bool on_a>
DeepGemmKernel instance() {
  using namespace deep_gemm;
  constexpr GemmType kType = groups > 0 ? GemmType::MGroupedMasked : GemmType::MGroupedContiguous;
  constexpr int kMathThreads = block_m <= 64 ? 128 : 256;
  auto* function =
      &sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, n, k, (groups > 0 ? groups : 1), block_m, block_n, 128, 128,
                               128, swizzle_bytes(block_n), stages, 128, kMathThreads, cluster, on_a, kNumSms, kType,
                               cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity>;
  return {n, k, groups, block_m, block_n, stages, cluster, on_a, reinterpret_cast<const void*>(function)};
}

}  // namespace

std::span<const DeepGemmKernel> deepgemm_kernels() {
  static const std::array kTable = {
      // DeepSeek-V3, whole experts
      instance<4096, 7168, 0, 128, 192, 4, 2, false>(),
      instance<4096, 7168, 0, 128, 128, 5, 2, true>(),
      instance<4096, 7168, 256, 64, 192, 6, 2, false>(),
      instance<4096, 7168, 32, 64, 128, 8, 2, false>(),
      instance<7168, 2048, 0, 128, 192, 4, 2, false>(),
      instance<7168, 2048, 0, 128, 160, 5, 2, false>(),
      instance<7168, 2048, 256, 64, 192, 6, 2, false>(),
      instance<7168, 2048, 32, 64, 192, 6, 2, false>(),
      // DeepSeek-V3, an eighth of each expert
      instance<512, 7168, 0, 128, 192, 4, 2, false>(),
      instance<512, 7168, 0, 128, 128, 5, 2, true>(),
      instance<512, 7168, 0, 128, 32, 10, 1, false>(),
      instance<512, 7168, 256, 64, 128, 8, 2, false>(),
      instance<7168, 256, 0, 128, 192, 4, 2, false>(),
      instance<7168, 256, 0, 128, 160, 5, 2, false>(),
      instance<7168, 256, 256, 64, 192, 6, 2, false>(),
      // Qwen3-30B-A3B
      instance<1536, 2048, 0, 128, 192, 4, 2, false>(),
      instance<1536, 2048, 0, 128, 96, 7, 1, false>(),
      instance<1536, 2048, 128, 64, 192, 6, 2, false>(),
      instance<2048, 768, 0, 128, 192, 4, 2, false>(),
      instance<2048, 768, 0, 128, 128, 5, 1, false>(),
      instance<2048, 768, 128, 64, 128, 8, 2, false>(),
  };
  return kTable;
}

}  // namespace sluice::bench
