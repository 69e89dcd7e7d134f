// Reads MoE layers out of Hugging Face checkpoints: a folder with config.json and either model.safetensors or
// model.safetensors.index.json with shards. The family comes from config.json; one table row describes each
// (src/io/families.cpp). Only the asked layer's pages are touched, and every tensor of the layer is accounted for.
#pragma once

#include <filesystem>
#include <functional>

#include "sluice/weights.h"

namespace sluice {

// One MoE layer as the files describe it; nothing is read beyond the headers.
struct LayerInfo {
  std::int64_t layer = 0;
  MoeConfig config;
  std::string family;                 // model_type, e.g. "deepseek_v3"
  std::string gate;                   // describe(config.gate)
  DType expert_dtype = DType::kBF16;  // as stored; packed formats (MXFP4, int4) are named in expert_format
  std::string expert_format;          // "e4m3 128x128", "int8 per channel", "bf16", "mxfp4", ...
  std::string shared_format;          // "" without a shared expert
  DType gate_dtype = DType::kBF16;
  std::int64_t layer_bytes = 0;       // of all the layer's tensors in the files
  std::int64_t expert_bytes = 0;      // of one routed expert
  std::vector<Precision> precisions;  // what Sluice can run it in
  std::string cannot_run;             // why not, when precisions is empty
};

struct LoadOptions {
  Precision precision = Precision::kF32;  // kBF16 on e4m3 and int8 weights dequantises them to bf16 while loading
  bool routed_only = false;               // the shared expert is still accounted for, but not read
  // One rank's part: experts [first_expert, first_expert + num_local), 0: all from first_expert on, kNoExperts: none.
  // LoadedLayer::config says the same, so that a layer made of both skips the ids of other ranks.
  std::int64_t first_expert = 0;
  std::int64_t num_local = 0;
  // Or the experts of a rank's slots (sluice/placement.h), in their order, the same one several times if it is so placed;
  // empty: as above. LoadedLayer::config then has first_expert = 0 and num_local as many.
  std::vector<std::int32_t> experts = {};
  // One rank's part where I is cut over ranks (shard() in sluice/weights.h). Only that part is read.
  TensorShard tensor_shard = {};
  // Called with bytes done and in all; may be empty.
  std::function<void(std::int64_t done, std::int64_t total)> progress = {};
  // Asked now and then while loading, by one thread at a time; true ends the load with kIoError. May be empty.
  std::function<bool()> stop = {};
};

struct LoadedLayer {
  MoeConfig config;
  LayerWeights weights;
  bool shared_is_whole = false;          // of a tensor shard: the shared expert was too narrow to be cut
  std::int64_t num_nan = 0;              // NaN weights found while loading: reported, never hidden
  std::vector<std::string> nan_tensors;  // the first few that hold them, with counts
  std::vector<std::string> notes;        // conversions made, tensors of the layer that are known and not used
};

class Checkpoint {
 public:
  // Opens and validates headers and config; reads no weight. `path`: the folder, or one .safetensors file beside a
  // config.json.
  static Result<Checkpoint> open(const std::filesystem::path& path);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::string& family() const;
  std::int64_t num_layers() const;               // num_hidden_layers of the model
  std::vector<std::int64_t> moe_layers() const;  // those that have experts
  Result<LayerInfo> layer_info(std::int64_t layer) const;
  Result<LoadedLayer> load(std::int64_t layer, const LoadOptions& options) const;

 private:
  struct State;
  explicit Checkpoint(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace sluice
