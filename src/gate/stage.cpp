// The gate's checks and its two tables: the only place that knows which implementations there are.
#include <fmt/format.h>

#include "core/can_run.h"
#include "gate/impls.h"
#ifdef SLUICE_WITH_CUDA
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

Status check(const BothArgs& args, Phase phase) {
  SLUICE_TRY(check(args.logits, phase));
  SLUICE_TRY(check(args.select, phase));
  const TensorView& out = args.logits.logits;
  const TensorView& in = args.select.logits;
  if (out.data == in.data && out.shape == in.shape && out.stride == in.stride) return Status::ok();
  return {StatusCode::kInvalidArgument,
          fmt::format("gate: the selection reads {}, the router GEMM writes {}; both are one tensor", in.to_string(),
                      out.to_string())};
}

namespace {

constexpr Impl<LogitsArgs> kLogitsImpls[] = {
#ifdef SLUICE_WITH_CUDA
    {.name = "cuda-wgmma",
     .device = DeviceKind::kCuda,
     .can_run = can_run_logits_wgmma,
     .scratch_bytes = scratch_bytes_logits_wgmma,
     .describe = describe_logits_wgmma,
     .run = logits_wgmma},
    {.name = "cuda", .device = DeviceKind::kCuda, .can_run = on_gpu<LogitsArgs>, .run = logits_cuda},
#endif
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

#ifdef SLUICE_WITH_CUDA
constexpr Impl<BothArgs> kBothImpls[] = {{.name = "cuda-wgmma",
                                          .device = DeviceKind::kCuda,
                                          .can_run = can_run_both_wgmma,
                                          .scratch_bytes = scratch_bytes_both_wgmma,
                                          .run = both_wgmma}};
#endif

}  // namespace

#ifdef SLUICE_WITH_CUDA
Status check_logits_wgmma(const LogitsArgs& args) {
  const auto judge = [](std::string_view name, const TensorView& view) -> Status {
    constexpr std::int64_t kUnitBytes = 16;  // of TMA
    const std::int64_t row_bytes = view.stride[0] * size_bytes(view.dtype);
    if (view.dtype != DType::kBF16) {
      return {StatusCode::kUnsupported,
              fmt::format("gate.logits: {} is {}, tensor cores take bf16", name, to_string(view.dtype))};
    }
    if (row_bytes % kUnitBytes != 0 || row_bytes == 0) {
      return {StatusCode::kUnsupported, fmt::format("gate.logits: {} has rows of {} elements, tensor cores want a "
                                                    "multiple of {}",
                                                    name, view.stride[0], kUnitBytes / size_bytes(view.dtype))};
    }
    if (reinterpret_cast<std::uintptr_t>(view.data) % kUnitBytes != 0) {
      return {StatusCode::kInvalidArgument,
              fmt::format("gate.logits: {} does not start on a multiple of {} bytes", name, kUnitBytes)};
    }
    return Status::ok();
  };
  if (args.x.shape[1] == 0) return {StatusCode::kUnsupported, "gate.logits: no columns, H = 0"};
  SLUICE_TRY(judge("x", args.x));
  return judge("w_gate", args.w_gate);
}

Status can_run_logits_wgmma(const LogitsArgs& args, const Machine& machine) {
  SLUICE_TRY(device::runs_hopper_kernels(machine));
  return check_logits_wgmma(args);
}

std::int64_t scratch_bytes_logits_wgmma(const LogitsArgs& args, const Machine&) {
  return logits_scratch_bytes(args.x.shape[0], args.x.shape[1], args.w_gate.shape[0]);
}

std::string describe_logits_wgmma(const LogitsArgs& args, const Machine& machine) {
  return choose_logits_tile(args.x.shape[0], args.x.shape[1], args.w_gate.shape[0], machine.gpu.num_sms).to_string();
}

Status can_run_both_wgmma(const BothArgs& args, const Machine& machine) {
  const std::int64_t num_tokens = args.logits.x.shape[0];
  if (num_tokens > kMostTokensOfBoth) {
    return {StatusCode::kUnsupported,
            fmt::format("gate: T = {}, the two stages are as fast from {} on", num_tokens, kMostTokensOfBoth + 1)};
  }
  return can_run_logits_wgmma(args.logits, machine);
}

std::int64_t scratch_bytes_both_wgmma(const BothArgs& args, const Machine& machine) {
  return scratch_bytes_logits_wgmma(args.logits, machine);
}

Status both_wgmma(const BothArgs& args, const Ctx& ctx) {
  ChunkSums sums;
  SLUICE_TRY(logits_wgmma_sums(args.logits, ctx, sums));
  return select_sums_cuda(args.select, sums, ctx);
}

std::span<const Impl<BothArgs>> both_impls() { return kBothImpls; }
#else
std::span<const Impl<BothArgs>> both_impls() { return {}; }
#endif

bool both_replaces(std::string_view logits, std::string_view select) {
  return logits == "cuda-wgmma" && select == "cuda";
}

std::span<const Impl<LogitsArgs>> logits_impls() { return kLogitsImpls; }
std::span<const Impl<SelectArgs>> select_impls() { return kSelectImpls; }

}  // namespace sluice::gate
