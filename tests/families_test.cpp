// The family table itself: what every row must say, and that no two rows contradict each other.
#include "io/families.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace sluice::io {
namespace {

TEST(Families, EveryRowIsComplete) {
  for (const Family& f : families()) {
    SCOPED_TRACE(f.name);
    EXPECT_EQ(find_family(f.name), &f);
    for (std::string_view other : f.also) EXPECT_EQ(find_family(other), &f);
    // Sizes are never assumed.
    for (const IntKey* key : {&f.hidden, &f.intermediate, &f.experts, &f.top_k}) {
      EXPECT_FALSE(key->names.empty());
      EXPECT_FALSE(key->absent.has_value());
    }
    EXPECT_FALSE(f.layouts.empty());
    EXPECT_FALSE(f.router.empty());
    for (std::string_view module : f.modules) EXPECT_TRUE(module.ends_with("."));
    // A fixed value needs a value; an optional one a default.
    for (const IntKey* key : {&f.n_group, &f.topk_group, &f.layers.first_dense, &f.layers.freq, &f.layers.step,
                              &f.layers.end, &f.layers.hash_layers}) {
      EXPECT_TRUE(!key->names.empty() || key->absent.has_value());
    }
    EXPECT_TRUE(!f.norm.names.empty() || f.norm.absent.has_value());
    // What the gate may ask for has a tensor name.
    const GateConfig gate = gate_preset(f.gate);
    bool score_bias = gate.has_score_bias;
    for (const TopkMethod& m : f.topk_methods) score_bias = score_bias || m.has_score_bias;
    EXPECT_TRUE(!score_bias || !f.score_bias.empty());
    EXPECT_TRUE(!gate.has_router_bias || !f.router_bias.empty());
    const bool shared =
        !f.shared_width.names.empty() || !f.shared_count.names.empty() || f.shared_count.absent.value_or(0) > 0;
    EXPECT_EQ(shared, !f.shared.gate.empty());
    EXPECT_EQ(f.has_shared_gate, !f.shared_expert_gate.empty());
    for (const ExpertLayout& layout : f.layouts) {
      EXPECT_NE(layout.is_fused(), !layout.gate.empty());
      if (!layout.is_fused()) {
        for (std::string_view name : {layout.gate, layout.up, layout.down})
          EXPECT_NE(name.find("{j}"), std::string_view::npos);
      }
    }
    if (!f.topk_methods.empty()) {
      bool found = false;
      for (const TopkMethod& m : f.topk_methods) found = found || m.name == f.topk_method_absent;
      EXPECT_TRUE(found);
    }
  }
}

TEST(Families, NamesAreUniqueAndListed) {
  std::set<std::string_view> names;
  for (const Family& f : families()) {
    EXPECT_TRUE(names.insert(f.name).second) << f.name;
    for (std::string_view other : f.also) EXPECT_TRUE(names.insert(other).second) << other;
    EXPECT_NE(family_names().find(f.name), std::string::npos);
  }
  EXPECT_EQ(find_family("llama"), nullptr);
  EXPECT_EQ(find_family(""), nullptr);
}

TEST(Families, FusedFormsAreKnownForEveryFamily) {
  for (const Family& f : families()) {
    bool fused = false;
    for (const ExpertLayout& layout : f.layouts) fused = fused || layout.is_fused();
    EXPECT_TRUE(fused) << f.name;
  }
}

TEST(Families, Expand) {
  EXPECT_EQ(expand("model.layers.{n}.", 12), "model.layers.12.");
  EXPECT_EQ(expand("experts.{j}.w1", 0), "experts.0.w1");
  EXPECT_EQ(expand("plain", 3), "plain");
}

}  // namespace
}  // namespace sluice::io
