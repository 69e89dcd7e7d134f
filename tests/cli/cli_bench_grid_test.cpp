// `sluice bench --grid`: its rows and figures, what it refuses, and the figures of peers. Pictures are judged by
// bench_grid_test.py.
#include <ctime>
#include <map>

#include "cli/cli_fixture.h"

namespace sluice::test {
namespace {

// The smallest layers of the grid: with eight experts and eight slots every expert has a row for every token, so rows and
// active experts need no routes to be known.
constexpr std::int64_t kE = 8, kH = 2048, kI = 768;
const std::vector<std::string> kTinyGrid = {"bench",     "--grid",   "--rows",    "qwen3-30b", "--experts",
                                            "8",         "--memory", "0.04",      "--device",  "cpu",
                                            "--seconds", "0.01",     "--threads", "2"};

std::string now(std::time_t seconds_ago = 0) {
  const std::time_t at = std::time(nullptr) - seconds_ago;
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&at));
  return text;
}

json figure(const std::string& row, const std::string& peer, const std::string& covers, double us,
            bool checked = true) {
  return {{"row", row}, {"peer", peer}, {"covers", covers}, {"us", us}, {"checked", checked}};
}

class CliGridTest : public CliTest {
 protected:
  static std::vector<std::string> with(std::vector<std::string> command, std::initializer_list<std::string> more) {
    command.insert(command.end(), more);
    return command;
  }
  static std::vector<std::string> grid(std::initializer_list<std::string> more) { return with(kTinyGrid, more); }
  // Not one row fits 0.01 GB: nothing is measured, everything is listed.
  static std::vector<std::string> nothing_runs(std::initializer_list<std::string> more) {
    return with({"bench", "--grid", "--memory", "0.01", "--device", "cpu"}, more);
  }

  static std::vector<json> lines(const Ran& ran) {
    std::vector<json> all;
    std::istringstream text(ran.out);
    for (std::string line; std::getline(text, line);) {
      all.push_back(json::parse(line, nullptr, false));
      EXPECT_FALSE(all.back().is_discarded()) << line;
    }
    return all;
  }
  static json find(const std::vector<json>& all, const std::string& bench, const std::string& what,
                   std::int64_t tokens) {
    for (const json& line : all) {
      if (line["bench"] == bench && line["what"] == what && line["tokens"] == tokens) return line;
    }
    ADD_FAILURE() << "no line " << bench << " " << what << " T=" << tokens;
    return {};
  }

  std::string file(const std::string& name, const std::string& text) {
    write_file(path(name), text);
    return path(name);
  }
  std::string peers(const std::string& name, json figures, const std::string& date = now(),
                    const std::string& device = "cpu") {
    return file(name, json({{"form", "sluice-peers"},
                            {"version", 1},
                            {"date", date},
                            {"device", device},
                            {"figures", std::move(figures)}})
                          .dump());
  }
};

