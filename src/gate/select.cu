// Stage 1's selection on a GPU: one warp per token up to E = 1024, experts e = lane + 32*i in registers.
//
// The choice is an integer key that orders like the fp32 value; 0 is below every finite value and marks an expert that
// is not finite, ruled out or taken. A round takes the largest key of the warp (redux.sync) and, among the lanes that
// hold it, the lowest index: value down, index up on ties, with no comparison that a NaN could spoil.
#include <cstdint>

#include "cuda/launch.h"
#include "cuda/spec_math.cuh"
#include "gate/cuda.h"

namespace sluice::gate {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

using namespace sluice::cuda;  // NOLINT: the device helpers, in this file alone

constexpr int kWarps = 4;
constexpr int kLanes = 32;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kLargest = 3.402823466e38f;

struct Params {
  GateConfig gate;
  const float* logits;  // [T,E]
  std::int64_t logits_stride;
  const float* score_bias;  // [E]
  std::int32_t* topk_idx;   // [T,S]
  std::int64_t topk_idx_stride;
  float* topk_weight;  // [T,S]
  std::int64_t topk_weight_stride;
  unsigned long long* counters;
  std::int64_t num_tokens;
  std::int32_t num_experts, top_k, group_size;
};

// Orders like the float; finite values only. Never 0: the least finite value gives 0x00800000. -0 ties with 0.
__device__ __forceinline__ std::uint32_t key_of(float v) {
  const std::uint32_t bits = __float_as_uint(__fadd_rn(v, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(std::uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ bool is_finite(float v) { return v == v && v != -__int_as_float(0x7F800000); }
// +inf is read as the largest finite value.
__device__ __forceinline__ float capped(float v) { return v > kLargest ? kLargest : v; }

__device__ __forceinline__ float score_of(Score score, float logit) {
  switch (score) {
    case Score::kSigmoid: return spec_sigmoid(logit);
    case Score::kSqrtSoftplus: return spec_sqrt_softplus(logit);
    default: return logit;
  }
}

// The largest finite of v over the warp; any value when there is none.
__device__ __forceinline__ float warp_largest(std::uint32_t key) { return value_of(__reduce_max_sync(kAll, key)); }

// For each group its score as a key (0: not finite), in shared memory. A lane takes whole groups.
__device__ __forceinline__ void score_groups(const Params& p, const std::uint32_t* choice, std::uint32_t* group_key) {
  for (int g = static_cast<int>(threadIdx.x) % kLanes; g < p.gate.n_group; g += kLanes) {
    std::uint32_t first = 0;
    std::uint32_t second = 0;
    for (int i = 0; i < p.group_size; ++i) {
      const std::uint32_t k = choice[g * p.group_size + i];
      second = max(second, min(first, k));
      first = max(first, k);
    }
    std::uint32_t key = first;
    if (p.gate.group_score == GroupScore::kTop2Sum) {
      // With fewer than two finite experts the sum has a -inf in it. A sum that overflows is +-inf.
      const float sum = __fadd_rn(value_of(first), value_of(second));
      key = second == 0 || sum == -__int_as_float(0x7F800000) ? 0 : key_of(sum);
    }
    group_key[g] = key;
  }
  __syncwarp();
}

template <int kPerLane>
__global__ void __launch_bounds__(kWarps* kLanes) select_experts(const __grid_constant__ Params p) {
  extern __shared__ std::uint32_t g_shared[];  // [kWarps][E choices, n_group keys], only with groups
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (token >= p.num_tokens) return;

  float logit[kPerLane];
  float score[kPerLane];
  std::uint32_t key[kPerLane];
  const float* const logits = p.logits + token * p.logits_stride;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + kLanes * i;
    logit[i] = e < p.num_experts ? capped(__ldg(logits + e)) : -__int_as_float(0x7F800000);
  }
  if (p.gate.score == Score::kSoftmax) {
    std::uint32_t largest_key = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) largest_key = max(largest_key, is_finite(logit[i]) ? key_of(logit[i]) : 0u);
    const float largest = warp_largest(largest_key);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score[i] = is_finite(logit[i]) ? spec_exp(__fsub_rn(logit[i], largest)) : 0.0f;
      sum = __fadd_rn(sum, score[i]);
    }
    // lane j + lane j+d for j < d; the lanes above hold what nobody reads.
#pragma unroll
    for (int d = kLanes / 2; d >= 1; d /= 2) sum = __fadd_rn(sum, __shfl_down_sync(kAll, sum, d));
    sum = __shfl_sync(kAll, sum, 0);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] = __fdiv_rn(score[i], sum);
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] = score_of(p.gate.score, logit[i]);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + kLanes * i;
    const float bias = p.score_bias != nullptr && e < p.num_experts ? __ldg(p.score_bias + e) : 0.0f;
    const float choice = capped(p.score_bias != nullptr ? __fadd_rn(score[i], bias) : score[i]);
    key[i] = e < p.num_experts && is_finite(logit[i]) && is_finite(choice) ? key_of(choice) : 0u;
  }

