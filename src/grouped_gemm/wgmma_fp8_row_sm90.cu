// e4m3 with a scale per token and a scale per output channel (or per tensor: strides of 0).
#include "grouped_gemm/tokens_on_m_sm90.cuh"
#include "grouped_gemm/wgmma_table_sm90.cuh"

namespace sluice::grouped_gemm::wgmma {
Kernel fp8_row_kernel(const GpuTile& tile) { return kernel_of<E4m3, Scaling::kRow>(tile); }
}  // namespace sluice::grouped_gemm::wgmma
namespace sluice::grouped_gemm::tokens_on_m {
Kernel fp8_row_kernel() { return grouped_gemm_tokens_on_m<Tiling<wgmma::E4m3, Scaling::kRow>>; }
}  // namespace sluice::grouped_gemm::tokens_on_m
