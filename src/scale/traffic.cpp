#include "scale/traffic.h"

#include "sluice/transport.h"

namespace sluice::scale {

DataPath path_of(const Request& r) { return *data_path(r.precision, r.weight, r.row_scales); }

std::int64_t row_bytes(const Request& r) {
  const DataPath path = path_of(r);
  std::int64_t bytes = r.config.hidden * size_bytes(path.rows) + r.config.top_k * 4;
  if (is_quantised(path.rows)) bytes += path.scale_blocks(r.config.hidden) * 4;
  return ceil_div(bytes, 16) * 16;
}

Ranks::Ranks(const Hardware& hardware, const Request& request)
    : domain_ranks_(hardware.nvlink_domain / request.tensor_parallel) {
  const GateConfig& gate = request.config.gate;
  const bool grouped = gate.n_group > 1;
  const Routing routing{num_slots(request), request.config.top_k, grouped ? gate.n_group : 1,
                        grouped ? gate.topk_group : 1};
  const auto add = [](RangeShare& sum, const RangeShare& one) {
    sum.hit += one.hit;
    sum.rows += one.rows;
  };
  std::int64_t domain_begin = 0;
  for (std::int64_t rank = 0; rank < request.num_ranks; ++rank) {
    const ExpertRange range = experts_of_rank(routing.num_slots, request.num_ranks, rank);
    slots_.push_back(range.end - range.begin);
    share_.push_back(share_of_range(routing, range.begin, range.end));
    if (rank % domain_ranks_ == 0) {
      sum_.emplace_back();
      domain_begin = range.begin;
    }
    add(sum_.back(), share_.back());
    add(all_, share_.back());
    if ((rank + 1) % domain_ranks_ == 0 || rank + 1 == request.num_ranks) {
      domain_share_.push_back(share_of_range(routing, domain_begin, range.end));
    }
  }
}

Traffic Ranks::moved(std::int64_t rank, double RangeShare::*what) const {
  const std::int64_t d = domain(rank);
  const double own = share(rank).*what;
  const double inside = sum_[static_cast<std::size_t>(d)].*what;
  const double peers = domain_size(d) - 1, others = static_cast<double>(count()) - domain_size(d);
  return {{own, inside - own, all_.*what - inside}, {own, own * peers, own * others}};
}

Traffic Ranks::per_rank(std::int64_t rank) const { return moved(rank, &RangeShare::hit); }
Traffic Ranks::per_slot(std::int64_t rank) const { return moved(rank, &RangeShare::rows); }

Traffic Ranks::per_domain(std::int64_t rank) const {
  const std::int64_t d = domain(rank), index = rank - d * domain_ranks_;
  Traffic traffic = moved(rank, &RangeShare::hit);
  traffic.out.nic = traffic.in.nic = 0;
  const std::int64_t size = end(d) - d * domain_ranks_;
  double sources = 0;  // ranks elsewhere whose rows enter this domain here: those of the same place in their domain
  for (std::int64_t other = 0; other < num_domains(); ++other) {
    if (other == d) continue;
    traffic.out.nic += domain_share(other).hit;
    for (std::int64_t i = index; i < end(other) - other * domain_ranks_; i += size) sources += 1;
  }
  traffic.in.nic = sources * domain_share(d).hit;
  traffic.out.nvlink += sources * (sum_[static_cast<std::size_t>(d)].hit - share(rank).hit);
  // What its peers pass on to it: all that comes from elsewhere but for what entered here.
  const double elsewhere = static_cast<double>(count()) - domain_size(d);
  traffic.in.nvlink += (elsewhere - sources) * share(rank).hit;
  return traffic;
}

namespace {

Traffic times(Traffic t, double bytes) {
  for (Links* links : {&t.out, &t.in}) {
    links->gpu *= bytes;
    links->nvlink *= bytes;
    links->nic *= bytes;
  }
  return t;
}

}  // namespace

Traffic dispatch_traffic(const Hardware& hardware, const Request& request, std::int64_t rank) {
  return times(Ranks(hardware, request).per_rank(rank),
               static_cast<double>(request.tokens) * static_cast<double>(row_bytes(request)));
}

Traffic combine_traffic(const Hardware& hardware, const Request& request, std::int64_t rank) {
  const Traffic there = Ranks(hardware, request).per_slot(rank);
  const double bytes = static_cast<double>(request.tokens * request.config.hidden * size_bytes(path_of(request).y));
  return times({there.in, there.out}, bytes);
}

}  // namespace sluice::scale
