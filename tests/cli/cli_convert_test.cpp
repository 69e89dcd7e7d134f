// The built `sluice convert`: what it says, its exit codes, and what is left on disk when it is stopped, killed, or out
// of room. The bytes it writes are the business of tests/convert.
#include <csignal>

#include "cli/cli_fixture.h"

namespace sluice::test {
namespace {

class ConvertCli : public CliTest {
 protected:
  std::vector<std::string> convert(std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {"convert", "--model", model(), "--out", path("out")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  // A Qwen3 model of `experts` experts whose weights are a hole in the file: large, and written in no time. Fused: two
  // tensors of all experts.
  void write_large(std::int64_t experts, bool fused) const {
    constexpr std::int64_t H = 2048, I = 1024;
    const json config = {{"model_type", "qwen3_moe"},  {"num_hidden_layers", 1}, {"hidden_size", H},
                         {"moe_intermediate_size", I}, {"num_experts", experts}, {"num_experts_per_tok", 2},
                         {"norm_topk_prob", true},     {"hidden_act", "silu"},   {"torch_dtype", "bfloat16"}};
    json header;
    std::int64_t end = 0;
    const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
      std::int64_t bytes = 2;
      for (std::int64_t extent : shape) bytes *= extent;
      header["model.layers.0.mlp." + name] = {
          {"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {end, end + bytes}}};
      end += bytes;
    };
    add("gate.weight", {experts, H});
    if (fused) {
      add("experts.gate_up_proj", {experts, 2 * I, H});
      add("experts.down_proj", {experts, H, I});
    }
    for (std::int64_t j = 0; j < (fused ? 0 : experts); ++j) {
      const std::string expert = "experts." + std::to_string(j);
      add(expert + ".gate_proj.weight", {I, H});
      add(expert + ".up_proj.weight", {I, H});
      add(expert + ".down_proj.weight", {H, I});
    }
    fs::create_directories(model_);
    write_file(model_ / "config.json", config.dump());
    const std::string text = header.dump();
    write_file(model_ / "model.safetensors", little_endian(text.size()) + text);
    fs::resize_file(model_ / "model.safetensors", 8 + text.size() + static_cast<std::uintmax_t>(end));
  }

  // Starts the command and sends it `signal` once its first file is complete; returns how it ended.
  int stop_in_the_middle(int signal) const {
    const std::vector<std::string> words = convert({"--to", "fp8-block", "--shards-bytes", "16MB"});
    const pid_t child = fork();
    if (child == 0) {
      std::vector<char*> argv = {const_cast<char*>("sluice")};
      for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
      argv.push_back(nullptr);
      execv(SLUICE_CLI, argv.data());
      _exit(127);
    }
    int status = 0;
    const auto is_under_way = [&] {
      for (const auto& entry : fs::recursive_directory_iterator(dir_)) {
        if (entry.path().filename().string().starts_with("model-00001-of-")) return true;
      }
      return false;
    };
    while (waitpid(child, &status, WNOHANG) == 0) {
      std::error_code ec;
      bool begun = false;
      try {
        begun = is_under_way();
      } catch (const fs::filesystem_error&) {  // a temporary file went while it was looked at
      }
      if (begun) {
        kill(child, signal);
        EXPECT_EQ(waitpid(child, &status, 0), child);
        return status;
      }
      usleep(1000);
    }
    return status;
  }

  // Under limits of the shell's.
  int limited(const std::string& limits, const std::vector<std::string>& arguments,
              std::string* message = nullptr) const {
    std::string line = limits + " exec " + quoted(SLUICE_CLI);
    for (const std::string& argument : arguments) line += " " + quoted(argument);
    const std::string command = "sh -c " + quoted(line) + " >/dev/null 2>" + quoted(path("stderr"));
    const int status = std::system(command.c_str());
    if (message != nullptr) *message = read_file(dir_ / "stderr");
    fs::remove(dir_ / "stderr");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
};

TEST_F(ConvertCli, SaysWhatItDidAsTextAndJson) {
  Crafted().write(model_);
  write_file(model_ / "tokenizer.json", "{}");
  const Ran text = sluice(convert({"--to", "fp8-block"}));
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_EQ(text.err, "");
  EXPECT_THAT(text.out, HasSubstr("deepseek_v3, layer 1 to fp8-block"));
  EXPECT_THAT(text.out, HasSubstr("27 matrices quantised; 2 tensors and 1 other file copied and equal"));
  EXPECT_THAT(text.out, HasSubstr("relative L2 error: worst"));
  const Ran machine = sluice(convert({"--to", "int8-channel", "--force", "--layers", "1", "--json"}));
  EXPECT_EQ(machine.code, 0) << machine.err;
  const json document = machine.document();
  EXPECT_EQ(document["to"], "int8-channel");
  EXPECT_EQ(document["layers"], json({1}));
  EXPECT_EQ(document["quantised"], 27);
  EXPECT_EQ(document["num_violations"], 0);
  EXPECT_EQ(document["copied_files"], json({"tokenizer.json"}));
  EXPECT_GT(document["error"]["worst"], 0);
  EXPECT_LE(document["error"]["worst_share_of_bound"], 1);
  EXPECT_EQ(read_file(dir_ / "out/tokenizer.json"), "{}");
}

TEST_F(ConvertCli, WhatItWritesIsInspectedCheckedAndRun) {
  // Wide enough for the budget of the whole layer, which is one of many small errors.
  write_file(path("small.json"), Crafted().config.dump());
  ASSERT_EQ(
      sluice({"synth", "--like", path("small.json"), "--hidden", "320", "--intermediate", "192", "--out", model()})
          .code,
      0);
  const std::map<std::string, std::string> formats = {
      {"fp8-block", "e4m3 128x128"}, {"fp8-channel", "e4m3 per channel"}, {"int8-channel", "int8 per channel"}};
  for (const auto& [format, text] : formats) {
    SCOPED_TRACE(format);
    ASSERT_EQ(sluice(convert({"--to", format, "--force"})).code, 0);
    const json document = sluice({"inspect", path("out"), "--json"}).document();
    ASSERT_EQ(document["groups"].size(), 1u);
    EXPECT_EQ(document["groups"][0]["expert_format"], text);
    EXPECT_EQ(document["groups"][0]["shared_format"], text);
    EXPECT_EQ(document["groups"][0]["precisions"], json({"w8a8", "w8a16", "bf16", "f32"}));
    const Ran check = sluice({"check", "--model", path("out"), "--layer", "1", "--tokens", "5"});
    EXPECT_EQ(check.code, 0) << check.out << check.err;
    EXPECT_THAT(check.out, HasSubstr(" 0 failed"));
    const Ran ran = sluice({"run", "--model", path("out"), "--layer", "1", "--input", input(3, 320), "--output",
                            path("y.safetensors"), "--precision", "w8a8", "--json"});
    EXPECT_EQ(ran.code, 0) << ran.err;
    // explain plans without reading weights, and must plan what runs: for three tokens in all precisions.
    const Ran explained =
        sluice({"explain", "--model", path("out"), "--layer", "1", "--tokens", "3", "--precision", "all", "--json"});
    ASSERT_EQ(explained.code, 0) << explained.err;
    const json plans = explained.document()["precisions"];
    EXPECT_EQ(plans.size(), 4u);
    for (const json& plan : plans) {
      EXPECT_FALSE(plan.contains("cannot_run")) << plan;
      if (plan["precision"] != "w8a8") continue;
      EXPECT_GT(plan["workspace_bytes"], 0);
      EXPECT_EQ(plan["workspace_bytes"], ran.document()["workspace_bytes"]);
    }
  }
}

TEST_F(ConvertCli, TheSameNumberOfBytesInEveryUnit) {
  Crafted().write(model_);
  const auto shards = [&](const char* size) {
    const Ran ran = sluice(convert({"--to", "fp8-block", "--force", "--json", "--shards-bytes", size}));
    EXPECT_EQ(ran.code, 0) << size << ": " << ran.err;
    return ran.document()["shards"].get<int>();
  };
  const int wanted = shards("32000");
  EXPECT_GT(wanted, 1);
  for (const char* same : {"32kB", "32 KB", "32k", "0.032MB", "31.25KiB", "31.25 ki", "32000B"})
    EXPECT_EQ(shards(same), wanted) << same;
  for (const char* large : {"1MB", "1MiB", "0.001 tb", "5GiB"}) EXPECT_LT(shards(large), wanted) << large;
}

TEST_F(ConvertCli, UsageErrors) {
  Crafted().write(model_);
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {}, {"--to", "fp8"}, {"--to", ""}, {"--to", "fp8-block", "--threads", "0"}}) {
    expect_refused(convert(more), 2, {});
  }
  const auto layers = [&](const std::string& text, const std::string& why) {
    expect_refused(convert({"--to", "fp8-block", "--layers", text}), 2,
                   {"--layers '" + text + "': " + why + "; give layer numbers and ranges, as in 3-5,7"});
  };
  layers("", "it is empty");
  for (const char* text : {"1,", ",1", "1,,2"}) layers(text, "nothing stands before or after a comma");
  layers("x", "'x' is no layer number from 0 to 99999");
  layers("-1", "'-1' is no layer number from 0 to 99999");
  layers("1-", "'' is no layer number from 0 to 99999");
  layers("0-100000", "'100000' is no layer number from 0 to 99999");
  layers("1-99999999999999999999", "'99999999999999999999' is no layer number from 0 to 99999");
  layers("1,3-2", "the range 3-2 runs backwards");
  const auto bytes = [&](const std::string& text, const std::string& why) {
    expect_refused(
        convert({"--to", "fp8-block", "--shards-bytes", text}), 2,
        {"--shards-bytes '" + text + "': " + why + "; give a count of bytes such as 5368709120, 500MB or 5GiB"});
  };
  bytes("", "it is empty");
  bytes("GB", "it does not begin with a number");
  for (const char* text : {"0", "0.9", "-5", "nan"}) bytes(text, "a file holds at least 1 byte");
  for (const char* unit : {"parsecs", "ib", "kk", "x", "gbb", "pb"})
    bytes("5 " + std::string(unit),
          "'" + std::string(unit) + "' is no unit; there are kB, MB, GB, TB and KiB, MiB, GiB, TiB");
  bytes("5e6TB", "'e6tb' is no unit; there are kB, MB, GB, TB and KiB, MiB, GiB, TiB");
  for (const char* text : {"99999999999999999999", "inf", "9999999TB"}) bytes(text, "that is more than 2^62 bytes");
  expect_refused({"convert", "--model", model(), "--out", model(), "--to", "fp8-block"}, 2, {"is the model itself"});
  expect_refused({"convert", "--model", model(), "--out", model(), "--to", "fp8-block", "--force"}, 2, {"the model"});
  expect_refused({"convert", "--model", model(), "--out", path("model/x"), "--to", "fp8-block"}, 2, {"model's folder"});
  fs::create_directory(dir_ / "out");
  write_file(dir_ / "out/thesis", "x");
  expect_refused(convert({"--to", "fp8-block"}), 2, {"exists and is not empty"});
  expect_refused(convert({"--to", "fp8-block", "--force"}), 2, {"no config.json"});
}

TEST_F(ConvertCli, BadModels) {
  const auto refuse = [&](const std::function<void(Crafted&)>& break_it, const std::vector<std::string>& words,
                          const std::vector<std::string>& more = {}) {
    Crafted crafted;
    break_it(crafted);
    fs::remove_all(model_);
    crafted.write(model_);
    std::vector<std::string> arguments = convert({"--to", "fp8-channel"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_refused(arguments, 3, words);
  };
  const std::string up = "model.layers.1.mlp.experts.3.up_proj.weight";
  for (const auto& [bits, word] :
       {std::pair<std::uint16_t, const char*>(0x7FC0, "NaN"), {0x7F80, "+Inf"}, {0xFF80, "-Inf"}}) {
    refuse(
        [&, bits = bits](Crafted& c) {
          std::memcpy(c.tensor("experts.3.up_proj").bytes.data() + 2 * (5 * 64 + 6), &bits, 2);
          c.build();
        },
        {up + "[5,6] is " + word});
  }
  refuse([](Crafted& c) { c.config["quantization_config"] = {{"quant_method", "fp8"}}; }, {"quantised already", "fp8"});
  refuse(
      [](Crafted& c) {
        c.tensor("experts.3.up_proj").dtype = "I16";
        c.build();
      },
      {up, "i16"});
  refuse([](Crafted& c) { c.file.resize(c.file.size() - 1); }, {"model.safetensors"});
  refuse([](Crafted& c) { c.set_index("absent.safetensors"); }, {"absent.safetensors"});
  refuse([](Crafted& c) { c.config["model_type"] = "bert"; }, {"bert"});
  refuse([](Crafted& c) { c.config["first_k_dense_replace"] = 2; }, {"no layers with experts"});
  refuse([](Crafted&) {}, {"layer 0 of 2 has no experts"}, {"--layers", "0-1"});
  refuse([](Crafted&) {}, {"there is no layer 9"}, {"--layers", "9"});
  expect_refused({"convert", "--model", path("absent"), "--out", path("out"), "--to", "fp8-block"}, 3, {"absent"});
}

TEST_F(ConvertCli, InterruptedLeavesNothing) {
  write_large(24, false);
  const std::vector<std::string> before = listing();
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const int status = stop_in_the_middle(signal);
    ASSERT_TRUE(WIFEXITED(status)) << signal;
    EXPECT_EQ(WEXITSTATUS(status), 130) << signal;
    EXPECT_EQ(listing(), before) << signal;
  }
}

TEST_F(ConvertCli, KilledLeavesNothingUnderItsName) {
  write_large(24, false);
  const int status = stop_in_the_middle(SIGKILL);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_FALSE(fs::exists(dir_ / "out"));
  // What it left is in nobody's way.
  for (const auto& entry : fs::directory_iterator(dir_)) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(name == "model" || name.starts_with(".sluice-")) << name;
  }
  Crafted().write(dir_ / "small");
  EXPECT_EQ(sluice({"convert", "--model", path("small"), "--out", path("out"), "--to", "fp8-block"}).code, 0);
}

TEST_F(ConvertCli, AFullDiskLeavesNothing) {
  write_large(2, false);
  const std::vector<std::string> before = listing();
  std::string message;
  // A limit on the size of files stands in for a disk of that size: 1 MB, in blocks of 512 bytes.
  EXPECT_EQ(limited("ulimit -f 2000;", convert({"--to", "fp8-block"}), &message), 3);
  EXPECT_THAT(message, HasSubstr("model.safetensors"));
  EXPECT_EQ(listing(), before);
}

// No sanitizer could live within the limit.
#if !defined(__SANITIZE_ADDRESS__)
TEST_F(ConvertCli, MemoryStaysBelowOneTensor) {
  write_large(16, true);  // gate_up_proj alone has 134 MB
  std::string message;
  EXPECT_EQ(limited("ulimit -d 98304;", convert({"--to", "fp8-block", "--threads", "1"}), &message), 0) << message;
  EXPECT_TRUE(fs::exists(dir_ / "out/config.json"));
}
#endif

}  // namespace
}  // namespace sluice::test
