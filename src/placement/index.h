// A placement turned round for use per token: the slots of each expert, and the rank of each slot. Flat arrays, made once;
// looking up allocates nothing and takes no lock.
#pragma once

#include <span>
#include <vector>

#include "sluice/placement.h"

namespace sluice {

class PlacementIndex {
 public:
  // `placement` has passed validate().
  static PlacementIndex of(const Placement& placement);

  // The slot that works on `token` (>= 0) for `expert` (in [0,E)): replica (token + expert) % count of the expert's
  // `count` slots, ascending. A rotation, so that consecutive tokens share the replicas evenly to within one, shifted by
  // the expert, so that a token's experts do not all take their first replica. It depends on nothing else: not on the
  // batch, the thread or the order of arrival.
  // Ranks that number their tokens from 0 each should pass different numbers (t + source rank will do): otherwise
  // batches of one token meet at one replica. Which replica works on a token never shows in the result.
  std::int32_t slot(std::int32_t expert, std::int64_t token) const {
    const std::int32_t begin = begin_[static_cast<std::size_t>(expert)];
    const std::int32_t count = begin_[static_cast<std::size_t>(expert) + 1] - begin;
    if (count == 1) return slots_[static_cast<std::size_t>(begin)];
    const std::uint64_t turn = static_cast<std::uint64_t>(token) + static_cast<std::uint64_t>(expert);
    return slots_[static_cast<std::size_t>(begin) + turn % static_cast<std::uint64_t>(count)];
  }
  std::int64_t rank_of(std::int32_t slot) const { return rank_[static_cast<std::size_t>(slot)]; }
  // The number of the slot among those of its rank.
  std::int32_t local_of(std::int32_t slot) const {
    return slot - rank_begin_[static_cast<std::size_t>(rank_[static_cast<std::size_t>(slot)])];
  }

  // All slots of an expert, ascending.
  std::span<const std::int32_t> replicas(std::int32_t expert) const {
    const auto e = static_cast<std::size_t>(expert);
    return {slots_.data() + begin_[e], static_cast<std::size_t>(begin_[e + 1] - begin_[e])};
  }
  // The arrays themselves, for a copy on a GPU.
  std::span<const std::int32_t> replica_begin() const { return begin_; }  // [E+1] into replica_slots
  std::span<const std::int32_t> replica_slots() const { return slots_; }  // [N] slots by expert, ascending in each
  std::span<const std::int32_t> slot_rank() const { return rank_; }       // [N]

 private:
  std::vector<std::int32_t> begin_;
  std::vector<std::int32_t> slots_;
  std::vector<std::int32_t> rank_;
  std::vector<std::int32_t> rank_begin_;
};

}  // namespace sluice
