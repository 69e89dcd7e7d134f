// From a run over recorded loads to a placement, and what is refused on the way.
#include <algorithm>
#include <numeric>

#include "cli/cli_fixture.h"

namespace sluice::test {
namespace {

class EplbTest : public CliTest {
 protected:
  // A load file by hand.
  std::string load(const std::string& name, std::int64_t layer, const std::vector<double>& tokens) {
    write_file(path(name), json{{"format", "sluice-expert-load"},
                                {"version", 1},
                                {"num_experts", tokens.size()},
                                {"layers", json::array({{{"layer", layer}, {"tokens", tokens}}})}}
                               .dump());
    return path(name);
  }
  std::vector<std::string> plan(std::vector<std::string> more) const {
    more.insert(more.begin(), "eplb");
    return more;
  }
};

// The largest rank load of a placement, from its definition.
double heaviest(const json& ranks, const std::vector<double>& tokens) {
  std::vector<double> count(tokens.size());
  for (const json& rank : ranks) {
    for (const std::size_t expert : rank) ++count[expert];
  }
  double most = 0;
  for (const json& rank : ranks) {
    double sum = 0;
    for (const std::size_t expert : rank) sum += tokens[expert] / count[expert];
    most = std::max(most, sum);
  }
  return most;
}

TEST_F(EplbTest, TheChainFromARunToAPlacement) {
  std::vector<std::string> arguments = plan({"--ranks", "4", "--slots", "40", "--out", path("p.json"), "--json"});
  std::vector<std::vector<double>> counted;
  for (const std::string layer : {"3", "1"}) {  // in any order
    const std::string y = path("y.safetensors"), file = path("load" + layer + ".json");
    const std::string x = std::string(kTiny) + "/golden.safetensors:layer" + layer + ".x";
    const Ran ran = sluice({"run", "--model", kTiny, "--layer", layer, "--input", x, "--output", y, "--device", "cpu",
                            "--record-load", file});
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_THAT(ran.out, HasSubstr(file));
    // The counts are those of the run's own ids.
    std::vector<double> tokens(32);
    for (const std::int32_t expert : Written(y).values<std::int32_t>("topk_idx"))
      ++tokens[static_cast<std::size_t>(expert)];
    EXPECT_EQ(std::accumulate(tokens.begin(), tokens.end(), 0.0), 256 * 4);
    const json recorded = json::parse(read_file(file));
    EXPECT_EQ(recorded["layers"][0]["layer"], std::stoi(layer));
    EXPECT_EQ(recorded["layers"][0]["tokens"].get<std::vector<double>>(), tokens);
    counted.push_back(tokens);
    arguments.insert(arguments.end(), {"--load", file});
  }
  const Ran planned = sluice(arguments);
  ASSERT_EQ(planned.code, 0) << planned.err;
  const json document = planned.document();
  EXPECT_EQ(document["num_slots"], 40);
  EXPECT_EQ(document["num_redundant"], 8);
  EXPECT_EQ(document["hierarchical"], false);
  ASSERT_EQ(document["layers"].size(), 2u);
  const json written = json::parse(read_file(path("p.json")));
  json balanced = json::array();
  for (int rank = 0; rank < 4; ++rank) {
    balanced.push_back(json::array());
    for (int e = 0; e < 8; ++e) balanced.back().push_back(rank * 8 + e);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    const json& layer = document["layers"][i];
    const std::vector<double>& tokens = counted[1 - i];
    EXPECT_EQ(layer["layer"], i == 0 ? 1 : 3);
    EXPECT_EQ(layer["mean_rank_tokens"], 256);
    EXPECT_DOUBLE_EQ(layer["before"]["max_rank_tokens"], heaviest(balanced, tokens));
    EXPECT_DOUBLE_EQ(layer["after"]["max_rank_tokens"], heaviest(layer["ranks"], tokens));
    EXPECT_LT(layer["after"]["max_over_mean"], 1.02);
    EXPECT_GT(layer["before"]["max_over_mean"], 1.3);
    const json& hottest = layer["hottest_experts"][0];
    EXPECT_EQ(hottest["tokens"], *std::max_element(tokens.begin(), tokens.end()));
    EXPECT_EQ(tokens[hottest["expert"].get<std::size_t>()], hottest["tokens"]);
    EXPECT_GT(hottest["replicas"], 1);
    EXPECT_EQ(written["layers"][i]["ranks"], layer["ranks"]);
    EXPECT_EQ(written["layers"][i]["layer"], layer["layer"]);
  }
  // The same again, over the file that is there: to the byte.
  const std::string first = read_file(path("p.json"));
  EXPECT_EQ(sluice(arguments).code, 0);
  EXPECT_EQ(read_file(path("p.json")), first);
}

TEST_F(EplbTest, TheTableSaysBeforeAndAfter) {
  const std::string file = load("l.json", 5, {12, 1, 1, 2, 1000000, 0});
  const Ran ran = sluice(plan({"--load", file, "--ranks", "3", "--redundant", "3"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("9 slots, 3 of them redundant, on 3 ranks"));
  // All of a million on the last of three ranks: 3.00 times the mean; then a third each.
  EXPECT_THAT(ran.out, testing::ContainsRegex("5 +1,000,016 +3\\.00 +2 +1\\.00 +[0-2] +4:3 0:[12] "));
  for (const char* column : {"TOKENS", "BEFORE", "RANK", "AFTER", "REPLICAS"}) {
    EXPECT_THAT(ran.out, HasSubstr(column));
    EXPECT_THAT(sluice({"eplb", "--help"}).out, HasSubstr(column));
  }
  EXPECT_THAT(sluice(plan({"--load", file, "--ranks", "2", "--nodes", "2", "--groups", "3"})).out,
              HasSubstr("2 nodes do not divide 3 groups"));
  EXPECT_THAT(sluice(plan({"--load", file, "--ranks", "2", "--nodes", "2", "--groups", "2"})).out,
              HasSubstr("on 2 ranks of 2 nodes; 2 groups, whole on their node"));
}

TEST_F(EplbTest, OneLayerOfSeveralFilesAndSumsOfTheSame) {
  const std::string a = load("a.json", 1, {4, 0}), b = load("b.json", 2, {1, 1}), c = load("c.json", 1, {0, 6});
  const Ran ran = sluice(plan({"--load", a, "--load", b, "--load", c, "--ranks", "2", "--layer", "1", "--json"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  ASSERT_EQ(ran.document()["layers"].size(), 1u);
  EXPECT_EQ(ran.document()["layers"][0]["tokens"], 10);
  EXPECT_EQ(ran.document()["layers"][0]["after"]["max_rank_tokens"], 6);
  expect_refused(plan({"--load", a, "--load", b, "--ranks", "2", "--layer", "3"}), 3, {"--layer 3", "there are 1-2"});
  const std::string other = load("d.json", 1, {1, 2, 3});
  expect_refused(plan({"--load", a, "--load", other, "--ranks", "2"}), 3, {"d.json: 3 experts", "a.json has 2"});
}

TEST_F(EplbTest, WhatCannotBeIsRefusedAndNothingIsWritten) {
  const std::string file = load("l.json", 0, {1, 2, 3, 4}), out = path("p.json");
  const auto refused = [&](std::vector<std::string> more, int code, const std::vector<std::string>& words) {
    SCOPED_TRACE(testing::PrintToString(more));
    more.insert(more.begin(), {"eplb", "--out", out});
    expect_refused(more, code, words);
  };
  refused({"--load", file}, 2, {"--ranks is required"});
  refused({"--ranks", "2"}, 2, {"--load is required"});
  refused({"--load", file, "--ranks", "0"}, 2, {"--ranks: '0' is no whole number from 1 to 16384"});
  refused({"--load", file, "--ranks", "2", "--slots", "3"}, 2, {"num_slots is 3", "4 experts"});
  // Case 116: two counts of the same slots.
  refused({"--load", file, "--ranks", "2", "--slots", "6", "--redundant", "3"}, 2,
          {"num_slots is 6", "num_redundant is 3"});
  refused({"--load", file, "--ranks", "6", "--nodes", "4"}, 2, {"num_nodes is 4", "num_ranks = 6"});
  refused({"--load", file, "--ranks", "2", "--groups", "3"}, 2, {"num_groups is 3", "4 experts"});
  refused({"--load", file, "--ranks", "7", "--slots", "5"}, 2, {"num_ranks is 7", "5 slots"});
  refused({"--load", path("none.json"), "--ranks", "2"}, 3, {"none.json", "No such file"});
  refused({"--load", load("neg.json", 7, {1, -1}), "--ranks", "2"}, 3, {"neg.json", "layer 7, expert 1", "-1"});
  refused({"--load", dir_.string(), "--ranks", "2"}, 3, {"a folder"});
  refused({"--load", file, "--load", std::string(kTiny) + "/config.json", "--ranks", "2"}, 3,
          {"config.json", "sluice-expert-load"});
}

TEST_F(EplbTest, NothingElseIsOverwritten) {
  const std::string file = load("l.json", 0, {1, 2, 3, 4});
  const std::string before = read_file(file);
  const auto refused = [&](const std::string& out, const std::vector<std::string>& words) {
    expect_refused(plan({"--load", file, "--ranks", "2", "--out", out}), 2, words);
  };
  refused(file, {"--out", "l.json", "holds something else"});
  EXPECT_EQ(read_file(file), before);
  refused(path("none/p.json"), {"the folder", "none does not exist"});
  refused(path("p.npy"), {"must end in .json"});
  fs::create_directory(path("d.json"));
  refused(path("d.json"), {"is a folder"});
}

TEST_F(EplbTest, ARunRecordsNothingOverAnotherFile) {
  Crafted().write(model_);
  const std::string x = input(3), config = (model_ / "config.json").string(), before = read_file(config);
  expect_refused(run_args(x, path("y.safetensors"), {"--record-load", config}), 2,
                 {"--record-load", "holds something else"});
  EXPECT_EQ(read_file(config), before);
  expect_refused(run_args(x, path("y.safetensors"), {"--record-load", path("l.npy")}), 2, {"must end in .json"});
  // Of no tokens: a load of nothing, which can be planned from.
  ASSERT_EQ(sluice(run_args(input(0), path("y.safetensors"), {"--record-load", path("l.json")})).code, 0);
  EXPECT_EQ(json::parse(read_file(path("l.json")))["layers"][0]["tokens"], json(std::vector<int>(8, 0)));
  EXPECT_THAT(sluice(plan({"--load", path("l.json"), "--ranks", "2"})).out,
              testing::ContainsRegex("1 +0 +1\\.00 +0 +1\\.00"));
  // A recording may be replaced by another.
  ASSERT_EQ(sluice(run_args(x, path("y.safetensors"), {"--record-load", path("l.json")})).code, 0);
  const auto tokens = json::parse(read_file(path("l.json")))["layers"][0]["tokens"].get<std::vector<int>>();
  EXPECT_EQ(std::accumulate(tokens.begin(), tokens.end(), 0), 3 * Crafted::kTopK);
}

}  // namespace
}  // namespace sluice::test
