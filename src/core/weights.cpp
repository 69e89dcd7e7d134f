// Judges a layer's weights against its config: what must be there is there, and nothing means two things.
#include "sluice/weights.h"

#include <fmt/format.h>

namespace sluice {
namespace {

constexpr DTypeSet kWeightTypes = {DType::kE4M3, DType::kI8, DType::kBF16, DType::kF32};
constexpr DTypeSet kPlainTypes = {DType::kBF16, DType::kF32};

Status invalid(std::string text) { return {StatusCode::kInvalidArgument, "weights: " + std::move(text)}; }

// Presence follows from the config; a tensor too many is refused as one too few, because it would be ignored silently.
Status check_presence(std::string_view name, const TensorView& view, bool wanted, std::string_view reason) {
  if (view.is_present() == wanted) return Status::ok();
  return invalid(wanted ? fmt::format("{} is missing, but {}", name, reason)
                        : fmt::format("{} is given, but {}", name, reason));
}

struct FfnNames {
  std::string_view stage, w13, w13_scale, w13_bias, w2, w2_scale, w2_bias;
};
constexpr FfnNames kExpertNames = {"weights: experts", "w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias"};
constexpr FfnNames kSharedNames = {"weights: shared", "w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias"};

Status check_ffn(const FfnNames& names, const FfnWeights& ffn, std::int64_t L, std::int64_t H, std::int64_t I) {
  AxisBinder binder(names.stage);
  binder.set(Axis::kL, L, "the config");
  binder.set(Axis::kH, H, "the config");
  binder.set(Axis::kI, I, "the config");
  binder.set(Axis::kNb, 2 * ceil_div(I, kScaleBlock), "2*ceil(I/128)");
  const auto bind = [&](std::string_view name, const TensorView& view, DTypeSet dtypes,
                        std::initializer_list<Axis> axes, bool optional) {
    const TensorSpec spec(name, dtypes, axes);
    return binder.bind(optional ? spec.opt() : spec, view, Phase::kRun);
  };
  SLUICE_TRY(bind(names.w13, ffn.w13, kWeightTypes, {Axis::kL, Axis::kI2, Axis::kH}, false));
  SLUICE_TRY(bind(names.w2, ffn.w2, kWeightTypes, {Axis::kL, Axis::kH, Axis::kI}, false));
  if (ffn.w13.dtype != ffn.w2.dtype) {
    return invalid(
        fmt::format("w13 is {} and w2 is {}; both must be of one dtype", ffn.w13.to_string(), ffn.w2.to_string()));
  }
  const bool scaled = is_quantised(ffn.w13.dtype);
  const std::string reason = scaled ? fmt::format("the weights are {}", to_string(ffn.w13.dtype))
                                    : fmt::format("{} weights have no scales", to_string(ffn.w13.dtype));
  SLUICE_TRY(check_presence("w13_scale", ffn.w13_scale, scaled, reason).with_context(names.stage));
  SLUICE_TRY(check_presence("w2_scale", ffn.w2_scale, scaled, reason).with_context(names.stage));
  const TensorSpec w13_blocks = TensorSpec(names.w13_scale, DType::kF32, {Axis::kL, Axis::kNb, Axis::kHb}).opt();
  const TensorSpec w13_rows = TensorSpec(names.w13_scale, DType::kF32, {Axis::kL, Axis::kI2, Axis::kOne}).opt();
  const TensorSpec w2_blocks = TensorSpec(names.w2_scale, DType::kF32, {Axis::kL, Axis::kHb, Axis::kIb}).opt();
  const TensorSpec w2_rows = TensorSpec(names.w2_scale, DType::kF32, {Axis::kL, Axis::kH, Axis::kOne}).opt();
  if (ffn.w13.dtype == DType::kI8) {
    SLUICE_TRY(binder.bind(w13_rows.repeated(), ffn.w13_scale, Phase::kRun));
    SLUICE_TRY(binder.bind(w2_rows.repeated(), ffn.w2_scale, Phase::kRun));
  } else {
    SLUICE_TRY(binder.bind_either(w13_blocks, w13_rows.repeated(), ffn.w13_scale, Phase::kRun));
    SLUICE_TRY(binder.bind_either(w2_blocks, w2_rows.repeated(), ffn.w2_scale, Phase::kRun));
    // Extents that let a shape be either decide nothing.
    const bool fit_blocks = binder.fits(w13_blocks, ffn.w13_scale) && binder.fits(w2_blocks, ffn.w2_scale);
    const bool fit_rows = binder.fits(w13_rows, ffn.w13_scale) && binder.fits(w2_rows, ffn.w2_scale);
    if (scaled && !fit_blocks && !fit_rows) {
      return invalid(fmt::format("w13_scale is {} and w2_scale is {}: one has a scale for 128x128, the other for a row",
                                 ffn.w13_scale.to_string(), ffn.w2_scale.to_string()))
          .with_context(names.stage);
    }
  }
  SLUICE_TRY(bind(names.w13_bias, ffn.w13_bias, DType::kF32, {Axis::kL, Axis::kI2}, true));
  return bind(names.w2_bias, ffn.w2_bias, DType::kF32, {Axis::kL, Axis::kH}, true);
}

}  // namespace

Status check_weights(const MoeConfig& config, const LayerWeights& weights) {
  SLUICE_TRY(validate(config));
  AxisBinder binder("weights");
  binder.set(Axis::kE, config.num_experts, "the config");
  binder.set(Axis::kH, config.hidden, "the config");
  SLUICE_TRY(binder.bind(TensorSpec("w_gate", kPlainTypes, {Axis::kE, Axis::kH}), weights.w_gate, Phase::kRun));
  const GateConfig& gate = config.gate;
  SLUICE_TRY(check_presence("router_bias", weights.router_bias, gate.has_router_bias,
                            gate.has_router_bias ? "gate.has_router_bias is set" : "gate.has_router_bias is not set"));
  SLUICE_TRY(check_presence("score_bias", weights.score_bias, gate.has_score_bias,
                            gate.has_score_bias ? "gate.has_score_bias is set" : "gate.has_score_bias is not set"));
  SLUICE_TRY(binder.bind(TensorSpec("router_bias", DType::kF32, {Axis::kE}).opt(), weights.router_bias, Phase::kRun));
  SLUICE_TRY(binder.bind(TensorSpec("score_bias", DType::kF32, {Axis::kE}).opt(), weights.score_bias, Phase::kRun));
  SLUICE_TRY(check_ffn(kExpertNames, weights.experts, num_local(config), config.hidden, config.intermediate));
  const bool shared = config.shared_intermediate > 0;
  const std::string width = fmt::format("shared_intermediate = {}", config.shared_intermediate);
  if (shared) {
    SLUICE_TRY(check_ffn(kSharedNames, weights.shared, 1, config.hidden, config.shared_intermediate));
  } else {
    SLUICE_TRY(check_presence("shared.w13", weights.shared.w13, false, width));
    SLUICE_TRY(check_presence("shared.w2", weights.shared.w2, false, width));
  }
  SLUICE_TRY(check_presence("shared_gate", weights.shared_gate, config.has_shared_gate,
                            config.has_shared_gate ? "has_shared_gate is set" : "has_shared_gate is not set"));
  return binder.bind(TensorSpec("shared_gate", kPlainTypes, {Axis::kOne, Axis::kH}).opt(), weights.shared_gate,
                     Phase::kRun);
}

bool has_row_scales(const FfnWeights& weights) {
  if (weights.w13.dtype == DType::kI8) return true;
  if (weights.w13.dtype != DType::kE4M3) return false;
  const auto is_row = [](const TensorView& scale, const TensorView& w) {
    return scale.shape[1] == w.shape[1] && scale.shape[2] == 1;
  };
  const auto is_block = [](const TensorView& scale, std::int64_t rows, std::int64_t cols) {
    return scale.shape[1] == rows && scale.shape[2] == ceil_div(cols, kScaleBlock);
  };
  const std::int64_t H = weights.w13.shape[2];
  const std::int64_t I = weights.w2.shape[2];
  if (is_block(weights.w13_scale, 2 * ceil_div(I, kScaleBlock), H) &&
      is_block(weights.w2_scale, ceil_div(H, kScaleBlock), I)) {
    return false;
  }
  return is_row(weights.w13_scale, weights.w13) && is_row(weights.w2_scale, weights.w2);
}

Result<DataPath> data_path(Precision precision, const FfnWeights& weights) {
  return data_path(precision, weights.w13.dtype, has_row_scales(weights));
}

std::int64_t num_bytes(const FfnWeights& weights) {
  std::int64_t bytes = 0;
  for (const TensorView* view :
       {&weights.w13, &weights.w13_scale, &weights.w13_bias, &weights.w2, &weights.w2_scale, &weights.w2_bias}) {
    bytes += view->num_bytes();
  }
  return bytes;
}

std::int64_t num_bytes(const LayerWeights& weights) {
  std::int64_t bytes = num_bytes(weights.experts) + num_bytes(weights.shared);
  for (const TensorView* view : {&weights.w_gate, &weights.router_bias, &weights.score_bias, &weights.shared_gate})
    bytes += view->num_bytes();
  return bytes;
}

}  // namespace sluice
