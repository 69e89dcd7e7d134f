// Stage 6, swiglu_quant.
#include "sluice/stage/swiglu_quant.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "harness/buffer.h"
#include "harness/codec.h"
#include "harness/every_way.h"
#include "harness/scales.h"
#include "harness/sparse.h"

namespace sluice::swiglu_quant {
namespace {

using test::Buffer;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr Activation kSilu{};
constexpr Activation kClamped{ActivationKind::kSiluClamped, 10.0f, 0.0f};
constexpr Activation kGptOss{ActivationKind::kGptOss, 7.0f, 1.702f};

struct Problem {
  DType h = DType::kBF16;
  DType a = DType::kE4M3;
  std::int64_t width = 128;          // I
  std::vector<std::int32_t> groups;  // offsets [L+1], or counts [L] when masked
  std::int64_t rows_per_group = 0;   // masked when above 0
  std::int64_t capacity = 0;         // R of the contiguous form
  Activation activation = kSilu;
  bool swap_scale = false;
  std::int64_t gap = 0;
  std::int64_t offset = 0;
  ScaleFormat scale_format = ScaleFormat::kF32;
  bool row_scale = false;  // one scale a row; i8 always
};

struct Swiglu {
  explicit Swiglu(Problem p)
      : problem(std::move(p)),
        num_rows(problem.rows_per_group > 0 ? problem.rows_per_group * std::ssize(problem.groups) : problem.capacity),
        group(problem.row_scale || problem.a == DType::kI8 ? problem.width : 128),
        num_blocks(ceil_div(problem.width, group)),
        h(problem.h, {num_rows, 2 * problem.width},
          {.row_pitch_elems = 2 * problem.width + problem.gap, .offset_elems = problem.offset}),
        groups(DType::kI32, {std::ssize(problem.groups)}),
        a(problem.a, {num_rows, problem.width},
          {.row_pitch_elems = problem.width + 3 * problem.gap, .offset_elems = problem.offset}),
        a_scale(DType::kF32,
                problem.swap_scale ? std::vector{num_rows, num_blocks} : std::vector{num_blocks, num_rows}) {
    for (std::size_t i = 0; i < problem.groups.size(); ++i) groups.as<std::int32_t>()[i] = problem.groups[i];
  }

  Args args() const {
    Args args;
    args.h = h.view();
    args.groups = problem.rows_per_group > 0 ? RowGroups::masked(groups.view(), problem.rows_per_group)
                                             : RowGroups::contiguous({groups.view()});
    args.activation = problem.activation;
    args.scale_format = problem.scale_format;
    args.a = a.view();
    if (is_quantised(problem.a)) args.a_scale = scale_view();
    return args;
  }
  TensorView scale_view() const { return problem.swap_scale ? a_scale.transposed() : a_scale.view(); }
  float scale(std::int64_t b, std::int64_t r) const {
    return scale_view().as<float>()[b * scale_view().stride[0] + r * scale_view().stride[1]];
  }
  bool is_owned(std::int64_t r) const {
    if (problem.rows_per_group > 0) {
      return r % problem.rows_per_group < problem.groups[static_cast<std::size_t>(r / problem.rows_per_group)];
    }
    return r >= problem.groups.front() && r < problem.groups.back();
  }
  double value(std::int64_t r, std::int64_t i) const {
    const double q = a.at(r * problem.width + i);
    return is_quantised(problem.a) ? q * static_cast<double>(scale(i / group, r)) : q;
  }
  void set_gate(std::int64_t r, std::int64_t i, double v) const { h.set(r * 2 * problem.width + i, v); }
  void set_up(std::int64_t r, std::int64_t i, double v) const { h.set((r * 2 + 1) * problem.width + i, v); }

  void run_every_way() const {
    test::expect_same_every_way(test::on_cpu(impls()), args(), {&h, &groups}, {&a, &a_scale});
  }
  void run_once(int num_threads = 1) const {
    ASSERT_TRUE(check(args())) << check(args()).message();
    ASSERT_TRUE(test::run_with_scratch(test::on_cpu(impls()).front(), args(), num_threads));
  }

