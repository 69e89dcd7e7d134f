// f32 -> e4m3, f32 -> bf16 and bf16 -> f32 on every SIMD target and in the references, against the harness codec,
// which rounds from double and shares nothing with either.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "harness/codec.h"
#include "harness/every_way.h"
#include "reference/convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "convert_test.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/bf16-inl.h"
#include "cpu/e4m3_encode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// n is a multiple of 64 in all three.
void EncodeE4M3(const float* from, std::size_t n, std::uint8_t* to) {
  const hn::ScalableTag<float> d;
  for (std::size_t i = 0; i < n; i += hn::Lanes(d)) StoreE4M3(d, hn::LoadU(d, from + i), to + i);
}
void EncodeBF16(const float* from, std::size_t n, std::uint16_t* to) {
  const hn::ScalableTag<float> d;
  for (std::size_t i = 0; i < n; i += hn::Lanes(d)) StoreBF16(d, hn::LoadU(d, from + i), to + i);
}
void DecodeBF16(const std::uint16_t* from, std::size_t n, float* to) {
  const hn::ScalableTag<float> d;
  for (std::size_t i = 0; i < n; i += hn::Lanes(d)) hn::StoreU(LoadBF16(d, from + i), d, to + i);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {
namespace {

using test::ForcedTarget;
using test::simd_targets;

HWY_EXPORT(EncodeE4M3);
HWY_EXPORT(EncodeBF16);
HWY_EXPORT(DecodeBF16);

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

void pad(std::vector<float>& values) {
  while (values.size() % 64 != 0) values.push_back(1.0f);
}

void push_both_signs(std::vector<float>& values, std::uint32_t bits) {
  values.push_back(from_bits(bits));
  values.push_back(from_bits(bits | 0x80000000u));
}

std::vector<std::uint8_t> encode_e4m3(const std::vector<float>& values) {
  std::vector<std::uint8_t> bytes(values.size());
  HWY_DYNAMIC_DISPATCH(EncodeE4M3)(values.data(), values.size(), bytes.data());
  return bytes;
}

void expect_e4m3(const std::vector<float>& values) {
  std::vector<std::uint8_t> want;
  for (float v : values) want.push_back(test::float_to_e4m3(v));
  std::size_t num_wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (reference::e4m3_from_f32(values[i]) == want[i]) continue;
    if (num_wrong++ == 0) ADD_FAILURE() << "reference: " << values[i] << " is not " << int{want[i]};
  }
  for (std::int64_t target : simd_targets()) {
    const ForcedTarget forced(target);
    const std::vector<std::uint8_t> got = encode_e4m3(values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (got[i] == want[i]) continue;
      if (num_wrong++ == 0) {
        ADD_FAILURE() << hwy::TargetName(target) << ": " << std::hexfloat << values[i] << std::hex << " gives "
                      << int{got[i]} << ", expected " << int{want[i]};
      }
    }
  }
  EXPECT_EQ(num_wrong, 0u);
}

void expect_bf16(const std::vector<float>& values) {
  std::vector<std::uint16_t> want;
  for (float v : values) {
    const auto bits = std::bit_cast<std::uint32_t>(v);
    // NaN keeps its upper payload and becomes quiet; the codec has but one quiet NaN.
    want.push_back(std::isnan(v) ? static_cast<std::uint16_t>((bits >> 16) | 0x40) : test::float_to_bf16(v));
  }
  std::size_t num_wrong = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (reference::bf16_from_f32(values[i]) == want[i]) continue;
    if (num_wrong++ == 0) ADD_FAILURE() << "reference: " << values[i] << " is not " << want[i];
  }
  for (std::int64_t target : simd_targets()) {
    const ForcedTarget forced(target);
    std::vector<std::uint16_t> got(values.size());
    HWY_DYNAMIC_DISPATCH(EncodeBF16)(values.data(), values.size(), got.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (got[i] == want[i]) continue;
      if (num_wrong++ == 0) {
        ADD_FAILURE() << hwy::TargetName(target) << ": " << std::hexfloat << values[i] << std::hex << " gives "
                      << got[i] << ", expected " << want[i];
      }
    }
  }
  EXPECT_EQ(num_wrong, 0u);
}

TEST(Convert, E4M3OfEveryBF16) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 65536; ++high) values.push_back(from_bits(high << 16));
  expect_e4m3(values);
}

