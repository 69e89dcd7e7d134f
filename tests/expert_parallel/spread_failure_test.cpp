// Ranks that cannot, do not agree, or are late: every rank hears of it, and nobody waits for ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "expert_parallel/ranks.h"

namespace sluice::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

RandomLayer bf16_layer() {
  return random_layer(small_config(), {.expert_dtype = DType::kBF16, .shared_dtype = DType::kBF16, .seed = 3});
}

std::vector<RankCall> calls_of(std::initializer_list<std::int64_t> tokens) {
  std::vector<RankCall> calls;
  for (std::int64_t count : tokens) calls.push_back(call_of(count, 10 + calls.size()));
  return calls;
}

TEST(SpreadFailure, ARankThatRefusesItsCallTellsTheOthers) {
  const RandomLayer whole = bf16_layer();
  const LayerOptions options = options_for(Precision::kBF16, 8, 1);
  const Placement placement = balanced_placement(16, 3);
  const ThreadRanks ranks(3);
  const std::vector<RankCall> good = calls_of({8, 2, 5});
  const std::vector<RankCall> bad = calls_of({8, 9, 5});  // rank 1 brings more than it may
  std::vector<RankResult> first(3), second(3);
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    const auto i = static_cast<std::size_t>(rank);
    const RankLayer part = part_of(whole, placement, rank);
    LayerOptions mine = options;
    mine.transport = transport;
    Result<Layer> layer = Layer::create(part.config, part.weights, mine);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    first[i] = forward_once(*layer, bad[i]);
    second[i] = forward_once(*layer, good[i]);  // the next call is as good as any
  });
  EXPECT_EQ(first[1].status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(first[1].status.message(), HasSubstr("x has T = 9 tokens"));
  for (std::size_t rank : {0, 2}) {
    EXPECT_EQ(first[rank].status.code(), StatusCode::kPeerFailure);
    EXPECT_THAT(first[rank].status.message(), HasSubstr("rank 1 declined this call"));
    EXPECT_TRUE(is_poison(first[rank].out->view())) << "partial output";
  }
  expect_alike(second, whole, options, good);
}

// In a later round, with rows of earlier ones on their way.
TEST(SpreadFailure, AnIdThatIsRefusedInALaterRoundStopsEveryRank) {
  const RandomLayer whole = bf16_layer();
  LayerOptions options = options_for(Precision::kBF16, 16, 1);
  options.max_round_tokens = 2;
  const ThreadRanks ranks(2);
  std::vector<std::int32_t> ids(16 * 4, 3);
  std::vector<RankCall> good, bad;
  good.push_back(routed_call(4, ids, 1));
  good.push_back(routed_call(4, ids, 2));
  bad.push_back(routed_call(4, ids, 1));
  ids[7 * 4 + 2] = 16;
  bad.push_back(routed_call(4, ids, 2));
  std::vector<RankResult> first(2), second(2);
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    const auto i = static_cast<std::size_t>(rank);
    const RankLayer part = part_of(whole, balanced_placement(16, 2), rank);
    LayerOptions mine = options;
    mine.transport = transport;
    mine.checked = rank == 1;
    Result<Layer> layer = Layer::create(part.config, part.weights, mine);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    first[i] = forward_once(*layer, bad[i]);
    second[i] = forward_once(*layer, good[i]);
  });
  EXPECT_EQ(first[1].status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(first[1].status.message(), HasSubstr("token 7, slot 2 is 16, expected -1 or 0 to 15"));
  EXPECT_EQ(first[0].status.code(), StatusCode::kPeerFailure);
  EXPECT_THAT(first[0].status.message(), HasSubstr("rank 1 declined"));
  expect_alike(second, whole, options, good);
}

