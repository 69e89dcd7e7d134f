// Runs a stage in every way that must not show in its result: every implementation, every SIMD target compiled in and
// supported here, several thread counts, twice. The bits must be those of the last implementation, the reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "harness/buffer.h"
#include "harness/impls.h"
#include "hwy/targets.h"
#include "sluice/core.h"

namespace sluice::test {

inline std::vector<std::int64_t> simd_targets() {
  hwy::SetSupportedTargetsForTest(0);
  return hwy::SupportedAndGeneratedTargets();
}

// Dispatches to one target for its lifetime.
class ForcedTarget {
 public:
  explicit ForcedTarget(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();
  }
  ~ForcedTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;
};

// Puts back what bytes() gave.
inline void restore(const Buffer& buffer, const std::vector<std::byte>& bytes) {
  const auto size = static_cast<std::size_t>(size_bytes(buffer.dtype()));
  for (std::int64_t i = 0; i < buffer.num_elements(); ++i) {
    std::memcpy(element(buffer.view(), i), bytes.data() + static_cast<std::size_t>(i) * size, size);
  }
}

// One run with exactly the scratch that was asked for, filled with what a reused workspace might hold.
template <class Args>
Status run_with_scratch(const Impl<Args>& impl, const Args& args, int num_threads) {
  Machine machine = Machine::detect_cpu(num_threads);
  const std::int64_t bytes = impl.scratch_bytes == nullptr ? 0 : impl.scratch_bytes(args, machine);
  const auto scratch = std::make_unique<std::byte[]>(static_cast<std::size_t>(bytes));
  std::memset(scratch.get(), 0xA5, static_cast<std::size_t>(bytes));
  return impl.run(args, {nullptr, {scratch.get(), static_cast<std::size_t>(bytes)}, num_threads});
}

// Leaves the agreed result in the outputs.
template <class Args>
void expect_same_every_way(std::span<const Impl<Args>> impls, const Args& args,
                           const std::vector<const Buffer*>& inputs, const std::vector<const Buffer*>& outputs) {
  const Status legal = check(args);
  ASSERT_TRUE(legal.is_ok()) << legal.message();
  ASSERT_EQ(impls.back().name, "reference");
  ASSERT_GE(impls.size(), 2u);
  std::vector<std::vector<std::byte>> in;
  std::vector<std::vector<std::byte>> before;
  std::vector<std::vector<std::byte>> want;
  for (const Buffer* b : inputs) in.push_back(b->bytes());
  for (const Buffer* b : outputs) before.push_back(b->bytes());

  const auto run = [&](const Impl<Args>& impl, int num_threads, const std::string& how) {
    SCOPED_TRACE(how);
    for (std::size_t i = 0; i < outputs.size(); ++i) restore(*outputs[i], before[i]);
    const Status status = run_with_scratch(impl, args, num_threads);
    ASSERT_TRUE(status.is_ok()) << status.message();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_TRUE(inputs[i]->unchanged_since(in[i])) << "input " << i;
      EXPECT_TRUE(inputs[i]->guards_intact()) << "input " << i;
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(outputs[i]->guards_intact()) << "output " << i;
      if (want.empty()) continue;
      EXPECT_TRUE(outputs[i]->unchanged_since(want[i])) << "output " << i << " is not the reference's";
    }
  };

  run(impls.back(), 1, "reference");
  for (const Buffer* b : outputs) want.push_back(b->bytes());
  for (const Impl<Args>& impl : impls) {
    if (impl.device != DeviceKind::kCpu) continue;  // tests/gpu runs those
    for (std::int64_t target : simd_targets()) {
      const ForcedTarget forced(target);
      for (int num_threads : {1, 2, 3, 7}) {
        const std::string how = std::string(impl.name) + " on " + hwy::TargetName(target) + " with " +
                                std::to_string(num_threads) + " threads";
        run(impl, num_threads, how);
        if (num_threads == 3) run(impl, num_threads, how + ", again");
        if (testing::Test::HasFatalFailure() || testing::Test::HasNonfatalFailure()) return;
      }
      if (impl.name == "reference") break;  // plain loops: no target, no threads
    }
  }
}

}  // namespace sluice::test
