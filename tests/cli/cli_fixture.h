// Runs the built `sluice` command in a folder of its own and judges what it says and leaves behind.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

#include "cli/crafted.h"

namespace sluice::test {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

inline constexpr const char* kTiny = SLUICE_SOURCE_DIR "/data/tiny-dsv3";

struct Ran {
  int code = -1;
  std::string out, err;
  json document() const {
    json parsed = json::parse(out, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << "not one JSON document:\n" << out;
    return parsed;
  }
};

class CliTest : public testing::Test {
 protected:
  CliTest() {
    std::string pattern = (fs::temp_directory_path() / "sluice-cli-XXXXXX").string();
    dir_ = mkdtemp(pattern.data());
    model_ = dir_ / "model";
  }
  ~CliTest() override { fs::remove_all(dir_); }

  Ran sluice(const std::vector<std::string>& arguments) { return launched(line_of(arguments)); }

  static std::string line_of(const std::vector<std::string>& arguments) {
    std::string line = quoted(SLUICE_CLI);
    for (const std::string& argument : arguments) line += " " + quoted(argument);
    return line;
  }
  // A line of shell.
  Ran launched(const std::string& line) {
    const fs::path out = dir_ / "stdout", err = dir_ / "stderr";
    const int status =
        std::system((line + " >" + quoted(out.string()) + " 2>" + quoted(err.string()) + " </dev/null").c_str());
    Ran ran;
    ran.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    ran.out = read_file(out);
    ran.err = read_file(err);
    // A bar redraws its line; none of it may reach a file.
    EXPECT_THAT(ran.err, Not(HasSubstr("\r")));
    EXPECT_THAT(ran.err, Not(HasSubstr("\x1b")));
    expect_no_doubled_part(ran.err);
    fs::remove(out);
    fs::remove(err);
    return ran;
  }
  // "upload: cuda: cuda: ...": who says something says his name once. Quoted words are the caller's and may be anything.
  static void expect_no_doubled_part(const std::string& text) {
    std::string before;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t end = std::min(text.find(": ", begin), text.size());
      const std::string part = text.substr(begin, end - begin);
      EXPECT_FALSE(!part.empty() && before.ends_with(part) &&
                   (before.size() == part.size() || before[before.size() - part.size() - 1] == ' '))
          << "'" << part << "' is said twice: " << text;
      before = part;
      begin = end + 2;
    }
  }
  static std::string quoted(const std::string& text) {
    std::string result = "'";
    for (char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return result + "'";
  }

  // Every path below the test's folder.
  std::vector<std::string> listing() const {
    std::vector<std::string> paths;
    for (const auto& entry : fs::recursive_directory_iterator(dir_)) paths.push_back(entry.path().string());
    std::sort(paths.begin(), paths.end());
    return paths;
  }
  std::string path(const std::string& name) const { return (dir_ / name).string(); }
  std::string model() const { return model_.string(); }

  // [T,64] bf16 activations for the crafted model.
  std::string input(std::int64_t tokens, std::int64_t width = Crafted::kHidden) {
    const std::string name = path("x" + std::to_string(tokens) + "x" + std::to_string(width) + ".safetensors");
    write_file(name,
               safetensors({{"x", "BF16", {tokens, width}, bf16_values(static_cast<std::size_t>(tokens * width), 7)}}));
    return name;
  }
  std::vector<std::string> run_args(const std::string& x, const std::string& out,
                                    std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments = {"run", "--model", model(), "--layer", "1", "--input", x, "--output", out};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  // `run` must refuse with `code`, say all of `words`, and leave the folder as it was; with --json the same as JSON.
  void expect_refused(const std::vector<std::string>& arguments, int code, const std::vector<std::string>& words) {
    const std::vector<std::string> before = listing();
    const Ran text = sluice(arguments);
    EXPECT_EQ(text.code, code) << text.err;
    EXPECT_EQ(text.err.rfind("sluice: error: ", 0), 0u) << text.err;
    for (const std::string& word : words) EXPECT_THAT(text.err, HasSubstr(word));
    EXPECT_EQ(text.out, "");
    EXPECT_EQ(listing(), before) << "something was written";

    std::vector<std::string> with_json = arguments;
    with_json.push_back("--json");
    const Ran machine = sluice(with_json);
    EXPECT_EQ(machine.code, code);
    const json document = machine.document();
    ASSERT_TRUE(document.contains("error")) << machine.out;
    EXPECT_EQ(document["error"]["exit_code"], code);
    for (const std::string& word : words) EXPECT_THAT(document["error"]["message"].get<std::string>(), HasSubstr(word));
    EXPECT_EQ(listing(), before) << "something was written";
  }

  fs::path dir_, model_;
};

// A safetensors file read back by this test alone.
struct Written {
  json header;
  std::string data;
  explicit Written(const std::string& file) {
    const std::string bytes = read_file(file);
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    header = json::parse(bytes.substr(8, length));
    data = bytes.substr(8 + length);
  }
  std::string bytes(const std::string& name) const {
    const std::size_t begin = header[name]["data_offsets"][0], end = header[name]["data_offsets"][1];
    return data.substr(begin, end - begin);
  }
  template <class T>
  std::vector<T> values(const std::string& name) const {
    const std::string raw = bytes(name);
    std::vector<T> v(raw.size() / sizeof(T));
    std::memcpy(v.data(), raw.data(), raw.size());
    return v;
  }
};

}  // namespace sluice::test
