// A layer over several ranks against one rank that holds every expert: the same bits, whatever the split.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "expert_parallel/ranks.h"
#include "transport/forwarded.h"

namespace sluice::test {
namespace {

struct Kind {
  Precision precision;
  DType experts;
  DType shared;
  bool row_scales = false;
};
constexpr Kind kKinds[] = {
    {Precision::kF32, DType::kF32, DType::kF32},    {Precision::kBF16, DType::kBF16, DType::kBF16},
    {Precision::kW8A8, DType::kE4M3, DType::kE4M3}, {Precision::kW8A8, DType::kE4M3, DType::kBF16, true},
    {Precision::kW8A8, DType::kI8, DType::kI8},     {Precision::kW8A16, DType::kE4M3, DType::kBF16}};

RandomLayer layer_of(const Kind& kind, MoeConfig config = small_config()) {
  return random_layer(
      config, {.expert_dtype = kind.experts, .shared_dtype = kind.shared, .seed = 3, .row_scales = kind.row_scales});
}

TEST(SpreadLayer, BitsOfOneRankInEveryPrecision) {
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(fmt::format("{} {}", to_string(kind.precision), to_string(kind.experts)));
    const RandomLayer whole = layer_of(kind);
    const LayerOptions options = options_for(kind.precision, 24, 1);
    std::vector<RankCall> calls;
    for (std::int64_t rank = 0; rank < 3; ++rank) calls.push_back(call_of(5 + 7 * rank, 20 + rank));
    calls[1].x_dtype = DType::kF32;
    calls[2].out_dtype = DType::kBF16;
    expect_bits_of_one_rank(whole, balanced_placement(16, 3), options, calls);
  }
}

TEST(SpreadLayer, BitsOfOneRankOverAnyNumberOfRanksAndRounds) {
  const Kind kind = {Precision::kW8A8, DType::kE4M3, DType::kE4M3};
  const RandomLayer whole = layer_of(kind);
  for (std::int64_t num_ranks : {1, 2, 3, 4, 8}) {
    for (std::int64_t round : {0, 1, 4}) {
      SCOPED_TRACE(fmt::format("{} ranks, rounds of {}", num_ranks, round));
      LayerOptions options = options_for(kind.precision, 13, 1);
      options.max_round_tokens = round;
      std::vector<RankCall> calls;
      const std::int64_t tokens[] = {10, 3, 0, 4, 13, 1, 8, 5};
      for (std::int64_t rank = 0; rank < num_ranks; ++rank) calls.push_back(call_of(tokens[rank], 50 + rank));
      expect_bits_of_one_rank(whole, balanced_placement(16, num_ranks), options, calls);
    }
  }
}

TEST(SpreadLayer, NobodyHasTokens) {
  const RandomLayer whole = layer_of(kKinds[1]);
  const LayerOptions options = options_for(Precision::kBF16, 4, 1);
  const ThreadRanks ranks(2);
  std::vector<RankCall> calls;
  for (int rank = 0; rank < 2; ++rank) calls.push_back(call_of(0, 1));
  expect_alike(forward_spread(ranks, whole, balanced_placement(16, 2), options, calls), whole, options, calls);
  EXPECT_EQ(ranks.bytes_moved(0, 1) + ranks.bytes_moved(1, 0), 0);
}

TEST(SpreadLayer, ReplicasGiveTheBitsOfTheirExpert) {
  const Kind kind = {Precision::kW8A8, DType::kE4M3, DType::kE4M3};
  MoeConfig config = small_config();
  config.num_experts = 4;
  config.top_k = 2;
  config.gate = gate_preset(GateId::kG8);
  const RandomLayer whole = layer_of(kind, config);
  const LayerOptions options = options_for(kind.precision, 40, 1);
  // The second has two replicas of one expert on a rank.
  for (const std::vector<std::int32_t>& slots : {std::vector<std::int32_t>{0, 2, 1, 1, 3, 0}, {0, 0, 1, 2, 3, 1}}) {
    const Placement placement{4, slots, {0, 3, 6}};
    std::vector<RankCall> calls;
    for (std::int64_t rank = 0; rank < 2; ++rank) calls.push_back(call_of(17 + rank, 70 + rank));
    expect_bits_of_one_rank(whole, placement, options, calls);
  }
}

TEST(SpreadLayer, Case117_TwoReplicasOnOneRankStillSumToTheRightAnswer) {
  MoeConfig config = small_config();
  config.num_experts = 4;
  config.top_k = 2;
  config.gate = gate_preset(GateId::kG8);
  const RandomLayer whole = layer_of(kKinds[0], config);
  const LayerOptions options = options_for(Precision::kF32, 8, 1);
  const Placement placement{4, {0, 0, 1, 2, 3, 1}, {0, 3, 6}};
  std::vector<RankCall> calls;
  calls.push_back(routed_call(2, {0, 1, 0, 0, 1, 0, 2, 0}, 5));
  calls.push_back(routed_call(2, {1, 1, 3, 0}, 6));
  expect_bits_of_one_rank(whole, placement, options, calls);
}

// Llama 4: the weight goes onto the token before it is packed, hence before it travels.
TEST(SpreadLayer, WeightsOnTheInputTravelWithTheToken) {
  MoeConfig config = small_config();
  config.top_k = 1;
  config.gate = gate_preset(GateId::kG7);
  config.weight_on_input = true;
  for (const Kind& kind : {kKinds[1], kKinds[2]}) {
    const RandomLayer whole = layer_of(kind, config);
    const LayerOptions options = options_for(kind.precision, 9, 1);
    std::vector<RankCall> calls;
    for (std::int64_t rank = 0; rank < 2; ++rank) calls.push_back(call_of(9 - rank, 80 + rank));
    expect_bits_of_one_rank(whole, balanced_placement(16, 2), options, calls);
  }
}

// Already quantised tokens, as an engine's own dispatch delivers them, in both stride orders of the scales.
TEST(SpreadLayer, QuantisedTokensTravelAsTheyAre) {
  const Kind kind = {Precision::kW8A8, DType::kE4M3, DType::kE4M3};
  MoeConfig config = small_config();
  config.shared_intermediate = 0;
  config.hidden = 200;  // the last block of scales is short
  const RandomLayer whole = layer_of(kind, config);
  const std::int64_t T = 11;
  Buffer x(DType::kE4M3, {T, 200});
  x.fill_normal(4, 50.0);
  Buffer scale_by_token(DType::kF32, {T, 2});
  scale_by_token.fill_uniform(5, 1e-3, 1e-2);
  Buffer scale_by_block(DType::kF32, {2, T});
  for (std::int64_t t = 0; t < T; ++t) {
    for (std::int64_t b = 0; b < 2; ++b) scale_by_block.set(b * T + t, scale_by_token.at(t * 2 + b));
  }
  const RankCall routing = routed_call(4, [&] {
    std::vector<std::int32_t> ids;
    for (std::int32_t i = 0; i < T * 4; ++i) ids.push_back(i * 7 % 16 == 3 ? -1 : i * 7 % 16);
    return ids;
  }());
  const auto forward = [&](const Layer& layer, const TensorView& scale, const TensorView& out) {
    std::vector<std::byte> workspace(static_cast<std::size_t>(layer.workspace_bytes()));
    Ctx ctx;
    ctx.workspace = workspace;
    return layer.forward_routed({x.view(), scale, {routing.topk_idx->view()}, routing.topk_weight->view(), {}}, out,
                                ctx);
  };
  LayerOptions options = options_for(kind.precision, T, 1);
  Buffer want(DType::kF32, {T, 200});
  ASSERT_TRUE(forward(make_layer(whole, options), scale_by_block.view(), want.view()).is_ok());
  options.max_round_tokens = 4;
  const ThreadRanks ranks(2);
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    const RankLayer part = part_of(whole, balanced_placement(16, 2), rank);
    LayerOptions mine = options;
    mine.transport = transport;
    Result<Layer> layer = Layer::create(part.config, part.weights, mine);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    Buffer out(DType::kF32, {T, 200});
    const TensorView scale = rank == 0 ? scale_by_block.view() : scale_by_token.transposed();
    const Status status = forward(*layer, scale, out.view());
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_TRUE(same_bits(out.view(), want.view()));
  });
}

