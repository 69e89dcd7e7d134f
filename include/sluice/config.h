// What a MoE layer is, apart from its weights: sizes, gate rule, activation, shared expert, local experts.
#pragma once

#include "sluice/core.h"

namespace sluice {

// Score of an expert from its fp32 logit l. kLogit chooses on l itself.
enum class Score : std::uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus, kLogit };
// Score of a group of experts, from the choice values of its members.
enum class GroupScore : std::uint8_t { kNone, kMax, kTop2Sum };
// Where the weight of a chosen expert comes from; always unbiased.
enum class WeightRule : std::uint8_t { kScore, kSoftmaxOfChosen, kSigmoidOfLogit };
// kSum: w / (sum + 1e-20). kSumClamped: w / max(sum, 1e-12).
enum class Renorm : std::uint8_t { kNone, kSum, kSumClamped };
// kUnlessRenorm: DeepSeek-V2's "one or the other": the factor applies only where no renormalisation was done, and a
// single slot is never renormalised.
enum class ScaleRule : std::uint8_t { kAlways, kUnlessRenorm };

// The gate as an ordered rule:
//   l = x w_gate^T (+ router_bias)
//   s = score(l);  c = s (+ score_bias, for the choice only)
//   groups ranked by group_score of c, topk_group kept;  idx = top_k of c among the kept
//   w = weight_rule;  renorm;  w *= factor
struct GateConfig {
  Score score = Score::kSoftmax;
  bool has_score_bias = false;   // e_score_correction_bias: f32, chooses, never weighs
  bool has_router_bias = false;  // added to the logits (gpt-oss)
  std::int64_t n_group = 1;
  std::int64_t topk_group = 1;
  GroupScore group_score = GroupScore::kNone;  // needed when n_group > 1, unused otherwise
  WeightRule weight_rule = WeightRule::kScore;
  Renorm renorm = Renorm::kNone;
  ScaleRule scale_rule = ScaleRule::kAlways;
  float routed_scaling_factor = 1.0f;
};

// The rules of released models; sizes, groups, renorm and factor are then set from the model's config.
//   kG1 softmax (DeepSeek-V2-Lite, Qwen2-MoE)      kG2 group-limited greedy (DeepSeek-V2)
//   kG3 noaux_tc (DeepSeek-V3, Kimi K2, GLM-4.5)   kG4 softmax, renormalised (Qwen3-MoE, Mixtral)
//   kG5 gpt-oss                                    kG6 Llama 4
//   kG7 MiniMax-M2                                 kG8 sigmoid, optionally renormalised
//   kG9 sqrt-softplus (DeepSeek-V4 family)         kG10 softmax + bias (Ernie-4.5)
enum class GateId : std::uint8_t { kG1, kG2, kG3, kG4, kG5, kG6, kG7, kG8, kG9, kG10 };
GateConfig gate_preset(GateId id);
// Impossible gates are refused, naming the fields and their values.
Status validate(const GateConfig& gate, std::int64_t num_experts, std::int64_t top_k);
std::string describe(const GateConfig& gate);  // "sigmoid + bias, 8 groups keep 4 by top-2 sum, renormalised, x2.5"

// kSilu:        a = silu(g) * u
// kSiluClamped: a = silu(min(g, limit)) * clamp(u, -limit, limit)
// kGptOss:      g = min(g, limit), u = clamp(u, -limit, limit); a = (u + 1) * g * sigmoid(alpha * g)
enum class ActivationKind : std::uint8_t { kSilu, kSiluClamped, kGptOss };
struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  float limit = 0.0f;
  float alpha = 0.0f;
};
std::string describe(const Activation& activation);

// The scale of a group of activations (128 columns, or a whole row) that is quantised to e4m3; either is stored as f32.
//   kF32:   scale = max(amax, 1e-10) / 448
//   kUe8m0: that scale rounded up to a power of two before anything is divided by it (an f32 mantissa that is not zero
//           is cleared and the exponent rises by one), as models trained with scale_fmt "ue8m0" expect (DeepSeek-V3.1)
enum class ScaleFormat : std::uint8_t { kF32, kUe8m0 };
std::string_view to_string(ScaleFormat format);

// MoeConfig::num_local of a rank without experts: its weights are [0,2I,H] and [0,H,I], in the dtype of the other ranks', and
// may be null; nothing is routed to it. Its gate, its shared expert and its output are those of any rank.
inline constexpr std::int64_t kNoExperts = -1;

struct MoeConfig {
  std::int64_t hidden = 0;        // H
  std::int64_t intermediate = 0;  // I
  std::int64_t num_experts = 0;   // E
  std::int64_t top_k = 0;         // S
  GateConfig gate;
  Activation activation;                             // routed and shared experts alike
  ScaleFormat activation_scale = ScaleFormat::kF32;  // of rows and a at precision w8a8; nothing else reads it
  bool weight_on_input = false;                      // Llama 4: x * w goes into the expert; needs S == 1
  std::int64_t shared_intermediate = 0;              // of all shared experts together; 0: none
  bool has_shared_gate = false;                      // shared output times sigmoid(x . w_shared_gate)
  std::int64_t first_expert = 0;                     // global id of the first local expert
  std::int64_t num_local = 0;                        // L; 0: all E; kNoExperts: none
};

inline constexpr std::int64_t kMaxExperts = 1024;
inline constexpr std::int64_t kMaxTopK = 32;

std::int64_t num_local(const MoeConfig& config);  // L itself, 0 to E
// Impossible layers are refused here, naming the fields and their values; no other rule steps in.
Status validate(const MoeConfig& config);

// What the expert GEMMs compute with. Weights are never requantised behind the caller's back.
//   kW8A8   activations quantised as the weights are: to e4m3 per token and 128 columns for e4m3 weights with 128x128
//           scales, to e4m3 or i8 per token for e4m3 or i8 weights with one scale a row (an output channel)
//   kW8A16  e4m3 or i8 weights, bf16 activations
//   kBF16   bf16 (or f32) weights, bf16 activations
//   kF32    any weights, f32 activations
enum class Precision : std::uint8_t { kW8A8, kW8A16, kBF16, kF32 };
std::string_view to_string(Precision precision);
Result<Precision> parse_precision(std::string_view text);

// The dtypes that flow through one FFN at one precision: rows -> h -> a -> y.
struct DataPath {
  DType rows = DType::kF32;  // packed x; e4m3 and i8 come with scales
  DType h = DType::kF32;
  DType a = DType::kF32;  // e4m3 and i8 come with scales
  DType y = DType::kF32;
  bool row_scales = false;  // the scales of rows and a are [1,R], one a row, instead of [Hb,R] and [Ib,R]; i8: always

  // First axis of the scales of a quantised [R,width].
  constexpr std::int64_t scale_blocks(std::int64_t width) const {
    return row_scales ? 1 : ceil_div(width, kScaleBlock);
  }
};
// The path for weights of `weight` dtype, or why there is none. row_scales: the weights have one scale a row
// (has_row_scales in sluice/weights.h); i8 weights always do.
Result<DataPath> data_path(Precision precision, DType weight, bool row_scales = false);

}  // namespace sluice
