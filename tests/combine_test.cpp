// Stage 9, combine.
#include "sluice/stage/combine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "harness/buffer.h"
#include "harness/codec.h"
#include "harness/every_way.h"
#include "harness/sparse.h"

namespace sluice::combine {
namespace {

using test::Buffer;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Problem {
  DType y = DType::kBF16;
  DType out = DType::kBF16;
  std::int64_t hidden = 128;
  std::int64_t num_slots = 1;
  std::vector<std::int32_t> slot_row;  // [T,S]
  std::int64_t num_rows = 0;           // R
  bool unweighted = false;
  std::optional<DType> shared;
  bool gated = false;
  bool accumulate = false;
  std::int64_t gap = 0;
  std::int64_t offset = 0;
};

struct Combine {
  explicit Combine(Problem p)
      : problem(std::move(p)),
        num_tokens(problem.num_slots > 0 ? std::ssize(problem.slot_row) / problem.num_slots : 3),
        y(problem.y, {problem.num_rows, problem.hidden}, options(1)),
        slot_row(DType::kI32, {num_tokens, problem.num_slots}, {.row_pitch_elems = problem.num_slots + problem.gap}),
        topk_weight(DType::kF32, {num_tokens, problem.num_slots},
                    {.row_pitch_elems = problem.num_slots + 2 * problem.gap}),
        shared(problem.shared.value_or(DType::kF32), {num_tokens, problem.hidden}, options(2)),
        shared_gate(DType::kF32, {num_tokens, 1}, {.row_pitch_elems = 1 + problem.gap}),
        out(problem.out, {num_tokens, problem.hidden}, options(3)) {
    for (std::int64_t i = 0; i < std::ssize(problem.slot_row); ++i)
      slot_row.set(i, problem.slot_row[static_cast<std::size_t>(i)]);
    y.fill_normal(1);
    topk_weight.fill_uniform(2, 0, 1);
    shared.fill_normal(3);
    shared_gate.fill_normal(4, 3);
    if (problem.accumulate) out.fill_normal(5);
  }
  test::BufferOptions options(std::int64_t gaps) const {
    return {.row_pitch_elems = problem.hidden + gaps * problem.gap, .offset_elems = problem.offset};
  }

  Args args() const {
    Args a;
    a.y = y.view();
    a.slot_row = slot_row.view();
    a.unweighted = problem.unweighted;
    if (!problem.unweighted) a.topk_weight = topk_weight.view();
    if (problem.shared) a.shared = shared.view();
    if (problem.gated) a.shared_gate = shared_gate.view();
    a.accumulate = problem.accumulate;
    a.out = out.view();
    return a;
  }
  void run_every_way() const {
    test::expect_same_every_way(test::on_cpu(impls()), args(), {&y, &slot_row, &topk_weight, &shared, &shared_gate},
                                {&out});
  }
  void run_once(int num_threads = 1) const {
    ASSERT_TRUE(check(args())) << check(args()).message();
    ASSERT_TRUE(test::run_with_scratch(test::on_cpu(impls()).front(), args(), num_threads));
  }

