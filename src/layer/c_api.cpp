// The C boundary: structs in, Status to code and text, exceptions stopped.
#include "sluice/c_api.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "sluice/checkpoint.h"
#include "sluice/device.h"
#include "sluice/layer.h"

struct sluice_context {
  std::string error;
  void* stream = nullptr;
};

struct sluice_layer {
  sluice::Layer layer;
  std::string description;
};

namespace {

using sluice::DType;
using sluice::Status;
using sluice::StatusCode;
using sluice::TensorView;

static_assert(static_cast<int>(DType::kF32) == SLUICE_F32 && static_cast<int>(DType::kBF16) == SLUICE_BF16);
static_assert(static_cast<int>(DType::kE4M3) == SLUICE_E4M3 && static_cast<int>(DType::kI32) == SLUICE_I32);
static_assert(static_cast<int>(DType::kI64) == SLUICE_I64);
static_assert(static_cast<int>(StatusCode::kInternal) == SLUICE_INTERNAL);
static_assert(static_cast<int>(StatusCode::kOutOfMemory) == SLUICE_OUT_OF_MEMORY);
static_assert(static_cast<int>(StatusCode::kPeerFailure) == SLUICE_PEER_FAILURE);
static_assert(static_cast<int>(sluice::DeviceKind::kCuda) == SLUICE_CUDA);
static_assert(static_cast<int>(sluice::Precision::kF32) == SLUICE_PRECISION_F32);

sluice_status report(sluice_context* context, const Status& status) {
  if (status.is_ok()) return SLUICE_OK;
  context->error = status.message();
  return static_cast<sluice_status>(status.code());
}

Status invalid(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }

// Runs `body`, which returns a Status, and lets nothing but a code out.
template <class Body>
sluice_status guarded(sluice_context* context, const Body& body) noexcept {
  if (context == nullptr) return SLUICE_INVALID_ARGUMENT;
  try {
    return report(context, body());
  } catch (const std::bad_alloc&) {
    context->error.clear();  // whatever text would need memory too
    return SLUICE_INTERNAL;
  } catch (const std::exception& e) {
    try {
      context->error = e.what();
    } catch (...) {
      context->error.clear();
    }
    return SLUICE_INTERNAL;
  } catch (...) {
    context->error.clear();
    return SLUICE_INTERNAL;
  }
}

// Copies as many bytes of a versioned struct as the caller's version has.
template <class Struct>
Status read_struct(const char* name, const Struct* given, Struct& full) {
  std::memset(&full, 0, sizeof(full));
  if (given == nullptr) return invalid(fmt::format("{} is null", name));
  if (given->struct_bytes < sizeof(size_t) || given->struct_bytes > sizeof(full)) {
    return invalid(fmt::format("{}.struct_bytes = {}, this library knows up to {}; set it with SLUICE_INIT", name,
                               given->struct_bytes, sizeof(full)));
  }
  std::memcpy(&full, given, given->struct_bytes);
  return Status::ok();
}

Status to_view(const char* name, const sluice_tensor* tensor, TensorView& view, sluice::Device device) {
  view = {};
  view.device = device;
  if (tensor == nullptr || tensor->rank == 0) return Status::ok();
  if (tensor->rank < 0 || tensor->rank > sluice::kMaxRank)
    return invalid(fmt::format("{}.rank = {}, expected 0..{}", name, tensor->rank, sluice::kMaxRank));
  if (tensor->dtype < 0 || tensor->dtype >= sluice::kNumDTypes)
    return invalid(fmt::format("{}.dtype = {} is no sluice_dtype", name, tensor->dtype));
  view.data = tensor->data;
  view.dtype = static_cast<DType>(tensor->dtype);
  view.rank = tensor->rank;
  bool dense = true;
  for (int i = 0; i < tensor->rank; ++i) {
    const auto a = static_cast<std::size_t>(i);
    view.shape[a] = tensor->shape[i];
    view.stride[a] = tensor->stride[i];
    dense = dense && tensor->stride[i] == 0;
  }
  if (dense) {
    std::int64_t stride = 1;
    for (int i = tensor->rank - 1; i >= 0; --i) {
      const auto a = static_cast<std::size_t>(i);
      view.stride[a] = stride;
      stride *= view.shape[a] > 0 ? view.shape[a] : 1;
    }
  }
  return Status::ok();
}

template <class Enum>
Status to_enum(const char* name, std::int32_t value, std::int32_t count, Enum& out) {
  if (value < 0 || value >= count) return invalid(fmt::format("{} = {}, expected 0..{}", name, value, count - 1));
  out = static_cast<Enum>(value);
  return Status::ok();
}

Status to_options(const sluice_options* given, sluice_options& o, sluice::LayerOptions& out) {
  SLUICE_TRY(read_struct("options", given, o));
  SLUICE_TRY(to_enum("options.precision", o.precision, 4, out.precision));
  if (o.num_threads < 0) return invalid(fmt::format("options.num_threads = {} is negative", o.num_threads));
  out.max_tokens = o.max_tokens;
  out.max_rows = o.max_rows;
  out.max_rows_per_expert = o.max_rows_per_expert;
  out.routed_only = o.routed_only != 0;
  out.checked = o.checked != 0;
  if (o.force != nullptr) SLUICE_TRY(sluice::force(o.force, out.selection, "options.force"));
  if (o.disable != nullptr) SLUICE_TRY(sluice::disable(o.disable, out.selection, "options.disable"));
  sluice::DeviceKind kind = sluice::DeviceKind::kCpu;
  SLUICE_TRY(to_enum("options.device_kind", o.device_kind, 2, kind));
  out.machine = sluice::Machine::detect_cpu(o.num_threads);
  if (kind == sluice::DeviceKind::kCpu) return Status::ok();
  sluice::Result<sluice::Machine> gpu = sluice::Machine::detect_cuda(o.device_index);
  if (!gpu) return gpu.status().with_context("options");
  out.machine = std::move(*gpu);
  return Status::ok();
}

Status to_config(const sluice_moe_config* given, sluice::MoeConfig& out) {
  sluice_moe_config c;
  SLUICE_TRY(read_struct("config", given, c));
  out.hidden = c.hidden;
  out.intermediate = c.intermediate;
  out.num_experts = c.num_experts;
  out.top_k = c.top_k;
  out.first_expert = c.first_expert;
  out.num_local = c.num_local;
  out.shared_intermediate = c.shared_intermediate;
  out.has_shared_gate = c.has_shared_gate != 0;
  out.weight_on_input = c.weight_on_input != 0;
  SLUICE_TRY(to_enum("config.score", c.score, 4, out.gate.score));
  SLUICE_TRY(to_enum("config.group_score", c.group_score, 3, out.gate.group_score));
  SLUICE_TRY(to_enum("config.weight_rule", c.weight_rule, 3, out.gate.weight_rule));
  SLUICE_TRY(to_enum("config.renorm", c.renorm, 3, out.gate.renorm));
  SLUICE_TRY(to_enum("config.scale_rule", c.scale_rule, 2, out.gate.scale_rule));
  SLUICE_TRY(to_enum("config.activation", c.activation, 3, out.activation.kind));
  SLUICE_TRY(to_enum("config.activation_scale", c.activation_scale, 2, out.activation_scale));
  out.gate.has_score_bias = c.has_score_bias != 0;
  out.gate.has_router_bias = c.has_router_bias != 0;
  out.gate.n_group = c.n_group == 0 ? 1 : c.n_group;
  out.gate.topk_group = c.topk_group == 0 ? 1 : c.topk_group;
  out.gate.routed_scaling_factor = c.routed_scaling_factor == 0.0f ? 1.0f : c.routed_scaling_factor;
  out.activation.limit = c.activation_limit;
  out.activation.alpha = c.activation_alpha;
  return Status::ok();
}

Status to_ffn(const char* name, const sluice_ffn_weights& given, sluice::FfnWeights& out, sluice::Device device) {
  const auto one = [&](const char* field, const sluice_tensor& tensor, TensorView& view) {
    return to_view(fmt::format("{}.{}", name, field).c_str(), &tensor, view, device);
  };
  SLUICE_TRY(one("w13", given.w13, out.w13));
  SLUICE_TRY(one("w13_scale", given.w13_scale, out.w13_scale));
  SLUICE_TRY(one("w13_bias", given.w13_bias, out.w13_bias));
  SLUICE_TRY(one("w2", given.w2, out.w2));
  SLUICE_TRY(one("w2_scale", given.w2_scale, out.w2_scale));
  return one("w2_bias", given.w2_bias, out.w2_bias);
}

Status to_weights(const sluice_layer_weights* given, sluice::LayerWeights& out, sluice::Device device) {
  sluice_layer_weights w;
  SLUICE_TRY(read_struct("weights", given, w));
  SLUICE_TRY(to_view("w_gate", &w.w_gate, out.w_gate, device));
  SLUICE_TRY(to_view("router_bias", &w.router_bias, out.router_bias, device));
  SLUICE_TRY(to_view("score_bias", &w.score_bias, out.score_bias, device));
  SLUICE_TRY(to_view("shared_gate", &w.shared_gate, out.shared_gate, device));
  SLUICE_TRY(to_ffn("experts", w.experts, out.experts, device));
  return to_ffn("shared", w.shared, out.shared, device);
}

std::string describe(const sluice::Layer& layer) {
  std::string text;
  for (const sluice::StageReport& stage : layer.stages()) {
    text += fmt::format("{}: {}{}{}\n", stage.stage, stage.impl, stage.configuration.empty() ? "" : ", ",
                        stage.configuration);
    for (const sluice::Declined& d : stage.declined) text += fmt::format("  not {}: {}\n", d.name, d.reason);
  }
  text += fmt::format("workspace: {} bytes\n", layer.workspace_bytes());
  for (const sluice::WorkspaceItem& item : layer.workspace_items())
    text += fmt::format("  {}: {} bytes at {}\n", item.name, item.bytes, item.offset_bytes);
  return text;
}

// `upload`: the weights are host memory, and options.machine may be a GPU.
Status create(const sluice::MoeConfig& config, sluice::LayerWeights weights, const sluice::LayerOptions& options,
              bool upload, sluice_layer** out) {
  if (upload && options.machine.device.kind == sluice::DeviceKind::kCuda) {
    sluice::Result<sluice::LayerWeights> uploaded = sluice::upload(weights, options.machine.device);
    if (!uploaded) return uploaded.status();
    weights = std::move(*uploaded);
  }
  sluice::Result<sluice::Layer> layer = sluice::Layer::create(config, std::move(weights), options);
  if (!layer) return layer.status();
  std::string description = describe(*layer);
  *out = new sluice_layer{std::move(layer).value(), std::move(description)};
  return Status::ok();
}

sluice::Ctx to_ctx(const sluice_context* context, void* workspace, std::size_t bytes) {
  sluice::Ctx ctx;
  ctx.stream = context->stream;
  ctx.workspace = {static_cast<std::byte*>(workspace), workspace == nullptr ? 0 : bytes};
  return ctx;
}

sluice::Device device_of(const sluice_layer* layer) { return layer->layer.options().machine.device; }

Status check_handles(const sluice_layer* layer) { return layer == nullptr ? invalid("layer is null") : Status::ok(); }

}  // namespace

