// Stage 2, route.
#include "sluice/stage/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "harness/buffer.h"
#include "harness/every_way.h"

namespace sluice::route {
namespace {

using test::Buffer;

struct Problem {
  std::int64_t num_tokens = 0;
  std::int64_t num_slots = 0;
  std::int64_t num_experts = 0;
  std::int64_t first_expert = 0;
  std::int64_t num_local = 0;
  std::int64_t spare_rows = 0;  // capacity beyond T*S
  std::int64_t pitch_gap = 0;   // elements between rows of [T,S] tensors
};

struct Plan {
  explicit Plan(const Problem& p)
      : problem(p),
        ids(DType::kI32, {p.num_tokens, p.num_slots}, {.row_pitch_elems = p.num_slots + p.pitch_gap}),
        expert_offset(DType::kI32, {p.num_local + 1}),
        row_token(DType::kI32, {p.num_tokens * p.num_slots + p.spare_rows}),
        row_slot(DType::kI32, {p.num_tokens * p.num_slots + p.spare_rows}),
        slot_row(DType::kI32, {p.num_tokens, p.num_slots}, {.row_pitch_elems = p.num_slots + 2 * p.pitch_gap}),
        num_rows(DType::kI32, {1}),
        counters(DType::kI64, {kNumCounters}) {
    counters.fill_constant(1000);
  }

  Args args() const {
    return {.topk_idx = {ids.view()},
            .num_experts = problem.num_experts,
            .first_expert = problem.first_expert,
            .plan = {{expert_offset.view()}, row_token.view(), row_slot.view(), slot_row.view(), num_rows.view()},
            .counters = counters.view()};
  }
  std::vector<const Buffer*> outputs() const {
    return {&expert_offset, &row_token, &row_slot, &slot_row, &num_rows, &counters};
  }
  std::int32_t rows() const { return num_rows.as<std::int32_t>()[0]; }
  std::int64_t num_invalid() const {
    return counters.as<std::int64_t>()[static_cast<int>(Counter::kInvalidIds)] - 1000;
  }
  std::vector<std::int32_t> values(const Buffer& b) const {
    std::vector<std::int32_t> v;
    for (double x : b.to_doubles()) v.push_back(static_cast<std::int32_t>(x));
    return v;
  }
  std::vector<std::int32_t> first(const Buffer& b, std::int64_t n) const {
    auto v = values(b);
    v.resize(static_cast<std::size_t>(n));
    return v;
  }

  Problem problem;
  Buffer ids, expert_offset, row_token, row_slot, slot_row, num_rows, counters;
};

// What the plan must be, by std::stable_sort; and that nothing else was written.
void expect_right(const Plan& run) {
  const Problem& p = run.problem;
  const std::vector<std::int32_t> ids = run.values(run.ids);
  std::vector<std::int32_t> order;
  std::int64_t num_invalid = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= p.first_expert && ids[i] < p.first_expert + p.num_local)
      order.push_back(static_cast<std::int32_t>(i));
    if (ids[i] < -1 || ids[i] >= p.num_experts) ++num_invalid;
  }
  const auto id_of = [&](std::int32_t i) { return ids[static_cast<std::size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return id_of(a) < id_of(b); });

  ASSERT_EQ(run.rows(), static_cast<std::int32_t>(order.size()));
  EXPECT_EQ(run.first(run.row_slot, run.rows()), order);
  std::vector<std::int32_t> slot_row(ids.size(), -1);
  std::vector<std::int32_t> tokens;
  for (std::size_t r = 0; r < order.size(); ++r) {
    slot_row[static_cast<std::size_t>(order[r])] = static_cast<std::int32_t>(r);
    tokens.push_back(order[r] / static_cast<std::int32_t>(p.num_slots));
  }
  EXPECT_EQ(run.first(run.row_token, run.rows()), tokens);
  EXPECT_EQ(run.values(run.slot_row), slot_row);
  const std::vector<std::int32_t> offset = run.values(run.expert_offset);
  for (std::int64_t e = 0; e <= p.num_local; ++e) {
    const auto below =
        std::count_if(order.begin(), order.end(), [&](std::int32_t i) { return id_of(i) < p.first_expert + e; });
    EXPECT_EQ(offset[static_cast<std::size_t>(e)], below) << "expert " << e;
  }
  EXPECT_TRUE(run.row_token.rows_untouched(run.rows()));
  EXPECT_TRUE(run.row_slot.rows_untouched(run.rows()));
  EXPECT_EQ(run.num_invalid(), num_invalid);
  EXPECT_EQ(run.counters.as<std::int64_t>()[static_cast<int>(Counter::kNonFiniteTokens)], 1000);
}

