// Layers cut along I over a group of ranks, alone and in a grid with experts spread over ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "expert_parallel/ranks.h"

namespace sluice::test {
namespace {

using testing::HasSubstr;

// Columns [begin, end) of I of every expert of an FFN, in memory of its own. Scales in blocks: begin and end on a block.
FfnWeights shard_of(const FfnWeights& w, std::int64_t begin, std::int64_t end, bool takes_bias,
                    std::vector<std::unique_ptr<Buffer>>& buffers) {
  const auto rows_of = [&](const TensorView& from, std::int64_t first, std::int64_t last) {
    const std::int64_t half = from.shape[1] / 2, count = last - first, L = from.shape[0];
    const std::int64_t width = from.rank == 3 ? from.shape[2] : 1;
    std::vector<std::int64_t> shape = {L, 2 * count};
    if (from.rank == 3) shape.push_back(width);
    buffers.push_back(std::make_unique<Buffer>(from.dtype, shape));
    const TensorView to = buffers.back()->view();
    const std::int64_t row_bytes = width * size_bytes(from.dtype);
    for (std::int64_t l = 0; l < L; ++l) {
      for (const std::int64_t part : {0, 1}) {
        std::memcpy(to.row(l) + part * count * row_bytes, from.row(l) + (part * half + first) * row_bytes,
                    static_cast<std::size_t>(count * row_bytes));
      }
    }
    return to;
  };
  const auto columns_of = [&](const TensorView& from, std::int64_t first, std::int64_t last) {
    const std::int64_t L = from.shape[0], rows = from.shape[1], count = last - first, size = size_bytes(from.dtype);
    buffers.push_back(std::make_unique<Buffer>(from.dtype, std::vector<std::int64_t>{L, rows, count}));
    const TensorView to = buffers.back()->view();
    for (std::int64_t r = 0; r < L * rows; ++r) {
      std::memcpy(static_cast<std::byte*>(to.data) + r * count * size,
                  static_cast<std::byte*>(from.data) + (r * from.shape[2] + first) * size,
                  static_cast<std::size_t>(count * size));
    }
    return to;
  };
  FfnWeights shard;
  shard.w13 = rows_of(w.w13, begin, end);
  shard.w2 = columns_of(w.w2, begin, end);
  if (w.w13_scale.is_present()) {
    const bool by_row = has_row_scales(w);
    shard.w13_scale = by_row ? rows_of(w.w13_scale, begin, end) : rows_of(w.w13_scale, begin / 128, ceil_div(end, 128));
    shard.w2_scale = by_row ? w.w2_scale : columns_of(w.w2_scale, begin / 128, ceil_div(end, 128));
  }
  if (w.w13_bias.is_present()) {
    shard.w13_bias = rows_of(w.w13_bias, begin, end);
    if (takes_bias) shard.w2_bias = w.w2_bias;
  }
  return shard;
}

RankLayer cut(const RandomLayer& whole, std::int64_t num_ranks, std::int64_t rank, std::int64_t unit,
              bool shared_is_whole) {
  RankLayer part{whole.config, whole.weights, {}};
  const auto range = [&](std::int64_t extent) {
    const ExpertRange units = experts_of_rank(ceil_div(extent, unit), num_ranks, rank);
    return std::pair{units.begin * unit, std::min(units.end * unit, extent)};
  };
  const auto [begin, end] = range(whole.config.intermediate);
  part.config.intermediate = end - begin;
  part.weights.experts = shard_of(whole.weights.experts, begin, end, rank == 0, part.buffers);
  if (whole.config.shared_intermediate > 0 && !shared_is_whole) {
    const auto [first, last] = range(whole.config.shared_intermediate);
    part.config.shared_intermediate = last - first;
    part.weights.shared = shard_of(whole.weights.shared, first, last, false, part.buffers);
  }
  return part;
}

struct Group {
  std::vector<RankResult> results;
};

Group forward_cut(const RandomLayer& whole, const LayerOptions& options, std::int64_t num_ranks, std::int64_t unit,
                  bool shared_is_whole, const RankCall& call) {
  const ThreadRanks ranks(num_ranks);
  Group group{std::vector<RankResult>(static_cast<std::size_t>(num_ranks))};
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    RankResult& result = group.results[static_cast<std::size_t>(rank)];
    const RankLayer part = cut(whole, num_ranks, rank, unit, shared_is_whole);
    LayerOptions mine = options;
    mine.tensor_transport = transport;
    mine.shared_is_whole = shared_is_whole;
    Result<Layer> layer = Layer::create(part.config, part.weights, mine);
    result.created = layer.status();
    if (!layer) return;
    result = forward_once(*layer, call);
  });
  return group;
}

MoeConfig wide_config() {
  MoeConfig config = small_config();
  config.hidden = 128;
  config.intermediate = 384;
  config.shared_intermediate = 256;
  return config;
}

