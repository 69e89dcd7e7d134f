// Device copies of host tensors, with guard bytes round each, and the comparison of what came back.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "sluice/core.h"

namespace sluice::test {

// Bytes from the first to the last element, gaps between rows included.
inline std::size_t span_bytes(const TensorView& view) {
  if (view.num_elements() == 0) return 0;
  std::int64_t last = 0;
  for (int i = 0; i < view.rank; ++i)
    last += (view.shape[static_cast<std::size_t>(i)] - 1) * view.stride[static_cast<std::size_t>(i)];
  return static_cast<std::size_t>((last + 1) * size_bytes(view.dtype));
}

class DeviceMirror {
 public:
  DeviceMirror() = default;
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;
  ~DeviceMirror() {
    for (const Copy& c : copies_) cudaFree(c.base);
  }

  // Replaces the view's memory by a device copy at the same distance from a 256-byte boundary.
  void add(TensorView& view) {
    if (!view.is_present()) return;
    Copy c;
    c.host = view.data;
    c.bytes = span_bytes(view);
    c.lead = kGuardBytes + reinterpret_cast<std::uintptr_t>(view.data) % 256;
    std::vector<std::byte> image(c.lead + c.bytes + kGuardBytes, kGuard);
    if (c.bytes > 0) std::memcpy(image.data() + c.lead, c.host, c.bytes);
    ASSERT_EQ(cudaMalloc(&c.base, image.size()), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(c.base, image.data(), image.size(), cudaMemcpyHostToDevice), cudaSuccess);
    // From pageable memory the copy may still be under way, and a stream of the test's own would not wait for it.
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    view.data = static_cast<std::byte*>(c.base) + c.lead;
    view.device = {DeviceKind::kCuda, 0};
    copies_.push_back(c);
  }

  // What the device has now, into the host originals, gaps between rows included.
  void copy_back() const {
    for (const Copy& c : copies_) {
      ASSERT_EQ(cudaMemcpy(c.host, static_cast<std::byte*>(c.base) + c.lead, c.bytes, cudaMemcpyDeviceToHost),
                cudaSuccess);
    }
  }

  // Every mirrored tensor now equals its host original, byte for byte, and no guard changed.
  testing::AssertionResult equals_host() const {
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      const Copy& c = copies_[i];
      std::vector<std::byte> image(c.lead + c.bytes + kGuardBytes);
      const cudaError_t error = cudaMemcpy(image.data(), c.base, image.size(), cudaMemcpyDeviceToHost);
      if (error != cudaSuccess)
        return testing::AssertionFailure() << "tensor " << i << ": " << cudaGetErrorString(error);
      for (std::size_t b = 0; b < image.size(); ++b) {
        const bool inside = b >= c.lead && b < c.lead + c.bytes;
        const std::byte want = inside ? static_cast<const std::byte*>(c.host)[b - c.lead] : kGuard;
        if (image[b] != want) {
          return testing::AssertionFailure()
                 << "tensor " << i << ", byte " << static_cast<std::int64_t>(b) - static_cast<std::int64_t>(c.lead)
                 << (inside ? "" : " (a guard)") << ": device " << std::to_integer<int>(image[b]) << ", host "
                 << std::to_integer<int>(want);
        }
      }
    }
    return testing::AssertionSuccess();
  }

 private:
  static constexpr std::size_t kGuardBytes = 512;
  static constexpr std::byte kGuard{0xC3};
  struct Copy {
    void* base = nullptr;
    void* host = nullptr;
    std::size_t lead = 0;
    std::size_t bytes = 0;
  };
  std::vector<Copy> copies_;
};

// Why GPU tests cannot run here; empty when they can.
inline std::string no_gpu_reason() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count == 0 ? "no CUDA device" : "";
}

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = no_gpu_reason(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

inline const Machine& first_gpu() {
  static const Machine machine = Machine::detect_cuda(0).value();
  return machine;
}

// Runs a CUDA row on guarded copies of host tensors, with exactly the scratch it asks for, filled with what a reused
// workspace might hold; the host tensors then have the result. `views` lists the tensors of Args.
template <class Args, class Views>
Status run_mirrored(const Impl<Args>& impl, const Args& args, const Views& views) {
  SLUICE_TRY(impl.can_run(args, first_gpu()));
  DeviceMirror mirror;
  Args device = args;
  for (TensorView* view : views(device)) mirror.add(*view);
  const std::int64_t bytes = impl.scratch_bytes == nullptr ? 0 : impl.scratch_bytes(args, first_gpu());
  std::vector<std::byte> junk(static_cast<std::size_t>(bytes), std::byte{0xA5});
  TensorView scratch = TensorView::dense(junk.data(), DType::kU8, {bytes});
  DeviceMirror scratch_mirror;
  if (bytes > 0) scratch_mirror.add(scratch);
  SLUICE_TRY(impl.run(device, {nullptr, {static_cast<std::byte*>(scratch.data), static_cast<std::size_t>(bytes)}, 1}));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  mirror.copy_back();
  if (bytes > 0) scratch_mirror.copy_back();
  EXPECT_TRUE(mirror.equals_host());  // what is left to differ are the guards
  if (bytes > 0) {
    EXPECT_TRUE(scratch_mirror.equals_host());
  }
  return Status::ok();
}

}  // namespace sluice::test
