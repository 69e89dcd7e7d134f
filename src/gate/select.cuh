// Stage 1's selection on a GPU: one token by one warp, experts e = lane * kPerLane + i in registers.
//
// The choice is an integer key that orders like the fp32 value: 0 is below everything and marks padding and what is ruled
// out, 1 an expert that is not finite. A lane sorts its keys once; a round takes the largest head of the warp (redux.sync)
// from the lowest lane that has it. Lanes hold ascending experts, so that is value down, index up on ties, with no
// comparison that a NaN could spoil. Which expert a key belongs to is looked up afterwards, all slots at once.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "cuda/dependent_launch.cuh"
#include "cuda/fast_math.cuh"
#include "gate/cuda.h"

namespace sluice::gate::selection {

using namespace sluice::cuda;  // NOLINT: the device helpers; only the files of the selection include this

constexpr int kLanes = 32;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kLargest = 3.402823466e38f;
constexpr std::uint32_t kRuledOut = 0;
constexpr std::uint32_t kNotFinite = 1;  // loses to every finite key, comes before what is ruled out

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
  std::int32_t lanes_per_group;  // where a group is a power of two of whole lanes; else 0
  bool wide_logits, wide_bias;   // 16-byte loads are legal
  ChunkSums sums;                // with data: where the logits come from
  float* logits_out;             // [T,E], written from the sums
};

// Orders like the float; finite values only. Never 0 or 1: the least finite value gives 0x00800000. -0 ties with 0.
__device__ __forceinline__ std::uint32_t key_of(float v) {
  const std::int32_t bits = __float_as_int(__fadd_rn(v, 0.0f));
  return static_cast<std::uint32_t>(bits ^ ((bits >> 31) | INT32_MIN));
}
__device__ __forceinline__ float value_of(std::uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ bool is_finite(float v) { return v > -__int_as_float(0x7F800000); }  // false for NaN
// +inf is read as the largest finite value.
__device__ __forceinline__ float capped(float v) { return v > kLargest ? kLargest : v; }

// The comparisons of Batcher's odd-even merge sort of N = 2^n values.
template <int N>
struct SortingNetwork {
  struct Pair {
    int low, high;
  };
  Pair pairs[N * N] = {};
  int count = 0;
  constexpr SortingNetwork() {
    for (int p = 1; p < N; p *= 2) {
      for (int k = p; k >= 1; k /= 2) {
        for (int j = k % p; j + k < N; j += 2 * k) {
          for (int i = 0; i < k && i + j + k < N; ++i) {
            if ((i + j) / (2 * p) == (i + j + k) / (2 * p)) pairs[count++] = {i + j, i + j + k};
          }
        }
      }
    }
  }
};

template <int N>
__device__ __forceinline__ void sort_descending(std::uint32_t (&v)[N]) {
  if constexpr (N > 1) {
    static constexpr SortingNetwork<N> kNetwork{};
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      const auto exchange = [&](std::uint32_t& a, std::uint32_t& b) {
        const std::uint32_t larger = max(a, b);
        b = min(a, b);
        a = larger;
      };
      (exchange(v[kNetwork.pairs[I].low], v[kNetwork.pairs[I].high]), ...);
    }
    (std::make_index_sequence<static_cast<std::size_t>(SortingNetwork<N>().count)>());
  }
}

constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

// A lane's kPerLane consecutive values of a row, `count` of them there.
template <int kPerLane>
__device__ __forceinline__ void load_lane(const float* from, int count, bool wide, float (&v)[kPerLane]) {
  if constexpr (kPerLane % 4 == 0) {
    if (wide && count == kPerLane) {
#pragma unroll
      for (int i = 0; i < kPerLane; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        v[i] = four.x;
        v[i + 1] = four.y;
        v[i + 2] = four.z;
        v[i + 3] = four.w;
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) v[i] = i < count ? from[i] : 0.0f;
}

// A lane's logits of a token from the sums of K's chunks, added in the order of gate.logits; 16-byte loads are legal.
template <int kPerLane>
__device__ __forceinline__ void add_chunks(const Params& p, std::int64_t token, int count, float (&v)[kPerLane]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const float* const from = p.sums.data + token * p.sums.token_stride + lane * kPerLane;
  // As many loads in flight as there usually are chunks; one after the other they cost 0.35 us each.
  constexpr int kBatch = kPerLane <= 8 ? 16 : kPerLane <= 16 ? 8 : 4;
  for (int first = 0; first < p.sums.num_chunks; first += kBatch) {
    float next[kBatch][kPerLane];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b < p.sums.num_chunks) load_lane(from + (first + b) * p.sums.chunk_stride, count, true, next[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b >= p.sums.num_chunks) continue;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) v[i] = first + b == 0 ? next[b][i] : __fadd_rn(v[i], next[b][i]);
    }
  }
  if (p.sums.router_bias != nullptr) {
    float bias[kPerLane];
    load_lane(p.sums.router_bias + lane * kPerLane, count, false, bias);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) v[i] = __fadd_rn(v[i], bias[i]);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i < count) p.logits_out[token * p.logits_stride + lane * kPerLane + i] = v[i];
  }
}