// Around each e4m3 value and each midpoint of two: the 64 nearest f32 on either side.
TEST(Convert, E4M3AroundEveryBoundary) {
  std::vector<float> values;
  for (int code = 0; code <= 0x7E; ++code) {
    const double here = test::decode(DType::kE4M3, static_cast<std::uint64_t>(code));
    const double next = code == 0x7E ? 480.0 : test::decode(DType::kE4M3, static_cast<std::uint64_t>(code + 1));
    for (double center : {here, (here + next) / 2}) {
      const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(center));
      ASSERT_EQ(static_cast<double>(from_bits(bits)), center);
      for (std::uint32_t step = 0; step <= 64; ++step) {
        push_both_signs(values, bits + step);
        if (bits >= step) push_both_signs(values, bits - step);
      }
    }
  }
  pad(values);
  expect_e4m3(values);
}

TEST(Convert, E4M3OfASweepOfF32) {
  std::vector<float> values;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 16381) {
    values.push_back(from_bits(static_cast<std::uint32_t>(bits)));
  }
  pad(values);
  expect_e4m3(values);
}

TEST(Convert, Case37_E4M3SaturatesAndKeepsNaN) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float above = std::nextafter(std::ldexp(1.0f, -10), 1.0f);
  std::vector<float> values = {448,
                               449,
                               464,
                               465,
                               1000,
                               inf,
                               -inf,
                               nan,
                               std::copysign(nan, -1.0f),
                               std::ldexp(1.0f, -9),
                               std::ldexp(1.0f, -10),
                               above,
                               -0.0f,
                               0.0f};
  const std::vector<int> want = {0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0xFF, 0x01, 0x00, 0x01, 0x80, 0x00};
  pad(values);
  for (std::int64_t target : simd_targets()) {
    const ForcedTarget forced(target);
    const std::vector<std::uint8_t> got = encode_e4m3(values);
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(int{got[i]}, want[i]) << values[i] << " on " << hwy::TargetName(target);
      EXPECT_EQ(int{reference::e4m3_from_f32(values[i])}, want[i]) << values[i] << " in the reference";
    }
  }
}

// A static scale of 1 brings values of any size to the conversion.
TEST(Convert, Case38_BeyondTheRangeIsClampedNotNaN) {
  std::vector<float> values = {1000, -1000, 3};
  pad(values);
  for (std::int64_t target : simd_targets()) {
    const ForcedTarget forced(target);
    const std::vector<std::uint8_t> got = encode_e4m3(values);
    EXPECT_EQ(test::e4m3_to_float(got[0]), 448.0f);
    EXPECT_EQ(test::e4m3_to_float(got[1]), -448.0f);
    EXPECT_EQ(test::e4m3_to_float(got[2]), 3.0f);
  }
}

// Every upper half with the lower halves around zero, the tie and the end.
TEST(Convert, BF16AroundEveryBoundary) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 65536; ++high) {
    for (std::uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      values.push_back(from_bits(high << 16 | low));
    }
  }
  pad(values);
  expect_bf16(values);
}

TEST(Convert, BF16OfASweepOfF32) {
  std::vector<float> values;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 16381) {
    values.push_back(from_bits(static_cast<std::uint32_t>(bits)));
  }
  pad(values);
  expect_bf16(values);
}

TEST(Convert, EveryBF16ReadsExactlyAndComesBack) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  for (std::int64_t target : simd_targets()) {
    const ForcedTarget forced(target);
    std::vector<float> values(all.size());
    HWY_DYNAMIC_DISPATCH(DecodeBF16)(all.data(), all.size(), values.data());
    std::size_t num_wrong = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bool is_nan = std::isnan(values[i]);
      if (is_nan != std::isnan(test::bf16_to_float(all[i]))) ++num_wrong;
      if (!is_nan &&
          std::bit_cast<std::uint32_t>(values[i]) != std::bit_cast<std::uint32_t>(test::bf16_to_float(all[i])))
        ++num_wrong;
    }
    EXPECT_EQ(num_wrong, 0u) << hwy::TargetName(target);
    std::vector<std::uint16_t> back(all.size());
    HWY_DYNAMIC_DISPATCH(EncodeBF16)(values.data(), values.size(), back.data());
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (std::isnan(values[i])) continue;
      ASSERT_EQ(back[i], all[i]) << hwy::TargetName(target);
    }
  }
}

}  // namespace
}  // namespace sluice
#endif  // HWY_ONCE
