// The functions behind the rows of the implementation table.
#pragma once

#include <string>

#include "sluice/stage/grouped_gemm.h"

namespace sluice::grouped_gemm {

namespace cpu_impl {
Status can_run(const Args& args, const Machine& machine);
std::int64_t scratch_bytes(const Args& args, const Machine& machine);
std::string describe(const Args& args, const Machine& machine);
Status run(const Args& args, const Ctx& ctx);
}  // namespace cpu_impl

namespace reference {
Status can_run(const Args& args, const Machine& machine);
Status run(const Args& args, const Ctx& ctx);
}  // namespace reference

}  // namespace sluice::grouped_gemm
