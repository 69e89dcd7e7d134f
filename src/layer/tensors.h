// Every tensor of a layer's weights, by the name messages use.
#pragma once

#include <string_view>

#include "sluice/weights.h"

namespace sluice {

// Calls visit(name, view) for each tensor that is present; Weights: LayerWeights or const LayerWeights.
template <class Weights, class Visit>
void for_each_tensor(Weights& weights, const Visit& visit) {
  const auto one = [&](std::string_view name, auto& view) {
    if (view.is_present()) visit(name, view);
  };
  one("w_gate", weights.w_gate);
  one("router_bias", weights.router_bias);
  one("score_bias", weights.score_bias);
  one("experts.w13", weights.experts.w13);
  one("experts.w13_scale", weights.experts.w13_scale);
  one("experts.w13_bias", weights.experts.w13_bias);
  one("experts.w2", weights.experts.w2);
  one("experts.w2_scale", weights.experts.w2_scale);
  one("experts.w2_bias", weights.experts.w2_bias);
  one("shared.w13", weights.shared.w13);
  one("shared.w13_scale", weights.shared.w13_scale);
  one("shared.w13_bias", weights.shared.w13_bias);
  one("shared.w2", weights.shared.w2);
  one("shared.w2_scale", weights.shared.w2_scale);
  one("shared.w2_bias", weights.shared.w2_bias);
  one("shared_gate", weights.shared_gate);
}

}  // namespace sluice
