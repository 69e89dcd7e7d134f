// Who sends how much to whom, as expectations.
#pragma once

#include <algorithm>
#include <vector>

#include "scale/routing.h"
#include "sluice/scale.h"

namespace sluice::scale {

// The ranks of a request, by what one token does to each. Ranks are numbered domain after domain.
class Ranks {
 public:
  Ranks(const Hardware& hardware, const Request& request);

  std::int64_t count() const { return static_cast<std::int64_t>(share_.size()); }
  std::int64_t num_domains() const { return static_cast<std::int64_t>(domain_share_.size()); }
  std::int64_t domain(std::int64_t rank) const { return rank / domain_ranks_; }
  const RangeShare& share(std::int64_t rank) const { return share_[static_cast<std::size_t>(rank)]; }
  const RangeShare& domain_share(std::int64_t d) const { return domain_share_[static_cast<std::size_t>(d)]; }
  std::int64_t slots(std::int64_t rank) const { return slots_[static_cast<std::size_t>(rank)]; }

  // In rows a token of every rank, sent and received by `rank`.
  Traffic per_rank(std::int64_t rank) const;    // once to each rank it has experts on
  Traffic per_slot(std::int64_t rank) const;    // once for each of its slots, from the token to the expert
  Traffic per_domain(std::int64_t rank) const;  // once to each other domain, spread over NVLink there

 private:
  double domain_size(std::int64_t d) const { return static_cast<double>(end(d) - d * domain_ranks_); }
  std::int64_t end(std::int64_t d) const { return std::min((d + 1) * domain_ranks_, count()); }
  Traffic moved(std::int64_t rank, double RangeShare::*what) const;

  std::int64_t domain_ranks_;
  std::vector<std::int64_t> slots_;
  std::vector<RangeShare> share_, domain_share_;
  RangeShare all_;               // sums over the ranks
  std::vector<RangeShare> sum_;  // sums over the ranks of a domain
};

// N of a request.
inline std::int64_t num_slots(const Request& r) { return r.num_slots == 0 ? r.config.num_experts : r.num_slots; }
// Bytes of a token on its way to a rank: its values, their scales and its S ids, rounded up to 16.
std::int64_t row_bytes(const Request& request);
DataPath path_of(const Request& request);

}  // namespace sluice::scale