  Problem problem;
  std::int64_t num_rows, group, num_blocks;  // columns that share a scale, and how many such groups
  Buffer h, groups, a, a_scale;
};

double exact(const Activation& act, double g, double u) {
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  if (act.kind != ActivationKind::kSilu) {
    const double limit = static_cast<double>(act.limit);
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
  }
  if (act.kind == ActivationKind::kGptOss) return (u + 1) * (g * sigmoid(static_cast<double>(act.alpha) * g));
  return g * sigmoid(g) * u;
}

// Values against double precision: 8 fp32 roundings (sigmoid within 2 units, three products and a sum, with room
// for the rounding of alpha * g, which |alpha g| <= 12 amplifies), then the rounding of the output. For e4m3 half a
// step of 2^-3, or half the smallest step at the block's scale; for i8 half a scale. And untouched rows.
void expect_right(const Swiglu& s) {
  const std::int64_t width = s.problem.width;
  for (std::int64_t r = 0; r < s.num_rows; ++r) {
    if (!s.is_owned(r)) {
      EXPECT_TRUE(test::is_poison(s.a.view().slice(r, 1)));
      if (!is_quantised(s.problem.a)) continue;
      for (std::int64_t b = 0; b < s.num_blocks; ++b) EXPECT_TRUE(std::isnan(s.scale(b, r)));
      continue;
    }
    for (std::int64_t b = 0; b < s.num_blocks; ++b) {
      double amax = 0;
      const std::int64_t end = std::min(width, (b + 1) * s.group);
      for (std::int64_t i = b * s.group; i < end; ++i) {
        const double want = exact(s.problem.activation, s.h.at(r * 2 * width + i), s.h.at((r * 2 + 1) * width + i));
        const double got = s.value(r, i);
        if (std::isfinite(want)) amax = std::max(amax, std::fabs(want));
        double bound = std::fabs(want) * 32 * 0x1p-24 + 1e-40;
        if (s.problem.a == DType::kBF16) bound += std::fabs(want) * 0x1p-8;
        if (s.problem.a == DType::kE4M3) {
          bound += std::fabs(want) * 0x1p-4 + 0x1.01p-10 * static_cast<double>(s.scale(b, r));
        }
        if (s.problem.a == DType::kI8) bound += 0x1.01p-1 * static_cast<double>(s.scale(b, r));
        ASSERT_LE(std::fabs(got - want), bound) << "row " << r << ", column " << i << ": " << got << " for " << want;
      }
      if (is_quantised(s.problem.a)) {
        const double want = std::max(amax, 1e-10) / (s.problem.a == DType::kI8 ? 127 : 448);
        if (s.problem.scale_format == ScaleFormat::kUe8m0) {
          // A power of two within the bound of the f32 scale that was rounded up.
          ASSERT_EQ(s.scale(b, r), test::least_power_of_two(s.scale(b, r)));
          ASSERT_GE(static_cast<double>(s.scale(b, r)), want * (1 - 40 * 0x1p-24));
          ASSERT_LT(static_cast<double>(s.scale(b, r)), want * (2 + 80 * 0x1p-24));
          continue;
        }
        ASSERT_LE(std::fabs(static_cast<double>(s.scale(b, r)) - want), want * 40 * 0x1p-24)
            << "row " << r << ", block " << b;
      }
    }
  }
}

void run_and_check(const Swiglu& s) {
  s.run_every_way();
  if (!testing::Test::HasFailure()) expect_right(s);
}

TEST(SwigluQuant, EveryDtypeSizeActivationAndLayout) {
  std::uint64_t seed = 0;
  for (DType h : {DType::kBF16, DType::kF32}) {
    for (DType a : {DType::kBF16, DType::kF32, DType::kE4M3}) {
      for (const Activation& activation : {kSilu, kClamped, kGptOss}) {
        for (std::int64_t width : {1, 46, 127, 128, 129, 200, 256}) {
          ++seed;
          Problem problem{.h = h, .a = a, .width = width, .activation = activation};
          if (seed % 2 == 0) {
            problem.groups = {0, 2, 2, 5, 5, 7};
            problem.capacity = 9;
          } else {
            problem.groups = {1, 0, 3};
            problem.rows_per_group = 3;
          }
          problem.swap_scale = seed % 4 < 2;
          problem.gap = static_cast<std::int64_t>(seed % 3);
          problem.offset = static_cast<std::int64_t>(seed % 2);
          problem.scale_format = seed % 8 < 4 ? ScaleFormat::kF32 : ScaleFormat::kUe8m0;
          SCOPED_TRACE(testing::Message()
                       << to_string(h) << " to " << to_string(a) << ", I = " << width << ", " << describe(activation));
          Swiglu s(problem);
          // Rows of nobody hold NaN.
          for (std::int64_t r = 0; r < s.num_rows; ++r) {
            if (s.is_owned(r))
              test::fill_normal(s.h.view().slice(r, 1), seed * 100 + static_cast<std::uint64_t>(r), 4.0);
          }
          run_and_check(s);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Bits, not values: every pattern of h, special values included, is the same on every target.
TEST(SwigluQuant, AnyBitsAtAll) {
  for (DType h : {DType::kBF16, DType::kF32}) {
    for (DType a : {DType::kBF16, DType::kF32, DType::kE4M3}) {
      for (const Activation& activation : {kSilu, kClamped, kGptOss}) {
        Swiglu s({.h = h, .a = a, .width = 400, .groups = {0, 10}, .capacity = 10, .activation = activation});
        s.h.fill_random_bits(static_cast<std::uint64_t>(h) * 10 + static_cast<std::uint64_t>(a));
        s.run_every_way();
        s.problem.scale_format = ScaleFormat::kUe8m0;
        s.run_every_way();
      }
    }
  }
}

TEST(SwigluQuant, GroupsOfEverySort) {
  for (const std::vector<std::int32_t>& offsets : std::vector<std::vector<std::int32_t>>{
           {0, 0, 0, 0}, {0, 300, 300}, {0, 0, 300}, {0, 1, 128, 257, 300}, {5, 200}, {0}}) {
    Swiglu s({.width = 130, .groups = offsets, .capacity = 300});
    s.h.fill_normal(1);
    run_and_check(s);
  }
  // One expert that owns every row is the same as an offset array that says so.
  Swiglu whole({.width = 130, .groups = {0, 300}, .capacity = 300});
  whole.h.fill_normal(1);
  Args of_all = whole.args();
  of_all.groups = RowGroups::whole();
  test::expect_same_every_way(test::on_cpu(impls()), of_all, {&whole.h}, {&whole.a, &whole.a_scale});
  expect_right(whole);
  Swiglu none({.width = 130, .groups = {0, 0}, .capacity = 0});
  run_and_check(none);
  Args args = none.args();
  args.h.data = args.a.data = args.a_scale.data = nullptr;
  for (const Impl<Args>& impl : test::on_cpu(impls())) {
    ASSERT_TRUE(check(args));
    EXPECT_TRUE(test::run_with_scratch(impl, args, 2));
  }
}

TEST(SwigluQuant, OneScaleARow) {
  std::uint64_t seed = 0;
  for (DType a : {DType::kE4M3, DType::kI8}) {
    for (DType h : {DType::kBF16, DType::kF32}) {
      for (const Activation& activation : {kSilu, kClamped, kGptOss}) {
        for (std::int64_t width : {1, 46, 127, 128, 129, 200, 300}) {
          ++seed;
          Problem problem{.h = h, .a = a, .width = width, .activation = activation, .row_scale = true};
          if (seed % 2 == 0) {
            problem.groups = {0, 2, 2, 5, 5, 7};
            problem.capacity = 9;
          } else {
            problem.groups = {1, 0, 3};
            problem.rows_per_group = 3;
          }
          problem.swap_scale = seed % 4 < 2;
          problem.gap = static_cast<std::int64_t>(seed % 3);
          problem.offset = static_cast<std::int64_t>(seed % 2);
          if (a == DType::kE4M3 && seed % 8 < 4) problem.scale_format = ScaleFormat::kUe8m0;
          SCOPED_TRACE(testing::Message()
                       << to_string(h) << " to " << to_string(a) << ", I = " << width << ", " << describe(activation));
          Swiglu s(problem);
          for (std::int64_t r = 0; r < s.num_rows; ++r) {
            if (s.is_owned(r))
              test::fill_normal(s.h.view().slice(r, 1), seed * 100 + static_cast<std::uint64_t>(r), 4.0);
          }
          run_and_check(s);
          if (HasFailure()) return;
          s.h.fill_random_bits(seed);
          s.run_every_way();
        }
      }
    }
  }
}

TEST(SwigluQuant, OneScaleARowNeedsScratchForARow) {
  Swiglu s({.a = DType::kI8, .width = 200, .groups = {0, 3}, .capacity = 3});
  s.h.fill_normal(1);
  const Status status = test::on_cpu(impls()).front().run(s.args(), {});
  EXPECT_EQ(status.code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_EQ(status.message(), "swiglu_quant: the workspace has 0 bytes, 1087 are needed");  // 256 * 4 + 63
  EXPECT_TRUE(s.a.rows_untouched(0));
}

// A gate of 64 has a sigmoid of exactly 1, so the activation is 64 * u.
TEST(SwigluQuant, Int8OfOneRow) {
  Swiglu s({.h = DType::kF32, .a = DType::kI8, .width = 200, .groups = {0, 1}, .capacity = 1});
  s.h.fill_constant(0);
  const double up[] = {
      127, -127, 2.5, -3.5, 0.5, static_cast<double>(kInf), -static_cast<double>(kInf), static_cast<double>(kNaN)};
  const int want[] = {127, -127, 2, -4, 0, 127, -127, 0};
  for (int i = 0; i < 8; ++i) {
    s.set_gate(0, 25 * i, 64);
    s.set_up(0, 25 * i, up[i]);
  }
  s.run_every_way();
  EXPECT_EQ(s.scale(0, 0), 64.0f);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(s.a.at(25 * i), want[i]) << up[i];
}

// Nothing that an offset or a count may hold leads outside.
TEST(SwigluQuant, GroupsFromStaleMemoryStayInside) {
  Swiglu offsets({.width = 64, .groups = {-5, 3, 1000000, 2}, .capacity = 6});
  offsets.h.fill_normal(1);
  offsets.run_every_way();
  Swiglu counts({.width = 64, .groups = {-5, 1000000, 2}, .rows_per_group = 3});
  counts.h.fill_normal(1);
  counts.run_every_way();
  EXPECT_TRUE(test::is_poison(counts.a.view().slice(0, 3)));
  EXPECT_TRUE(test::is_poison(counts.a.view().slice(8, 1)));
}

TEST(SwigluQuant, BatchInvariance) {
  Swiglu all({.width = 200, .groups = {0, 40, 100}, .capacity = 100});
  all.h.fill_normal(5);
  all.run_once(2);
  for (std::int64_t r : {0, 39, 40, 99}) {
    Swiglu one({.width = 200, .groups = {0, 1}, .capacity = 1});
    std::memcpy(one.h.view().data, all.h.view().row(r), 800);
    one.run_once();
    EXPECT_EQ(std::memcmp(one.a.view().data, all.a.view().row(r), 200), 0);
    for (std::int64_t b = 0; b < 2; ++b) EXPECT_EQ(one.scale(b, 0), all.scale(b, r));
  }
}

TEST(SwigluQuant, Case33_ZeroRowsHaveAScale) {
  for (bool zero_gate : {false, true}) {
    Swiglu s({.width = 256, .groups = {0, 4}, .capacity = 4});
    s.h.fill_normal(1);
    for (std::int64_t i = 0; i < 256; ++i) zero_gate ? s.set_gate(2, i, 0) : s.set_up(2, i, 0);
    run_and_check(s);
    EXPECT_EQ(s.scale(1, 2), 1e-10f / 448.0f);
    for (std::int64_t i = 0; i < 256; ++i) EXPECT_EQ(s.value(2, i), 0.0);
  }
}

TEST(SwigluQuant, Case33_ZeroRowsHaveAPowerOfTwoUe8m0) {
  Swiglu s({.width = 256, .groups = {0, 4}, .capacity = 4, .scale_format = ScaleFormat::kUe8m0});
  s.h.fill_normal(1);
  for (std::int64_t i = 0; i < 256; ++i) s.set_up(2, i, 0);
  run_and_check(s);
  for (std::int64_t b = 0; b < 2; ++b) EXPECT_EQ(s.scale(b, 2), 0x1p-42f);  // 1e-10 / 448 = 0.98 * 2^-42
  for (std::int64_t i = 0; i < 256; ++i) EXPECT_EQ(s.value(2, i), 0.0);
}

// Rounded up, never down or cut off. A gate of 64 has a sigmoid of exactly 1, so the activation is 64 * u.
TEST(SwigluQuant, Case40_Ue8m0ScalesAreRoundedUpToPowersOfTwo) {
  for (DType h : {DType::kBF16, DType::kF32}) {
    Problem problem{.h = h, .width = 320, .groups = {0, 200}, .capacity = 200};
    Swiglu f32(problem);
    problem.scale_format = ScaleFormat::kUe8m0;
    Swiglu ue8m0(problem);
    for (std::int64_t r = 0; r < 200; ++r) {
      const double sigma = std::ldexp(1.0, static_cast<int>(r) / 4 - 40);
      test::fill_normal(f32.h.view().slice(r, 1), static_cast<std::uint64_t>(r), sigma);
      test::fill_normal(ue8m0.h.view().slice(r, 1), static_cast<std::uint64_t>(r), sigma);
    }
    f32.run_once();
    run_and_check(ue8m0);
    for (std::int64_t r = 0; r < 200; ++r) {
      for (std::int64_t b = 0; b < 3; ++b) test::expect_rounded_up(ue8m0.scale(b, r), f32.scale(b, r));
    }
  }
  for (int k : {-30, 0, 9}) {
    const float one = std::ldexp(1.0f, k);
    const struct {
      float up, scale;
      std::uint8_t byte;
    } kRows[] = {
        {7 * one, one, 0x7E},             // 64 * 7 = 448
        {7.00001f * one, 2 * one, 0x76},  // just above: 224 of twice the scale
        {6.99999f * one, one, 0x7E},      // just below
        {4 * one, one, 0x78},             // a power of two itself: 256
    };
    for (const auto& row : kRows) {
      Swiglu s({.h = DType::kF32, .groups = {0, 1}, .capacity = 1, .scale_format = ScaleFormat::kUe8m0});
      s.h.fill_constant(0);
      for (std::int64_t i : {5, 6, 7}) s.set_gate(0, i, 64);
      s.set_up(0, 5, static_cast<double>(row.up));
      s.set_up(0, 6, static_cast<double>(kInf));
      s.set_up(0, 7, static_cast<double>(kNaN));
      s.run_every_way();
      EXPECT_EQ(s.scale(0, 0), row.scale) << row.up;
      EXPECT_EQ(static_cast<std::uint8_t>(s.a.view().row(0)[5]), row.byte) << row.up;
      EXPECT_EQ(static_cast<std::uint8_t>(s.a.view().row(0)[6]), 0x7E);
      EXPECT_EQ(static_cast<std::uint8_t>(s.a.view().row(0)[7]), 0x7F);
    }
  }
}

TEST(SwigluQuant, Case34_TinyValuesStayFinite) {
  for (double tiny : {6.3e-38, 1.3e-36, 1.4e-36, 1e-42, 9.2e-41}) {
    Swiglu s({.h = DType::kF32, .groups = {0, 1}, .capacity = 1});
    s.h.fill_constant(0);
    s.set_gate(0, 5, 60);
    s.set_up(0, 5, tiny);
    run_and_check(s);
    for (std::int64_t i = 0; i < 128; ++i) EXPECT_LE(std::fabs(s.value(0, i)), i == 5 ? 60 * tiny * (1 + 0x1p-4) : 0.0);
  }
}

TEST(SwigluQuant, Case36_OneNaNOrInfinityStaysAlone) {
  const struct {
    float up;
    std::uint8_t byte;
  } kBad[] = {{kNaN, 0x7F}, {kInf, 0x7E}, {-kInf, 0xFE}};
  for (const auto& bad : kBad) {
    Swiglu s({.groups = {0, 2}, .capacity = 2});
    s.h.fill_constant(1);
    s.set_up(0, 60, static_cast<double>(bad.up));
    s.run_every_way();
    EXPECT_EQ(s.scale(0, 0), s.scale(0, 1));
    for (std::int64_t i = 0; i < 128; ++i) {
      EXPECT_EQ(static_cast<std::uint8_t>(s.a.view().row(0)[i]), i == 60 ? bad.byte : 0x7E);
      EXPECT_EQ(static_cast<std::uint8_t>(s.a.view().row(1)[i]), 0x7E);
    }
  }
}

TEST(SwigluQuant, NaNPassesTheLimits) {
  for (const Activation& activation : {kSilu, kClamped, kGptOss}) {
    for (bool in_gate : {false, true}) {
      Swiglu s({.a = DType::kF32, .width = 3, .groups = {0, 1}, .capacity = 1, .activation = activation});
      s.h.fill_constant(2);
      in_gate ? s.set_gate(0, 1, static_cast<double>(kNaN)) : s.set_up(0, 1, static_cast<double>(kNaN));
      s.run_every_way();
      EXPECT_TRUE(std::isnan(s.value(0, 1)));
      EXPECT_TRUE(std::isfinite(s.value(0, 0)) && std::isfinite(s.value(0, 2)));
    }
  }
}

TEST(SwigluQuant, Case52_WhatLiesPastTheRowNeverEntersAmax) {
  for (std::int64_t width : {3584, 1408, 192, 96}) {
    Swiglu s({.width = width, .groups = {0, 2}, .capacity = 2});
    s.h.fill_normal(static_cast<std::uint64_t>(width));
    const std::int64_t pitch = 2 * width + 200;
    Buffer wide(DType::kBF16, {2, pitch});
    wide.fill_constant(1e19);  // as gate and up: 1e38
    for (std::int64_t i = 0; i < 4 * width; ++i) wide.set(i / (2 * width) * pitch + i % (2 * width), s.h.at(i));
    Args args = s.args();
    args.h = wide.view();
    args.h.shape[1] = 2 * width;
    test::expect_same_every_way(test::on_cpu(impls()), args, {&wide}, {&s.a, &s.a_scale});
    expect_right(s);
  }
}

TEST(SwigluQuant, Case53_AMissingScaleIsNamed) {
  Swiglu s({.groups = {0, 1}, .capacity = 1});
  Args args = s.args();
  args.a_scale = {};
  EXPECT_EQ(
      check(args).message(),
      "swiglu_quant: a is e4m3[1,128] and a_scale is absent; a_scale must be present exactly when a is e4m3 or i8");
}

TEST(SwigluQuant, Case54_TheLimitIsOneSidedForTheGate) {
  for (DType a : {DType::kF32, DType::kBF16, DType::kE4M3}) {
    Swiglu s({.a = a, .width = 1, .groups = {0, 2}, .capacity = 2, .activation = kClamped});
    s.h.fill_values({20, -30, -20, 5});
    run_and_check(s);
    // -99.99546 and -2.0612e-7; the width of 1 makes each its own amax.
    const double step = a == DType::kF32 ? 1e-6 : a == DType::kBF16 ? 0x1p-9 : 1e-6;
    EXPECT_NEAR(s.value(0, 0), -99.99546, 100 * step + 5e-6);
    EXPECT_NEAR(s.value(1, 0), -2.0612e-7, 2.1e-7 * step + 5e-12);
  }
}

// The row's bytes do not depend on where in the batch it sits: 61680 * 2 * 17408 is the last offset below 2^31. The
// 4.5 GB of h are address space; two rows of pages are touched.
TEST(SwigluQuant, Case58_OffsetsBeyond32Bits) {
  constexpr std::int64_t kRows = 65536;
  constexpr std::int64_t kWidth = 17408;
  const test::SparseMemory h_memory(kRows * 2 * kWidth * 2);
  const test::SparseMemory a_memory(kRows * kWidth);
  const test::SparseMemory scale_memory(kRows * (kWidth / 128) * 4);
  if (!h_memory || !a_memory || !scale_memory) GTEST_SKIP() << "no 6 GB of address space";
  Swiglu want({.width = kWidth, .groups = {0, 1}, .capacity = 1});
  want.h.fill_normal(1);
  want.run_once();
  for (std::int32_t r : {61680, 61681, 65535}) {
    Buffer offsets(DType::kI32, {2});
    offsets.fill_values({static_cast<double>(r), static_cast<double>(r) + 1});
    Args args;
    args.h = TensorView::dense(h_memory.data(), DType::kBF16, {kRows, 2 * kWidth});
    args.groups = RowGroups::contiguous({offsets.view()});
    args.a = TensorView::dense(a_memory.data(), DType::kE4M3, {kRows, kWidth});
    args.a_scale = TensorView::dense(scale_memory.data(), DType::kF32, {kWidth / 128, kRows});
    std::memcpy(args.h.row(r), want.h.view().data, kWidth * 4);
    for (const Impl<Args>& impl : test::on_cpu(impls())) {
      std::memset(args.a.row(r), 0xFF, kWidth);
      ASSERT_TRUE(check(args)) << check(args).message();
      ASSERT_TRUE(test::run_with_scratch(impl, args, 2));
      EXPECT_EQ(std::memcmp(args.a.row(r), want.a.view().data, kWidth), 0) << impl.name << ", row " << r;
      for (std::int64_t b = 0; b < kWidth / 128; ++b)
        ASSERT_EQ(args.a_scale.as<float>()[b * kRows + r], want.scale(b, 0));
    }
  }
}

TEST(SwigluQuant, Case73_HalfRowsThatAreNotAligned) {
  for (std::int64_t width : {3420, 1234, 46, 7}) {
    for (DType a : {DType::kBF16, DType::kE4M3}) {
      Swiglu s({.a = a, .width = width, .groups = {0, 3}, .capacity = 3});
      s.h.fill_normal(static_cast<std::uint64_t>(width));
      run_and_check(s);
    }
  }
}

TEST(SwigluQuant, Case74_SourceAndDestinationOffByOneElementEachAlone) {
  Swiglu s({.a = DType::kBF16, .width = 46, .groups = {0, 3}, .capacity = 3});
  s.h.fill_normal(1);
  s.run_once();
  for (std::int64_t h_offset : {0, 1}) {
    Buffer h(DType::kBF16, {3, 92}, {.offset_elems = h_offset});
    Buffer a(DType::kBF16, {3, 46}, {.offset_elems = 1 - h_offset});
    h.fill_normal(1);
    Args args = s.args();
    args.h = h.view();
    args.a = a.view();
    test::expect_same_every_way(test::on_cpu(impls()), args, {&h}, {&a});
    EXPECT_TRUE(a.unchanged_since(s.a.bytes()));
  }
}

// The one layout the stage knows: the gate half first. Loaders bring other orders into it.
TEST(SwigluQuant, Case137_GateHalfFirst) {
  Swiglu s({.h = DType::kF32, .a = DType::kF32, .width = 2, .groups = {0, 1}, .capacity = 1});
  s.h.fill_values({1, 2, 3, 4});
  run_and_check(s);
  EXPECT_NEAR(s.value(0, 0), 3 / (1 + std::exp(-1.0)), 1e-6);
  EXPECT_NEAR(s.value(0, 1), 8 / (1 + std::exp(-2.0)), 1e-6);
}

TEST(SwigluQuant, EverySentenceOfCheck) {
  const Swiglu s({.width = 200, .groups = {0, 3, 5}, .capacity = 5});
  const auto expect = [&](const std::function<void(Args&)>& spoil, const std::string& text) {
    Args args = s.args();
    ASSERT_TRUE(check(args)) << check(args).message();
    spoil(args);
    const Status status = check(args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  expect([](Args& a) { a.h = {}; }, "swiglu_quant: h[R,2I] f32 or bf16 is missing");
  expect([](Args& a) { a.h.shape[1] = 399; }, "axis 1 (2I) is 399, which is odd");
  expect([](Args& a) { a.a.shape[1] = 201; }, "axis 1 (I) is 201, expected 200");
  expect([](Args& a) { a.a.shape[0] = 4; }, "axis 0 (R) is 4, expected 5");
  expect([](Args& a) { a.a_scale.shape[0] = 3; }, "a_scale[Ib,R] f32 axis 0 (Ib) is 3, expected 2");
  expect([](Args& a) { a.a_scale.stride = {1, 1}; }, "so that elements overlap");
  expect(
      [](Args& a) {
        a.a.dtype = DType::kBF16;
        a.a.data = a.h.data;
      },
      "a_scale is f32[2,5]; a_scale must be present exactly when a is e4m3 or i8");
  expect([](Args& a) { a.groups = {}; },
         "contiguous row groups take expert_offset alone; expert_offset[L+1] is missing");
  expect([](Args& a) { a.groups.counts = a.groups.expert_offset.view; },
         "expert_offset[L+1] is given, counts[L] is given");
  expect([](Args& a) { a.groups = RowGroups::masked(a.groups.expert_offset.view, 2); },
         "rows_per_group = 2 do not make R = 5 rows");
  expect([](Args& a) { a.groups.expert_offset.view.dtype = DType::kI64; }, "expert_offset must be i32");
  expect(
      [](Args& a) {
        a.activation = {ActivationKind::kSiluClamped, 0, 0};
      },
      "activation limit is 0, expected more than 0");
  expect(
      [](Args& a) {
        a.activation = {ActivationKind::kGptOss, kNaN, 1};
      },
      "activation limit is nan, expected more than 0");
  expect(
      [](Args& a) {
        a.activation = {ActivationKind::kGptOss, 7, kInf};
      },
      "activation alpha is inf, expected a finite value");
  expect(
      [](Args& a) {
        a.activation = {ActivationKind::kSilu, 7, 0};
      },
      "activation limit is 7, but plain silu has none");
  const Swiglu int8({.a = DType::kI8, .width = 200, .groups = {0, 3, 5}, .capacity = 5});
  Args args = int8.args();
  ASSERT_TRUE(check(args)) << check(args).message();
  args.scale_format = ScaleFormat::kUe8m0;
  EXPECT_EQ(check(args).message(), "swiglu_quant: scale_format is ue8m0, but i8 rows have f32 scales");
  args = int8.args();
  args.a_scale = s.args().a_scale;
  EXPECT_NE(check(args).message().find("a_scale[1,R] f32 axis 0 (1) is 2, expected 1"), std::string::npos);
  Args planned = s.args();
  planned.h.data = nullptr;
  EXPECT_TRUE(check(planned, Phase::kPlan));
}

}  // namespace
}  // namespace sluice::swiglu_quant