// A lane's values in shared memory, 16 bytes at a time.
template <int kPerLane, class T>
__device__ __forceinline__ void store_lane(const T (&v)[kPerLane], T* to) {
  if constexpr (kPerLane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      uint4 four;
      memcpy(&four, &v[i], sizeof(four));
      *reinterpret_cast<uint4*>(to + i) = four;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) to[i] = v[i];
  }
}

template <int kPerLane>
__device__ __forceinline__ void load_keys(const std::uint32_t* from, std::uint32_t (&v)[kPerLane]) {
  if constexpr (kPerLane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kPerLane; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + i);
      memcpy(&v[i], &four, sizeof(four));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) v[i] = from[i];
  }
}

// Softmax in the specified order: the sum has 32 partial sums of every 32nd expert, whatever lane owns them here.
template <int kPerLane>
__device__ __forceinline__ void softmax(const Params& p, const float (&logit)[kPerLane], int count, float* shared,
                                        float (&score)[kPerLane]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  std::uint32_t largest_key = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i < count && is_finite(logit[i])) largest_key = max(largest_key, key_of(logit[i]));
  }
  const float largest = value_of(__reduce_max_sync(kAll, largest_key));
  bool plain = true;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    score[i] = __fsub_rn(logit[i], largest);
    plain = plain && (i >= count || score[i] >= -kFastLimit);  // false for NaN
  }
  plain = __all_sync(kAll, plain);
  if (plain) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] = i < count ? fast_exp(score[i]) : 0.0f;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] = i < count && is_finite(logit[i]) ? spec_exp(score[i]) : 0.0f;
  }
  store_lane(score, shared + lane * kPerLane);
  __syncwarp();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + kLanes * i < p.num_experts) sum = __fadd_rn(sum, shared[lane + kLanes * i]);
  }
  // lane j + lane j+d for j < d; the lanes above hold what nobody reads.
#pragma unroll
  for (int d = kLanes / 2; d >= 1; d /= 2) sum = __fadd_rn(sum, __shfl_down_sync(kAll, sum, d));
  sum = __shfl_sync(kAll, sum, 0);
  if (plain) {
    const float y = __frcp_rn(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] = fast_divide(score[i], sum, y);
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] = __fdiv_rn(score[i], sum);
  }
  __syncwarp();
}

