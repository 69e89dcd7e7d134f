// e4m3 with 128x128 weight scales and 1x128 activation scales.
#include "grouped_gemm/tokens_on_m_sm90.cuh"
#include "grouped_gemm/wgmma_table_sm90.cuh"

namespace sluice::grouped_gemm::wgmma {
Kernel fp8_block_kernel(const GpuTile& tile) { return kernel_of<E4m3, Scaling::kBlock>(tile); }
}  // namespace sluice::grouped_gemm::wgmma
namespace sluice::grouped_gemm::tokens_on_m {
Kernel fp8_block_kernel() { return grouped_gemm_tokens_on_m<Tiling<wgmma::E4m3, Scaling::kBlock>>; }
}  // namespace sluice::grouped_gemm::tokens_on_m
