#include "layer/agree.h"

#include <fmt/format.h>

#include <array>

#include "layer/spread.h"
#include "layer/tensors.h"
#include "transport/tell_all.h"

namespace sluice {

namespace {

// 64-bit FNV-1a: not to keep anybody out, only to tell two configurations apart.
class Hash {
 public:
  Hash& operator<<(std::string_view text) {
    for (const char c : text) value_ = (value_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    value_ = (value_ ^ 0x1ffu) * 0x100000001b3ull;
    return *this;
  }
  std::int64_t value() const { return static_cast<std::int64_t>(value_); }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ull;
};

struct Field {
  std::string_view name;
  std::int64_t value;
};
constexpr std::size_t kMaxFields = 16;

std::int64_t hash_rules(const MoeConfig& c) {
  return (Hash() << describe(c.gate) << describe(c.activation) << to_string(c.activation_scale)
                 << (c.weight_on_input ? "on input" : ""))
      .value();
}

// Names, dtypes and shapes of the weights, an expert's for the experts a rank holds.
std::int64_t hash_weights(const LayerWeights& weights) {
  Hash hash;
  for_each_tensor(weights, [&](std::string_view name, const TensorView& view) {
    TensorView one = view;
    if (name.starts_with("experts.")) one.shape[0] = 1;
    hash << name << one.to_string();
  });
  return hash.value();
}

// What has other bits than its neighbour in the table.
std::int64_t hash_implementations(const FfnStages& stages) {
  return (Hash() << stages.up.impl->name << stages.act.impl->name << stages.down.impl->name).value();
}

std::int64_t hash_placement(const Placement& placement) {
  Hash hash;
  for (const std::int32_t expert : placement.slot_expert) hash << std::to_string(expert);
  for (const std::int32_t begin : placement.rank_begin) hash << std::to_string(begin);
  return hash.value();
}

std::vector<Field> common_fields(const Layer::State& s) {
  const MoeConfig& c = s.config;
  return {{"hidden (H)", c.hidden},
          {"num_experts (E)", c.num_experts},
          {"top_k (S)", c.top_k},
          {"max_tokens", s.options.max_tokens},
          {"precision (number)", static_cast<std::int64_t>(s.options.precision)},
          {"the gate, activation and scale format (hash)", hash_rules(c)},
          {"routed_only", s.options.routed_only ? 1 : 0},
          {"the shared expert (1: there is one)", c.shared_intermediate > 0 ? 1 : 0},
          {"the implementations of the experts' stages (hash)", hash_implementations(s.routed)}};
}

Status compare(Transport& transport, std::string_view group, const std::vector<Field>& fields, const Status& made) {
  const std::int64_t num_ranks = transport.num_ranks();
  constexpr std::size_t kWidth = kMaxFields + 1;  // the first says whether the rank has a layer at all
  std::array<std::int64_t, kWidth> mine{made.is_ok() ? 1 : 0};
  for (std::size_t i = 0; i < fields.size(); ++i) mine[1 + i] = fields[i].value;
  std::vector<std::int64_t> told(static_cast<std::size_t>(num_ranks) * kWidth), heard(told.size());
  SLUICE_TRY(tell_all(transport, mine, told, heard).with_context("create"));
  SLUICE_TRY(made);
  for (std::int64_t p = 0; p < num_ranks; ++p) {
    if (heard[static_cast<std::size_t>(p) * kWidth] != 0) continue;
    return {StatusCode::kPeerFailure,
            fmt::format("create: rank {}{} could not make its layer; its own error says why", p, group)};
  }
  for (std::int64_t p = 0; p < num_ranks; ++p) {
    for (std::size_t i = 0; i < fields.size(); ++i) {
      const std::int64_t theirs = heard[static_cast<std::size_t>(p) * kWidth + 1 + i];
      if (theirs == fields[i].value) continue;
      return {StatusCode::kPeerFailure,
              fmt::format("create: rank {}{} was made for another layer: {} is {} there, {} on rank {}", p, group,
                          fields[i].name, theirs, fields[i].value, transport.rank())};
    }
  }
  return Status::ok();
}

}  // namespace

Status agree_spread(const LayerOptions& options, const Layer::State* state, const Status& made) {
  std::vector<Field> fields;
  if (state != nullptr) {
    fields = common_fields(*state);
    fields.push_back({"intermediate (I)", state->config.intermediate});
    fields.push_back({"shared_intermediate", state->config.shared_intermediate});
    fields.push_back({"tokens of a round", state->spread->chunk});
    fields.push_back({"names, dtypes and shapes of the weights (hash)", hash_weights(state->weights)});
    fields.push_back({"the placement (hash)", hash_placement(state->options.placement)});
  }
  return compare(*options.transport, "", fields, made);
}

Status agree_tensor(const LayerOptions& options, const Layer::State* state, const Status& made) {
  std::vector<Field> fields;
  if (state != nullptr) {
    fields = common_fields(*state);
    fields.push_back({"experts of a rank (L)", num_local(state->config)});
    fields.push_back({"the first of them", state->config.first_expert});
    fields.push_back({"the placement (hash)", hash_placement(state->options.placement)});
    fields.push_back({"shared_is_whole", state->options.shared_is_whole ? 1 : 0});
  }
  return compare(*options.tensor_transport, " of the tensor group", fields, made);
}

}  // namespace sluice
