// Which tiles are compiled, the same for every operand type.
#pragma once

#include "grouped_gemm/wgmma_kernel_sm90.cuh"

namespace sluice::grouped_gemm::wgmma {

template <class Operand, Scaling kScaling, int kTokens>
Kernel weights_on_m(const GpuTile& tile) {
  if (tile.weight_rows == 128) return grouped_gemm_wgmma<Tiling<Operand, kScaling, kTokens, 128>>;
  if (tile.weight_rows == 256) return grouped_gemm_wgmma<Tiling<Operand, kScaling, kTokens, 256>>;
  return nullptr;
}

template <class Operand, Scaling kScaling>
Kernel kernel_of(const GpuTile& tile) {
  if (tile.tokens_on_m) return nullptr;  // tokens_on_m.h
  switch (tile.tokens) {
    case 8: return weights_on_m<Operand, kScaling, 8>(tile);
    case 16: return weights_on_m<Operand, kScaling, 16>(tile);
    case 32: return weights_on_m<Operand, kScaling, 32>(tile);
    case 64: return weights_on_m<Operand, kScaling, 64>(tile);
    case 96: return weights_on_m<Operand, kScaling, 96>(tile);
    default: return nullptr;
  }
}

}  // namespace sluice::grouped_gemm::wgmma
