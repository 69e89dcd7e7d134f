// Stage 1's selection on a GPU for many tokens: four to a warp, eight lanes each, for the gates that most models have
// (sigmoid scores, at most eight slots, groups of one lane or none).
//
// With a warp a token every step that crosses lanes (a reduction, a vote, a shuffle a round) serves one token; here it
// serves four, and a group of DeepSeek-V3 is one lane, so that its two largest need no crossing at all. First the warp
// computes one token after the other, coalesced, and leaves choices in shared memory; then lane g of a token's eight takes
// experts [g * kPerLane, (g + 1) * kPerLane) and sorts the eight largest.
//
// Choices are compared as floats: this path is taken only where all of them are finite, and none is -0 (no sigmoid is, so
// neither is its sum with a bias). Any other token goes the way of select.cuh.
#include <cfloat>

#include "gate/select.cuh"

namespace sluice::gate {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

using namespace selection;  // NOLINT: the kernel's parts, in this file alone

constexpr int kTokens = 4;               // of a warp
constexpr int kTeam = kLanes / kTokens;  // lanes of a token
constexpr int kKept = 8;                 // the most slots there are
constexpr int kBlockThreads = 128;
constexpr float kNever = -__builtin_huge_valf();  // below every choice

__device__ __forceinline__ void exchange(float& a, float& b) {
  const float larger = fmaxf(a, b);
  b = fminf(a, b);
  a = larger;
}

__device__ __forceinline__ void sort_eight(float (&v)[kKept]) {
  static constexpr SortingNetwork<kKept> kNetwork{};
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (exchange(v[kNetwork.pairs[I].low], v[kNetwork.pairs[I].high]), ...);
  }
  (std::make_index_sequence<static_cast<std::size_t>(SortingNetwork<kKept>().count)>());
}

// best = the eight largest of two descending lists, descending: one half of a bitonic merge.
__device__ __forceinline__ void merge_eight(float (&best)[kKept], const float (&other)[kKept]) {
#pragma unroll
  for (int i = 0; i < kKept; ++i) best[i] = fmaxf(best[i], other[kKept - 1 - i]);
#pragma unroll
  for (int d = kKept / 2; d >= 1; d /= 2) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if ((i & d) == 0) exchange(best[i], best[i + d]);
    }
  }
}

template <int kPerLane>
struct FourStorage {
  static constexpr int kPerLaneOfOne = kPerLane == 20 ? 8 : kPerLane / 4;
  union {
    alignas(16) float choice[kTokens][kTeam * kPerLane];
    WarpStorage<kPerLaneOfOne> one;
  };
};

