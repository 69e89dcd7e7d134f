// Stage 6, swiglu_quant: what is legal, and which implementations there are.
#include "sluice/stage/swiglu_quant.h"

#include <fmt/format.h>

#ifdef SLUICE_WITH_CUDA
#include "device/device.h"
#include "swiglu_quant/cuda.h"
#endif

#include <cmath>

namespace sluice::swiglu_quant {

Status run_reference(const Args& args, const Ctx& ctx);
Status run_cpu(const Args& args, const Ctx& ctx);
std::string describe_cpu(const Args& args, const Machine& machine);

namespace {

Status always(const Args&, const Machine&) { return Status::ok(); }
#ifdef SLUICE_WITH_CUDA
Status on_gpu(const Args&, const Machine& machine) { return device::runs_plain_kernels(machine); }
#endif

constexpr Impl<Args> kImpls[] = {
#ifdef SLUICE_WITH_CUDA
    {"cuda", DeviceKind::kCuda, on_gpu, nullptr, nullptr, run_cuda},
#endif
    {"cpu", DeviceKind::kCpu, always, nullptr, describe_cpu, run_cpu},
    {"reference", DeviceKind::kCpu, always, nullptr, nullptr, run_reference},
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
  if (args.a_scale.is_present() != (args.a.dtype == DType::kE4M3)) {
    return {StatusCode::kInvalidArgument,
            fmt::format("swiglu_quant: a is {} and a_scale is {}; a_scale must be present exactly when a is e4m3",
                        args.a.to_string(), args.a_scale.to_string())};
  }
  SLUICE_TRY(binder.bind(kAScale, args.a_scale, phase));
  SLUICE_TRY(check_row_groups("swiglu_quant", args.groups, args.groups.num_groups(), args.h.shape[0], phase));
  return check_activation(args.activation);
}

std::span<const Impl<Args>> impls() { return kImpls; }

}  // namespace sluice::swiglu_quant
