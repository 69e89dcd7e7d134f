// Stage 9: expert rows back to their tokens.
//
//   acc = 0;  for s ascending, where slot_row[t,s] >= 0:  acc = fma(topk_weight[t,s], y[slot_row[t,s], h], acc)
//   acc += shared[t,h], or fma(sigmoid(shared_gate[t]), shared[t,h], acc)
//   out[t,h] = round(acc), or round(out[t,h] + acc) with `accumulate`
// Slots with slot_row -1 are skipped and their weight ignored; a token without any becomes exactly 0 (plus shared).
// routed_scaling_factor is in topk_weight already. Leaving topk_weight out is an error unless `unweighted` says so.
// Bits are defined: every implementation gives the same.
#pragma once

#include "sluice/plan.h"

namespace sluice::combine {

inline constexpr TensorSpec kY{"y", {DType::kBF16, DType::kF32}, {Axis::kR, Axis::kH}};
inline constexpr TensorSpec kSlotRow{"slot_row", DType::kI32, {Axis::kT, Axis::kS}};
inline constexpr TensorSpec kTopkWeight = TensorSpec{"topk_weight", DType::kF32, {Axis::kT, Axis::kS}}.opt();
inline constexpr TensorSpec kShared = TensorSpec{"shared", {DType::kBF16, DType::kF32}, {Axis::kT, Axis::kH}}.opt();
inline constexpr TensorSpec kSharedGate = TensorSpec{"shared_gate", DType::kF32, {Axis::kT, Axis::kOne}}.opt();
inline constexpr TensorSpec kOut{"out", {DType::kBF16, DType::kF32}, {Axis::kT, Axis::kH}};

struct Args {
  TensorView y;             // [R,H]
  TensorView slot_row;      // [T,S] i32, values in [-1,R)
  TensorView topk_weight;   // [T,S] f32
  bool unweighted = false;  // every weight is 1; topk_weight must be absent
  TensorView shared;        // [T,H], optional
  TensorView shared_gate;   // [T,1] f32 logits, optional; needs shared
  bool accumulate = false;  // add to what out holds
  TensorView out;           // [T,H] out
};
Status check(const Args& args, Phase phase = Phase::kRun);
std::span<const Impl<Args>> impls();

}  // namespace sluice::combine
