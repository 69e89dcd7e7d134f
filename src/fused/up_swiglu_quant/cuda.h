// The CUDA row of the table, and its kernels.
#pragma once

#include "fused/up_swiglu_quant/config.h"

namespace sluice::up_swiglu_quant {

Status run_cuda(const Args& args, const Ctx& ctx);
// With a layout of the caller's choice, for benchmarks and tests.
Status run_cuda_config(const Args& args, const Ctx& ctx, const Config& config);

}  // namespace sluice::up_swiglu_quant
