// The plan and the rows of few tokens by one kernel: the bits of the references of the two stages, whatever the ids are.
#include <gtest/gtest.h>

#include <limits>

#include "fused/route_pack/impls.h"
#include "gpu/device_mirror.h"
#include "harness/buffer.h"
#include "harness/fill.h"

namespace sluice::test {
namespace {

using route_pack::Args;

struct Case {
  std::int64_t tokens, slots, experts, first, local, hidden;
  DType x = DType::kBF16;
  ScaleFormat format = ScaleFormat::kF32;
  bool strange = false;  // ids outside, values that are not finite, awkward addresses
};

struct Tensors {
  Buffer ids, x, offset, row_token, row_slot, slot_row, num_rows, counters, rows, scale;

  explicit Tensors(const Case& c)
      : ids(DType::kI32, {c.tokens, c.slots}, {.row_pitch_elems = c.slots + 3, .offset_elems = 1}),
        x(c.x, {c.tokens, c.hidden},
          {.row_pitch_elems = c.hidden + (c.strange ? 5 : 0), .offset_elems = c.strange ? 1 : 0}),
        offset(DType::kI32, {c.local + 1}),
        row_token(DType::kI32, {c.tokens * c.slots}),
        row_slot(DType::kI32, {c.tokens * c.slots}),
        slot_row(DType::kI32, {c.tokens, c.slots}, {.row_pitch_elems = c.slots + 2}),
        num_rows(DType::kI32, {1}),
        counters(DType::kI64, {kNumCounters}),
        rows(DType::kE4M3, {c.tokens * c.slots, c.hidden},
             {.row_pitch_elems = c.hidden + (c.strange ? 3 : 16), .offset_elems = c.strange ? 1 : 0}),
        scale(DType::kF32, {ceil_div(c.hidden, 128), c.tokens * c.slots}, {.row_pitch_elems = c.tokens * c.slots + 3}) {
    Rng rng(static_cast<std::uint64_t>(c.tokens * 1000 + c.hidden));
    ids.fill_with([&](std::int64_t) {
      const std::int64_t id = rng.integer(c.strange ? -2 : 0, c.experts - (c.strange ? 0 : 1));
      return static_cast<double>(c.strange && rng.uniform() < 0.1 ? 2147483647 : id);
    });
    x.fill_normal(3, 5.0);
    if (c.strange && c.tokens > 0) {
      x.set(1, std::numeric_limits<double>::quiet_NaN());
      x.set(c.hidden - 1, -std::numeric_limits<double>::infinity());
      for (std::int64_t i = 0; i < c.hidden; ++i) x.set((c.tokens - 1) * c.hidden + i, 0.0);
    }
    counters.fill_constant(5);
  }
  std::vector<const Buffer*> outputs() const {
    return {&offset, &row_token, &row_slot, &slot_row, &num_rows, &counters, &rows, &scale};
  }
  Args args(const Case& c) const {
    Args a;
    a.route.topk_idx = {ids.view()};
    a.route.num_experts = c.experts;
    a.route.first_expert = c.first;
    a.route.plan = {{offset.view()}, row_token.view(), row_slot.view(), slot_row.view(), num_rows.view()};
    a.route.counters = counters.view();
    a.pack.x = x.view();
    a.pack.row_token = row_token.view();
    a.pack.row_slot = row_slot.view();
    a.pack.slot_row = slot_row.view();
    a.pack.num_rows = num_rows.view();
    a.pack.rows = rows.view();
    a.pack.rows_scale = scale.view();
    a.pack.scale_format = c.format;
    return a;
  }
};

// Moves the tensors of args to mirrors, runs, and brings the results back into the host tensors behind them.
void run_on_device(const Case& c, const Tensors& t) {
  Args a = t.args(c);
  ASSERT_TRUE(route_pack::check(a).is_ok()) << route_pack::check(a).message();
  DeviceMirror mirror;
  for (TensorView* view : {&a.route.topk_idx.view, &a.route.plan.expert_offset.view, &a.route.plan.row_token,
                           &a.route.plan.row_slot, &a.route.plan.slot_row, &a.route.plan.num_rows, &a.route.counters,
                           &a.pack.x, &a.pack.rows, &a.pack.rows_scale}) {
    mirror.add(*view);
  }
  a.pack.row_token = a.route.plan.row_token;
  a.pack.row_slot = a.route.plan.row_slot;
  a.pack.slot_row = a.route.plan.slot_row;
  a.pack.num_rows = a.route.plan.num_rows;
  const Status able = route_pack::can_run_cuda(a, first_gpu());
  ASSERT_TRUE(able.is_ok()) << able.message();
  const Status ran = route_pack::run_cuda(a, {});
  ASSERT_TRUE(ran.is_ok()) << ran.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  mirror.copy_back();
  EXPECT_TRUE(mirror.equals_host()) << "outside the tensors";
}

TEST(RoutePackCuda, HasTheBitsOfTheReferences) {
  if (const std::string reason = no_gpu_reason(); !reason.empty()) GTEST_SKIP() << reason;
  const Case cases[] = {
      {1, 8, 256, 0, 256, 7168},
      {1, 8, 128, 0, 128, 2048, DType::kBF16, ScaleFormat::kUe8m0},
      {16, 8, 256, 0, 256, 7168},
      {4, 32, 384, 0, 384, 640, DType::kF32},
      {128, 1, 8, 0, 8, 2100, DType::kBF16},
      {7, 6, 64, 16, 16, 4096},
      {5, 8, 40, 8, 24, 333, DType::kBF16, ScaleFormat::kF32, true},
      {9, 14, 1024, 0, 1024, 1, DType::kF32, ScaleFormat::kUe8m0, true},
      {3, 4, 16, 15, 1, 129, DType::kF32, ScaleFormat::kF32, true},
      {0, 8, 256, 0, 256, 7168},
      {2, 3, 5, 2, 0, 128, DType::kBF16, ScaleFormat::kF32, true},  // no expert is here
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::to_string(c.tokens) + " tokens, " + std::to_string(c.slots) + " slots, H " +
                 std::to_string(c.hidden));
    const Tensors want(c);
    const Args a = want.args(c);
    ASSERT_TRUE(route::impls().back().run(a.route, {}).is_ok());
    ASSERT_TRUE(pack::impls().back().run(a.pack, {}).is_ok());
    for (int again = 0; again < 2; ++again) {
      const Tensors got(c);
      run_on_device(c, got);
      for (std::size_t i = 0; i < want.outputs().size(); ++i) {
        EXPECT_TRUE(got.outputs()[i]->guards_intact());
        EXPECT_EQ(got.outputs()[i]->bytes(), want.outputs()[i]->bytes()) << "output " << i;
      }
    }
  }
}

TEST(RoutePackCuda, RefusesWhatItDoesNotDo) {
  const Case c{1, 8, 16, 0, 16, 256};
  const Tensors t(c);
  Machine machine;
  machine.device = {DeviceKind::kCuda, 0};
  machine.gpu.capability = {9, 0};
  const auto declined = [&](const auto& change) {
    Args a = t.args(c);
    change(a);
    return route_pack::can_run_cuda(a, machine).message();
  };
  EXPECT_EQ(declined([](Args&) {}), "");
  EXPECT_NE(declined([](Args& a) { a.pack.x.dtype = DType::kE4M3; }), "");
  EXPECT_NE(declined([](Args& a) { a.pack.rows.dtype = DType::kBF16; }), "");
  EXPECT_NE(declined([](Args& a) { a.pack.rows_scale.shape[0] = 1; }), "");
  EXPECT_NE(declined([](Args& a) { a.pack.weight = a.pack.rows_scale; }), "");
  EXPECT_NE(declined([](Args& a) { a.pack.slot_row.shape[1] = 33; }), "");
  EXPECT_NE(declined([](Args& a) { a.route.checked = true; }), "");
  Args other = t.args(c);
  other.pack.num_rows = other.route.plan.row_slot;
  EXPECT_EQ(route_pack::check(other).code(), StatusCode::kInvalidArgument);
  Args tokens = t.args(c);
  tokens.pack.slot_row = {};
  EXPECT_EQ(route_pack::check(tokens).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace sluice::test
