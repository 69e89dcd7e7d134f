#include "placement/spread.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <set>
#include <utility>

namespace sluice::placement {
namespace {

// Work of the improvement, counted and not timed, so that the result is the same on every machine. A layer of 256
// experts on 320 ranks needs a thousandth of it.
constexpr std::int64_t kMaxSteps = 100'000'000;
// An improvement must be one: sums of the same shares in another order differ in their last bits.
constexpr double kLess = 1 - 1e-12;

// Things are numbered by descending load here ("heaviest first"), so that nothing depends on what they are called.
class Spread {
 public:
  Spread(std::vector<double> load, std::span<const std::int64_t> capacity)
      : load_(std::move(load)),
        capacity_(capacity.begin(), capacity.end()),
        count_(load_.size(), 1),
        bins_(capacity.size()),
        where_(load_.size()),
        sum_(capacity.size(), 0.0),
        is_held_(load_.size() * capacity.size(), false) {}

  std::vector<std::vector<std::int32_t>> run() {
    replicate();
    assign();
    improve(false);
    improve(true);
    return std::move(bins_);
  }

 private:
  int num_things() const { return static_cast<int>(load_.size()); }
  int num_bins() const { return static_cast<int>(bins_.size()); }
  double share(int thing) const { return load_[thing] / static_cast<double>(count_[thing]); }
  double share_of(int thing, int count) const { return load_[thing] / static_cast<double>(count); }
  bool holds(int bin, int thing) const { return is_held_[static_cast<std::size_t>(bin) * load_.size() + thing]; }
  bool has_room(int bin) const { return std::ssize(bins_[bin]) < capacity_[bin]; }

  void put(int bin, int thing) {
    bins_[bin].push_back(thing);
    where_[thing].push_back(bin);
    is_held_[static_cast<std::size_t>(bin) * load_.size() + thing] = true;
  }
  void take(int bin, int thing) {
    bins_[bin].erase(std::find(bins_[bin].begin(), bins_[bin].end(), thing));
    where_[thing].erase(std::find(where_[thing].begin(), where_[thing].end(), bin));
    is_held_[static_cast<std::size_t>(bin) * load_.size() + thing] = false;
  }
  // From its shares, always in the same order: sums that are updated drift.
  void add_up(int bin) {
    std::sort(bins_[bin].begin(), bins_[bin].end(),
              [&](int a, int b) { return share(a) != share(b) ? share(a) > share(b) : a < b; });
    sum_[bin] = 0;
    for (const int thing : bins_[bin]) sum_[bin] += share(thing);
  }

  // Another replica for whatever has the largest share, until all capacity is spoken for. No other choice of counts has
  // a smaller largest share: each step lowers the only share (or one of those) that could not stay in such a choice.
  void replicate() {
    struct Candidate {
      double share;
      int count, thing;
      // Equal shares: what has fewer replicas first, so that things without load take turns.
      bool operator<(const Candidate& other) const {
        if (share != other.share) return share < other.share;
        return std::pair(count, thing) > std::pair(other.count, other.thing);
      }
    };
    std::int64_t left = std::accumulate(capacity_.begin(), capacity_.end(), std::int64_t{0}) - num_things();
    std::priority_queue<Candidate> candidates;
    for (int thing = 0; thing < num_things(); ++thing) candidates.push({share(thing), 1, thing});
    for (; left > 0; --left) {
      const int thing = candidates.top().thing;
      candidates.pop();
      ++count_[thing];
      if (count_[thing] < num_bins()) candidates.push({share(thing), count_[thing], thing});
    }
  }

