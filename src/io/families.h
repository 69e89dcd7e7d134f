// What distinguishes one model family's checkpoints from another's, as data: config keys, gate rule, activation,
// which layers have experts, tensor names and layouts. A family is one row of families(); there is no code per family.
#pragma once

#include <array>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>

#include "sluice/config.h"

namespace sluice::io {

// A short list that is part of a constant table.
template <class T, std::size_t N>
class Few {
 public:
  constexpr Few() = default;
  constexpr Few(std::initializer_list<T> items) {  // NOLINT: implicit by design
    for (const T& item : items) items_[size_++] = item;
  }
  constexpr const T* begin() const { return items_.data(); }
  constexpr const T* end() const { return items_.data() + size_; }
  constexpr const T& front() const { return items_[0]; }
  constexpr bool empty() const { return size_ == 0; }

 private:
  std::array<T, N> items_{};
  std::size_t size_ = 0;
};
using Names = Few<std::string_view, 3>;

// A config value: the keys that may carry it (all that are present must agree) and what holds when none is.
// No keys: the value is fixed by the family. No default: the key is required.
template <class T>
struct Key {
  Names names{};
  std::optional<T> absent{};
};
using IntKey = Key<std::int64_t>;
using FloatKey = Key<double>;
using BoolKey = Key<bool>;

// One value of "topk_method" and what it means for the gate.
struct TopkMethod {
  std::string_view name{};
  GroupScore group_score = GroupScore::kNone;  // kNone: n_group and topk_group are not read
  bool has_score_bias = false;
};

// Layer l has experts when all of these allow it.
struct LayerRule {
  IntKey first_dense{{}, 0};      // l >= first_dense
  IntKey freq{{}, 1};             // l % freq == 0
  IntKey step{{}, 1};             // (l + 1) % step == 0
  IntKey start{{}, 0};            // start <= l
  IntKey end{{}, -1};             // l <= end; -1: the last layer
  std::string_view dense_list{};  // key of the layers without experts
  std::string_view moe_list{};    // key of the layers with experts; when present it replaces first_dense .. dense_list
  std::string_view type_list{};   // key of one word per layer: "dense", "sparse", "moe", "hash_moe"; replaces the rest
  IntKey hash_layers{{}, 0};      // the first layers choose experts by token id instead of by a gate
};

// Order of gate and up in a fused [2I] axis.
enum class GateUp : std::uint8_t { kGateFirst, kUpFirst, kInterleaved /* g0,u0,g1,u1,... */ };

// How the experts lie in the files. "{j}" stands for the expert. Names are relative to the layer's MoE module.
struct ExpertLayout {
  // Per expert: three modules with ".weight" ([I,H], [I,H], [H,I]) and scales beside it. Empty for fused layouts.
  std::string_view gate{}, up{}, down{};
  // Fused: the tensors themselves, [E,2I,H] and [E,H,I], or transposed, [E,H,2I] and [E,I,H].
  std::string_view fused_gate_up{}, fused_down{};
  bool transposed = false;
  GateUp order = GateUp::kGateFirst;
  std::string_view gate_up_bias{}, down_bias{};  // [E,2I] in the same order, [E,H]; "" without biases

  bool is_fused() const { return !fused_gate_up.empty(); }
};

// The three modules of the shared expert, each with ".weight". All empty: the family has none.
struct SharedModules {
  std::string_view gate{}, up{}, down{};
};

struct Family {
  std::string_view name{};  // model_type
  Names also{};             // other model_types of the same row

  IntKey hidden{{"hidden_size"}, {}};
  IntKey intermediate{{"moe_intermediate_size"}, {}};
  IntKey experts{{"n_routed_experts", "num_experts", "num_local_experts"}, {}};
  IntKey top_k{{"num_experts_per_tok"}, {}};
  IntKey shared_count{{}, 0};   // shared experts, each as wide as a routed one
  IntKey shared_width{{}, {}};  // or the width of the shared expert itself, where names is not empty
  bool has_shared_gate = false;

  GateId gate = GateId::kG4;
  IntKey n_group{{}, 1};
  IntKey topk_group{{}, 1};
  Few<TopkMethod, 3> topk_methods{};  // empty: "topk_method" is not read
  std::string_view topk_method_absent{};
  bool reads_scoring_func = false;   // absent: the preset's score
  BoolKey use_score_bias{{}, true};  // may switch off the preset's score bias
  BoolKey norm{{}, true};
  FloatKey norm_min{{}, {}};  // only 1e-12 exists; another value is refused
  FloatKey factor{{}, 1.0};
  bool weight_on_input = false;

  ActivationKind activation = ActivationKind::kSilu;
  FloatKey limit{{}, 0.0};
  FloatKey alpha{{}, 0.0};

  LayerRule layers{};

  // Tensor names relative to the MoE module; the first that exists is used.
  Names modules{"mlp."};
  Names router{"gate.weight"};
  Names router_bias{};
  Names score_bias{};
  SharedModules shared{};
  std::string_view shared_expert_gate{};  // [1,H]
  Few<ExpertLayout, 2> layouts{};         // the first is what released checkpoints use, and what synth writes
};

std::span<const Family> families();
const Family* find_family(std::string_view model_type);
std::string family_names();  // "deepseek_v2, deepseek_v3, ..."

// Where a decoder layer may be found; "{n}" stands for its number.
inline constexpr std::string_view kLayerPrefixes[] = {"model.layers.{n}.", "model.language_model.layers.{n}.",
                                                      "language_model.model.layers.{n}.", "layers.{n}."};

// `pattern` with its "{n}" or "{j}" replaced.
std::string expand(std::string_view pattern, std::int64_t number);

}  // namespace sluice::io
