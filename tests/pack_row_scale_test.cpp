// Stage 3, pack, with one scale a row: e4m3 per token and int8.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "pack_problem.h"

namespace sluice::pack {
namespace {

TEST(PackRowScale, EveryDtypeSizeAndLayout) {
  std::uint64_t seed = 0;
  for (DType rows : {DType::kE4M3, DType::kI8}) {
    for (DType x : {DType::kBF16, DType::kF32, rows}) {
      for (std::int64_t hidden : {1, 7, 46, 127, 128, 129, 192, 320, 1000}) {
        ++seed;
        Problem problem{
            .x = x, .rows = rows, .hidden = hidden, .num_tokens = 7, .row_token = kTokenOfRow, .capacity = 14};
        problem.row_scale = true;
        problem.gap = seed % 3 == 0 ? 0 : static_cast<std::int64_t>(seed % 5);
        problem.offset = static_cast<std::int64_t>(seed % 2);
        problem.swap_x_scale = seed % 2 == 0;
        problem.swap_rows_scale = seed % 4 < 2;
        problem.weighted = x != rows && seed % 5 < 2;
        if (rows == DType::kE4M3 && seed % 8 < 4) problem.scale_format = ScaleFormat::kUe8m0;
        SCOPED_TRACE(testing::Message() << to_string(x) << " to " << to_string(rows) << ", H = " << hidden);
        Pack p(problem);
        x == rows ? (void)p.x.fill_random_bits(seed) : fill_awkward(p.x, seed);
        if (seed % 7 == 0) p.weight.set(3, static_cast<double>(kInf));
        pack_and_check(p);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(PackRowScale, AnyBitsAtAll) {
  for (DType rows : {DType::kE4M3, DType::kI8}) {
    for (DType x : {DType::kBF16, DType::kF32}) {
      Pack p({.x = x, .rows = rows, .hidden = 300, .num_tokens = 7, .row_token = kTokenOfRow, .row_scale = true});
      p.x.fill_random_bits(5);
      p.run_every_way();
    }
  }
}

// The amax of a row is that of all its columns, wherever the largest one is.
TEST(PackRowScale, TheLargestColumnDecidesWhereverItIs) {
  for (DType rows : {DType::kE4M3, DType::kI8}) {
    const float most = rows == DType::kI8 ? 127.0f : 448.0f;
    for (std::int64_t at : {0, 127, 128, 255, 256, 299}) {
      Pack p({.rows = rows, .hidden = 300, .num_tokens = 1, .row_token = {0}, .row_scale = true});
      p.x.fill_constant(0.5);
      p.x.set(at, -8);
      p.run_every_way();
      EXPECT_EQ(p.scale(0, 0), 8.0f / most);
      EXPECT_EQ(test::decode(rows, p.byte(0, at)), -static_cast<double>(most));
    }
  }
}

// Ties go to even, the range is symmetric, and what is not finite is told apart.
TEST(PackRowScale, Int8RoundsToNearestEven) {
  Pack p({.x = DType::kF32, .rows = DType::kI8, .hidden = 12, .num_tokens = 1, .row_token = {0}});
  p.x.fill_values({127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.49999997, -127, static_cast<double>(kInf),
                   -static_cast<double>(kInf), static_cast<double>(kNaN)});
  p.run_every_way();
  EXPECT_EQ(p.scale(0, 0), 1.0f);
  const int want[] = {127, 0, 2, 2, 0, -2, 126, 0, -127, 127, -127, 0};
  for (int i = 0; i < 12; ++i) EXPECT_EQ(static_cast<std::int8_t>(p.byte(0, i)), want[i]) << i;
}

TEST(PackRowScale, Case33_ZeroRowsHaveAScale) {
  for (const auto& [rows, most] : {std::pair{DType::kE4M3, 448.0f}, {DType::kI8, 127.0f}}) {
    Pack p({.rows = rows, .hidden = 260, .num_tokens = 2, .row_token = {0, 1}, .row_scale = true});
    p.x.fill_constant(0.0);
    p.x.set(260, static_cast<double>(kNaN));  // a row of zeros but for one NaN
    p.run_every_way();
    for (std::int64_t r = 0; r < 2; ++r) {
      EXPECT_EQ(p.scale(0, r), 1e-10f / most);
      for (std::int64_t h = 0; h < 260; ++h) EXPECT_EQ(p.byte(r, h), r == 1 && h == 0 && most == 448 ? 0x7F : 0);
    }
  }
}

TEST(PackRowScale, BatchInvariance) {
  for (DType rows : {DType::kE4M3, DType::kI8}) {
    Pack all({.rows = rows, .hidden = 200, .num_tokens = 7, .row_token = kTokenOfRow, .row_scale = true});
    fill_awkward(all.x, 3);
    all.run_once(2);
    for (std::int64_t r = 0; r < all.num_used; ++r) {
      Pack one({.rows = rows, .hidden = 200, .num_tokens = 1, .row_token = {0}, .row_scale = true});
      std::memcpy(one.x.view().data, all.x.view().row(all.token(r)), 400);
      one.run_once();
      EXPECT_EQ(std::memcmp(one.rows.view().data, all.rows.view().row(r), 200), 0) << "row " << r;
      EXPECT_EQ(one.scale(0, 0), all.scale(0, r));
    }
  }
}

// One scale for the whole tensor, seen by every token, is moved to every row.
TEST(PackRowScale, AScaleOfTheTensorIsMovedToEveryRow) {
  for (DType dtype : {DType::kE4M3, DType::kI8}) {
    for (std::int64_t hidden : {100, 200}) {
      Pack p(
          {.x = dtype, .rows = dtype, .hidden = hidden, .num_tokens = 7, .row_token = kTokenOfRow, .row_scale = true});
      p.x.fill_random_bits(1);
      Args args = p.args();
      args.x_scale.stride = {0, 0};
      test::expect_same_every_way(test::on_cpu(impls()), args, {&p.x, &p.x_scale}, {&p.rows, &p.rows_scale});
      for (std::int64_t r = 0; r < p.num_used; ++r)
        EXPECT_EQ(static_cast<double>(p.scale(0, r)), p.x_scale.at(0)) << "row " << r;
    }
  }
}

TEST(PackRowScale, EverySentenceOfCheck) {
  const auto expect = [](const Pack& p, const std::function<void(Args&)>& spoil, const std::string& text) {
    Args args = p.args();
    ASSERT_TRUE(check(args)) << check(args).message();
    spoil(args);
    const Status status = check(args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  const Pack int8({.rows = DType::kI8, .hidden = 200, .num_tokens = 7, .row_token = kTokenOfRow});
  const Pack blocks({.hidden = 200, .num_tokens = 7, .row_token = kTokenOfRow});
  const Pack moved({.x = DType::kI8, .rows = DType::kI8, .hidden = 200, .num_tokens = 7, .row_token = kTokenOfRow});
  const Pack moved_blocks(
      {.x = DType::kE4M3, .hidden = 200, .num_tokens = 7, .row_token = kTokenOfRow, .row_scale = true});
  expect(
      int8, [](Args& a) { a.rows_scale = {}; },
      "rows is i8[11,200] and rows_scale is absent; rows_scale must be present exactly when rows is e4m3 or i8");
  expect(
      int8, [&](Args& a) { a.rows_scale = blocks.args().rows_scale; },
      "rows_scale[1,R] f32 axis 0 (1) is 2, expected 1");
  expect(
      int8, [](Args& a) { a.scale_format = ScaleFormat::kUe8m0; },
      "scale_format is ue8m0, but i8 rows have f32 scales");
  expect(
      int8, [](Args& a) { a.rows_scale.stride[1] = 0; }, "rows_scale[1,R] f32 axis 1 has stride 0");
  expect(
      moved, [](Args& a) { a.rows.dtype = DType::kE4M3; }, "x is i8, so rows must be i8, got e4m3[11,200]");
  expect(
      moved, [](Args& a) { a.x_scale = {}; }, "x_scale must be present exactly when x is e4m3 or i8");
  expect(
      moved,
      [&](Args& a) {
        a.weight = int8.weight.view();
        a.row_slot = int8.row_slot.view();
      },
      "weight cannot be applied to an x that is i8 already");
  expect(
      moved_blocks, [&](Args& a) { a.rows_scale = blocks.args().rows_scale; },
      "x_scale is f32[1,7] and rows_scale is f32[2,11]; scales are moved");
}

}  // namespace
}  // namespace sluice::pack
