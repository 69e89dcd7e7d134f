// What this machine can do at most, measured: the denominators of every CPU performance figure.
#pragma once

#include <cstdint>

namespace sluice::cpu {

// Bytes per second that num_threads threads read from memory in ascending order, each from its own part of a buffer
// of num_bytes (0: 512 MiB, far above a last-level cache share). The best of a few passes; takes under a second.
double measure_stream_bytes_per_s(int num_threads, std::int64_t num_bytes = 0);

// f32 operations per second (an fma is two) of num_threads threads that work in registers only.
double measure_fma_flops_per_s(int num_threads);

}  // namespace sluice::cpu
