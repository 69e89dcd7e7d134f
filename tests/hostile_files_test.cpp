// What a checkpoint's folder may hold besides a checkpoint: pipes and folders under the names of files, configs nested
// deeper than any stack, patterns built to never end. Each is an error that names the file; none hangs or crashes.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include <nlohmann/json.hpp>

#include "harness/checkpoint_files.h"
#include "io/hf_config.h"
#include "io/safetensors.h"
#include "sluice/checkpoint.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class HostileFiles : public ::testing::Test {
 protected:
  HostileFiles() {
    test::write_text(folder_ / "config.json", test::dsv3_config().dump());
    test::write_file(folder_ / "shard.safetensors", test::dsv3_tensors());
    std::map<std::string, std::string> weight_map;
    for (const auto& [name, tensor] : test::dsv3_tensors()) weight_map[name] = "shard.safetensors";
    test::write_index(folder_.path(), weight_map);
  }
  Status load() {
    auto opened = Checkpoint::open(folder_.path());
    if (!opened.is_ok()) return opened.status();
    return opened->load(1, {.precision = Precision::kF32}).status();
  }
  Status with_config(const std::string& text) {
    test::write_text(folder_ / "config.json", text);
    return load();
  }
  test::TempFolder folder_;
};

TEST_F(HostileFiles, TheFixtureItselfLoads) { EXPECT_TRUE(load().is_ok()) << load().message(); }

// A pipe nobody writes to would block an open for ever; the test's own time limit is the proof that it does not.
TEST_F(HostileFiles, WhatIsNoRegularFileIsRefusedByName) {
  for (const std::string name : {"config.json", "model.safetensors.index.json", "shard.safetensors"}) {
    SCOPED_TRACE(name);
    const fs::path file = folder_ / name, kept = folder_ / "kept";
    fs::rename(file, kept);
    const auto expect_refused = [&](std::string_view why) {
      const Status status = load();
      EXPECT_FALSE(status.is_ok()) << why;
      EXPECT_THAT(status.message(), HasSubstr(name)) << why;
      EXPECT_THAT(status.message(), HasSubstr(std::string(why)));
      fs::remove(file);
    };
    ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
    expect_refused("not a regular file");
    fs::create_directory(file);
    expect_refused("a folder, not a regular file");
    fs::create_symlink("/dev/zero", file);  // never ends
    expect_refused("not a regular file");
    fs::create_symlink(file, file);
    // A link to itself does not exist for some callers and is a loop for others; an index that is not there is not
    // asked.
    if (name != "model.safetensors.index.json") expect_refused("");
    fs::remove(file);
    fs::rename(kept, file);
  }
  EXPECT_TRUE(load().is_ok());
}

TEST_F(HostileFiles, NestingDeeperThanTheStackIsRefused) {
  constexpr int kDeep = 200'000;
  const auto arrays = [](int n) { return std::string(n, '[') + std::string(n, ']'); };
  const auto objects = [](int n) {
    std::string text;
    for (int i = 0; i < n; ++i) text += "{\"a\":";
    return text + "1" + std::string(n, '}');
  };
  EXPECT_THAT(with_config(arrays(kDeep)).message(), HasSubstr("nested more than 64 deep"));
  // Under a key that is read, one that is quoted in a message, and one that nobody reads.
  for (const char* key : {"hidden_size", "routed_scaling_factor", "hidden_act", "quantization_config", "text_config",
                          "nobody_reads_this"}) {
    for (const std::string& value : {arrays(kDeep), objects(kDeep)}) {
      json config = test::dsv3_config();
      config[key] = 0;
      std::string text = config.dump();
      const std::string place = fmt::format("\"{}\":0", key);
      text.replace(text.find(place), place.size(), fmt::format("\"{}\":{}", key, value));
      EXPECT_THAT(with_config(text).message(), HasSubstr("nested more than 64 deep")) << key;
    }
  }
  json config = test::dsv3_config();
  config["nobody_reads_this"] = json::parse(objects(60));
  EXPECT_TRUE(with_config(config.dump()).is_ok()) << "what real tools might write";
}

