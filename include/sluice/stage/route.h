// Stage 2: the route plan.
//
// A stable counting sort of the routed slots by (local expert, token, slot):
//   row_slot[r] = t*S+s,  row_token[r] = t,  slot_row[t,s] = r,  expert_offset[e] = first row of local expert e
// A slot is routed here when first_expert <= topk_idx[t,s] < first_expert + L. -1 and experts held elsewhere
// give slot_row -1. Ids >= E or < -1 are treated as -1 and counted (Counter::kInvalidIds); with `checked` the
// call fails instead, naming token, slot and id, and writes nothing. Duplicate ids in a token are both routed.
// Moves are exact: every implementation gives the same bits.
#pragma once

#include "sluice/plan.h"

namespace sluice::route {

inline constexpr TensorSpec kTopkIdx{"topk_idx", DType::kI32, {Axis::kT, Axis::kS}};
inline constexpr TensorSpec kExpertOffset{"expert_offset", DType::kI32, {Axis::kL1}};
inline constexpr TensorSpec kRowToken{"row_token", DType::kI32, {Axis::kR}};
inline constexpr TensorSpec kRowSlot{"row_slot", DType::kI32, {Axis::kR}};
inline constexpr TensorSpec kSlotRow{"slot_row", DType::kI32, {Axis::kT, Axis::kS}};
inline constexpr TensorSpec kNumRows{"num_rows", DType::kI32, {Axis::kOne}};
inline constexpr TensorSpec kCounters = TensorSpec{"counters", DType::kI64, {Axis::kCounters}}.opt();

struct Args {
  ExpertIds topk_idx;             // [T,S] i32, global ids
  std::int64_t num_experts = 0;   // E
  std::int64_t first_expert = 0;  // global id of local expert 0
  RoutePlan plan;                 // out; L from expert_offset, R = T*S rows of capacity (T*S < 2^31)
  TensorView counters;            // [kCounters] i64, added to; optional
  bool checked = false;
};
Status check(const Args& args, Phase phase = Phase::kRun);
std::span<const Impl<Args>> impls();

}  // namespace sluice::route
