// Problem -> tile of the tensor-core kernel, and what the GPU kernels can run: pure host functions, printable, tested
// without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "sluice/stage/grouped_gemm.h"

namespace sluice::grouped_gemm {

struct GpuProblem {
  std::int64_t num_groups = 0;  // L
  std::int64_t num_rows = 0;    // R: the bound, the host never knows the routing
  std::int64_t n = 0, k = 0;
  std::int64_t part_rows = 0;  // of one of the stacked matrices
  std::int64_t element_bytes = 1;
  bool block_scales = false;
  int num_sms = 132;
  std::int64_t shared_bytes = 232448;  // a block may have
};

struct GpuTile {
  bool tokens_on_m = false;
  std::int64_t tokens = 8;         // rows of a per tile
  std::int64_t weight_rows = 128;  // rows of w per tile
  std::int64_t stages = 0;         // of the ring
  std::int64_t shared_bytes = 0;   // of the block
  bool paired = false;             // the same columns of both stacked matrices, for a fused activation (src/fused)

  std::int64_t box_tokens() const;  // rows of a that one copy brings
  unsigned threads() const;         // of a block
  std::string to_string() const;
};

GpuProblem problem_of(const Args& args);
// Whether the tensor cores see one scale a row and channel, applied to the whole sum; only asked where a has scales.
bool scales_by_row(const Args& args);

GpuTile choose_tile(const GpuProblem& problem);

// The same tile with its ring sized for the problem: as many stages as shared memory holds.
GpuTile with_stages(GpuTile tile, const GpuProblem& problem);

// Why the tensor-core kernel cannot run these arguments on this machine.
Status can_run_wgmma(const Args& args, const Machine& machine);
std::string describe_wgmma(const Args& args, const Machine& machine);
// The copy engine reads whole units of 16 bytes: a and w must start on one.
Status check_alignment(const Args& args);
Status can_run_simt(const Args& args, const Machine& machine);

}  // namespace sluice::grouped_gemm
