// The CUDA row of the pack table.
#pragma once

#include "sluice/stage/pack.h"

namespace sluice::pack {

Status run_cuda(const Args& args, const Ctx& ctx);

}  // namespace sluice::pack
