// Stages 2 and 3 in one, for few tokens: the plan, and the rows it asks for. Bit for bit what the two stages give one after
// another; the plan is written too, for the stages behind.
//
// Where a layer takes no row of this table, or a call has more slots than most_slots(), it runs the two stages.
#pragma once

#include "sluice/stage/pack.h"
#include "sluice/stage/route.h"

namespace sluice::route_pack {

inline constexpr std::string_view kStage = "route_pack";

struct Args {
  route::Args route;
  pack::Args pack;  // row_token, row_slot, slot_row and num_rows are those of route.plan
};
Status check(const Args& args, Phase phase = Phase::kRun);
std::span<const Impl<Args>> impls();

// Whether the rows of impls() have the bits of these two implementations, one after another.
bool replaces(std::string_view route, std::string_view pack);
// T*S up to which a call may take a row of the table.
std::int64_t most_slots();

}  // namespace sluice::route_pack
