// The safetensors format: 8 bytes of header length (little endian), a JSON header, then the data, which the
// tensors cover without gap or overlap. Files are mapped, never copied; a view's pages are read when touched.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "sluice/core.h"

namespace sluice::io {

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;  // any rank; [] is one element
  std::int64_t begin = 0;           // bytes from the start of the data section
  std::int64_t end = 0;
};

// One mapped file. Immutable and shareable.
class SafetensorsFile : public std::enable_shared_from_this<SafetensorsFile> {
 public:
  // Validates the whole header: length, JSON, duplicate keys, dtypes, shapes times size = range, full coverage.
  static Result<std::shared_ptr<const SafetensorsFile>> open(const std::filesystem::path& path);
  ~SafetensorsFile();

  const std::filesystem::path& path() const { return path_; }
  const std::vector<TensorEntry>& tensors() const { return tensors_; }  // sorted by name
  const TensorEntry* find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::byte* data(const TensorEntry& entry) const;  // may be unaligned for the dtype
  // Tells the kernel that the entry's pages are not needed again (they can be read anew).
  void drop(const TensorEntry& entry) const { drop(entry, 0, entry.end - entry.begin); }
  void drop(const TensorEntry& entry, std::int64_t begin_bytes, std::int64_t end_bytes) const;  // part of it

 private:
  SafetensorsFile() = default;
  std::filesystem::path path_;
  std::vector<TensorEntry> tensors_;
  std::map<std::string, std::string> metadata_;
  const std::byte* map_ = nullptr;
  std::size_t map_bytes_ = 0;
  std::size_t data_offset_ = 0;
};

// The largest header a file may declare; real files reach 132 MB (1.3 million tensors).
inline constexpr std::uint64_t kMaxHeaderBytes = std::uint64_t{1} << 30;

struct TensorToWrite {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  // Writes the tensor's bytes piece by piece into `sink`, so that no tensor need be whole in memory; or null, with
  // data.
  std::function<Status(const std::function<Status(std::span<const std::byte>)>& sink)> produce;
  const void* data = nullptr;
};

struct TensorSlot {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
};

// A file whose tensors are known before their bytes, which may then come in any order. It is written beside `path`
// under a temporary name and renamed by commit: a failure leaves no partial file. Tensors of wider elements come first
// and the data starts at a multiple of 64 bytes, so every tensor is aligned for its dtype.
class SafetensorsOutput {
 public:
  static Result<SafetensorsOutput> create(const std::filesystem::path& path, std::vector<TensorSlot> tensors,
                                          const std::map<std::string, std::string>& metadata = {});
  SafetensorsOutput(SafetensorsOutput&&) noexcept;
  SafetensorsOutput& operator=(SafetensorsOutput&&) noexcept;
  ~SafetensorsOutput();

  // Bytes of tensor number `tensor`, each exactly once; by one thread at a time.
  Status write(std::size_t tensor, std::int64_t at_bytes, std::span<const std::byte> bytes);
  // Every byte must have been written. `to_disk`: not before they are on the disk.
  Status commit(bool to_disk);

 private:
  struct State;
  explicit SafetensorsOutput(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// The same in one call, tensor by tensor.
Status write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors,
                         const std::map<std::string, std::string>& metadata = {});

// Elements times element size, or what is wrong with the shape.
Result<std::int64_t> checked_num_bytes(std::span<const std::int64_t> shape, DType dtype);
std::string shape_text(std::span<const std::int64_t> shape);  // "[256,7168]"

// Decodes little-endian scalars by shifts, on any host.
float decode_f32(const std::byte* bytes);
float decode_bf16(const std::byte* bytes);

std::string_view dtype_name(DType dtype);  // "BF16", "F8_E4M3", ...
std::optional<DType> parse_dtype(std::string_view name);

}  // namespace sluice::io
