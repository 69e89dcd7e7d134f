// bf16, no scales.
#include "grouped_gemm/wgmma_table_sm90.cuh"

namespace sluice::grouped_gemm::wgmma {
Kernel bf16_kernel(const GpuTile& tile) { return kernel_of<Bf16, Scaling::kNone>(tile); }
}  // namespace sluice::grouped_gemm::wgmma
