#include "layer/place.h"

#include <fmt/format.h>

#include "device/device.h"

namespace sluice {
namespace {

std::string describe(Device device) {
  return device.kind == DeviceKind::kCpu ? "the CPU" : fmt::format("GPU {}", device.index);
}

Status invalid(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }

}  // namespace

Status check_place(std::string_view where, std::string_view name, const void* address, Device device) {
  if (device.kind != DeviceKind::kCuda) return Status::ok();
  const Result<device::Memory> memory = device::memory_of(address);
  if (!memory) return memory.status().with_context(name).with_context(where);
  switch (memory->kind) {
    case device::MemoryKind::kManaged: return Status::ok();
    case device::MemoryKind::kDevice:
      if (memory->device == device.index) return Status::ok();
      return invalid(fmt::format("{}: {} is said to be on {}, but its address is memory of GPU {}", where, name,
                                 describe(device), memory->device));
    case device::MemoryKind::kHost:
    case device::MemoryKind::kPinned: break;
  }
  return invalid(fmt::format("{}: {} is said to be on {}, but its address is {}host memory", where, name,
                             describe(device), memory->kind == device::MemoryKind::kPinned ? "pinned " : ""));
}

Status check_place(std::string_view where, std::string_view name, const TensorView& view, Device device) {
  if (!view.is_present() || view.num_elements() == 0) return Status::ok();
  if (view.device != device) {
    return invalid(fmt::format("{}: {} = {} is on {}, the layer is on {}", where, name, view.to_string(),
                               describe(view.device), describe(device)));
  }
  return check_place(where, name, view.data, device);
}

}  // namespace sluice
