#include "placement/index.h"

namespace sluice {

PlacementIndex PlacementIndex::of(const Placement& placement) {
  PlacementIndex index;
  index.rank_begin_ = placement.rank_begin;
  index.begin_.assign(static_cast<std::size_t>(placement.num_experts) + 1, 0);
  for (const std::int32_t expert : placement.slot_expert) ++index.begin_[static_cast<std::size_t>(expert) + 1];
  for (std::size_t e = 1; e < index.begin_.size(); ++e) index.begin_[e] += index.begin_[e - 1];
  std::vector<std::int32_t> next(index.begin_.begin(), index.begin_.end() - 1);
  index.slots_.resize(placement.slot_expert.size());
  for (std::size_t slot = 0; slot < placement.slot_expert.size(); ++slot) {
    std::int32_t& place = next[static_cast<std::size_t>(placement.slot_expert[slot])];
    index.slots_[static_cast<std::size_t>(place++)] = static_cast<std::int32_t>(slot);
  }
  index.slot_rank_.resize(placement.slot_expert.size());
  for (std::int64_t rank = 0; rank < placement.num_ranks(); ++rank) {
    for (std::int32_t slot = placement.rank_begin[rank]; slot < placement.rank_begin[rank + 1]; ++slot)
      index.slot_rank_[static_cast<std::size_t>(slot)] = static_cast<std::int32_t>(rank);
  }
  return index;
}

}  // namespace sluice
