// The grouped GEMM's persistent kernel with the activation for an epilogue.
#include "fused/up_swiglu_quant/epilogue_sm90.cuh"

namespace sluice::up_swiglu_quant {

namespace {
namespace wgmma = grouped_gemm::wgmma;

template <int kTokens>
Kernel kernel() {
  return wgmma::grouped_gemm_wgmma<
      wgmma::Tiling<wgmma::E4m3, wgmma::Scaling::kBlock, kTokens, 256, ActivateAndQuantise>>;
}
}  // namespace

Kernel ring_kernel(const Config& config) {
  switch (config.tile.tokens) {
    case 8: return kernel<8>();
    case 16: return kernel<16>();
    case 32: return kernel<32>();
    case 64: return kernel<64>();
    case 96: return kernel<96>();
    default: return nullptr;
  }
}

}  // namespace sluice::up_swiglu_quant