// Scores of a lane's experts; padding gets some finite value.
template <int kPerLane>
__device__ __forceinline__ void score_experts(const Params& p, const float (&logit)[kPerLane], int count, float* shared,
                                              float (&score)[kPerLane]) {
  if (p.gate.score == Score::kSoftmax) {
    softmax(p, logit, count, shared, score);
  } else if (p.gate.score == Score::kSigmoid) {
    bool plain = true;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) plain = plain && fabsf(logit[i]) <= kFastLimit;  // false for NaN
    if (__all_sync(kAll, plain)) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) score[i] = fast_sigmoid(logit[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) score[i] = spec_sigmoid(logit[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      score[i] = p.gate.score == Score::kSqrtSoftplus ? spec_sqrt_softplus(logit[i]) : logit[i];
  }
}

// A group's score as a key from the largest two of its keys; 0: not finite.
__device__ __forceinline__ std::uint32_t group_key_of(const Params& p, std::uint32_t first, std::uint32_t second) {
  if (p.gate.group_score == GroupScore::kMax) return first <= kNotFinite ? 0u : first;
  // With fewer than two finite experts the sum has a -inf in it. A sum that overflows is +-inf.
  const float sum = __fadd_rn(value_of(first), value_of(second));
  return second <= kNotFinite || sum == -__int_as_float(0x7F800000) ? 0u : key_of(sum);
}

// Whether this lane's group is kept, where a group is whole lanes: its two largest keys meet by shuffles.
__device__ __forceinline__ bool keeps_lane(const Params& p, std::uint32_t first, std::uint32_t second) {
  for (int d = 1; d < p.lanes_per_group; d *= 2) {
    const std::uint32_t other_first = __shfl_xor_sync(kAll, first, d);
    const std::uint32_t other_second = __shfl_xor_sync(kAll, second, d);
    second = max(min(first, other_first), max(second, other_second));
    first = max(first, other_first);
  }
  const std::uint32_t mine = group_key_of(p, first, second);
  const int my_group = static_cast<int>(threadIdx.x) % kLanes / p.lanes_per_group;
  int better = 0;  // groups that come before mine
#pragma unroll 8
  for (int g = 0; g < static_cast<int>(p.gate.n_group); ++g) {
    const std::uint32_t other = __shfl_sync(kAll, mine, g * p.lanes_per_group);
    better += other > mine || (other == mine && g < my_group) ? 1 : 0;
  }
  return better < p.gate.topk_group;
}

// Rules out keys of groups of any size. `keys` [E] holds them already; `group_key` [n_group] is scratch.
template <int kPerLane>
__device__ __forceinline__ void rule_out(const Params& p, int count, const std::uint32_t* keys,
                                         std::uint32_t* group_key, std::uint32_t (&key)[kPerLane]) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int num_groups = static_cast<int>(p.gate.n_group);
  for (int g = lane; g < num_groups; g += kLanes) {
    std::uint32_t first = 0;
    std::uint32_t second = 0;
    int at = g % p.group_size;  // every lane starts elsewhere: neighbours would share a bank otherwise
    for (int i = 0; i < p.group_size; ++i) {
      const std::uint32_t k = keys[g * p.group_size + at];
      second = max(second, min(first, k));
      first = max(first, k);
      at = at + 1 == p.group_size ? 0 : at + 1;
    }
    group_key[g] = group_key_of(p, first, second);
  }
  __syncwarp();
  int last_group = -1;
  bool kept = false;
  for (int i = 0; i < count; ++i) {
    const int group = (lane * kPerLane + i) / p.group_size;
    if (group != last_group) {
      last_group = group;
      const std::uint32_t mine = group_key[group];
      int better = 0;
      for (int g = 0; g < num_groups; ++g) {
        better += group_key[g] > mine || (group_key[g] == mine && g < group) ? 1 : 0;
      }
      kept = better < p.gate.topk_group;
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) key[j] = j == i && !kept ? kRuledOut : key[j];
  }
}

// sum over lanes 0..top_k-1 in ascending order, starting from 0.
__device__ __forceinline__ float sum_of_slots(float w, int top_k) {
  float sum = 0.0f;
#pragma unroll 8
  for (int s = 0; s < top_k; ++s) sum = __fadd_rn(sum, __shfl_sync(kAll, w, s));
  return sum;
}

// The weight of this lane's slot; must be called by the whole warp.
__device__ __forceinline__ float weight_of_slot(const Params& p, float logit, float score, bool finite) {
  float w = 0.0f;
  if (p.gate.weight_rule == WeightRule::kScore) w = score;
  if (p.gate.weight_rule == WeightRule::kSigmoidOfLogit) w = spec_sigmoid(logit);
  if (p.gate.weight_rule == WeightRule::kSoftmaxOfChosen) {
    const float largest = value_of(__reduce_max_sync(kAll, finite ? key_of(logit) : 0u));
    w = finite ? spec_exp(__fsub_rn(logit, largest)) : 0.0f;
    w = __fdiv_rn(w, sum_of_slots(w, p.top_k));
  }
  if (!finite) w = 0.0f;
  const bool either = p.gate.scale_rule == ScaleRule::kUnlessRenorm;
  const bool renormalise = p.gate.renorm != Renorm::kNone && !(either && p.top_k == 1);
  if (renormalise) {
    const float sum = sum_of_slots(w, p.top_k);
    w = __fdiv_rn(w, p.gate.renorm == Renorm::kSum ? __fadd_rn(sum, 1e-20f) : fmaxf(sum, 1e-12f));
  }
  if (!(either && renormalise)) w = __fmul_rn(w, p.gate.routed_scaling_factor);
  return finite ? w : 0.0f;
}

// Scratch of a warp.
template <int kPerLane>
struct WarpStorage {
  alignas(16) std::uint32_t keys[kLanes * kPerLane];
  alignas(16) float scores[kLanes * kPerLane];
};

