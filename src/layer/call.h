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

// From routing to output where the experts are spread over ranks (forward_spread.cpp). Collective: `ready` is what this
// rank's own checks said, and a rank that cannot run tells the others so. The tensors are looked at only if it is ok.
Status forward_spread(const Layer::State& s, Call& call, const CallTensors& input, const Status& ready);

}  // namespace sluice