// kPerLane: experts of a lane, E / 8; a multiple of four.
template <int kPerLane>
__global__ void __launch_bounds__(kBlockThreads) select_four(const __grid_constant__ Params p) {
  constexpr int kExperts = kTeam * kPerLane;
  constexpr int kChunks = kExperts / 4;  // 16 bytes each
  constexpr int kRounds = (kChunks + kLanes - 1) / kLanes;
  constexpr int kLaneChunks = kPerLane / 4;
  __shared__ FourStorage<kPerLane> g_storage[kBlockThreads / kLanes];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  FourStorage<kPerLane>& storage = g_storage[threadIdx.x / kLanes];
  wait_for_previous();
  allow_next();
  const std::int64_t first_token =
      (static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x) / kLanes * kTokens;
  if (first_token >= p.num_tokens) return;

  // ---- scores and choices, the whole warp on one token ----
  float4 logits[kTokens][kRounds];
  float4 bias[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int chunk = lane + kLanes * r;
    const bool there = kChunks % kLanes == 0 || chunk < kChunks;
    bias[r] =
        p.score_bias != nullptr && there ? __ldg(reinterpret_cast<const float4*>(p.score_bias) + chunk) : float4{};
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const std::int64_t token = min(first_token + t, p.num_tokens - 1);
      logits[t][r] = there ? *(reinterpret_cast<const float4*>(p.logits + token * p.logits_stride) + chunk) : float4{};
    }
  }
  // Sums of squares find every value that wants care, in a pipe that has time: infinities and NaN stay in them.
  float size = 0.0f;
  float bias_size = 0.0f;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const float b[4] = {bias[r].x, bias[r].y, bias[r].z, bias[r].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) bias_size = __fmaf_rn(b[i], b[i], bias_size);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float x[4] = {logits[t][r].x, logits[t][r].y, logits[t][r].z, logits[t][r].w};
      float of_token = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) of_token = __fmaf_rn(x[i], x[i], of_token);
      size = fmaxf(size, of_token == of_token ? of_token : INFINITY);
    }
  }
  if (!__all_sync(kAll, size < INFINITY && bias_size <= 1e30f)) {
#pragma unroll 1
    for (std::int64_t token = first_token; token < min(first_token + kTokens, p.num_tokens); ++token) {
      select_token(p, token, storage.one);
      __syncwarp();
    }
    return;
  }
  const bool plain = __all_sync(kAll, size <= kFastLimit * kFastLimit);
  const auto choices = [&](const auto& sigmoid) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const int chunk = lane + kLanes * r;
        float4 c = logits[t][r];
        c.x = __fadd_rn(sigmoid(c.x), bias[r].x);
        c.y = __fadd_rn(sigmoid(c.y), bias[r].y);
        c.z = __fadd_rn(sigmoid(c.z), bias[r].z);
        c.w = __fadd_rn(sigmoid(c.w), bias[r].w);
        if (kChunks % kLanes == 0 || chunk < kChunks) *reinterpret_cast<float4*>(&storage.choice[t][chunk * 4]) = c;
      }
    }
  };
  if (plain) {
    choices([](float x) { return fast_sigmoid(x); });
  } else {
    choices([](float x) { return any_sigmoid(x); });
  }
  __syncwarp();

  // ---- eight lanes a token ----
  const int t = lane / kTeam;
  const int g = lane % kTeam;
  const auto* const chunks = reinterpret_cast<const float4*>(storage.choice[t]);
  // Every lane starts at another chunk, so that eight lanes' 16 bytes lie in different banks.
  const int rotation = kLaneChunks % 2 != 0 ? 0 : kLaneChunks < kTeam ? g * kLaneChunks / kTeam : g;
  const auto rotated = [&](int j) {
    const int at = j + rotation % kLaneChunks;
    return at < kLaneChunks ? at : at - kLaneChunks;
  };
  float best[kKept];
#pragma unroll
  for (int j = 0; j < kLaneChunks; j += 2) {
    const float4 a = chunks[g * kLaneChunks + rotated(j)];
    const float4 b = j + 1 < kLaneChunks ? chunks[g * kLaneChunks + rotated(j + 1 < kLaneChunks ? j + 1 : j)]
                                         : make_float4(kNever, kNever, kNever, kNever);
    float next[kKept] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    sort_eight(next);
    if (j == 0) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) best[i] = next[i];
    } else {
      merge_eight(best, next);
    }
  }
  const unsigned team = 0xFFu << (t * kTeam);
  if (p.gate.n_group > 1) {
    const float mine = p.gate.group_score == GroupScore::kMax ? best[0] : __fadd_rn(best[0], best[1]);
    int better = 0;  // groups that come before mine
#pragma unroll
    for (int d = 1; d < kTeam; ++d) {
      const float other = __shfl_xor_sync(kAll, mine, d);
      better += other > mine || (other == mine && (g ^ d) < g) ? 1 : 0;
    }
    if (better >= p.gate.topk_group) best[0] = kNever;  // and so never takes part in a round
  }
  // Slot s belongs to lane s of the token from here on.
  float my_choice = 0.0f;
  unsigned my_owners = 1u;
  const unsigned below = team & ((1u << lane) - 1u);
