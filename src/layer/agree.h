// Whether the layers of several ranks belong together: what each was made of, compared field by field at create.
#pragma once

#include "layer/state.h"

namespace sluice {

// Over the ranks that the experts are spread over: all alike but for the experts each holds.
// Over the ranks that I is cut over: all alike but for I, and what only the first brings.
// Both collective; `made` is how this rank's creation went, and a failure anywhere is one everywhere. state: null where it
// failed.
Status agree_spread(const LayerOptions& options, const Layer::State* state, const Status& made);
Status agree_tensor(const LayerOptions& options, const Layer::State* state, const Status& made);

}  // namespace sluice
