// What uniform routing does to a range of expert slots, exactly: a token keeps K of its G groups (all subsets alike)
// and takes S distinct slots of those kept (all subsets alike). One group is plain top-k.
#pragma once

#include <cstdint>

namespace sluice::scale {

struct Routing {
  std::int64_t num_slots = 0;  // N, a multiple of num_groups; slots of a group are neighbours
  std::int64_t top_k = 0;      // S
  std::int64_t num_groups = 1;
  std::int64_t kept_groups = 1;
};

// Of one token and the slots [begin, end).
struct RangeShare {
  double hit = 0;       // probability that it has a slot there
  double rows = 0;      // expected number of its slots there
  double variance = 0;  // of that number
};
RangeShare share_of_range(const Routing& routing, std::int64_t begin, std::int64_t end);

}  // namespace sluice::scale
