// Where the replicas of each expert are, for use while tokens flow: flat arrays, nothing allocated after it is made.
#pragma once

#include "sluice/placement.h"

namespace sluice {

class PlacementIndex {
 public:
  PlacementIndex() = default;
  // Of a valid placement.
  static PlacementIndex of(const Placement& placement);

  std::int64_t num_experts() const { return static_cast<std::int64_t>(begin_.size()) - 1; }
  std::int64_t num_ranks() const { return static_cast<std::int64_t>(rank_begin_.size()) - 1; }
  std::int32_t rank_begin(std::int64_t rank) const { return rank_begin_[static_cast<std::size_t>(rank)]; }
  // The physical slot that works on this expert for a token: replicas in turn, so that a run of tokens spreads evenly.
  std::int32_t slot(std::int32_t expert, std::int64_t token) const {
    const std::int32_t first = begin_[static_cast<std::size_t>(expert)];
    const std::int32_t count = begin_[static_cast<std::size_t>(expert) + 1] - first;
    return slots_[static_cast<std::size_t>(first + (count == 1 ? 0 : token % count))];
  }
  std::int64_t rank_of(std::int32_t slot) const { return slot_rank_[static_cast<std::size_t>(slot)]; }

 private:
  std::vector<std::int32_t> begin_;       // [E+1] replicas of expert e are slots_[begin_[e], begin_[e+1])
  std::vector<std::int32_t> slots_;       // [N] physical slots, ascending within an expert
  std::vector<std::int32_t> slot_rank_;   // [N]
  std::vector<std::int32_t> rank_begin_;  // [P+1]
};

}  // namespace sluice
