#include "scale/routing.h"

#include <algorithm>
#include <vector>

namespace sluice::scale {

namespace {

// S of M slots, m of them in the range.
RangeShare hypergeometric(double all, double inside, std::int64_t top_k) {
  double miss = 1;
  for (std::int64_t i = 0; i < top_k; ++i) {
    const auto drawn = static_cast<double>(i);
    miss *= std::max(0.0, all - inside - drawn) / (all - drawn);
  }
  const auto s = static_cast<double>(top_k);
  const double mean = s * inside / all;
  const double pairs = all > 1 ? mean * (s - 1) * (inside - 1) / (all - 1) : 0;  // E[X(X-1)]
  return {1 - miss, mean, pairs + mean};                                         // variance: still the second moment
}

}  // namespace

RangeShare share_of_range(const Routing& r, std::int64_t begin, std::int64_t end) {
  const std::int64_t size = r.num_slots / r.num_groups;
  const auto width = static_cast<std::size_t>(end - begin) + 1;
  // probability[k][m]: among the groups seen, k are kept and have m slots of the range.
  std::vector<std::vector<double>> probability(static_cast<std::size_t>(r.kept_groups) + 1,
                                               std::vector<double>(width, 0.0));
  probability[0][0] = 1;
  for (std::int64_t g = 0; g < r.num_groups; ++g) {
    const std::int64_t inside = std::max<std::int64_t>(0, std::min(end, (g + 1) * size) - std::max(begin, g * size));
    for (std::int64_t k = std::min(g, r.kept_groups); k >= 0; --k) {
      const double keep = std::max(0.0, static_cast<double>(r.kept_groups - k) / static_cast<double>(r.num_groups - g));
      for (std::size_t m = 0; m < width; ++m) {
        const double p = probability[static_cast<std::size_t>(k)][m];
        if (p == 0) continue;
        if (keep > 0) {
          probability[static_cast<std::size_t>(k) + 1][m + static_cast<std::size_t>(inside)] += p * keep;
        }
        probability[static_cast<std::size_t>(k)][m] = p * std::max(0.0, 1 - keep);
      }
    }
  }
  RangeShare total;
  double second_moment = 0;
  for (std::size_t m = 0; m < width; ++m) {
    const double p = probability[static_cast<std::size_t>(r.kept_groups)][m];
    if (p == 0) continue;
    const RangeShare one = hypergeometric(static_cast<double>(size * r.kept_groups), static_cast<double>(m), r.top_k);
    total.hit += p * one.hit;
    total.rows += p * one.rows;
    second_moment += p * one.variance;
  }
  total.variance = std::max(0.0, second_moment - total.rows * total.rows);
  return total;
}

}  // namespace sluice::scale