  Problem problem;
  std::int64_t num_tokens;
  Buffer y, slot_row, topk_weight, shared, shared_gate, out;
};

// Each output against the sum in double: S + 2 fp32 roundings, the gate within 2 units in the last place, one rounding
// to the output. `before` is what out held.
void expect_right(const Combine& c, const Buffer& before) {
  const std::int64_t hidden = c.problem.hidden;
  for (std::int64_t t = 0; t < c.num_tokens; ++t) {
    for (std::int64_t h = 0; h < hidden; ++h) {
      double sum = 0;
      double magnitude = 0;
      const auto add = [&](double term) {
        sum += term;
        magnitude += std::fabs(term);
      };
      bool any = c.problem.shared.has_value();
      for (std::int64_t s = 0; s < c.problem.num_slots; ++s) {
        const auto row = static_cast<std::int64_t>(c.slot_row.at(t * c.problem.num_slots + s));
        if (row < 0) continue;
        any = true;
        add(c.y.at(row * hidden + h) * (c.problem.unweighted ? 1 : c.topk_weight.at(t * c.problem.num_slots + s)));
      }
      if (c.problem.shared)
        add(c.shared.at(t * hidden + h) * (c.problem.gated ? 1 / (1 + std::exp(-c.shared_gate.at(t))) : 1));
      if (c.problem.accumulate) add(before.at(t * hidden + h));
      const double got = c.out.at(t * hidden + h);
      if (!any) {
        ASSERT_EQ(got, c.problem.accumulate ? before.at(t * hidden + h) : 0.0) << "token " << t << ", column " << h;
        continue;
      }
      const double roundings = static_cast<double>(c.problem.num_slots + 6);
      const double bound = roundings * 0x1p-24 * magnitude +
                           (c.problem.out == DType::kBF16 ? 0x1.01p-9 * std::fabs(sum) * 2 : 0) + 1e-38;
      ASSERT_LE(std::fabs(got - sum), bound) << "token " << t << ", column " << h << ": " << got << " for " << sum;
    }
  }
}

void run_and_check(const Combine& c) {
  const Buffer before = c.out.clone();
  c.run_every_way();
  if (!testing::Test::HasFailure()) expect_right(c, before);
}

// 5 tokens of 3 slots over 9 rows: in no order, with absent slots, one token without any.
const std::vector<std::int32_t> kSlotRow = {4, 0, 7, -1, 3, 1, -1, -1, -1, 8, -1, -1, 2, 5, 6};

TEST(Combine, EveryDtypeSizeAndOption) {
  std::uint64_t seed = 0;
  for (DType y : {DType::kBF16, DType::kF32}) {
    for (DType out : {DType::kBF16, DType::kF32}) {
      for (std::int64_t hidden : {1, 46, 127, 128, 129, 200, 384}) {
        for (int option = 0; option < 6; ++option) {
          ++seed;
          Problem problem{.y = y, .out = out, .hidden = hidden, .num_slots = 3, .slot_row = kSlotRow, .num_rows = 9};
          problem.unweighted = seed % 5 == 0;
          if (option % 3 > 0) problem.shared = seed % 2 == 0 ? DType::kBF16 : DType::kF32;
          problem.gated = option % 3 == 2;
          problem.accumulate = option >= 3;
          problem.gap = static_cast<std::int64_t>(seed % 3);
          problem.offset = static_cast<std::int64_t>(seed % 2);
          SCOPED_TRACE(testing::Message()
                       << to_string(y) << " to " << to_string(out) << ", H = " << hidden << ", option " << option);
          run_and_check(Combine(problem));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Bits, not values: special values included, the same on every target.
TEST(Combine, AnyBitsAtAll) {
  for (DType y : {DType::kBF16, DType::kF32}) {
    for (DType out : {DType::kBF16, DType::kF32}) {
      for (bool gated : {false, true}) {
        Combine c({.y = y,
                   .out = out,
                   .hidden = 500,
                   .num_slots = 3,
                   .slot_row = kSlotRow,
                   .num_rows = 9,
                   .shared = y,
                   .gated = gated,
                   .accumulate = gated});
        c.y.fill_random_bits(1);
        c.shared.fill_random_bits(2);
        c.topk_weight.fill_random_bits(3);
        c.shared_gate.fill_random_bits(4);
        c.out.fill_random_bits(5);
        c.run_every_way();
      }
    }
  }
}

// Slots are added in their order with one fused rounding each; another order or a separate product shows.
TEST(Combine, TheSumIsFusedAndInSlotOrder) {
  Combine fused({.y = DType::kF32, .out = DType::kF32, .hidden = 1, .num_slots = 2, .slot_row = {1, 0}, .num_rows = 2});
  fused.y.fill_values({1 + 0x1p-12, -1});
  fused.topk_weight.fill_values({1, 1 + 0x1p-13});
  fused.run_every_way();
  EXPECT_EQ(fused.out.at(0), 0x1p-12 + 0x1p-13 + 0x1p-25);  // the last term is lost when the product is rounded first
  Combine order(
      {.y = DType::kF32, .out = DType::kF32, .hidden = 1, .num_slots = 3, .slot_row = {2, 0, 1}, .num_rows = 3});
  order.y.fill_values({-16777216, 1, 16777216});
  order.topk_weight.fill_constant(1);
  order.run_every_way();
  EXPECT_EQ(order.out.at(0), 1.0);  // 2^24 + 1 would be 2^24
}

TEST(Combine, ManyTokensManySlots) {
  std::vector<std::int32_t> slot_row;
  for (std::int32_t i = 0; i < 300 * 40; ++i) slot_row.push_back(i % 7 == 0 ? -1 : i * 31 % 500);
  run_and_check(Combine({.hidden = 150, .num_slots = 40, .slot_row = slot_row, .num_rows = 500}));
}

TEST(Combine, NoTokensNoRowsNoSlots) {
  run_and_check(Combine({.num_slots = 2, .slot_row = {}, .num_rows = 4}));
  run_and_check(Combine({.num_slots = 2, .slot_row = {-1, -1}, .num_rows = 0}));
  run_and_check(Combine({.num_slots = 0, .slot_row = {}, .num_rows = 2}));
  Combine none({.num_slots = 2, .slot_row = {}, .num_rows = 0});
  Args args = none.args();
  args.y.data = args.slot_row.data = args.topk_weight.data = args.out.data = nullptr;
  for (const Impl<Args>& impl : test::on_cpu(impls())) {
    ASSERT_TRUE(check(args));
    EXPECT_TRUE(test::run_with_scratch(impl, args, 2));
  }
}

TEST(Combine, BatchInvariance) {
  Combine all(
      {.hidden = 200, .num_slots = 3, .slot_row = kSlotRow, .num_rows = 9, .shared = DType::kBF16, .gated = true});
  all.run_once(2);
  for (std::int64_t t = 0; t < all.num_tokens; ++t) {
    Buffer out(DType::kBF16, {1, 200});
    Args args = all.args();
    for (TensorView* view : {&args.slot_row, &args.topk_weight, &args.shared, &args.shared_gate})
      *view = view->slice(t, 1);
    args.out = out.view();
    ASSERT_TRUE(check(args));
    ASSERT_TRUE(test::run_with_scratch(test::on_cpu(impls()).front(), args, 1));
    EXPECT_EQ(std::memcmp(out.view().data, all.out.view().row(t), 400), 0) << "token " << t;
  }
}

TEST(Combine, NonFiniteRowsReachTheirOwnTokenOnly) {
  for (float bad : {kNaN, kInf, -kInf}) {
    Combine clean({.hidden = 130, .num_slots = 3, .slot_row = kSlotRow, .num_rows = 9});
    Combine c({.hidden = 130, .num_slots = 3, .slot_row = kSlotRow, .num_rows = 9});
    clean.run_once();
    for (std::int64_t h = 0; h < 130; ++h) c.y.set(3 * 130 + h, static_cast<double>(bad));  // token 1, slot 1
    c.run_every_way();
    for (std::int64_t t = 0; t < 5; ++t) {
      for (std::int64_t h = 0; h < 130; ++h) {
        const double want = t == 1 ? static_cast<double>(bad) : clean.out.at(t * 130 + h);
        const double got = c.out.at(t * 130 + h);
        EXPECT_TRUE(std::isnan(want) ? std::isnan(got) : got == want) << "token " << t;
      }
    }
  }
}

TEST(Combine, RefusesRowsThatLeadOutside) {
  for (std::int32_t bad : {9, -2, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
    Combine c({.num_slots = 3, .slot_row = kSlotRow, .num_rows = 9});
    c.slot_row.set(13, bad);
    for (const Impl<Args>& impl : test::on_cpu(impls())) {
      const Status status = test::run_with_scratch(impl, c.args(), 2);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(status.message(),
                "combine: slot_row of token 4, slot 1 is " + std::to_string(bad) + ", expected -1 or 0 to 8");
      EXPECT_TRUE(c.out.rows_untouched(0));
    }
  }
}

TEST(Combine, Case28_RowsNobodyWroteAreNotRead) {
  // Groups of 3, 0, 5, 0 rows in a capacity of 512; 4 tokens of 2 slots.
  for (int again = 0; again < 2; ++again) {
    Combine c({.num_slots = 2, .slot_row = {0, 3, 1, 4, 5, 6, 2, 7}, .num_rows = 512});
    c.y.poison(8);
    run_and_check(c);
    for (double v : c.out.to_doubles()) EXPECT_TRUE(std::isfinite(v));
  }
}

TEST(Combine, Case74_EachTensorOffByOneElementAlone) {
  Combine plain({.hidden = 46, .num_slots = 3, .slot_row = kSlotRow, .num_rows = 9, .shared = DType::kBF16});
  plain.run_once();
  Combine moved(
      {.hidden = 46, .num_slots = 3, .slot_row = kSlotRow, .num_rows = 9, .shared = DType::kBF16, .offset = 1});
  for (int which = 0; which < 3; ++which) {
    Args args = plain.args();
    const Buffer& out = which == 2 ? moved.out : plain.out;
    if (which == 0) args.y = moved.y.view();
    if (which == 1) args.shared = moved.shared.view();
    args.out = out.view();
    const auto want = plain.out.bytes();
    test::expect_same_every_way(test::on_cpu(impls()), args, {&plain.y, &plain.shared}, {&out});
    EXPECT_TRUE(out.unchanged_since(want));
  }
}

TEST(Combine, Case76_BothSlotsOfADuplicateIdCount) {
  Combine c({.num_slots = 2, .slot_row = {0, 1}, .num_rows = 2});
  c.y.fill_with([](std::int64_t i) { return static_cast<double>(i % 128); });  // the same row twice
  c.topk_weight.fill_values({0.25, 0.75});
  run_and_check(c);
  for (std::int64_t h = 0; h < 128; ++h) EXPECT_EQ(c.out.at(h), static_cast<double>(h));
}

// The factor is in the weights already; combine neither knows nor repeats it.
TEST(Combine, Case90_TheScalingFactorIsAppliedOnce) {
  for (double factor : {2.5, 1.5}) {
    Combine c({.out = DType::kF32, .num_slots = 2, .slot_row = {0, 1}, .num_rows = 2});
    c.y.fill_with([](std::int64_t i) { return static_cast<double>(i % 128); });
    c.topk_weight.fill_values({0.5 * factor, 0.5 * factor});
    run_and_check(c);
    for (std::int64_t h = 0; h < 128; ++h) EXPECT_EQ(c.out.at(h), factor * static_cast<double>(h));
  }
}

TEST(Combine, Case92_TheSharedExpertIsNotScaled) {
  for (bool with_routed : {false, true}) {
    Combine c({.num_slots = 2,
               .slot_row = {with_routed ? 0 : -1, with_routed ? 1 : -1},
               .num_rows = 2,
               .shared = DType::kBF16});
    c.y.fill_constant(0);
    c.topk_weight.fill_constant(1.25);
    run_and_check(c);
    EXPECT_TRUE(c.out.unchanged_since(c.shared.bytes()));
  }
}

TEST(Combine, Case96_AbsentSlotsAreSkippedWhateverTheirWeight) {
  for (float ignored : {kNaN, kInf, 3.0f}) {
    Combine two({.hidden = 200, .num_slots = 2, .slot_row = {0, -1}, .num_rows = 3});
    two.y.poison(1);
    two.topk_weight.fill_values({0.625, static_cast<double>(ignored)});
    two.run_every_way();
    Combine one({.hidden = 200, .num_slots = 1, .slot_row = {0}, .num_rows = 1});
    one.topk_weight.fill_values({0.625});
    std::memcpy(one.y.view().data, two.y.view().data, 400);
    run_and_check(one);
    EXPECT_TRUE(two.out.unchanged_since(one.out.bytes()));
  }
}

TEST(Combine, Case97_TokensWithoutALocalExpert) {
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    for (bool accumulate : {false, true}) {
      Combine c({.out = dtype,
                 .hidden = 130,
                 .num_slots = 2,
                 .slot_row = {0, 1, 2, -1, -1, -1, 3, 4},
                 .num_rows = 5,
                 .accumulate = accumulate});
      // Accumulating leaves even -0 and signalling NaN as they are.
      if (accumulate) test::fill_random_bits(c.out.view().slice(2, 1), 8);
      if (accumulate) c.out.set(2 * 130 + 5, -0.0);
      const auto before = c.out.clone();
      c.run_every_way();
      const auto row_bytes = static_cast<std::size_t>(130 * size_bytes(dtype));
      if (accumulate) {
        EXPECT_EQ(std::memcmp(c.out.view().row(2), before.view().row(2), row_bytes), 0);
      } else {
        for (std::size_t i = 0; i < row_bytes; ++i) EXPECT_EQ(c.out.view().row(2)[i], std::byte{0});
      }
    }
  }
}

TEST(Combine, Case98_TheSumIsKeptInF32) {
  Combine c({.num_slots = 8, .slot_row = {0, 1, 2, 3, 4, 5, 6, 7}, .num_rows = 8, .unweighted = true});
  c.y.fill_with([](std::int64_t i) { return i < 128 ? 1.0 : 0x1p-9; });
  run_and_check(c);
  for (std::int64_t h = 0; h < 128; ++h) EXPECT_EQ(c.out.at(h), 1.015625);
}

TEST(Combine, Case104_MissingWeightsAreAnErrorUnlessUnweightedIsAskedFor) {
  Combine c({.num_slots = 2, .slot_row = {0, 1}, .num_rows = 2});
  Args args = c.args();
  args.topk_weight = {};
  EXPECT_EQ(check(args).message(), "combine: topk_weight[T,S] is missing, and unweighted was not asked for");
  args.unweighted = true;
  EXPECT_TRUE(check(args));
  args.topk_weight = c.topk_weight.view();
  EXPECT_EQ(check(args).message(), "combine: unweighted was asked for, but topk_weight is f32[1,2]");
}

// Ids [1,2] and [2,2] give these rows; expert e returns e + 1 for every row.
TEST(Combine, Case105_RepeatedExpertsLoseNothing) {
  Combine c({.num_slots = 2, .slot_row = {0, 1, 2, 3}, .num_rows = 4});
  c.y.fill_with([](std::int64_t i) { return i < 128 ? 2.0 : 3.0; });
  c.topk_weight.fill_values({0.5, 0.25, 0.5, 0.25});
  run_and_check(c);
  for (std::int64_t h = 0; h < 128; ++h) {
    EXPECT_EQ(c.out.at(h), 1.75);
    EXPECT_EQ(c.out.at(128 + h), 2.25);
  }
}

// y as top-10 rows of 65536 tokens: 5 GB of address space, of which the rows of three tokens are touched.
TEST(Combine, Case106_RowOffsetsBeyond32Bits) {
  constexpr std::int64_t kTokens = 65536;
  constexpr std::int64_t kSlots = 10;
  constexpr std::int64_t kHidden = 4096;
  const test::SparseMemory memory(kTokens * kSlots * kHidden * 2);
  if (!memory) GTEST_SKIP() << "no 5 GB of address space";
  const TensorView y = TensorView::dense(memory.data(), DType::kBF16, {kTokens * kSlots, kHidden});
  const TensorView by_token = TensorView::dense(memory.data(), DType::kBF16, {kTokens, kSlots * kHidden});
  EXPECT_EQ((by_token.row(52428) - memory.data()) / 2, 2147450880);
  EXPECT_EQ((by_token.row(52429) - memory.data()) / 2, 2147491840);

  std::vector<std::int32_t> low;
  std::vector<std::int32_t> high;
  for (std::int32_t i = 0; i < 30; ++i) {
    const std::int32_t token = i < 10 ? 52428 : i < 20 ? 52429 : 65535;
    low.push_back(i);
    high.push_back(token * 10 + i % 10);
  }
  Combine want({.hidden = kHidden, .num_slots = kSlots, .slot_row = low, .num_rows = 30});
  want.run_once();
  for (std::int64_t i = 0; i < 30; ++i)
    std::memcpy(y.row(high[static_cast<std::size_t>(i)]), want.y.view().row(i), kHidden * 2);
  Combine c({.hidden = kHidden, .num_slots = kSlots, .slot_row = high, .num_rows = 0});
  Args args = c.args();
  args.y = y;
  for (const Impl<Args>& impl : test::on_cpu(impls())) {
    c.out.poison();
    ASSERT_TRUE(check(args)) << check(args).message();
    ASSERT_TRUE(test::run_with_scratch(impl, args, 2));
    EXPECT_TRUE(c.out.unchanged_since(want.out.bytes())) << impl.name;
  }
}

TEST(Combine, EverySentenceOfCheck) {
  const Combine c(
      {.hidden = 200, .num_slots = 3, .slot_row = kSlotRow, .num_rows = 9, .shared = DType::kBF16, .gated = true});
  const auto expect = [&](const std::function<void(Args&)>& spoil, const std::string& text) {
    Args args = c.args();
    ASSERT_TRUE(check(args)) << check(args).message();
    spoil(args);
    const Status status = check(args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  expect([](Args& a) { a.y = {}; }, "combine: y[R,H] f32 or bf16 is missing");
  expect([](Args& a) { a.y.dtype = DType::kE4M3; }, "y must be f32 or bf16, got e4m3[9,200]");
  expect([](Args& a) { a.slot_row = {}; }, "slot_row[T,S] i32 is missing");
  expect([](Args& a) { a.slot_row.dtype = DType::kU32; }, "slot_row must be i32, got u32");
  expect([](Args& a) { a.topk_weight.shape[1] = 2; }, "topk_weight[T,S] f32 axis 1 (S) is 2, expected 3");
  expect([](Args& a) { a.topk_weight.dtype = DType::kBF16; }, "topk_weight must be f32, got bf16");
  expect([](Args& a) { a.shared.shape[1] = 100; }, "shared[T,H] f32 or bf16 axis 1 (H) is 100, expected 200");
  expect([](Args& a) { a.shared = {}; }, "shared_gate[T,1] needs shared[T,H], which is missing");
  expect([](Args& a) { a.shared_gate.shape[0] = 4; }, "shared_gate[T,1] f32 axis 0 (T) is 4, expected 5");
  expect([](Args& a) { a.out.shape[0] = 6; }, "out[T,H] f32 or bf16 axis 0 (T) is 6, expected 5");
  expect(
      [](Args& a) {
        a.out.stride = {100, 1};
      },
      "out[T,H] f32 or bf16 axis 0 has stride 100 elements, expected at least 200");
  expect([](Args& a) { a.out.data = nullptr; }, "out is a null pointer");
  expect([](Args& a) { a.out.data = static_cast<std::byte*>(a.out.data) + 1; },
         "out is at an address that is 1 bytes off the 2 bytes");
  Args planned = c.args();
  planned.y.data = nullptr;
  EXPECT_TRUE(check(planned, Phase::kPlan));
}

}  // namespace
}  // namespace sluice::combine
