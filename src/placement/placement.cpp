#include "sluice/placement.h"

#include <fmt/format.h>

#include <algorithm>

#include "sluice/transport.h"

namespace sluice {

Placement balanced_placement(std::int64_t num_experts, std::int64_t num_ranks) {
  Placement placement;
  placement.num_experts = num_experts;
  for (std::int64_t e = 0; e < num_experts; ++e) placement.slot_expert.push_back(static_cast<std::int32_t>(e));
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    placement.rank_begin.push_back(static_cast<std::int32_t>(experts_of_rank(num_experts, num_ranks, rank).begin));
  }
  placement.rank_begin.push_back(static_cast<std::int32_t>(num_experts));
  return placement;
}

Status validate(const Placement& p) {
  const auto refuse = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, "placement: " + std::move(text));
  };
  if (p.rank_begin.size() < 2) return refuse("it names no rank");
  if (p.rank_begin.front() != 0 || p.rank_begin.back() != p.num_slots()) {
    return refuse(fmt::format("the ranks' slots run from {} to {}, there are {} slots", p.rank_begin.front(),
                              p.rank_begin.back(), p.num_slots()));
  }
  for (std::int64_t rank = 0; rank < p.num_ranks(); ++rank) {
    if (p.num_local(rank) < 0) {
      return refuse(
          fmt::format("the slots of rank {} run from {} to {}", rank, p.rank_begin[rank], p.rank_begin[rank + 1]));
    }
  }
  std::vector<bool> is_held(static_cast<std::size_t>(std::max<std::int64_t>(p.num_experts, 0)));
  for (std::int64_t slot = 0; slot < p.num_slots(); ++slot) {
    const std::int32_t expert = p.slot_expert[slot];
    if (expert < 0 || expert >= p.num_experts) {
      return refuse(fmt::format("slot {} holds expert {}, expected 0 to {}", slot, expert, p.num_experts - 1));
    }
    is_held[expert] = true;
  }
  const auto missing = std::find(is_held.begin(), is_held.end(), false);
  if (missing != is_held.end()) return refuse(fmt::format("expert {} is in no slot", missing - is_held.begin()));
  return Status::ok();
}

}  // namespace sluice
