// Plans which rank holds which experts, from the tokens each expert was seen to get: popular experts get replicas, and
// replicas are spread so that the rank with the most work has as little as possible. A file keeps loads and placements.
//
// Loads are tokens per logical expert (of any sample: only their proportions matter), finite, from 0 to 2^53. The
// replicas of an expert share its load evenly.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "sluice/placement.h"

namespace sluice {

inline constexpr std::int64_t kMaxPlacementSlots = 16384;  // of all ranks; experts and ranks have the same limit
inline constexpr std::int64_t kMaxPlacementLayers = 4096;

struct PlacementRequest {
  std::int64_t num_ranks = 1;                 // P
  std::optional<std::int64_t> num_slots;      // N >= E, of all ranks together
  std::optional<std::int64_t> num_redundant;  // N - E. Given both, they must agree; given neither, N = E
  std::int64_t num_nodes = 1;                 // K, divides P; ranks of a node are neighbours
  std::int64_t num_groups = 1;                // G, divides E; experts of a group are neighbours
};

// Whether experts stay with their group: each node gets whole groups, G/K of them, and replicas stay inside their node,
// so that a token whose gate keeps few groups crosses to few nodes. So it is done where K > 1 divides G; otherwise
// nodes and groups have no part in the plan.
bool is_hierarchical(const PlacementRequest& request);

// The plan of one layer. load [E].
// - Slots are split over the ranks like the experts of a balanced split: counts differ by at most 1 (hierarchical: over
//   the nodes, then over the ranks of a node). Experts ascend within a rank.
// - Two replicas of an expert are on one rank only where it cannot be otherwise: N > E*P (hierarchical: in a node).
// - The largest rank load is at most mean + (1 - 1/P) * (largest load of one replica), the latter as small as N slots
//   allow; hence at most (2 - 1/P) times the best there is (docs/expert_parallelism.md). With N = E it never exceeds
//   that of balanced_placement, which is returned where nothing is to be gained. Hierarchical: so it is within each
//   node.
// - The same request and loads give the same placement on every machine: no clock, no threads, ties by number.
// Refused: fewer slots than experts; counts that disagree; more ranks than slots, unless every slot has an expert of its
// own (the ranks beyond hold none); K that does not divide P, G that does not divide E; loads that are negative, NaN,
// infinite or above 2^53; more than kMaxPlacementSlots.
Result<Placement> plan_placement(std::span<const double> load, const PlacementRequest& request);
Result<Placement> plan_placement(std::span<const std::int64_t> load, const PlacementRequest& request);

// How much work each rank has under a placement.
struct RankBalance {
  std::vector<double> rank_load;  // [P] tokens
  double max = 0;                 // the largest of them
  double mean = 0;                // over all P ranks, those without experts included
  std::int64_t hottest_rank = 0;  // the first with the largest load
  double max_over_mean() const { return mean > 0 ? max / mean : 1.0; }
};
Result<RankBalance> balance_of(const Placement& placement, std::span<const double> load);

// Measured loads of several layers of one model.
struct ExpertLoads {
  std::int64_t num_experts = 0;      // E
  std::vector<std::int64_t> layers;  // [n] layer numbers, ascending
  std::vector<double> tokens;        // [n,E]
  std::span<const double> of(std::size_t i) const {
    return std::span(tokens).subspan(i * static_cast<std::size_t>(num_experts), static_cast<std::size_t>(num_experts));
  }
};
Status validate(const ExpertLoads& loads);
// Puts the layers of `more` to those of `loads` (which may be empty); a layer that is in both gets the sum.
Status merge(ExpertLoads& loads, const ExpertLoads& more);

struct LayerPlacement {
  std::int64_t layer = 0;
  Placement placement;
};
// A plan for each layer; errors name the layer.
Result<std::vector<LayerPlacement>> plan_placements(const ExpertLoads& loads, const PlacementRequest& request);

// JSON files, written beside their place and renamed, so that they appear whole or not at all. What is read back is
// what was written; a refusal names file and field.
//   {"format": "sluice-expert-load", "version": 1, "num_experts": 4, "layers": [{"layer": 3, "tokens": [5, 0, 2, 1]}]}
//   {"format": "sluice-placement", "version": 1, "num_experts": 4, "num_ranks": 2, "num_slots": 5,
//    "layers": [{"layer": 3, "ranks": [[0, 1, 3], [0, 2]]}]}
Status write_loads(const std::filesystem::path& path, const ExpertLoads& loads);
// Also a .npy array [n,E] or [E] of integers or floats, told by its name; its layers are numbered from 0.
Result<ExpertLoads> read_loads(const std::filesystem::path& path);
Status write_placements(const std::filesystem::path& path, const std::vector<LayerPlacement>& placements);
Result<std::vector<LayerPlacement>> read_placements(const std::filesystem::path& path);

}  // namespace sluice
