// A stage's CUDA row against its reference, bit by bit, on guarded copies: outputs, rows that must stay untouched, inputs.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gpu/device_mirror.h"
#include "harness/buffer.h"
#include "sluice/stage/combine.h"
#include "sluice/stage/gate.h"
#include "sluice/stage/pack.h"
#include "sluice/stage/route.h"
#include "sluice/stage/swiglu_quant.h"

namespace sluice::test {

// The tensors of a stage's Args.
inline std::vector<TensorView*> views_of(gate::SelectArgs& a) {
  return {&a.logits, &a.score_bias, &a.topk_idx.view, &a.topk_weight, &a.counters};
}
inline std::vector<TensorView*> views_of(gate::LogitsArgs& a) { return {&a.x, &a.w_gate, &a.router_bias, &a.logits}; }
inline std::vector<TensorView*> views_of(route::Args& a) {
  return {&a.topk_idx.view, &a.plan.expert_offset.view, &a.plan.row_token, &a.plan.row_slot,
          &a.plan.slot_row, &a.plan.num_rows,           &a.counters};
}
inline std::vector<TensorView*> views_of(pack::Args& a) {
  return {&a.x,        &a.x_scale,  &a.row_token,     &a.row_slot,
          &a.slot_row, &a.num_rows, &a.groups.counts, &a.groups.expert_offset.view,
          &a.weight,   &a.rows,     &a.rows_scale};
}
inline std::vector<TensorView*> views_of(swiglu_quant::Args& a) {
  return {&a.h, &a.groups.expert_offset.view, &a.groups.counts, &a.a, &a.a_scale};
}
inline std::vector<TensorView*> views_of(combine::Args& a) {
  return {&a.y, &a.slot_row, &a.topk_weight, &a.shared, &a.shared_gate, &a.out};
}

// Device scratch of exactly the size a row asks for, full of what a reused workspace might hold, between guards.
class JunkScratch {
 public:
  explicit JunkScratch(std::int64_t bytes)
      : junk_(static_cast<std::size_t>(bytes), std::byte{0xA5}),
        view_(TensorView::dense(junk_.data(), DType::kU8, {bytes})) {
    if (bytes > 0) mirror_.add(view_);
  }
  template <class Args>
  JunkScratch(const Impl<Args>& impl, const Args& args)
      : JunkScratch(impl.scratch_bytes == nullptr ? 0 : impl.scratch_bytes(args, first_gpu())) {}
  Ctx ctx(void* stream = nullptr) const { return {stream, {view_.as<std::byte>(), junk_.size()}, 1}; }
  testing::AssertionResult guards_intact() {
    mirror_.copy_back();  // what is left to differ are the guards
    return mirror_.equals_host();
  }

 private:
  std::vector<std::byte> junk_;
  TensorView view_;
  DeviceMirror mirror_;
};

// Whether a second run adds to what the first one left.
template <class Args>
bool adds_up(const Args&) {
  return false;
}
inline bool adds_up(const gate::SelectArgs& a) { return a.counters.is_present(); }
inline bool adds_up(const route::Args& a) { return a.counters.is_present(); }
inline bool adds_up(const combine::Args& a) { return a.accumulate; }

// The first row of the table on device copies, twice over where nothing adds up; everything must then be what the
// reference made of the originals.
template <class Args>
void expect_reference_bits(std::span<const Impl<Args>> table, const Args& args, const std::string& what) {
  SCOPED_TRACE(what);
  const Impl<Args>& impl = table.front();
  ASSERT_EQ(impl.device, DeviceKind::kCuda);
  const Status legal = check(args);
  ASSERT_TRUE(legal.is_ok()) << legal.message();
  const Status able = impl.can_run(args, first_gpu());
  ASSERT_TRUE(able.is_ok()) << able.message();
  DeviceMirror mirror;
  Args device = args;
  for (TensorView* view : views_of(device)) mirror.add(*view);
  JunkScratch scratch(impl, args);
  const Status host = table.back().run(args, {});
  ASSERT_TRUE(host.is_ok()) << host.message();
  for (int round = 0; round < (adds_up(args) ? 1 : 2); ++round) {
    const Status status = impl.run(device, scratch.ctx());
    ASSERT_TRUE(status.is_ok()) << status.message();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_TRUE(mirror.equals_host()) << "run " << round;
    ASSERT_TRUE(scratch.guards_intact()) << "scratch, run " << round;
  }
}

// Rows of zeros of both signs, of tiny and of huge values, with infinities or NaN of both signs, and of any magnitude.
inline void fill_hard(Buffer& b, std::uint64_t seed) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
  b.fill_normal(seed, 2.0);
  const std::int64_t cols = b.view().shape[1];
  Rng rng(seed + 1);
  for (std::int64_t r = 0; r < b.view().shape[0]; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const std::int64_t i = r * cols + c;
      const auto either = [&](double v) { return rng.integer(0, 1) == 0 ? v : -v; };
      if (r % 7 == 1) b.set(i, c % 2 == 0 ? 0.0 : -0.0);
      if (r % 7 == 2) b.set(i, rng.normal() * 1e-38);
      if (r % 7 == 3 && rng.integer(0, 15) == 0) b.set(i, either(kInfinity));
      if (r % 7 == 4 && rng.integer(0, 15) == 0) b.set(i, either(kNotANumber));
      if (r % 7 == 5) b.set(i, rng.normal() * 3e36);
      if (r % 7 == 6) b.set(i, std::ldexp(rng.uniform(-1, 1), static_cast<int>(rng.integer(-40, 8))));
    }
  }
}

}  // namespace sluice::test
