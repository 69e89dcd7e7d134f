// The comparators are judged before they judge: at the sizes that ship, every kind of damage must be caught and an
// honest result must pass.
#include "harness/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "harness/buffer.h"
#include "harness/codec.h"
#include "harness/fill.h"

namespace sluice::test {
namespace {

using testing::HasSubstr;

struct Size {
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t k;  // of the GEMM whose output this stands for
  DType out;
};

std::string size_name(const testing::TestParamInfo<Size>& test) {
  return std::to_string(test.param.rows) + "x" + std::to_string(test.param.cols) + "k" + std::to_string(test.param.k) +
         std::string(to_string(test.param.out));
}

// A GEMM's output without the price of the GEMM: one output is a sum of k products of unit normals, of which the
// share of one scale block (128 of k) is kept apart, so that the damage of a wrong scale can be done exactly.
class ShippingSize : public testing::TestWithParam<Size> {
 protected:
  ShippingSize() : got_(GetParam().out, {GetParam().rows, GetParam().cols}) {
    const auto [rows, cols, k, out] = GetParam();
    Rng rng(17);
    const double rest_sigma = std::sqrt(static_cast<double>(k - 128));
    // E|a||w| of unit normals is 2/pi; a row's own sum differs from it by a few percent, which does not matter here.
    const std::vector<double> magnitude(static_cast<std::size_t>(rows * cols), 0.6366 * static_cast<double>(k));
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      block_.push_back(std::sqrt(128.0) * rng.normal());
      want_.push_back(rest_sigma * rng.normal() + block_.back());
      // Rounding noise: random in direction, of the size that fp32 accumulation of k terms shows in practice.
      const double noise = std::sqrt(static_cast<double>(k)) * kUnitRoundoff * std::fabs(want_.back()) * rng.normal();
      got_.set(i, want_.back() + noise);
    }
    bounds_ = gemm_bounds(want_, magnitude, cols, k, out);
  }

  testing::AssertionResult judge() const { return rows_within(got_.view(), want_, bounds_); }
  double& want(std::int64_t row, std::int64_t col) {
    return want_[static_cast<std::size_t>(row * GetParam().cols + col)];
  }
  double block(std::int64_t row, std::int64_t col) const {
    return block_[static_cast<std::size_t>(row * GetParam().cols + col)];
  }
  void set(std::int64_t row, std::int64_t col, double value) { got_.set(row * GetParam().cols + col, value); }
  std::int64_t row_bytes() const { return GetParam().cols * size_bytes(GetParam().out); }

  // Does the damage to rows [row, row + count), sees it caught with `message` in the text, and undoes it.
  void caught(const char* what, std::int64_t row, std::int64_t count, const std::string& message,
              const std::function<void()>& damage) {
    const std::byte* const first = got_.view().row(row);
    const std::vector<std::byte> kept(first, first + count * row_bytes());
    damage();
    const testing::AssertionResult result = judge();
    EXPECT_FALSE(result) << what;
    EXPECT_THAT(result.message(), HasSubstr(message)) << what;
    std::copy(kept.begin(), kept.end(), got_.view().row(row));
  }

