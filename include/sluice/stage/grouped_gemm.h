// Stages 5 and 7: one GEMM per expert over its own rows.
//
//   out[r,n] = round( sum_k A(r,k) * W(e,n,k) + bias[e,n] ),   e = the expert that owns row r
//   A = a (* a_scale[k/128, r]),   W = w (* w_scale[e, scale_row(n), k/128])
//   scale_row(n) = (n / part_rows) * ceil(part_rows/128) + (n % part_rows) / 128
// part_rows is N for one matrix, I for w13 (two stacked matrices whose scale blocks do not mix).
// Scales may also be one a row, A = a * a_scale[0,r], W = w * w_scale[e,n,0]: i8 always has them so, e4m3 where the
// shapes say so. What is scaled on both sides is scaled the same way on both; int8 rows need int8 weights.
//
// CPU bits are defined (docs/numerics.md): for each block of 128 k, ascending: p = 0; p = fma(a, w, p) in ascending
// k; then acc = acc + p, or with scales of blocks acc = fma(p, s, acc), s = a_scale * w_scale (or the one present).
// With scales of rows acc = acc + p, and acc * s at the end; int8 by int8 sums in int32, exactly, and acc = float(sum).
// Then acc + bias, rounded once to out. A row's result depends on no other row and on no thread count.
// Rows no expert owns are neither read nor written. Any N, K >= 1; tails are masked.
#pragma once

#include "sluice/plan.h"

namespace sluice::grouped_gemm {

inline constexpr TensorSpec kA{"a", {DType::kE4M3, DType::kI8, DType::kBF16, DType::kF32}, {Axis::kR, Axis::kK}};
inline constexpr TensorSpec kAScale = TensorSpec{"a_scale", DType::kF32, {Axis::kKb, Axis::kR}}.opt().strided();
inline constexpr TensorSpec kARowScale = TensorSpec{"a_scale", DType::kF32, {Axis::kOne, Axis::kR}}.opt().repeated();
inline constexpr TensorSpec kW{
    "w", {DType::kE4M3, DType::kI8, DType::kBF16, DType::kF32}, {Axis::kL, Axis::kN, Axis::kK}};
inline constexpr TensorSpec kWScale = TensorSpec{"w_scale", DType::kF32, {Axis::kL, Axis::kNb, Axis::kKb}}.opt();
inline constexpr TensorSpec kWRowScale =
    TensorSpec{"w_scale", DType::kF32, {Axis::kL, Axis::kN, Axis::kOne}}.opt().repeated();
inline constexpr TensorSpec kBias = TensorSpec{"bias", DType::kF32, {Axis::kL, Axis::kN}}.opt();
inline constexpr TensorSpec kOut{"out", {DType::kBF16, DType::kF32}, {Axis::kR, Axis::kN}};

// K of an int8 GEMM: (-128)^2 * K must stay below 2^31.
inline constexpr std::int64_t kMaxInt8K = 131071;

struct Args {
  TensorView a;                // [R,K]
  TensorView a_scale;          // [Kb,R] or [1,R] f32, present exactly when a is e4m3 or i8 (then [1,R]); any strides
  RowGroups groups;            // L groups over R rows
  TensorView w;                // [L,N,K]
  TensorView w_scale;          // [L,Nb,Kb] or [L,N,1] f32, present exactly when w is e4m3 or i8 (then [L,N,1])
  TensorView bias;             // [L,N] f32, optional
  std::int64_t part_rows = 0;  // rows of one of the stacked matrices; 0: N
  TensorView out;              // [R,N]
  // The row groups were complete before what runs before this call in the stream began: a GPU kernel may read them, and ask
  // for weights, while that still runs.
  bool groups_settled = false;
};
Status check(const Args& args, Phase phase = Phase::kRun);
// Whether scales are one a row of a and of w; of legal args. Shapes that can be read either way (a K of at most 128 and
// no w_scale to tell) are blocks: the results are the same.
bool has_row_scales(const Args& args);
std::span<const Impl<Args>> impls();

}  // namespace sluice::grouped_gemm