// Bytes on the wire: a record per (token, rank) that has any of its experts, a row back per slot.
TEST(SpreadLayer, ATokenCrossesToARankOnce) {
  const Kind kind = {Precision::kW8A8, DType::kE4M3, DType::kE4M3};
  const RandomLayer whole = layer_of(kind);
  LayerOptions options = options_for(kind.precision, 8, 1);
  options.routed_only = true;
  const ThreadRanks ranks(2);
  std::vector<RankCall> calls;
  // Experts 8 to 15 are rank 1's. Tokens of rank 0: four, one, none and two slots there.
  calls.push_back(routed_call(4, {8, 9, 15, 10, 0, 1, 8, 2, 3, 4, 5, 6, -1, 12, 0, 12}));
  calls.push_back(routed_call(4, {-1, -1, -1, -1}));
  const std::vector<RankResult> results = forward_spread(ranks, whole, balanced_placement(16, 2), options, calls);
  expect_alike(results, whole, options, calls);
  const std::int64_t H = 256, record = (H + 2 * 4 + 4 * 4 + 15) / 16 * 16, row = H * 2;
  EXPECT_EQ(ranks.bytes_moved(0, 1), 3 * record);
  EXPECT_EQ(ranks.bytes_moved(1, 0), 7 * row);
}

