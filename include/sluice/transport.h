// Moves rows between the ranks that hold different experts. One rank: nothing moves.
#pragma once

#include "sluice/plan.h"

namespace sluice {

// Experts [begin, end) of one rank.
struct ExpertRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The balanced split: base = E / P, rem = E % P, rank r starts at r*base + min(r, rem). 30 over 8 ranks:
// 4,4,4,4,4,4,3,3.
ExpertRange experts_of_rank(std::int64_t num_experts, std::int64_t num_ranks, std::int64_t rank);
// Its inverse.
std::int64_t owner(std::int64_t num_experts, std::int64_t num_ranks, std::int64_t expert);

// Rows on their way through a layer: [R,H] and, for e4m3, scales [Hb,R].
struct Rows {
  TensorView data;
  TensorView scale;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::int64_t num_ranks() const = 0;
  virtual std::int64_t rank() const = 0;
  // Packed rows to the ranks that own their experts; `arrived` are the rows the local experts work on.
  virtual Status dispatch(const RoutePlan& plan, const Rows& packed, Rows& arrived, const Ctx& ctx) = 0;
  // Expert outputs back to the ranks of their tokens: the same plan, reversed.
  virtual Status combine(const RoutePlan& plan, const Rows& outputs, Rows& returned, const Ctx& ctx) = 0;
};

// One rank: both moves hand back the views they were given.
std::shared_ptr<Transport> local_transport();

}  // namespace sluice