TEST_F(CliGridTest, FiguresAndFloorsAreThoseOfTheFormula) {
  const Ran ran = sluice(grid({"--tokens", "1,3", "--json"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> all = lines(ran);
  const double stream = all[0]["stream_bytes_per_s"], fma = all[0]["flops_per_s"];
  EXPECT_GT(stream, 0);
  for (const std::int64_t T : {1, 3}) {
    const json layer = find(all, "layer", "layer", T);
    EXPECT_EQ(layer["shape"], "qwen3-30b-e8");
    EXPECT_EQ(layer["rows"], kE * T);
    EXPECT_EQ(layer["active_experts"], kE);
    // Three matrices an expert in e4m3 with a scale for 128x128, the gate, x and out in bf16.
    const double bytes =
        kE * 3.0 * kH * kI * (1 + 4.0 / (128 * 128)) + kE * kH * 2.0 + 2.0 * static_cast<double>(T * kH) * 2;
    const double flops = 6.0 * static_cast<double>(kE * T) * kH * kI;
    EXPECT_DOUBLE_EQ(layer["bytes"], bytes);
    EXPECT_DOUBLE_EQ(layer["flops"], flops);
    EXPECT_DOUBLE_EQ(layer["floor_us"], 1e6 * std::max(bytes / stream, flops / fma));
    EXPECT_DOUBLE_EQ(layer["share_of_floor"], layer["floor_us"].get<double>() / layer["us"].get<double>());
    EXPECT_LE(layer["min_us"], layer["us"]);
    EXPECT_LE(layer["us"], layer["max_us"]);
    double gemms = 0, floors = 0;
    for (const char* stage : {"gate.logits", "gate.select", "route", "pack", "up", "swiglu", "down", "combine"}) {
      const json line = find(all, "stage", stage, T);
      EXPECT_GT(line["us"], 0) << stage;
      EXPECT_GT(line["bytes"], 0) << stage;
      if (stage != std::string("up") && stage != std::string("down")) continue;
      gemms += line["us"].get<double>();
      floors += line["floor_us"].get<double>();
    }
    EXPECT_NEAR(find(all, "gemms", "up + down", T)["us"].get<double>(), gemms, 1e-6 * gemms);
    EXPECT_NEAR(find(all, "gemms", "up + down", T)["floor_us"].get<double>(), floors, 1e-6 * floors);
  }
}

TEST_F(CliGridTest, TablesForPeople) {
  const std::string row = "qwen3-30b-e8:1";
  const std::string fresh =
      peers("fresh.json", {figure(row, "slow layer", "layer", 1e9), figure(row, "quick", "gemms", 1e-3),
                           figure(row, "guess", "gemms", 1e-6, false)});
  const std::string old = peers("old.json", {figure(row, "elder", "layer", 123.4)}, now(7200));
  const Ran ran = sluice(grid({"--tokens", "1", "--peers", fresh, "--peers", old}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const char* text :
       {"whole layer, from x to out, gate and sort included; microseconds",
        "the experts' two GEMMs alone, up + down; microseconds", "stages alone; microseconds", "slow layer [1]",
        "quick [1]", "guess [1]", "elder [2]", "x elder", "x quick", " 123*", "0.0?", "another run",
        "not checked against a reference", "geometric mean against the best peer of each row, 1 rows: "}) {
    EXPECT_THAT(ran.out, HasSubstr(text));
  }
  EXPECT_THAT(ran.out, HasSubstr("[1] " + fresh + ": "));
  EXPECT_THAT(ran.out, HasSubstr("[2] " + old + ": "));
}

TEST_F(CliGridTest, RatiosAreOfTheBestCheckedPeerOfThisDevice) {
  const std::string row = "qwen3-30b-e8:1";
  const std::string here = peers("here.json", {figure(row, "a", "layer", 400), figure(row, "b", "layer", 300),
                                               figure(row, "unchecked", "layer", 1, false),
                                               figure(row, "c", "gemms", 7), figure("dsv3:1", "a", "layer", 5)});
  const std::string elsewhere = peers("elsewhere.json", {figure(row, "gpu", "layer", 2)}, now(), "NVIDIA H200");
  const Ran ran = sluice(grid({"--tokens", "1", "--peers", here, "--peers", elsewhere, "--json"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> all = lines(ran);
  EXPECT_EQ(all[0]["peers"][0]["another_run"], false);
  EXPECT_EQ(all[0]["peers"][1]["another_run"], true);
  EXPECT_EQ(all[0]["peers"][1]["another_device"], true);
  const json layer = find(all, "peers", "layer", 1), gemms = find(all, "peers", "gemms", 1);
  EXPECT_EQ(layer["best_peer"], "b");
  EXPECT_DOUBLE_EQ(layer["ratio"], 300 / find(all, "layer", "layer", 1)["us"].get<double>());
  EXPECT_DOUBLE_EQ(gemms["ratio"], 7 / find(all, "gemms", "up + down", 1)["us"].get<double>());
  std::map<std::string, bool> another_run;
  for (const json& one : layer["figures"]) another_run[one["peer"]] = one["another_run"];
  EXPECT_EQ(another_run,
            (std::map<std::string, bool>{{"a", false}, {"b", false}, {"gpu", true}, {"unchecked", false}}));
}

TEST_F(CliGridTest, WhatDoesNotFitIsListedWithBothSizes) {
  // 8 * 3 * 2048 * 768 in e4m3 and a gate of 8 * 2048 in bf16.
  const Ran text =
      sluice({"bench", "--grid", "--rows", "qwen3-30b", "--experts", "8", "--memory", "0.03", "--device", "cpu"});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr("not run: needs 37.8 MB of weights, 30.0 MB had"));
  EXPECT_THAT(text.out, Not(HasSubstr("stages alone")));
  const Ran ran = sluice(nothing_runs({"--rows", "mixtral-bf16,dsv3-ep8:256", "--json"}));
  EXPECT_EQ(ran.code, 0) << ran.err;
  const std::vector<json> all = lines(ran);
  ASSERT_EQ(all.size(), 4u) << ran.out;  // the device, and every row
  const json mixtral = find(all, "layer", "layer", 4096);
  EXPECT_EQ(mixtral["needed_bytes"], 8 * 3.0 * 4096 * 14336 * 2 + 8 * 4096 * 2);
  EXPECT_EQ(mixtral["had_bytes"], 1e7);
  EXPECT_EQ(mixtral["rows"], 8192);
  EXPECT_THAT(mixtral["error"].get<std::string>(), HasSubstr("not run: "));
  EXPECT_EQ(find(all, "layer", "layer", 256)["rows"], 255);  // as the peers' programs drew it
}

TEST_F(CliGridTest, OptionsThatContradictTheGridAreRefused) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"--like", "qwen3-30b"}, "--like does not go with --grid"},
      {{"--model", kTiny, "--layer", "1"}, "--model does not go with --grid"},
      {{"--precision", "bf16"}, "--precision does not go with --grid"},
      {{"--route", "zipf"}, "--route does not go with --grid"},
      {{"--stages"}, "--stages does not go with --grid"},
      {{"--routed-only"}, "--routed-only does not go with --grid"},
      {{"--ep"}, "--ep does not go with --grid"},
      {{"--rows", "dsv3,dsv4"}, "--rows: 'dsv4' is no row of the grid; there are dsv3, dsv3-ep8, dsv3-tp8, qwen3-30b"},
      {{"--rows", "dsv3:2"}, "'dsv3:2' is no row"},
      {{"--rows", "dsv3:1", "--tokens", "4"}, "leave --tokens out"},
      {{"--rows", ""}, "--rows: '' names no row"},
      {{"--tokens", ""}, "--tokens: ''"},
      {{"--tokens", "0"}, "0"},
      {{"--plot", ""}, "--plot: '' is no folder"},
      {{"--experts", "0"}, "'0' is no whole number from 1 to 1024"},
      {{"--rows", "mixtral-bf16", "--experts", "9"}, "--experts 9: mixtral-bf16 has 8"},
      // Fewer experts than slots, and groups of one expert: no layer, and no routes that could be drawn.
      {{"--rows", "qwen3-30b:1", "--experts", "7"}, "--experts 7: qwen3-30b-e7: "},
      {{"--rows", "dsv3:1", "--experts", "8"}, "--experts 8: dsv3-e8: "},
      {{"--impl", "nonsense"}, "no implementation 'nonsense'"}};
  for (const auto& [options, words] : wrong) {
    std::vector<std::string> command = {"bench", "--grid", "--device", "cpu"};
    command.insert(command.end(), options.begin(), options.end());
    expect_refused(command, 2, {words});
  }
  for (const auto& [option, value] :
       {std::pair{"--rows", "dsv3"}, {"--experts", "8"}, {"--peers", "p.json"}, {"--plot", "d"}})
    expect_refused({"bench", "--like", "qwen3-30b", option, value}, 2,
                   {std::string(option) + " goes with --grid alone"});
}

TEST_F(CliGridTest, PeersFilesAreJudged) {
  const auto refused = [&](const json& document, const std::string& words) {
    const std::string name = file("p.json", document.dump());
    expect_refused(nothing_runs({"--rows", "dsv3:1", "--peers", name}), 3, {name, words});
  };
  const json good = {{"form", "sluice-peers"},
                     {"version", 1},
                     {"date", now()},
                     {"device", "cpu"},
                     {"figures", {figure("dsv3:1", "a", "layer", 5)}}};
  EXPECT_EQ(sluice(nothing_runs({"--rows", "dsv3:1", "--peers", file("p.json", good.dump())})).code, 0);
  for (const char* key : {"version", "date", "device", "figures"}) {
    json document = good;
    document.erase(key);
    refused(document, std::string(key) + " is missing");
  }
  for (const char* key : {"row", "peer", "covers", "us", "checked"}) {
    json document = good;
    document["figures"][0].erase(key);
    refused(document, "figures[0]: " + std::string(key) + " is missing");
  }
  const auto with_value = [&](const char* key, const json& value) {
    json document = good;
    (document["figures"][0].contains(key) ? document["figures"][0] : document)[key] = value;
    return document;
  };
  refused(with_value("form", "other"), "form is \"other\", wanted \"sluice-peers\"");
  refused(with_value("version", 2), "version is 2");
  refused(with_value("date", "yesterday"), "date is \"yesterday\"");
  refused(with_value("date", "2026-13-01T00:00:00Z"), "date is");
  refused(with_value("figures", 3), "figures is 3, wanted a list");
  refused(with_value("row", "dsv3:2"), "row \"dsv3:2\" is neither in the grid nor in this run");
  refused(with_value("row", 1), "row is 1, wanted a text");
  refused(with_value("peer", "a'`b"), "peer is \"a'`b\"");
  refused(with_value("peer", ""), "peer is \"\"");
  refused(with_value("covers", "gate"), "covers is \"gate\", wanted \"layer\" or \"gemms\"");
  for (const json& us : {json(0), json(-1.5), json("7"), json(nullptr)})
    refused(with_value("us", us), "us is " + us.dump());
  refused(with_value("checked", 1), "checked is 1, wanted true or false");
  json twice = good;
  twice["figures"].push_back(figure("dsv3:1", "a", "layer", 6));
  refused(twice, "figures[1]: peer a has a figure for row dsv3:1 already");
  refused(json::array(), "neither a peers file");
  const std::string broken = file("broken.json", "{\"form\": ");
  expect_refused(nothing_runs({"--rows", "dsv3:1", "--peers", broken}), 3, {broken, "no JSON"});
  expect_refused(nothing_runs({"--rows", "dsv3:1", "--peers", path("none.json")}), 3, {"none.json"});
}

TEST_F(CliGridTest, ARecordIsAPeersFileOfAnotherRun) {
  const auto gemm = [](const char* impl, const char* which, double us, const char* shape = "dsv3") {
    return json{{"bench", "grouped_gemm"}, {"impl", impl}, {"shape", shape},    {"tokens", 1},
                {"gemm", which},           {"us", us},     {"worst_error", 0.5}};
  };
  json record = {{"schema", 1}, {"date", now()}, {"commit", "0123456789abcdef"}, {"gpu", {{"name", "NVIDIA H200"}}}};
  json wrong = gemm("deepgemm", "up", 1), refused_by_peer = gemm("deepgemm", "up", 1);
  wrong["error"] = "wrong result";
  refused_by_peer.erase("us");
  refused_by_peer["error"] = "refused";
  record["peers"]["figures"] = {gemm("deepgemm", "up", 8),
                                gemm("deepgemm", "up", 5),
                                gemm("deepgemm", "down", 2),
                                wrong,
                                refused_by_peer,
                                gemm("half", "up", 1),
                                gemm("torch_bf16", "up", 1),
                                gemm("torch_bf16", "down", 1),
                                {{"bench", "routes"}, {"impl", "deepgemm"}, {"digest", "0"}}};
  const std::string name = file("record.json", record.dump());
  const Ran text = sluice(nothing_runs({"--rows", "dsv3:1", "--peers", name}));
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out,
              HasSubstr("commit 0123456789ab, " + record["date"].get<std::string>() + ", NVIDIA H200, another run"));
  EXPECT_THAT(text.out, HasSubstr(" 7.0*"));
  EXPECT_THAT(text.out, Not(HasSubstr("half")));
  EXPECT_THAT(text.out, Not(HasSubstr("torch_bf16")));

  const auto refused = [&](const json& document, const std::string& words) {
    write_file(name, document.dump());
    expect_refused(nothing_runs({"--rows", "dsv3:1", "--peers", name}), 3, {name, words});
  };
  for (const char* key : {"date", "commit", "gpu", "peers"}) {
    json document = record;
    document.erase(key);
    refused(document, key);
  }
  const auto with_value = [&](const char* key, const json& value) {
    json document = record;
    document["peers"]["figures"][0][key] = value;
    return document;
  };
  refused(with_value("us", -8), "peers.figures[0]: us is -8, wanted a number above 0");
  refused(with_value("shape", "dsv9"), "row \"dsv9:1\" is neither");
  refused(with_value("tokens", 0), "tokens is 0");
  refused(with_value("gemm", "gate"), "gemm is \"gate\"");
  json without = record;
  without["peers"]["figures"][0].erase("impl");
  refused(without, "impl is missing");
}

// All records of the tree are read, whatever the peers of their day were.
TEST_F(CliGridTest, TheRecordsOfTheTreeAreRead) {
  int num_records = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(SLUICE_SOURCE_DIR) / "bench" / "results")) {
    if (entry.path().extension() != ".json") continue;
    ++num_records;
    const Ran ran = sluice(nothing_runs({"--rows", "dsv3", "--peers", entry.path().string(), "--json"}));
    EXPECT_EQ(ran.code, 0) << ran.err;
    EXPECT_THAT(ran.out, HasSubstr("\"bench\":\"peers\""));
  }
  EXPECT_GT(num_records, 0);
}

}  // namespace
}  // namespace sluice::test
