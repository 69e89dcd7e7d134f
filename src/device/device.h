// What the library, the command and the tests want of a GPU without naming CUDA: finding one, memory on it, copies, and
// whose memory an address is. A build without CUDA has the same functions (no_cuda.cpp), which refuse.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sluice/core.h"

namespace sluice::device {

// ---------------------------------------------------------------------------------------------------------
// Finding one
// ---------------------------------------------------------------------------------------------------------

// What there is, before anybody judges it.
struct Findings {
  bool has_cuda = false;  // the library was built with it
  Version runtime;        // CUDA it was built with
  Version driver;         // newest CUDA the driver serves; 0.0: no driver
  std::string error;      // why the driver cannot be asked further; "" when it can
  std::vector<Gpu> gpus;
};
Findings find();
// GPU `index` of these findings, or the refusal. Pure: tests hand in machines they do not have.
Result<Machine> judge(const Findings& findings, int index);

// Compiled kernels run on the generation they were compiled for and on later minor versions of it; those that use what
// Hopper alone has (wgmma, TMA) run on 9.0 and nowhere else. Ok, or what the machine has and what is needed.
Status runs_plain_kernels(const Machine& machine);
Status runs_hopper_kernels(const Machine& machine);

// ---------------------------------------------------------------------------------------------------------
// Memory
// ---------------------------------------------------------------------------------------------------------

enum class MemoryKind : std::uint8_t { kHost, kPinned, kDevice, kManaged };
struct Memory {
  MemoryKind kind = MemoryKind::kHost;
  int device = 0;  // of kDevice
};
// Whose memory an address is. Neither synchronises nor disturbs a stream that is being captured.
Result<Memory> memory_of(const void* address);

// Whether a GPU's driver that is in use already knows the address as GPU memory. Starts nothing: a process that uses no GPU
// pays no context for it.
bool is_gpu_address(const void* address);

// Bytes on a device, freed there with the object. Move-only.
class Buffer {
 public:
  Buffer() = default;
  // `what` is named when there is not enough memory.
  static Result<Buffer> allocate(Device device, std::int64_t bytes, std::string_view what);
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();
  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, static_cast<std::size_t>(bytes_)}; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  Device device_{};
};

// Each returns when it is done.
Status copy_to_device(Device device, void* to, const void* from, std::int64_t bytes);
Status copy_to_host(Device device, void* to, const void* from, std::int64_t bytes);
Status fill_bytes(Device device, void* to, int byte, std::int64_t bytes);
Status synchronise(Device device);

// Copies through two pinned buffers in turn, so that reading the source (a mapped file) overlaps the transfer.
class Uploader {
 public:
  static Result<Uploader> create(Device device);
  Uploader(Uploader&& other) noexcept;
  ~Uploader();
  // `step` hears the bytes of each chunk once they are on their way; false ends the copy with kIoError.
  Status copy(std::string_view what, std::byte* to, const std::byte* from, std::int64_t bytes,
              const std::function<bool(std::int64_t)>& step);
  Status finish();

 private:
  struct State;
  explicit Uploader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Makes a device current for its lifetime and puts the caller's back; nothing for the CPU.
class Current {
 public:
  explicit Current(Device device);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  Status status() const { return status_; }

 private:
  int previous_ = -1;
  Status status_;
};

// ---------------------------------------------------------------------------------------------------------
// Timing (bench)
// ---------------------------------------------------------------------------------------------------------

// Records what `body` launches on a stream of its own and replays it. No launch cost of the host is in the times.
class Graph {
 public:
  static Result<Graph> capture(Device device, const std::function<Status(void* stream)>& body);
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;
  ~Graph();
  // Replays once and waits; the seconds between an event before and one after.
  Result<double> replay();

 private:
  struct State;
  explicit Graph(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace sluice::device
