// The CUDA row of the route table.
#pragma once

#include "sluice/stage/route.h"

namespace sluice::route {

std::int64_t scratch_bytes_cuda(const Args& args, const Machine& machine);
Status run_cuda(const Args& args, const Ctx& ctx);

}  // namespace sluice::route
