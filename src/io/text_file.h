// Whole text files from outside: config.json, an index. Judged before they are read, because a checkpoint's folder may
// hold anything under these names.
#pragma once

#include <filesystem>
#include <string>

#include "sluice/core.h"

namespace sluice::io {

// An open file descriptor of a regular file, closed at the end of its life.
class RegularFile {
 public:
  // Never waits: opening a pipe nobody writes to would otherwise block for ever.
  static Result<RegularFile> open(const std::filesystem::path& path);
  RegularFile(RegularFile&& other) noexcept : fd_(other.fd_), size_bytes_(other.size_bytes_) { other.fd_ = -1; }
  RegularFile& operator=(RegularFile&&) = delete;
  ~RegularFile();

  int fd() const { return fd_; }
  std::uint64_t size_bytes() const { return size_bytes_; }

 private:
  RegularFile(int fd, std::uint64_t size_bytes) : fd_(fd), size_bytes_(size_bytes) {}
  int fd_;
  std::uint64_t size_bytes_;
};

// The bytes of a file of at most `max_bytes`. A NUL is refused: JSON parsers take it for the end and would not see what
// follows.
Result<std::string> read_text(const std::filesystem::path& path, std::uint64_t max_bytes);

}  // namespace sluice::io
