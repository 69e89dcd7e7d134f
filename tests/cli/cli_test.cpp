// The built `sluice` command: what each command does, its exit codes, and what is left on disk.
#include <cmath>
#include <csignal>
#include <map>
#include <sstream>

#include "cli/cli_fixture.h"

namespace sluice::test {
namespace {

// ---- the command itself --------------------------------------------------------------------------------------

TEST_F(CliTest, HelpExplainsEveryCommandWithExamples) {
  const Ran top = sluice({"--help"});
  EXPECT_EQ(top.code, 0);
  for (const char* command : {"inspect", "run", "check", "explain", "synth", "convert", "bench", "eplb"}) {
    EXPECT_THAT(top.out, HasSubstr(command));
    const Ran help = sluice({command, "--help"});
    EXPECT_EQ(help.code, 0);
    EXPECT_THAT(help.out, HasSubstr("Example"));
    EXPECT_THAT(help.out, HasSubstr(std::string("sluice ") + command));
    EXPECT_THAT(help.out, HasSubstr("--json"));
  }
  EXPECT_THAT(top.out, HasSubstr("Exit codes"));
}

TEST_F(CliTest, Version) {
  const Ran ran = sluice({"--version"});
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.out, testing::MatchesRegex("sluice [0-9]+\\.[0-9]+\\.[0-9]+\n"));
}

TEST_F(CliTest, UsageErrorsAreTwo) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {},
           {"nonsense"},
           {"run"},
           {"inspect"},
           {"inspect", "a", "--nonsense"},
           {"check", "--model", kTiny, "--layer", "x"},
           {"check", "--model", kTiny, "--layer", "1", "--tokens", "0"},
           {"check", "--model", kTiny, "--layer", "1", "--precision", "fp4"},
           {"check", "--model", kTiny, "--layer", "1", "--threads", "0"},
           {"explain", "--model", kTiny, "--layer", "1", "--impl", "grouped_gemm=nonsense"},
           {"explain", "--model", kTiny, "--layer", "1", "--impl", "nonsense"},
           {"explain", "--model", kTiny, "--layer", "1", "--impl", "nonsense=reference"},
           {"explain"},
           {"explain", "--like", "nonsense"},
           {"explain", "--model", kTiny},
           {"explain", "--model", kTiny, "--like", "deepseek-v3"},
           {"synth", "--out", path("m")},
           {"bench", "--tokens", "1,,2"},
           {"bench", "--like", "qwen3-30b", "--seed", "-1"},
           {"bench", "--route", "nonsense"}}) {
    const Ran ran = sluice(arguments);
    EXPECT_EQ(ran.code, 2) << testing::PrintToString(arguments) << ran.err;
    EXPECT_EQ(ran.err.rfind("sluice: error: ", 0), 0u) << ran.err;
    EXPECT_EQ(ran.out, "");
  }
  const Ran ran = sluice({"run", "--json"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_EQ(ran.document()["error"]["exit_code"], 2);
}

TEST_F(CliTest, WrongWordsAreNamed) {
  expect_refused({"expalin"}, 2,
                 {"there is no command 'expalin'", "inspect, run, check, explain, synth, convert, bench, eplb"});
  expect_refused({"bogus", "--model", kTiny}, 2, {"'bogus'"});
  expect_refused({"bench"}, 2, {"give either --model with --layer, or --like"});
  expect_refused({"bench", "--tokens", "1"}, 2, {"give either --model with --layer, or --like"});
  for (const char* command : {"run", "check"}) {
    std::vector<std::string> arguments = {command, "--model", kTiny, "--layer", "1", "--precision", "fp8"};
    if (command == std::string("run")) arguments.insert(arguments.end(), {"--input", "x", "--output", "y"});
    expect_refused(arguments, 2, {"--precision: 'fp8' is none of w8a8, w8a16, bf16, f32"});
  }
}

// ---- inspect -------------------------------------------------------------------------------------------------

TEST_F(CliTest, InspectTinyAsTextAndJson) {
  const Ran text = sluice({"inspect", kTiny});
  EXPECT_EQ(text.code, 0) << text.err;
  for (const char* word : {"deepseek_v3", "1-3", "32", "256", "128", "e4m3", "w8a8", "w8a16", "f32"})
    EXPECT_THAT(text.out, HasSubstr(word));
  const json document = sluice({"inspect", kTiny, "--json"}).document();
  EXPECT_EQ(document["moe_layers"], json({1, 2, 3}));
  ASSERT_EQ(document["groups"].size(), 1u);
  const json& group = document["groups"][0];
  EXPECT_EQ(group["layers"], json({1, 2, 3}));
  EXPECT_EQ(group["num_experts"], 32);
  EXPECT_EQ(group["top_k"], 4);
  EXPECT_EQ(group["n_group"], 4);
  EXPECT_EQ(group["hidden"], 256);
  EXPECT_EQ(group["intermediate"], 128);
  // 3 * 128 * 256 bytes of e4m3 and three 1x2 or 2x1 scale grids of f32.
  EXPECT_EQ(group["expert_bytes"], 3 * 128 * 256 + 3 * 2 * 4);
}

TEST_F(CliTest, InspectListsTheOtherLayersWhenOneIsBroken) {
  Crafted crafted;
  crafted.config["num_hidden_layers"] = 3;  // layer 2 has experts by the config and no tensors
  crafted.write(model_);
  const Ran ran = sluice({"inspect", model(), "--json"});
  EXPECT_EQ(ran.code, 3);
  const json document = ran.document();
  EXPECT_EQ(document["groups"].size(), 1u);
  EXPECT_EQ(document["errors"].size(), 1u);
  EXPECT_EQ(document["errors"][0]["layer"], 2);
  EXPECT_THAT(ran.err, HasSubstr("layers.2"));
}

TEST_F(CliTest, InspectOfAPartSaysWhereTheModelIs) {
  for (const char* name : {"model-00001-of-00002.safetensors", "golden.safetensors"}) {
    const std::string file = std::string(kTiny) + "/" + name;
    const Ran ran = sluice({"inspect", file});
    EXPECT_EQ(ran.code, 3);
    EXPECT_EQ(ran.out, "");
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
    EXPECT_THAT(ran.err, HasSubstr("sluice: error: " + file + ": holds no whole layer"));
    EXPECT_THAT(ran.err, HasSubstr(std::string("give the folder, ") + kTiny));
    const Ran machine = sluice({"inspect", file, "--json"});
    EXPECT_EQ(machine.code, 3);
    EXPECT_THAT(machine.document()["error"]["message"].get<std::string>(), HasSubstr("give the folder"));
  }
  // Without the rest of a model there is nothing to hint at.
  Crafted crafted;
  crafted.tensors.resize(2);
  crafted.build();
  crafted.write(model_);
  const Ran alone = sluice({"inspect", (model_ / "model.safetensors").string()});
  EXPECT_EQ(alone.code, 3);
  EXPECT_THAT(alone.err, Not(HasSubstr("give the folder")));
}

// ---- run -----------------------------------------------------------------------------------------------------

TEST_F(CliTest, RunGivesTheSameBytesForAnyThreadCountAndChunk) {
  const std::string golden = std::string(kTiny) + "/golden.safetensors:layer2.x";
  for (const char* precision : {"w8a8", "w8a16", "bf16", "f32"}) {
    std::string first;
    for (const char* threads : {"1", "2", "3"}) {
      const std::string out = path("y.safetensors");
      const Ran ran = sluice({"run", "--model", kTiny, "--layer", "2", "--input", golden, "--output", out,
                              "--precision", precision, "--threads", threads});
      ASSERT_EQ(ran.code, 0) << ran.err;
      if (first.empty()) first = read_file(out);
      EXPECT_EQ(read_file(out), first) << precision << " threads " << threads;
    }
    const Written written(path("y.safetensors"));
    EXPECT_EQ(written.header["y"]["dtype"], "F32");
    EXPECT_EQ(written.header["y"]["shape"], json({256, 256}));
    EXPECT_EQ(written.header["topk_idx"]["dtype"], "I32");
    EXPECT_EQ(written.header["topk_idx"]["shape"], json({256, 4}));
    EXPECT_EQ(written.header["topk_weight"]["dtype"], "F32");
    for (float y : written.values<float>("y")) ASSERT_TRUE(std::isfinite(y));
    for (std::int32_t id : written.values<std::int32_t>("topk_idx")) ASSERT_TRUE(id >= 0 && id < 32);
  }
}

TEST_F(CliTest, RunMeetsTheGoldenValues) {
  const std::string golden = std::string(kTiny) + "/golden.safetensors";
  const std::string out = path("y.safetensors");
  ASSERT_EQ(sluice({"run", "--model", kTiny, "--layer", "3", "--input", golden + ":layer3.x", "--output", out,
                    "--precision", "f32"})
                .code,
            0);
  const std::vector<float> got = Written(out).values<float>("y"), want = Written(golden).values<float>("layer3.y_fp32");
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t t = 0; t < 256; ++t) {
    double error = 0, norm = 0;
    for (std::size_t h = t * 256; h < (t + 1) * 256; ++h) {
      error += std::pow(static_cast<double>(got[h]) - want[h], 2);
      norm += std::pow(static_cast<double>(want[h]), 2);
    }
    ASSERT_LE(std::sqrt(error / norm), 2e-6) << "token " << t;
  }
  // Without the shared expert the other golden tensor is met.
  ASSERT_EQ(sluice({"run", "--model", kTiny, "--layer", "3", "--input", golden + ":layer3.x", "--output", out,
                    "--precision", "f32", "--routed-only"})
                .code,
            0);
  const std::vector<float> routed = Written(out).values<float>("y"),
                           want_routed = Written(golden).values<float>("layer3.y_routed_fp32");
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < routed.size(); ++i) {
    error += std::pow(static_cast<double>(routed[i]) - want_routed[i], 2);
    norm += std::pow(static_cast<double>(want_routed[i]), 2);
  }
  EXPECT_LE(std::sqrt(error / norm), 2e-6);
}

