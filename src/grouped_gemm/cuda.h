// The CUDA rows of the implementation table.
#pragma once

#include "grouped_gemm/gpu_config.h"
#include "sluice/stage/grouped_gemm.h"

namespace sluice::grouped_gemm {

// Hopper's tensor cores: a and w of one dtype (e4m3, int8, bf16), bf16 out. Bits: docs/numerics.md.
Status run_wgmma(const Args& args, const Ctx& ctx);
// With a tile of the caller's choice, for benchmarks and tests.
Status run_wgmma_tile(const Args& args, const Ctx& ctx, const GpuTile& tile);

// Plain fused multiply-adds in the CPU's order, hence with its bits: every dtype and every shape.
Status run_simt(const Args& args, const Ctx& ctx);

}  // namespace sluice::grouped_gemm
