// Gate presets, descriptions, and the judgement of a whole layer.
#include "sluice/config.h"

#include <fmt/format.h>

namespace sluice {

GateConfig gate_preset(GateId id) {
  GateConfig gate;
  switch (id) {
    case GateId::kG1: break;
    case GateId::kG2:
      gate.group_score = GroupScore::kMax;
      gate.scale_rule = ScaleRule::kUnlessRenorm;
      break;
    case GateId::kG3:
      gate.score = Score::kSigmoid;
      gate.has_score_bias = true;
      gate.group_score = GroupScore::kTop2Sum;
      gate.renorm = Renorm::kSum;
      break;
    case GateId::kG4: gate.renorm = Renorm::kSum; break;
    case GateId::kG5:
      gate.score = Score::kLogit;
      gate.has_router_bias = true;
      gate.weight_rule = WeightRule::kSoftmaxOfChosen;
      break;
    case GateId::kG6:
      gate.score = Score::kLogit;
      gate.weight_rule = WeightRule::kSigmoidOfLogit;
      break;
    case GateId::kG7:
      gate.score = Score::kSigmoid;
      gate.has_score_bias = true;
      gate.renorm = Renorm::kSum;
      break;
    case GateId::kG8: gate.score = Score::kSigmoid; break;
    case GateId::kG9:
      gate.score = Score::kSqrtSoftplus;
      gate.has_score_bias = true;
      gate.renorm = Renorm::kSum;
      break;
    case GateId::kG10:
      gate.has_score_bias = true;
      gate.renorm = Renorm::kSumClamped;
      break;
  }
  return gate;
}

std::string describe(const GateConfig& gate) {
  std::string text;
  switch (gate.score) {
    case Score::kSoftmax: text = "softmax"; break;
    case Score::kSigmoid: text = "sigmoid"; break;
    case Score::kSqrtSoftplus: text = "sqrt-softplus"; break;
    case Score::kLogit: text = "logit"; break;
  }
  if (gate.has_router_bias) text += " (router bias)";
  if (gate.has_score_bias) text += " + bias";
  if (gate.n_group > 1) {
    text += fmt::format(", {} groups keep {} by {}", gate.n_group, gate.topk_group,
                        gate.group_score == GroupScore::kMax ? "max" : "top-2 sum");
  }
  if (gate.weight_rule == WeightRule::kSoftmaxOfChosen) text += ", softmax of the chosen";
  if (gate.weight_rule == WeightRule::kSigmoidOfLogit) text += ", weight sigmoid(l)";
  if (gate.renorm == Renorm::kSum) text += ", renormalised";
  if (gate.renorm == Renorm::kSumClamped) text += ", renormalised (sum >= 1e-12)";
  if (gate.routed_scaling_factor != 1.0f) text += fmt::format(", x{}", gate.routed_scaling_factor);
  return text;
}

std::string describe(const Activation& activation) {
  switch (activation.kind) {
    case ActivationKind::kSilu: return "silu(g)*u";
    case ActivationKind::kSiluClamped: return fmt::format("silu(g)*u, limit {}", activation.limit);
    case ActivationKind::kGptOss:
      return fmt::format("(u+1)*g*sigmoid({}*g), limit {}", activation.alpha, activation.limit);
  }
  return "unknown activation";
}

std::string_view to_string(ScaleFormat format) {
  switch (format) {
    case ScaleFormat::kF32: return "f32";
    case ScaleFormat::kUe8m0: return "ue8m0";
  }
  return "unknown scale format";
}

std::int64_t num_local(const MoeConfig& config) {
  if (config.num_local == kNoExperts) return 0;
  return config.num_local > 0 ? config.num_local : config.num_experts;
}

Status validate(const MoeConfig& config) {
  const auto refuse = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, "config: " + std::move(text));
  };
  // Twice an extent and its blocks are computed all over the layer: they must stay far inside 64 bits.
  constexpr std::int64_t kMaxExtent = std::int64_t{1} << 31;
  const auto check_extent = [&](std::string_view name, std::int64_t extent, std::int64_t low) -> Status {
    if (extent >= low && extent <= kMaxExtent) return Status::ok();
    return refuse(fmt::format("{} = {} is not between {} and 2^31", name, extent, low));
  };
  SLUICE_TRY(check_extent("hidden", config.hidden, 1));
  SLUICE_TRY(check_extent("intermediate", config.intermediate, 1));
  SLUICE_TRY(check_extent("shared_intermediate", config.shared_intermediate, 0));
  if (config.has_shared_gate && config.shared_intermediate == 0) {
    return refuse("has_shared_gate is set, but shared_intermediate = 0");
  }
  SLUICE_TRY(validate(config.gate, config.num_experts, config.top_k));
  if (config.num_local < kNoExperts) {
    return refuse(
        fmt::format("num_local = {} is neither a number of experts nor {} (none)", config.num_local, kNoExperts));
  }
  const std::int64_t local = num_local(config);
  std::int64_t local_end = 0;
  const bool overflows = __builtin_add_overflow(config.first_expert, local, &local_end);
  if (overflows || config.first_expert < 0 || local_end > config.num_experts) {
    return refuse(fmt::format("local experts [{}, {}) are not inside [0, num_experts = {})", config.first_expert,
                              overflows ? INT64_MAX : local_end, config.num_experts));
  }
  // One scaled copy of the token per expert would be needed.
  if (config.weight_on_input && config.top_k != 1) {
    return refuse(fmt::format("weight_on_input needs top_k = 1, got top_k = {}", config.top_k));
  }
  const Activation& activation = config.activation;
  if (activation.kind != ActivationKind::kSilu && !(activation.limit > 0.0f)) {
    return refuse(fmt::format("activation limit = {} must be above 0", activation.limit));
  }
  return Status::ok();
}