void route_and_check(const Plan& run) {
  test::expect_same_every_way(test::on_cpu(impls()), run.args(), {&run.ids}, run.outputs());
  if (!testing::Test::HasFailure()) expect_right(run);
}

TEST(Route, ManyShapes) {
  const Problem problems[] = {
      {.num_tokens = 1, .num_slots = 1, .num_experts = 1, .num_local = 1},
      {.num_tokens = 1, .num_slots = 8, .num_experts = 256, .num_local = 256, .spare_rows = 5},
      {.num_tokens = 17, .num_slots = 3, .num_experts = 9, .num_local = 9, .pitch_gap = 2},
      {.num_tokens = 64, .num_slots = 6, .num_experts = 72, .first_expert = 24, .num_local = 24, .pitch_gap = 1},
      {.num_tokens = 129, .num_slots = 2, .num_experts = 5, .first_expert = 4, .num_local = 1},
      {.num_tokens = 7, .num_slots = 2, .num_experts = 5, .first_expert = 5, .num_local = 0},
      {.num_tokens = 40, .num_slots = 4, .num_experts = 896, .first_expert = 890, .num_local = 6},
  };
  std::uint64_t seed = 0;
  for (const Problem& p : problems) {
    for (const bool with_bad_ids : {false, true}) {
      Plan run(p);
      run.ids.fill_integers(++seed, with_bad_ids ? -3 : 0, p.num_experts - (with_bad_ids ? -2 : 1));
      route_and_check(run);
    }
  }
}

// Enough slots for several chunks, with a boundary inside every expert.
TEST(Route, ManyThreadsGiveTheSamePlan) {
  Plan run({.num_tokens = 9001, .num_slots = 8, .num_experts = 37, .first_expert = 3, .num_local = 30, .pitch_gap = 1});
  run.ids.fill_integers(5, -2, 38);
  const Machine machine = Machine::detect_cpu(3);
  EXPECT_NE(test::on_cpu(impls()).front().describe(run.args(), machine).find("3 chunks"), std::string::npos);
  route_and_check(run);
}