TEST(SpreadLayer, Case108_UnevenTokensGoThroughTheSameRounds) {
  // A transport that counts its calls.
  class Counting final : public ForwardedTransport {
   public:
    using ForwardedTransport::ForwardedTransport;
    Result<Ticket> scatter(const RowMove& move) override {
      ++num_scatters;
      return ForwardedTransport::scatter(move);
    }
    Result<Ticket> gather(const RowMove& move) override {
      ++num_gathers;
      return ForwardedTransport::gather(move);
    }
    int num_scatters = 0, num_gathers = 0;
  };
  const RandomLayer whole = layer_of(kKinds[1]);
  LayerOptions options = options_for(Precision::kBF16, 10, 1);
  options.max_round_tokens = 4;
  const ThreadRanks ranks(4);
  std::vector<RankCall> calls;
  for (std::int64_t tokens : {10, 3, 0, 4}) calls.push_back(call_of(tokens, 90 + tokens));
  std::vector<std::shared_ptr<Counting>> counting(4);
  const auto results =
      forward_spread(ranks, whole, balanced_placement(16, 4), options, calls, [&](std::int64_t rank, LayerOptions& o) {
        counting[static_cast<std::size_t>(rank)] = std::make_shared<Counting>(o.transport);
        o.transport = counting[static_cast<std::size_t>(rank)];
      });
  expect_alike(results, whole, options, calls);
  for (const auto& transport : counting) {
    EXPECT_EQ(transport->num_scatters, 3);
    EXPECT_EQ(transport->num_gathers, 3);
  }
}

TEST(SpreadLayer, Case109_ARankWithoutAnyRowStillGetsItsTokensBack) {
  MoeConfig config = small_config();
  config.hidden = 8;
  const RandomLayer whole = layer_of(kKinds[1], config);
  const LayerOptions options = options_for(Precision::kBF16, 4, 1);
  const ThreadRanks ranks(2);
  std::vector<RankCall> calls;
  calls.push_back(routed_call(4, {0, 1, 2, 3, 4, 5, 6, 7}, 3));
  calls.push_back(routed_call(4, {7, 6, 5, 4, 0, 2, 1, 3, 0, 1, 2, 4}, 4));
  expect_alike(forward_spread(ranks, whole, balanced_placement(16, 2), options, calls), whole, options, calls);
}

