// What is said of GPUs: every refusal with what was found and what is needed, on machines this one is not.
#include "sluice/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/device.h"

namespace sluice::test {
namespace {

using device::Findings;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::StartsWith;

Gpu gpu(const char* name, Version capability) {
  Gpu g;
  g.name = name;
  g.capability = capability;
  return g;
}

Findings findings(Version runtime, Version driver, std::vector<Gpu> gpus) {
  Findings f;
  f.has_cuda = true;
  f.runtime = runtime;
  f.driver = driver;
  f.gpus = std::move(gpus);
  return f;
}

std::string refusal(const Findings& f, int index = 0) {
  const Result<Machine> machine = device::judge(f, index);
  EXPECT_FALSE(machine.is_ok());
  if (machine.is_ok()) return "";
  EXPECT_EQ(machine.status().code(), StatusCode::kUnsupported);
  return machine.status().message();
}

// Cases 145 and 146: versions are numbers, not strings, and not compared part by part.
TEST(Device, Case145And146VersionsAreNumbers) {
  EXPECT_GT((Version{12, 10}), (Version{12, 3}));
  EXPECT_GT((Version{13, 0}), (Version{12, 4}));
  EXPECT_LT((Version{9, 2}), (Version{12, 3}));
  EXPECT_LT((Version{9, 0}), (Version{10, 0}));
  EXPECT_EQ(to_string(Version{12, 10}), "12.10");
}

TEST(Device, RefusalsNameWhatWasFoundAndWhatIsNeeded) {
  EXPECT_THAT(refusal({}), AllOf(HasSubstr("built without CUDA"), HasSubstr("SLUICE_CUDA=ON"), HasSubstr("12.3")));
  EXPECT_THAT(refusal(findings({13, 0}, {}, {})), AllOf(HasSubstr("no NVIDIA driver"), HasSubstr("13.0")));
  EXPECT_THAT(refusal(findings({13, 2}, {12, 10}, {gpu("NVIDIA H200", {9, 0})})),
              AllOf(HasSubstr("serves CUDA 12.10 at most"), HasSubstr("CUDA 13.2"), HasSubstr("13.0 or newer")));
  EXPECT_THAT(refusal(findings({13, 0}, {13, 0}, {})), HasSubstr("finds no GPU"));
  Findings broken = findings({13, 0}, {13, 0}, {});
  broken.error = "system not yet initialized";
  EXPECT_THAT(refusal(broken), HasSubstr("system not yet initialized"));
  const Findings two = findings({13, 0}, {13, 0}, {gpu("NVIDIA H200", {9, 0}), gpu("Tesla T4", {7, 5})});
  for (int index : {2, -1, 1 << 30}) {
    EXPECT_THAT(refusal(two, index), AllOf(HasSubstr("no GPU " + std::to_string(index)), HasSubstr("0 (NVIDIA H200"),
                                           HasSubstr("1 (Tesla T4, compute capability 7.5)")));
  }
}

TEST(Device, DriversOfTheSameMajorVersionServeOlderAndNewerRuntimes) {
  const std::vector<Gpu> gpus = {gpu("NVIDIA H100", {9, 0})};
  EXPECT_TRUE(device::judge(findings({12, 8}, {12, 3}, gpus), 0).is_ok());
  EXPECT_TRUE(device::judge(findings({12, 3}, {13, 0}, gpus), 0).is_ok());
  EXPECT_FALSE(device::judge(findings({13, 0}, {12, 9}, gpus), 0).is_ok());
}

TEST(Device, FoundGpusCarryTheirNumbers) {
  const Result<Machine> machine =
      device::judge(findings({13, 0}, {13, 0}, {gpu("A", {8, 0}), gpu("NVIDIA H200", {9, 0})}), 1);
  ASSERT_TRUE(machine.is_ok());
  EXPECT_EQ(machine->device, (Device{DeviceKind::kCuda, 1}));
  EXPECT_EQ(machine->gpu.capability, (Version{9, 0}));
  EXPECT_EQ(machine->gpu.name, "NVIDIA H200");
  EXPECT_EQ(machine->num_threads, 1);
}

// Case 149: kernels of one generation are not offered on another.
TEST(Device, Case149CapabilityIsComparedAsNumbersAndNamed) {
  const auto on = [](Version capability) {
    Machine machine;
    machine.device = {DeviceKind::kCuda, 3};
    machine.gpu = gpu("Some GPU", capability);
    return machine;
  };
  for (Version v : {Version{8, 0}, Version{8, 9}, Version{9, 0}, Version{10, 0}, Version{10, 3}}) {
    EXPECT_TRUE(device::runs_plain_kernels(on(v)).is_ok()) << to_string(v);
    EXPECT_EQ(device::runs_hopper_kernels(on(v)).is_ok(), (v == Version{9, 0})) << to_string(v);
  }
  for (Version v : {Version{7, 5}, Version{12, 0}, Version{0, 0}}) {
    const Status plain = device::runs_plain_kernels(on(v));
    const Status hopper = device::runs_hopper_kernels(on(v));
    EXPECT_THAT(plain.message(), AllOf(HasSubstr("GPU 3"), HasSubstr(to_string(v)), HasSubstr("8.x")));
    EXPECT_THAT(hopper.message(), AllOf(HasSubstr("9.0 (Hopper)"), HasSubstr("Some GPU"), HasSubstr(to_string(v))));
  }
}

// Whatever this machine is, asking it gives an answer or a sentence, and the two ways of asking agree.
TEST(Device, ThisMachineAnswers) {
  const Result<std::vector<Machine>> machines = cuda_machines();
  const Result<Machine> first = Machine::detect_cuda(0);
  ASSERT_EQ(machines.is_ok(), first.is_ok());
  if (!first) {
    EXPECT_EQ(machines.status().message(), first.status().message());
    EXPECT_THAT(first.status().message(), AnyOf(HasSubstr("CUDA"), HasSubstr("GPU")));
  } else {
    EXPECT_EQ(machines->front().gpu.name, first->gpu.name);
    EXPECT_FALSE(Machine::detect_cuda(static_cast<int>(machines->size())).is_ok());
  }
}

TEST(Device, UploadRefusesWhatItCannotDo) {
  const LayerWeights none;
  const Result<LayerWeights> to_cpu = upload(none, {DeviceKind::kCpu, 0});
  ASSERT_FALSE(to_cpu.is_ok());
  EXPECT_EQ(to_cpu.status().code(), StatusCode::kInvalidArgument);
  const Result<LayerWeights> nowhere = upload(none, {DeviceKind::kCuda, 1000});
  ASSERT_FALSE(nowhere.is_ok());
  EXPECT_EQ(nowhere.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(nowhere.status().message(), StartsWith("upload: " + Machine::detect_cuda(1000).status().message()));
}

}  // namespace
}  // namespace sluice::test