TEST(Route, FewerScratchBytesThanThreadsWouldTakeIsEnough) {
  Plan run({.num_tokens = 9001, .num_slots = 8, .num_experts = 4, .num_local = 4});
  run.ids.fill_integers(6, -1, 3);
  const Impl<Args>& impl = test::on_cpu(impls()).front();
  std::vector<std::byte> scratch(static_cast<std::size_t>(impl.scratch_bytes(run.args(), Machine::detect_cpu(1))));
  ASSERT_TRUE(impl.run(run.args(), {nullptr, scratch, 7}));
  expect_right(run);
  const Status refused = impl.run(run.args(), {nullptr, {scratch.data(), scratch.size() - 64}, 7});
  EXPECT_EQ(refused.code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_NE(refused.message().find(std::to_string(scratch.size())), std::string::npos) << refused.message();
}

TEST(Route, NoTokensNoSlotsNobody) {
  route_and_check(Plan({.num_tokens = 0, .num_slots = 8, .num_experts = 16, .num_local = 16, .spare_rows = 3}));
  route_and_check(Plan({.num_tokens = 4, .num_slots = 0, .num_experts = 16, .num_local = 16, .spare_rows = 3}));
  Plan all_absent({.num_tokens = 5, .num_slots = 2, .num_experts = 4, .num_local = 4});
  all_absent.ids.fill_constant(-1);
  route_and_check(all_absent);
  // Empty tensors may come with null pointers.
  Plan empty({.num_tokens = 0, .num_slots = 8, .num_experts = 16, .num_local = 16});
  Args args = empty.args();
  for (TensorView* view : {&args.topk_idx.view, &args.plan.row_token, &args.plan.row_slot, &args.plan.slot_row}) {
    view->data = nullptr;
  }
  for (const Impl<Args>& impl : test::on_cpu(impls())) {
    ASSERT_TRUE(check(args));
    ASSERT_TRUE(test::run_with_scratch(impl, args, 2));
    EXPECT_EQ(empty.rows(), 0);
  }
}

TEST(Route, CheckedRefusesAndWritesNothing) {
  for (const bool late : {false, true}) {
    // The late one lies in the last chunk of several.
    Plan run({.num_tokens = 9001, .num_slots = 8, .num_experts = 8, .num_local = 8});
    run.ids.fill_integers(7, -1, 7);
    const std::int64_t t = late ? 8999 : 3;
    run.ids.set(t * 8 + 5, 8);
    run.ids.set(9000 * 8 + 7, -2);
    run.counters.poison();
    Args args = run.args();
    args.checked = true;
    for (const Impl<Args>& impl : test::on_cpu(impls())) {
      const Status status = test::run_with_scratch(impl, args, 3);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(status.message(),
                "route: topk_idx of token " + std::to_string(t) + ", slot 5 is 8, expected -1 or 0 to 7");
      for (const Buffer* b : run.outputs()) EXPECT_TRUE(b->rows_untouched(0));
    }
  }
  Plan fine({.num_tokens = 2, .num_slots = 2, .num_experts = 4, .num_local = 4});
  fine.ids.fill_values({-1, 3, 0, 0});
  Args args = fine.args();
  args.checked = true;
  test::expect_same_every_way(test::on_cpu(impls()), args, {&fine.ids}, fine.outputs());
  expect_right(fine);
}

TEST(Route, Case20_IdsFromStaleMemoryAreCountedNotFollowed) {
  Plan run({.num_tokens = 3, .num_slots = 3, .num_experts = 8, .num_local = 8});
  const double int32_min = std::numeric_limits<std::int32_t>::min();
  run.ids.fill_values({1, 8, 2, 9, 0, 1073741824.0, int32_min, 7, 1});
  route_and_check(run);
  EXPECT_EQ(run.num_invalid(), 4);
  EXPECT_EQ(run.rows(), 5);
  EXPECT_EQ(run.values(run.slot_row), (std::vector<std::int32_t>{1, -1, 3, -1, 0, -1, -1, 4, 2}));
}

TEST(Route, Case21_EveryTokenOfAnExpertSurvives) {
  Plan run({.num_tokens = 4, .num_slots = 1, .num_experts = 1, .num_local = 1, .spare_rows = 12});
  run.ids.fill_constant(0);
  route_and_check(run);
  EXPECT_EQ(run.first(run.row_token, 4), (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_TRUE(run.row_token.rows_untouched(4));
}

TEST(Route, Case22_MoreThan65535Slots) {
  for (const bool all_to_one : {false, true}) {
    Plan run({.num_tokens = 8193, .num_slots = 8, .num_experts = 256, .num_local = 256});
    run.ids.fill_with([&](std::int64_t i) { return all_to_one ? 7.0 : static_cast<double>(i % 256); });
    for (const Impl<Args>& impl : test::on_cpu(impls())) {
      ASSERT_TRUE(check(run.args()));
      run.counters.fill_constant(1000);
      ASSERT_TRUE(test::run_with_scratch(impl, run.args(), 3));
      const std::vector<std::int32_t> offset = run.values(run.expert_offset);
      for (std::size_t e = 0; e < 256; ++e) {
        const int want = all_to_one ? (e == 7 ? 65544 : 0) : (e < 8 ? 257 : 256);
        ASSERT_EQ(offset[e + 1] - offset[e], want) << impl.name << ", expert " << e;
      }
    }
    const std::vector<std::int32_t> slots = run.values(run.row_slot);
    EXPECT_EQ(std::set<std::int32_t>(slots.begin(), slots.end()).size(), 65544u);
  }
}

TEST(Route, Case24_ExpertCountThatIsNoMultipleOfATile) {
  Plan run({.num_tokens = 15, .num_slots = 1, .num_experts = 5, .num_local = 5});
  run.ids.fill_with([](std::int64_t i) { return static_cast<double>(i * 2 % 5); });
  route_and_check(run);
  EXPECT_EQ(run.values(run.expert_offset), (std::vector<std::int32_t>{0, 3, 6, 9, 12, 15}));
}

TEST(Route, Case25_CountsDoNotDependOnWhatRanBefore) {
  Plan a({.num_tokens = 9, .num_slots = 4, .num_experts = 12, .num_local = 12});
  Plan b({.num_tokens = 5, .num_slots = 2, .num_experts = 12, .num_local = 12});
  a.ids.fill_integers(1, 0, 11);
  b.ids.fill_integers(2, 0, 11);
  const Impl<Args>& impl = test::on_cpu(impls()).front();
  // One workspace for all three calls, dirty from the start and never cleaned.
  std::vector<std::byte> scratch(static_cast<std::size_t>(impl.scratch_bytes(a.args(), Machine::detect_cpu(3))),
                                 std::byte{0xA5});
  const Ctx ctx{nullptr, scratch, 3};
  ASSERT_TRUE(impl.run(a.args(), ctx));
  expect_right(a);
  const auto first = a.row_slot.bytes();
  ASSERT_TRUE(impl.run(b.args(), ctx));
  expect_right(b);
  a.row_slot.poison();
  a.counters.fill_constant(1000);
  ASSERT_TRUE(impl.run(a.args(), ctx));
  expect_right(a);
  EXPECT_TRUE(a.row_slot.unchanged_since(first));
}

// There is no padding between experts, so capacity is exactly the number of slots: every way to deal n slots to E
// experts is a plan of n rows. The report's sizes need 9, 24, 12 and 37 rows here, not 128, 144, 24 and 72.
TEST(Route, Case26_CapacityIsTheNumberOfSlots) {
  for (const auto& [n, num_experts] : {std::pair{9, 3}, {6, 4}, {5, 5}, {1, 8}}) {
    Plan run({.num_tokens = n, .num_slots = 1, .num_experts = num_experts, .num_local = num_experts});
    ASSERT_TRUE(check(run.args()));
    std::vector<int> ids(static_cast<std::size_t>(n), 0);  // ascending: one vector of counts each
    for (bool more = true; more;) {
      for (int i = 0; i < n; ++i) run.ids.set(i, ids[static_cast<std::size_t>(i)]);
      run.counters.fill_constant(1000);
      run.row_token.poison();
      run.row_slot.poison();
      ASSERT_TRUE(test::run_with_scratch(test::on_cpu(impls()).front(), run.args(), 1));
      ASSERT_EQ(run.rows(), n);
      expect_right(run);
      int i = n - 1;
      while (i >= 0 && ids[static_cast<std::size_t>(i)] == num_experts - 1) --i;
      more = i >= 0;
      if (more) std::fill(ids.begin() + i, ids.end(), ids[static_cast<std::size_t>(i)] + 1);
    }
    EXPECT_TRUE(run.row_token.guards_intact());
  }
  for (const auto& [n, num_experts] : {std::pair{9, 8}, {24, 8}, {12, 4}, {37, 5}}) {
    Plan run({.num_tokens = n, .num_slots = 1, .num_experts = num_experts, .num_local = num_experts});
    Args args = run.args();
    EXPECT_TRUE(check(args));
    args.plan.row_token.shape[0] = args.plan.row_slot.shape[0] = n - 1;
    EXPECT_FALSE(check(args));
  }
}

TEST(Route, Case76_DuplicateIdsAreBothRouted) {
  Plan run({.num_tokens = 2, .num_slots = 6, .num_experts = 8, .num_local = 8});
  run.ids.fill_values({5, 5, 1, 5, -1, 1, 5, 5, 5, 5, 5, 5});
  route_and_check(run);
  EXPECT_EQ(run.rows(), 11);
}

TEST(Route, Case105_RepeatedIdKeepsBothSlotsInBothRows) {
  Plan run({.num_tokens = 2, .num_slots = 2, .num_experts = 3, .num_local = 3});
  run.ids.fill_values({1, 2, 2, 2});
  route_and_check(run);
  EXPECT_EQ(run.values(run.slot_row), (std::vector<std::int32_t>{0, 1, 2, 3}));
}

TEST(Route, Case118_MarkerIsNeverConverted) {
  for (DType dtype :
       {DType::kU32, DType::kI64, DType::kU64, DType::kI16, DType::kU16, DType::kI8, DType::kU8, DType::kF32}) {
    Plan run({.num_tokens = 2, .num_slots = 2, .num_experts = 3, .num_local = 3});
    const Buffer other(dtype, {2, 2});
    Args args = run.args();
    args.topk_idx.view = other.view();
    const Status status = check(args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("topk_idx must be i32, got " + std::string(to_string(dtype))), std::string::npos)
        << status.message();
  }
}

TEST(Route, EverySentenceOfCheck) {
  Plan run({.num_tokens = 4, .num_slots = 2, .num_experts = 8, .num_local = 8});
  const auto expect = [&](const std::function<void(Args&)>& spoil, const std::string& text) {
    Args args = run.args();
    spoil(args);
    const Status status = check(args);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  ASSERT_TRUE(check(run.args()));
  expect([](Args& a) { a.topk_idx = {}; }, "route: topk_idx[T,S] i32 is missing");
  expect([](Args& a) { a.topk_idx.view.stride = {1, 4}; }, "topk_idx[T,S] i32 axis 1 has stride 4");
  expect([](Args& a) { a.topk_idx.view.data = nullptr; }, "topk_idx is a null pointer");
  expect(
      [](Args& a) {
        a.topk_idx.view.shape = {1073741824, 2};
        a.topk_idx.view.stride[0] = 2;
      },
      "T = 1073741824 times S = 2 slots, at most 2147483647");
  expect(
      [](Args& a) {
        a.topk_idx.view.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
        a.topk_idx.view.stride[0] = std::int64_t{1} << 40;
      },
      "axis 0 is 1099511627776 times a stride of 1099511627776 elements, more bytes than can be addressed");
  expect([](Args& a) { a.num_experts = 0; }, "num_experts is 0, expected 1 to 2147483647");
  expect([](Args& a) { a.num_experts = 4294967296; }, "num_experts is 4294967296");
  expect([](Args& a) { a.plan.expert_offset = {}; }, "expert_offset[L+1] i32 is missing");
  expect([](Args& a) { a.plan.expert_offset.view.shape[0] = 0; }, "expert_offset[L+1] has no elements");
  expect([](Args& a) { a.first_expert = 1; },
         "first_expert = 1 and L = 8 local experts do not lie within num_experts = 8");
  expect([](Args& a) { a.first_expert = -1; }, "first_expert = -1");
  expect([](Args& a) { a.num_experts = 7; }, "num_experts = 7");
  expect([](Args& a) { a.plan.row_token.shape[0] = 7; }, "row_slot[R] i32 axis 0 (R) is 8, expected 7");
  expect([](Args& a) { a.plan.row_token.shape[0] = a.plan.row_slot.shape[0] = 7; },
         "row_token and row_slot hold R = 7 rows, T*S = 4 * 2 = 8 may be needed");
  expect([](Args& a) { a.plan.slot_row.shape[1] = 1; }, "slot_row[T,S] i32 axis 1 (S) is 1, expected 2");
  expect([](Args& a) { a.plan.num_rows = {}; }, "num_rows[1] i32 is missing");
  expect([](Args& a) { a.counters.shape[0] = 1; }, "counters[counters] i64 axis 0 (counters) is 1, expected 2");
  Args planned = run.args();
  planned.topk_idx.view.data = nullptr;
  EXPECT_TRUE(check(planned, Phase::kPlan));
  Args largest = run.args();  // 2^31 - 1 slots are legal
  largest.topk_idx.view.shape = {2147483647, 1};
  largest.plan.row_token.shape[0] = largest.plan.row_slot.shape[0] = 2147483647;
  largest.plan.slot_row.shape = {2147483647, 1};
  EXPECT_TRUE(check(largest)) << check(largest).message();
}

}  // namespace
}  // namespace sluice::route
