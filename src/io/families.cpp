// The table. Every default says where it comes from: "released" are the config.json files the model's authors
// published, "class" the default of the configuration class in the public transformers implementation, "fixed" a
// constant of the authors' modelling code that no key changes.
#include "io/families.h"

namespace sluice::io {
namespace {

// Most families name their experts so; the fused form is what frameworks keep in memory and sometimes save.
constexpr ExpertLayout kPerExpert = {
    .gate = "experts.{j}.gate_proj", .up = "experts.{j}.up_proj", .down = "experts.{j}.down_proj"};
constexpr ExpertLayout kPerExpertW = {.gate = "experts.{j}.w1", .up = "experts.{j}.w3", .down = "experts.{j}.w2"};
constexpr ExpertLayout kFused = {.fused_gate_up = "experts.gate_up_proj", .fused_down = "experts.down_proj"};
constexpr ExpertLayout kFusedTransposed = {
    .fused_gate_up = "experts.gate_up_proj", .fused_down = "experts.down_proj", .transposed = true};
constexpr ExpertLayout kGptOss = {.fused_gate_up = "experts.gate_up_proj",
                                  .fused_down = "experts.down_proj",
                                  .transposed = true,  // the MXFP4 form is not: its blocks run along the inputs
                                  .order = GateUp::kInterleaved,
                                  .gate_up_bias = "experts.gate_up_proj_bias",
                                  .down_bias = "experts.down_proj_bias"};

constexpr Few<ExpertLayout, 2> kProjLayouts = {kPerExpert, kFused};

// The shared expert's modules, under the names the families give it.
constexpr SharedModules kSharedExperts = {"shared_experts.gate_proj", "shared_experts.up_proj",
                                          "shared_experts.down_proj"};
constexpr SharedModules kSharedExpertsW = {"shared_experts.w1", "shared_experts.w3", "shared_experts.w2"};
constexpr SharedModules kSharedExpert = {"shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"};
constexpr SharedModules kSharedMlp = {"shared_mlp.gate_proj", "shared_mlp.up_proj", "shared_mlp.down_proj"};

// Layers with experts by decoder_sparse_step, but for those that are named (the Qwen classes).
constexpr LayerRule kSparseSteps = {.step = {{"decoder_sparse_step"}, 1}, .dense_list = "mlp_only_layers"};

// DeepSeek and the families that took over its code: the same keys and tensor names. What differs is what holds where a key
// is absent; no value: the key is required.
struct DeepSeekValues {
  std::string_view name{};
  Names also{};
  GateId gate = GateId::kG3;
  std::optional<std::int64_t> n_shared_experts{}, n_group{}, topk_group{};
  std::string_view topk_method{};
  std::optional<bool> norm_topk_prob{};
  std::optional<double> routed_scaling_factor{};
  std::optional<std::int64_t> first_k_dense_replace{};
  Names freq{"moe_layer_freq"};  // absent: 1
  std::string_view type_list{};
};
constexpr Family deepseek(const DeepSeekValues& v) {
  return {
      .name = v.name,
      .also = v.also,
      .shared_count = {{"n_shared_experts"}, v.n_shared_experts},
      .gate = v.gate,
      .n_group = {{"n_group"}, v.n_group},
      .topk_group = {{"topk_group"}, v.topk_group},
      .topk_methods = {{"greedy", GroupScore::kNone, false},
                       {"group_limited_greedy", GroupScore::kMax, false},
                       {"noaux_tc", GroupScore::kTop2Sum, true}},
      .topk_method_absent = v.topk_method,
      .reads_scoring_func = true,
      .norm = {{"norm_topk_prob"}, v.norm_topk_prob},
      .factor = {{"routed_scaling_factor"}, v.routed_scaling_factor},
      .layers = {.first_dense = {{"first_k_dense_replace"}, v.first_k_dense_replace},
                 .freq = {v.freq, 1},
                 .type_list = v.type_list},
      .score_bias = {"gate.e_score_correction_bias"},
      .shared = kSharedExperts,
      .layouts = kProjLayouts,
  };
}

constexpr Family kFamilies[] = {

    deepseek({
        .name = "deepseek_v2",  // DeepSeek-V2, V2-Lite, V2.5
        .gate = GateId::kG2,
        .n_group = 1,                  // released V2-Lite
        .topk_group = 1,               // released V2-Lite
        .topk_method = "greedy",       // class
        .norm_topk_prob = false,       // class
        .routed_scaling_factor = 1.0,  // class
        .first_k_dense_replace = 0,    // class
    }),

    deepseek({
        .name = "deepseek_v3",  // DeepSeek-V3, R1, V3.1, Moonlight
        .also = {"deepseek_v32"},
        .n_shared_experts = 1,         // class
        .n_group = 8,                  // class
        .topk_group = 4,               // class
        .topk_method = "noaux_tc",     // fixed in the class, which has no such key
        .norm_topk_prob = true,        // class
        .routed_scaling_factor = 2.5,  // class
        .first_k_dense_replace = 3,    // class
        .type_list = "mlp_layer_types",
    }),

    deepseek({
        .name = "kimi_k2",  // Kimi K2; K2.5 nests it in a text_config
        .also = {"kimi_k25"},
        .n_group = 1,               // released
        .topk_group = 1,            // released
        .topk_method = "noaux_tc",  // released
        .norm_topk_prob = true,     // released; routed_scaling_factor, 2.827 there, is not a number to assume
    }),

    deepseek({
        .name = "glm4_moe",            // GLM-4.5, Air, 4.6
        .n_shared_experts = 1,         // class
        .n_group = 1,                  // class
        .topk_group = 1,               // class
        .topk_method = "noaux_tc",     // fixed
        .norm_topk_prob = true,        // class
        .routed_scaling_factor = 1.0,  // class
        .first_k_dense_replace = 1,    // class
        .freq = {},
    }),

    deepseek({
        .name = "dots1",
        .n_group = 1,                  // class
        .topk_group = 1,               // class
        .topk_method = "noaux_tc",     // fixed
        .norm_topk_prob = false,       // class
        .routed_scaling_factor = 1.0,  // class
        .first_k_dense_replace = 0,    // class
    }),

    {
        .name = "qwen2_moe",
        .shared_width = {{"shared_expert_intermediate_size"}, {}},
        .has_shared_gate = true,  // fixed
        .gate = GateId::kG1,
        .norm = {{"norm_topk_prob"}, false},  // class
        .layers = kSparseSteps,               // class
        .shared = kSharedExpert,
        .shared_expert_gate = "shared_expert_gate.weight",
        .layouts = kProjLayouts,
    },

    {
        .name = "qwen3_moe",
        .gate = GateId::kG4,
        .norm = {{"norm_topk_prob"}, false},  // class; released files say true
        .layers = kSparseSteps,               // class
        .layouts = kProjLayouts,
    },

    {
        .name = "qwen3_next",
        .shared_width = {{"shared_expert_intermediate_size"}, {}},
        .has_shared_gate = true,  // fixed
        .gate = GateId::kG4,
        .norm = {{"norm_topk_prob"}, true},  // class
        .layers = kSparseSteps,              // class
        .shared = kSharedExpert,
        .shared_expert_gate = "shared_expert_gate.weight",
        .layouts = kProjLayouts,
    },

    {
        .name = "olmoe",
        .intermediate = {{"intermediate_size"}, {}},
        .gate = GateId::kG1,
        .norm = {{"norm_topk_prob"}, false},  // class
        .layouts = kProjLayouts,
    },

    {
        .name = "mixtral",
        .intermediate = {{"intermediate_size"}, {}},
        .gate = GateId::kG4,
        .norm = {{}, true},  // fixed
        .modules = {"block_sparse_moe.", "mlp."},
        .layouts = {kPerExpertW, kFused},
    },

    {
        .name = "minimax_m2",
        .intermediate = {{"intermediate_size"}, {}},
        .gate = GateId::kG7,
        .reads_scoring_func = true,                      // released: sigmoid
        .use_score_bias = {{"use_routing_bias"}, true},  // fixed in the class; released: true
        .norm = {{}, true},                              // fixed
        .modules = {"block_sparse_moe.", "mlp."},
        .score_bias = {"e_score_correction_bias"},
        .layouts = {kPerExpertW, kFused},
    },

    {
        .name = "ernie4_5_moe",
        .experts = {{"moe_num_experts", "num_experts", "num_local_experts"}, {}},
        .top_k = {{"moe_k", "num_experts_per_tok"}, {}},
        .shared_count = {{"moe_num_shared_experts"}, {}},
        .gate = GateId::kG10,
        .norm = {{}, true},                              // fixed
        .norm_min = {{"moe_norm_min"}, 1e-12},           // class
        .layers = {.step = {{"moe_layer_interval"}, 1},  // class
                   .start = {{"moe_layer_start_index"}, {}},
                   .end = {{"moe_layer_end_index"}, -1}},  // class: the last layer
        .score_bias = {"moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"},
        .shared = kSharedExperts,
        .layouts = kProjLayouts,
    },

    {
        .name = "llama4_text",  // Scout, Maverick; "llama4" nests it in a text_config
        .also = {"llama4"},
        .intermediate = {{"intermediate_size"}, {}},  // dense layers use intermediate_size_mlp
        .shared_count = {{}, 1},                      // fixed
        .gate = GateId::kG6,
        .norm = {{}, false},  // fixed
        .weight_on_input = true,
        .layers = {.step = {{"interleave_moe_layer_step"}, 1}, .moe_list = "moe_layers"},  // class
        .modules = {"feed_forward."},
        .router = {"router.weight"},
        .shared = kSharedExpert,
        // Per-expert names: the form quantising tools split the fused tensors into.
        .layouts = {kFusedTransposed, kPerExpert},
    },

    {
        .name = "hunyuan_v1_moe",  // Hunyuan-A13B; sizes may be lists with one entry per layer
        .intermediate = {{"moe_intermediate_size", "intermediate_size"}, {}},
        .top_k = {{"moe_topk", "num_experts_per_tok"}, {}},
        .shared_count = {{"num_shared_expert"}, 1},  // fixed in the class, which has no such key
        .gate = GateId::kG4,
        .norm = {{}, true},  // fixed: renormalised whatever norm_topk_prob says
        .router = {"gate.wg.weight"},
        .shared = kSharedMlp,
        .layouts = kProjLayouts,
    },

    {
        .name = "gpt_oss",
        .intermediate = {{"intermediate_size"}, {}},
        .top_k = {{"num_experts_per_tok", "experts_per_token"}, {}},
        .gate = GateId::kG5,
        .norm = {{}, false},  // the softmax over the chosen sums to one
        .activation = ActivationKind::kGptOss,
        .limit = {{"swiglu_limit"}, 7.0},    // class, released
        .alpha = {{"swiglu_alpha"}, 1.702},  // class
        .router = {"router.weight"},
        .router_bias = {"router.bias"},
        .layouts = {kGptOss},
    },

    {
        .name = "deepseek_v4",
        .intermediate = {{"moe_intermediate_size", "intermediate_size"}, {}},
        .shared_count = {{"n_shared_experts"}, 1},  // class
        .gate = GateId::kG9,
        .reads_scoring_func = true,                  // class: sqrtsoftplus
        .norm = {{}, true},                          // fixed
        .factor = {{"routed_scaling_factor"}, 1.5},  // class
        .activation = ActivationKind::kSiluClamped,
        .limit = {{"swiglu_limit"}, 10.0},                                                    // class
        .layers = {.type_list = "mlp_layer_types", .hash_layers = {{"num_hash_layers"}, 3}},  // class
        .modules = {"ffn.", "mlp."},
        .score_bias = {"gate.bias", "gate.e_score_correction_bias"},
        .shared = kSharedExpertsW,
        .layouts = {kPerExpertW, kFused},
    },

};

}  // namespace

std::span<const Family> families() { return kFamilies; }

const Family* find_family(std::string_view model_type) {
  for (const Family& family : families()) {
    if (family.name == model_type) return &family;
    for (std::string_view other : family.also) {
      if (other == model_type) return &family;
    }
  }
  return nullptr;
}

std::string family_names() {
  std::string text;
  for (const Family& family : families()) {
    if (!text.empty()) text += ", ";
    text += family.name;
  }
  return text;
}

std::string expand(std::string_view pattern, std::int64_t number) {
  const auto at = pattern.find('{');
  if (at == std::string_view::npos) return std::string(pattern);
  std::string text(pattern.substr(0, at));
  text += std::to_string(number);
  text += pattern.substr(at + 3);
  return text;
}

}  // namespace sluice::io