  // Longest processing time first: things by descending share, each replica to the lightest bin that has room and does
  // not hold the thing yet.
  void assign() {
    std::vector<int> order(load_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return share(a) > share(b); });
    std::set<std::pair<double, int>> open;  // bins with room, by load
    for (int bin = 0; bin < num_bins(); ++bin) {
      if (has_room(bin)) open.insert({0.0, bin});
    }
    for (const int thing : order) {
      for (int replica = 0; replica < count_[thing]; ++replica) {
        const auto found =
            std::find_if(open.begin(), open.end(), [&](const auto& entry) { return !holds(entry.second, thing); });
        if (found == open.end()) {
          make_room_for(thing, open);
          continue;
        }
        const int bin = found->second;
        open.erase(found);
        put(bin, thing);
        sum_[bin] += share(thing);
        if (has_room(bin)) open.insert({sum_[bin], bin});
      }
    }
    for (int bin = 0; bin < num_bins(); ++bin) add_up(bin);
  }

  // Every bin with room holds the thing already. One of them, r, takes something from a full bin q without the thing,
  // which goes there instead. There is such a q, since the thing has at most as many replicas as there are bins; and q
  // has something r has not: of q's at least |r| things, r can share at most |r| - 1, the thing itself being in r
  // alone.
  void make_room_for(int thing, std::set<std::pair<double, int>>& open) {
    const int r = open.begin()->second;
    int best_q = -1, best_other = -1;
    double best = 0;
    for (int q = 0; q < num_bins(); ++q) {
      if (holds(q, thing) || capacity_[q] == 0) continue;
      for (const int other : bins_[q]) {
        if (holds(r, other)) continue;
        const double worse = std::max(sum_[r] + share(other), sum_[q] - share(other) + share(thing));
        if (best_q < 0 || worse < best) {
          best = worse;
          best_q = q;
          best_other = other;
        }
      }
    }
    open.erase({sum_[r], r});
    take(best_q, best_other);
    put(best_q, thing);
    put(r, best_other);
    add_up(best_q);
    add_up(r);
    if (has_room(r)) open.insert({sum_[r], r});
  }

  // A change that leaves the fullest bin and every bin it touches lighter than the fullest was.
  struct Change {
    double worst = 0;  // load of the heaviest bin touched, afterwards
    bool is_swap = false;
    int thing = -1, other = -1, bin = -1;
  };

  // Things of the fullest bin for lighter ones of another. The best for two bins moves half their difference; of the
  // things of the other bin, sorted by share, only the two next to that can be it.
  void find_swap(int full, Change& best) {
    for (const int thing : bins_[full]) {
      for (int bin = 0; bin < num_bins(); ++bin) {
        ++steps_;
        if (sum_[bin] >= best.worst || holds(bin, thing)) continue;
        const std::vector<int>& others = bins_[bin];
        const double wanted = share(thing) - (sum_[full] - sum_[bin]) / 2;
        const auto middle =
            std::partition_point(others.begin(), others.end(), [&](int other) { return share(other) > wanted; });
        const auto judge = [&](int other) {
          ++steps_;
          if (holds(full, other)) return false;  // look further
          const double less = share(thing) - share(other);
          const double worst = std::max(sum_[full] - less, sum_[bin] + less);
          if (worst < best.worst) best = {worst, true, thing, other, bin};
          return true;
        };
        std::find_if(middle, others.end(), judge);
        std::find_if(std::make_reverse_iterator(middle), others.rend(), judge);
      }
    }
  }

  // A slot of `other` for another replica of `thing`, in `bin`. Judges what the fullest bin and all that get heavier
  // would have.
  void judge_transfer(int full, int thing, int other, int bin, Change& best) {
    const double replica = share_of(thing, count_[thing] + 1);
    const double less = share(thing) - replica, more = share_of(other, count_[other] - 1) - share(other);
    double worst = sum_[bin] - share(other) + replica;
    if (worst >= best.worst) return;
    const auto raise = [&](int touched) {
      ++steps_;
      if (touched == bin) return;
      worst =
          std::max(worst, sum_[touched] + (holds(touched, other) ? more : 0.0) - (holds(touched, thing) ? less : 0.0));
    };
    raise(full);
    for (const int touched : where_[other]) {
      if (worst >= best.worst) return;
      raise(touched);
    }
    if (worst < best.worst) best = {worst, false, thing, other, bin};
  }

