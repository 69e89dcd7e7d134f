// One guarded run of a gate implementation, as every gate test makes it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "gate/rows.h"
#include "harness/buffer.h"
#include "harness/compare.h"
#include "sluice/stage/gate.h"

namespace sluice::test {

inline constexpr GateId kAllGates[] = {GateId::kG1, GateId::kG2, GateId::kG3, GateId::kG4, GateId::kG5,
                                       GateId::kG6, GateId::kG7, GateId::kG8, GateId::kG9, GateId::kG10};

struct Selected {
  std::int64_t num_slots = 0;
  std::vector<std::int32_t> ids;  // [T,S]
  std::vector<float> weights;     // [T,S]
  std::vector<std::byte> bits;    // of both
  std::int64_t num_short = 0;     // by how much the counter rose
  std::vector<std::int32_t> row_ids(std::int64_t t) const {
    return {ids.begin() + t * num_slots, ids.begin() + (t + 1) * num_slots};
  }
  std::vector<float> row_weights(std::int64_t t) const {
    return {weights.begin() + t * num_slots, weights.begin() + (t + 1) * num_slots};
  }
};

// Outputs are poisoned, pitched and guarded; inputs must stay; ids must be distinct and in range, weights no NaN.
inline Selected run_select(const Impl<gate::SelectArgs>& impl, const GateConfig& config, const Buffer& logits,
                           const Buffer* bias, std::int64_t num_slots, int num_threads = 1) {
  const std::int64_t num_tokens = logits.view().shape[0];
  const std::int64_t num_experts = logits.view().shape[1];
  Buffer idx(DType::kI32, {num_tokens, num_slots}, {.row_pitch_elems = num_slots + 3, .offset_elems = 1});
  Buffer weight(DType::kF32, {num_tokens, num_slots}, {.row_pitch_elems = num_slots + 5, .offset_elems = 3});
  Buffer counters(DType::kI64, {kNumCounters});
  counters.fill_constant(5);
  gate::SelectArgs args{config,       logits.view(), bias != nullptr ? bias->view() : TensorView{},
                        {idx.view()}, weight.view(), counters.view()};
  const auto logits_before = logits.bytes();
  const auto bias_before = bias != nullptr ? bias->bytes() : std::vector<std::byte>{};

  const Status checked = gate::check(args);
  EXPECT_TRUE(checked.is_ok()) << checked.message();
  if (!checked.is_ok()) return {};
  const Status ran = run_row(impl, args, num_threads);
  EXPECT_TRUE(ran.is_ok()) << ran.message();

  EXPECT_TRUE(logits.unchanged_since(logits_before));
  if (bias != nullptr) {
    EXPECT_TRUE(bias->unchanged_since(bias_before));
    EXPECT_TRUE(bias->guards_intact());
  }
  EXPECT_TRUE(logits.guards_intact());
  EXPECT_TRUE(idx.guards_intact());
  EXPECT_TRUE(weight.guards_intact());
  EXPECT_TRUE(counters.guards_intact());
  EXPECT_EQ(counters.at(static_cast<std::int64_t>(Counter::kInvalidIds)), 5);

  Selected out;
  out.num_slots = num_slots;
  out.num_short = static_cast<std::int64_t>(counters.at(static_cast<std::int64_t>(Counter::kNonFiniteTokens))) - 5;
  for (double id : idx.to_doubles()) out.ids.push_back(static_cast<std::int32_t>(id));
  for (double w : weight.to_doubles()) out.weights.push_back(static_cast<float>(w));
  out.bits = idx.bytes();
  const auto weight_bits = weight.bytes();
  out.bits.insert(out.bits.end(), weight_bits.begin(), weight_bits.end());
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const auto ids = out.row_ids(t);
    EXPECT_EQ(std::set<std::int32_t>(ids.begin(), ids.end()).size(), ids.size()) << "ids repeat in token " << t;
    for (std::int32_t id : ids) EXPECT_TRUE(id >= 0 && id < num_experts) << "id " << id << " in token " << t;
    for (float w : out.row_weights(t)) EXPECT_FALSE(w != w) << "NaN weight in token " << t;
  }
  return out;
}

// The bias a gate wants, or none.
inline const Buffer* bias_for(const GateConfig& config, const Buffer& bias) {
  return config.has_score_bias ? &bias : nullptr;
}

inline Buffer logits_of(const std::vector<std::vector<double>>& rows) {
  Buffer logits(DType::kF32, {static_cast<std::int64_t>(rows.size()), static_cast<std::int64_t>(rows[0].size())},
                {.row_pitch_elems = static_cast<std::int64_t>(rows[0].size()) + 7, .offset_elems = 5});
  std::vector<double> flat;
  for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  logits.fill_values(flat);
  return logits;
}

inline Buffer vector_of(const std::vector<double>& values) {
  Buffer buffer(DType::kF32, {static_cast<std::int64_t>(values.size())}, {.offset_elems = 1});
  buffer.fill_values(values);
  return buffer;
}

// All released rules with sizes that make sense for (E, S); groups added where asked for.
inline GateConfig preset(GateId id, std::int64_t n_group = 1, std::int64_t topk_group = 1, float factor = 1.0f) {
  GateConfig config = gate_preset(id);
  config.n_group = n_group;
  config.topk_group = topk_group;
  if (n_group > 1 && config.group_score == GroupScore::kNone) config.group_score = GroupScore::kMax;
  config.routed_scaling_factor = factor;
  return config;
}

inline std::string name_of(GateId id) { return "G" + std::to_string(static_cast<int>(id) + 1); }

}  // namespace sluice::test