// A token alone, and a token among others: chunks cannot be seen.
TEST_F(CliTest, RunIsBatchInvariant) {
  Crafted().write(model_);
  const std::string all = path("all.safetensors"), one = path("one.safetensors"), x1 = path("x1.safetensors");
  const std::string rows = bf16_values(9000 * 64, 3);  // more than one chunk
  write_file(path("x.safetensors"), safetensors({{"x", "BF16", {9000, 64}, rows}}));
  write_file(x1, safetensors({{"x", "BF16", {1, 64}, rows.substr(8999 * 128, 128)}}));
  const Ran ran = sluice(run_args(path("x.safetensors"), all, {"--json"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.document()["tokens"], 9000);
  EXPECT_LT(ran.document()["chunk_tokens"], 9000);
  ASSERT_EQ(sluice(run_args(x1, one)).code, 0);
  EXPECT_EQ(Written(all).bytes("y").substr(8999 * 256), Written(one).bytes("y"));
  EXPECT_EQ(Written(all).bytes("topk_weight").substr(8999 * 8), Written(one).bytes("topk_weight"));
}

TEST_F(CliTest, RunReadsNpy) {
  Crafted().write(model_);
  std::string f32;
  const std::string half = bf16_values(5 * 64, 7);
  for (std::size_t i = 0; i < half.size(); i += 2) f32 += std::string(2, '\0') + half.substr(i, 2);
  write_file(path("x.npy"), npy("<f4", false, "(5, 64)", f32));
  write_file(path("x.safetensors"), safetensors({{"x", "F32", {5, 64}, f32}}));
  ASSERT_EQ(sluice(run_args(path("x.npy"), path("a.safetensors"))).code, 0);
  ASSERT_EQ(sluice(run_args(path("x.safetensors"), path("b.safetensors"))).code, 0);
  EXPECT_EQ(read_file(path("a.safetensors")), read_file(path("b.safetensors")));
}

TEST_F(CliTest, ZeroTokensSucceed) {
  Crafted().write(model_);
  const std::string out = path("y.safetensors");
  const Ran ran = sluice(run_args(input(0), out));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, testing::EndsWith("0 tokens\n"));  // no time, no rate
  const Written written(out);
  EXPECT_EQ(written.header["y"]["shape"], json({0, 64}));
  EXPECT_EQ(written.header["topk_idx"]["shape"], json({0, 2}));
  EXPECT_EQ(written.header["topk_weight"]["shape"], json({0, 2}));
  EXPECT_EQ(written.data, "");
  write_file(path("x.npy"), npy("<f4", false, "(0, 64)", ""));
  EXPECT_EQ(sluice(run_args(path("x.npy"), out)).code, 0);
}

TEST_F(CliTest, RunForcesImplementations) {
  Crafted().write(model_);
  const Ran ran = sluice(run_args(input(3), path("y.safetensors"), {"--impl", "reference", "--json"}));
  ASSERT_EQ(ran.code, 0) << ran.err;
  const nlohmann::json document = ran.document();  // items() would outlive a temporary
  for (const auto& [stage, name] : document["implementations"].items()) EXPECT_EQ(name, "reference") << stage;
}

TEST_F(CliTest, RunRefusesToOverwriteWhatItReads) {
  Crafted().write(model_);
  const std::string x = input(3);
  expect_refused(run_args(x, x), 2, {"is the input itself"});
  fs::create_hard_link(x, path("link.safetensors"));
  expect_refused(run_args(x, path("link.safetensors")), 2, {"is the input itself"});
  expect_refused(run_args(x, (model_ / "model.safetensors").string()), 2, {"model.safetensors"});
  expect_refused(run_args(x, (model_ / "config.json").string()), 2, {"config.json"});
  expect_refused(run_args(x, model()), 2, {"folder"});
  Crafted sharded;
  sharded.set_index("shards/a.safetensors");
  sharded.write(model_);
  fs::create_directory(model_ / "shards");
  fs::rename(model_ / "model.safetensors", model_ / "shards/a.safetensors");
  expect_refused(run_args(x, (model_ / "shards/a.safetensors").string()), 2, {"shards/a.safetensors"});
  expect_refused(run_args(x, path("no/such/folder/y")), 2, {"no/such/folder"});
  expect_refused(run_args(x, path("y.safetensors"), {"--precision", "w8a8"}), 3, {"w8a8", "bf16"});
  EXPECT_EQ(sluice({"inspect", model()}).code, 0) << "the model must be whole still";
}

TEST_F(CliTest, RunReplacesAnOldOutputOnlyWhenItSucceeds) {
  Crafted().write(model_);
  const std::string out = path("y.safetensors");
  write_file(out, "old");
  expect_refused(run_args(input(3, 32), out), 3, {"32", "64"});
  EXPECT_EQ(read_file(out), "old");
  ASSERT_EQ(sluice(run_args(input(3), out)).code, 0);
  EXPECT_EQ(Written(out).header["y"]["shape"], json({3, 64}));
}

TEST_F(CliTest, OutputsThatNameNoFileAreUsageErrors) {
  Crafted().write(model_);
  // The bytes are safetensors: under another extension they would be read as another format.
  for (const char* name : {"o.npy", "o", "o.safetensors.bak", "o.SAFETENSORS"}) {
    expect_refused(run_args(input(3), path(name)), 2, {"--output", ".safetensors"});
  }
  expect_refused(run_args(input(3), ""), 2, {"--output"});
  expect_refused(run_args(input(3), path("absent/")), 2, {"--output"});
}

// What could not be printed was not delivered; what could not be said on stderr changes nothing.
TEST_F(CliTest, StandardStreamsThatAreFullOrClosed) {
  Crafted().write(model_);
  const auto code = [&](const std::vector<std::string>& arguments, const std::string& redirect) {
    std::string line = quoted(SLUICE_CLI);
    for (const std::string& argument : arguments) line += " " + quoted(argument);
    const int status = std::system((line + " " + redirect).c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  };
  const std::string out = path("y.safetensors"), said = path("said");
  const std::vector<std::vector<std::string>> commands = {{"inspect", model()},
                                                          {"inspect", model(), "--json"},
                                                          {"explain", "--model", model(), "--layer", "1"},
                                                          run_args(input(3), out),
                                                          {"--help"}};
  for (const auto& arguments : commands) {
    for (const char* redirect : {">/dev/full", ">&-"}) {
      SCOPED_TRACE(arguments[0] + " " + redirect);
      EXPECT_EQ(code(arguments, redirect + (" 2>" + said)), 4);
      EXPECT_THAT(read_file(said), HasSubstr("cannot write to the standard output"));
    }
    for (const char* redirect : {"2>/dev/full", "2>&-", "<&- 2>&-"}) {
      EXPECT_EQ(code(arguments, redirect + std::string(" >/dev/null")), 0) << arguments[0] << " " << redirect;
    }
  }
  for (const char* redirect : {"2>/dev/full", "2>&-"}) {
    EXPECT_EQ(code({"inspect", path("nowhere")}, redirect + std::string(" >/dev/null")), 3) << redirect;
  }
  // With every stream closed the output file would be the first to be opened: nothing but tensors may reach it.
  fs::remove(out);
  EXPECT_EQ(code(run_args(input(3), out), "<&- >&- 2>&-"), 4);
  EXPECT_EQ(Written(out).header["y"]["shape"], json({3, 64}));
}

TEST_F(CliTest, MessagesDoNotSpeakToTheTerminal) {
  Crafted crafted;
  crafted.config["model_type"] = "deep\x1b[2J\rseek";
  crafted.write(model_);
  const Ran ran = sluice({"inspect", model()});  // which also judges that no escape is in it
  EXPECT_EQ(ran.code, 3);
  EXPECT_THAT(ran.err, HasSubstr("deep\\x1b[2J\\x0dseek"));
}

TEST_F(CliTest, RunReportsNonFiniteInput) {
  Crafted().write(model_);
  std::string rows = bf16_values(3 * 64);
  rows[64 * 2] = '\xC0', rows[64 * 2 + 1] = '\x7F';  // one NaN in token 1
  write_file(path("x.safetensors"), safetensors({{"x", "BF16", {3, 64}, rows}}));
  const Ran ran = sluice(run_args(path("x.safetensors"), path("y.safetensors"), {"--json"}));
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr("1 of 3 tokens"));
  EXPECT_EQ(ran.document()["non_finite_output_tokens"], 1);
  EXPECT_EQ(ran.document()["non_finite_score_tokens"], 1);
}

// ---- check, explain, synth, bench ----------------------------------------------------------------------------

TEST_F(CliTest, CheckPassesOnTiny) {
  const Ran ran = sluice({"check", "--model", kTiny, "--layer", "1", "--tokens", "9", "--json"});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  const json document = ran.document();
  EXPECT_EQ(document["failed"], 0);
  EXPECT_GT(document["passed"], 30);
  EXPECT_EQ(document["precisions"].size(), 4u);
  const Ran text = sluice({"check", "--model", kTiny, "--layer", "1", "--input",
                           std::string(kTiny) + "/golden.safetensors:layer1.x", "--tokens", "5"});
  EXPECT_EQ(text.code, 0) << text.out << text.err;
  EXPECT_THAT(text.out, HasSubstr("0 failed"));
}

// NaN weights are the checkpoint's, not an implementation's: equal NaN is agreement.
TEST_F(CliTest, CheckOfNanWeightsAgreesWithTheReference) {
  Crafted crafted;
  for (Tensor& tensor : crafted.tensors) {
    if (tensor.name.find("down_proj") == std::string::npos) continue;
    for (std::size_t i = 0; i < tensor.bytes.size(); i += 2) tensor.bytes[i] = '\xC0', tensor.bytes[i + 1] = '\x7F';
  }
  crafted.build();
  crafted.write(model_);
  const Ran ran = sluice({"check", "--model", model(), "--layer", "1", "--tokens", "3"});
  EXPECT_EQ(ran.code, 0) << ran.out;
  EXPECT_THAT(ran.err, HasSubstr("NaN weights"));
}

TEST_F(CliTest, ExplainNamesEveryStageAndItsWorkspace) {
  const Ran ran = sluice({"explain", "--model", kTiny, "--layer", "1", "--json", "--precision", "w8a8"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json result = ran.document()["precisions"][0];
  std::vector<std::string> stages;
  for (const json& stage : result["stages"]) {
    stages.push_back(stage["stage"]);
    EXPECT_NE(stage["implementation"], "");
    for (const json& declined : stage["declined"]) EXPECT_NE(declined["reason"], "");
  }
  EXPECT_THAT(stages, testing::IsSupersetOf({"gate.logits", "gate.select", "route", "pack", "combine"}));
  std::int64_t sum = 0;
  for (const json& item : result["workspace"]) sum += item["bytes"].get<std::int64_t>();
  EXPECT_LE(sum, result["workspace_bytes"]);
  // A preset needs no files, and nothing of its 11 GB is allocated.
  const Ran preset = sluice({"explain", "--like", "deepseek-v3", "--tokens", "1"});
  EXPECT_EQ(preset.code, 0) << preset.err;
  EXPECT_THAT(preset.out, HasSubstr("E=256"));
  EXPECT_THAT(preset.out, HasSubstr("scales f32"));
  // The format of the activation scales is the model's.
  json config = Crafted().config;
  config["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}, {"scale_fmt", "ue8m0"}};
  write_file(path("ue8m0.json"), config.dump());
  const Ran ue8m0 = sluice({"explain", "--like", path("ue8m0.json"), "--tokens", "1", "--precision", "w8a8"});
  EXPECT_EQ(ue8m0.code, 0) << ue8m0.err;
  EXPECT_THAT(ue8m0.out, HasSubstr("scales ue8m0"));
  EXPECT_THAT(ue8m0.out, Not(HasSubstr("scales f32")));
}

TEST_F(CliTest, ExplainDefaultsToWhatRunWouldPick) {
  const auto precisions = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"explain", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const json document = sluice(arguments).document();
    std::vector<std::string> names;
    for (const json& p : document["precisions"]) names.push_back(p["precision"]);
    return names;
  };
  using testing::ElementsAre;
  EXPECT_THAT(precisions({"--model", kTiny, "--layer", "1"}), ElementsAre("w8a8"));
  EXPECT_THAT(precisions({"--like", "qwen3-30b"}), ElementsAre("bf16"));
  EXPECT_THAT(precisions({"--like", "deepseek-v3"}), ElementsAre("w8a8"));
  EXPECT_THAT(precisions({"--like", "qwen3-30b", "--precision", "all"}), ElementsAre("w8a8", "w8a16", "bf16", "f32"));
}

TEST_F(CliTest, ExplainSaysAReasonOnce) {
  const Ran ran = sluice({"explain", "--model", kTiny, "--layer", "1"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const std::size_t begin = ran.out.find("\ndeclined\n"), end = ran.out.find("\nworkspace");
  ASSERT_LT(begin, end);
  std::istringstream lines(ran.out.substr(begin + 1, end - begin - 1));
  std::map<std::string, int> reasons;  // the line without its first column, the stages
  std::string line;
  std::getline(lines, line);
  std::getline(lines, line);
  const std::size_t column = line.find("IMPLEMENTATION");
  ASSERT_NE(column, std::string::npos) << line;
  while (std::getline(lines, line)) EXPECT_EQ(++reasons[line.substr(column)], 1) << line;
  EXPECT_GE(reasons.size(), 1u);
}

TEST_F(CliTest, SynthRefusesContradictionsAndNamesLayers) {
  expect_refused({"synth", "--like", "deepseek-v3", "--experts", "4", "--top-k", "8", "--out", path("m")}, 2,
                 {"8", "4"});
  expect_refused({"synth", "--like", "qwen3-30b", "--experts", "4", "--out", path("a/m")}, 2, {"8", "4"});
  write_file(path("small.json"), Crafted().config.dump());
  const Ran ran = sluice({"synth", "--like", path("small.json"), "--out", path("made")});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr(", layer 1 with experts, "));
}

// Ctrl-C in the middle: the signal is sent when the first file is there, far from the end.
TEST_F(CliTest, SynthInterruptedLeavesNothing) {
  const std::string out = path("a/m");
  const pid_t child = fork();
  if (child == 0) {
    execl(SLUICE_CLI, "sluice", "synth", "--like", "deepseek-v3", "--out", out.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  ASSERT_GT(child, 0);
  int status = 0;
  std::error_code ec;
  while (fs::directory_iterator(out, ec) == fs::directory_iterator() && waitpid(child, &status, WNOHANG) == 0) {
    usleep(1000);
  }
  kill(child, SIGINT);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 130);
  EXPECT_TRUE(listing().empty()) << testing::PrintToString(listing());
}

TEST_F(CliTest, SynthWritesWhatInspectReadsAndRunRuns) {
  write_file(path("small.json"), Crafted().config.dump());
  const std::string made = path("made");
  const Ran ran = sluice({"synth", "--like", path("small.json"), "--layers", "1", "--out", made, "--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const json document = sluice({"inspect", made, "--json"}).document();
  ASSERT_EQ(document["groups"].size(), 1u);
  EXPECT_EQ(document["groups"][0]["num_experts"], 8);
  const std::string layer = document["moe_layers"][0].dump();
  const Ran check = sluice({"check", "--model", made, "--layer", layer, "--tokens", "3"});
  EXPECT_EQ(check.code, 0) << check.out << check.err;
  // The same seed gives the same bytes, another seed others; a folder with something in it is left alone.
  ASSERT_EQ(sluice({"synth", "--like", path("small.json"), "--layers", "1", "--out", path("again")}).code, 0);
  ASSERT_EQ(
      sluice({"synth", "--like", path("small.json"), "--layers", "1", "--out", path("other"), "--seed", "2"}).code, 0);
  const auto weights = [&](const std::string& folder) {
    std::string all;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".safetensors") all += read_file(entry.path());
    }
    return all;
  };
  EXPECT_EQ(weights(made), weights(path("again")));
  EXPECT_NE(weights(made), weights(path("other")));
  const std::vector<std::string> before = listing();
  EXPECT_NE(sluice({"synth", "--like", path("small.json"), "--layers", "1", "--out", made}).code, 0);
  EXPECT_EQ(sluice({"synth", "--like", "nonsense", "--layers", "1", "--out", path("x")}).code, 2);
  EXPECT_EQ(listing(), before);
}

TEST_F(CliTest, BenchPrintsOneJsonObjectPerLine) {
  const Ran ran = sluice({"bench", "--model", kTiny, "--layer", "1", "--tokens", "1,8", "--precision", "w8a8,f32",
                          "--stages", "--seconds", "0.01", "--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  std::istringstream lines(ran.out);
  std::map<std::string, int> rows;
  for (std::string line; std::getline(lines, line);) {
    const json row = json::parse(line, nullptr, false);
    ASSERT_FALSE(row.is_discarded()) << line;
    ++rows[row["row"]];
    if (row["row"] != "stage" && row["row"] != "layer") continue;
    EXPECT_LE(row["p10_us"], row["median_us"]);
    EXPECT_LE(row["median_us"], row["p90_us"]);
    EXPECT_GT(row["bytes"], 0);
    EXPECT_NE(row["bytes_formula"], "");
    EXPECT_TRUE(row["in_cache"].is_boolean());
    EXPECT_GE(row["touched_bytes"], row["bytes"]);
  }
  EXPECT_EQ(rows["ceilings"], 1);
  EXPECT_EQ(rows["layer"], 4);
  EXPECT_EQ(rows["expert GEMMs"], 4);
  EXPECT_GE(rows["stage"], 4 * 7);
}

// A checkpoint's weights are copied too, within the memory; what the cache may have served gets no verdict.
TEST_F(CliTest, BenchRotatesCopiesWithinTheMemory) {
  std::int64_t bytes_of_all[2] = {};
  for (int many : {0, 1}) {
    const Ran ran = sluice({"bench", "--model", kTiny, "--layer", "1", "--tokens", "1", "--precision", "w8a8",
                            "--seconds", "0.01", "--memory", many != 0 ? "0.02" : "0.01", "--json"});
    ASSERT_EQ(ran.code, 0) << ran.err;
    std::istringstream lines(ran.out);
    double cache = 0;
    for (std::string line; std::getline(lines, line);) {
      const json row = json::parse(line);
      if (row["row"] == "ceilings") cache = row["last_level_cache_bytes"];
      if (row["row"] == "layer") bytes_of_all[many] = row["weight_bytes"];
      if (row.contains("in_cache")) {
        EXPECT_EQ(row["in_cache"], row["touched_bytes"] <= cache);
      }
      if (row["row"] == "goal" && cache > 20e6) {
        EXPECT_TRUE(row["met"].is_null()) << line;
      }
    }
    EXPECT_LE(bytes_of_all[many], many != 0 ? 20'000'000 : 10'000'000);
    if (many != 0 && cache > 20e6) {
      EXPECT_GT(bytes_of_all[1], bytes_of_all[0]);
    }
  }
}

}  // namespace
}  // namespace sluice::test
