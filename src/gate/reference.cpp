// The gate as it is defined, one token at a time: logits in double, the choice by a stable sort.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gate/impls.h"
#include "reference/spec_math.h"

namespace sluice::gate {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

double element(const TensorView& view, std::int64_t row, std::int64_t column) {
  const std::byte* address = view.row(row) + column * size_bytes(view.dtype);
  if (view.dtype == DType::kF32) return *reinterpret_cast<const float*>(address);
  const std::uint32_t bits = *reinterpret_cast<const std::uint16_t*>(address);
  return std::bit_cast<float>(bits << 16);
}

// One of a token's experts.
struct Expert {
  float logit = 0;
  float score = 0;
  float choice = 0;
  bool finite = false;
};

float score_of(Score score, float logit) {
  switch (score) {
    case Score::kSigmoid: return reference::spec_sigmoid(logit);
    case Score::kSqrtSoftplus: return reference::spec_sqrt_softplus(logit);
    case Score::kLogit: return logit;
    case Score::kSoftmax: break;  // needs all experts, see softmax
  }
  return 0.0f;
}

bool is_finite_logit(float logit) { return !std::isnan(logit) && logit != -kInf; }

void softmax(std::vector<Expert>& experts) {
  float largest = -kInf;
  for (const Expert& e : experts) {
    if (is_finite_logit(e.logit)) largest = std::max(largest, e.logit);
  }
  float lane[32] = {};
  for (std::size_t i = 0; i < experts.size(); ++i) {
    Expert& e = experts[i];
    e.score = is_finite_logit(e.logit) ? reference::spec_exp(e.logit - largest) : 0.0f;
    lane[i % 32] += e.score;
  }
  for (int d = 16; d >= 1; d /= 2) {
    for (int j = 0; j < d; ++j) lane[j] += lane[j + d];
  }
  for (Expert& e : experts) e.score /= lane[0];
}

float group_score(GroupScore rule, const Expert* group, std::int64_t size) {
  std::vector<float> choices;
  for (std::int64_t i = 0; i < size; ++i) choices.push_back(group[i].finite ? group[i].choice : -kInf);
  std::stable_sort(choices.begin(), choices.end(), [](float a, float b) { return a > b; });
  return rule == GroupScore::kMax ? choices[0] : choices[0] + choices[1];
}

// The experts that may be chosen, ascending.
std::vector<std::int32_t> candidates(const GateConfig& gate, const std::vector<Expert>& experts) {
  const std::int64_t size = static_cast<std::int64_t>(experts.size()) / gate.n_group;
  std::vector<std::int64_t> groups;
  std::vector<float> scores;
  for (std::int64_t g = 0; g < gate.n_group; ++g) {
    groups.push_back(g);
    scores.push_back(
        gate.n_group == 1 ? 0.0f : group_score(gate.group_score, &experts[static_cast<std::size_t>(g * size)], size));
  }
  std::stable_sort(groups.begin(), groups.end(), [&](std::int64_t a, std::int64_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  groups.resize(static_cast<std::size_t>(gate.topk_group));
  std::sort(groups.begin(), groups.end());
  std::vector<std::int32_t> ids;
  for (std::int64_t g : groups) {
    for (std::int64_t i = 0; i < size; ++i) ids.push_back(static_cast<std::int32_t>(g * size + i));
  }
  return ids;
}

// Weights of the chosen, slot by slot; experts that are not finite have 0.
std::vector<float> weights_of(const GateConfig& gate, const std::vector<Expert>& chosen) {
  std::vector<float> w(chosen.size(), 0.0f);
  float largest = -kInf;
  for (const Expert& e : chosen) {
    if (e.finite) largest = std::max(largest, e.logit);
  }
  float sum_exp = 0.0f;
  for (std::size_t s = 0; s < chosen.size(); ++s) {
    if (!chosen[s].finite) continue;
    switch (gate.weight_rule) {
      case WeightRule::kScore: w[s] = chosen[s].score; break;
      case WeightRule::kSigmoidOfLogit: w[s] = reference::spec_sigmoid(chosen[s].logit); break;
      case WeightRule::kSoftmaxOfChosen:
        w[s] = reference::spec_exp(chosen[s].logit - largest);
        sum_exp += w[s];
        break;
    }
  }
  if (gate.weight_rule == WeightRule::kSoftmaxOfChosen) {
    for (std::size_t s = 0; s < w.size(); ++s) w[s] = chosen[s].finite ? w[s] / sum_exp : 0.0f;
  }
  // "One or the other": where the factor stands in for the renormalisation, a single slot is scaled.
  const bool either = gate.scale_rule == ScaleRule::kUnlessRenorm;
  const bool renormalise = gate.renorm != Renorm::kNone && !(either && w.size() == 1);
  if (renormalise) {
    float sum = 0.0f;
    for (float v : w) sum += v;
    const float divisor = gate.renorm == Renorm::kSum ? sum + 1e-20f : std::max(sum, 1e-12f);
    for (float& v : w) v /= divisor;
  }
  if (!(either && renormalise)) {
    for (float& v : w) v *= gate.routed_scaling_factor;
  }
  for (std::size_t s = 0; s < w.size(); ++s) {
    if (!chosen[s].finite) w[s] = 0.0f;  // +0, whatever the signs of sum and factor
  }
  return w;
}

}  // namespace

Status logits_reference(const LogitsArgs& args, const Ctx&) {
  const std::int64_t num_tokens = args.x.shape[0];
  const std::int64_t hidden = args.x.shape[1];
  const std::int64_t num_experts = args.w_gate.shape[0];
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    float* out = reinterpret_cast<float*>(args.logits.row(t));  // [E]
    for (std::int64_t e = 0; e < num_experts; ++e) {
      double sum = 0;
      for (std::int64_t h = 0; h < hidden; ++h) sum += element(args.x, t, h) * element(args.w_gate, e, h);
      if (args.router_bias.is_present()) sum += args.router_bias.as<float>()[e];
      out[e] = static_cast<float>(sum);
    }
  }
  return Status::ok();
}

Status select_reference(const SelectArgs& args, const Ctx&) {
  const std::int64_t num_tokens = args.logits.shape[0];
  const std::int64_t num_experts = args.logits.shape[1];
  const std::size_t top_k = static_cast<std::size_t>(args.topk_idx.view.shape[1]);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const float* logits = reinterpret_cast<const float*>(args.logits.row(t));  // [E]
    std::vector<Expert> experts(static_cast<std::size_t>(num_experts));
    for (std::size_t i = 0; i < experts.size(); ++i) {
      experts[i].logit = logits[i] == kInf ? kLargest : logits[i];
      experts[i].score = score_of(args.gate.score, experts[i].logit);
    }
    if (args.gate.score == Score::kSoftmax) softmax(experts);
    for (std::size_t i = 0; i < experts.size(); ++i) {
      Expert& e = experts[i];
      e.choice = args.score_bias.is_present() ? e.score + args.score_bias.as<float>()[i] : e.score;
      if (e.choice == kInf) e.choice = kLargest;
      e.finite = is_finite_logit(e.logit) && !std::isnan(e.choice) && e.choice != -kInf;
    }
    std::vector<std::int32_t> ids = candidates(args.gate, experts);
    std::stable_sort(ids.begin(), ids.end(), [&](std::int32_t a, std::int32_t b) {
      const Expert& x = experts[static_cast<std::size_t>(a)];
      const Expert& y = experts[static_cast<std::size_t>(b)];
      if (x.finite != y.finite) return x.finite;
      return x.finite && x.choice > y.choice;
    });
    std::vector<Expert> chosen;
    for (std::size_t s = 0; s < top_k; ++s) chosen.push_back(experts[static_cast<std::size_t>(ids[s])]);
    const std::vector<float> weights = weights_of(args.gate, chosen);
    std::copy_n(ids.begin(), top_k, reinterpret_cast<std::int32_t*>(args.topk_idx.view.row(t)));  // [S]
    std::copy_n(weights.begin(), top_k, reinterpret_cast<float*>(args.topk_weight.row(t)));       // [S]
    const bool short_of_finite = std::any_of(chosen.begin(), chosen.end(), [](const Expert& e) { return !e.finite; });
    if (short_of_finite && args.counters.is_present()) {
      ++args.counters.as<std::int64_t>()[static_cast<std::size_t>(Counter::kNonFiniteTokens)];
    }
  }
  return Status::ok();
}

}  // namespace sluice::gate
