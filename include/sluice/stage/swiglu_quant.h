// Stage 6: the activation, and the quantisation the down GEMM reads.
//
//   g = h[r,i], u = h[r,I+i] in fp32
//   v = activation(g, u)          (sluice/config.h; silu(g) = g * sigmoid(g) in specified fp32)
//   a bf16 / f32: a[r,i] = v, rounded once
//   a e4m3:       a_scale[b,r] = max(amax, 1e-10) / 448, amax over the finite |v| of columns [128b, 128b+128)
//                 rounded up to a power of two first with scale_format kUe8m0 (sluice/config.h)
//                 a[r,i] = e4m3(v / a_scale)          fp32 division, round to nearest even, saturating;
//                 +-Inf becomes +-448, NaN stays NaN and alone
//                 With a_scale [1,R] the group is the whole row.
//   a i8:         a_scale[0,r] = max(amax, 1e-10) / 127, amax over the finite |v| of the row
//                 a[r,i] = clamp(rint(v / a_scale), -127, 127)    fp32 division, ties to even;
//                 +-Inf becomes +-127, NaN becomes 0 and is counted nowhere
// The limit clamps g from above only and u on both sides, before the activation and before the quantisation; NaN
// passes. Bits are defined: every implementation gives the same. Rows no group owns are neither read nor written.
#pragma once

#include "sluice/config.h"
#include "sluice/plan.h"

namespace sluice::swiglu_quant {

inline constexpr TensorSpec kH{"h", {DType::kBF16, DType::kF32}, {Axis::kR, Axis::kI2}};
inline constexpr TensorSpec kA{"a", {DType::kE4M3, DType::kI8, DType::kBF16, DType::kF32}, {Axis::kR, Axis::kI}};
inline constexpr TensorSpec kAScale = TensorSpec{"a_scale", DType::kF32, {Axis::kIb, Axis::kR}}.opt().strided();
inline constexpr TensorSpec kARowScale = TensorSpec{"a_scale", DType::kF32, {Axis::kOne, Axis::kR}}.opt().strided();

struct Args {
  TensorView h;      // [R,2I]; gate half first
  RowGroups groups;  // which rows are valid
  Activation activation;
  TensorView a;        // [R,I] out
  TensorView a_scale;  // [Ib,R] or [1,R] f32 out, present exactly when a is e4m3 or i8 (then [1,R])
  ScaleFormat scale_format = ScaleFormat::kF32;
};
Status check(const Args& args, Phase phase = Phase::kRun);
std::span<const Impl<Args>> impls();

}  // namespace sluice::swiglu_quant