// Small integers: up and down are exact in every order, so that only silu(g) * u, which makes reals of them, and the order of
// at most I additions of a few nonzero terms are left: a few roundings of 2^-24.
TEST(TensorParallel, SumsAreThoseOfOneRankButForTheLastRoundings) {
  for (const bool shared_is_whole : {false, true}) {
    for (const bool bias : {false, true}) {
      const RandomLayer whole = random_layer(
          wide_config(),
          {.expert_dtype = DType::kF32, .shared_dtype = DType::kF32, .expert_bias = bias, .seed = 11, .exact = true});
      const LayerOptions options = options_for(Precision::kF32, 9, 1);
      RankCall call = routed_call(4, [] {
        std::vector<std::int32_t> ids;
        for (std::int32_t i = 0; i < 36; ++i) ids.push_back(i * 5 % 17 - 1);
        return ids;
      }());
      call.topk_weight->fill_powers_of_two(3, -2, 1);
      const RankResult alone = forward_alone(whole, options, call);
      for (const std::int64_t num_ranks : {2, 3, 4, 8}) {
        SCOPED_TRACE(
            fmt::format("{} ranks, shared expert {}, bias {}", num_ranks, shared_is_whole ? "whole" : "cut", bias));
        const Group group = forward_cut(whole, options, num_ranks, 16, shared_is_whole, call);
        for (const RankResult& result : group.results) {
          ASSERT_TRUE(result.created.is_ok()) << result.created.message();
          ASSERT_TRUE(result.status.is_ok()) << result.status.message();
          EXPECT_LE(worst_row(result.out->view(), alone.out->view()), 4 * 0x1p-24);
          EXPECT_TRUE(same_bits(result.out->view(), group.results[0].out->view()));
        }
      }
    }
  }
}

// Every precision: within the roundings of its dtypes, on every rank the same bits, and the same in the next run.
TEST(TensorParallel, EveryPrecisionIsWithinItsRoundingsAndRepeats) {
  struct Kind {
    Precision precision;
    DType experts, shared;
    bool row_scales;
    double bound;
  };
  // Relative L2 of a row, by what the cut changes (docs/numerics.md, "Over several ranks"): the order of fp32 sums; or y,
  // rounded to bf16 once a rank (2^-9 of each part, where one rank rounds once); or the scale of a row of activations that is
  // quantised in two parts (two roundings to e4m3 of 2^-5 rms at most; to i8 of 0.29/127 of a largest value of ten rms).
  constexpr double kOrder = 4 * 0x1p-24, kRounded = 0x1p-8, kRequantised = 0.04;
  for (const Kind& kind : {Kind{Precision::kF32, DType::kF32, DType::kF32, false, kOrder},
                           Kind{Precision::kBF16, DType::kBF16, DType::kBF16, false, kRounded},
                           Kind{Precision::kW8A8, DType::kE4M3, DType::kE4M3, false, kRounded},
                           Kind{Precision::kW8A8, DType::kE4M3, DType::kBF16, true, kRequantised},
                           Kind{Precision::kW8A8, DType::kI8, DType::kI8, false, kRequantised},
                           Kind{Precision::kW8A16, DType::kE4M3, DType::kBF16, false, kRounded}}) {
    SCOPED_TRACE(fmt::format("{} {}", to_string(kind.precision), to_string(kind.experts)));
    const RandomLayer whole = random_layer(
        wide_config(),
        {.expert_dtype = kind.experts, .shared_dtype = kind.shared, .seed = 12, .row_scales = kind.row_scales});
    const LayerOptions options = options_for(kind.precision, 21, 1);
    const RankCall call = call_of(21, 13);
    const RankResult alone = forward_alone(whole, options, call);
    const Group first = forward_cut(whole, options, 2, 128, false, call);
    const Group second = forward_cut(whole, options, 2, 128, false, call);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(first.results[rank].status.is_ok()) << first.results[rank].status.message();
      EXPECT_LE(worst_row(first.results[rank].out->view(), alone.out->view()), kind.bound);
      EXPECT_TRUE(same_bits(first.results[rank].out->view(), first.results[0].out->view()));
      EXPECT_TRUE(same_bits(first.results[rank].out->view(), second.results[rank].out->view()));
    }
  }
}

TEST(TensorParallel, Cases93And94_TheSharedExpertIsAddedOnce) {
  const RandomLayer whole =
      random_layer(wide_config(), {.expert_dtype = DType::kF32, .shared_dtype = DType::kF32, .seed = 14});
  const LayerOptions options = options_for(Precision::kF32, 6, 1);
  // No routed expert: what comes out is the shared expert alone.
  const RankCall call = routed_call(4, std::vector<std::int32_t>(24, -1));
  const RankResult alone = forward_alone(whole, options, call);
  for (const std::int64_t num_ranks : {2, 4, 8}) {
    for (const bool shared_is_whole : {false, true}) {
      const Group group = forward_cut(whole, options, num_ranks, 16, shared_is_whole, call);
      for (const RankResult& result : group.results) {
        ASSERT_TRUE(result.status.is_ok()) << result.status.message();
        EXPECT_LE(worst_row(result.out->view(), alone.out->view()), shared_is_whole ? 0.0 : 1e-6);
      }
    }
  }
}

