// A file that appears under its name whole or not at all: it is written under a temporary name beside it and renamed.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "sluice/core.h"

namespace sluice::io {

// Unlinked at the end of its life unless it was committed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  Status opened() const;  // ask first
  // A full disk is found before the work is done, where the file system can say so.
  Status reserve(std::int64_t bytes) const;
  Status write(std::int64_t at, std::span<const std::byte> bytes) const;
  // The bytes reach the disk, and a later read comes from there.
  Status flush() const;
  Status commit();

 private:
  bool created() const { return open_error_ == 0; }
  Status failed(std::string_view what, int code) const;

  std::string target_;
  std::filesystem::path path_;
  int fd_ = -1;
  int open_error_ = 0;
  bool committed_ = false;
};

// The whole of a small file.
Status write_text(const std::filesystem::path& path, std::string_view text);

}  // namespace sluice::io
