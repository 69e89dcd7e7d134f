// What is legal, and which implementations there are.
#include <fmt/format.h>

#include "fused/up_swiglu_quant/config.h"
#include "fused/up_swiglu_quant/cuda.h"

namespace sluice::up_swiglu_quant {

namespace {
Status fail(std::string text) { return {StatusCode::kInvalidArgument, fmt::format("{}: {}", kStage, text)}; }
}  // namespace

Status check(const Args& args, Phase phase) {
  // h has no memory, so the stages' own checks see a plan; what they would ask of addresses is asked here.
  SLUICE_TRY(grouped_gemm::check(args.up, Phase::kPlan));
  SLUICE_TRY(swiglu_quant::check(args.act, Phase::kPlan));
  const TensorView& out = args.up.out;
  const TensorView& h = args.act.h;
  if (out.dtype != h.dtype || out.shape[0] != h.shape[0] || out.shape[1] != h.shape[1]) {
    return fail(fmt::format("up.out is {}, act.h is {}; both stand for h", out.to_string(), h.to_string()));
  }
  const RowGroups& groups = args.act.groups;
  if (args.up.groups.form != groups.form || args.up.groups.expert_offset.view.data != groups.expert_offset.view.data ||
      args.up.groups.counts.data != groups.counts.data) {
    return fail("up and act have different row groups");
  }
  if (phase == Phase::kPlan) return Status::ok();
  for (const auto& [name, view] : {std::pair<const char*, const TensorView*>("up.a", &args.up.a),
                                   {"up.a_scale", &args.up.a_scale},
                                   {"up.w", &args.up.w},
                                   {"up.w_scale", &args.up.w_scale},
                                   {"up.bias", &args.up.bias},
                                   {"act.a", &args.act.a},
                                   {"act.a_scale", &args.act.a_scale},
                                   {"groups.expert_offset", &groups.expert_offset.view},
                                   {"groups.counts", &groups.counts}}) {
    if (view->is_present() && view->data == nullptr && view->num_elements() > 0)
      return fail(fmt::format("{} = {} is null", name, view->to_string()));
  }
  return Status::ok();
}

bool replaces(std::string_view gemm, std::string_view activation) {
  return gemm == "cuda-wgmma" && activation == "cuda";
}

std::span<const Impl<Args>> impls() {
#ifdef SLUICE_WITH_CUDA
  static constexpr Impl<Args> kTable[] = {
      {"cuda-fused", DeviceKind::kCuda, can_run_cuda, nullptr, describe_cuda, run_cuda},
  };
  return kTable;
#else
  return {};
#endif
}

}  // namespace sluice::up_swiglu_quant
