// Layers that do not belong together, or to their placement, are refused at create; what only a call can tell, at the call.
#include <gmock/gmock.h>

#include <climits>
#include <thread>

#include "expert_parallel/ranks.h"

namespace sluice::test {
namespace {

using testing::HasSubstr;

RandomLayer layer_of_16() {
  return random_layer(small_config(), {.expert_dtype = DType::kBF16, .shared_dtype = DType::kBF16, .seed = 3});
}
LayerOptions options_of(std::shared_ptr<Transport> transport, std::shared_ptr<Transport> tensor = nullptr) {
  LayerOptions o = options_for(Precision::kBF16, 8, 1);
  o.transport = std::move(transport);
  o.tensor_transport = std::move(tensor);
  return o;
}
std::string refusal(const RankLayer& part, const LayerOptions& options) {
  return Layer::create(part.config, part.weights, options).status().message();
}

TEST(SpreadRefusals, APlacementOfOneRankIsTheOrderOfTheWeights) {
  const RandomLayer whole = layer_of_16();
  LayerOptions o = options_for(Precision::kBF16, 8, 1);
  o.placement = balanced_placement(16, 1);
  EXPECT_TRUE(Layer::create(whole.config, whole.weights, o).is_ok());
  std::swap(o.placement.slot_expert[3], o.placement.slot_expert[7]);
  EXPECT_THAT(Layer::create(whole.config, whole.weights, o).status().message(),
              HasSubstr("slot 3 holds expert 7, of one rank it holds expert 3"));
  o.placement = balanced_placement(16, 4);
  EXPECT_THAT(Layer::create(whole.config, whole.weights, o).status().message(),
              HasSubstr("placement is of 16 experts over 4 ranks, the layer has 16 over 1"));
}

TEST(SpreadRefusals, TheFirstExpertIsThePlacements) {
  const RandomLayer whole = layer_of_16();
  const Placement placement = balanced_placement(16, 2);
  ThreadRanks ranks(2, std::chrono::milliseconds(5000));
  std::string said[2];
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    RankLayer part = part_of(whole, placement, rank);
    part.config.first_expert = rank == 0 ? 0 : 4;
    said[rank] = refusal(part, options_of(std::move(transport)));
  });
  EXPECT_THAT(said[0], HasSubstr("rank 1 could not make its layer"));
  EXPECT_THAT(said[1], HasSubstr("first_expert = 4, by the placement the experts of rank 1 of 2 begin with 8"));
}

TEST(SpreadRefusals, OneGroupCannotSpreadAndCut) {
  const RandomLayer whole = layer_of_16();
  ThreadRanks ranks(2, std::chrono::milliseconds(5000));
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    const RankLayer part = part_of(whole, balanced_placement(16, 2), rank);
    EXPECT_THAT(refusal(part, options_of(transport, transport)), HasSubstr("are one group of 2 ranks"));
  });
}

// Sizes and ranks no transport should have: an error before any table is made or read.
TEST(SpreadRefusals, GroupsThatCannotBe) {
  const RandomLayer whole = layer_of_16();
  const RankLayer part = part_of(whole, balanced_placement(16, 2), 0);
  for (const bool plan_only : {true, false}) {
    for (const auto& [ranks, rank, text] :
         {std::tuple<std::int64_t, std::int64_t, const char*>(0, 0, "transport has 0 ranks, expected 1 to 65536"),
          {-3, 0, "transport has -3 ranks"},
          {INT64_MAX, 0, "transport has 9223372036854775807 ranks"},
          {2, 7, "transport is rank 7 of 2"},
          {2, -1, "transport is rank -1 of 2"}}) {
      LayerOptions o = options_of(planned_transport(ranks, rank));
      o.plan_only = plan_only;
      EXPECT_THAT(refusal(part, o), HasSubstr(text));
    }
  }
  LayerOptions o = options_of(planned_transport(2));
  o.plan_only = true;
  o.placement = balanced_placement(16, 2);
  o.placement.num_experts = INT64_MAX;  // nothing of that size is allocated
  EXPECT_THAT(refusal(part, o), HasSubstr("placement is of 9223372036854775807 experts over 2 ranks"));
}

