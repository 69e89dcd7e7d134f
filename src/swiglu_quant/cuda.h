// The CUDA row of the swiglu_quant table.
#pragma once

#include "sluice/stage/swiglu_quant.h"

namespace sluice::swiglu_quant {

Status run_cuda(const Args& args, const Ctx& ctx);

}  // namespace sluice::swiglu_quant
