// Stage 9, combine: what is legal, and which implementations there are.
#include "combine/impls.h"

#include <fmt/format.h>

#include "core/can_run.h"

namespace sluice::combine {

namespace {
constexpr Impl<Args> kImpls[] = {
#ifdef SLUICE_WITH_CUDA
    {"cuda", DeviceKind::kCuda, on_gpu<Args>, nullptr, nullptr, run_cuda},
#endif
    {"cpu", DeviceKind::kCpu, always<Args>, nullptr, describe_cpu, run_cpu},
    {"reference", DeviceKind::kCpu, always<Args>, nullptr, nullptr, run_reference},
};

}  // namespace

Status check(const Args& args, Phase phase) {
  const auto fail = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, "combine: " + std::move(text));
  };
  AxisBinder binder("combine");
  SLUICE_TRY(binder.bind(kY, args.y, phase));
  SLUICE_TRY(binder.bind(kSlotRow, args.slot_row, phase));
  if (!args.unweighted && !args.topk_weight.is_present()) {
    return fail("topk_weight[T,S] is missing, and unweighted was not asked for");
  }
  if (args.unweighted && args.topk_weight.is_present()) {
    return fail(fmt::format("unweighted was asked for, but topk_weight is {}", args.topk_weight.to_string()));
  }
  SLUICE_TRY(binder.bind(kTopkWeight, args.topk_weight, phase));
  SLUICE_TRY(binder.bind(kShared, args.shared, phase));
  if (args.shared_gate.is_present() && !args.shared.is_present()) {
    return fail("shared_gate[T,1] needs shared[T,H], which is missing");
  }
  SLUICE_TRY(binder.bind(kSharedGate, args.shared_gate, phase));
  return binder.bind(kOut, args.out, phase);
}

std::span<const Impl<Args>> impls() { return kImpls; }

}  // namespace sluice::combine