// The whole of a token's selection; the whole warp calls.
// kFromSums: the logits are still the sums of chunks.
template <int kPerLane, bool kFromSums = false>
__device__ __forceinline__ void select_token(const Params& p, std::int64_t token, WarpStorage<kPerLane>& storage) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  std::uint32_t* const keys = storage.keys;
  float* const scores = storage.scores;
  const int left = p.num_experts - lane * kPerLane;
  const int count = left < 0 ? 0 : left < kPerLane ? left : kPerLane;
  float logit[kPerLane];
  float score[kPerLane];
  std::uint32_t key[kPerLane];
  const float* const logits = p.logits + token * p.logits_stride;
  if constexpr (kFromSums) {
    add_chunks(p, token, count, logit);
  } else {
    load_lane(logits + lane * kPerLane, count, p.wide_logits, logit);
  }
  float choice[kPerLane];
  if (p.score_bias != nullptr) load_lane(p.score_bias + lane * kPerLane, count, p.wide_bias, choice);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) logit[i] = capped(logit[i]);
  score_experts(p, logit, count, scores, score);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    choice[i] = capped(p.score_bias != nullptr ? __fadd_rn(score[i], choice[i]) : score[i]);
    key[i] = is_finite(logit[i]) && is_finite(choice[i]) ? key_of(choice[i]) : kNotFinite;
  }
  if (count < kPerLane) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) key[i] = i < count ? key[i] : kRuledOut;
  }
  store_lane(key, keys + lane * kPerLane);
  __syncwarp();
  if (p.gate.n_group > 1 && p.lanes_per_group == 0) {
    rule_out(p, count, keys, reinterpret_cast<std::uint32_t*>(scores), key);
    __syncwarp();
    store_lane(key, keys + lane * kPerLane);
  }
  store_lane(score, scores + lane * kPerLane);

  // Sorted, padded to a power of two by keys that the compiler sorts itself.
  constexpr int kSorted = power_of_two_from(kPerLane);
  std::uint32_t sorted[kSorted];
#pragma unroll
  for (int i = 0; i < kSorted; ++i) sorted[i] = i < kPerLane ? key[i < kPerLane ? i : 0] : kRuledOut;
  sort_descending(sorted);
  if (p.lanes_per_group > 0) {
    std::uint32_t second = 0;
    if constexpr (kPerLane > 1) second = sorted[1];
    if (!keeps_lane(p, sorted[0], second)) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sorted[i] = kRuledOut;
    }
  }

  // Slot s belongs to lane s from here on.
  std::uint32_t my_key = kRuledOut;
  int owner = 0;
#pragma unroll 4
  for (int s = 0; s < p.top_k; ++s) {
    const std::uint32_t top = __reduce_max_sync(kAll, sorted[0]);
    const int from = __ffs(static_cast<int>(__ballot_sync(kAll, sorted[0] == top))) - 1;
    if (lane == from) {
#pragma unroll
      for (int i = 0; i + 1 < kPerLane; ++i) sorted[i] = sorted[i + 1];
      sorted[kPerLane - 1] = kRuledOut;
    }
    if (lane == s) {
      my_key = top;
      owner = from;
    }
    // Nobody goes into the next reduction while the lane that took is still shifting: without this a variant of the loop
    // was compiled so that it went round alone and two lanes won the same slot.
    __syncwarp();
  }
  __syncwarp();
  // Equal keys of one lane were taken one after the other: mine is the n-th of them.
  const bool has_slot = lane < p.top_k;
  const std::uint64_t mark = has_slot ? static_cast<std::uint64_t>(my_key) << 32 | static_cast<unsigned>(owner) : ~0ull;
  const int n = __popc(__match_any_sync(kAll, mark) & ((1u << lane) - 1u));
  int expert = 0;
  int seen = 0;
  load_keys(keys + owner * kPerLane, key);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (key[i] == my_key) {
      if (seen == n) expert = owner * kPerLane + i;
      ++seen;
    }
  }
  const bool finite = has_slot && my_key > kNotFinite;
  const float my_logit = has_slot && p.gate.weight_rule != WeightRule::kScore ? capped(logits[expert]) : 0.0f;
  const float w = weight_of_slot(p, my_logit, has_slot ? scores[expert] : 0.0f, finite);
  if (has_slot) {
    p.topk_idx[token * p.topk_idx_stride + lane] = expert;
    p.topk_weight[token * p.topk_weight_stride + lane] = w;
  }
  const bool short_of_finite = __any_sync(kAll, has_slot && !finite);
  if (lane == 0 && short_of_finite && p.counters != nullptr) {
    atomicAdd(p.counters + static_cast<int>(Counter::kNonFiniteTokens), 1ull);
  }
}

// Whether launch_four runs this call.
bool takes_four(const Params& p);
Status launch_four(const Params& p, cudaStream_t stream);

}  // namespace sluice::gate::selection
