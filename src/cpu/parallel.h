// Loops over oneTBB's worker threads. Which thread runs which index is never visible in a result.
//
// Waiting workers sleep instead of spinning, so that a layer shares its cores with the engine around it: on two busy
// cores one token through a small layer took 60 ms with OpenMP's spinning barriers (docs/decisions.md). The loops run
// in whatever arena the caller is in, so an application's own oneTBB limits hold here too.
#pragma once

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace sluice::cpu {

// body(index, worker) for index in [0, count). `worker` in [0, num_threads) is one at a time per value: it names the
// caller's scratch slice. Indices are handed out one at a time, in order, to whichever worker is free.
template <class Body>
void parallel_for(std::int64_t count, int num_threads, const Body& body) {
  const int num_workers = static_cast<int>(std::min<std::int64_t>(count, std::max(num_threads, 1)));
  if (num_workers <= 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  std::atomic<std::int64_t> next{0};
  // Isolated: while it waits here, this thread must not pick up other work of the application.
  oneapi::tbb::this_task_arena::isolate([&] {
    oneapi::tbb::parallel_for(
        0, num_workers,
        [&](int worker) {
          for (std::int64_t i = next++; i < count; i = next++) body(i, worker);
        },
        oneapi::tbb::simple_partitioner());
  });
}

// Ranges of up to `grain` indices: body(begin, end, worker).
template <class Body>
void parallel_ranges(std::int64_t count, std::int64_t grain, int num_threads, const Body& body) {
  const std::int64_t chunks = (count + grain - 1) / grain;
  parallel_for(chunks, num_threads,
               [&](std::int64_t c, int worker) { body(c * grain, std::min(count, (c + 1) * grain), worker); });
}

}  // namespace sluice::cpu
