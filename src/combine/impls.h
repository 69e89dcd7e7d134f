// The functions behind the rows of the combine table.
#pragma once

#include "sluice/stage/combine.h"

namespace sluice::combine {

Status run_cuda(const Args& args, const Ctx& ctx);

std::string describe_cpu(const Args& args, const Machine& machine);
Status run_cpu(const Args& args, const Ctx& ctx);

Status run_reference(const Args& args, const Ctx& ctx);

}  // namespace sluice::combine
