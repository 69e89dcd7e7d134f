// The functions behind the row of the table.
#pragma once

#include <string>

#include "sluice/stage/route_pack.h"

namespace sluice::route_pack {

// Every block sorts all slots for itself: 128 are 128 comparisons a thread.
inline constexpr std::int64_t kMostSlots = 128;
// Up to here that is faster than a kernel of its own; 64 slots were slower (docs/performance.md).
inline constexpr std::int64_t kMostSlotsWorthIt = 16;

inline constexpr std::int64_t kMostSlotsOfToken = 32;  // S: a lane each

// Why the kernel cannot run these arguments on this machine; T is not judged, a call has any.
Status can_run_cuda(const Args& args, const Machine& machine);
std::string describe_cuda(const Args& args, const Machine& machine);
Status run_cuda(const Args& args, const Ctx& ctx);

}  // namespace sluice::route_pack
