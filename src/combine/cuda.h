// The CUDA row of the combine table.
#pragma once

#include "sluice/stage/combine.h"

namespace sluice::combine {

Status run_cuda(const Args& args, const Ctx& ctx);

}  // namespace sluice::combine
