// Comparators. Bitwise where the contract fixes the bits; otherwise every row is judged on its own, by the largest
// excess over a per-element bound and by the L2 norm of its errors. There is no tolerance in percent of elements and
// no figure averaged over the tensor: a single wrong row of thousands must fail. compare_test.cpp proves that it does.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sluice/core.h"

namespace sluice::test {

// Same dtype, same shape, same bytes in every element; strides may differ. NaN equals NaN of the same bits only.
testing::AssertionResult same_bits(const TensorView& got, const TensorView& want);

// How far `got` may be from the exact values. Both conditions must hold for a row.
struct Bounds {
  std::vector<double> max_abs;  // [rows, cols]: |got - want| of the element
  std::vector<double> l2;       // [rows]: the root of the summed squared errors of the row
};

// Rows are those of the last axis. Fails when the sizes disagree, when NaN or infinities are not where `want` has
// them (with its sign), and when a row exceeds a bound; the message names the worst row with its error and bound.
// `row_names` are for messages only: what row i should be called ("expert 3, token 17"); empty for the number.
testing::AssertionResult rows_within(const TensorView& got, std::span<const double> want, const Bounds& bounds,
                                     std::span<const std::string> row_names = {});

// ---------------------------------------------------------------------------------------------------------
// Bounds for a GEMM (docs/numerics.md, "Bound")
// ---------------------------------------------------------------------------------------------------------

inline constexpr double kUnitRoundoff = 0x1p-24;  // fp32, half a unit in the last place of 1
// (1 + d1)...(1 + dn) = 1 + t with |t| <= gamma(n) when every |d| <= 2^-24.
double gamma(std::int64_t num_roundings);
// Half the spacing of the dtype relative to the value, for values in its normal range: 2^-8 for bf16. 0 for f32,
// which the sums are in already.
double output_eps(DType dtype);

// out[r,n] = sum_k a[r,k] * w[n,k] in double, with the sum of magnitudes that its error scales with.
struct Product {
  std::vector<double> value;      // [R, N]
  std::vector<double> magnitude;  // [R, N] sum_k |a||w|
};
Product exact_product(std::span<const double> a /*[R,K]*/, std::span<const double> w /*[N,K]*/, std::int64_t num_rows,
                      std::int64_t n, std::int64_t k);

// The share of its worst case that the rounding of an output row reaches in L2. Errors spread evenly over half a
// spacing give 0.43 of it; truncation, or a second rounding of everything, is past 0.8. Needs the row to have
// kMinColsForSpread unrelated values: pass 1 for constant rows (narrow rows use 1 by themselves).
inline constexpr double kOutputSpread = 0.7;
inline constexpr std::int64_t kMinColsForSpread = 256;

// max_abs = gamma(128 + ceil(k/128) + 2) * magnitude + output_eps * |value| (+ half the least subnormal of the output);
// l2 the same with output_eps * output_spread. `value` is the exact result [rows, n].
Bounds gemm_bounds(std::span<const double> value, std::span<const double> magnitude, std::int64_t n, std::int64_t k,
                   DType out, double output_spread = kOutputSpread);

// For anything else: num_roundings fp32 roundings relative to magnitude, then one to the output.
Bounds rounding_bounds(std::span<const double> value, std::span<const double> magnitude, std::int64_t cols,
                       std::int64_t num_roundings, DType out, double output_spread = kOutputSpread);

}  // namespace sluice::test
