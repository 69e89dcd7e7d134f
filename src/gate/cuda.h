// The CUDA rows of the gate's tables.
#pragma once

#include "sluice/stage/gate.h"

namespace sluice::gate {

Status select_cuda(const SelectArgs& args, const Ctx& ctx);

}  // namespace sluice::gate