std::string_view to_string(Precision precision) {
  switch (precision) {
    case Precision::kW8A8: return "w8a8";
    case Precision::kW8A16: return "w8a16";
    case Precision::kBF16: return "bf16";
    case Precision::kF32: return "f32";
  }
  return "unknown precision";
}

Result<Precision> parse_precision(std::string_view text) {
  for (Precision p : {Precision::kW8A8, Precision::kW8A16, Precision::kBF16, Precision::kF32}) {
    if (text == to_string(p)) return p;
  }
  return Status(StatusCode::kInvalidArgument, fmt::format("precision '{}' is none of w8a8, w8a16, bf16, f32", text));
}

Result<DataPath> data_path(Precision precision, DType weight, bool row_scales) {
  const bool eight_bit = is_quantised(weight);
  if (!eight_bit && weight != DType::kBF16 && weight != DType::kF32) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("expert weights in {} cannot be run; e4m3, i8, bf16 and f32 can", to_string(weight)));
  }
  const auto refuse = [&](std::string_view hint) {
    return Status(StatusCode::kUnsupported, fmt::format("precision {} does not fit {} weights: {}",
                                                        to_string(precision), to_string(weight), hint));
  };
  switch (precision) {
    case Precision::kW8A8:
      if (!eight_bit) return refuse("it needs e4m3 or i8 weights; run bf16 or f32");
      return DataPath{weight, DType::kBF16, weight, DType::kBF16, row_scales || weight == DType::kI8};
    case Precision::kW8A16:
      if (!eight_bit) return refuse("it needs e4m3 or i8 weights; run bf16 or f32");
      return DataPath{DType::kBF16, DType::kBF16, DType::kBF16, DType::kBF16};
    case Precision::kBF16:
      if (eight_bit) return refuse("load with precision bf16 to dequantise them, or run w8a16");
      return DataPath{DType::kBF16, DType::kBF16, DType::kBF16, DType::kBF16};
    case Precision::kF32: return DataPath{DType::kF32, DType::kF32, DType::kF32, DType::kF32};
  }
  return refuse("unknown precision");
}

}  // namespace sluice
