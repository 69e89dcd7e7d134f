// bf16, no scales.
#include "grouped_gemm/tokens_on_m_sm90.cuh"
#include "grouped_gemm/wgmma_table_sm90.cuh"

namespace sluice::grouped_gemm::wgmma {
Kernel bf16_kernel(const GpuTile& tile) { return kernel_of<Bf16, Scaling::kNone>(tile); }
}  // namespace sluice::grouped_gemm::wgmma
namespace sluice::grouped_gemm::tokens_on_m {
Kernel bf16_kernel() { return grouped_gemm_tokens_on_m<Tiling<wgmma::Bf16, Scaling::kNone>>; }
}  // namespace sluice::grouped_gemm::tokens_on_m
