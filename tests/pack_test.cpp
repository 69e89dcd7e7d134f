// Stage 3, pack.
#include "sluice/stage/pack.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "pack_problem.h"

namespace sluice::pack {
namespace {

TEST(Pack, EveryDtypeSizeAndLayout) {
  std::uint64_t seed = 0;
  for (DType x : {DType::kBF16, DType::kF32, DType::kE4M3}) {
    for (DType rows : {DType::kBF16, DType::kF32, DType::kE4M3}) {
      if (x == DType::kE4M3 && rows != DType::kE4M3) continue;
      for (std::int64_t hidden : {1, 7, 46, 127, 128, 129, 192, 320}) {
        ++seed;
        Problem problem{
            .x = x, .rows = rows, .hidden = hidden, .num_tokens = 7, .row_token = kTokenOfRow, .capacity = 14};
        problem.gap = seed % 3 == 0 ? 0 : static_cast<std::int64_t>(seed % 5);
        problem.offset = static_cast<std::int64_t>(seed % 2);
        problem.swap_x_scale = seed % 2 == 0;
        problem.swap_rows_scale = seed % 4 < 2;
        problem.weighted = x != DType::kE4M3 && seed % 5 < 2;
        problem.scale_format = seed % 8 < 4 ? ScaleFormat::kF32 : ScaleFormat::kUe8m0;
        SCOPED_TRACE(testing::Message() << to_string(x) << " to " << to_string(rows) << ", H = " << hidden);
        Pack p(problem);
        x == DType::kE4M3 ? (void)p.x.fill_random_bits(seed) : fill_awkward(p.x, seed);
        if (seed % 7 == 0) p.weight.set(3, static_cast<double>(kInf));
        pack_and_check(p);
        if (HasFailure()) return;
      }
    }
  }
}

// The bits of bf16 and f32 rows survive a move, signalling NaN included.
TEST(Pack, MovesKeepEveryBit) {
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    Pack p({.x = dtype, .rows = dtype, .hidden = 300, .num_tokens = 7, .row_token = kTokenOfRow});
    p.x.fill_random_bits(9);
    pack_and_check(p);
  }
}

TEST(Pack, WithoutAPlanRowsAreTokens) {
  for (bool weighted : {false, true}) {
    Pack p({.hidden = 200, .num_tokens = 5, .no_plan = true, .weighted = weighted});
    p.x.fill_normal(1);
    for (std::int64_t r = 0; r < 5; ++r) p.row_slot.as<std::int32_t>()[r] = static_cast<std::int32_t>(r * 2 + r % 2);
    pack_and_check(p);
  }
}

TEST(Pack, ManyTokensOnManyThreads) {
  std::vector<std::int32_t> row_token;
  for (std::int32_t i = 0; i < 1200; ++i) row_token.push_back(i * 7 % 400);
  Pack p({.hidden = 384, .num_tokens = 400, .row_token = row_token, .capacity = 1300});
  p.x.fill_normal(2);
  pack_and_check(p);
}

// A row depends on its token alone: packed in company or by itself, at any place.
TEST(Pack, BatchInvariance) {
  Pack all({.hidden = 200, .num_tokens = 7, .row_token = kTokenOfRow});
  fill_awkward(all.x, 3);
  all.run_once(2);
  for (std::int64_t r = 0; r < all.num_used; ++r) {
    Pack one({.hidden = 200, .num_tokens = 1, .row_token = {0}});
    std::memcpy(one.x.view().data, all.x.view().row(all.token(r)), 400);
    one.run_once();
    EXPECT_EQ(std::memcmp(one.rows.view().data, all.rows.view().row(r), 200), 0) << "row " << r;
    for (std::int64_t b = 0; b < 2; ++b) EXPECT_EQ(one.scale(b, 0), all.scale(b, r));
  }
}

TEST(Pack, NoTokensNoRows) {
  pack_and_check(Pack({.num_tokens = 0, .capacity = 3}));
  Pack no_rows({.num_tokens = 4, .capacity = 6});
  no_rows.x.fill_constant(1);
  pack_and_check(no_rows);
  Pack empty({.num_tokens = 0});
  Args args = empty.args();
  for (TensorView* view : {&args.x, &args.row_token, &args.rows, &args.rows_scale}) view->data = nullptr;
  args.num_rows = {};
  for (const Impl<Args>& impl : test::on_cpu(impls())) {
    ASSERT_TRUE(check(args)) << check(args).message();
    EXPECT_TRUE(test::run_with_scratch(impl, args, 2));
  }
}

TEST(Pack, NumRowsIsKeptWithinTheCapacity) {
  Pack p({.num_tokens = 7, .row_token = kTokenOfRow});
  p.x.fill_normal(1);
  p.num_rows.set(0, 1000);
  p.run_every_way();
  expect_right(p);
  Pack negative({.num_tokens = 7, .row_token = kTokenOfRow});
  negative.num_rows.set(0, -5);
  negative.run_every_way();
  EXPECT_TRUE(negative.rows.rows_untouched(0));
}

// Metadata that nobody filled is an error, and nothing is written.
TEST(Pack, RefusesRowsThatLeadOutside) {
  for (std::int32_t bad : {7, -1, std::numeric_limits<std::int32_t>::min()}) {
    Pack p({.num_tokens = 7, .row_token = kTokenOfRow});
    p.x.fill_normal(1);
    p.row_token.set(9, bad);
    Pack w({.num_tokens = 7, .row_token = kTokenOfRow, .weighted = true});
    w.x.fill_normal(1);
    w.row_slot.set(9, bad == 7 ? 14 : bad);
    for (const Impl<Args>& impl : test::on_cpu(impls())) {
      Status status = test::run_with_scratch(impl, p.args(), 2);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(status.message(), "pack: row_token of row 9 is " + std::to_string(bad) + ", expected 0 to 6");
      EXPECT_TRUE(p.rows.rows_untouched(0));
      status = test::run_with_scratch(impl, w.args(), 2);
      EXPECT_EQ(status.message(),
                "pack: row_slot of row 9 is " + std::to_string(bad == 7 ? 14 : bad) + ", expected 0 to 13");
      EXPECT_TRUE(w.rows.rows_untouched(0));
    }
    EXPECT_TRUE(p.rows_scale.rows_untouched(0));
  }
}

TEST(Pack, RefusesAWorkspaceThatIsTooSmall) {
  Pack p({.num_tokens = 7, .row_token = kTokenOfRow});
  p.x.fill_normal(1);
  const Status status = test::on_cpu(impls()).front().run(p.args(), {});
  EXPECT_EQ(status.code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_EQ(status.message(), "pack: the workspace has 0 bytes, 135 are needed");  // (7 + 11) * 4 + 63
  EXPECT_TRUE(p.rows.rows_untouched(0));
}

TEST(Pack, Case28_RowsPastTheCountStayAsTheyWere) {
  // Group sizes 3, 0, 5, 0 in a capacity of 512.
  Pack p({.hidden = 130, .num_tokens = 4, .row_token = {0, 1, 3, 0, 1, 1, 2, 3}, .capacity = 512});
  p.x.fill_normal(1);
  pack_and_check(p);
  EXPECT_TRUE(p.rows.rows_untouched(8));
}

TEST(Pack, Case33_ZeroGroupsHaveAScaleAndZeroData) {
  Pack one({.num_tokens = 1, .row_token = {0}});
  one.x.fill_constant(0);
  Pack p({.x = DType::kF32, .hidden = 256, .num_tokens = 4, .row_token = {0, 1, 2, 3}});
  p.x.fill_normal(1);
  for (std::int64_t h = 0; h < 256; ++h) p.x.set(2 * 256 + h, 0);
  Pack without({.x = DType::kF32, .hidden = 256, .num_tokens = 4, .row_token = {0, 1, 3}});
  for (std::int64_t i = 0; i < 1024; ++i) without.x.set(i, p.x.at(i));
  pack_and_check(one);
  pack_and_check(p);
  pack_and_check(without);
  EXPECT_EQ(one.scale(0, 0), 1e-10f / 448.0f);
  for (std::int64_t h = 0; h < 128; ++h) EXPECT_EQ(one.dequantised(0, h), 0.0);
  for (std::int64_t h = 0; h < 256; ++h) EXPECT_EQ(p.byte(2, h), 0);
  EXPECT_EQ(p.scale(1, 2), 1e-10f / 448.0f);
  EXPECT_EQ(std::memcmp(p.rows.view().row(0), without.rows.view().row(0), 512), 0);  // rows 0 and 1
  EXPECT_EQ(std::memcmp(p.rows.view().row(3), without.rows.view().row(2), 256), 0);
}

TEST(Pack, Case34_TinyGroupsStayFinite) {
  for (float tiny : {6.3e-38f, 1.3e-36f, 1.4e-36f, 1e-42f, 9.2e-41f, 1e-12f, 1e-10f, 1e-9f}) {
    for (const auto& [dtype, format] : {std::pair(DType::kF32, ScaleFormat::kF32),
                                        {DType::kBF16, ScaleFormat::kF32},
                                        {DType::kF32, ScaleFormat::kUe8m0}}) {
      Pack p({.x = dtype, .num_tokens = 1, .row_token = {0}, .scale_format = format});
      p.x.fill_constant(0);
      p.x.set(0, static_cast<double>(tiny));
      p.x.set(77, -static_cast<double>(tiny) / 2);
      pack_and_check(p);
      for (std::int64_t h = 0; h < 128; ++h) {
        const double value = p.x.at(h);
        EXPECT_LE(std::fabs(p.dequantised(0, h)), std::fabs(value) * (1 + 0x1p-4)) << value;
        EXPECT_TRUE(value != 0 || p.dequantised(0, h) == 0);
      }
    }
  }
}

TEST(Pack, Case36_OneNaNOrInfinityStaysAlone) {
  const struct {
    float bad;
    std::uint8_t byte;
  } kBad[] = {{kNaN, 0x7F}, {-kNaN, 0xFF}, {kInf, 0x7E}, {-kInf, 0xFE}};
  for (const auto& bad : kBad) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      Pack p({.x = dtype, .num_tokens = 2, .row_token = {0, 1}});
      p.x.fill_constant(1);
      p.x.set(60, static_cast<double>(bad.bad));
      pack_and_check(p);
      EXPECT_EQ(p.scale(0, 0), 1.0f / 448.0f);
      for (std::int64_t h = 0; h < 128; ++h) {
        EXPECT_EQ(p.byte(0, h), h == 60 ? bad.byte : 0x7E);
        EXPECT_EQ(p.byte(1, h), 0x7E);
      }
    }
  }
}