TEST(SpreadFailure, Case110_LayersThatDifferAreRefusedAtCreate) {
  const RandomLayer whole = bf16_layer();
  const Placement placement = balanced_placement(16, 3);
  const auto created = [&](const std::function<void(LayerOptions&)>& change) {
    const ThreadRanks ranks(3);
    return forward_spread(ranks, whole, placement, options_for(Precision::kBF16, 64, 1), calls_of({1, 1, 1}),
                          [&](std::int64_t rank, LayerOptions& options) {
                            if (rank == 1) change(options);
                          });
  };
  struct Change {
    std::function<void(LayerOptions&)> make;
    const char* field;
  };
  for (const Change& change :
       {Change{[](LayerOptions& o) { o.max_tokens = 128; }, "max_tokens is 128 there, 64 on rank 2"},
        {[](LayerOptions& o) { o.precision = Precision::kF32; }, "precision (number) is 3 there, 2 on rank 2"},
        {[](LayerOptions& o) { o.max_round_tokens = 7; }, "tokens of a round is 7 there, 64 on rank 2"},
        {[](LayerOptions& o) { std::swap(o.placement.slot_expert[0], o.placement.slot_expert[15]); }, "placement"}}) {
    SCOPED_TRACE(change.field);
    const std::vector<RankResult> results = created(change.make);
    for (const RankResult& result : results) EXPECT_EQ(result.created.code(), StatusCode::kPeerFailure);
    EXPECT_THAT(results[2].created.message(), AllOf(HasSubstr("rank 1"), HasSubstr(change.field)));
    EXPECT_THAT(results[1].created.message(), HasSubstr("rank 0"));
  }
  // A rank whose own layer is refused: its own error there, its name everywhere else.
  const std::vector<RankResult> results = created([](LayerOptions& o) { o.max_tokens = -1; });
  EXPECT_EQ(results[1].created.code(), StatusCode::kInvalidArgument);
  for (std::size_t rank : {0, 2}) {
    EXPECT_EQ(results[rank].created.code(), StatusCode::kPeerFailure);
    EXPECT_THAT(results[rank].created.message(), HasSubstr("rank 1 could not make its layer"));
  }
}

TEST(SpreadFailure, OneTransportServesLayersOfSeveralSizes) {
  const RandomLayer whole = bf16_layer();
  const ThreadRanks ranks(2);
  const Placement placement = balanced_placement(16, 2);
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    const RankLayer part = part_of(whole, placement, rank);
    for (std::int64_t max_tokens : {64, 128, 8}) {
      LayerOptions mine = options_for(Precision::kBF16, max_tokens, 1);
      mine.transport = transport;
      Result<Layer> layer = Layer::create(part.config, part.weights, mine);
      ASSERT_TRUE(layer.is_ok()) << layer.status().message();
      const RankCall call = call_of(8, 5 + static_cast<std::uint64_t>(rank));
      const RankResult result = forward_once(*layer, call);
      ASSERT_TRUE(result.status.is_ok()) << result.status.message();
      EXPECT_TRUE(
          same_bits(result.out->view(), forward_alone(whole, options_for(Precision::kBF16, 8, 1), call).out->view()));
    }
  });
}

TEST(SpreadFailure, Case120_APeerThatDoesNotComeIsNamedWithinTheTimeOut) {
  const RandomLayer whole = bf16_layer();
  const LayerOptions options = options_for(Precision::kBF16, 129, 1);
  for (std::int64_t tokens : {1, 127, 128, 129}) {
    const ThreadRanks ranks(3, std::chrono::milliseconds(200));
    std::vector<RankResult> first(3), second(3);
    ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
      const auto i = static_cast<std::size_t>(rank);
      const RankLayer part = part_of(whole, balanced_placement(16, 3), rank);
      LayerOptions mine = options;
      mine.transport = transport;
      Result<Layer> layer = Layer::create(part.config, part.weights, mine);
      ASSERT_TRUE(layer.is_ok()) << layer.status().message();
      if (rank == 1) return;  // as good as dead
      first[i] = forward_once(*layer, call_of(tokens, 3));
      second[i] = forward_once(*layer, call_of(tokens, 3));
    });
    for (std::size_t rank : {0, 2}) {
      EXPECT_EQ(first[rank].status.code(), StatusCode::kPeerFailure);
      EXPECT_THAT(first[rank].status.message(), AllOf(HasSubstr("of rank 1"), HasSubstr("counts")));
      EXPECT_EQ(second[rank].status.message(), first[rank].status.message()) << "the transport is not dead";
      EXPECT_TRUE(is_poison(first[rank].out->view()));
    }
  }
}

// Case 84: what 32 ranks of 16 experts and 256 tokens need, by a formula of its own; and linear in the ranks.
std::int64_t planned_bytes(std::int64_t num_ranks, std::int64_t max_tokens, std::int64_t round_bytes,
                           std::int64_t* rounds_of = nullptr) {
  MoeConfig config;
  config.hidden = 7168;
  config.intermediate = 2048;
  config.num_experts = 16 * num_ranks;
  config.top_k = 8;
  config.gate = gate_preset(GateId::kG8);
  config.num_local = 16;
  // Planning reads no weight.
  alignas(64) static std::byte somewhere[64];
  LayerWeights weights;
  weights.w_gate = TensorView::dense(somewhere, DType::kBF16, {config.num_experts, 7168});
  weights.experts.w13 = TensorView::dense(somewhere, DType::kE4M3, {16, 4096, 7168});
  weights.experts.w13_scale = TensorView::dense(somewhere, DType::kF32, {16, 32, 56});
  weights.experts.w2 = TensorView::dense(somewhere, DType::kE4M3, {16, 7168, 2048});
  weights.experts.w2_scale = TensorView::dense(somewhere, DType::kF32, {16, 56, 16});
  LayerOptions options = options_for(Precision::kW8A8, max_tokens, 1);
  options.plan_only = true;
  options.round_bytes = round_bytes;
  options.transport = planned_transport(num_ranks);
  Result<Layer> layer = Layer::create(config, weights, options);
  EXPECT_TRUE(layer.is_ok()) << layer.status().message();
  if (!layer) return 0;
  if (rounds_of != nullptr) {
    for (const WorkspaceItem& item : layer->workspace_items())
      if (item.name.starts_with("exchange.slot_rank")) *rounds_of = item.bytes / (4 * 8);
  }
  return layer->workspace_bytes();
}

