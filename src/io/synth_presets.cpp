// The parts of released models' config.json that describe their MoE layers, as their authors published them.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "io/synth.h"

namespace sluice::io {
namespace {

struct Preset {
  std::string_view name;
  std::string_view config;
};

#define SLUICE_FP8 \
  R"("quantization_config":{"activation_scheme":"dynamic","fmt":"e4m3","quant_method":"fp8","weight_block_size":[128,128]})"
#define SLUICE_MXFP4                                                                                                                   \
  R"("quantization_config":{"quant_method":"mxfp4","modules_to_not_convert":["model.layers.*.self_attn","model.layers.*.mlp.router",)" \
  R"("model.embed_tokens","lm_head"]})"

constexpr Preset kPresets[] = {
    {"deepseek-v3", R"({"model_type":"deepseek_v3","num_hidden_layers":61,"hidden_size":7168,"intermediate_size":18432,
      "moe_intermediate_size":2048,"n_routed_experts":256,"n_shared_experts":1,"num_experts_per_tok":8,"n_group":8,"topk_group":4,
      "topk_method":"noaux_tc","scoring_func":"sigmoid","norm_topk_prob":true,"routed_scaling_factor":2.5,"first_k_dense_replace":3,
      "moe_layer_freq":1,"hidden_act":"silu",)" SLUICE_FP8 "}"},
    {"deepseek-v2", R"({"model_type":"deepseek_v2","num_hidden_layers":60,"hidden_size":5120,"intermediate_size":12288,
      "moe_intermediate_size":1536,"n_routed_experts":160,"n_shared_experts":2,"num_experts_per_tok":6,"n_group":8,"topk_group":3,
      "topk_method":"group_limited_greedy","scoring_func":"softmax","norm_topk_prob":false,"routed_scaling_factor":16.0,
      "first_k_dense_replace":1,"moe_layer_freq":1,"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"deepseek-v2-lite",
     R"({"model_type":"deepseek_v2","num_hidden_layers":27,"hidden_size":2048,"intermediate_size":10944,
      "moe_intermediate_size":1408,"n_routed_experts":64,"n_shared_experts":2,"num_experts_per_tok":6,"n_group":1,"topk_group":1,
      "topk_method":"greedy","scoring_func":"softmax","norm_topk_prob":false,"routed_scaling_factor":1.0,"first_k_dense_replace":1,
      "moe_layer_freq":1,"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"kimi-k2", R"({"model_type":"kimi_k2","num_hidden_layers":61,"hidden_size":7168,"intermediate_size":18432,
      "moe_intermediate_size":2048,"n_routed_experts":384,"n_shared_experts":1,"num_experts_per_tok":8,"n_group":1,"topk_group":1,
      "topk_method":"noaux_tc","scoring_func":"sigmoid","norm_topk_prob":true,"routed_scaling_factor":2.827,"first_k_dense_replace":1,
      "moe_layer_freq":1,"hidden_act":"silu",)" SLUICE_FP8 "}"},
    {"qwen3-30b", R"({"model_type":"qwen3_moe","num_hidden_layers":48,"hidden_size":2048,"intermediate_size":6144,
      "moe_intermediate_size":768,"num_experts":128,"num_experts_per_tok":8,"norm_topk_prob":true,"decoder_sparse_step":1,
      "mlp_only_layers":[],"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"qwen3-235b", R"({"model_type":"qwen3_moe","num_hidden_layers":94,"hidden_size":4096,"intermediate_size":12288,
      "moe_intermediate_size":1536,"num_experts":128,"num_experts_per_tok":8,"norm_topk_prob":true,"decoder_sparse_step":1,
      "mlp_only_layers":[],"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"glm-4.5", R"({"model_type":"glm4_moe","num_hidden_layers":92,"hidden_size":5120,"intermediate_size":12288,
      "moe_intermediate_size":1536,"n_routed_experts":160,"n_shared_experts":1,"num_experts_per_tok":8,"n_group":1,"topk_group":1,
      "norm_topk_prob":true,"routed_scaling_factor":2.5,"first_k_dense_replace":3,"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"glm-4.5-air", R"({"model_type":"glm4_moe","num_hidden_layers":46,"hidden_size":4096,"intermediate_size":10944,
      "moe_intermediate_size":1408,"n_routed_experts":128,"n_shared_experts":1,"num_experts_per_tok":8,"n_group":1,"topk_group":1,
      "norm_topk_prob":true,"routed_scaling_factor":1.0,"first_k_dense_replace":1,"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"mixtral-8x7b", R"({"model_type":"mixtral","num_hidden_layers":32,"hidden_size":4096,"intermediate_size":14336,
      "num_local_experts":8,"num_experts_per_tok":2,"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"qwen2-moe-57b", R"({"model_type":"qwen2_moe","num_hidden_layers":28,"hidden_size":3584,"intermediate_size":18944,
      "moe_intermediate_size":2560,"shared_expert_intermediate_size":20480,"num_experts":64,"num_experts_per_tok":8,
      "norm_topk_prob":false,"decoder_sparse_step":1,"mlp_only_layers":[],"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"qwen3-next-80b", R"({"model_type":"qwen3_next","num_hidden_layers":48,"hidden_size":2048,"intermediate_size":5120,
      "moe_intermediate_size":512,"shared_expert_intermediate_size":512,"num_experts":512,"num_experts_per_tok":10,
      "norm_topk_prob":true,"decoder_sparse_step":1,"mlp_only_layers":[],"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"olmoe",
     R"({"model_type":"olmoe","num_hidden_layers":16,"hidden_size":2048,"intermediate_size":1024,"num_experts":64,
      "num_experts_per_tok":8,"norm_topk_prob":false,"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"minimax-m2", R"({"model_type":"minimax_m2","num_hidden_layers":62,"hidden_size":3072,"intermediate_size":1536,
      "num_local_experts":256,"num_experts_per_tok":8,"scoring_func":"sigmoid","use_routing_bias":true,"hidden_act":"silu",)" SLUICE_FP8
                   "}"},
    {"ernie-4.5-21b",
     R"({"model_type":"ernie4_5_moe","num_hidden_layers":28,"hidden_size":2560,"intermediate_size":12288,
      "moe_intermediate_size":1536,"moe_num_experts":64,"moe_k":6,"moe_num_shared_experts":2,"moe_layer_start_index":1,
      "moe_layer_end_index":27,"moe_layer_interval":1,"moe_norm_min":1e-12,"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"llama4-scout",
     R"({"model_type":"llama4","text_config":{"model_type":"llama4_text","num_hidden_layers":48,"hidden_size":5120,
      "intermediate_size":8192,"intermediate_size_mlp":16384,"num_local_experts":16,"num_experts_per_tok":1,
      "interleave_moe_layer_step":1,"hidden_act":"silu","torch_dtype":"bfloat16"}})"},
    {"hunyuan-a13b",
     R"({"model_type":"hunyuan_v1_moe","num_hidden_layers":32,"hidden_size":4096,"intermediate_size":3072,
      "num_experts":64,"moe_topk":8,"num_shared_expert":1,"norm_topk_prob":true,"hidden_act":"silu","torch_dtype":"bfloat16"})"},
    {"gpt-oss-20b", R"({"model_type":"gpt_oss","num_hidden_layers":24,"hidden_size":2880,"intermediate_size":2880,
      "num_local_experts":32,"num_experts_per_tok":4,"experts_per_token":4,"swiglu_limit":7.0,"hidden_act":"silu",)" SLUICE_MXFP4
                    "}"},
    {"gpt-oss-120b", R"({"model_type":"gpt_oss","num_hidden_layers":36,"hidden_size":2880,"intermediate_size":2880,
      "num_local_experts":128,"num_experts_per_tok":4,"experts_per_token":4,"swiglu_limit":7.0,"hidden_act":"silu",)" SLUICE_MXFP4
                     "}"},
    {"dots1",
     R"({"model_type":"dots1","num_hidden_layers":62,"hidden_size":4096,"intermediate_size":10944,"moe_intermediate_size":1408,
      "n_routed_experts":128,"n_shared_experts":2,"num_experts_per_tok":6,"n_group":1,"topk_group":1,"norm_topk_prob":true,
      "routed_scaling_factor":2.5,"first_k_dense_replace":1,"moe_layer_freq":1,"hidden_act":"silu","torch_dtype":"bfloat16"})"},
};

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.emplace_back(preset.name);
  return names;
}

Result<nlohmann::json> config_like(const std::string& like) {
  for (const Preset& preset : kPresets) {
    if (preset.name == like) return nlohmann::json::parse(preset.config);
  }
  std::error_code ignored;
  if (std::filesystem::is_regular_file(like, ignored)) return read_json(like);
  std::string names;
  for (const Preset& preset : kPresets) names += (names.empty() ? "" : ", ") + std::string(preset.name);
  return Status(StatusCode::kInvalidArgument,
                fmt::format("'{}' is neither a config.json nor one of the presets: {}", like, names));
}

}  // namespace sluice::io
