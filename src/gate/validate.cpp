// The judgement of a gate rule, shared by validate(MoeConfig) and check(SelectArgs).
#include <fmt/format.h>

#include <cmath>

#include "sluice/config.h"

namespace sluice {

Status validate(const GateConfig& gate, std::int64_t num_experts, std::int64_t top_k) {
  const auto refuse = [](std::string text) { return Status(StatusCode::kInvalidArgument, "gate: " + std::move(text)); };
  // The enums may arrive as plain integers through the C API.
  if (gate.score > Score::kLogit) return refuse(fmt::format("score = {} is no Score", static_cast<int>(gate.score)));
  if (gate.group_score > GroupScore::kTop2Sum) {
    return refuse(fmt::format("group_score = {} is no GroupScore", static_cast<int>(gate.group_score)));
  }
  if (gate.weight_rule > WeightRule::kSigmoidOfLogit) {
    return refuse(fmt::format("weight_rule = {} is no WeightRule", static_cast<int>(gate.weight_rule)));
  }
  if (gate.renorm > Renorm::kSumClamped)
    return refuse(fmt::format("renorm = {} is no Renorm", static_cast<int>(gate.renorm)));
  if (gate.scale_rule > ScaleRule::kUnlessRenorm) {
    return refuse(fmt::format("scale_rule = {} is no ScaleRule", static_cast<int>(gate.scale_rule)));
  }

  if (num_experts < 1) return refuse(fmt::format("num_experts = {} must be at least 1", num_experts));
  if (num_experts > kMaxExperts) {
    return refuse(fmt::format("num_experts = {} is more than the {} supported", num_experts, kMaxExperts));
  }
  if (top_k < 1) return refuse(fmt::format("top_k = {} must be at least 1", top_k));
  if (top_k > kMaxTopK) return refuse(fmt::format("top_k = {} is more than the {} supported", top_k, kMaxTopK));
  if (top_k > num_experts) return refuse(fmt::format("top_k = {} is more than num_experts = {}", top_k, num_experts));

  if (gate.n_group < 1) return refuse(fmt::format("n_group = {} must be at least 1", gate.n_group));
  if (num_experts % gate.n_group != 0) {
    return refuse(fmt::format("num_experts = {} is not a multiple of n_group = {}", num_experts, gate.n_group));
  }
  if (gate.topk_group < 1) return refuse(fmt::format("topk_group = {} must be at least 1", gate.topk_group));
  if (gate.topk_group > gate.n_group) {
    return refuse(fmt::format("topk_group = {} is more than n_group = {}", gate.topk_group, gate.n_group));
  }
  const std::int64_t group_size = num_experts / gate.n_group;
  if (gate.n_group > 1) {
    if (gate.group_score == GroupScore::kNone) {
      return refuse(fmt::format("group_score is none, but n_group = {} needs max or top-2 sum", gate.n_group));
    }
    if (gate.group_score == GroupScore::kTop2Sum && group_size < 2) {
      return refuse(
          fmt::format("group_score is top-2 sum, but num_experts = {} over n_group = {} leaves {} expert per group",
                      num_experts, gate.n_group, group_size));
    }
  }
  if (top_k > gate.topk_group * group_size) {
    return refuse(fmt::format(
        "top_k = {} is more than the {} experts that topk_group = {} of n_group = {} keep of num_experts = {}", top_k,
        gate.topk_group * group_size, gate.topk_group, gate.n_group, num_experts));
  }
  // A factor of infinity would turn the weight 0 of an unfilled slot into NaN.
  if (!std::isfinite(gate.routed_scaling_factor)) {
    return refuse(fmt::format("routed_scaling_factor = {} is not finite", gate.routed_scaling_factor));
  }
  return Status::ok();
}

}  // namespace sluice