  std::vector<double> want_;   // [rows, cols]
  std::vector<double> block_;  // [rows, cols] the part of want_ that one scale multiplies
  Buffer got_;
  Bounds bounds_;
};

INSTANTIATE_TEST_SUITE_P(Compare, ShippingSize,
                         testing::Values(Size{4096, 512, 7168, DType::kBF16}, Size{512, 7168, 2048, DType::kBF16},
                                         Size{512, 7168, 2048, DType::kF32}),
                         size_name);

TEST_P(ShippingSize, CatchesEveryDamageAndPassesHonestNoise) {
  const auto [rows, cols, k, out] = GetParam();
  const std::int64_t row = rows / 3;
  const std::int64_t last = rows - 1;
  const std::int64_t n = cols;
  ASSERT_TRUE(judge()) << "an honest result";

  caught("a zeroed row", last, 1, "row " + std::to_string(last),
         [&] { std::memset(got_.view().row(last), 0, static_cast<std::size_t>(row_bytes())); });
  caught("two rows swapped", row, 2, "2 of ", [&] {
    std::byte* const a = got_.view().row(row);
    std::swap_ranges(a, a + row_bytes(), got_.view().row(row + 1));
  });
  caught("the neighbour's row", row, 1, "row " + std::to_string(row),
         [&] { std::memcpy(got_.view().row(row), got_.view().row(row + 1), static_cast<std::size_t>(row_bytes())); });
  caught("the row of an earlier run", row, 1, "1 of ",
         [&] { fill_normal(got_.view().slice(row, 1), 99, std::sqrt(static_cast<double>(k))); });

  // The most ordinary element of the row: the median magnitude, so nothing is won by picking a large one.
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  for (std::int64_t c = 0; c < n; ++c) order[static_cast<std::size_t>(c)] = c;
  std::nth_element(order.begin(), order.begin() + n / 2, order.end(),
                   [&](std::int64_t a, std::int64_t b) { return std::fabs(want(row, a)) < std::fabs(want(row, b)); });
  const std::int64_t col = order[static_cast<std::size_t>(n / 2)];
  const std::string at = "row " + std::to_string(row) + ", column " + std::to_string(col);
  caught("one flipped sign", row, 1, at, [&] { set(row, col, -want(row, col)); });
  caught("one NaN", row, 1, at, [&] { set(row, col, std::numeric_limits<double>::quiet_NaN()); });
  caught("one infinity", row, 1, at, [&] { set(row, col, -std::numeric_limits<double>::infinity()); });
  caught("one element off by one part in a hundred", row, 1, at, [&] { set(row, col, 1.01 * want(row, col)); });
  caught("the last element", last, 1, "row " + std::to_string(last) + ", column " + std::to_string(n - 1),
         [&] { set(last, n - 1, want(last, n - 1) + 0.05 * std::sqrt(static_cast<double>(k))); });

  // A wrong scale of one 128x128 block shows in 128 columns of the rows of one expert; here of a single row.
  for (const double factor : {2.0, 0.5, 1.25}) {
    caught("a wrong scale block", row, 1, "1 of ", [&] {
      for (std::int64_t c = n - 128; c < n; ++c) set(row, c, want(row, c) + (factor - 1) * block(row, c));
    });
  }
}

// Errors that stay below every element's bound but are no rounding: the L2 criterion is there for these.
// f32 is left out: without an output rounding L2 is no tighter than the elements.
class ShippingSizeRounded : public ShippingSize {};
INSTANTIATE_TEST_SUITE_P(Compare, ShippingSizeRounded,
                         testing::Values(Size{4096, 512, 7168, DType::kBF16}, Size{512, 7168, 2048, DType::kBF16}),
                         size_name);

TEST_P(ShippingSizeRounded, L2CatchesWhatMaxAbsLetsPass) {
  const std::int64_t row = GetParam().rows / 2;
  const std::int64_t n = GetParam().cols;
  // Every error at 0.9 of its bound, kept in f32 so that nothing is rounded afterwards.
  Buffer drifted(DType::kF32, {GetParam().rows, n});
  drifted.fill_values(want_);
  for (std::int64_t c = 0; c < n; ++c) {
    drifted.set(row * n + c, want(row, c) + 0.9 * bounds_.max_abs[static_cast<std::size_t>(row * n + c)]);
  }
  EXPECT_THAT(rows_within(drifted.view(), want_, bounds_).message(),
              HasSubstr("row " + std::to_string(row) + ": relative L2"));
  // The same bound without the L2 criterion would pass, so the failure above is its doing.
  Bounds loose = bounds_;
  std::fill(loose.l2.begin(), loose.l2.end(), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(rows_within(drifted.view(), want_, loose));
}

// ---------------------------------------------------------------------------------------------------------
// A real GEMM: the bound holds for the specified sequence and for nothing that is wrong
// ---------------------------------------------------------------------------------------------------------

class RealGemm : public testing::Test {
 protected:
  static constexpr std::int64_t kRows = 4;
  static constexpr std::int64_t kCols = 256;
  static constexpr std::int64_t kK = 7168;

  RealGemm() : a_(DType::kBF16, {kRows, kK}), w_(DType::kBF16, {kCols, kK}) {
    a_.fill_normal(1);
    w_.fill_normal(2, 0.05);
    product_ = exact_product(a_.to_doubles(), w_.to_doubles(), kRows, kCols, kK);
  }

  // The sequence of docs/numerics.md over columns [0, k), with `round_sum` applied to the running sum.
  template <class Round>
  void run(const Buffer& out, std::int64_t k, Round round_sum) const {
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t c = 0; c < kCols; ++c) {
        float sum = 0;
        for (std::int64_t block = 0; block < k; block += 128) {
          float partial = 0;
          for (std::int64_t i = block; i < std::min(block + 128, k); ++i) {
            partial = std::fma(bf16_to_float(a_.view().as<std::uint16_t>()[r * kK + i]),
                               bf16_to_float(w_.view().as<std::uint16_t>()[c * kK + i]), partial);
          }
          sum = round_sum(sum + partial);
        }
        out.set(r * kCols + c, sum);
      }
    }
  }
  testing::AssertionResult judge(const Buffer& out) const {
    return rows_within(out.view(), product_.value,
                       gemm_bounds(product_.value, product_.magnitude, kCols, kK, out.dtype()));
  }

  Buffer a_;  // [R, K]
  Buffer w_;  // [N, K]
  Product product_;
};

