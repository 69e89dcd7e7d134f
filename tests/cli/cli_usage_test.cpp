// What the command says of wrong values, of what cannot run, and of its own tables.
#include <algorithm>

#include "cli/cli_fixture.h"
#include "sluice/layer.h"

namespace sluice::test {
namespace {

TEST_F(CliTest, TheColumnsOfTablesAreExplained) {
  const Ran ran = sluice({"check", "--model", kTiny, "--layer", "1", "--tokens", "1", "--precision", "f32"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const std::size_t table = ran.out.find("STEP ");
  ASSERT_NE(table, std::string::npos);
  for (const char* column : {"WORST ROW", "BOUND", "OF BOUND"}) {
    EXPECT_LT(ran.out.find(std::string(column) + ": "), table) << column;
    EXPECT_NE(ran.out.find(column, table), std::string::npos) << column << " is no column any more";
  }
  const std::string check = sluice({"check", "--help"}).out;
  for (const char* column : {"ROWS is", "WORST ROW is", "BOUND what", "OF BOUND is"})
    EXPECT_THAT(check, HasSubstr(column));
  const std::string bench = sluice({"bench", "--help"}).out;
  for (const char* column : {"R, ", "A, ", "BYTES, ", "WORK, ", "SHARE, ", "OF, "})
    EXPECT_THAT(bench, HasSubstr(column));
}

// Whatever takes a value says what was given and what is wanted, in the words of this command.
TEST_F(CliTest, WrongValuesAreQuotedWithWhatIsWanted) {
  const auto refused = [&](std::vector<std::string> arguments, const std::vector<std::string>& words) {
    SCOPED_TRACE(arguments.back());
    expect_refused(arguments, 2, words);
  };
  const auto bench = [](std::vector<std::string> more) {
    more.insert(more.begin(), {"bench", "--like", "qwen3-30b"});
    return more;
  };
  for (const char* wrong : {"x", "0", "4097", "1.5", "", "1 2"}) {
    refused(bench({"--threads", wrong}), {"--threads: '" + std::string(wrong) + "' is no whole number from 1 to 4096"});
  }
  for (const char* wrong : {"x", "-1", "99999999999999999999"}) {
    refused(bench({"--seed", wrong}), {"--seed: '" + std::string(wrong) + "' is no whole number of 0 or more"});
    refused(bench({"--layer", wrong}), {"--layer: '" + std::string(wrong) + "' is no whole number of 0 or more"});
  }
  refused(bench({"--memory", "nan"}), {"--memory: 'nan' is no number from 0.01 to 1000000"});
  refused(bench({"--seconds", "0"}), {"--seconds: '0' is no number from 0.01 to 600"});
  refused(bench({"--route", "x"}), {"--route: 'x' is none of uniform, zipf, one-expert"});
  refused({"synth", "--like", "olmoe", "--out", path("o"), "--top-k", "33"}, {"'33' is no whole number from 1 to 32"});
}

// What cannot run is refused before anything that takes time: nothing was measured, read or printed by then.
TEST_F(CliTest, WhatCannotRunIsRefusedBeforeTheFirstMeasurement) {
  const std::vector<std::string> preset = {"bench", "--like", "qwen3-30b", "--tokens", "1", "--device", "cpu"};
  const auto with = [](std::vector<std::string> arguments, std::initializer_list<std::string> more) {
    arguments.insert(arguments.end(), more);
    return arguments;
  };
  expect_refused(with(preset, {"--impl", "nonsense"}), 2, {"no implementation 'nonsense'"});
  expect_refused(with(preset, {"--precision", "bf16", "--memory", "0.02"}), 3, {"bf16: ", "experts of 9.44 MB fit 20"});
  Crafted().write(model_);
  expect_refused({"bench", "--model", model(), "--layer", "1", "--precision", "f32,w8a8", "--device", "cpu"}, 3,
                 {"cannot run in w8a8"});

  // A build without CUDA does not know the names of its implementations; one with it says where they run.
  const auto expect_not_on_cpu = [&](std::vector<std::string> arguments, const std::string& stage,
                                     const std::string& name) {
    arguments.insert(arguments.end(), {"--impl", stage + "=" + name, "--device", "cpu"});
    const std::vector<StageNames> tables = stage_names();
    const auto table =
        std::find_if(tables.begin(), tables.end(), [&](const StageNames& names) { return names.stage == stage; });
    ASSERT_NE(table, tables.end()) << stage;
    const bool is_known = std::find(table->impls.begin(), table->impls.end(), name) != table->impls.end();
    if (is_known) {
      expect_refused(arguments, 3,
                     {stage + ": " + name + " was forced and cannot run", "runs on cuda, the layer is on cpu"});
    } else {
      expect_refused(arguments, 2, {"no implementation '" + name + "'; there are " + stage + ": "});
    }
  };
  expect_not_on_cpu({"bench", "--like", "qwen3-30b", "--tokens", "1", "--precision", "w8a8"}, "grouped_gemm",
                    "cuda-wgmma");
  expect_not_on_cpu({"check", "--model", model(), "--layer", "1"}, "route", "cuda");
  expect_not_on_cpu(run_args(input(3), path("y.safetensors")), "pack", "cuda");
}

}  // namespace
}  // namespace sluice::test
