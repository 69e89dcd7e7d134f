// One problem of pack in guarded buffers, and what its rows must hold.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "harness/buffer.h"
#include "harness/codec.h"
#include "harness/every_way.h"
#include "harness/scales.h"
#include "sluice/stage/pack.h"

namespace sluice::pack {

using test::Buffer;

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Problem {
  DType x = DType::kBF16;
  DType rows = DType::kE4M3;
  std::int64_t hidden = 128;
  std::int64_t num_tokens = 1;
  std::vector<std::int32_t> row_token;  // of the rows in use
  std::int64_t capacity = 0;            // R; 0: as many as are in use
  bool no_plan = false;                 // rows are the tokens
  bool weighted = false;                // slot of row r: token * 2 + r % 2
  bool swap_x_scale = false;            // strides of [T,Hb] row-major
  bool swap_rows_scale = false;
  std::int64_t gap = 0;     // elements between rows
  std::int64_t offset = 0;  // elements off a 128-byte boundary
  ScaleFormat scale_format = ScaleFormat::kF32;
  bool row_scale = false;  // one scale a row; i8 always
};

inline std::vector<std::int64_t> ordered(bool swap, std::int64_t a, std::int64_t b) {
  return swap ? std::vector{b, a} : std::vector{a, b};
}

struct Pack {
  explicit Pack(Problem p)
      : problem(std::move(p)),
        num_used(problem.no_plan ? problem.num_tokens : std::ssize(problem.row_token)),
        num_capacity(std::max(problem.capacity, num_used)),
        num_blocks(problem.row_scale || problem.rows == DType::kI8 ? 1 : ceil_div(problem.hidden, 128)),
        x(problem.x, {problem.num_tokens, problem.hidden},
          {.row_pitch_elems = problem.hidden + problem.gap, .offset_elems = problem.offset}),
        x_scale(DType::kF32, ordered(problem.swap_x_scale, num_blocks, problem.num_tokens)),
        row_token(DType::kI32, {num_capacity}),
        row_slot(DType::kI32, {num_capacity}),
        num_rows(DType::kI32, {1}),
        weight(DType::kF32, {problem.num_tokens, 2}, {.row_pitch_elems = 2 + problem.gap}),
        rows(problem.rows, {num_capacity, problem.hidden},
             {.row_pitch_elems = problem.hidden + 3 * problem.gap, .offset_elems = problem.offset}),
        rows_scale(DType::kF32, ordered(problem.swap_rows_scale, num_blocks, num_capacity)) {
    for (std::int64_t r = 0; r < std::ssize(problem.row_token); ++r) {
      const std::int32_t t = problem.row_token[static_cast<std::size_t>(r)];
      row_token.as<std::int32_t>()[r] = t;
      row_slot.as<std::int32_t>()[r] = static_cast<std::int32_t>(t * 2 + r % 2);
    }
    num_rows.set(0, static_cast<double>(num_used));
    x_scale.fill_powers_of_two(3, -8, 8);
    weight.fill_normal(4);
  }

  Args args() const {
    Args a;
    a.x = x.view();
    if (is_quantised(problem.x)) a.x_scale = problem.swap_x_scale ? x_scale.transposed() : x_scale.view();
    if (!problem.no_plan) a.row_token = row_token.view();
    a.num_rows = num_rows.view();
    if (problem.weighted) {
      a.row_slot = row_slot.view();
      a.weight = weight.view();
    }
    a.rows = rows.view();
    if (is_quantised(problem.rows)) a.rows_scale = rows_scale_view();
    a.scale_format = problem.scale_format;
    return a;
  }
  TensorView rows_scale_view() const { return problem.swap_rows_scale ? rows_scale.transposed() : rows_scale.view(); }
  std::int64_t token(std::int64_t r) const {
    return problem.no_plan ? r : problem.row_token[static_cast<std::size_t>(r)];
  }
  float scale(std::int64_t b, std::int64_t r) const {
    const TensorView view = rows_scale_view();
    return view.as<float>()[b * view.stride[0] + r * view.stride[1]];
  }
  std::uint8_t byte(std::int64_t r, std::int64_t h) const { return static_cast<std::uint8_t>(rows.view().row(r)[h]); }
  double dequantised(std::int64_t r, std::int64_t h) const {
    return test::decode(DType::kE4M3, byte(r, h)) * static_cast<double>(scale(h / 128, r));
  }

