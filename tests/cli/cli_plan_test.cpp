// `sluice plan`: what it prints, and what it refuses.
#include "cli/cli_fixture.h"

namespace sluice::test {
namespace {

const std::string kH200 = SLUICE_SOURCE_DIR "/data/hardware/h200-nvlink8-ib400.json";

std::vector<std::string> plan(std::vector<std::string> more, const std::string& hardware = kH200) {
  more.insert(more.begin(), {"plan", "--hardware", hardware, "--like", "deepseek-v3"});
  return more;
}

TEST_F(CliTest, PlanPrintsPhasesLinksAndMemoryOfOnePair) {
  const Ran ran = sluice(plan({"--ep", "16", "--tokens", "4096"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const char* word :
       {"deepseek-v3: E=256", "predicted, not measured", "EP 16, T = 4096 a rank", "a token's row 7424 B", "PHASE",
        "dispatch", "swiglu_quant", "combine", "two chunks, overlapped", "INFINIBAND",
        "instead: combine, a sum a (token, rank)", "memory of a GPU", "workspace", "tokens/s a GPU"}) {
    EXPECT_THAT(ran.out, HasSubstr(word));
  }
}

TEST_F(CliTest, PlanPrintsALineForEveryPairOfLists) {
  const Ran ran = sluice(plan({"--ep", "1,8,64", "--tokens", "128,4096"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(std::count(ran.out.begin(), ran.out.end(), '\n'), 2 + 1 + 1 + 6);
  const std::string help = sluice({"plan", "--help"}).out;
  for (const char* column : {"ROWS", "GEMM", "SERIAL", "2 CHUNKS", "NVLINK", "IB", "MEMORY", "TOK/S/GPU", "LIMIT"}) {
    EXPECT_THAT(ran.out, HasSubstr(column));
    EXPECT_THAT(help, HasSubstr(column));
  }
}

TEST_F(CliTest, PlanSaysTheSameInJson) {
  const json document = sluice(plan({"--ep", "8,16", "--tokens", "128", "--tp", "1", "--json"})).document();
  ASSERT_EQ(document["predictions"].size(), 2u);
  EXPECT_EQ(document["precision"], "w8a8");
  EXPECT_EQ(document["constants"].size(), 24u);
  const json& eight = document["predictions"][0];
  EXPECT_EQ(eight["ep"], 8);
  EXPECT_EQ(eight["row_bytes"], 7424);
  EXPECT_EQ(eight["dispatch"]["sent_bytes"]["infiniband"], 0);
  EXPECT_GT(document["predictions"][1]["dispatch"]["sent_bytes"]["infiniband"].get<double>(), 0);
  double sum = 0;
  for (const json& phase : eight["phases"]) sum += phase["us"].get<double>();
  EXPECT_NEAR(eight["serial_us"].get<double>(), sum, 1e-6);
}

TEST_F(CliTest, PlanTakesACheckpointAndEitherPrecision) {
  const Ran model =
      sluice({"plan", "--hardware", kH200, "--model", kTiny, "--layer", "1", "--ep", "2", "--tokens", "64"});
  EXPECT_EQ(model.code, 0) << model.err;
  for (const char* precision : {"w8a8", "bf16"}) {
    const Ran ran = sluice(
        {"plan", "--hardware", kH200, "--like", "qwen3-30b", "--ep", "8", "--tokens", "64", "--precision", precision});
    EXPECT_EQ(ran.code, 0) << ran.err;
    EXPECT_THAT(ran.out, HasSubstr(std::string("; ") + precision));
  }
  EXPECT_EQ(sluice(plan({"--ep", "320", "--slots", "320", "--tokens", "128"})).code, 0);
  // Eight groups of which four are kept reach fewer ranks than any eight experts would.
  const std::vector<std::string> eight = plan({"--ep", "8", "--tokens", "128", "--json"});
  std::vector<std::string> ungrouped = eight;
  ungrouped.push_back("--ungrouped");
  const auto ranks = [&](const std::vector<std::string>& arguments) {
    return sluice(arguments).document()["predictions"][0]["ranks_per_token"].get<double>();
  };
  EXPECT_LT(ranks(eight), 4);
  EXPECT_GT(ranks(ungrouped), 5);
  EXPECT_THAT(sluice(plan({"--ep", "4", "--tp", "2", "--tokens", "128"})).out, HasSubstr("tensor-parallel reduction"));
}

TEST_F(CliTest, PlanRefusesWhatItCannotPlan) {
  expect_refused(plan({"--ep", "8,x", "--tokens", "1"}), 2, {"--ep 8,x: 'x' is not a count in [1, 4096]"});
  expect_refused(plan({"--ep", "0", "--tokens", "1"}), 2, {"'0' is not a count in [1, 4096]"});
  expect_refused(plan({"--ep", "8", "--tokens", "0"}), 2, {"--tokens 0: '0' is not a count"});
  expect_refused(plan({"--ep", "8"}), 2, {"--tokens is required"});
  expect_refused(plan({"--ep", "8", "--tokens", "1", "--precision", "w8a16"}), 3,
                 {"precision = w8a16", "w8a8 and bf16"});
  expect_refused(plan({"--ep", "8", "--tokens", "1", "--slots", "255"}), 3, {"num_slots = 255"});
  expect_refused(plan({"--ep", "8", "--tokens", "1", "--tp", "3"}), 3, {"tensor_parallel = 3", "intermediate = 2048"});
  expect_refused(plan({"--ep", "8", "--tokens", "1"}, path("none.json")), 3, {"none.json"});
  std::string text = read_file(kH200);
  const std::size_t at = text.find("4500");
  ASSERT_NE(at, std::string::npos);
  write_file(path("zero.json"), text.substr(0, at) + "0" + text.substr(at + 4));
  expect_refused(plan({"--ep", "8", "--tokens", "1"}, path("zero.json")), 3,
                 {"zero.json: hbm_gb_per_s = 0, wanted a number above 0"});
  write_file(path("cut.json"), text.substr(0, text.size() / 2));
  expect_refused(plan({"--ep", "8", "--tokens", "1"}, path("cut.json")), 3, {"cut.json"});
}

}  // namespace
}  // namespace sluice::test
