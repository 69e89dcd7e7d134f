// Stages 5 and 7: one GEMM per expert over its own rows.
//
//   out[r,n] = round( sum_k A(r,k) * W(e,n,k) + bias[e,n] ),   e = the expert that owns row r
//   A = a (* a_scale[k/128, r]),   W = w (* w_scale[e, scale_row(n), k/128])
//   scale_row(n) = (n / part_rows) * ceil(part_rows/128) + (n % part_rows) / 128
// part_rows is N for one matrix, I for w13 (two stacked matrices whose scale blocks do not mix).
//
// CPU bits are defined (docs/numerics.md): for each block of 128 k, ascending: p = 0; p = fma(a, w, p) in ascending
// k; then acc = acc + p, or with scales acc = fma(p, s, acc), s = a_scale * w_scale (or the one present).
// Then acc + bias, rounded once to out. A row's result depends on no other row and on no thread count.
// Rows no expert owns are neither read nor written. Any N, K >= 1; tails are masked.
#pragma once

#include "sluice/plan.h"

namespace sluice::grouped_gemm {

inline constexpr TensorSpec kA{"a", {DType::kE4M3, DType::kBF16, DType::kF32}, {Axis::kR, Axis::kK}};
inline constexpr TensorSpec kAScale = TensorSpec{"a_scale", DType::kF32, {Axis::kKb, Axis::kR}}.opt().strided();
inline constexpr TensorSpec kW{"w", {DType::kE4M3, DType::kBF16, DType::kF32}, {Axis::kL, Axis::kN, Axis::kK}};
inline constexpr TensorSpec kWScale = TensorSpec{"w_scale", DType::kF32, {Axis::kL, Axis::kNb, Axis::kKb}}.opt();
inline constexpr TensorSpec kBias = TensorSpec{"bias", DType::kF32, {Axis::kL, Axis::kN}}.opt();
inline constexpr TensorSpec kOut{"out", {DType::kBF16, DType::kF32}, {Axis::kR, Axis::kN}};

struct Args {
  TensorView a;                // [R,K]
  TensorView a_scale;          // [Kb,R] f32, present exactly when a is e4m3; either stride order
  RowGroups groups;            // L groups over R rows
  TensorView w;                // [L,N,K]
  TensorView w_scale;          // [L,Nb,Kb] f32, present exactly when w is e4m3
  TensorView bias;             // [L,N] f32, optional
  std::int64_t part_rows = 0;  // rows of one of the stacked matrices; 0: N
  TensorView out;              // [R,N]
};
Status check(const Args& args, Phase phase = Phase::kRun);
std::span<const Impl<Args>> impls();

}  // namespace sluice::grouped_gemm