TEST_F(RealGemm, TheSpecifiedSequencePassesAndWrongOnesFail) {
  const auto exactly = [](float v) { return v; };
  for (const DType out_dtype : {DType::kF32, DType::kBF16}) {
    Buffer out(out_dtype, {kRows, kCols});
    run(out, kK, exactly);
    EXPECT_TRUE(judge(out));
    run(out, kK - 128, exactly);
    EXPECT_FALSE(judge(out)) << "the last block of k is missing";
    run(out, kK, [](float v) { return bf16_to_float(float_to_bf16(v)); });
    EXPECT_FALSE(judge(out)) << "the sum is kept in bf16 between blocks";
  }
  Buffer out(DType::kF32, {kRows, kCols});
  run(out, kK - 1, exactly);
  EXPECT_FALSE(judge(out)) << "the last k is missing";
}

TEST_F(RealGemm, TruncationIsNoRounding) {
  Buffer out(DType::kF32, {kRows, kCols});
  run(out, kK, [](float v) { return v; });
  Buffer truncated(DType::kBF16, {kRows, kCols});
  for (std::int64_t i = 0; i < kRows * kCols; ++i)
    truncated.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(out.as<std::uint32_t>()[i] >> 16);
  EXPECT_FALSE(judge(truncated));
}

TEST(ExactProduct, IsTheProduct) {
  const std::vector<double> a{1, -2, 3, 4, 5, -6};  // [2,3]
  const std::vector<double> w{1, 1, 1, 2, 0, -1};   // [2,3]
  const Product product = exact_product(a, w, 2, 2, 3);
  EXPECT_EQ(product.value, (std::vector<double>{2, -1, 3, 14}));
  EXPECT_EQ(product.magnitude, (std::vector<double>{6, 5, 15, 14}));
  EXPECT_THROW(exact_product(a, w, 2, 2, 4), std::invalid_argument);
}

TEST(Bounds, AreTheFormula) {
  EXPECT_EQ(gamma(0), 0);
  EXPECT_DOUBLE_EQ(gamma(186), 186 * 0x1p-24 / (1 - 186 * 0x1p-24));
  const std::vector<double> value{-8, 4};
  const std::vector<double> magnitude{100, 200};
  const Bounds f32 = gemm_bounds(value, magnitude, 2, 7168, DType::kF32);
  EXPECT_DOUBLE_EQ(f32.max_abs[0], gamma(128 + 56 + 2) * 100);
  EXPECT_DOUBLE_EQ(f32.l2[0], gamma(186) * std::hypot(100, 200));
  const Bounds bf16 = gemm_bounds(value, magnitude, 2, 7167, DType::kBF16);
  EXPECT_NEAR(bf16.max_abs[0], gamma(186) * 100 + 0x1p-5, 1e-5);
  // Wide rows are held to the spread of a rounding in L2, narrow ones only to its worst case.
  const std::vector<double> ones(512, 1.0);
  EXPECT_NEAR(rounding_bounds(ones, ones, 512, 0, DType::kBF16).l2[0], kOutputSpread * 0x1p-8 * std::sqrt(512.0), 1e-9);
  EXPECT_NEAR(rounding_bounds(ones, ones, 4, 0, DType::kBF16).l2[0], 0x1p-8 * 2, 1e-9);
  EXPECT_THROW(gemm_bounds(value, magnitude, 3, 128, DType::kF32), std::invalid_argument);
  EXPECT_THROW(gemm_bounds(value, magnitude, 2, 128, DType::kI32), std::invalid_argument);
}

// ---------------------------------------------------------------------------------------------------------
// Small cases of the comparators
// ---------------------------------------------------------------------------------------------------------

Bounds flat(std::int64_t rows, std::int64_t cols, double bound) {
  return {std::vector<double>(static_cast<std::size_t>(rows * cols), bound),
          std::vector<double>(static_cast<std::size_t>(rows), bound * std::sqrt(static_cast<double>(cols)))};
}

TEST(RowsWithin, CountsRowsAndValues) {
  Buffer got(DType::kF32, {3, 4});
  got.fill_constant(1);
  EXPECT_TRUE(rows_within(got.view(), std::vector<double>(12, 1.0), flat(3, 4, 0)));
  const auto message = [&](std::int64_t rows) {
    return std::string(
        rows_within(got.view(), std::vector<double>(static_cast<std::size_t>(4 * rows), 1.0), flat(rows, 4, 1))
            .message());
  };
  EXPECT_THAT(message(2), HasSubstr("(3 rows of 4), want 8 values (2 rows)"));
  EXPECT_THAT(message(4), HasSubstr("want 16 values (4 rows)"));
  EXPECT_FALSE(rows_within(got.view().slice(0, 0), std::vector<double>(12, 1.0), flat(3, 4, 1))) << "nothing at all";
  EXPECT_FALSE(rows_within(TensorView{}, std::vector<double>{}, Bounds{}));
  EXPECT_FALSE(rows_within(got.view(), std::vector<double>(12, 1.0), flat(2, 4, 1))) << "bounds for two rows";
  EXPECT_TRUE(rows_within(got.view().slice(0, 0), std::vector<double>{}, Bounds{})) << "no rows wanted, none there";
}

