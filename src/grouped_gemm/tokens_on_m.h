// The grouped GEMM for many rows an expert, between host and device code: kernel parameters, launcher.
#pragma once

#include "grouped_gemm/tokens_memory.h"
#include "grouped_gemm/wgmma.h"

namespace sluice::grouped_gemm {

namespace tokens_on_m {

struct Params : wgmma::Params {
  CUtensorMap out_slabs;  // out as [parts, part_rows/64, R, 64], a box is a warp's rows of a tile; if `slabs`
  bool slabs;
};

using Kernel = void (*)(Params);
Kernel fp8_block_kernel();
Kernel fp8_row_kernel();
Kernel int8_row_kernel();
Kernel bf16_kernel();

}  // namespace tokens_on_m

// `tile` has tokens on M; the device of `args` is current.
Status run_tokens_on_m(const Args& args, const Ctx& ctx, const GpuTile& tile);

}  // namespace sluice::grouped_gemm
