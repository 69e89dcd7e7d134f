// The gate against the public router modules: same experts, same weights, from the logits they computed
// (fixtures/gates, written by oracle/gates.py).
#include <cmath>
#include <fstream>
#include <map>

#include "gate/runs.h"
#include "nlohmann/json.hpp"

namespace sluice::test {
namespace {

class GateOracle : public GateTest {};

using nlohmann::json;

json load() {
  std::ifstream file(std::string(SLUICE_SOURCE_DIR) + "/tests/fixtures/gates/gates.json");
  EXPECT_TRUE(file.good()) << "tests/fixtures/gates/gates.json cannot be read";
  return json::parse(file);
}

GateConfig config_of(const json& c) {
  const int number = std::stoi(c.at("gate").get<std::string>().substr(1));
  GateConfig config = gate_preset(static_cast<GateId>(number - 1));
  config.n_group = c.at("n_group");
  config.topk_group = c.at("topk_group");
  config.routed_scaling_factor = c.at("routed_scaling_factor").get<float>();
  if (!c.at("renormalised").get<bool>()) config.renorm = Renorm::kNone;
  return config;
}

TEST_F(GateOracle, PublicRoutersChooseTheSameExpertsWithTheSameWeights) {
  const json fixture = load();
  const std::int64_t num_tokens = fixture.at("num_tokens");
  ASSERT_GE(fixture.at("cases").size(), 20u);
  std::map<std::string, int> gates_seen;
  for (const json& c : fixture.at("cases")) {
    const std::int64_t num_experts = c.at("num_experts");
    const std::int64_t num_slots = c.at("top_k");
    const std::string name = c.at("module").get<std::string>() + " E=" + std::to_string(num_experts);
    SCOPED_TRACE(name);
    const GateConfig config = config_of(c);
    ++gates_seen[c.at("gate")];
    Buffer logits(DType::kF32, {num_tokens, num_experts});
    logits.fill_values(c.at("logits").get<std::vector<double>>());
    const auto bias_values = c.at("bias").get<std::vector<double>>();
    ASSERT_EQ(bias_values.empty(), !config.has_score_bias);
    Buffer bias(DType::kF32, {num_experts});
    if (config.has_score_bias) bias.fill_values(bias_values);
    const auto ids = c.at("ids").get<std::vector<std::int32_t>>();
    const auto weights = c.at("weights").get<std::vector<float>>();
    ASSERT_EQ(ids.size(), static_cast<std::size_t>(num_tokens * num_slots));

    for (const auto& impl : select_rows()) {
      const Selected got = run_select(impl, config, logits, bias_for(config, bias), num_slots);
      ASSERT_EQ(got.ids.size(), ids.size());
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        // Slot order is not part of the modules' contract: most ask topk for an unsorted answer.
        std::map<std::int32_t, float> want;
        std::map<std::int32_t, float> have;
        for (std::size_t i = static_cast<std::size_t>(t * num_slots); i < static_cast<std::size_t>((t + 1) * num_slots);
             ++i) {
          want[ids[i]] = weights[i];
          have[got.ids[i]] = got.weights[i];
        }
        ASSERT_EQ(want.size(), static_cast<std::size_t>(num_slots));
        for (const auto& [id, weight] : want) {
          ASSERT_TRUE(have.contains(id)) << impl.name << " token " << t << " lacks expert " << id;
          // Relative to the factor: the modules multiply after the rounding of a weight of at most 1.
          EXPECT_NEAR(have[id], weight, 1e-6 * std::max(1.0f, config.routed_scaling_factor))
              << impl.name << " token " << t << " expert " << id;
        }
      }
    }
  }
  for (const char* gate : {"G1", "G2", "G3", "G4", "G5", "G6", "G7", "G9", "G10"})
    EXPECT_GT(gates_seen[gate], 0) << gate;
}

}  // namespace
}  // namespace sluice::test
