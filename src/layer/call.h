// One forward on its way: its buffers inside the caller's workspace, and the pieces that its forms share.
#pragma once

#include "layer/spread.h"
#include "layer/tensor_parallel.h"

namespace sluice {

struct Call {
  Buffers b;
  SpreadBuffers spread;  // of a layer over several ranks
  TensorBuffers tensor;  // of a layer cut along I
  Ctx ctx;               // workspace: the stages' scratch
};

// All of a call's buffers, for T tokens and R rows; the context is left to the caller.
Call lay_out_call(const Layer::State& state, Arena& arena, std::int64_t num_tokens, std::int64_t num_rows);

// What a caller brings to the two entry points for tokens, besides routing.
struct CallTensors {
  TensorView x;         // [T,H]
  TensorView x_scale;   // of a quantised x
  TensorView counters;  // optional
  TensorView out;       // [T,H]
};

// up, activation, down on rows that are grouped already.
Status experts(const Layer::State& s, const FfnStages& stages, const FfnWeights& weights, const FfnBuffers& b,
               const RowGroups& groups, const Ctx& ctx);
// The shared expert sees every token: x [T,H] -> call.b.shared.y [T,H].
Status shared_expert(const Layer::State& s, Call& call, const TensorView& x);

// From routing to output where the experts are spread over ranks (forward_spread.cpp). Collective.
Status forward_spread(const Layer::State& s, Call& call, const CallTensors& input);
// In its place on a rank whose own checks refused the call: the others hear of it. Returns why, or that they did not hear.
Status decline_spread(const Layer::State& s, const Status& why);

}  // namespace sluice
