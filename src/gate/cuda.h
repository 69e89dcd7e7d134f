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

Status logits_cuda(const LogitsArgs& args, const Ctx& ctx);
Status select_cuda(const SelectArgs& args, const Ctx& ctx);

}  // namespace sluice::gate