  // Another replica of a thing of the fullest bin in the place of one that is missed less; or the fullest bin gives up
  // a replica for one of something lighter.
  void find_transfer(int full, Change& best) {
    for (int other = 0; other < num_things(); ++other) {
      if (count_[other] < 2 || share_of(other, count_[other] - 1) >= best.worst) continue;
      for (const int thing : bins_[full]) {
        if (thing == other || count_[thing] >= num_bins()) continue;
        for (const int bin : where_[other]) {
          ++steps_;
          if (!holds(bin, thing)) judge_transfer(full, thing, other, bin, best);
        }
      }
      if (!holds(full, other)) continue;
      for (int thing = 0; thing < num_things(); ++thing) {
        ++steps_;
        if (count_[thing] < num_bins() && !holds(full, thing)) judge_transfer(full, thing, other, full, best);
      }
    }
  }

  void apply(int full, const Change& change) {
    take(change.bin, change.other);
    put(change.bin, change.thing);
    std::vector<int> touched = {full, change.bin};
    if (change.is_swap) {
      take(full, change.thing);
      put(full, change.other);
    } else {
      ++count_[change.thing];
      --count_[change.other];
      for (const int thing : {change.thing, change.other})
        touched.insert(touched.end(), where_[thing].begin(), where_[thing].end());
    }
    for (const int bin : touched) add_up(bin);
  }

  // The best change for the fullest bin, again and again. Every one makes the loads, sorted from the heaviest, smaller
  // in the order of words, so it ends. Swaps alone come first: where none is left, no two bins differ by more than one
  // share, and the shares are still the smallest there are (docs/expert_parallelism.md); transfers only lower the
  // result further.
  void improve(bool with_transfers) {
    for (steps_ = 0; steps_ < kMaxSteps;) {
      const int full = static_cast<int>(std::max_element(sum_.begin(), sum_.end()) - sum_.begin());
      Change best;
      best.worst = sum_[full] * kLess;
      find_swap(full, best);
      if (with_transfers) find_transfer(full, best);
      if (best.bin < 0) return;
      apply(full, best);
    }
  }

  std::vector<double> load_;             // [n] descending
  std::vector<std::int64_t> capacity_;   // [m]
  std::vector<int> count_;               // [n] replicas
  std::vector<std::vector<int>> bins_;   // [m] things, by descending share
  std::vector<std::vector<int>> where_;  // [n] bins
  std::vector<double> sum_;              // [m] load
  std::vector<bool> is_held_;            // [m,n]
  std::int64_t steps_ = 0;
};

// More room than things in all bins: each bin has everything, and takes the lightest again, where that tilts least.
std::vector<std::vector<std::int32_t>> everything_everywhere(int num_things, std::span<const std::int64_t> capacity) {
  std::vector<std::vector<std::int32_t>> bins;
  for (const std::int64_t room : capacity) {
    std::vector<std::int32_t>& bin = bins.emplace_back();
    for (std::int64_t i = 0; i < room; ++i) bin.push_back(num_things - 1 - static_cast<int>(i % num_things));
  }
  return bins;
}

}  // namespace

std::vector<std::vector<std::int32_t>> spread(std::span<const double> load, std::span<const std::int64_t> capacity) {
  const int num_things = static_cast<int>(load.size());
  std::vector<std::int32_t> order(load.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return load[a] > load[b]; });
  std::vector<double> sorted;
  for (const std::int32_t thing : order) sorted.push_back(load[thing]);
  const std::int64_t room = std::accumulate(capacity.begin(), capacity.end(), std::int64_t{0});
  std::vector<std::vector<std::int32_t>> bins = room > static_cast<std::int64_t>(num_things) * std::ssize(capacity)
                                                    ? everything_everywhere(num_things, capacity)
                                                    : Spread(std::move(sorted), capacity).run();
  for (std::vector<std::int32_t>& bin : bins) {
    for (std::int32_t& thing : bin) thing = order[thing];
    std::sort(bin.begin(), bin.end());
  }
  return bins;
}

}  // namespace sluice::placement
