// Which slot works on which token.
#include "placement/index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace sluice::test {
namespace {

using testing::ElementsAre;

std::vector<std::int32_t> to_vector(std::span<const std::int32_t> values) { return {values.begin(), values.end()}; }

TEST(PlacementIndex, HoldsTheSlotsOfEveryExpertAscending) {
  const Placement placement{4, {2, 0, 1, 3, 0, 1, 0}, {0, 3, 3, 7}};
  ASSERT_TRUE(validate(placement).is_ok());
  const PlacementIndex index = PlacementIndex::of(placement);
  EXPECT_THAT(to_vector(index.replicas(0)), ElementsAre(1, 4, 6));
  EXPECT_THAT(to_vector(index.replicas(1)), ElementsAre(2, 5));
  EXPECT_THAT(to_vector(index.replicas(2)), ElementsAre(0));
  EXPECT_THAT(to_vector(index.replicas(3)), ElementsAre(3));
  EXPECT_THAT(to_vector(index.replica_begin()), ElementsAre(0, 3, 5, 6, 7));
  EXPECT_THAT(to_vector(index.replica_slots()), ElementsAre(1, 4, 6, 2, 5, 0, 3));
  EXPECT_THAT(to_vector(index.slot_rank()), ElementsAre(0, 0, 0, 2, 2, 2, 2));
  for (std::int32_t slot = 0; slot < 7; ++slot) EXPECT_EQ(index.rank_of(slot), slot < 3 ? 0 : 2);
}

TEST(PlacementIndex, ReplicasTakeTurnsAndDependOnNothingElse) {
  const Placement placement{4, {2, 0, 1, 3, 0, 1, 0}, {0, 3, 3, 7}};
  const PlacementIndex index = PlacementIndex::of(placement);
  const PlacementIndex again = PlacementIndex::of(placement);
  // Expert 0 has three slots, expert 1 two, shifted by one; the rest have one.
  const std::vector<std::int32_t> expected_0 = {1, 4, 6, 1, 4, 6, 1}, expected_1 = {5, 2, 5, 2, 5, 2, 5};
  for (std::int64_t token = 0; token < 7; ++token) {
    EXPECT_EQ(index.slot(0, token), expected_0[static_cast<std::size_t>(token)]);
    EXPECT_EQ(index.slot(1, token), expected_1[static_cast<std::size_t>(token)]);
    EXPECT_EQ(index.slot(2, token), 0);
    EXPECT_EQ(index.slot(3, token), 3);
  }
  for (const std::int64_t token : {std::int64_t{1} << 31, (std::int64_t{1} << 40) + 1, INT64_MAX}) {
    for (std::int32_t expert = 0; expert < 4; ++expert) {
      const std::int32_t slot = index.slot(expert, token);
      EXPECT_EQ(placement.slot_expert[static_cast<std::size_t>(slot)], expert);
      EXPECT_EQ(again.slot(expert, token), slot);
    }
  }
}

TEST(PlacementIndex, ConsecutiveTokensShareReplicasEvenlyToWithinOne) {
  const Placement placement{2, {0, 1, 0, 1, 0, 1, 0, 1, 0}, {0, 2, 4, 6, 8, 9}};
  const PlacementIndex index = PlacementIndex::of(placement);
  for (const std::int32_t expert : {0, 1}) {
    for (const std::int64_t first : {0, 3, 1000003}) {
      for (const std::int64_t count : {1, 4, 5, 13, 128}) {
        std::vector<int> load(9);
        for (std::int64_t token = first; token < first + count; ++token) ++load[index.slot(expert, token)];
        const auto replicas = static_cast<std::int64_t>(index.replicas(expert).size());
        for (const std::int32_t slot : index.replicas(expert)) {
          EXPECT_GE(load[slot], count / replicas);
          EXPECT_LE(load[slot], (count + replicas - 1) / replicas);
        }
      }
    }
  }
}

// Case 117: two replicas on one rank are useless, and must not do harm.
TEST(PlacementIndex, Case117TwoReplicasOnOneRankAreLegal) {
  const Placement placement{4, {0, 0, 1, 2, 3, 1}, {0, 3, 6}};
  ASSERT_TRUE(validate(placement).is_ok());
  const PlacementIndex index = PlacementIndex::of(placement);
  EXPECT_THAT(to_vector(index.replicas(0)), ElementsAre(0, 1));
  EXPECT_THAT(to_vector(index.replicas(1)), ElementsAre(2, 5));
  for (std::int64_t token = 0; token < 4; ++token) EXPECT_EQ(index.rank_of(index.slot(0, token)), 0);
}

TEST(PlacementIndex, TheBalancedSplitHasOneSlotAnExpertAndRanksWithoutAny) {
  const Placement placement = balanced_placement(3, 4);
  const PlacementIndex index = PlacementIndex::of(placement);
  for (std::int32_t expert = 0; expert < 3; ++expert) {
    for (const std::int64_t token : {0, 1, 2, 7}) EXPECT_EQ(index.slot(expert, token), expert);
    EXPECT_EQ(index.rank_of(expert), expert);
  }
}

}  // namespace
}  // namespace sluice::test