TEST_F(HostileFiles, ListsWhereTheModelHasOneValue) {
  json config = test::dsv3_config();
  for (const json& value : {json::array(), json::array({2}), json::array({2, 2})}) {
    config["num_hidden_layers"] = value;
    EXPECT_THAT(with_config(config.dump()).message(), HasSubstr("'num_hidden_layers' is [")) << value;
  }
  // Per layer a list is legal, of the right length.
  config = test::dsv3_config();
  config["num_experts_per_tok"] = json::array();
  EXPECT_THAT(with_config(config.dump()).message(), HasSubstr("'num_experts_per_tok' is a list of 0 values"));
}

// To the JSON parser a NUL is the end: what follows it would never be judged.
TEST_F(HostileFiles, ANulIsNotTheEndOfAFile) {
  for (const std::string name : {"config.json", "model.safetensors.index.json"}) {
    std::ofstream(folder_ / name, std::ios::binary | std::ios::app) << '\0' << "more";
    const std::string message = load().message();
    EXPECT_THAT(message, HasSubstr(name));
    EXPECT_THAT(message, HasSubstr("NUL at byte"));
    fs::resize_file(folder_ / name, fs::file_size(folder_ / name) - 5);
  }
  EXPECT_TRUE(load().is_ok());
}

TEST_F(HostileFiles, ConfigsBeyondAnySizeAreNotRead) {
  fs::resize_file(folder_ / "config.json", std::uintmax_t{1} << 40);  // sparse
  EXPECT_THAT(load().message(), HasSubstr("config.json: the file has 1099511627776 bytes"));
}

TEST_F(HostileFiles, AnIndexNamesEachTensorOnce) {
  const std::string name = test::dsv3_tensors().begin()->first;
  for (const char* shard : {"shard.safetensors", "second.safetensors"}) {
    test::write_file(folder_ / "second.safetensors", test::dsv3_tensors());
    test::write_text(folder_ / "model.safetensors.index.json",
                     fmt::format(R"({{"weight_map":{{"{0}":"shard.safetensors","{0}":"{1}"}}}})", name, shard));
    const std::string message = load().message();
    EXPECT_THAT(message, HasSubstr("index.json"));
    EXPECT_THAT(message, HasSubstr(fmt::format("'{}' appears twice", name)));
  }
}

// Patterns come with the file: they may not overflow the stack or take for ever.
TEST_F(HostileFiles, Case136PatternsThatNeverEnd) {
  const auto with_pattern = [&](const std::string& pattern) {
    json config = test::dsv3_config();
    config["quantization_config"]["ignore"] = {pattern};
    return with_config(config.dump());
  };
  constexpr int kDeep = 100'000;
  EXPECT_THAT(with_pattern("re:" + std::string(kDeep, '(') + std::string(kDeep, ')')).message(),
              HasSubstr("regular expression of 200003 bytes"));
  EXPECT_TRUE(with_pattern("re:" + std::string(500, '(') + std::string(500, ')') + "x").is_ok());
  // Backtracking would try some 2^100 ways on a tensor's name before giving up.
  EXPECT_TRUE(with_pattern("re:(.*)*(.*)*(.*)*!$").is_ok());
  EXPECT_TRUE(with_pattern("re:(([a-z.0-9_]+)+)+!").is_ok());
  EXPECT_THAT(with_pattern("re:(.)\\1").message(), HasSubstr("is no regular expression"));
}

// ---- writing ---------------------------------------------------------------------------------------------------

TEST(HostileFolders, LeftoversAndLongNamesAreNoObstacle) {
  test::TempFolder folder;
  const float value = 1;
  const std::vector<io::TensorToWrite> tensors = {{"x", DType::kF32, {1}, {}, &value}};
  // A killed run of the same process id (in a container it is always the same) left its temporary files.
  for (int i = 0; i < 3; ++i) test::write_text(folder / fmt::format(".sluice-{}-{}.tmp", ::getpid(), i), "old");
  const std::size_t before = folder.num_files();
  ASSERT_TRUE(io::write_safetensors(folder / "x.safetensors", tensors).is_ok());
  EXPECT_EQ(folder.num_files(), before + 1);
  // As long as a name may be: the temporary one must not be longer.
  const Status status = io::write_safetensors(folder / std::string(255, 'x'), tensors);
  EXPECT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(folder.num_files(), before + 2);
  EXPECT_TRUE(io::SafetensorsFile::open(folder / std::string(255, 'x')).is_ok());
}

}  // namespace
}  // namespace sluice
