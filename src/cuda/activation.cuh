// The activations of include/sluice/config.h as specified operations: v = canonical(gate_factor(g) * up_factor(u)).
#pragma once

#include "cuda/fast_math.cuh"
#include "sluice/config.h"

namespace sluice::cuda {

__device__ __forceinline__ float gate_factor(const Activation& activation, float g) {
  if (activation.kind != ActivationKind::kSilu && g > activation.limit) g = activation.limit;
  if (activation.kind == ActivationKind::kGptOss) return __fmul_rn(g, spec_sigmoid(__fmul_rn(activation.alpha, g)));
  return spec_silu(g);
}

__device__ __forceinline__ float up_factor(const Activation& activation, float u) {
  if (activation.kind == ActivationKind::kSilu) return u;
  if (u > activation.limit) u = activation.limit;
  if (u < -activation.limit) u = -activation.limit;
  return activation.kind == ActivationKind::kGptOss ? __fadd_rn(u, 1.0f) : u;
}

// Whether gates up to this magnitude may take the fast sigmoid; false for NaN.
__device__ __forceinline__ bool gates_are_tame(const Activation& activation, float amax) {
  const float steepness = activation.kind == ActivationKind::kGptOss ? fabsf(activation.alpha) : 1.0f;
  return __fmul_rn(amax, steepness) <= kFastLimit;
}
// gate_factor of a tame gate: the same bits.
__device__ __forceinline__ float fast_gate_factor(const Activation& activation, float g) {
  if (activation.kind != ActivationKind::kSilu && g > activation.limit) g = activation.limit;
  const float x = activation.kind == ActivationKind::kGptOss ? __fmul_rn(activation.alpha, g) : g;
  return __fmul_rn(g, fast_sigmoid(x));
}

// gate_factor of any gate, without a branch: the same bits.
__device__ __forceinline__ float any_gate_factor(const Activation& activation, float g) {
  if (activation.kind != ActivationKind::kSilu && g > activation.limit) g = activation.limit;
  const float x = activation.kind == ActivationKind::kGptOss ? __fmul_rn(activation.alpha, g) : g;
  return __fmul_rn(g, any_sigmoid(x));
}

}  // namespace sluice::cuda
