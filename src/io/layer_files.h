// One layer's tensors, found, judged and counted by their headers alone: what is missing, surplus, of the wrong shape
// or dtype is known before a byte of weights is read.
#pragma once

#include <string>
#include <vector>

#include "io/catalog.h"
#include "io/hf_config.h"
#include "sluice/checkpoint.h"

namespace sluice::io {

enum class StoredFormat : std::uint8_t {
  kPlain,        // bf16, f16 or f32
  kE4M3Block,    // e4m3, a scale per 128 x 128
  kE4M3Channel,  // e4m3, a scale per output row
  kInt8Channel,  // int8, a scale per output row, no zero points
  kE4M3Tensor,   // e4m3, one scale; loaded as the same one for every row
  kE4M3Mx,       // e4m3, an e8m0 scale per 32 columns
  kMxfp4,        // e2m1 pairs, an e8m0 scale per 32 columns
  kOther,        // recognised, and not runnable
};
// Whether the layer sees a scale per output row.
constexpr bool is_per_channel(StoredFormat format) {
  return format == StoredFormat::kE4M3Channel || format == StoredFormat::kInt8Channel ||
         format == StoredFormat::kE4M3Tensor;
}
// Whether the layer computes with the stored bytes and scales; the others are dequantised while loading.
constexpr bool is_kept(StoredFormat format) { return format == StoredFormat::kE4M3Block || is_per_channel(format); }

// The gated FFN of all experts, or of the shared one. Fused layouts keep [2I, ...] in gate[0] and leave up empty.
struct StoredFfn {
  bool present = false;
  StoredFormat format = StoredFormat::kPlain;
  DType dtype = DType::kBF16;  // of the weights
  std::string text;            // "e4m3 128x128"
  std::string cannot_run;
  std::int64_t num_experts = 0, intermediate = 0;
  bool fused = false;
  bool transposed = false;
  GateUp order = GateUp::kGateFirst;
  std::vector<TensorRef> gate, up, down;                    // [num_experts], or [1] when fused
  std::vector<TensorRef> gate_scale, up_scale, down_scale;  // the same, or empty
  TensorRef gate_up_bias, down_bias;
};

struct LayerFiles {
  std::int64_t layer = 0;
  std::string prefix;  // "model.layers.3.mlp."
  MoeConfig config;
  TensorRef router, router_bias, score_bias, shared_gate;
  StoredFfn experts, shared;
  std::int64_t layer_bytes = 0;
  std::int64_t expert_bytes = 0;
  std::string cannot_run;
  std::vector<std::string> notes;

  std::vector<Precision> precisions() const;
};

Result<LayerFiles> find_layer(const Catalog& catalog, const HfConfig& config, std::int64_t layer);

}  // namespace sluice::io