  void run_every_way() const {
    test::expect_same_every_way(test::on_cpu(impls()), args(),
                                {&x, &x_scale, &row_token, &row_slot, &num_rows, &weight}, {&rows, &rows_scale});
  }
  void run_once(int num_threads = 1) const {
    ASSERT_TRUE(check(args())) << check(args()).message();
    ASSERT_TRUE(test::run_with_scratch(test::on_cpu(impls()).front(), args(), num_threads));
  }

  Problem problem;
  std::int64_t num_used, num_capacity, num_blocks;
  Buffer x, x_scale, row_token, row_slot, num_rows, weight, rows, rows_scale;
};

// What each row must hold, from the formula of the contract and the harness codec; and that no other row was written.
inline void expect_right(const Pack& p) {
  const std::int64_t hidden = p.problem.hidden;
  std::vector<float> v(static_cast<std::size_t>(hidden));
  for (std::int64_t r = 0; r < p.num_used; ++r) {
    const std::int64_t t = p.token(r);
    for (std::int64_t h = 0; h < hidden; ++h) {
      v[static_cast<std::size_t>(h)] = static_cast<float>(p.x.at(t * hidden + h));
      if (p.problem.weighted) {
        v[static_cast<std::size_t>(h)] *= static_cast<float>(p.weight.at(t * 2 + r % 2));
        if (std::isnan(v[static_cast<std::size_t>(h)])) v[static_cast<std::size_t>(h)] = kNaN;
      }
    }
    const bool int8 = p.problem.rows == DType::kI8;
    const std::int64_t group = int8 || p.problem.row_scale ? hidden : 128;
    for (std::int64_t b = 0; b < p.num_blocks; ++b) {
      const std::int64_t end = std::min(hidden, b * group + group);
      float scale = 0;
      if (is_quantised(p.problem.x)) {
        scale = static_cast<float>(
            p.x_scale.at(p.problem.swap_x_scale ? t * p.num_blocks + b : b * p.problem.num_tokens + t));
      } else {
        float amax = 0;
        for (std::int64_t h = b * group; h < end; ++h) {
          const float magnitude = std::fabs(v[static_cast<std::size_t>(h)]);
          if (magnitude < kInf && magnitude > amax) amax = magnitude;
        }
        scale = std::max(amax, 1e-10f) / (int8 ? 127.0f : 448.0f);
        if (p.problem.scale_format == ScaleFormat::kUe8m0) scale = test::least_power_of_two(scale);
      }
      if (is_quantised(p.problem.rows)) {
        ASSERT_EQ(p.scale(b, r), scale) << "row " << r << ", block " << b;
      }
      for (std::int64_t h = b * group; h < end; ++h) {
        const float value = v[static_cast<std::size_t>(h)];
        std::uint64_t want = 0;
        if (p.problem.x == p.problem.rows && !p.problem.weighted) {
          want = test::load_bits(p.problem.x, test::element(p.x.view(), t * hidden + h));
        } else {
          want =
              test::encode(p.problem.rows, static_cast<double>(is_quantised(p.problem.rows) ? value / scale : value));
          if (int8 && want == 0x80) want = 0x81;  // -127 is the least
        }
        ASSERT_EQ(test::load_bits(p.problem.rows, test::element(p.rows.view(), r * hidden + h)), want)
            << "row " << r << ", column " << h << ", value " << value;
      }
    }
  }
  EXPECT_TRUE(p.rows.rows_untouched(p.num_used));
  if (is_quantised(p.problem.rows)) {
    TensorView view = p.rows_scale_view();
    std::swap(view.shape[0], view.shape[1]);
    std::swap(view.stride[0], view.stride[1]);
    EXPECT_TRUE(test::is_poison(view.slice(p.num_used, p.num_capacity - p.num_used)));
  }
}

inline void pack_and_check(const Pack& p) {
  p.run_every_way();
  if (!testing::Test::HasFailure()) expect_right(p);
}

// Values over a wide range with everything awkward among them.
inline void fill_awkward(const Buffer& x, std::uint64_t seed) {
  test::Rng rng(seed);
  test::fill_with(x.view(), [&](std::int64_t) {
    switch (rng.integer(0, 60)) {
      case 0: return 0.0;
      case 1: return -0.0;
      case 2: return static_cast<double>(kInf);
      case 3: return -static_cast<double>(kInf);
      case 4: return static_cast<double>(kNaN);
      case 5: return -static_cast<double>(kNaN);
      case 6: return 1e-40;
      default: return rng.normal() * std::ldexp(1.0, static_cast<int>(rng.integer(-12, 6)));
    }
  });
}

inline const std::vector<std::int32_t> kTokenOfRow = {3, 0, 3, 1, 0, 5, 3, 5, 3, 0, 6};  // tokens 2 and 4 have no row

}  // namespace sluice::pack
