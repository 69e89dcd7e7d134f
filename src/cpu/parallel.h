// Loops over OpenMP. Which thread runs which index is never visible in a result.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace sluice::cpu {

// body(index, worker) for index in [0, count); worker in [0, num_threads) names the caller's scratch slice.
// Indices are handed out one at a time, in order, to whichever worker is free.
template <class Body>
void parallel_for(std::int64_t count, int num_threads, const Body& body) {
  const int workers = static_cast<int>(std::min<std::int64_t>(count, std::max(num_threads, 1)));
  if (workers <= 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
#pragma omp parallel for num_threads(workers) schedule(dynamic, 1)
  for (std::int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
}

// Ranges of up to `grain` indices: body(begin, end, worker).
template <class Body>
void parallel_ranges(std::int64_t count, std::int64_t grain, int num_threads, const Body& body) {
  const std::int64_t chunks = (count + grain - 1) / grain;
  parallel_for(chunks, num_threads,
               [&](std::int64_t c, int worker) { body(c * grain, std::min(count, (c + 1) * grain), worker); });
}

}  // namespace sluice::cpu
