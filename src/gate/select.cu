// Stage 1's selection on a GPU: one warp per token up to E = 1024 (select.cuh); many tokens go four to a warp where the gate
// allows it (select_four.cu).
#include "gate/select.cuh"

namespace sluice::gate {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

using namespace selection;  // NOLINT: the kernel's parts, in this file alone

extern __shared__ uint4 g_shared[];  // a WarpStorage<kPerLane> per warp

template <int kPerLane, bool kFromSums>
__global__ void __launch_bounds__(128) select_experts(const __grid_constant__ Params p) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int num_warps = static_cast<int>(blockDim.x) / kLanes;
  wait_for_previous();
  allow_next();
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * num_warps + warp;
  if (token >= p.num_tokens) return;
  select_token<kPerLane, kFromSums>(p, token, reinterpret_cast<WarpStorage<kPerLane>*>(g_shared)[warp]);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

namespace {

struct Kernel {
  void (*function)(Params);
  int per_lane;
};
template <bool kFromSums>
Kernel kernel_for(std::int64_t num_experts) {
  const std::int64_t per_lane = ceil_div(num_experts, kLanes);
  if (per_lane <= 1) return {select_experts<1, kFromSums>, 1};
  if (per_lane <= 2) return {select_experts<2, kFromSums>, 2};
  if (per_lane <= 4) return {select_experts<4, kFromSums>, 4};
  if (per_lane <= 8) return {select_experts<8, kFromSums>, 8};
  if (per_lane <= 12) return {select_experts<12, kFromSums>, 12};
  if (per_lane <= 16) return {select_experts<16, kFromSums>, 16};
  return {select_experts<32, kFromSums>, 32};
}

bool is_wide(const TensorView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && (view.rank == 1 || view.stride[0] % 4 == 0);
}

// Few tokens spread over the multiprocessors, one warp each.
constexpr std::int64_t kSpreadTokens = 1024;
// From here on four tokens a warp are faster: 4.3 us for 4.6 at T = 2048, 4.1 for 3.4 at 1024.
constexpr std::int64_t kMinTokensForFour = 1792;
constexpr int kWarps = 4;

}  // namespace

Status select_cuda(const SelectArgs& args, const Ctx& ctx) { return select_sums_cuda(args, {}, ctx); }

Status select_sums_cuda(const SelectArgs& args, const ChunkSums& sums, const Ctx& ctx) {
  const device::Current current(args.logits.device);
  SLUICE_TRY(current.status().with_context("gate.select"));
  Params p = {};
  p.gate = args.gate;
  p.logits = args.logits.as<const float>();
  p.logits_stride = args.logits.stride[0];
  p.wide_logits = is_wide(args.logits);
  if (args.score_bias.is_present()) {
    p.score_bias = args.score_bias.as<const float>();
    p.wide_bias = is_wide(args.score_bias);
  }
  p.topk_idx = args.topk_idx.view.as<std::int32_t>();
  p.topk_idx_stride = args.topk_idx.view.stride[0];
  p.topk_weight = args.topk_weight.as<float>();
  p.topk_weight_stride = args.topk_weight.stride[0];
  if (args.counters.is_present()) p.counters = args.counters.as<unsigned long long>();
  p.num_tokens = args.logits.shape[0];
  p.num_experts = static_cast<std::int32_t>(args.logits.shape[1]);
  p.top_k = static_cast<std::int32_t>(args.topk_idx.view.shape[1]);
  p.group_size = static_cast<std::int32_t>(p.num_experts / p.gate.n_group);
  if (p.num_tokens == 0) return Status::ok();
  p.sums = sums;
  p.logits_out = args.logits.as<float>();
  const Kernel kernel = sums.data != nullptr ? kernel_for<true>(p.num_experts) : kernel_for<false>(p.num_experts);
  const std::int32_t lanes = p.group_size / kernel.per_lane;
  if (p.gate.n_group > 1 && p.group_size % kernel.per_lane == 0 && (lanes & (lanes - 1)) == 0)
    p.lanes_per_group = lanes;
  if (sums.data == nullptr && p.num_tokens >= kMinTokensForFour && selection::takes_four(p))
    return selection::launch_four(p, stream_of(ctx));
  const int warps = p.num_tokens <= kSpreadTokens ? 1 : kWarps;
  const std::size_t shared_bytes =
      static_cast<std::size_t>(warps) * 2 * kLanes * static_cast<std::size_t>(kernel.per_lane) * sizeof(std::uint32_t);
  return launch_after("gate_select", kernel.function, static_cast<unsigned>(ceil_div(p.num_tokens, warps)),
                      static_cast<unsigned>(warps * kLanes), shared_bytes, stream_of(ctx), p);
}

}  // namespace sluice::gate
