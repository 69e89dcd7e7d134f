// Checks a request, and puts the planner's core to work: once over all ranks, or over the nodes and then inside each.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "placement/spread.h"
#include "sluice/placement_plan.h"
#include "sluice/transport.h"

namespace sluice {
namespace {

constexpr double kMaxTokens = 9007199254740992.0;  // 2^53: every whole number up to it is a double

Status refuse(std::string text) { return {StatusCode::kInvalidArgument, "placement: " + std::move(text)}; }

std::int64_t size_of_part(std::int64_t total, std::int64_t num_parts, std::int64_t part) {
  const ExpertRange range = experts_of_rank(total, num_parts, part);
  return range.end - range.begin;
}

// `what` says which expert of what: "expert", "layer 3, expert".
Status check_load(std::span<const double> load, std::string_view what) {
  for (std::size_t e = 0; e < load.size(); ++e) {
    if (load[e] >= 0 && load[e] <= kMaxTokens) continue;  // false for NaN
    return {StatusCode::kInvalidArgument,
            fmt::format("{} {} has a load of {} tokens, expected 0 to 2^53", what, e, load[e])};
  }
  return Status::ok();
}

// The number of slots, where the request can be met.
Result<std::int64_t> check_request(std::int64_t E, const PlacementRequest& request) {
  const std::int64_t P = request.num_ranks, K = request.num_nodes, G = request.num_groups;
  const auto check_size = [](std::string_view name, std::int64_t value, std::int64_t low, std::int64_t high) {
    return value >= low && value <= high ? Status::ok()
                                         : refuse(fmt::format("{} is {}, expected {} to {}", name, value, low, high));
  };
  SLUICE_TRY(check_size("the number of experts", E, 1, kMaxPlacementSlots));
  SLUICE_TRY(check_size("num_ranks", P, 1, kMaxPlacementSlots));
  SLUICE_TRY(check_size("num_redundant", request.num_redundant.value_or(0), 0, kMaxPlacementSlots));
  const std::int64_t N = request.num_slots.value_or(E + request.num_redundant.value_or(0));
  if (N < E) return refuse(fmt::format("num_slots is {}, but there are {} experts and each needs a slot", N, E));
  SLUICE_TRY(check_size("num_slots", N, E, kMaxPlacementSlots));
  if (request.num_redundant && N != E + *request.num_redundant) {
    return refuse(fmt::format("num_slots is {} and num_redundant is {}, but {} experts and {} redundant slots are {}",
                              N, *request.num_redundant, E, *request.num_redundant, E + *request.num_redundant));
  }
  if (P > N && N != E) {
    return refuse(fmt::format("num_ranks is {}, but {} slots ({} experts, {} redundant) leave {} ranks without any", P,
                              N, E, N - E, P - N));
  }
  SLUICE_TRY(check_size("num_nodes", K, 1, kMaxPlacementSlots));
  SLUICE_TRY(check_size("num_groups", G, 1, kMaxPlacementSlots));
  if (P % K != 0) return refuse(fmt::format("num_nodes is {}, which does not divide num_ranks = {}", K, P));
  if (E % G != 0) return refuse(fmt::format("num_groups is {}, which does not divide the {} experts", G, E));
  return N;
}

// The ranks' experts, from those of each node; numbers within a node are turned back by `experts`.
void append_node(Placement& placement, std::span<const double> load, std::span<const std::int32_t> experts,
                 std::span<const std::int64_t> capacity) {
  std::vector<double> node_load;
  for (const std::int32_t expert : experts) node_load.push_back(load[static_cast<std::size_t>(expert)]);
  for (const std::vector<std::int32_t>& rank : placement::spread(node_load, capacity)) {
    for (const std::int32_t expert : rank) placement.slot_expert.push_back(experts[static_cast<std::size_t>(expert)]);
    placement.rank_begin.push_back(static_cast<std::int32_t>(placement.num_slots()));
  }
}

// Whole groups to each node; the heaviest node first, since the first ones get the slots that are over.
std::vector<std::vector<std::int32_t>> groups_of_nodes(std::span<const double> load, const PlacementRequest& request) {
  const std::int64_t size = std::ssize(load) / request.num_groups;
  std::vector<double> group_load;
  for (std::int64_t group = 0; group < request.num_groups; ++group)
    group_load.push_back(std::accumulate(load.begin() + group * size, load.begin() + (group + 1) * size, 0.0));
  const std::vector<std::int64_t> capacity(static_cast<std::size_t>(request.num_nodes),
                                           request.num_groups / request.num_nodes);
  std::vector<std::vector<std::int32_t>> nodes = placement::spread(group_load, capacity);
  const auto sum_of = [&](const std::vector<std::int32_t>& groups) {
    double sum = 0;
    for (const std::int32_t group : groups) sum += group_load[static_cast<std::size_t>(group)];
    return sum;
  };
  std::stable_sort(nodes.begin(), nodes.end(), [&](const auto& a, const auto& b) { return sum_of(a) > sum_of(b); });
  return nodes;
}

RankBalance add_up(const Placement& placement, std::span<const double> load) {
  std::vector<std::int64_t> count(load.size());
  for (const std::int32_t expert : placement.slot_expert) ++count[static_cast<std::size_t>(expert)];
  RankBalance balance;
  for (std::size_t rank = 0; rank + 1 < placement.rank_begin.size(); ++rank) {
    double& sum = balance.rank_load.emplace_back(0.0);
    for (std::int32_t slot = placement.rank_begin[rank]; slot < placement.rank_begin[rank + 1]; ++slot) {
      const auto expert = static_cast<std::size_t>(placement.slot_expert[static_cast<std::size_t>(slot)]);
      sum += load[expert] / static_cast<double>(count[expert]);
    }
  }
  const auto hottest = std::max_element(balance.rank_load.begin(), balance.rank_load.end());
  balance.max = *hottest;
  balance.hottest_rank = hottest - balance.rank_load.begin();
  // From the experts' loads: the ranks' may have been rounded.
  balance.mean = std::accumulate(load.begin(), load.end(), 0.0) / static_cast<double>(balance.rank_load.size());
  return balance;
}

}  // namespace

bool is_hierarchical(const PlacementRequest& request) {
  return request.num_nodes > 1 && request.num_groups % request.num_nodes == 0;
}

Result<Placement> plan_placement(std::span<const double> load, const PlacementRequest& request) {
  const std::int64_t E = std::ssize(load), P = request.num_ranks;
  const Result<std::int64_t> num_slots = check_request(E, request);
  if (!num_slots) return num_slots.status();
  SLUICE_TRY(check_load(load, "expert").with_context("placement"));
  const std::int64_t N = *num_slots;
  const std::int64_t K = is_hierarchical(request) ? request.num_nodes : 1;

  Placement placement;
  placement.num_experts = E;
  placement.rank_begin.push_back(0);
  std::vector<std::vector<std::int32_t>> experts_of_node(static_cast<std::size_t>(K));
  if (K == 1) {
    experts_of_node[0].resize(load.size());
    std::iota(experts_of_node[0].begin(), experts_of_node[0].end(), 0);
  } else {
    const std::int64_t size = E / request.num_groups;
    const std::vector<std::vector<std::int32_t>> nodes = groups_of_nodes(load, request);
    for (std::size_t node = 0; node < nodes.size(); ++node) {
      for (const std::int32_t group : nodes[node]) {
        for (std::int64_t i = 0; i < size; ++i)
          experts_of_node[node].push_back(static_cast<std::int32_t>(group * size + i));
      }
    }
  }
  for (std::int64_t node = 0; node < K; ++node) {
    const std::int64_t node_slots = size_of_part(N, K, node);
    std::vector<std::int64_t> capacity;
    for (std::int64_t rank = 0; rank < P / K; ++rank) capacity.push_back(size_of_part(node_slots, P / K, rank));
    append_node(placement, load, experts_of_node[static_cast<std::size_t>(node)], capacity);
  }
  // Moving experts about for nothing helps nobody. Over nodes the balanced split may tear a group apart.
  if (N == E && (K == 1 || E % P == 0)) {
    Placement balanced = balanced_placement(E, P);
    if (add_up(balanced, load).max <= add_up(placement, load).max) return balanced;
  }
  return placement;
}

Result<Placement> plan_placement(std::span<const std::int64_t> load, const PlacementRequest& request) {
  const std::vector<double> tokens(load.begin(), load.end());  // 2^53 + 1 becomes 2^53, and that is near enough
  return plan_placement(tokens, request);
}

Result<RankBalance> balance_of(const Placement& placement, std::span<const double> load) {
  SLUICE_TRY(validate(placement));
  if (std::ssize(load) != placement.num_experts) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("balance: {} loads for a placement of {} experts", load.size(), placement.num_experts));
  }
  SLUICE_TRY(check_load(load, "expert").with_context("balance"));
  return add_up(placement, load);
}