TEST(RowsWithin, NonFiniteValuesMustAgree) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double want : {1.0, nan, kInf, -kInf}) {
    for (const double got : {1.0, nan, kInf, -kInf}) {
      Buffer buffer(DType::kBF16, {1, 2});
      buffer.fill_values({0.0, got});
      const bool agree = (std::isnan(want) && std::isnan(got)) || want == got;
      EXPECT_EQ(static_cast<bool>(rows_within(buffer.view(), std::vector<double>{0.0, want}, flat(1, 2, kInf))), agree)
          << "got " << got << ", want " << want;
    }
  }
  // A bound that is NaN, say from an infinite magnitude times zero, may not turn the judgement off.
  Buffer buffer(DType::kF32, {1, 1});
  buffer.fill_constant(1);
  EXPECT_FALSE(rows_within(buffer.view(), std::vector<double>{1.0}, flat(1, 1, nan)));
  // Both negative and far apart: comparators that lose the sign of the difference pass this.
  buffer.fill_constant(-200);
  EXPECT_FALSE(rows_within(buffer.view(), std::vector<double>{-100.0}, flat(1, 1, 1)));
}

TEST(RowsWithin, NamesTheWorstRow) {
  Buffer got(DType::kF32, {3, 2}, {.row_pitch_elems = 5});
  got.fill_values({0, 0, 10, 0, 0, 0.5});
  Bounds bounds = flat(3, 2, 1);
  bounds.max_abs[5] = 0.001;  // half a unit here is worse than ten there
  const std::vector<std::string> names{"expert 0", "expert 4", "expert 7"};
  const testing::AssertionResult result = rows_within(got.view(), std::vector<double>(6, 0.0), bounds, names);
  EXPECT_THAT(result.message(), HasSubstr("2 of 3 rows"));
  EXPECT_THAT(result.message(), HasSubstr("row 2 (expert 7), column 1: got 0.5, want 0, error 0.5, bound 0.001"));
}

TEST(SameBits, NamesTheFirstDifference) {
  Buffer a(DType::kBF16, {2, 3, 4}, {.row_pitch_elems = 7, .offset_elems = 1});
  Buffer b(DType::kBF16, {2, 3, 4});
  a.fill_normal(5);
  b.fill_normal(5);
  EXPECT_TRUE(same_bits(a.view(), b.view()));
  b.set(17, 2);
  b.set(20, 3);
  a.set(17, 1);
  EXPECT_THAT(same_bits(a.view(), b.view()).message(),
              HasSubstr("2 of 24 elements differ, the first at [1,1,1]: got 1 (0x3f80), want 2 (0x4000)"));
}

TEST(SameBits, TellsBitsApartThatCompareEqual) {
  Buffer a(DType::kF32, {1, 2});
  Buffer b(DType::kF32, {1, 2});
  a.fill_values({0.0, 1});
  b.fill_values({-0.0, 1});
  EXPECT_FALSE(same_bits(a.view(), b.view()));
  a.as<std::uint32_t>()[0] = 0x7FC00000;
  b.as<std::uint32_t>()[0] = 0x7FC00000;
  EXPECT_TRUE(same_bits(a.view(), b.view()));
  b.as<std::uint32_t>()[0] = 0x7FC00001;
  EXPECT_FALSE(same_bits(a.view(), b.view()));
}

TEST(SameBits, ShapeAndDtypeMustAgree) {
  Buffer a(DType::kF32, {2, 3});
  Buffer fewer(DType::kF32, {1, 3});
  Buffer other(DType::kI32, {2, 3});
  Buffer flat_buffer(DType::kF32, {6});
  a.fill_constant(0);
  fewer.fill_constant(0);
  other.fill_constant(0);
  flat_buffer.fill_constant(0);
  EXPECT_THAT(same_bits(a.view(), fewer.view()).message(), HasSubstr("got f32[2,3], want f32[1,3]"));
  EXPECT_FALSE(same_bits(a.view(), other.view()));
  EXPECT_FALSE(same_bits(a.view(), flat_buffer.view()));
  EXPECT_FALSE(same_bits(TensorView{}, TensorView{})) << "two absent tensors are no evidence";
  EXPECT_TRUE(same_bits(a.view().slice(0, 0), a.view().slice(1, 0)));
}

}  // namespace
}  // namespace sluice::test