// Every expert multiplies by its own power of two, so that a row that went astray shows.
TEST(SpreadLayer, Case112_EveryRowArrivesOnceUnderHeavyImbalance) {
  MoeConfig config = small_config();
  config.hidden = 32;
  config.intermediate = 32;
  config.num_experts = 32;
  config.top_k = 8;
  config.gate = gate_preset(GateId::kG8);
  const RandomLayer whole = random_layer(config, {.expert_dtype = DType::kBF16, .seed = 9, .exact = true});
  LayerOptions options = options_for(Precision::kF32, 2304, 1);
  options.routed_only = true;
  std::vector<RankCall> calls;
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    std::vector<std::int32_t> ids;
    for (std::int32_t t = 0; t < 2304; ++t) {
      for (std::int32_t s = 0; s < 8; ++s) ids.push_back(t % 230 == 7 ? (t + 4 * s + rank) % 32 : 16 + s);
    }
    calls.push_back(routed_call(8, ids, 30 + static_cast<std::uint64_t>(rank)));
  }
  expect_bits_of_one_rank(whole, balanced_placement(32, 4), options, calls);
}

TEST(SpreadLayer, Case113_CountsThatAllDiffer) {
  MoeConfig config = small_config();
  config.num_experts = 8;
  config.top_k = 1;
  config.gate = gate_preset(GateId::kG8);
  const RandomLayer whole = layer_of(kKinds[0], config);
  const LayerOptions options = options_for(Precision::kF32, 64, 1);
  std::vector<RankCall> calls;
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    std::vector<std::int32_t> ids;  // 1 to 16 tokens to each (rank, rank), all different
    for (std::int32_t to = 0; to < 4; ++to) {
      for (std::int32_t i = 0; i <= rank * 4 + to; ++i) ids.push_back(2 * to + i % 2);
    }
    calls.push_back(routed_call(1, ids, 40 + static_cast<std::uint64_t>(rank)));
  }
  expect_bits_of_one_rank(whole, balanced_placement(8, 4), options, calls);
}

TEST(SpreadLayer, Case114_ExpertsThatDoNotDivide) {
  for (const auto& [num_experts, num_ranks] : {std::pair<std::int64_t, std::int64_t>{30, 8}, {5, 2}, {3, 4}}) {
    MoeConfig config = small_config();
    config.num_experts = num_experts;
    config.top_k = 2;
    config.gate = gate_preset(GateId::kG8);
    const RandomLayer whole = layer_of(kKinds[1], config);
    const LayerOptions options = options_for(Precision::kBF16, 6, 1);
    const ThreadRanks ranks(num_ranks);
    std::vector<RankCall> calls;
    for (std::int64_t rank = 0; rank < num_ranks; ++rank) calls.push_back(call_of(6, 60 + rank));
    expect_alike(forward_spread(ranks, whole, balanced_placement(num_experts, num_ranks), options, calls), whole,
                 options, calls);
  }
}

// The fourth rank of three experts holds none, and has tokens all the same.
TEST(SpreadLayer, Case114_ARankWithoutExpertsInEveryPrecision) {
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(fmt::format("{} {}", to_string(kind.precision), to_string(kind.experts)));
    MoeConfig config = small_config();
    config.num_experts = 3;
    config.top_k = 2;
    config.gate = gate_preset(GateId::kG8);
    const RandomLayer whole = layer_of(kind, config);
    LayerOptions options = options_for(kind.precision, 6, 1);
    options.max_round_tokens = 4;
    const ThreadRanks ranks(4);
    std::vector<RankCall> calls;
    for (std::int64_t rank = 0; rank < 4; ++rank) calls.push_back(call_of(6 - rank % 2, 65 + rank));
    expect_alike(forward_spread(ranks, whole, balanced_placement(3, 4), options, calls), whole, options, calls);
  }
}