#pragma unroll
  for (int s = 0; s < kKept; ++s) {
    if (s >= p.top_k) break;
    float top = best[0];
#pragma unroll
    for (int d = 1; d < kTeam; d *= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, d));
    const unsigned owners = __ballot_sync(kAll, best[0] == top);
    if (g == s) {
      my_choice = top;
      my_owners = owners & team;
    }
    if (best[0] == top && (owners & below) == 0) {
#pragma unroll
      for (int i = 0; i + 1 < kKept - s; ++i) best[i] = best[i + 1];
      // The last one left can be taken only once.
      if (s + 1 < kKept) best[kKept - 1 - s] = kNever;
    }
    __syncwarp();
  }
  const bool has_slot = g < p.top_k;
  const int owner = (__ffs(static_cast<int>(my_owners)) - 1) % kTeam;
  // Equal choices of one lane were taken one after the other: mine is the n-th of them.
  int n = 0;
  {
    const float before = __shfl_up_sync(kAll, my_choice, 1, kTeam);
    const int owner_before = __shfl_up_sync(kAll, owner, 1, kTeam);
    if (__any_sync(kAll, has_slot && g > 0 && before == my_choice && owner_before == owner)) {
#pragma unroll 1
      for (int d = 1; d < kTeam; ++d) {
        const float other = __shfl_up_sync(kAll, my_choice, d, kTeam);
        const int other_owner = __shfl_up_sync(kAll, owner, d, kTeam);
        if (g >= d && other == my_choice && other_owner == owner) ++n;
      }
    }
  }
  int expert = kExperts;
  if (__all_sync(kAll, n == 0)) {
#pragma unroll
    for (int j = 0; j < kLaneChunks; ++j) {
      const int chunk = owner * kLaneChunks + rotated(j);
      const float4 c = chunks[chunk];
      int found = kExperts;
      if (c.w == my_choice) found = 3;
      if (c.z == my_choice) found = 2;
      if (c.y == my_choice) found = 1;
      if (c.x == my_choice) found = 0;
      expert = min(expert, chunk * 4 + found);
    }
  } else {
    int seen = 0;
#pragma unroll 1
    for (int i = 0; i < kPerLane; ++i) {
      if (storage.choice[t][owner * kPerLane + i] == my_choice && seen++ == n) expert = owner * kPerLane + i;
    }
  }
  const std::int64_t token = first_token + t;
  const bool writes = has_slot && token < p.num_tokens;
  // The score again from its logit; nobody kept it.
  float w = 0.0f;
  if (writes) w = any_sigmoid(p.logits[token * p.logits_stride + expert]);
  const bool either = p.gate.scale_rule == ScaleRule::kUnlessRenorm;
  const bool renormalise = p.gate.renorm != Renorm::kNone && !(either && p.top_k == 1);
  if (renormalise) {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kKept; ++s) {
      const float of_slot = __shfl_sync(kAll, w, s, kTeam);
      if (s < p.top_k) sum = __fadd_rn(sum, of_slot);
    }
    w = __fdiv_rn(w, p.gate.renorm == Renorm::kSum ? __fadd_rn(sum, 1e-20f) : fmaxf(sum, 1e-12f));
  }
  if (!(either && renormalise)) w = __fmul_rn(w, p.gate.routed_scaling_factor);
  if (writes) {
    p.topk_idx[token * p.topk_idx_stride + g] = expert;
    p.topk_weight[token * p.topk_weight_stride + g] = w;
  }
}

using Kernel = void (*)(Params);
Kernel kernel_for(std::int64_t num_experts) {
  if (num_experts == 128) return select_four<16>;
  if (num_experts == 160) return select_four<20>;
  if (num_experts == 256) return select_four<32>;
  if (num_experts == 384) return select_four<48>;
  return nullptr;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

namespace selection {

bool takes_four(const Params& p) {
  const bool groups = p.gate.n_group <= 1 || p.gate.n_group == kTeam;
  const bool wide = p.wide_logits && (p.score_bias == nullptr || p.wide_bias);
  return p.gate.score == Score::kSigmoid && p.gate.weight_rule == WeightRule::kScore && groups && wide &&
         p.top_k <= kKept && kernel_for(p.num_experts) != nullptr;
}

Status launch_four(const Params& p, cudaStream_t stream) {
  const std::int64_t warps = ceil_div(p.num_tokens, kTokens);
  return launch_after("gate_select", kernel_for(p.num_experts),
                      static_cast<unsigned>(ceil_div(warps, kBlockThreads / kLanes)), kBlockThreads, 0, stream, p);
}

}  // namespace selection
}  // namespace sluice::gate
