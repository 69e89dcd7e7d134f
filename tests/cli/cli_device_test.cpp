// --device and SLUICE_DISABLE, as far as a machine without a GPU can show them; where there is one, that it is used.
#include "cli/cli_fixture.h"
#include "sluice/device.h"

namespace sluice::test {
namespace {

const std::vector<std::string> kExplain = {"explain", "--like", "qwen3-30b", "--tokens", "4"};

class CliDeviceTest : public CliTest {
 protected:
  // One of every command that takes --device.
  std::vector<std::vector<std::string>> commands() const {
    return {kExplain,
            {"check", "--model", kTiny, "--layer", "1", "--tokens", "2", "--precision", "w8a8"},
            {"run", "--model", kTiny, "--layer", "1", "--input", std::string(kTiny) + "/golden.safetensors:layer1.x",
             "--output", path("y.safetensors")},
            {"bench", "--model", kTiny, "--layer", "1", "--tokens", "1", "--precision", "w8a8", "--seconds", "0.01"}};
  }
};

std::vector<std::string> with(std::vector<std::string> command, std::initializer_list<std::string> more) {
  command.insert(command.end(), more);
  return command;
}

TEST_F(CliDeviceTest, WordsThatAreNoDeviceAreUsageErrors) {
  for (const auto& command : commands()) {
    for (const char* word : {"gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cuda:0x", "cuda:99999999999", "", "cpu:0"}) {
      const Ran ran = sluice(with(command, {"--device=" + std::string(word)}));
      EXPECT_EQ(ran.code, 2) << command[0] << " " << word << ": " << ran.err;
    }
  }
}

TEST_F(CliDeviceTest, AGpuThatIsNotThereIsRefusedWithWhatWasFound) {
  for (const auto& command : commands()) {
    const Ran ran = sluice(with(command, {"--device", "cuda:777"}));
    EXPECT_EQ(ran.code, 3) << command[0];
    const Status why = Machine::detect_cuda(777).status();
    EXPECT_THAT(ran.err, HasSubstr("--device cuda:777: " + why.message()));
    if (cuda_machines()) continue;
    // The word alone is a name too: the refusal does not begin with it again.
    EXPECT_EQ(sluice(with(command, {"--device", "cuda"})).code, 3) << command[0];
  }
}

TEST_F(CliDeviceTest, ExplainSaysWhatThereIsAndWhy) {
  const Ran text = sluice(kExplain);
  EXPECT_EQ(text.code, 0) << text.err;
  const json document = sluice(with(kExplain, {"--json"})).document();
  const Result<std::vector<Machine>> gpus = cuda_machines();
  if (!gpus) {
    EXPECT_THAT(text.out, HasSubstr("GPU: none: " + gpus.status().message()));
    EXPECT_EQ(document["gpus"]["none"], gpus.status().message());
    EXPECT_EQ(document["device"]["device"], "cpu");
    EXPECT_EQ(document["device"]["why_not_cuda"], gpus.status().message());
  } else {
    EXPECT_THAT(text.out, HasSubstr(gpus->front().gpu.name));
    EXPECT_EQ(document["gpus"].size(), gpus->size());
  }
  const json cpu = sluice(with(kExplain, {"--json", "--device", "cpu"})).document();
  EXPECT_EQ(cpu["device"]["device"], "cpu");
  EXPECT_FALSE(cpu["device"].contains("why_not_cuda"));
}

TEST_F(CliDeviceTest, SluiceDisableTurnsPathsOffAndNamesWrongNames) {
  setenv("SLUICE_DISABLE", "pack:cpu", 1);
  const json document = sluice(with(kExplain, {"--json", "--device", "cpu"})).document();
  const Ran wrong = [&] {
    setenv("SLUICE_DISABLE", "hopper", 1);
    return sluice(kExplain);
  }();
  unsetenv("SLUICE_DISABLE");
  bool found = false;
  for (const auto& stage : document["precisions"][0]["stages"]) {
    if (stage["stage"] != "pack") continue;
    found = true;
    EXPECT_EQ(stage["implementation"], "reference");
    EXPECT_THAT(stage["declined"].dump(), HasSubstr("SLUICE_DISABLE"));
  }
  EXPECT_TRUE(found);
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("SLUICE_DISABLE: there is no implementation 'hopper'"));
}

}  // namespace
}  // namespace sluice::test
