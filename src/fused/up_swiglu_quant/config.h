// Problem -> how the fused kernel is laid out, and what it refuses: pure host functions, printable, tested without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "grouped_gemm/gpu_config.h"
#include "sluice/stage/up_swiglu_quant.h"

namespace sluice::up_swiglu_quant {

// One output tile is 128 columns of gate and of up, of `tile.tokens` rows. split = 1: a persistent block walks through
// tiles. More: a cluster of that many blocks shares the columns of one tile, for so few rows that tiles would leave
// multiprocessors idle.
struct Config {
  grouped_gemm::GpuTile tile;
  int split = 1;

  std::string to_string() const;
};

inline constexpr std::int64_t kClusterTokens = 8;      // of a tile that a cluster shares
inline constexpr std::int64_t kClusterUpFloats = 256;  // sums on their way from warp to warp

Config choose_config(const grouped_gemm::GpuProblem& problem);
// The same with its ring sized for the problem; fewer than two stages: it does not fit.
Config with_stages(Config config, const grouped_gemm::GpuProblem& problem);

// Why the kernel cannot run these arguments on this machine.
Status can_run_cuda(const Args& args, const Machine& machine);
std::string describe_cuda(const Args& args, const Machine& machine);

}  // namespace sluice::up_swiglu_quant