// Their results would not have the bits of one rank.
TEST(SpreadRefusals, RanksRunTheSameImplementations) {
  const RandomLayer whole = layer_of_16();
  const Placement placement = balanced_placement(16, 2);
  ThreadRanks ranks(2, std::chrono::milliseconds(5000));
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    LayerOptions o = options_of(std::move(transport));
    if (rank == 1) {
      EXPECT_TRUE(force("grouped_gemm:reference", o.selection).is_ok());
    }
    EXPECT_THAT(refusal(part_of(whole, placement, rank), o), HasSubstr("implementations of the experts' stages"));
  });
}

// In a grid a failure in one group of a spread reaches the others by way of the tensor groups, not by a time-out.
TEST(SpreadRefusals, AFailureGoesRoundTheGrid) {
  const RandomLayer whole = layer_of_16();
  const auto patience = std::chrono::milliseconds(20000);
  ThreadRanks spread[2] = {ThreadRanks(2, patience), ThreadRanks(2, patience)};
  ThreadRanks tensor[2] = {ThreadRanks(2, patience), ThreadRanks(2, patience)};
  std::string said[2][2];
  std::vector<std::thread> threads;
  for (int s = 0; s < 2; ++s) {
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, s, t] {
        LayerOptions o = options_of(spread[t].rank(s), tensor[s].rank(t));
        o.routed_only = true;
        if (s == 0 && t == 0) o.max_round_tokens = 3;
        said[s][t] = refusal(part_of(whole, balanced_placement(16, 2), s), o);
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(said[0][0], HasSubstr("tokens of a round is 8 there, 3 on rank 0"));
  EXPECT_THAT(said[1][0], HasSubstr("tokens of a round is 3 there, 8 on rank 1"));
  for (int s = 0; s < 2; ++s) EXPECT_THAT(said[s][1], HasSubstr("rank 0 of the tensor group could not make its layer"));
}

TEST(TensorRefusals, AllBringASharedExpertOrNone) {
  const RandomLayer whole = layer_of_16();
  ThreadRanks ranks(2, std::chrono::milliseconds(5000));
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> tensor) {
    RankLayer part = part_of(whole, balanced_placement(16, 1), 0);
    part.config.num_local = 0;
    if (rank == 1) {
      part.config.shared_intermediate = 0;
      part.config.has_shared_gate = false;
      part.weights.shared = {};
      part.weights.shared_gate = {};
    }
    EXPECT_THAT(refusal(part, options_of(local_transport(), std::move(tensor))),
                HasSubstr("the shared expert (1: there is one)"));
  });
}

// The call after one that was refused works: nothing of it is left on its way.
TEST(TensorRefusals, AllWantOutInOneDtype) {
  const RandomLayer whole = layer_of_16();
  ThreadRanks ranks(2, std::chrono::milliseconds(5000));
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> tensor) {
    LayerOptions o = options_of(local_transport(), std::move(tensor));
    o.routed_only = true;
    Result<Layer> layer = Layer::create(whole.config, whole.weights, o);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    RankCall call = call_of(4, 5);
    if (rank == 1) call.out_dtype = DType::kBF16;
    EXPECT_THAT(forward_once(*layer, call).status.message(),
                HasSubstr(rank == 0 ? "rank 1 of the tensor group wants out in bf16, rank 0 in f32"
                                    : "rank 0 of the tensor group wants out in f32, rank 1 in bf16"));
    EXPECT_TRUE(forward_once(*layer, call_of(4, 5)).status.is_ok());
  });
}

TEST(TensorRefusals, GroupedRowsWouldBePartialSums) {
  const RandomLayer whole = layer_of_16();
  ThreadRanks ranks(2, std::chrono::milliseconds(5000));
  ranks.run([&](std::int64_t, std::shared_ptr<Transport> tensor) {
    LayerOptions o = options_of(local_transport(), std::move(tensor));
    o.routed_only = true;
    Result<Layer> layer = Layer::create(whole.config, whole.weights, o);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    const Buffer x = random_x(16, whole.config.hidden);
    const Buffer y(DType::kBF16, {16, whole.config.hidden});
    Buffer offset(DType::kI32, {17});
    for (int e = 0; e <= 16; ++e) offset.as<std::int32_t>()[e] = e;
    const Status status = layer->forward_grouped({x.view(), {}}, {offset.view()}, y.view(), {});
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr("I is cut over 2 ranks"));
  });
}

}  // namespace
}  // namespace sluice::test