extern "C" {

const char* sluice_version(void) { return SLUICE_VERSION; }

const char* sluice_status_name(sluice_status status) {
  // The names are literals, so the views end in a terminator.
  return sluice::to_string(static_cast<StatusCode>(status)).data();
}

sluice_status sluice_context_create(sluice_context** context) {
  if (context == nullptr) return SLUICE_INVALID_ARGUMENT;
  *context = new (std::nothrow) sluice_context;
  return *context == nullptr ? SLUICE_INTERNAL : SLUICE_OK;
}

void sluice_context_destroy(sluice_context* context) { delete context; }

const char* sluice_last_error(const sluice_context* context) {
  return context == nullptr ? "" : context->error.c_str();
}

sluice_status sluice_layer_create_from_checkpoint(sluice_context* context, const char* path, int64_t layer,
                                                  const sluice_options* options, sluice_layer** out) {
  return guarded(context, [&]() -> Status {
    if (path == nullptr) return invalid("path is null");
    if (out == nullptr) return invalid("out is null");
    *out = nullptr;
    sluice_options given;
    sluice::LayerOptions layer_options;
    SLUICE_TRY(to_options(options, given, layer_options));
    sluice::Result<sluice::Checkpoint> checkpoint = sluice::Checkpoint::open(path);
    if (!checkpoint) return checkpoint.status();
    sluice::LoadOptions load;
    load.precision = layer_options.precision;
    load.routed_only = layer_options.routed_only;
    load.first_expert = given.first_expert;
    load.num_local = given.num_local;
    sluice::Result<sluice::LoadedLayer> loaded = checkpoint->load(layer, load);
    if (!loaded) return loaded.status();
    return create(loaded->config, std::move(loaded->weights), layer_options, true, out);
  });
}

sluice_status sluice_layer_create(sluice_context* context, const sluice_moe_config* config,
                                  const sluice_layer_weights* weights, const sluice_options* options,
                                  sluice_layer** out) {
  return guarded(context, [&]() -> Status {
    if (out == nullptr) return invalid("out is null");
    *out = nullptr;
    sluice::MoeConfig moe;
    sluice::LayerWeights layer_weights;
    sluice_options given;
    sluice::LayerOptions layer_options;
    SLUICE_TRY(to_config(config, moe));
    SLUICE_TRY(to_options(options, given, layer_options));
    const bool upload = given.upload != 0;
    SLUICE_TRY(to_weights(weights, layer_weights, upload ? sluice::Device{} : layer_options.machine.device));
    return create(moe, std::move(layer_weights), layer_options, upload, out);
  });
}

void sluice_layer_destroy(sluice_layer* layer) { delete layer; }

void sluice_context_set_stream(sluice_context* context, void* stream) {
  if (context != nullptr) context->stream = stream;
}

size_t sluice_layer_describe(const sluice_layer* layer, char* text, size_t bytes) {
  if (layer == nullptr) return 0;
  const std::string& all = layer->description;
  if (text != nullptr && bytes > 0) {
    const std::size_t count = std::min(all.size(), bytes - 1);
    std::memcpy(text, all.data(), count);
    text[count] = '\0';
  }
  return all.size() + 1;
}

int32_t sluice_num_gpus(sluice_context* context) {
  std::int32_t count = 0;
  (void)guarded(context, [&]() -> Status {
    const sluice::Result<std::vector<sluice::Machine>> machines = sluice::cuda_machines();
    if (!machines) return machines.status();
    count = static_cast<std::int32_t>(machines->size());
    return Status::ok();
  });
  return count;
}

int64_t sluice_layer_workspace_bytes(const sluice_layer* layer) {
  return layer == nullptr ? 0 : layer->layer.workspace_bytes();
}

void sluice_layer_sizes(const sluice_layer* layer, int64_t* hidden, int64_t* intermediate, int64_t* num_experts,
                        int64_t* top_k) {
  if (layer == nullptr) return;
  const sluice::MoeConfig& config = layer->layer.config();
  if (hidden != nullptr) *hidden = config.hidden;
  if (intermediate != nullptr) *intermediate = config.intermediate;
  if (num_experts != nullptr) *num_experts = config.num_experts;
  if (top_k != nullptr) *top_k = config.top_k;
}

sluice_status sluice_layer_forward(sluice_context* context, const sluice_layer* layer, const sluice_tensor* x,
                                   const sluice_tensor* out, const sluice_tensor* topk_idx,
                                   const sluice_tensor* topk_weight, const sluice_tensor* counters, void* workspace,
                                   size_t workspace_bytes) {
  return guarded(context, [&]() -> Status {
    SLUICE_TRY(check_handles(layer));
    TensorView x_view;
    TensorView out_view;
    sluice::Layer::Routing routing;
    SLUICE_TRY(to_view("x", x, x_view, device_of(layer)));
    SLUICE_TRY(to_view("out", out, out_view, device_of(layer)));
    SLUICE_TRY(to_view("topk_idx", topk_idx, routing.topk_idx.view, device_of(layer)));
    SLUICE_TRY(to_view("topk_weight", topk_weight, routing.topk_weight, device_of(layer)));
    SLUICE_TRY(to_view("counters", counters, routing.counters, device_of(layer)));
    return layer->layer.forward(x_view, out_view, routing, to_ctx(context, workspace, workspace_bytes));
  });
}

sluice_status sluice_layer_forward_routed(sluice_context* context, const sluice_layer* layer, const sluice_tensor* x,
                                          const sluice_tensor* x_scale, const sluice_tensor* topk_idx,
                                          const sluice_tensor* topk_weight, const sluice_tensor* counters,
                                          const sluice_tensor* out, void* workspace, size_t workspace_bytes) {
  return guarded(context, [&]() -> Status {
    SLUICE_TRY(check_handles(layer));
    sluice::Layer::RoutedInput input;
    TensorView out_view;
    SLUICE_TRY(to_view("x", x, input.x, device_of(layer)));
    SLUICE_TRY(to_view("x_scale", x_scale, input.x_scale, device_of(layer)));
    SLUICE_TRY(to_view("topk_idx", topk_idx, input.topk_idx.view, device_of(layer)));
    SLUICE_TRY(to_view("topk_weight", topk_weight, input.topk_weight, device_of(layer)));
    SLUICE_TRY(to_view("counters", counters, input.counters, device_of(layer)));
    SLUICE_TRY(to_view("out", out, out_view, device_of(layer)));
    return layer->layer.forward_routed(input, out_view, to_ctx(context, workspace, workspace_bytes));
  });
}

sluice_status sluice_layer_forward_grouped(sluice_context* context, const sluice_layer* layer,
                                           const sluice_tensor* rows, const sluice_tensor* rows_scale,
                                           const sluice_tensor* expert_offset, const sluice_tensor* out,
                                           void* workspace, size_t workspace_bytes) {
  return guarded(context, [&]() -> Status {
    SLUICE_TRY(check_handles(layer));
    sluice::Rows r;
    sluice::ExpertOffsets offsets;
    TensorView out_view;
    SLUICE_TRY(to_view("rows", rows, r.data, device_of(layer)));
    SLUICE_TRY(to_view("rows_scale", rows_scale, r.scale, device_of(layer)));
    SLUICE_TRY(to_view("expert_offset", expert_offset, offsets.view, device_of(layer)));
    SLUICE_TRY(to_view("out", out, out_view, device_of(layer)));
    return layer->layer.forward_grouped(r, offsets, out_view, to_ctx(context, workspace, workspace_bytes));
  });
}

sluice_status sluice_layer_forward_masked(sluice_context* context, const sluice_layer* layer, const sluice_tensor* rows,
                                          const sluice_tensor* rows_scale, const sluice_tensor* num_rows,
                                          const sluice_tensor* out, void* workspace, size_t workspace_bytes) {
  return guarded(context, [&]() -> Status {
    SLUICE_TRY(check_handles(layer));
    sluice::Rows r;
    TensorView counts;
    TensorView out_view;
    SLUICE_TRY(to_view("rows", rows, r.data, device_of(layer)));
    SLUICE_TRY(to_view("rows_scale", rows_scale, r.scale, device_of(layer)));
    SLUICE_TRY(to_view("num_rows", num_rows, counts, device_of(layer)));
    SLUICE_TRY(to_view("out", out, out_view, device_of(layer)));
    return layer->layer.forward_masked(r, counts, out_view, to_ctx(context, workspace, workspace_bytes));
  });
}

}  // extern "C"
