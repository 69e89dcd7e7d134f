// The CUDA row of the route table.
#pragma once

#include "sluice/stage/route.h"

namespace sluice::route {

// Local experts whose counts fit a block's 48 KiB of shared memory beside those of four warps.
inline constexpr std::int64_t kRouteSharedBytes = 48 * 1024 - 256;
inline constexpr std::int64_t kMaxLocalCuda =
    kRouteSharedBytes / ((4 + 3) * static_cast<std::int64_t>(sizeof(std::int32_t)));

std::int64_t scratch_bytes_cuda(const Args& args, const Machine& machine);
Status run_cuda(const Args& args, const Ctx& ctx);

}  // namespace sluice::route
