// The functions behind the rows of the pack table.
#pragma once

#include "sluice/stage/pack.h"

namespace sluice::pack {

std::int64_t scratch_bytes_cuda(const Args& args, const Machine& machine);
std::string describe_cuda(const Args& args, const Machine& machine);
Status run_cuda(const Args& args, const Ctx& ctx);

std::int64_t scratch_bytes_cpu(const Args& args, const Machine& machine);
std::string describe_cpu(const Args& args, const Machine& machine);
Status run_cpu(const Args& args, const Ctx& ctx);

Status run_reference(const Args& args, const Ctx& ctx);

}  // namespace sluice::pack
