// The CUDA rows of the gate's tables.
#pragma once

#include "gate/gpu_config.h"
#include "sluice/stage/gate.h"

namespace sluice::gate {

// On tensor cores: bf16 in rows of whole 16 bytes, on Hopper. check: the dtypes, addresses and pitches of a call.
Status check_logits_wgmma(const LogitsArgs& args);
Status can_run_logits_wgmma(const LogitsArgs& args, const Machine& machine);
std::int64_t scratch_bytes_logits_wgmma(const LogitsArgs& args, const Machine& machine);
std::string describe_logits_wgmma(const LogitsArgs& args, const Machine& machine);
Status logits_wgmma(const LogitsArgs& args, const Ctx& ctx);
Status logits_wgmma_tile(const LogitsArgs& args, const Ctx& ctx, const LogitsTile& tile);  // for tests and tuning

bool has_logits_kernel(const LogitsTile& tile);

// Logits that are still the sums of K's chunks, as the router GEMM leaves them in its workspace when blocks share K.
struct ChunkSums {
  const float* data = nullptr;  // [chunks,T,pitch]; null: the logits are complete
  std::int64_t chunk_stride = 0, token_stride = 0;
  std::int32_t num_chunks = 0;
  const float* router_bias = nullptr;  // [E], to be added last; may be null
};
// The router GEMM without the kernel that adds up, and the selection that does it instead and writes the logits.
Status logits_wgmma_sums(const LogitsArgs& args, const Ctx& ctx, ChunkSums& sums);
Status select_sums_cuda(const SelectArgs& args, const ChunkSums& sums, const Ctx& ctx);

Status can_run_both_wgmma(const BothArgs& args, const Machine& machine);
std::int64_t scratch_bytes_both_wgmma(const BothArgs& args, const Machine& machine);
Status both_wgmma(const BothArgs& args, const Ctx& ctx);

Status logits_cuda(const LogitsArgs& args, const Ctx& ctx);
Status select_cuda(const SelectArgs& args, const Ctx& ctx);

}  // namespace sluice::gate