TEST(SpreadLayer, Case118_MarkersAndInvalidIdsAreSkippedAndCounted) {
  const RandomLayer whole = layer_of(kKinds[1]);
  const LayerOptions options = options_for(Precision::kBF16, 4, 1);
  const ThreadRanks ranks(2);
  std::vector<RankCall> calls;
  calls.push_back(routed_call(4, {-1, -1, -1, -1, 0, -1, 15, -1, 16, 0, -2, 1}));
  calls.push_back(routed_call(4, {INT32_MAX, INT32_MIN, 3, 12}));
  const auto results = forward_spread(ranks, whole, balanced_placement(16, 2), options, calls);
  expect_alike(results, whole, options, calls);
  EXPECT_EQ(results[0].counters->at(static_cast<int>(Counter::kInvalidIds)), 2);
  EXPECT_EQ(results[1].counters->at(static_cast<int>(Counter::kInvalidIds)), 2);
}

TEST(SpreadLayer, Case121_SixteenWideTokensOverFourRanks) {
  MoeConfig config = small_config();
  config.hidden = 16;
  config.intermediate = 16;
  config.num_experts = 256;
  config.top_k = 2;
  config.gate = gate_preset(GateId::kG8);
  const RandomLayer whole = layer_of(kKinds[0], config);
  const LayerOptions options = options_for(Precision::kF32, 40, 1);
  const ThreadRanks ranks(4);
  std::vector<RankCall> calls;
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    std::vector<std::int32_t> ids;
    for (std::int32_t t = 0; t < 5; ++t) {
      ids.push_back(rank < 2 ? 0 : 64 * rank + t);
      ids.push_back(rank < 2 ? 1 : 255 - t);
    }
    calls.push_back(routed_call(2, ids, 100 + static_cast<std::uint64_t>(rank)));
  }
  expect_alike(forward_spread(ranks, whole, balanced_placement(256, 4), options, calls), whole, options, calls);
}

// One token with an expert on each rank, at different places and with different neighbours.
TEST(SpreadLayer, Case101_BitsDoNotDependOnPlaceOrNeighbours) {
  const RandomLayer whole = layer_of(kKinds[1]);
  const LayerOptions options = options_for(Precision::kBF16, 16, 1);
  const std::vector<std::int32_t> ids = {0, 5, 10, 15};
  const RankCall single = routed_call(4, ids);
  const Buffer x = tokens_of(single, 256);
  Buffer want(DType::kF32, {1, 256});
  const ThreadRanks ranks(4);
  for (std::int64_t home = 0; home < 4; ++home) {
    for (std::int64_t place : {0, 3}) {
      ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
        const RankLayer part = part_of(whole, balanced_placement(16, 4), rank);
        LayerOptions mine = options;
        mine.transport = transport;
        Result<Layer> layer = Layer::create(part.config, part.weights, mine);
        ASSERT_TRUE(layer.is_ok()) << layer.status().message();
        const std::int64_t T = rank == home ? place + 2 : rank * 3;
        Buffer tokens = random_x(T, 256, 200 + static_cast<std::uint64_t>(rank + 10 * place));
        Buffer topk_idx(DType::kI32, {T, 4}), topk_weight(DType::kF32, {T, 4}), out(DType::kF32, {T, 256});
        topk_idx.fill_integers(static_cast<std::uint64_t>(rank + place), 0, 15);
        topk_weight.fill_uniform(3, 0.1, 1.0);
        if (rank == home) {
          std::memcpy(tokens.view().row(place), x.view().data, 512);
          std::memcpy(topk_idx.view().row(place), single.topk_idx->view().data, 16);
          std::memcpy(topk_weight.view().row(place), single.topk_weight->view().data, 16);
        }
        std::vector<std::byte> workspace(static_cast<std::size_t>(layer->workspace_bytes()));
        Ctx ctx;
        ctx.workspace = workspace;
        const Status status =
            layer->forward_routed({tokens.view(), {}, {topk_idx.view()}, topk_weight.view(), {}}, out.view(), ctx);
        ASSERT_TRUE(status.is_ok()) << status.message();
        if (rank != home) return;
        if (home == 0 && place == 0) std::memcpy(want.view().data, out.view().row(0), 1024);
        EXPECT_TRUE(same_bits(out.view().slice(place, 1), want.view())) << "home " << home << ", place " << place;
      });
    }
  }
}

}  // namespace
}  // namespace sluice::test