// Scales [T,Hb] row-major or [Hb,T] row-major, as their strides say: three tokens, two blocks, distinct powers of two.
TEST(Pack, Case46_ScalesAreReadByTheirStrides) {
  for (bool swap_in : {false, true}) {
    for (bool swap_out : {false, true}) {
      Pack p({.x = DType::kE4M3,
              .hidden = 256,
              .num_tokens = 3,
              .row_token = {2, 0, 1, 2},
              .swap_x_scale = swap_in,
              .swap_rows_scale = swap_out});
      p.x.fill_constant(1);
      const auto scale_of = [](std::int64_t t, std::int64_t b) {
        return std::ldexp(1.0f, static_cast<int>(t * 2 + b));
      };
      p.x_scale.fill_with([&](std::int64_t i) {
        return static_cast<double>(swap_in ? scale_of(i / 2, i % 2) : scale_of(i % 3, i / 3));
      });
      pack_and_check(p);
      for (std::int64_t r = 0; r < 4; ++r) {
        double sum = 0;
        for (std::int64_t h = 0; h < 256; ++h) sum += p.dequantised(r, h);
        EXPECT_EQ(sum, 128.0 * static_cast<double>(scale_of(p.token(r), 0) + scale_of(p.token(r), 1)));
      }
    }
  }
  // The other order under the wrong name has the wrong shape; under a wrong stride, elements overlap.
  Pack p({.x = DType::kE4M3, .hidden = 256, .num_tokens = 3, .row_token = {2, 0, 1, 2}});
  Args args = p.args();
  std::swap(args.x_scale.shape[0], args.x_scale.shape[1]);
  EXPECT_NE(check(args).message().find("x_scale[Hb,T] f32 axis 0 (Hb) is 3, expected 2"), std::string::npos)
      << check(args).message();
  args = p.args();
  args.x_scale.stride = {2, 1};
  EXPECT_NE(check(args).message().find("has strides 2 and 1 for axes 0 and 1, so that elements overlap"),
            std::string::npos)
      << check(args).message();
  args = p.args();
  args.rows_scale.stride = {1, 1};
  EXPECT_FALSE(check(args));
}

