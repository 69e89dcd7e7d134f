// The planner's core: gives weighted things, replicated as often as there is room, to bins so that the fullest bin is
// as light as possible.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sluice::placement {

// load [n]: each finite and >= 0. capacity [m]: what a bin takes, differing by at most 1; all of it is used, so their
// sum is at least n. Returns for each bin the things in it, ascending. A thing is in a bin twice only when the
// capacities sum to more than n*m. Things of equal load are told apart by their number alone: renaming things renames
// the result.
std::vector<std::vector<std::int32_t>> spread(std::span<const double> load, std::span<const std::int64_t> capacity);

}  // namespace sluice::placement
