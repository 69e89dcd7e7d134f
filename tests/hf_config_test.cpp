// config.json through the family table: sizes, aliases, contradictions, gate rules, layer ranges, ignore lists.
#include "io/hf_config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "harness/checkpoint_files.h"
#include "io/synth.h"

namespace sluice::io {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

HfConfig parse(const json& root) {
  auto config = parse_hf_config(root, "config.json");
  if (!config.is_ok()) throw std::runtime_error(config.status().message());
  return std::move(*config);
}
std::string refusal(const json& root) {
  auto config = parse_hf_config(root, "config.json");
  return config.is_ok() ? "accepted" : config.status().message();
}
json preset(const std::string& name) {
  auto root = config_like(name);
  if (!root.is_ok()) throw std::runtime_error(root.status().message());
  return *root;
}
std::vector<std::int64_t> layers_of(const json& root) {
  std::vector<std::int64_t> layers;
  for (const auto& [layer, moe] : parse(root).moe_layers) layers.push_back(layer);
  return layers;
}

TEST(HfConfig, ReleasedModels) {
  struct Row {
    const char* preset;
    std::int64_t H, I, E, S, shared, first_layer, num_moe;
    const char* gate;
    const char* activation;
  };
  // The figures of the released config.json files, written down independently of the presets.
  const Row rows[] = {
      {"deepseek-v3", 7168, 2048, 256, 8, 2048, 3, 58,
       "sigmoid + bias, 8 groups keep 4 by top-2 sum, renormalised, x2.5", "silu(g)*u"},
      {"deepseek-v2", 5120, 1536, 160, 6, 3072, 1, 59, "softmax, 8 groups keep 3 by max, x16", "silu(g)*u"},
      {"deepseek-v2-lite", 2048, 1408, 64, 6, 2816, 1, 26, "softmax", "silu(g)*u"},
      {"kimi-k2", 7168, 2048, 384, 8, 2048, 1, 60, "sigmoid + bias, renormalised, x2.827", "silu(g)*u"},
      {"qwen3-30b", 2048, 768, 128, 8, 0, 0, 48, "softmax, renormalised", "silu(g)*u"},
      {"qwen3-235b", 4096, 1536, 128, 8, 0, 0, 94, "softmax, renormalised", "silu(g)*u"},
      {"glm-4.5", 5120, 1536, 160, 8, 1536, 3, 89, "sigmoid + bias, renormalised, x2.5", "silu(g)*u"},
      {"glm-4.5-air", 4096, 1408, 128, 8, 1408, 1, 45, "sigmoid + bias, renormalised", "silu(g)*u"},
      {"mixtral-8x7b", 4096, 14336, 8, 2, 0, 0, 32, "softmax, renormalised", "silu(g)*u"},
      {"qwen2-moe-57b", 3584, 2560, 64, 8, 20480, 0, 28, "softmax", "silu(g)*u"},
      {"qwen3-next-80b", 2048, 512, 512, 10, 512, 0, 48, "softmax, renormalised", "silu(g)*u"},
      {"olmoe", 2048, 1024, 64, 8, 0, 0, 16, "softmax", "silu(g)*u"},
      {"minimax-m2", 3072, 1536, 256, 8, 0, 0, 62, "sigmoid + bias, renormalised", "silu(g)*u"},
      {"ernie-4.5-21b", 2560, 1536, 64, 6, 3072, 1, 27, "softmax + bias, renormalised (sum >= 1e-12)", "silu(g)*u"},
      {"llama4-scout", 5120, 8192, 16, 1, 8192, 0, 48, "logit, weight sigmoid(l)", "silu(g)*u"},
      {"hunyuan-a13b", 4096, 3072, 64, 8, 3072, 0, 32, "softmax, renormalised", "silu(g)*u"},
      {"gpt-oss-20b", 2880, 2880, 32, 4, 0, 0, 24, "logit (router bias), softmax of the chosen",
       "(u+1)*g*sigmoid(1.702*g), limit 7"},
      {"gpt-oss-120b", 2880, 2880, 128, 4, 0, 0, 36, "logit (router bias), softmax of the chosen",
       "(u+1)*g*sigmoid(1.702*g), limit 7"},
      {"dots1", 4096, 1408, 128, 6, 2816, 1, 61, "sigmoid + bias, renormalised, x2.5", "silu(g)*u"},
  };
  EXPECT_EQ(preset_names().size(), std::size(rows));
  for (const Row& row : rows) {
    const HfConfig config = parse(preset(row.preset));
    ASSERT_EQ(static_cast<std::int64_t>(config.moe_layers.size()), row.num_moe) << row.preset;
    const auto& [layer, moe] = *config.moe_layers.begin();
    EXPECT_EQ(layer, row.first_layer) << row.preset;
    EXPECT_EQ(moe.hidden, row.H) << row.preset;
    EXPECT_EQ(moe.intermediate, row.I) << row.preset;
    EXPECT_EQ(moe.num_experts, row.E) << row.preset;
    EXPECT_EQ(moe.top_k, row.S) << row.preset;
    EXPECT_EQ(moe.shared_intermediate, row.shared) << row.preset;
    EXPECT_EQ(describe(moe.gate), row.gate) << row.preset;
    EXPECT_EQ(describe(moe.activation), row.activation) << row.preset;
    EXPECT_EQ(moe.weight_on_input, std::string(row.preset) == "llama4-scout");
    EXPECT_EQ(moe.has_shared_gate,
              std::string(row.preset) == "qwen2-moe-57b" || std::string(row.preset) == "qwen3-next-80b");
    EXPECT_TRUE(config.cannot_run.empty());
  }
}

TEST(HfConfig, DeepSeekV2IsOneOrTheOther) {
  json root = preset("deepseek-v2");
  EXPECT_EQ(parse(root).moe_layers.begin()->second.gate.scale_rule, ScaleRule::kUnlessRenorm);
  root["norm_topk_prob"] = true;
  EXPECT_EQ(parse(root).moe_layers.begin()->second.gate.renorm, Renorm::kSum);
}

TEST(HfConfig, EveryFamilyNamesItsMissingKeys) {
  // Each required key taken away in turn, from the table itself.
  for (const std::string& name : preset_names()) {
    const json original = preset(name);
    const Family& family = *parse(original).family;
    for (const IntKey* key : {&family.hidden, &family.intermediate, &family.experts, &family.top_k}) {
      json root = original;
      json& text = root.contains("text_config") ? root["text_config"] : root;
      for (std::string_view alias : key->names) text.erase(std::string(alias));
      EXPECT_THAT(refusal(root),
                  AllOf(HasSubstr(fmt::format("a {} config needs '{}'", family.name, key->names.front())),
                        HasSubstr("which is absent"), HasSubstr("config.json: ")));
      text[std::string(key->names.front())] = nullptr;
      EXPECT_THAT(refusal(root), HasSubstr("which is absent")) << "null counts as absent";
    }
    json root = original;
    (root.contains("text_config") ? root["text_config"] : root).erase("num_hidden_layers");
    EXPECT_THAT(refusal(root), HasSubstr("needs 'num_hidden_layers'"));
  }
}

TEST(HfConfig, AliasesAreAcceptedAndMustAgree) {
  json root = preset("qwen3-30b");
  root.erase("num_experts");
  root["num_local_experts"] = 128;
  EXPECT_EQ(parse(root).moe_layers.at(0).num_experts, 128);
  root["num_experts"] = 128;
  EXPECT_EQ(parse(root).moe_layers.at(0).num_experts, 128);
  root["num_experts"] = 64;
  EXPECT_THAT(refusal(root),
              AllOf(HasSubstr("'num_experts' = 64"), HasSubstr("'num_local_experts' = 128"), HasSubstr("differ")));
  root = preset("ernie-4.5-21b");
  root["num_experts_per_tok"] = 5;
  EXPECT_THAT(refusal(root), AllOf(HasSubstr("'moe_k' = 6"), HasSubstr("'num_experts_per_tok' = 5")));
  // A DeepSeek-V3 config that lacks what its model_type implies.
  root = preset("deepseek-v3");
  root.erase("topk_method");
  root.erase("scoring_func");
  EXPECT_EQ(describe(parse(root).moe_layers.at(3).gate), describe(parse(preset("deepseek-v3")).moe_layers.at(3).gate));
}

TEST(HfConfig, ContradictionsNameFileKeysAndValues) {
  const auto with = [](const std::string& key, const json& value) {
    json root = preset("deepseek-v3");
    root[key] = value;
    return refusal(root);
  };
  EXPECT_THAT(
      with("num_experts_per_tok", 257),
      AllOf(HasSubstr("layer 3: config.json: 'num_experts_per_tok' = 257 is more than 'n_routed_experts' = 256")));
  EXPECT_THAT(with("topk_group", 9), HasSubstr("'topk_group' = 9 is not between 1 and 'n_group' = 8"));
  EXPECT_THAT(with("topk_group", 0), HasSubstr("'topk_group' = 0"));
  EXPECT_THAT(with("n_group", 7), HasSubstr("'n_routed_experts' = 256 is not divisible by 'n_group' = 7"));
  EXPECT_THAT(with("n_group", 0), HasSubstr("'n_group' = 0"));
  EXPECT_THAT(with("hidden_size", 0), HasSubstr("'hidden_size' = 0 is not between 1 and 2^31"));
  EXPECT_THAT(with("hidden_size", -5), HasSubstr("'hidden_size' = -5"));
  EXPECT_THAT(with("hidden_size", 7168.5), HasSubstr("'hidden_size' is 7168.5, expected an integer"));
  EXPECT_THAT(with("hidden_size", "7168"), HasSubstr("'hidden_size' is \"7168\", expected an integer"));
  EXPECT_THAT(with("hidden_size", 18446744073709551615u), HasSubstr("expected an integer"));
  EXPECT_THAT(with("n_shared_experts", -1), HasSubstr("'n_shared_experts' = -1"));
  EXPECT_THAT(with("norm_topk_prob", 1), HasSubstr("'norm_topk_prob' is 1, expected true or false"));
  EXPECT_THAT(with("routed_scaling_factor", "2.5"), HasSubstr("expected a finite number"));
  EXPECT_THAT(with("topk_method", "best"),
              HasSubstr("'topk_method' is 'best', expected one of greedy, group_limited_greedy, noaux_tc"));
  EXPECT_THAT(with("topk_method", 3), HasSubstr("'topk_method' is '3'"));
  EXPECT_THAT(with("scoring_func", "tanh"), HasSubstr("'scoring_func' is 'tanh'"));
  EXPECT_THAT(with("num_hidden_layers", 0), HasSubstr("'num_hidden_layers' = 0"));
  EXPECT_THAT(with("moe_layer_freq", 0), HasSubstr("'moe_layer_freq' = 0 must be at least 1"));
  EXPECT_THAT(with("num_experts_per_tok", json::array({8, 8})),
              HasSubstr("'num_experts_per_tok' is a list of 2 values, but num_hidden_layers = 61"));
  EXPECT_THAT(with("model_type", "llama"),
              AllOf(HasSubstr("model_type 'llama' is not known"), HasSubstr("deepseek_v3"), HasSubstr("gpt_oss")));
  EXPECT_THAT(with("model_type", 3), HasSubstr("'model_type' is absent or no string"));
  EXPECT_THAT(with("quantization_config", 3), HasSubstr("'quantization_config' is 3, expected an object"));
  EXPECT_THAT(with("quantization_config", json::object()), HasSubstr("no 'quant_method'"));
  EXPECT_THAT(with("quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128}}}),
              HasSubstr("two positive integers"));
  EXPECT_THAT(with("quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128, 0}}}),
              HasSubstr("two positive integers"));
  EXPECT_THAT(with("quantization_config", {{"quant_method", "fp8"}, {"ignore", "lm_head"}}),
              HasSubstr("expected a list of module names"));
  EXPECT_THAT(refusal(json::array()), HasSubstr("expected an object"));
  json ernie = preset("ernie-4.5-21b");
  ernie["moe_norm_min"] = 1e-6;
  EXPECT_THAT(refusal(ernie), HasSubstr("'moe_norm_min' is 1e-06; only 1e-12 is implemented"));
  json llama = preset("llama4-scout");
  llama["text_config"]["num_experts_per_tok"] = 2;
  EXPECT_THAT(refusal(llama), HasSubstr("weight_on_input needs top_k = 1"));
}

TEST(HfConfig, Case40_ScaleFmtIsReadAndNothingElseIsTakenForIt) {
  const auto with = [](const json& value) {
    json root = preset("deepseek-v3");
    root["quantization_config"]["scale_fmt"] = value;
    return root;
  };
  const HfConfig ue8m0 = parse(with("ue8m0"));
  EXPECT_EQ(ue8m0.quant.scale_format, ScaleFormat::kUe8m0);
  for (const auto& [layer, moe] : ue8m0.moe_layers) EXPECT_EQ(moe.activation_scale, ScaleFormat::kUe8m0) << layer;
  for (const json& root : {preset("deepseek-v3"), with(nullptr), with("float"), preset("qwen3-30b")}) {
    for (const auto& [layer, moe] : parse(root).moe_layers) EXPECT_EQ(moe.activation_scale, ScaleFormat::kF32) << layer;
  }
  EXPECT_THAT(refusal(with("e8m0")), HasSubstr("quantization_config 'scale_fmt' is \"e8m0\", expected float or ue8m0"));
  EXPECT_THAT(refusal(with("UE8M0")), HasSubstr("'scale_fmt' is \"UE8M0\""));
  EXPECT_THAT(refusal(with("")), HasSubstr("'scale_fmt' is \"\""));
  EXPECT_THAT(refusal(with(8)), HasSubstr("'scale_fmt' is 8, expected a string"));
  // Beside the vision tower, in the language model's own config.
  json nested = {{"model_type", "kimi_k25"}, {"text_config", with("ue8m0")}};
  EXPECT_EQ(parse(nested).moe_layers.begin()->second.activation_scale, ScaleFormat::kUe8m0);
}

TEST(HfConfig, Case13And14ImpossibleGatesAreRefused) {
  const auto gate = [](int E, int n_group, int topk_group, int S) {
    json root = preset("deepseek-v3");
    root["n_routed_experts"] = E;
    root["n_group"] = n_group;
    root["topk_group"] = topk_group;
    root["num_experts_per_tok"] = S;
    return refusal(root);
  };
  EXPECT_EQ(gate(8, 4, 2, 4), "accepted");
  EXPECT_NE(gate(8, 8, 4, 2), "accepted") << "one expert in a group scored by its top two";
  EXPECT_NE(gate(8, 4, 1, 4), "accepted") << "two candidates for four slots";
  EXPECT_NE(gate(10, 4, 2, 2), "accepted");
  EXPECT_NE(gate(4, 1, 1, 5), "accepted");
}

TEST(HfConfig, Case18NormTopkProbIsReadAndItsDefaultIsTheFamilys) {
  for (const auto& [name, absent] :
       {std::pair("qwen3-30b", false), std::pair("qwen2-moe-57b", false), std::pair("olmoe", false),
        std::pair("qwen3-next-80b", true), std::pair("deepseek-v3", true), std::pair("dots1", false)}) {
    json root = preset(name);
    for (bool flag : {true, false}) {
      root["norm_topk_prob"] = flag;
      EXPECT_EQ(parse(root).moe_layers.begin()->second.gate.renorm != Renorm::kNone, flag) << name;
    }
    root.erase("norm_topk_prob");
    EXPECT_EQ(parse(root).moe_layers.begin()->second.gate.renorm != Renorm::kNone, absent) << name;
  }
}

TEST(HfConfig, LayerRanges) {
  json root = preset("deepseek-v3");
  root["num_hidden_layers"] = 8;
  EXPECT_THAT(layers_of(root), ElementsAre(3, 4, 5, 6, 7));
  root["moe_layer_freq"] = 2;
  EXPECT_THAT(layers_of(root), ElementsAre(4, 6));
  root["mlp_layer_types"] = {"dense", "sparse", "dense", "dense", "sparse", "dense", "dense", "dense"};
  EXPECT_THAT(layers_of(root), ElementsAre(1, 4));
  root["mlp_layer_types"] = {"dense", "sparse"};
  EXPECT_THAT(refusal(root), HasSubstr("'mlp_layer_types' must list one word for each of the 8 layers"));
  root["mlp_layer_types"] = json::array({"dense", "?", "dense", "dense", "dense", "dense", "dense", "dense"});
  EXPECT_THAT(refusal(root), HasSubstr("'mlp_layer_types'[1] is \"?\""));

  root = preset("qwen3-30b");
  root["num_hidden_layers"] = 6;
  root["decoder_sparse_step"] = 2;
  root["mlp_only_layers"] = {3};
  EXPECT_THAT(layers_of(root), ElementsAre(1, 5));
  root["mlp_only_layers"] = {"3"};
  EXPECT_THAT(refusal(root), HasSubstr("'mlp_only_layers' holds \"3\", expected layer numbers"));

  root = preset("ernie-4.5-21b");
  root["num_hidden_layers"] = 9;
  root["moe_layer_start_index"] = 2;
  root["moe_layer_end_index"] = 6;
  root["moe_layer_interval"] = 2;
  EXPECT_THAT(layers_of(root), ElementsAre(3, 5));
  root["moe_layer_end_index"] = -1;
  EXPECT_THAT(layers_of(root), ElementsAre(3, 5, 7));

  root = preset("llama4-scout");
  json& text = root["text_config"];
  text["num_hidden_layers"] = 5;
  text["interleave_moe_layer_step"] = 2;
  EXPECT_THAT(layers_of(root), ElementsAre(1, 3));
  text["moe_layers"] = {0, 4};
  EXPECT_THAT(layers_of(root), ElementsAre(0, 4));
  text["moe_layers"] = nullptr;
  EXPECT_THAT(layers_of(root), ElementsAre(1, 3));
}

TEST(HfConfig, SizesPerLayer) {
  json root = preset("hunyuan-a13b");
  root["num_hidden_layers"] = 3;
  root["moe_topk"] = {1, 8, 2};
  root["num_shared_expert"] = {1, 2, 0};
  root["moe_intermediate_size"] = {3072, 3072, 3072};
  const HfConfig config = parse(root);
  EXPECT_EQ(config.moe_layers.at(1).top_k, 8);
  EXPECT_EQ(config.moe_layers.at(2).top_k, 2);
  EXPECT_EQ(config.moe_layers.at(1).shared_intermediate, 6144);
  EXPECT_EQ(config.moe_layers.at(2).shared_intermediate, 0);
}

TEST(HfConfig, WhatIsKnownAndCannotRun) {
  json root =
      json::parse(R"({"model_type":"deepseek_v4","num_hidden_layers":5,"hidden_size":64,"moe_intermediate_size":32,
      "n_routed_experts":8,"num_experts_per_tok":2,"scoring_func":"sqrtsoftplus","num_hash_layers":2})");
  const HfConfig config = parse(root);
  EXPECT_EQ(config.moe_layers.size(), 5u);
  EXPECT_EQ(config.cannot_run.size(), 2u);
  EXPECT_THAT(config.cannot_run.at(1), HasSubstr("by token id"));
  EXPECT_EQ(describe(config.moe_layers.at(2).gate), "sqrt-softplus + bias, renormalised, x1.5");
  EXPECT_EQ(describe(config.moe_layers.at(2).activation), "silu(g)*u, limit 10");
  root = preset("qwen3-30b");
  root["hidden_act"] = "gelu";
  EXPECT_THAT(parse(root).cannot_run.at(0), HasSubstr("'hidden_act' is \"gelu\""));
}

TEST(HfConfig, NestedTextConfig) {
  json root = preset("llama4-scout");
  root["hidden_size"] = 1;  // of the vision tower, say
  EXPECT_EQ(parse(root).moe_layers.at(0).hidden, 5120);
  EXPECT_EQ(parse(root).model_type, "llama4_text");
  root["text_config"].erase("model_type");
  EXPECT_EQ(parse(root).model_type, "llama4");
  json kimi = {{"model_type", "kimi_k25"}, {"text_config", preset("kimi-k2")}};
  kimi["text_config"]["model_type"] = "kimi_k2";
  EXPECT_EQ(parse(kimi).quant.block_rows, 128);
}

TEST(HfConfig, FilesThatAreNoJson) {
  test::TempFolder folder;
  const auto refuse = [&](const std::string& text) {
    test::write_text(folder / "config.json", text);
    return read_hf_config(folder / "config.json").status().message();
  };
  EXPECT_THAT(refuse(""), HasSubstr("config.json: JSON error at byte 1"));
  EXPECT_THAT(refuse("{\"model_type\": }"), HasSubstr("JSON error at byte 16"));
  EXPECT_THAT(refuse(R"({"model_type":"olmoe","a":{"b":1,"b":2}})"), HasSubstr("the key 'b' appears twice"));
  EXPECT_THAT(refuse(R"({"model_type":"olmoe","a":{"b":1},"c":{"b":2}})"), HasSubstr("needs 'num_hidden_layers'"));
  EXPECT_EQ(read_hf_config(folder / "absent").status().code(), StatusCode::kNotFound);
}

TEST(IgnoreList, Case136WholeComponents) {
  const auto covers = [](const std::vector<std::string>& patterns, std::string_view module) {
    auto list = IgnoreList::compile(patterns);
    if (!list.is_ok()) throw std::runtime_error(list.status().message());
    auto result = list->covers(module);
    if (!result.is_ok()) throw std::runtime_error(result.status().message());
    return *result;
  };
  const std::string layer = "model.layers.3.";
  EXPECT_TRUE(covers({"mlp.gate"}, layer + "mlp.gate"));
  EXPECT_FALSE(covers({"mlp.gate"}, layer + "mlp.gate_proj"));
  EXPECT_FALSE(covers({"mlp.gate"}, layer + "mlp.experts.0.gate_proj"));
  EXPECT_FALSE(covers({"Gate"}, layer + "mlp.gate"));
  EXPECT_FALSE(covers({"gat", "mlp.gat", "p.gate"}, layer + "mlp.gate"));
  EXPECT_TRUE(covers({"model.layers.3"}, layer + "mlp.experts.0.gate_proj")) << "a parent covers its children";
  EXPECT_FALSE(covers({"model.layers.3"}, "model.layers.30.mlp.gate"));
  EXPECT_FALSE(covers({"mlp.experts.0.gate_proj"}, layer + "mlp.experts")) << "a child does not cover its parent";
  EXPECT_TRUE(covers({"model.layers.*.mlp.router"}, layer + "mlp.router"));
  EXPECT_FALSE(covers({"model.layers.*.router"}, layer + "mlp.router"));
  EXPECT_TRUE(covers({"re:.*lm_head"}, "lm_head"));
  EXPECT_TRUE(covers({"re:.*mlp[.]gate$"}, layer + "mlp.gate"));
  EXPECT_FALSE(covers({"re:.*mlp[.]gate$"}, layer + "mlp.gate_proj"));
  EXPECT_FALSE(covers({"re:lm_head"}, "model.lm_head")) << "anchored at the start";
  EXPECT_FALSE(covers({""}, layer + "mlp.gate"));
  // Fused modules: both children, none, or one.
  EXPECT_TRUE(covers({"experts.0.gate_proj", "experts.0.up_proj"}, layer + "mlp.experts.0.gate_up_proj"));
  EXPECT_FALSE(covers({"experts.1.gate_proj", "experts.1.up_proj"}, layer + "mlp.experts.0.gate_up_proj"));
  EXPECT_THROW(covers({"experts.0.gate_proj"}, layer + "mlp.experts.0.gate_up_proj"), std::runtime_error);
  EXPECT_THROW(covers({"re:["}, "x"), std::runtime_error);
}

}  // namespace
}  // namespace sluice::io
