// Writes random checkpoints in a family's own layout, from the same table rows the loader reads: the sizes of a
// released model without its weights, or a small relative of it for tests.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "io/hf_config.h"

namespace sluice::io {

enum class SynthWeights : std::uint8_t {
  kAsConfig,  // what quantization_config and dtype say: e4m3 128x128, MXFP4, bf16 or f32
  kBF16,
  kF32,
  kE4M3,
};

struct SynthRequest {
  std::filesystem::path out;  // a folder that does not exist yet, or an empty one
  std::string like;           // a preset ("deepseek-v3") or the path of a config.json
  std::int64_t num_layers =
      1;                   // layers with experts to write, from the first one on; 0: all. config.json is cut to match
  std::uint64_t seed = 1;  // the same request and seed give the same bytes
  SynthWeights weights = SynthWeights::kAsConfig;
  bool fused = false;  // the family's fused 3-D layout instead of one tensor per expert (bf16 and f32 only)
  std::int64_t num_experts = 0, hidden = 0, intermediate = 0, top_k = 0;  // 0: as the config says
  std::int64_t shared_intermediate = 0;  // only where the shared expert has a width of its own (Qwen)
  std::int64_t max_shard_bytes = std::int64_t{5} << 30;
  std::function<void(std::int64_t done_bytes, std::int64_t total_bytes)> progress;  // may be empty
  // Asked before each piece of at most some MB; true ends the writing with kIoError. May be empty.
  std::function<bool()> stop;
};

// Weights are normal with mean 0 and deviation 1/sqrt(fan_in); a scale is its block's amax / 448. Holds no more than a
// piece of a tensor in memory. On failure, and when stopped, nothing it made stays
// behind: no file, no folder.
Status synthesize(const SynthRequest& request);

std::vector<std::string> preset_names();
// A preset's config.json, or the one at the path.
Result<nlohmann::json> config_like(const std::string& like);

}  // namespace sluice::io
