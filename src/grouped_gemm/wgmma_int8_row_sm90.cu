// int8 with a scale per token and a scale per output channel; exact int32 sums.
#include "grouped_gemm/wgmma_table_sm90.cuh"

namespace sluice::grouped_gemm::wgmma {
Kernel int8_row_kernel(const GpuTile& tile) { return kernel_of<Int8, Scaling::kRow>(tile); }
}  // namespace sluice::grouped_gemm::wgmma