  // Bit i of `kept`: the group of this lane's expert i is kept; ruled-out experts are out by this flag.
  std::uint32_t kept = kAll;
  if (p.gate.n_group > 1) {
    std::uint32_t* const choice = g_shared + warp * (p.num_experts + static_cast<int>(p.gate.n_group));
    std::uint32_t* const group_key = choice + p.num_experts;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + kLanes * i < p.num_experts) choice[lane + kLanes * i] = key[i];
    }
    __syncwarp();
    score_groups(p, choice, group_key);
    kept = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int e = lane + kLanes * i;
      if (e >= p.num_experts) continue;
      const int mine = e / p.group_size;
      int better = 0;  // groups that come before mine
      for (int g = 0; g < p.gate.n_group; ++g) {
        better += group_key[g] > group_key[mine] || (group_key[g] == group_key[mine] && g < mine) ? 1 : 0;
      }
      if (better < p.gate.topk_group) kept |= 1u << i;
    }
  }

  // Slot s belongs to lane s from here on.
  std::int32_t my_expert = 0;
  float my_logit = 0.0f;
  float my_score = 0.0f;
  bool my_finite = false;
  std::uint32_t taken = 0;
  for (int s = 0; s < p.top_k; ++s) {
    std::uint32_t best = 0;
    int best_expert = 1 << 30;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; --i) {
      const bool free = ((kept >> i) & 1u) && !((taken >> i) & 1u) && lane + kLanes * i < p.num_experts;
      if (free && key[i] >= best) {
        best = key[i];
        best_expert = lane + kLanes * i;
      }
    }
    const std::uint32_t top = __reduce_max_sync(kAll, best);
    const int expert = __reduce_min_sync(kAll, best == top ? best_expert : 1 << 30);
    const int from = expert % kLanes;
    const int i_taken = expert / kLanes;
    float chosen_logit = 0.0f;
    float chosen_score = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i == i_taken) {
        chosen_logit = logit[i];
        chosen_score = score[i];
      }
    }
    if (lane == from) taken |= 1u << i_taken;
    chosen_logit = __shfl_sync(kAll, chosen_logit, from);
    chosen_score = __shfl_sync(kAll, chosen_score, from);
    if (lane == s) {
      my_expert = expert;
      my_logit = chosen_logit;
      my_score = chosen_score;
      my_finite = top != 0;
    }
  }

  float w = 0.0f;
  if (p.gate.weight_rule == WeightRule::kScore) w = my_score;
  if (p.gate.weight_rule == WeightRule::kSigmoidOfLogit) w = spec_sigmoid(my_logit);
  if (p.gate.weight_rule == WeightRule::kSoftmaxOfChosen) {
    const float largest = warp_largest(my_finite ? key_of(my_logit) : 0u);
    w = my_finite ? spec_exp(__fsub_rn(my_logit, largest)) : 0.0f;
    float sum = 0.0f;
    for (int s = 0; s < p.top_k; ++s) sum = __fadd_rn(sum, __shfl_sync(kAll, w, s));
    w = __fdiv_rn(w, sum);
  }
  if (!my_finite) w = 0.0f;
  const bool either = p.gate.scale_rule == ScaleRule::kUnlessRenorm;
  const bool renormalise = p.gate.renorm != Renorm::kNone && !(either && p.top_k == 1);
  if (renormalise) {
    float sum = 0.0f;
    for (int s = 0; s < p.top_k; ++s) sum = __fadd_rn(sum, __shfl_sync(kAll, w, s));
    w = __fdiv_rn(w, p.gate.renorm == Renorm::kSum ? __fadd_rn(sum, 1e-20f) : fmaxf(sum, 1e-12f));
  }
  if (!(either && renormalise)) w = __fmul_rn(w, p.gate.routed_scaling_factor);
  if (lane < p.top_k) {
    p.topk_idx[token * p.topk_idx_stride + lane] = my_expert;
    p.topk_weight[token * p.topk_weight_stride + lane] = my_finite ? w : 0.0f;
  }
  const bool short_of_finite = __any_sync(kAll, lane < p.top_k && !my_finite);
  if (lane == 0 && short_of_finite && p.counters != nullptr) {
    atomicAdd(p.counters + static_cast<int>(Counter::kNonFiniteTokens), 1ull);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

void (*kernel_for(std::int64_t num_experts))(Params) {
  const std::int64_t per_lane = ceil_div(num_experts, kLanes);
  if (per_lane <= 1) return select_experts<1>;
  if (per_lane <= 2) return select_experts<2>;
  if (per_lane <= 4) return select_experts<4>;
  if (per_lane <= 8) return select_experts<8>;
  if (per_lane <= 12) return select_experts<12>;
  if (per_lane <= 16) return select_experts<16>;
  return select_experts<32>;
}

}  // namespace

Status select_cuda(const SelectArgs& args, const Ctx& ctx) {
  const DeviceGuard guard(args.logits.device.index);
  SLUICE_TRY(to_status(guard.error(), "gate.select: set device"));
  Params p = {};
  p.gate = args.gate;
  p.logits = args.logits.as<const float>();
  p.logits_stride = args.logits.stride[0];
  if (args.score_bias.is_present()) p.score_bias = args.score_bias.as<const float>();
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
  const std::size_t shared_bytes =
      p.gate.n_group > 1 ? kWarps * static_cast<std::size_t>(p.num_experts + p.gate.n_group) * sizeof(std::uint32_t)
                         : 0;
  return launch("gate_select", kernel_for(p.num_experts), static_cast<unsigned>(ceil_div(p.num_tokens, kWarps)),
                kWarps * kLanes, shared_bytes, stream_of(ctx), p);
}

}  // namespace sluice::gate