Status validate(const ExpertLoads& loads) {
  const auto refuse_loads = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, "expert loads: " + std::move(text));
  };
  const std::int64_t E = loads.num_experts, n = std::ssize(loads.layers);
  if (E < 1 || E > kMaxPlacementSlots)
    return refuse_loads(fmt::format("num_experts is {}, expected 1 to {}", E, kMaxPlacementSlots));
  if (n < 1 || n > kMaxPlacementLayers)
    return refuse_loads(fmt::format("there are {} layers, expected 1 to {}", n, kMaxPlacementLayers));
  if (std::ssize(loads.tokens) != n * E) {
    return refuse_loads(fmt::format("there are {} values for {} layers of {} experts", loads.tokens.size(), n, E));
  }
  for (std::size_t i = 0; i < loads.layers.size(); ++i) {
    if (loads.layers[i] < 0) return refuse_loads(fmt::format("a layer has the number {}", loads.layers[i]));
    if (i > 0 && loads.layers[i] <= loads.layers[i - 1])
      return refuse_loads(fmt::format("layer {} follows layer {}", loads.layers[i], loads.layers[i - 1]));
    SLUICE_TRY(check_load(loads.of(i), fmt::format("layer {}, expert", loads.layers[i])).with_context("expert loads"));
  }
  return Status::ok();
}

