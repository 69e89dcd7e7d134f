// Turning implementations on and off by name: lists, the environment, and what is said of wrong names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "harness/layer_run.h"

namespace sluice::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class Environment {
 public:
  explicit Environment(const char* value) { setenv("SLUICE_DISABLE", value, 1); }
  ~Environment() { unsetenv("SLUICE_DISABLE"); }
};

TEST(Selection, ListsReachEveryStageOrOne) {
  std::map<std::string, Selection> selection;
  ASSERT_TRUE(disable("reference,pack:cpu", selection).is_ok());
  EXPECT_THAT(selection["pack"].disabled, ElementsAre("reference", "cpu"));
  EXPECT_THAT(selection["grouped_gemm"].disabled, ElementsAre("reference"));
  // Every stage has a reference but the fused one, which is held to the stages it replaces.
  for (const StageNames& table : stage_names()) {
    const bool is_fused = table.stage == "up_swiglu_quant" || table.stage == "route_pack";
    EXPECT_EQ(table.impls.back(), is_fused ? "composed" : "reference");
    EXPECT_EQ(selection.count(table.stage), is_fused ? 0u : 1u) << table.stage;
  }
  ASSERT_TRUE(disable(" pack:cpu , ,", selection).is_ok());  // blanks round a name are nobody's
  EXPECT_THAT(selection["pack"].disabled, ElementsAre("reference", "cpu"));

  std::map<std::string, Selection> forced;
  ASSERT_TRUE(force("pack:cpu,reference", forced).is_ok());
  EXPECT_EQ(forced["pack"].forced, "cpu");
  EXPECT_EQ(forced["route"].forced, "reference");
  ASSERT_TRUE(force("", forced).is_ok());
}

TEST(Selection, UnknownNamesAreRefusedWithWhatThereIs) {
  std::map<std::string, Selection> selection;
  for (const char* list : {"warp9", "reference,warp9", "nostage:cpu", "pack:warp9", ":cpu9", "pack:", "cp u"}) {
    const Status status = disable(list, selection, "SLUICE_DISABLE");
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << list;
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("SLUICE_DISABLE: "), HasSubstr("grouped_gemm: "), HasSubstr("reference")))
        << list;
    EXPECT_FALSE(force(list, selection).is_ok()) << list;
  }
}

TEST(Selection, TheEnvironmentTurnsPathsOff) {
  const RandomLayer m = random_layer(small_config(), {});
  const auto impl_of = [&](std::string_view stage) {
    const Layer layer = make_layer(m, options_for(Precision::kBF16, 4));
    for (const StageReport& report : layer.stages()) {
      if (report.stage == stage) return report.impl;
    }
    return std::string("no such stage");
  };
  EXPECT_EQ(impl_of("up: grouped_gemm"), "cpu");
  {
    const Environment set("grouped_gemm:cpu");
    EXPECT_EQ(impl_of("up: grouped_gemm"), "reference");
    EXPECT_EQ(impl_of("route"), "cpu");
    const Layer layer = make_layer(m, options_for(Precision::kBF16, 4));
    std::string why;
    for (const StageReport& report : layer.stages()) {
      for (const Declined& d : report.declined) {
        if (report.stage == "up: grouped_gemm" && d.name == "cpu") why = d.reason;
      }
    }
    EXPECT_THAT(why, HasSubstr("SLUICE_DISABLE"));
  }
  {
    const Environment set("cpu,reference");
    const Status status = Layer::create(m.config, m.weights, options_for(Precision::kBF16, 4)).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("no implementation can run"), HasSubstr("SLUICE_DISABLE")));
  }
  {
    const Environment set("cpu");
    LayerOptions options = options_for(Precision::kBF16, 4);
    options.selection["pack"].forced = "cpu";  // both on and off: refused, not guessed
    EXPECT_THAT(Layer::create(m.config, m.weights, options).status().message(), HasSubstr("pack"));
  }
  {
    const Environment set("hopper");
    EXPECT_THAT(Layer::create(m.config, m.weights, options_for(Precision::kBF16, 4)).status().message(),
                AllOf(HasSubstr("SLUICE_DISABLE"), HasSubstr("'hopper'")));
  }
  const Environment set("");
  EXPECT_EQ(impl_of("up: grouped_gemm"), "cpu");
}

}  // namespace
}  // namespace sluice::test
