// What a layer whose experts are spread over ranks holds besides, and the buffers of one of its calls.
#pragma once

#include "exchange/spread.h"
#include "layer/state.h"

namespace sluice {

// Rounds: a call goes through in rounds of up to `chunk` tokens a rank, so that what may arrive, and with it the memory,
// is bounded by P * chunk tokens whatever the routing. While the experts work on one round the tokens of the next and the
// results of the one before are on their way; everything in flight exists twice.
struct Spread {
  PlacementIndex placement;
  std::int64_t num_ranks = 1;
  std::int64_t rank = 0;
  std::int64_t num_ways = 1;  // ranks a token may go to
  std::int64_t chunk = 0;     // tokens of a rank in a round
  exchange::Record record;
  Stage<pack::Args> arrived_pack;  // of records: packed already, whatever the layer's own x is

  std::int64_t num_halves(std::int64_t max_tokens) const { return chunk < max_tokens ? 2 : 1; }
  std::int64_t max_arriving() const { return num_ranks * chunk; }
};

struct SpreadBuffers {
  // Of the round that is being sent.
  TensorView slot_rank, slot_local;  // [C,S] i32
  TensorView way_rank;               // [C,W] i32
  RoutePlan sends;                   // of way_rank over ranks
  RoutePlan returns;                 // of slot_rank over ranks; its slot_row is a part of home_row
  TensorView home_row;               // [T,S] i32: row of each slot among what comes back
  // Of the round that is being worked on.
  RoutePlan plan;       // of the records that arrived, over local experts
  TensorView back_row;  // [R] i32
  struct Half {
    std::byte* sent = nullptr;                                          // records [C*W]
    std::byte* arrived = nullptr;                                       // records [P*C]
    TensorView back;                                                    // [R,H]: rows for the ranks of their tokens
    TensorView returned;                                                // [C*S,H]: rows of this rank's tokens
    std::span<RowSpan> send_rows, arrive_rows, back_rows, return_rows;  // [P]
  };
  std::array<Half, 2> half;
  std::span<std::int64_t> told, heard;  // [P,kWidth]: what this rank tells each, and hears of each, before a round
};

// What ranks tell each other before a round.
struct Telling {
  enum Field { kTokens, kRecords, kRows, kDeclined, kWidth };
};

// Sizes the rounds, for a layer whose transport has several ranks; state.spread stays null otherwise.
Status plan_spread(Layer::State& state);
SpreadBuffers lay_out_spread(const Layer::State& state, Arena& arena);
// Resolves what rounds need besides the layer's own stages, and books the stages' scratch for the sizes of a round.
Status book_spread(Layer::State& state);
// Arguments of the stages of a round.
exchange::AimArgs aim_args(const Layer::State& state, const SpreadBuffers& b, const ExpertIds& topk_idx,
                           std::int64_t first_token, const TensorView& counters);
route::Args sends_args(const Layer::State& state, const SpreadBuffers& b, std::int64_t count);
route::Args returns_args(const Layer::State& state, const SpreadBuffers& b, std::int64_t begin, std::int64_t count);
pack::Args send_pack_args(const Layer::State& state, const SpreadBuffers& b, const SpreadBuffers::Half& half,
                          const TensorView& x, const TensorView& x_scale, const TensorView& topk_weight);
route::Args arrived_args(const Layer::State& state, const SpreadBuffers& b, const SpreadBuffers::Half& half,
                         std::int64_t count);
pack::Args arrived_pack_args(const Layer::State& state, const SpreadBuffers& b, const SpreadBuffers::Half& half,
                             const FfnBuffers& routed, std::int64_t count);

}  // namespace sluice