// Columns past H belong to somebody else and are large.
TEST(Pack, Case52_WhatLiesPastTheRowNeverEntersAmax) {
  for (std::int64_t hidden : {3584, 1408, 192, 96}) {
    for (DType dtype : {DType::kBF16, DType::kF32}) {
      Pack p({.x = dtype, .hidden = hidden, .num_tokens = 3, .row_token = {2, 0, 1, 1}});
      Buffer wide(dtype, {3, hidden + 200});
      wide.fill_with([&](std::int64_t i) { return i % (hidden + 200) < hidden ? 0.0 : 3e38; });
      p.x.fill_normal(static_cast<std::uint64_t>(hidden));
      for (std::int64_t i = 0; i < 3 * hidden; ++i) wide.set(i / hidden * (hidden + 200) + i % hidden, p.x.at(i));
      Args args = p.args();
      args.x = wide.view();
      args.x.shape[1] = hidden;
      test::expect_same_every_way(test::on_cpu(impls()), args, {&wide}, {&p.rows, &p.rows_scale});
      expect_right(p);
    }
  }
}

TEST(Pack, Case53_AMissingScaleIsNamed) {
  Pack p({.x = DType::kE4M3, .num_tokens = 1, .row_token = {0}});
  Args args = p.args();
  args.x_scale = {};
  EXPECT_EQ(check(args).message(),
            "pack: x is e4m3[1,128] and x_scale is absent; x_scale must be present exactly when x is e4m3 or i8");
}

