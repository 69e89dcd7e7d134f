// Which rank holds which experts. A rank has physical slots for experts; an expert may be in several slots (replicas), so
// that a popular one is worked on by several ranks. Weights, results and routing are those of the logical experts: what a
// token gets does not depend on the placement, to the bit.
#pragma once

#include <span>
#include <vector>

#include "sluice/core.h"

namespace sluice {

struct Placement {
  std::int64_t num_experts = 0;           // E, logical
  std::vector<std::int32_t> slot_expert;  // [N] the logical expert in each physical slot, N >= E; rank after rank
  std::vector<std::int32_t> rank_begin;   // [P+1] slots of rank p are [rank_begin[p], rank_begin[p+1])

  std::int64_t num_ranks() const { return static_cast<std::int64_t>(rank_begin.size()) - 1; }
  std::int64_t num_slots() const { return static_cast<std::int64_t>(slot_expert.size()); }
  std::int64_t num_local(std::int64_t rank) const { return rank_begin[rank + 1] - rank_begin[rank]; }
  // The experts of a rank's slots.
  std::span<const std::int32_t> experts_of(std::int64_t rank) const {
    return std::span(slot_expert)
        .subspan(static_cast<std::size_t>(rank_begin[rank]), static_cast<std::size_t>(num_local(rank)));
  }
};

// One slot an expert, the balanced split of sluice/transport.h: a rank beyond the experts has none.
Placement balanced_placement(std::int64_t num_experts, std::int64_t num_ranks);

// Every expert is in some slot, slots ascend over the ranks, ids are in [0,E). Two replicas of one expert on one rank are
// legal and useless.
Status validate(const Placement& placement);

}  // namespace sluice
