#include "placement/index.h"

namespace sluice {

PlacementIndex PlacementIndex::of(const Placement& placement) {
  PlacementIndex index;
  index.rank_begin_ = placement.rank_begin;
  const std::size_t num_slots = placement.slot_expert.size();
  // A counting sort of the slots by expert, stable, so that the slots of an expert ascend.
  index.begin_.assign(static_cast<std::size_t>(placement.num_experts) + 1, 0);
  for (const std::int32_t expert : placement.slot_expert) ++index.begin_[static_cast<std::size_t>(expert) + 1];
  for (std::size_t e = 1; e < index.begin_.size(); ++e) index.begin_[e] += index.begin_[e - 1];
  std::vector<std::int32_t> next(index.begin_.begin(), index.begin_.end() - 1);
  index.slots_.resize(num_slots);
  for (std::size_t slot = 0; slot < num_slots; ++slot) {
    index.slots_[static_cast<std::size_t>(next[static_cast<std::size_t>(placement.slot_expert[slot])]++)] =
        static_cast<std::int32_t>(slot);
  }
  index.rank_.resize(num_slots);
  for (std::int64_t rank = 0; rank < placement.num_ranks(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (std::int32_t slot = placement.rank_begin[r]; slot < placement.rank_begin[r + 1]; ++slot) {
      index.rank_[static_cast<std::size_t>(slot)] = static_cast<std::int32_t>(rank);
    }
  }
  return index;
}

}  // namespace sluice
