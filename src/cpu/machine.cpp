// What this machine can run.
#include <sched.h>

#include <algorithm>
#include <thread>

#include "hwy/targets.h"
#include "sluice/core.h"

namespace sluice {

namespace {

// The affinity mask, not the number of cores: containers and taskset are honoured.
int usable_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(CPU_COUNT(&set), 1);
  return static_cast<int>(std::max(std::thread::hardware_concurrency(), 1u));
}

}  // namespace

Machine Machine::detect_cpu(int num_threads) {
  Machine machine;
  machine.num_threads = num_threads > 0 ? num_threads : usable_threads();
  // The lowest set bit is the best target.
  const std::int64_t targets = hwy::SupportedTargets();
  machine.simd = hwy::TargetName(targets & -targets);
  return machine;
}

}  // namespace sluice
