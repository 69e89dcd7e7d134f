// How good plans are: against the best there is where it can be found, and against published placements.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

#include "sluice/placement_plan.h"

namespace sluice::test {
namespace {

// The least that the fullest rank can have, over every choice of replica counts and every placement of them with the
// ranks' sizes and no expert twice on a rank.
double best_of(const std::vector<double>& load, int num_ranks, int num_slots) {
  const int E = static_cast<int>(load.size());
  std::vector<int> count(load.size(), 1), left;
  double best = std::numeric_limits<double>::max();
  const std::function<void(int, int, int, double, double)> fill = [&](int rank, int taken, int from, double sum,
                                                                      double most) {
    if (most >= best) return;
    if (rank == num_ranks) {
      best = most;
      return;
    }
    if (taken == num_slots / num_ranks + (rank < num_slots % num_ranks ? 1 : 0)) {
      fill(rank + 1, 0, 0, 0, std::max(most, sum));
      return;
    }
    for (int e = from; e < E; ++e) {
      if (left[e] == 0) continue;
      --left[e];
      fill(rank, taken + 1, e + 1, sum + load[e] / count[e], most);
      ++left[e];
    }
  };
  const std::function<void(int, int)> choose = [&](int e, int spare) {
    if (e == E - 1) {
      count[e] = 1 + spare;
      left = count;
      fill(0, 0, 0, 0, 0);
      return;
    }
    for (int more = 0; more <= spare; ++more) {
      count[e] = 1 + more;
      choose(e + 1, spare - more);
    }
  };
  choose(0, num_slots - E);
  return best;
}

// The derived bound is (2 - 1/P) times the best (docs/expert_parallelism.md). What is found in these instances is much
// nearer, and must stay so: optimal in most, never beyond 4/3.
TEST(PlacementQuality, PlansAreNearTheBestOfAllSmallPlacements) {
  std::mt19937 random(1);
  int num_instances = 0, num_optimal = 0;
  double worst = 1;
  while (num_instances < 4000) {
    const int P = 1 + static_cast<int>(random() % 4), E = 1 + static_cast<int>(random() % 6);
    const int N = E + static_cast<int>(random() % 4);
    const auto kind = random() % 3;
    std::vector<double> load(static_cast<std::size_t>(E));
    for (double& tokens : load) {
      tokens = kind == 0   ? static_cast<double>(random() % 10)
               : kind == 1 ? static_cast<double>(random() % 100)
                           : std::floor(1000 / std::pow(1.0 + static_cast<double>(random() % 20), 1.5));
    }
    if (N > 9 || N > E * P || (N < P && N != E)) continue;
    ++num_instances;
    PlacementRequest request;
    request.num_ranks = P;
    request.num_slots = N;
    const Result<Placement> placement = plan_placement(load, request);
    ASSERT_TRUE(placement.is_ok()) << placement.status().message();
    const double found = balance_of(*placement, load)->max, best = best_of(load, P, N);
    SCOPED_TRACE(fmt::format("P {} N {} loads {}", P, N, fmt::join(load, " ")));
    EXPECT_GE(found, best * (1 - 1e-9)) << "better than the best: the placement or the search is wrong";
    EXPECT_LE(found, best * (2 - 1.0 / P) * (1 + 1e-9));
    if (found <= best * (1 + 1e-9)) ++num_optimal;
    if (best > 0) worst = std::max(worst, found / best);
  }
  EXPECT_LE(worst, 4.0 / 3 * (1 + 1e-9));
  EXPECT_GE(num_optimal, num_instances * 17 / 20) << worst;
}

// The example of github.com/deepseek-ai/EPLB: two layers of 12 experts in 4 groups, 16 slots on 8 GPUs of 2 nodes, and
// the placement its README prints.
TEST(PlacementQuality, AtLeastAsBalancedAsThePublishedExample) {
  const std::vector<std::vector<double>> loads = {{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86},
                                                  {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}};
  const std::vector<std::vector<std::int32_t>> published = {{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1},
                                                            {7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}};
  const double published_max[] = {156, 179.5};  // added up by hand from the two lists
  for (std::size_t layer = 0; layer < 2; ++layer) {
    const Placement theirs{12, published[layer], {0, 2, 4, 6, 8, 10, 12, 14, 16}};
    ASSERT_EQ(balance_of(theirs, loads[layer])->max, published_max[layer]);
    PlacementRequest request;
    request.num_ranks = 8;
    request.num_slots = 16;
    request.num_nodes = 2;
    request.num_groups = 4;
    ASSERT_TRUE(is_hierarchical(request));
    const double ours = balance_of(*plan_placement(loads[layer], request), loads[layer])->max;
    EXPECT_LE(ours, published_max[layer]);
    // Without the groups' constraint there is more to gain.
    request.num_nodes = 1;
    EXPECT_LT(balance_of(*plan_placement(loads[layer], request), loads[layer])->max, published_max[layer]);
  }
}

}  // namespace
}  // namespace sluice::test
