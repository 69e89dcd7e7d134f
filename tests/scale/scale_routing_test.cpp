// Expectations of the routing and of the traffic, against counting every way a token can be routed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <set>

#include "scale/routing.h"
#include "scale/scale_fixture.h"
#include "scale/traffic.h"

namespace sluice::test {
namespace {

constexpr double kExact = 1e-12;  // sums of a few hundred doubles of order 1

struct Case {
  std::int64_t experts, top_k, groups, kept;
};
constexpr Case kCases[] = {{4, 1, 1, 1}, {4, 2, 1, 1},  {8, 3, 1, 1},  {12, 4, 1, 1}, {12, 12, 1, 1},
                           {8, 2, 4, 2}, {12, 4, 4, 2}, {12, 3, 3, 1}, {16, 4, 8, 4}, {12, 4, 2, 2}};

TEST(ScaleRouting, ShareOfAnyRangeIsWhatCountingGives) {
  for (const Case& c : kCases) {
    const auto routes = all_routes(c.experts, c.top_k, c.groups, c.kept);
    const auto all = static_cast<double>(routes.size());
    for (std::int64_t begin = 0; begin <= c.experts; ++begin) {
      for (std::int64_t end = begin; end <= c.experts; ++end) {
        double hits = 0, rows = 0, squares = 0;
        for (const auto& route : routes) {
          double inside = 0;
          for (const std::int64_t e : route) inside += e >= begin && e < end ? 1 : 0;
          hits += inside > 0 ? 1 : 0;
          rows += inside;
          squares += inside * inside;
        }
        const auto share = scale::share_of_range({c.experts, c.top_k, c.groups, c.kept}, begin, end);
        SCOPED_TRACE(testing::Message() << c.experts << " top " << c.top_k << ", " << c.kept << " of " << c.groups
                                        << " groups, [" << begin << ", " << end << ")");
        EXPECT_NEAR(share.hit, hits / all, kExact);
        EXPECT_NEAR(share.rows, rows / all, kExact * 10);
        EXPECT_NEAR(share.variance, squares / all - rows / all * rows / all, kExact * 100);
      }
    }
  }
}

TEST(ScaleRouting, GroupLimitedTokensReachFewerDomains) {
  // DeepSeek-V3 on 8 domains, a group on each: never more than 4, plain top 8 of 256 on 5.3.
  const auto domains = [](std::int64_t groups, std::int64_t kept) {
    double sum = 0;
    for (std::int64_t d = 0; d < 8; ++d) sum += scale::share_of_range({256, 8, groups, kept}, d * 32, d * 32 + 32).hit;
    return sum;
  };
  EXPECT_LT(domains(8, 4), 4);
  EXPECT_GT(domains(8, 4), 3.5);
  double miss = 1;  // C(224,8) / C(256,8)
  for (int i = 0; i < 8; ++i) miss *= (224.0 - i) / (256.0 - i);
  EXPECT_NEAR(domains(1, 1), 8 * (1 - miss), kExact * 10);
}

// Bytes of each rank when every token of every rank is routed in every way once, counted message by message.
struct Counted {
  std::map<std::int64_t, scale::Traffic> rank, slot, domain;
};

Counted count(const std::vector<std::vector<std::int64_t>>& routes, const std::vector<std::int64_t>& owner,
              std::int64_t ranks, std::int64_t domain_size) {
  Counted counted;
  const double one = 1 / static_cast<double>(routes.size());
  const auto send = [&](std::map<std::int64_t, scale::Traffic>& to, std::int64_t from, std::int64_t dest) {
    double scale::Links::*link = from == dest                               ? &scale::Links::gpu
                                 : from / domain_size == dest / domain_size ? &scale::Links::nvlink
                                                                            : &scale::Links::nic;
    to[from].out.*link += one;
    to[dest].in.*link += one;
  };
  for (std::int64_t source = 0; source < ranks; ++source) {
    for (const auto& route : routes) {
      std::set<std::int64_t> dests;
      for (const std::int64_t e : route) {
        dests.insert(owner[static_cast<std::size_t>(e)]);
        send(counted.slot, source, owner[static_cast<std::size_t>(e)]);
      }
      std::set<std::int64_t> domains;
      for (const std::int64_t dest : dests) {
        send(counted.rank, source, dest);
        domains.insert(dest / domain_size);
        if (dest / domain_size == source / domain_size) send(counted.domain, source, dest);
      }
      for (const std::int64_t d : domains) {
        if (d == source / domain_size) continue;
        const std::int64_t begin = d * domain_size, size = std::min(begin + domain_size, ranks) - begin;
        const std::int64_t entry = begin + source % domain_size % size;
        send(counted.domain, source, entry);
        for (const std::int64_t dest : dests) {
          if (dest / domain_size == d && dest != entry) send(counted.domain, entry, dest);
        }
      }
    }
  }
  return counted;
}

void expect_near(const scale::Links& got, const scale::Links& want) {
  EXPECT_NEAR(got.nvlink, want.nvlink, 1e-9);
  EXPECT_NEAR(got.nic, want.nic, 1e-9);
}

TEST(ScaleRouting, TrafficOfEveryRankIsWhatCountingMessagesGives) {
  struct Layout {
    Case routing;
    std::int64_t ranks, domain;
  };
  for (const Layout& l : {Layout{{4, 1, 1, 1}, 2, 8},
                          {{4, 2, 1, 1}, 2, 1},
                          {{8, 2, 1, 1}, 4, 2},
                          {{10, 3, 1, 1}, 5, 2},
                          {{11, 2, 1, 1}, 4, 2},
                          {{8, 2, 4, 2}, 4, 2},
                          {{12, 4, 4, 2}, 6, 2},
                          {{9, 2, 3, 2}, 7, 3},
                          {{3, 2, 1, 1}, 5, 2}}) {
    SCOPED_TRACE(testing::Message() << l.routing.experts << " experts, " << l.ranks << " ranks, domains of "
                                    << l.domain);
    std::vector<std::int64_t> owner;
    for (std::int64_t rank = 0; rank < l.ranks; ++rank) {  // the first ones have one more
      const std::int64_t n = l.routing.experts / l.ranks + (rank < l.routing.experts % l.ranks ? 1 : 0);
      owner.insert(owner.end(), static_cast<std::size_t>(n), rank);
    }
    Counted counted = count(all_routes(l.routing.experts, l.routing.top_k, l.routing.groups, l.routing.kept), owner,
                            l.ranks, l.domain);
    scale::Request request = request_for(l.routing.experts, l.routing.top_k, l.ranks, 1);
    request.config.gate.n_group = l.routing.groups;
    request.config.gate.topk_group = l.routing.kept;
    const scale::Ranks ranks(plain_hardware(l.domain), request);
    for (std::int64_t rank = 0; rank < l.ranks; ++rank) {
      SCOPED_TRACE(rank);
      const std::pair<scale::Traffic, scale::Traffic> pairs[] = {{ranks.per_rank(rank), counted.rank[rank]},
                                                                 {ranks.per_slot(rank), counted.slot[rank]},
                                                                 {ranks.per_domain(rank), counted.domain[rank]}};
      for (const auto& [got, want] : pairs) {
        expect_near(got.out, want.out);
        expect_near(got.in, want.in);
      }
    }
  }
}

TEST(ScaleRouting, TheFullestRankIsBoundedByTheApproximation) {
  // 8 ranks of 4 experts, 64 tokens each, top 4 of 32: the mean of the largest count over 300 seeded draws.
  constexpr std::int64_t kRanks = 8, kTokens = 64, kExperts = 32, kTopK = 4;
  std::mt19937 draw(7);
  double sum = 0;
  constexpr int kDraws = 300;
  for (int i = 0; i < kDraws; ++i) {
    std::vector<double> rows(kRanks, 0);
    for (std::int64_t t = 0; t < kRanks * kTokens; ++t) {
      std::set<std::uint32_t> chosen;
      while (chosen.size() < kTopK) chosen.insert(draw() % kExperts);
      for (const std::uint32_t e : chosen) rows[e / 4] += 1;
    }
    sum += *std::max_element(rows.begin(), rows.end());
  }
  const auto p = scale::predict(plain_hardware(), request_for(kExperts, kTopK, kRanks, kTokens));
  ASSERT_TRUE(p.is_ok()) << p.status().message();
  EXPECT_DOUBLE_EQ(p->rows_mean, kTokens * kTopK);
  const double seen = sum / kDraws;
  EXPECT_GT(seen, p->rows_mean);
  EXPECT_LE(seen, p->rows_max);
  // sqrt(2 ln 8) = 2.04 deviations against 1.42, the expected largest of 8 normal values: 0.6 of 13 rows.
  EXPECT_LT(p->rows_max - seen, 0.7 * 13.0);
}

}  // namespace
}  // namespace sluice::test
