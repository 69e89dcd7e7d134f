// int8 with a scale per token and a scale per output channel; exact int32 sums.
#include "grouped_gemm/tokens_on_m_sm90.cuh"
#include "grouped_gemm/wgmma_table_sm90.cuh"

namespace sluice::grouped_gemm::wgmma {
Kernel int8_row_kernel(const GpuTile& tile) { return kernel_of<Int8, Scaling::kRow>(tile); }
}  // namespace sluice::grouped_gemm::wgmma
namespace sluice::grouped_gemm::tokens_on_m {
Kernel int8_row_kernel() { return grouped_gemm_tokens_on_m<Tiling<wgmma::Int8, Scaling::kRow>>; }
}  // namespace sluice::grouped_gemm::tokens_on_m