TEST(SpreadFailure, Case84_TheWorkspaceIsLinearInTheRanks) {
  const std::int64_t P = 32, C = 256, S = 8, W = 8, H = 7168, I = 2048, E = 512, L = 16;
  const std::int64_t N = P * C, R = N * S;
  const std::int64_t record = (H + 56 * 4 + S * 4 + 15) / 16 * 16;
  const std::int64_t gate = C * E * 4 + 2 * C * S * 4 + (L + 1) * 4 + 3 * C * S * 4 + 4;
  const std::int64_t experts = R * (H + 56 * 4 + 2 * I * 2 + I + 16 * 4 + H * 2);
  const std::int64_t exchange = (2 * C * S + C * W) * 4 + 2 * ((P + 1) * 4 + 4) + (2 * C * W + 2 * C * S) * 4 +
                                C * W * 4 + C * S * 4 + (L + 1) * 4 + 4 + 3 * N * S * 4 + N * S * 4 +
                                (C * W + N) * record + (R + C * S) * H * 2 + 4 * P * 16 + 2 * P * 4 * 8;
  const std::int64_t bytes = planned_bytes(P, C, std::int64_t{1} << 40);
  EXPECT_GE(bytes, gate + experts + exchange);
  EXPECT_LT(bytes, gate + experts + exchange + R * 64 + (1 << 20)) << "scratch and alignment";
  const std::int64_t twice = planned_bytes(2 * P, C, std::int64_t{1} << 40);
  EXPECT_LT(twice, 2 * bytes);
  EXPECT_GT(twice, bytes + experts);
}

TEST(SpreadFailure, RoundsFitTheirBudget) {
  std::int64_t previous = 0;
  for (const std::int64_t budget : {std::int64_t{1} << 28, std::int64_t{1} << 30, std::int64_t{1} << 33}) {
    std::int64_t round = 0;
    const std::int64_t bytes = planned_bytes(8, 4096, budget, &round);
    EXPECT_GT(round, previous);
    EXPECT_LT(round, 4096);
    // The layer's own buffers for T tokens come on top: logits, routing.
    EXPECT_LE(bytes, budget + 4096 * (128 * 4 + 8 * 20) + round * 8 * 8 * 64 + (1 << 20));
    previous = round;
  }
  std::int64_t round = 0;
  planned_bytes(8, 4096, 1, &round);
  EXPECT_EQ(round, 1) << "a budget below one token is one token";
}

TEST(SpreadFailure, PlacementsThatDoNotFitAreRefused) {
  const RandomLayer whole = bf16_layer();
  const ThreadRanks ranks(2);
  const auto refusal = [&](Placement placement) {
    std::vector<std::string> messages(2);
    ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
      const RankLayer part = part_of(whole, balanced_placement(16, 2), rank);
      LayerOptions mine = options_for(Precision::kBF16, 4, 1);
      mine.transport = transport;
      mine.placement = placement;
      messages[static_cast<std::size_t>(rank)] = Layer::create(part.config, part.weights, mine).status().message();
    });
    return messages[0];
  };
  EXPECT_THAT(refusal(balanced_placement(16, 4)), HasSubstr("placement is of 16 experts over 4 ranks"));
  EXPECT_THAT(refusal(balanced_placement(15, 2)),
              HasSubstr("placement is of 15 experts over 2 ranks, the layer has 16"));
  Placement moved = balanced_placement(16, 2);
  moved.rank_begin[1] = 7;
  EXPECT_THAT(refusal(moved), HasSubstr("rank 0 of 2 has 7 experts by the placement, the weights hold 8"));
  Placement lost = balanced_placement(16, 2);
  lost.slot_expert[3] = 4;
  EXPECT_THAT(refusal(lost), HasSubstr("expert 3 is in no slot"));
}

}  // namespace
}  // namespace sluice::test
