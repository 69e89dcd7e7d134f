// Stage 6, swiglu_quant: what is legal, and which implementations there are.
#include "swiglu_quant/impls.h"

#include <fmt/format.h>

#include <cmath>

#include "core/can_run.h"
#include "core/scales.h"

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
  SLUICE_TRY(bind_scale("swiglu_quant", binder, kA, args.a, kAScale, kARowScale, args.a_scale, phase));
  SLUICE_TRY(check_scale_format("swiglu_quant", args.a.dtype, args.scale_format));
  SLUICE_TRY(check_row_groups("swiglu_quant", args.groups, args.groups.num_groups(), args.h.shape[0], phase));
  return check_activation(args.activation);
}

std::span<const Impl<Args>> impls() { return kImpls; }

}  // namespace sluice::swiglu_quant
