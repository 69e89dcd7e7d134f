// Stage 6, swiglu_quant: what is legal, and which implementations there are.
#include "swiglu_quant/impls.h"

#include <fmt/format.h>

#include <cmath>

#include "core/can_run.h"

namespace sluice::swiglu_quant {

namespace {

constexpr Impl<Args> kImpls[] = {
#ifdef SLUICE_WITH_CUDA
    {"cuda", DeviceKind::kCuda, on_gpu<Args>, nullptr, describe_cuda, run_cuda},
#endif
    {"cpu", DeviceKind::kCpu, always<Args>, scratch_bytes_cpu, describe_cpu, run_cpu},
    {"reference", DeviceKind::kCpu, always<Args>, nullptr, nullptr, run_reference},
};

// A limit that the chosen activation would ignore is refused like one it cannot use.
Status check_activation(const Activation& activation) {
  const auto fail = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, "swiglu_quant: " + std::move(text));
  };
  const bool has_limit = activation.kind != ActivationKind::kSilu;
  if (has_limit && !(activation.limit > 0.0f)) {
    return fail(fmt::format("activation limit is {}, expected more than 0", activation.limit));
  }
  if (!has_limit && activation.limit != 0.0f) {
    return fail(fmt::format("activation limit is {}, but plain silu has none", activation.limit));
  }
  if (activation.kind == ActivationKind::kGptOss && !std::isfinite(activation.alpha)) {
    return fail(fmt::format("activation alpha is {}, expected a finite value", activation.alpha));
  }
  return Status::ok();
}

}  // namespace

Status check(const Args& args, Phase phase) {
  AxisBinder binder("swiglu_quant");
  SLUICE_TRY(binder.bind(kH, args.h, phase));
  SLUICE_TRY(binder.bind(kA, args.a, phase));
  if (args.a_scale.is_present() != is_quantised(args.a.dtype)) {
    return {StatusCode::kInvalidArgument,
            fmt::format("swiglu_quant: a is {} and a_scale is {}; a_scale must be present exactly when a is e4m3 or i8",
                        args.a.to_string(), args.a_scale.to_string())};
  }
  // int8 has one scale a row; e4m3 that or one for 128 columns, told apart by shape.
  if (args.a.dtype == DType::kI8) {
    SLUICE_TRY(binder.bind(kARowScale, args.a_scale, phase));
    if (args.scale_format != ScaleFormat::kF32) {
      return {StatusCode::kInvalidArgument, fmt::format("swiglu_quant: scale_format is {}, but i8 rows have f32 scales",
                                                        to_string(args.scale_format))};
    }
  } else {
    SLUICE_TRY(binder.bind_either(kAScale, kARowScale, args.a_scale, phase));
  }
  SLUICE_TRY(check_row_groups("swiglu_quant", args.groups, args.groups.num_groups(), args.h.shape[0], phase));
  return check_activation(args.activation);
}

std::span<const Impl<Args>> impls() { return kImpls; }

}  // namespace sluice::swiglu_quant
