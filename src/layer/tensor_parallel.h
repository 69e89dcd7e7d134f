// A layer whose experts are cut along I over a group of ranks: each makes a partial sum of every token, and the partial
// sums are added once, in order of rank.
#pragma once

#include "layer/state.h"

namespace sluice {

// The tokens are dealt out: a rank adds up its share of them, T/Q tokens of Q ranks, and hands the sums to all.
struct TensorGroup {
  std::int64_t num_ranks = 1;
  std::int64_t rank = 0;
  Stage<combine::Args> add;  // unweighted, over ranks in place of slots
};

struct TensorBuffers {
  TensorView partial;                  // [T,H] f32: what this rank's shards make; then the sums, in the dtype of out
  TensorView parts;                    // [Q*ceil(T/Q),H] f32: the partial sums of this rank's share
  TensorView part_row;                 // [ceil(T/Q),Q] i32
  std::span<RowSpan> share, gathered;  // [Q] tokens of each rank's share, and where its parts lie
  std::span<RowSpan> mine;             // [Q] this rank's share, for each
};

inline constexpr std::int64_t kMaxTensorRanks = 64;

// For a layer whose tensor_transport has several ranks; state.tensor stays null otherwise.
Status plan_tensor(Layer::State& state);
TensorBuffers lay_out_tensor(const Layer::State& state, Arena& arena);
// Resolves the addition once the buffers are known, and books its scratch.
Status book_tensor(Layer::State& state);

// Before a call: whether every rank brings the same number of tokens and can run. Collective.
Status meet(const Layer::State& state, std::int64_t num_tokens, DType out, const Status& ready);
// After it: the sum over ranks of b.partial, rounded once, into out [T,H] of every rank. Collective.
Status add_partials(const Layer::State& state, const TensorBuffers& b, const TensorView& out, const Ctx& ctx);

}  // namespace sluice
