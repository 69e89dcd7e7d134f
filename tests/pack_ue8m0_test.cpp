// Stage 3, pack, with scales that are powers of two.
#include <gtest/gtest.h>

#include <cmath>

#include "pack_problem.h"

namespace sluice::pack {
namespace {

TEST(Pack, Case33_ZeroGroupsHaveAPowerOfTwoUe8m0) {
  Pack p({.x = DType::kF32,
          .hidden = 256,
          .num_tokens = 4,
          .row_token = {0, 1, 2, 3},
          .scale_format = ScaleFormat::kUe8m0});
  p.x.fill_normal(1);
  for (std::int64_t h = 0; h < 256; ++h) p.x.set(2 * 256 + h, 0);
  pack_and_check(p);
  for (std::int64_t b = 0; b < 2; ++b) EXPECT_EQ(p.scale(b, 2), 0x1p-42f);  // 1e-10 / 448 = 0.98 * 2^-42
  for (std::int64_t h = 0; h < 256; ++h) EXPECT_EQ(p.byte(2, h), 0);
}

// Rounded up, never down or cut off: the scale is a power of two in [f32 scale, 2 * f32 scale), for any bits of x.
TEST(Pack, Case40_Ue8m0ScalesAreRoundedUpToPowersOfTwo) {
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    Problem problem{.x = dtype, .hidden = 320, .num_tokens = 200, .no_plan = true};
    Pack f32(problem);
    problem.scale_format = ScaleFormat::kUe8m0;
    Pack ue8m0(problem);
    fill_awkward(f32.x, 5);
    fill_awkward(ue8m0.x, 5);
    for (std::int64_t t = 100; t < 200; ++t) {  // any amax there is
      test::Rng rng(static_cast<std::uint64_t>(t));
      for (std::int64_t h = 0; h < 320; ++h) {
        const double v = rng.normal() * std::ldexp(1.0, static_cast<int>(t * 2 - 274));
        f32.x.set(t * 320 + h, v);
        ue8m0.x.set(t * 320 + h, v);
      }
    }
    f32.run_once();
    pack_and_check(ue8m0);
    for (std::int64_t r = 0; r < 200; ++r) {
      for (std::int64_t b = 0; b < 3; ++b) test::expect_rounded_up(ue8m0.scale(b, r), f32.scale(b, r));
    }
  }
  // Around a power of two: amax 448 * 2^k is one already, the next value above asks for twice that, the next below
  // for the same. An infinity beside it and a NaN change nothing.
  for (int k : {-20, -3, 0, 7, 100}) {
    const float exact = std::ldexp(448.0f, k);
    const float one = std::ldexp(1.0f, k);
    const struct {
      float amax, scale;
      std::uint8_t byte;
    } kRows[] = {
        {exact, one, 0x7E},
        {std::nextafter(exact, kInf), one * 2, 0x76},  // 224 of twice the scale
        {std::nextafter(exact, 0.0f), one, 0x7E},
        {exact / 2, one / 2, 0x7E},
        {one, std::ldexp(1.0f, k - 8), 0x78},  // 1/448 rises to 1/256: 256
    };
    for (const auto& row : kRows) {
      Pack p({.x = DType::kF32, .num_tokens = 1, .row_token = {0}, .scale_format = ScaleFormat::kUe8m0});
      p.x.fill_constant(0);
      p.x.set(3, -static_cast<double>(row.amax));
      p.x.set(90, static_cast<double>(kInf));
      p.x.set(91, static_cast<double>(kNaN));
      pack_and_check(p);
      EXPECT_EQ(p.scale(0, 0), row.scale) << row.amax;
      EXPECT_EQ(p.byte(0, 3), 0x80 | row.byte) << row.amax;
      EXPECT_EQ(p.byte(0, 90), 0x7E);
      EXPECT_EQ(p.byte(0, 91), 0x7F);
    }
  }
}

// Scales that arrive with e4m3 rows are the sender's: 1.5 is not made 1 or 2, whatever the format of our own.
TEST(Pack, Case40_ScalesThatArriveAreOnlyMoved) {
  Pack p({.x = DType::kE4M3, .hidden = 512, .num_tokens = 1, .row_token = {0}, .scale_format = ScaleFormat::kUe8m0});
  p.x.fill_constant(1);
  p.x_scale.fill_values({1.0, 2.0, 0.5, 1.5});
  pack_and_check(p);
  EXPECT_EQ(p.scale(0, 0), 1.0f);
  EXPECT_EQ(p.scale(1, 0), 2.0f);
  EXPECT_EQ(p.scale(2, 0), 0.5f);
  EXPECT_EQ(p.scale(3, 0), 1.5f);
}

}  // namespace
}  // namespace sluice::pack
