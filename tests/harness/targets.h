// Runs the library on each SIMD target it was compiled for, not only on the best one.
//
//   for (std::int64_t target : simd_targets()) { const ForcedTarget forced(target); ... }
#pragma once

#include <cstdint>
#include <vector>

#include "hwy/targets.h"

namespace sluice::test {

// Compiled in and supported by this machine, best first.
inline std::vector<std::int64_t> simd_targets() {
  hwy::SetSupportedTargetsForTest(0);
  return hwy::SupportedAndGeneratedTargets();
}

// Whether the target has a fused multiply-add of its own (x86: AVX2 and better).
inline bool has_native_fma(std::int64_t target) {
#if defined(__x86_64__)
  return target <= HWY_AVX2;
#else
  return target != HWY_SCALAR && target != HWY_EMU128;
#endif
}

// Every dynamic dispatch goes to one target for the lifetime of this object.
class ForcedTarget {
 public:
  explicit ForcedTarget(std::int64_t target) { choose(target); }
  ~ForcedTarget() { choose(0); }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;

 private:
  static void choose(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();
  }
};

}  // namespace sluice::test