// Two ranks that share the experts times two that share I.
TEST(TensorParallel, AGridOfSpreadExpertsAndCutOnes) {
  const RandomLayer whole =
      random_layer(wide_config(), {.expert_dtype = DType::kE4M3, .shared_dtype = DType::kE4M3, .seed = 15});
  const Placement placement = balanced_placement(16, 2);
  for (const bool shared_is_whole : {false, true}) {
    for (const std::int64_t round : {0, 3}) {
      LayerOptions options = options_for(Precision::kW8A8, 10, 1);
      options.max_round_tokens = round;
      const ThreadRanks spread[] = {ThreadRanks(2), ThreadRanks(2)};  // by tensor rank
      const ThreadRanks tensor[] = {ThreadRanks(2), ThreadRanks(2)};  // by expert rank
      const ThreadRanks all(4);
      std::vector<RankResult> results(4);
      const RankCall calls[] = {call_of(10, 16), call_of(7, 17)};  // by expert rank
      all.run([&](std::int64_t rank, const std::shared_ptr<Transport>&) {
        const std::int64_t ep = rank / 2, tp = rank % 2;
        const RankLayer shard = cut(whole, 2, tp, 128, shared_is_whole);
        RandomLayer of_shard;
        of_shard.config = shard.config;
        of_shard.weights = shard.weights;
        const RankLayer part = part_of(of_shard, placement, ep);
        LayerOptions mine = options;
        mine.transport = spread[tp].rank(ep);
        mine.tensor_transport = tensor[ep].rank(tp);
        mine.shared_is_whole = shared_is_whole;
        Result<Layer> layer = Layer::create(part.config, part.weights, mine);
        ASSERT_TRUE(layer.is_ok()) << layer.status().message();
        results[static_cast<std::size_t>(rank)] = forward_once(*layer, calls[ep]);
      });
      for (std::size_t ep = 0; ep < 2; ++ep) {
        // The bits of the same cut without spread experts, on both ranks of the tensor group.
        const Group cut_alone =
            forward_cut(whole, options_for(Precision::kW8A8, 10, 1), 2, 128, shared_is_whole, calls[ep]);
        for (std::size_t tp = 0; tp < 2; ++tp) {
          const RankResult& result = results[ep * 2 + tp];
          ASSERT_TRUE(result.status.is_ok()) << result.status.message();
          EXPECT_TRUE(same_bits(result.out->view(), cut_alone.results[0].out->view()));
        }
      }
    }
  }
}

TEST(TensorParallel, RanksThatDoNotMatchAreRefused) {
  const RandomLayer whole = random_layer(
      wide_config(), {.expert_dtype = DType::kBF16, .shared_dtype = DType::kBF16, .expert_bias = true, .seed = 18});
  const LayerOptions options = options_for(Precision::kBF16, 8, 1);
  const auto run_pair = [&](const std::function<void(RankLayer&, LayerOptions&, RankCall&)>& change) {
    const ThreadRanks ranks(2, std::chrono::milliseconds(3000));
    std::vector<RankResult> results(2);
    ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
      RankLayer part = cut(whole, 2, rank, 128, false);
      LayerOptions mine = options;
      mine.tensor_transport = transport;
      RankCall call = call_of(4, 19);
      if (rank == 1) change(part, mine, call);
      RankResult& result = results[static_cast<std::size_t>(rank)];
      Result<Layer> layer = Layer::create(part.config, part.weights, mine);
      result.created = layer.status();
      if (!layer) return;
      result = forward_once(*layer, call);
    });
    return results;
  };
  const auto uneven = run_pair([](RankLayer&, LayerOptions&, RankCall& call) { call.num_tokens = 5; });
  EXPECT_EQ(uneven[0].status.code(), StatusCode::kPeerFailure);
  EXPECT_THAT(uneven[0].status.message(), HasSubstr("rank 1 of the tensor group brings T = 5 tokens, rank 0 brings 4"));
  EXPECT_TRUE(is_poison(uneven[0].out->view()));
  const auto declined = run_pair([](RankLayer&, LayerOptions&, RankCall& call) { call.num_tokens = 9; });
  EXPECT_THAT(declined[0].status.message(), HasSubstr("rank 1 of the tensor group declined this call"));
  EXPECT_EQ(declined[1].status.code(), StatusCode::kInvalidArgument);
  const auto biased = run_pair(
      [&](RankLayer& part, LayerOptions&, RankCall&) { part.weights.experts.w2_bias = whole.weights.experts.w2_bias; });
  EXPECT_THAT(biased[1].created.message(), HasSubstr("experts.w2_bias is present on rank 1 of the tensor group"));
  EXPECT_THAT(biased[0].created.message(), HasSubstr("rank 1 of the tensor group could not make its layer"));
  const auto sized = run_pair([](RankLayer&, LayerOptions& mine, RankCall&) { mine.max_tokens = 16; });
  EXPECT_THAT(sized[0].created.message(), HasSubstr("max_tokens is 16 there, 8 on rank 0"));
}

}  // namespace
}  // namespace sluice::test
