// What the DeepGEMM peer's kernel table looks like; the kernels themselves come from that project's headers.
#pragma once

#include <span>

namespace sluice::bench {

struct DeepGemmKernel {
  int n, k;
  int groups;  // compiled in for the masked layout; 0: contiguous, any number
  int block_m, block_n, stages;
  int cluster;          // CTAs that share a tile by multicast
  bool multicast_on_a;  // else on b
  const void* function;
};
std::span<const DeepGemmKernel> deepgemm_kernels();

}  // namespace sluice::bench
