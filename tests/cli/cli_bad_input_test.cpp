// What `sluice` refuses: broken activations, broken checkpoints, contradicting configs. Each is an error that names
// the file and the values, exit code 3, and nothing is written.
#include "cli/cli_fixture.h"

namespace sluice::test {
namespace {

// ---- bad activations -----------------------------------------------------------------------------------------

TEST_F(CliTest, BadInputFiles) {
  Crafted().write(model_);
  const std::string out = path("y.safetensors");
  const auto refuse = [&](const std::string& name, const std::string& bytes, const std::vector<std::string>& words,
                          const std::string& tensor = "") {
    SCOPED_TRACE(name);
    write_file(path(name), bytes);
    std::vector<std::string> all = words;
    all.push_back(name);
    expect_refused(run_args(path(name) + tensor, out), 3, all);
    fs::remove(path(name));
  };
  const std::string row = bf16_values(64);
  expect_refused(run_args(path("absent.safetensors"), out), 3, {"absent.safetensors"});
  refuse("width.safetensors", safetensors({{"x", "BF16", {2, 32}, row}}), {"32", "64"});
  refuse("two.safetensors", safetensors({{"first", "BF16", {1, 64}, row}, {"second", "BF16", {1, 64}, row}}),
         {"first", "second"});
  refuse("none.safetensors", safetensors("{}", ""), {});
  refuse("wrong.safetensors", safetensors({{"x", "BF16", {1, 64}, row}}), {"nonsense", "x"}, ":nonsense");
  refuse("rank1.safetensors", safetensors({{"x", "BF16", {64}, row}}), {"[64]"});
  refuse("rank3.safetensors", safetensors({{"x", "BF16", {1, 1, 64}, row}}), {"[1,1,64]"});
  refuse("dtype.safetensors", safetensors({{"x", "I32", {1, 32}, row}}), {"bf16", "f32"});
  refuse("short.safetensors", safetensors({{"x", "BF16", {1, 64}, row}}).substr(0, 100), {});
  refuse("text.txt", "hello", {});
  refuse("folder.npy", "", {});
  const std::string f32(256, '\0');
  refuse("magic.npy", "not numpy at all", {});
  refuse("width.npy", npy("<f4", false, "(2, 32)", f32), {"32", "64"});
  refuse("rank.npy", npy("<f4", false, "(64,)", f32), {"64"});
  refuse("double.npy", npy("<f8", false, "(1, 64)", f32 + f32), {"f64", "bf16"});
  refuse("big.npy", npy(">f4", false, "(1, 64)", f32), {">f4"});
  refuse("fortran.npy", npy("<f4", true, "(1, 64)", f32), {"ortran"});
  refuse("short.npy", npy("<f4", false, "(1, 64)", f32.substr(4)), {"252", "256"});
  refuse("long.npy", npy("<f4", false, "(1, 64)", f32 + "x"), {"257", "256"});
  refuse("negative.npy", npy("<f4", false, "(-1, 64)", f32), {});
  refuse("huge.npy", npy("<f4", false, "(4611686018427387904, 64)", f32), {});
  refuse("cut.npy", npy("<f4", false, "(1, 64)", f32).substr(0, 9), {});
}

// ---- bad models ----------------------------------------------------------------------------------------------

struct Fault {
  std::string name;
  std::function<void(Crafted&)> break_it;
  std::vector<std::string> words;  // that the message must have
};

class BadModel : public CliTest, public testing::WithParamInterface<Fault> {};

TEST_P(BadModel, IsRefusedAndNothingIsWritten) {
  Crafted crafted;
  GetParam().break_it(crafted);
  crafted.write(model_);
  const std::string x = input(3);
  expect_refused(run_args(x, path("y.safetensors")), 3, GetParam().words);
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"check", "--model", model(), "--layer", "1"},
        {"explain", "--model", model(), "--layer", "1"}}) {
    EXPECT_EQ(sluice(arguments).code, 3) << arguments[0];
  }
  EXPECT_EQ(sluice({"inspect", model()}).code, 3);
}

void replace(std::string& text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
}

// Rewrites the header's JSON text.
std::function<void(Crafted&)> in_header(const std::string& from, const std::string& to) {
  return [=](Crafted& c) {
    std::string header = c.header();
    replace(header, from, to);
    c.set_header(header);
  };
}
std::function<void(Crafted&)> in_config(const std::string& key, const json& value) {
  return [=](Crafted& c) {
    if (value.is_null()) {
      c.config.erase(key);
    } else {
      c.config[key] = value;
    }
  };
}

const std::string kGate = "model.layers.1.mlp.gate.weight";

