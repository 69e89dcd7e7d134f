// The gate's checks and its two tables: the only place that knows which implementations there are.
#include <fmt/format.h>

#include "gate/impls.h"
#ifdef SLUICE_WITH_CUDA
#include "device/device.h"
#include "gate/cuda.h"
#endif

namespace sluice::gate {

Status check(const LogitsArgs& args, Phase phase) {
  AxisBinder binder("gate.logits");
  SLUICE_TRY(binder.bind(kX, args.x, phase));
  SLUICE_TRY(binder.bind(kWGate, args.w_gate, phase));
  SLUICE_TRY(binder.bind(kRouterBias, args.router_bias, phase));
  return binder.bind(kLogits, args.logits, phase);
}

Status check(const SelectArgs& args, Phase phase) {
  AxisBinder binder("gate.select");
  SLUICE_TRY(binder.bind(kLogits, args.logits, phase));
  SLUICE_TRY(binder.bind(kScoreBias, args.score_bias, phase));
  SLUICE_TRY(binder.bind(kTopkIdx, args.topk_idx.view, phase));
  SLUICE_TRY(binder.bind(kTopkWeight, args.topk_weight, phase));
  SLUICE_TRY(binder.bind(kCounters, args.counters, phase));
  if (args.gate.has_score_bias != args.score_bias.is_present()) {
    return {StatusCode::kInvalidArgument, fmt::format("gate.select: has_score_bias is {}, but score_bias[E] is {}",
                                                      args.gate.has_score_bias, args.score_bias.to_string())};
  }
  return validate(args.gate, args.logits.shape[1], args.topk_idx.view.shape[1]).with_context("gate.select");
}

namespace {

template <class Args>
Status always(const Args&, const Machine&) {
  return Status::ok();
}

#ifdef SLUICE_WITH_CUDA
template <class Args>
Status on_gpu(const Args&, const Machine& machine) {
  return device::runs_plain_kernels(machine);
}
#endif

constexpr Impl<LogitsArgs> kLogitsImpls[] = {
    {.name = "cpu", .can_run = always<LogitsArgs>, .describe = describe_logits_cpu, .run = logits_cpu},
    {.name = "reference", .can_run = always<LogitsArgs>, .run = logits_reference},
};

constexpr Impl<SelectArgs> kSelectImpls[] = {
#ifdef SLUICE_WITH_CUDA
    {.name = "cuda", .device = DeviceKind::kCuda, .can_run = on_gpu<SelectArgs>, .run = select_cuda},
#endif
    {.name = "cpu", .can_run = always<SelectArgs>, .run = select_cpu},
    {.name = "reference", .can_run = always<SelectArgs>, .run = select_reference},
};

}  // namespace

std::span<const Impl<LogitsArgs>> logits_impls() { return kLogitsImpls; }
std::span<const Impl<SelectArgs>> select_impls() { return kSelectImpls; }

}  // namespace sluice::gate
