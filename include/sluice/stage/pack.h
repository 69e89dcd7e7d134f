// Stage 3: rows of x in expert order, in the dtype the up GEMM reads.
//
//   v = x[row_token[r], :]                       (* weight[row_slot[r]] in fp32, when `weight` is present: Llama 4)
//   rows bf16 / f32: rows[r,:] = v, rounded once
//   rows e4m3:       rows_scale[b,r] = max(amax, 1e-10) / 448,  amax over the finite |v| of columns [128b, 128b+128)
//                    rounded up to a power of two first with scale_format kUe8m0 (sluice/config.h)
//                    rows[r,h] = e4m3(v[h] / rows_scale[b,r])    fp32 division, round to nearest even, saturating;
//                    +-Inf becomes +-448, NaN stays NaN (0x7F, sign kept) and alone
//                    With rows_scale [1,R] the group is the whole row.
//   rows i8:         rows_scale[0,r] = max(amax, 1e-10) / 127,  amax over the finite |v| of the row
//                    rows[r,h] = clamp(rint(v[h] / rows_scale[0,r]), -127, 127)   fp32 division, ties to even;
//                    +-Inf becomes +-127, NaN becomes 0 and is counted nowhere
// A token is quantised once, then replicated. x may also be e4m3 or i8 with x_scale already (rows must be of the same
// dtype and scale shape, no `weight`): then bytes and scales are only moved, whatever scale_format says. The last block
// may be shorter than 128 columns; columns past H never enter amax. Rows past num_rows, or that no group owns, are
// neither read nor written.
#pragma once

#include "sluice/config.h"
#include "sluice/plan.h"

namespace sluice::pack {

inline constexpr TensorSpec kX{"x", {DType::kBF16, DType::kF32, DType::kE4M3, DType::kI8}, {Axis::kT, Axis::kH}};
inline constexpr TensorSpec kXScale = TensorSpec{"x_scale", DType::kF32, {Axis::kHb, Axis::kT}}.opt().strided();
inline constexpr TensorSpec kXRowScale = TensorSpec{"x_scale", DType::kF32, {Axis::kOne, Axis::kT}}.opt().repeated();
inline constexpr TensorSpec kRowToken{"row_token", DType::kI32, {Axis::kR}};
inline constexpr TensorSpec kRowSlot{"row_slot", DType::kI32, {Axis::kR}};
inline constexpr TensorSpec kSlotRow = TensorSpec{"slot_row", DType::kI32, {Axis::kT, Axis::kS}}.opt();
inline constexpr TensorSpec kNumRows{"num_rows", DType::kI32, {Axis::kOne}};
inline constexpr TensorSpec kWeight = TensorSpec{"weight", DType::kF32, {Axis::kT, Axis::kS}}.opt();
inline constexpr TensorSpec kRows{"rows", {DType::kBF16, DType::kF32, DType::kE4M3, DType::kI8}, {Axis::kR, Axis::kH}};
inline constexpr TensorSpec kRowsScale = TensorSpec{"rows_scale", DType::kF32, {Axis::kHb, Axis::kR}}.opt().strided();
inline constexpr TensorSpec kRowsRowScale =
    TensorSpec{"rows_scale", DType::kF32, {Axis::kOne, Axis::kR}}.opt().strided();

struct Args {
  TensorView x;          // [T,H] bf16, f32, e4m3, or i8
  TensorView x_scale;    // [Hb,T] or [1,T] f32, present exactly when x is e4m3 or i8 (then [1,T]); either stride order
  TensorView row_token;  // [R] i32; absent: rows are the tokens themselves, R = T (shared expert)
  TensorView row_slot;   // [R] i32; needed only with weight
  TensorView slot_row;   // [T,S] i32, optional beside row_token: the same plan by token, so that a token is read once
  TensorView num_rows;   // [1] i32; absent: all R rows
  RowGroups groups = RowGroups::whole();  // which rows are valid, where rows are the tokens and num_rows is absent
  TensorView weight;                      // [T,S] f32, optional
  TensorView rows;                        // [R,H] out
  TensorView rows_scale;  // [Hb,R] or [1,R] f32 out, present exactly when rows is e4m3 or i8 (then [1,R])
  ScaleFormat scale_format = ScaleFormat::kF32;
};
Status check(const Args& args, Phase phase = Phase::kRun);
std::span<const Impl<Args>> impls();

}  // namespace sluice::pack
