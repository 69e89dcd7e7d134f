// A random layer cut into the parts of several ranks, and forwards of all of them at once.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "harness/layer_run.h"
#include "harness/thread_ranks.h"
#include "sluice/placement.h"

namespace sluice::test {

// The weights of one rank's slots, in memory of their own, with NaN (or large integers) where nothing was copied.
struct RankLayer {
  MoeConfig config;
  LayerWeights weights;
  std::vector<std::unique_ptr<Buffer>> buffers;
};

inline RankLayer part_of(const RandomLayer& whole, const Placement& placement, std::int64_t rank) {
  RankLayer part{whole.config, whole.weights, {}};
  const std::int64_t num_slots = placement.num_local(rank);
  part.config.num_local = num_slots == 0 ? kNoExperts : num_slots;
  FfnWeights& w = part.weights.experts;
  for (TensorView* view : {&w.w13, &w.w13_scale, &w.w13_bias, &w.w2, &w.w2_scale, &w.w2_bias}) {
    if (!view->is_present()) continue;
    std::vector<std::int64_t> shape = {num_slots};
    for (int axis = 1; axis < view->rank; ++axis) shape.push_back(view->shape[static_cast<std::size_t>(axis)]);
    auto copy = std::make_unique<Buffer>(view->dtype, shape);
    for (std::int64_t i = 0; i < num_slots; ++i) {
      const std::int32_t expert = placement.slot_expert[static_cast<std::size_t>(placement.rank_begin[rank] + i)];
      const TensorView from = view->slice(expert, 1);
      std::memcpy(copy->view().row(i), from.data, static_cast<std::size_t>(from.num_bytes()));
    }
    *view = copy->view();
    part.buffers.push_back(std::move(copy));
  }
  return part;
}

// One rank's tokens, and what it got.
struct RankCall {
  std::int64_t num_tokens = 0;
  DType x_dtype = DType::kBF16;
  DType out_dtype = DType::kF32;
  // Routing decided elsewhere: ids and weights [T,S]; absent: the layer's own gate.
  std::unique_ptr<Buffer> topk_idx, topk_weight;
  std::uint64_t seed = 7;
};

struct RankResult {
  Status created;
  Status status;
  std::unique_ptr<Buffer> out, counters;
  std::int64_t workspace_bytes = 0;
  std::int64_t round_tokens = 0;
};

inline Buffer tokens_of(const RankCall& call, std::int64_t hidden) {
  return random_x(call.num_tokens, hidden, call.seed, call.x_dtype);
}

// One forward of a layer, from a workspace of exactly the asked size between guard pages that is full of NaN.
inline RankResult forward_once(const Layer& layer, const RankCall& call) {
  const MoeConfig& config = layer.config();
  RankResult result;
  const Buffer x = tokens_of(call, config.hidden);
  result.out = std::make_unique<Buffer>(call.out_dtype, std::vector<std::int64_t>{call.num_tokens, config.hidden});
  result.counters = std::make_unique<Buffer>(DType::kI64, std::vector<std::int64_t>{kNumCounters});
  result.counters->fill_constant(0);
  result.workspace_bytes = layer.workspace_bytes();
  GuardedWorkspace workspace(layer.workspace_bytes());
  workspace.fill(0xFF);
  Ctx ctx;
  ctx.workspace = workspace.span();
  if (call.topk_idx != nullptr) {
    result.status =
        layer.forward_routed({x.view(), {}, {call.topk_idx->view()}, call.topk_weight->view(), result.counters->view()},
                             result.out->view(), ctx);
  } else {
    result.status = layer.forward(x.view(), result.out->view(), {{}, {}, result.counters->view()}, ctx);
  }
  EXPECT_TRUE(result.out->guards_intact());
  return result;
}

// Every rank creates its part of the layer and forwards its tokens.
inline std::vector<RankResult> forward_spread(
    const ThreadRanks& ranks, const RandomLayer& whole, const Placement& placement, const LayerOptions& options,
    const std::vector<RankCall>& calls,
    const std::function<void(std::int64_t, LayerOptions&)>& change = [](std::int64_t, LayerOptions&) {}) {
  std::vector<RankResult> results(calls.size());
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    RankResult& result = results[static_cast<std::size_t>(rank)];
    const RankLayer part = part_of(whole, placement, rank);
    LayerOptions mine = options;
    mine.transport = transport;
    mine.placement = placement;
    change(rank, mine);
    Result<Layer> layer = Layer::create(part.config, part.weights, mine);
    result.created = layer.status();
    if (!layer) return;
    result = forward_once(*layer, calls[static_cast<std::size_t>(rank)]);
  });
  return results;
}

// What one rank with every expert makes of the same tokens.
inline RankResult forward_alone(const RandomLayer& whole, const LayerOptions& options, const RankCall& call) {
  LayerOptions mine = options;
  mine.max_round_tokens = 0;
  return forward_once(make_layer(whole, mine), call);
}

inline void expect_alike(const std::vector<RankResult>& spread, const RandomLayer& whole, const LayerOptions& options,
                         const std::vector<RankCall>& calls) {
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    ASSERT_TRUE(spread[rank].created.is_ok()) << spread[rank].created.message();
    ASSERT_TRUE(spread[rank].status.is_ok()) << spread[rank].status.message();
    const RankResult alone = forward_alone(whole, options, calls[rank]);
    ASSERT_TRUE(alone.status.is_ok()) << alone.status.message();
    EXPECT_TRUE(same_bits(spread[rank].out->view(), alone.out->view()));
    EXPECT_TRUE(same_bits(spread[rank].counters->view(), alone.counters->view()));
  }
}

// A layer over as many ranks as there are calls, held against one rank.
inline void expect_bits_of_one_rank(const RandomLayer& whole, const Placement& placement, const LayerOptions& options,
                                    const std::vector<RankCall>& calls) {
  const ThreadRanks ranks(std::ssize(calls));
  expect_alike(forward_spread(ranks, whole, placement, options, calls), whole, options, calls);
}

inline RankCall call_of(std::int64_t num_tokens, std::uint64_t seed) {
  RankCall call;
  call.num_tokens = num_tokens;
  call.seed = seed;
  return call;
}

// Routing by hand: ids [T,S] row by row, every weight from `weight`.
inline RankCall routed_call(std::int64_t top_k, const std::vector<std::int32_t>& ids, std::uint64_t seed = 7) {
  RankCall call = call_of(std::ssize(ids) / top_k, seed);
  call.topk_idx = std::make_unique<Buffer>(DType::kI32, std::vector<std::int64_t>{call.num_tokens, top_k});
  call.topk_weight = std::make_unique<Buffer>(DType::kF32, std::vector<std::int64_t>{call.num_tokens, top_k});
  for (std::int64_t i = 0; i < std::ssize(ids); ++i)
    call.topk_idx->as<std::int32_t>()[i] = ids[static_cast<std::size_t>(i)];
  call.topk_weight->fill_uniform(seed + 1, 0.1, 1.0);
  return call;
}

}  // namespace sluice::test
