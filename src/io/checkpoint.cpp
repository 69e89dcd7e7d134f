// The public face of the loader: opening is Catalog and HfConfig, a layer is LayerFiles, its weights are load_layer.
#include "sluice/checkpoint.h"

#include <fmt/format.h>

#include "io/catalog.h"
#include "io/layer_files.h"
#include "io/layer_load.h"

namespace sluice {

struct Checkpoint::State {
  io::HfConfig config;
  io::Catalog catalog;
};

Checkpoint::Checkpoint(std::unique_ptr<State> state) : state_(std::move(state)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Result<Checkpoint> Checkpoint::open(const std::filesystem::path& path) {
  try {
    std::error_code ignored;
    const bool folder = std::filesystem::is_directory(path, ignored);
    if (!folder && !std::filesystem::exists(path, ignored)) {
      return Status(StatusCode::kNotFound, fmt::format("{}: there is no such file or folder", path.string()));
    }
    auto config = io::read_hf_config((folder ? path : path.parent_path()) / "config.json");
    if (!config) return config.status();
    auto catalog = io::Catalog::open(path);
    if (!catalog) return catalog.status();
    return Checkpoint(std::make_unique<State>(State{std::move(*config), std::move(*catalog)}));
  } catch (const std::exception& e) {  // the file system library, or memory
    return Status(StatusCode::kIoError, fmt::format("{}: {}", path.string(), e.what()));
  }
}

const std::string& Checkpoint::family() const { return state_->config.model_type; }

std::int64_t Checkpoint::num_layers() const { return state_->config.num_layers; }

std::vector<std::int64_t> Checkpoint::moe_layers() const {
  std::vector<std::int64_t> layers;
  for (const auto& [layer, config] : state_->config.moe_layers) layers.push_back(layer);
  return layers;
}

Result<LayerInfo> Checkpoint::layer_info(std::int64_t layer) const {
  auto files = io::find_layer(state_->catalog, state_->config, layer);
  if (!files) return files.status();
  LayerInfo info;
  info.layer = layer;
  info.config = files->config;
  info.family = state_->config.model_type;
  info.gate = describe(files->config.gate);
  info.expert_dtype = files->experts.dtype;
  info.expert_format = files->experts.text;
  info.shared_format = files->shared.text;
  if (files->router) info.gate_dtype = files->router.entry->dtype;
  info.layer_bytes = files->layer_bytes;
  info.expert_bytes = files->expert_bytes;
  info.precisions = files->precisions();
  info.cannot_run = files->cannot_run;
  return info;
}

Result<LoadedLayer> Checkpoint::load(std::int64_t layer, const LoadOptions& options) const {
  auto files = io::find_layer(state_->catalog, state_->config, layer);
  if (!files) return files.status();
  try {
    return io::load_layer(*files, options);
  } catch (const std::exception& e) {
    return Status(StatusCode::kInternal, fmt::format("load of layer {}: {}", layer, e.what()));
  }
}

}  // namespace sluice
