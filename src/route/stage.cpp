// Stage 2, route: what is legal, and which implementations there are.
#include "sluice/stage/route.h"

#include <fmt/format.h>

#include "core/can_run.h"
#ifdef SLUICE_WITH_CUDA
#include "route/cuda.h"
#endif

#include <limits>

namespace sluice::route {

Status run_reference(const Args& args, const Ctx& ctx);
Status run_cpu(const Args& args, const Ctx& ctx);
std::int64_t scratch_bytes_cpu(const Args& args, const Machine& machine);
std::string describe_cpu(const Args& args, const Machine& machine);

namespace {

#ifdef SLUICE_WITH_CUDA
// Naming the bad id would need the host to read ids, hence a synchronisation in the call.
Status can_run_cuda(const Args& args, const Machine& machine) {
  SLUICE_TRY(device::runs_plain_kernels(machine));
  if (args.checked)
    return {StatusCode::kUnsupported, "checked is a host's work: ids are counted on the GPU, not named"};
  const std::int64_t num_local = args.plan.expert_offset.view.shape[0] - 1;
  if (num_local <= kMaxLocalCuda) return Status::ok();
  return {
      StatusCode::kUnsupported,
      fmt::format("L = {} local experts, at most {} have their histograms in shared memory", num_local, kMaxLocalCuda)};
}
#endif

constexpr Impl<Args> kImpls[] = {
#ifdef SLUICE_WITH_CUDA
    {"cuda", DeviceKind::kCuda, can_run_cuda, scratch_bytes_cuda, nullptr, run_cuda},
#endif
    {"cpu", DeviceKind::kCpu, always<Args>, scratch_bytes_cpu, describe_cpu, run_cpu},
    {"reference", DeviceKind::kCpu, always<Args>, nullptr, nullptr, run_reference},
};

}  // namespace

Status check(const Args& args, Phase phase) {
  const auto fail = [](std::string text) { return Status(StatusCode::kInvalidArgument, "route: " + std::move(text)); };
  constexpr std::int64_t kMaxI32 = std::numeric_limits<std::int32_t>::max();
  AxisBinder binder("route");
  SLUICE_TRY(binder.bind(kTopkIdx, args.topk_idx.view, phase));
  const std::int64_t num_tokens = args.topk_idx.view.shape[0];
  const std::int64_t num_slots = args.topk_idx.view.shape[1];
  // Rows and flat slots are i32 everywhere below.
  if (num_slots > 0 && num_tokens > kMaxI32 / num_slots) {
    return fail(fmt::format("topk_idx has T = {} times S = {} slots, at most {} can be routed at once", num_tokens,
                            num_slots, kMaxI32));
  }
  if (args.num_experts < 1 || args.num_experts > kMaxI32) {
    return fail(fmt::format("num_experts is {}, expected 1 to {}", args.num_experts, kMaxI32));
  }
  SLUICE_TRY(binder.bind(kExpertOffset, args.plan.expert_offset.view, phase));
  if (args.plan.expert_offset.view.shape[0] < 1) return fail("expert_offset[L+1] has no elements, expected at least 1");
  const std::int64_t num_local = args.plan.expert_offset.view.shape[0] - 1;
  if (args.first_expert < 0 || num_local > args.num_experts || args.first_expert > args.num_experts - num_local) {
    return fail(fmt::format("first_expert = {} and L = {} local experts do not lie within num_experts = {}",
                            args.first_expert, num_local, args.num_experts));
  }
  SLUICE_TRY(binder.bind(kRowToken, args.plan.row_token, phase));
  SLUICE_TRY(binder.bind(kRowSlot, args.plan.row_slot, phase));
  if (args.plan.row_token.shape[0] < num_tokens * num_slots) {
    return fail(fmt::format("row_token and row_slot hold R = {} rows, T*S = {} * {} = {} may be needed",
                            args.plan.row_token.shape[0], num_tokens, num_slots, num_tokens * num_slots));
  }
  SLUICE_TRY(binder.bind(kSlotRow, args.plan.slot_row, phase));
  SLUICE_TRY(binder.bind(kNumRows, args.plan.num_rows, phase));
  return binder.bind(kCounters, args.counters, phase);
}

std::span<const Impl<Args>> impls() { return kImpls; }

}  // namespace sluice::route
