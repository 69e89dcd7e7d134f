// Judges what was found: the sentences of every refusal.
#include <fmt/format.h>

#include <cstdlib>

#include "device/device.h"
#include "sluice/device.h"

namespace sluice::device {
namespace {

Status refuse(std::string text) { return {StatusCode::kUnsupported, std::move(text)}; }

// Runtimes of one major version run on every driver of that version; a newer major version needs a newer driver.
Status judge_driver(const Findings& f) {
  if (!f.has_cuda) {
    return refuse(
        "this library was built without CUDA; a build with -DSLUICE_CUDA=ON and nvcc 12.3 or newer is needed");
  }
  const std::string needed =
      fmt::format("this library was built with CUDA {} and needs a driver for CUDA {}.0 or newer", to_string(f.runtime),
                  f.runtime.major);
  if (f.driver == Version{}) return refuse("no NVIDIA driver was found; " + needed);
  if (f.driver.major < f.runtime.major) {
    return refuse(fmt::format("the NVIDIA driver serves CUDA {} at most; {}", to_string(f.driver), needed));
  }
  if (!f.error.empty()) {
    return refuse(fmt::format("the NVIDIA driver for CUDA {} answers '{}'; a GPU it can use is needed",
                              to_string(f.driver), f.error));
  }
  return Status::ok();
}

std::string describe(int index, const Gpu& gpu) {
  return fmt::format("{} ({}, compute capability {})", index, gpu.name, to_string(gpu.capability));
}

Machine machine_of(int index, const Gpu& gpu) {
  Machine machine;
  machine.device = {DeviceKind::kCuda, index};
  machine.gpu = gpu;
  return machine;
}

}  // namespace

Result<Machine> judge(const Findings& f, int index) {
  SLUICE_TRY(judge_driver(f));
  if (f.gpus.empty()) {
    const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return refuse(fmt::format("the NVIDIA driver for CUDA {} finds no GPU{}; one is needed", to_string(f.driver),
                              visible == nullptr ? "" : fmt::format(" (CUDA_VISIBLE_DEVICES is '{}')", visible)));
  }
  const int count = static_cast<int>(f.gpus.size());
  if (index < 0 || index >= count) {
    std::string known;
    for (int i = 0; i < count; ++i) known += (i > 0 ? ", " : "") + describe(i, f.gpus[static_cast<std::size_t>(i)]);
    return refuse(fmt::format("there is no GPU {}; there {} {}: {}", index, count == 1 ? "is" : "are", count, known));
  }
  return machine_of(index, f.gpus[static_cast<std::size_t>(index)]);
}

Status runs_plain_kernels(const Machine& machine) {
  const Version has = machine.gpu.capability;
  if (has.major >= 8 && has.major <= 10) return Status::ok();
  return {StatusCode::kUnsupported,
          fmt::format(
              "compiled for GPUs of compute capability 8.x, 9.x and 10.x; GPU {} has {}", machine.device.index,
              machine.gpu.name.empty() ? to_string(has) : fmt::format("{} ({})", to_string(has), machine.gpu.name))};
}

Status runs_hopper_kernels(const Machine& machine) {
  const Version has = machine.gpu.capability;
  if (has == Version{9, 0}) return Status::ok();
  return {StatusCode::kUnsupported,
          fmt::format(
              "needs a GPU of compute capability 9.0 (Hopper); GPU {} has {}", machine.device.index,
              machine.gpu.name.empty() ? to_string(has) : fmt::format("{} ({})", to_string(has), machine.gpu.name))};
}

}  // namespace sluice::device

namespace sluice {

Result<Machine> Machine::detect_cuda(int index) { return device::judge(device::find(), index); }

Result<std::vector<Machine>> cuda_machines() {
  const device::Findings findings = device::find();
  std::vector<Machine> machines;
  // The first one's refusal is the reason why there are none.
  for (int i = 0; i == 0 || i < static_cast<int>(findings.gpus.size()); ++i) {
    Result<Machine> machine = device::judge(findings, i);
    if (!machine) return machine.status();
    machines.push_back(std::move(*machine));
  }
  return machines;
}

}  // namespace sluice
