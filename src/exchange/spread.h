// Stages 4 and 8, exchange: where the tokens of a call go, and where what comes back belongs. Host code on host arrays.
//
// A token crosses to a rank once, however many of its experts live there: what crosses is a record, the packed token with
// its scales and the local numbers of its experts. Every expert output comes back as a row of its own, so that stage
// combine adds the slots of a token in the order, and to the bits, of one rank that holds every expert.
//
//   records to rank p, ascending token             <- sends:   a route plan whose "experts" are ranks, whose slots are ways
//   rows back from rank p, ascending (token, slot) <- returns: a route plan whose "experts" are ranks
#pragma once

#include <algorithm>

#include "placement/index.h"
#include "sluice/config.h"
#include "sluice/transport.h"

namespace sluice::exchange {

// A token goes to at most so many ranks.
constexpr std::int64_t num_ways(std::int64_t top_k, std::int64_t num_ranks) { return std::min(top_k, num_ranks); }

// Where each slot is worked on.
//   slot_rank[t,s], slot_local[t,s] = rank and number there of the physical slot that the token takes for expert
//                                     topk_idx[t,s]; -1 where the id is -1, or invalid (then counted)
//   way_rank[t,w]                   = the distinct ranks of the token's slots, by first slot; -1 for the rest
struct AimArgs {
  ExpertIds topk_idx;  // [T,S] i32, logical ids
  const PlacementIndex* placement = nullptr;
  std::int64_t first_token = 0;  // the number of token 0 in the call, and
  std::int64_t rank = 0;         // whose tokens they are: which replica takes them depends on both
  TensorView slot_rank;          // [T,S] i32, out
  TensorView slot_local;         // [T,S] i32, out
  TensorView way_rank;           // [T,W] i32, out; W = num_ways
  TensorView counters;           // [kCounters] i64, added to; optional
  bool checked = false;          // invalid ids are an error naming token, slot and id; nothing is written then
};
Status aim(const AimArgs& args);

// Bytes on the wire: the row, its scales, the ids, up to the next multiple of 16.
struct Record {
  std::int64_t hidden = 0;
  DType dtype = DType::kF32;
  std::int64_t num_scales = 0;  // Hb or 1 for quantised rows, else 0
  std::int64_t top_k = 0;
  std::int64_t scale_begin = 0;
  std::int64_t ids_begin = 0;
  std::int64_t bytes = 0;

  static Record of(const DataPath& path, std::int64_t hidden, std::int64_t top_k);
  // The parts of `count` records at `base`, as the stages read and write them: no copy is made on either side.
  TensorView rows(std::byte* base, std::int64_t count) const;    // [count,H]
  TensorView scales(std::byte* base, std::int64_t count) const;  // [Hb,count] or [1,count] f32; absent without scales
  TensorView ids(std::byte* base, std::int64_t count) const;     // [count,S] i32
};

// Writes the ids into the records of a send plan: the local numbers of the slots that the record's rank works on, -1 for
// the others.
void address(const RoutePlan& sends, const TensorView& slot_rank, const TensorView& slot_local, const TensorView& ids);

// On the rank that worked: y [R,H] of its plan over N records, into back [R,H] in ascending (record, slot), as the ranks
// that sent the records expect them. back_row [R] i32 is scratch.
void line_up(const TensorView& y, const TensorView& slot_row, int num_threads, const TensorView& back_row,
             const TensorView& back);

// Row counts and begins of an [P+1] offset array.
void spans_of(const ExpertOffsets& offset, std::span<RowSpan> spans);

}  // namespace sluice::exchange