TEST(Pack, Case74_SourceAndDestinationOffByOneElementEachAlone) {
  for (const auto& [x, rows] :
       {std::pair{DType::kBF16, DType::kBF16}, {DType::kBF16, DType::kE4M3}, {DType::kF32, DType::kBF16}}) {
    for (std::int64_t x_offset : {0, 1}) {
      Problem problem{.x = x, .rows = rows, .hidden = 46, .num_tokens = 7, .row_token = kTokenOfRow};
      Pack p(problem);
      Buffer moved_x(x, {7, 46}, {.offset_elems = x_offset});
      Buffer moved_rows(rows, {11, 46}, {.offset_elems = 1 - x_offset});
      p.x.fill_normal(1);
      moved_x.fill_normal(1);
      Args args = p.args();
      args.x = moved_x.view();
      args.rows = moved_rows.view();
      test::expect_same_every_way(test::on_cpu(impls()), args, {&moved_x}, {&moved_rows, &p.rows_scale});
      p.run_once();
      EXPECT_TRUE(moved_rows.unchanged_since(p.rows.bytes()));
      expect_right(p);
    }
  }
}

TEST(Pack, Case76_ATokenThatIsPackedTwiceHasTwoEqualRows) {
  Pack p({.hidden = 130, .num_tokens = 1, .row_token = {0, 0, 0, 0, 0, 0}});
  p.x.fill_normal(1);
  pack_and_check(p);
}