Status merge(ExpertLoads& loads, const ExpertLoads& more) {
  SLUICE_TRY(validate(more));
  if (loads.layers.empty()) {
    loads = more;
    return Status::ok();
  }
  SLUICE_TRY(validate(loads));
  if (loads.num_experts != more.num_experts) {
    return {StatusCode::kInvalidArgument, fmt::format("expert loads: {} experts and {} experts are not of one model",
                                                      loads.num_experts, more.num_experts)};
  }
  ExpertLoads merged;
  merged.num_experts = loads.num_experts;
  std::size_t a = 0, b = 0;
  while (a < loads.layers.size() || b < more.layers.size()) {
    const bool from_a = b == more.layers.size() || (a < loads.layers.size() && loads.layers[a] <= more.layers[b]);
    const bool from_b = a == loads.layers.size() || (b < more.layers.size() && more.layers[b] <= loads.layers[a]);
    merged.layers.push_back(from_a ? loads.layers[a] : more.layers[b]);
    for (std::size_t e = 0; e < static_cast<std::size_t>(merged.num_experts); ++e)
      merged.tokens.push_back((from_a ? loads.of(a)[e] : 0.0) + (from_b ? more.of(b)[e] : 0.0));
    a += from_a ? 1 : 0;
    b += from_b ? 1 : 0;
  }
  SLUICE_TRY(validate(merged));
  loads = std::move(merged);
  return Status::ok();
}

Result<std::vector<LayerPlacement>> plan_placements(const ExpertLoads& loads, const PlacementRequest& request) {
  SLUICE_TRY(validate(loads));
  std::vector<LayerPlacement> placements;
  for (std::size_t i = 0; i < loads.layers.size(); ++i) {
    Result<Placement> placement = plan_placement(loads.of(i), request);
    if (!placement) return placement.status().with_context(fmt::format("layer {}", loads.layers[i]));
    placements.push_back({loads.layers[i], std::move(*placement)});
  }
  return placements;
}

}  // namespace sluice