const Fault kFaults[] = {
    {"TruncatedFile", [](Crafted& c) { c.file.resize(c.file.size() - 10); }, {"model.safetensors"}},
    {"EmptyFile", [](Crafted& c) { c.file.clear(); }, {"model.safetensors"}},
    {"HeaderLengthBeyondFile",
     [](Crafted& c) { c.file.replace(0, 8, little_endian(c.file.size())); },
     {"model.safetensors"}},
    {"HeaderLengthHuge", [](Crafted& c) { c.file.replace(0, 8, little_endian(~0ull)); }, {"model.safetensors"}},
    {"OverlappingOffsets", in_header("[0,1024]", "[1024,2048]"), {"model.safetensors"}},
    {"GappedOffsets",
     [](Crafted& c) {
       // The last tensor starts 8 bytes late.
       const std::size_t end = c.data().size();
       const std::size_t begin = end - c.tensors.back().bytes.size();
       std::string header = c.header();
       replace(header, "[" + std::to_string(begin) + "," + std::to_string(end) + "]",
               "[" + std::to_string(begin + 8) + "," + std::to_string(end + 8) + "]");
       c.file = safetensors(header, c.data() + std::string(8, '\0'));
     },
     {"model.safetensors", "down_proj"}},
    {"TrailingBytes", [](Crafted& c) { c.file += "trailing"; }, {"model.safetensors"}},
    {"DuplicateKeys",
     [](Crafted& c) { c.set_header("{" + header_entry(c.tensors[0], 0) + "," + c.header().substr(1)); },
     {"model.safetensors", kGate}},
    {"GitLfsPointer",
     [](Crafted& c) {
       c.file = "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, '0') + "\nsize 1234\n";
     },
     {"model.safetensors", "LFS"}},
    {"UnknownDtype", in_header("\"BF16\"", "\"F9_E1\""), {"model.safetensors", "F9_E1", kGate}},
    {"HeaderIsNoJson", in_header("{\"model", "{model"), {"model.safetensors"}},
    {"ShardMissing",
     [](Crafted& c) { c.set_index("model-00007-of-00009.safetensors"); },
     {"model-00007-of-00009.safetensors"}},
    {"ShardAboveTheFolder", [](Crafted& c) { c.set_index("../model/model.safetensors"); }, {".."}},
    {"ShardAbsolute", [](Crafted& c) { c.set_index("/etc/model.safetensors"); }, {"/etc/model.safetensors"}},
    {"IndexIsNoJson", [](Crafted& c) { c.index = "{"; }, {"model.safetensors.index.json"}},
    {"WrongShape", in_header("[8,64]", "[64,8]"), {kGate, "64", "8"}},
    {"WrongShapeOfOneExpert",
     [](Crafted& c) {
       c.tensor("experts.5.up_proj").shape = {64, 32};
       c.build();
     },
     {"experts.5.up_proj", "32", "64"}},
    {"MissingTensor",
     [](Crafted& c) {
       c.tensors.pop_back();
       c.build();
     },
     {"experts.7.down_proj"}},
    {"SurplusTensor",
     [](Crafted& c) {
       Tensor extra = c.tensor("experts.7.up_proj");
       extra.name = "model.layers.1.mlp.experts.8.up_proj.weight";
       c.tensors.push_back(extra);
       c.build();
     },
     {"experts.8"}},
    {"NoFamily", in_config("model_type", "nonsense"), {"config.json", "nonsense"}},
    {"KeyMissing", in_config("n_routed_experts", nullptr), {"config.json", "n_routed_experts"}},
    {"HiddenMissing", in_config("hidden_size", nullptr), {"config.json", "hidden_size"}},
    {"TopKAboveE", in_config("num_experts_per_tok", 9), {"9", "8"}},
    {"TopkGroupAboveNGroup", in_config("topk_group", 5), {"5", "4"}},
    {"NGroupDoesNotDivideE", in_config("n_group", 3), {"3", "8"}},
    {"AliasesContradict", in_config("num_experts", 16), {"8", "16"}},
    {"NotAnInteger", in_config("hidden_size", "64"), {"config.json", "hidden_size"}},
};

INSTANTIATE_TEST_SUITE_P(Faults, BadModel, testing::ValuesIn(kFaults),
                         [](const auto& fault) { return fault.param.name; });

TEST_F(CliTest, LayersWithoutExpertsAreRefusedByName) {
  Crafted().write(model_);
  const std::string x = input(3);
  for (const char* layer : {"0", "2"}) {
    expect_refused({"run", "--model", model(), "--layer", layer, "--input", x, "--output", path("y")}, 3, {layer});
  }
  expect_refused({"run", "--model", model(), "--layer", "-1", "--input", x, "--output", path("y")}, 2, {"'-1'"});
  expect_refused({"inspect", path("nowhere")}, 3, {"nowhere"});
  fs::create_directories(dir_ / "empty");
  expect_refused({"inspect", path("empty")}, 3, {"config.json"});
}

TEST_F(CliTest, NanWeightsAreReportedNotHidden) {
  Crafted crafted;
  std::string& bytes = crafted.tensor("experts.3.down_proj").bytes;
  bytes[0] = '\xC0', bytes[1] = '\x7F';
  crafted.build();
  crafted.write(model_);
  const Ran ran = sluice(run_args(input(3), path("y.safetensors"), {"--json"}));
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, HasSubstr("experts.3.down_proj"));
  EXPECT_EQ(ran.document()["nan_weights"], 1);
}

}  // namespace
}  // namespace sluice::test
