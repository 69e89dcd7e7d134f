// The harness's scalar conversions, held against brute force over all codes of a format.
#include "harness/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "harness/fill.h"

namespace sluice::test {
namespace {

struct Case {
  DType dtype;
  std::uint64_t num_codes;
};

class FloatFormat : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Codec, FloatFormat,
                         testing::Values(Case{DType::kE4M3, 256}, Case{DType::kE5M2, 256}, Case{DType::kF16, 65536},
                                         Case{DType::kBF16, 65536}),
                         [](const auto& test) { return std::string(to_string(test.param.dtype)); });

TEST_P(FloatFormat, EveryCodeSurvivesARoundTrip) {
  const auto [dtype, num_codes] = GetParam();
  std::set<double> values;
  std::uint64_t num_nan = 0;
  for (std::uint64_t code = 0; code < num_codes; ++code) {
    const double value = decode(dtype, code);
    if (std::isnan(value)) {
      ++num_nan;
      EXPECT_TRUE(std::isnan(decode(dtype, encode(dtype, value))));
      continue;
    }
    if (std::isinf(value)) {
      EXPECT_NE(dtype, DType::kE4M3);
    }
    EXPECT_EQ(encode(dtype, value), code) << value;
    values.insert(value);
  }
  // Distinct codes are distinct values, but for the two zeros.
  EXPECT_EQ(values.size(), num_codes - num_nan - 1);
}

TEST_P(FloatFormat, RoundsToTheNearestAndTiesToEven) {
  const auto [dtype, num_codes] = GetParam();
  // Positive finite codes are in the order of their values.
  std::vector<double> finite;
  for (std::uint64_t code = 0; code < num_codes / 2 && std::isfinite(decode(dtype, code)); ++code)
    finite.push_back(decode(dtype, code));
  Rng rng(7);
  for (std::size_t code = 0; code + 1 < finite.size(); ++code) {
    const double low = finite[code];
    const double high = finite[code + 1];
    ASSERT_LT(low, high);
    const double middle = (low + high) / 2;  // exact in double
    EXPECT_EQ(encode(dtype, middle), code + code % 2) << middle;
    EXPECT_EQ(encode(dtype, std::nextafter(middle, 0.0)), code);
    EXPECT_EQ(encode(dtype, std::nextafter(middle, high)), code + 1);
    EXPECT_EQ(encode(dtype, -middle), (code + code % 2) | (num_codes / 2)) << -middle;
  }
}

TEST(Codec, KnownValues) {
  EXPECT_EQ(float_to_e4m3(448.0F), 0x7E);
  EXPECT_EQ(float_to_e4m3(464.0F), 0x7E);  // the tie that would round to NaN's code
  EXPECT_EQ(float_to_e4m3(1e30F), 0x7E);
  EXPECT_EQ(float_to_e4m3(-std::numeric_limits<float>::infinity()), 0xFE);
  EXPECT_EQ(float_to_e4m3(0x1p-9F), 0x01);
  EXPECT_EQ(float_to_e4m3(0x1p-10F), 0x00);
  EXPECT_EQ(float_to_e4m3(-0.0F), 0x80);
  EXPECT_EQ(float_to_e4m3(std::numeric_limits<float>::quiet_NaN()), 0x7F);
  EXPECT_EQ(float_to_e4m3(-std::numeric_limits<float>::quiet_NaN()), 0xFF);
  EXPECT_EQ(float_to_bf16(1.0F), 0x3F80);
  EXPECT_EQ(float_to_bf16(3.4e38F), 0x7F80);
  EXPECT_EQ(float_to_f16(65504.0F), 0x7BFF);
  EXPECT_EQ(float_to_f16(65520.0F), 0x7C00);
  EXPECT_EQ(encode(DType::kE5M2, 57344.0), 0x7BU);
  EXPECT_EQ(encode(DType::kE5M2, 61440.0), 0x7CU);
  EXPECT_EQ(float_to_e8m0(1.0F), 127);
  EXPECT_EQ(float_to_e8m0(1.01F), 128);
  EXPECT_EQ(float_to_e8m0(0x1p-126F), 1);
  EXPECT_EQ(e8m0_to_float(254), 0x1p127F);
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
  EXPECT_EQ(encode(DType::kI8, -1.0), 0xFFU);
  EXPECT_EQ(decode(DType::kI8, 0xFF), -1.0);
  EXPECT_EQ(decode(DType::kI32, encode(DType::kI32, -5e9)), -2147483648.0);
  EXPECT_EQ(decode(DType::kI64, encode(DType::kI64, -3.0)), -3.0);
  EXPECT_EQ(decode(DType::kU8, encode(DType::kU8, 300.0)), 255.0);
}

// The bytes of the fills are part of other tests' figures: they may not differ between platforms or change unnoticed.
TEST(Fill, SameBytesEverywhere) {
  Rng rng(1);
  EXPECT_EQ(rng.bits(), 2469588189546311528U);
  const auto fingerprint = [](auto fill) {
    std::vector<std::uint32_t> memory(1000);
    fill(TensorView::dense(memory.data(), DType::kF32, {10, 100}));
    std::uint64_t hash = 1469598103934665603U;
    for (std::uint32_t word : memory) hash = (hash ^ word) * 1099511628211U;
    return hash;
  };
  EXPECT_EQ(fingerprint([](const TensorView& v) { fill_normal(v, 3); }), 11113341216987647922U);
  EXPECT_EQ(fingerprint([](const TensorView& v) { fill_uniform(v, 3); }), 9105347823504252968U);
  EXPECT_EQ(fingerprint([](const TensorView& v) { fill_integers(v, 3, -4, 4); }), 13257594564785836131U);
  EXPECT_EQ(fingerprint([](const TensorView& v) { fill_powers_of_two(v, 3); }), 8588623205859954787U);
}

TEST(Fill, DistributionsAreWhatTheySay) {
  std::vector<float> memory(20000);
  const TensorView view = TensorView::dense(memory.data(), DType::kF32, {20000});
  fill_normal(view, 11, 2.0);
  double sum = 0;
  double squares = 0;
  for (double v : to_doubles(view)) {
    sum += v;
    squares += v * v;
    EXPECT_LE(std::fabs(v), 2 * 3.4642);
  }
  EXPECT_NEAR(sum / 20000, 0, 0.06);  // four standard errors
  EXPECT_NEAR(squares / 20000, 4, 0.15);
  fill_integers(view, 12, -3, 3);
  std::set<double> seen;
  for (double v : to_doubles(view)) seen.insert(v);
  EXPECT_EQ(seen, (std::set<double>{-3, -2, -1, 0, 1, 2, 3}));
  fill_powers_of_two(view, 13, -1, 1);
  seen.clear();
  for (double v : to_doubles(view)) seen.insert(v);
  EXPECT_EQ(seen, (std::set<double>{0.5, 1, 2}));
}

}  // namespace
}  // namespace sluice::test
