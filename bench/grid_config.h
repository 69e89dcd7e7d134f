// The layer of a row of the grid: bench/grid.h gives its sizes, this file the gate that the models of these sizes have.
#pragma once

#include <string_view>

#include "grid.h"
#include "sluice/config.h"

namespace sluice::bench {

inline MoeConfig grid_config(const GridRow& row) {
  MoeConfig config;
  config.hidden = row.hidden;
  config.intermediate = row.intermediate;
  config.num_experts = row.num_experts;
  config.num_local = row.local_experts;
  config.top_k = row.top_k;
  const bool deepseek = std::string_view(row.shape).starts_with("dsv3");
  config.gate = gate_preset(deepseek ? GateId::kG3 : GateId::kG4);
  if (deepseek) {
    config.gate.n_group = 8;
    config.gate.topk_group = 4;
    config.gate.routed_scaling_factor = 2.5f;
  }
  return config;
}

}  // namespace sluice::bench
