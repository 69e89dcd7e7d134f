// Machines and layers of round numbers, and a routing that is counted instead of computed.
#pragma once

#include <functional>
#include <vector>

#include "sluice/scale.h"

namespace sluice::test {

// No fixed cost anywhere, whole numbers for the rates.
inline scale::Hardware plain_hardware(std::int64_t domain = 8) {
  scale::Hardware h;
  h.name = "plain";
  h.memory_gb = 100;
  h.hbm_gb_per_s = 1000;
  h.glue_share = 1;
  h.fp8 = {1000, 0, 1, 0, 0, {1}, {1}};
  h.bf16 = {500, 0, 1, 0, 0, {1}, {1}};
  h.nvlink_domain = domain;
  h.nvlink_gb_per_s = 100;
  h.nic_gb_per_s = 10;
  return h;
}

inline scale::Request request_for(std::int64_t experts, std::int64_t top_k, std::int64_t ranks, std::int64_t tokens) {
  scale::Request r;
  r.config.hidden = 256;
  r.config.intermediate = 128;
  r.config.num_experts = experts;
  r.config.top_k = top_k;
  r.num_ranks = ranks;
  r.tokens = tokens;
  return r;
}

// Every subset of `size` of the numbers below `count`.
inline void for_each_subset(std::int64_t count, std::int64_t size,
                            const std::function<void(const std::vector<std::int64_t>&)>& visit) {
  std::vector<std::int64_t> chosen;
  const std::function<void(std::int64_t)> grow = [&](std::int64_t from) {
    if (static_cast<std::int64_t>(chosen.size()) == size) return visit(chosen);
    for (std::int64_t i = from; i < count; ++i) {
      chosen.push_back(i);
      grow(i + 1);
      chosen.pop_back();
    }
  };
  grow(0);
}

// Every way a token can be routed, all equally likely: kept groups, then experts among those kept.
inline std::vector<std::vector<std::int64_t>> all_routes(std::int64_t experts, std::int64_t top_k, std::int64_t groups,
                                                         std::int64_t kept) {
  std::vector<std::vector<std::int64_t>> routes;
  const std::int64_t size = experts / groups;
  for_each_subset(groups, kept, [&](const std::vector<std::int64_t>& chosen) {
    for_each_subset(size * kept, top_k, [&](const std::vector<std::int64_t>& places) {
      std::vector<std::int64_t> route;
      for (const std::int64_t p : places) route.push_back(chosen[static_cast<std::size_t>(p / size)] * size + p % size);
      routes.push_back(route);
    });
  });
  return routes;
}

}  // namespace sluice::test