TEST(Pack, Case102_TheWeightGoesIntoTheInputOnce) {
  for (DType rows : {DType::kBF16, DType::kF32, DType::kE4M3}) {
    Pack p({.rows = rows, .num_tokens = 1, .row_token = {0}, .weighted = true});
    p.x.fill_constant(2);
    p.weight.fill_constant(0.5);
    pack_and_check(p);
    for (std::int64_t h = 0; h < 128; ++h) {
      if (rows == DType::kE4M3) {
        EXPECT_EQ(p.byte(0, h), 0x7E);
        EXPECT_EQ(p.scale(0, 0), 1.0f / 448.0f);
      } else {
        EXPECT_EQ(p.rows.at(h), 1.0);
      }
    }
  }
}

TEST(Pack, EverySentenceOfCheck) {
  const auto expect = [](const Pack& p, const std::function<void(Args&)>& spoil, const std::string& text) {
    Args args = p.args();
    ASSERT_TRUE(check(args)) << check(args).message();
    spoil(args);
    const Status status = check(args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  const Pack p({.hidden = 200, .num_tokens = 7, .row_token = kTokenOfRow, .weighted = true});
  expect(
      p, [](Args& a) { a.x = {}; }, "pack: x[T,H] f32 or bf16 or e4m3 or i8 is missing");
  expect(
      p, [](Args& a) { a.x_scale = a.rows_scale; }, "x is bf16[7,200] and x_scale is f32[2,11]");
  expect(
      p, [](Args& a) { a.row_token.shape[0] = 10; },
      "rows[R,H] f32 or bf16 or e4m3 or i8 axis 0 (R) is 11, expected 10");
  expect(
      p, [](Args& a) { a.row_token = {}; }, "expected 7 from the T of x, as row_token is absent");
  expect(
      p, [](Args& a) { a.row_token.dtype = DType::kI64; }, "row_token must be i32");
  expect(
      p, [](Args& a) { a.rows.shape[1] = 199; }, "axis 1 (H) is 199, expected 200");
  expect(
      p, [](Args& a) { a.rows.shape[0] = a.row_token.shape[0] = 2147483648; }, "more rows than an i32 can number");
  expect(
      p, [](Args& a) { a.rows_scale = {}; }, "rows is e4m3[11,200] and rows_scale is absent");
  expect(
      p,
      [](Args& a) {
        a.rows.dtype = DType::kBF16;
        a.rows.data = a.x.data;
      },
      "rows_scale is f32[2,11]; rows_scale must be present exactly");
  expect(
      p, [](Args& a) { a.rows_scale.shape[0] = 3; },
      "rows_scale[Hb,R] f32 axis 0 (Hb) is 3, expected 2 from x[T,H] f32 or bf16 or e4m3 or i8 = bf16[7,200]; nor is "
      "it "
      "rows_scale[1,R] f32");
  expect(
      p, [](Args& a) { a.num_rows.shape[0] = 2; }, "num_rows[1] i32 axis 0 (1) is 2, expected 1");
  expect(
      p, [](Args& a) { a.row_slot = {}; }, "weight[T,S] needs row_slot[R], which is missing");
  expect(
      p, [](Args& a) { a.weight.shape[0] = 6; }, "weight[T,S] f32 axis 0 (T) is 6, expected 7");
  expect(
      p, [](Args& a) { a.row_slot.shape[0] = 12; }, "row_slot[R] i32 axis 0 (R) is 12, expected 11");
  const Pack q({.x = DType::kE4M3, .num_tokens = 7, .row_token = kTokenOfRow});
  expect(
      q, [&](Args& a) { a.weight = p.weight.view(); }, "weight cannot be applied to an x that is e4m3 already");
  expect(
      q, [](Args& a) { a.rows.dtype = DType::kU8; }, "rows must be ");
  expect(
      q,
      [&](Args& a) {
        a.rows = Buffer(DType::kBF16, {11, 128}).view();
        a.rows_scale = {};
      },
      "x is e4m3, so rows must be e4m3, got bf16[11,128]");
  Args planned = p.args();
  planned.x.data = nullptr;
  EXPECT_TRUE(check(planned, Phase::kPlan));
}

}  // namespace
}  // namespace sluice::pack
