// Stage 1: the router gate.
//
//   l[t,e] = sum_h x[t,h] * w_gate[e,h] (+ router_bias[e])          fp32; ascending h in blocks of 128 (docs/numerics.md)
//   topk_idx[t,:], topk_weight[t,:] = GateConfig's rule on l[t,:]   (sluice/config.h)
//
// Two implementation tables: `logits` (the GEMM) and `select` (scores, groups, top-k, weights), because engines
// often hold logits already. A shared-expert gate is `logits` with E = 1.
//
// Order: value descending, then index ascending, for groups and for experts. Ruled-out groups and experts are
// excluded by flag, never by a value. An expert whose logit or choice value is NaN or -inf loses to every
// finite one and counts as -inf in a group score; +inf is read as the largest finite fp32. If fewer than S
// experts of the kept groups are finite, the lowest-index remaining ones fill the slots with weight exactly 0
// and Counter::kNonFiniteTokens rises by one for the token. Ids of a token are always distinct and in [0,E).
// Score functions are one specified sequence of fp32 operations, the same bits on every implementation.
// Sources of the rules: the model authors' published modelling code, as listed at GateId.
#pragma once

#include "sluice/config.h"

namespace sluice::gate {

inline constexpr TensorSpec kX{"x", {DType::kBF16, DType::kF32}, {Axis::kT, Axis::kH}};
inline constexpr TensorSpec kWGate{"w_gate", {DType::kBF16, DType::kF32}, {Axis::kE, Axis::kH}};
inline constexpr TensorSpec kRouterBias = TensorSpec{"router_bias", DType::kF32, {Axis::kE}}.opt();
inline constexpr TensorSpec kLogits{"logits", DType::kF32, {Axis::kT, Axis::kE}};
inline constexpr TensorSpec kScoreBias = TensorSpec{"score_bias", DType::kF32, {Axis::kE}}.opt();
inline constexpr TensorSpec kTopkIdx{"topk_idx", DType::kI32, {Axis::kT, Axis::kS}};
inline constexpr TensorSpec kTopkWeight{"topk_weight", DType::kF32, {Axis::kT, Axis::kS}};
inline constexpr TensorSpec kCounters = TensorSpec{"counters", DType::kI64, {Axis::kCounters}}.opt();

struct LogitsArgs {
  TensorView x;            // [T,H] bf16 or f32
  TensorView w_gate;       // [E,H] bf16 or f32
  TensorView router_bias;  // [E] f32, optional
  TensorView logits;       // [T,E] f32, out
};
Status check(const LogitsArgs& args, Phase phase = Phase::kRun);
std::span<const Impl<LogitsArgs>> logits_impls();

struct SelectArgs {
  GateConfig gate;
  TensorView logits;       // [T,E] f32
  TensorView score_bias;   // [E] f32, present exactly when gate.has_score_bias
  ExpertIds topk_idx;      // [T,S] i32, out
  TensorView topk_weight;  // [T,S] f32, out; routed_scaling_factor included, here and nowhere else
  TensorView counters;     // [kCounters] i64, added to; optional
};
Status check(const SelectArgs& args, Phase phase = Phase::kRun);
std::span<const Impl<SelectArgs>> select_impls();

// Both, one after the other, of few tokens: a row here has one kernel less than the two rows of its tables that it replaces,
// and their bits, logits included. No reference: the two stages are it. The table may be empty.
struct BothArgs {
  LogitsArgs logits;
  SelectArgs select;  // of the same logits
};
Status check(const BothArgs& args, Phase phase = Phase::kRun);
std::span<const Impl<BothArgs>> both_impls();
// Beyond this the two stages are as fast.
inline constexpr std::int64_t kMostTokensOfBoth = 128;
// Whether the rows of both_impls() have the bits of these two implementations.
bool both_replaces(std::string_view logits, std::string_view select);

}  // namespace sluice::gate
