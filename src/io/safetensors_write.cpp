// Writing: the header is known before the data, so tensors stream through a small buffer into a temporary file.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include <nlohmann/json.hpp>

#include "io/safetensors.h"

namespace sluice::io {
namespace {

constexpr std::size_t kDataAlignment = 64;  // a cache line, so that views into the mapping load as owned memory does

// The temporary file: unlinked unless it was committed by a rename.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target) : target_(target.string()) {
    // The name does not grow with the target's, which may be as long as names can be. What a killed run left behind
    // (in a container every run may have the same process id) is stepped over, not an error.
    constexpr int kMaxTries = 1000;
    for (int i = 0; i < kMaxTries; ++i) {
      path_ = target.parent_path() / fmt::format(".sluice-{}-{}.tmp", ::getpid(), i);
      fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
      open_error_ = fd_ < 0 ? errno : 0;
      if (open_error_ != EEXIST) break;
    }
  }
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (created() && !committed_) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  bool created() const { return open_error_ == 0; }
  Status opened() const { return created() ? Status::ok() : failed("cannot create the file", open_error_); }
  Status write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failed("write failed", errno);
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return Status::ok();
  }
  Status commit() {
    const int fd = std::exchange(fd_, -1);
    if (::close(fd) != 0) return failed("close failed", errno);
    if (::rename(path_.c_str(), target_.c_str()) != 0) return failed("rename failed", errno);
    committed_ = true;
    return Status::ok();
  }

 private:
  Status failed(std::string_view what, int code) const {
    return {StatusCode::kIoError, fmt::format("{}: {}: {}", target_, what, std::strerror(code))};
  }
  std::string target_;
  std::filesystem::path path_;
  int fd_ = -1;
  int open_error_ = 0;
  bool committed_ = false;
};

}  // namespace

Status write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  const auto invalid = [&](std::string text) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: {}", path.string(), text));
  };
  std::vector<std::int64_t> bytes(tensors.size());
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorToWrite& t = tensors[i];
    if (t.name == "__metadata__") return invalid("the tensor name '__metadata__' is reserved by the format");
    auto size = checked_num_bytes(t.shape, t.dtype);
    if (!size) return invalid(fmt::format("tensor '{}': {}", t.name, size.status().message()));
    if (*size > 0 && t.data == nullptr && !t.produce)
      return invalid(fmt::format("tensor '{}' has neither data nor a producer", t.name));
    bytes[i] = *size;
    names.push_back(t.name);
  }
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end()) {
    return invalid(fmt::format("tensor '{}' is given twice", *twice));
  }
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_bytes(tensors[a].dtype) > size_bytes(tensors[b].dtype);
  });

  std::string header = "{";
  const auto quoted = [](const std::string& text) { return nlohmann::json(text).dump(); };
  try {
    if (!metadata.empty()) {
      header += "\"__metadata__\":{";
      for (const auto& [key, value] : metadata)
        header += fmt::format("{}{}:{}", header.back() == '{' ? "" : ",", quoted(key), quoted(value));
      header += '}';
    }
    std::int64_t offset = 0;
    for (std::size_t i : order) {
      const TensorToWrite& t = tensors[i];
      if (header.size() > 1) header += ',';
      header += fmt::format(R"({}:{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", quoted(t.name),
                            dtype_name(t.dtype), shape_text(t.shape), offset, offset + bytes[i]);
      offset += bytes[i];
    }
  } catch (const std::exception& e) {  // a name or value that is not UTF-8
    return invalid(e.what());
  }
  header += '}';
  header.append((kDataAlignment - (8 + header.size()) % kDataAlignment) % kDataAlignment, ' ');

  TemporaryFile file(path);
  SLUICE_TRY(file.opened());
  std::array<std::byte, 8> length{};
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(header.size() >> (8 * i) & 0xFF);
  SLUICE_TRY(file.write(length));
  SLUICE_TRY(file.write(std::as_bytes(std::span(header))));
  for (std::size_t i : order) {
    const TensorToWrite& t = tensors[i];
    if (t.data != nullptr) {
      SLUICE_TRY(file.write({static_cast<const std::byte*>(t.data), static_cast<std::size_t>(bytes[i])}));
      continue;
    }
    if (!t.produce) continue;  // empty tensor
    std::int64_t written = 0;
    const auto sink = [&](std::span<const std::byte> piece) -> Status {
      written += static_cast<std::int64_t>(piece.size());
      if (written > bytes[i])
        return invalid(fmt::format("tensor '{}' produced more than its {} bytes", t.name, bytes[i]));
      return file.write(piece);
    };
    SLUICE_TRY(t.produce(sink));
    if (written != bytes[i])
      return invalid(fmt::format("tensor '{}' produced {} of its {} bytes", t.name, written, bytes[i]));
  }
  return file.commit();
}

}  // namespace sluice::io
