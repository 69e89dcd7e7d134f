// A folder that appears under its name whole or not at all: it is filled under a temporary name beside it and renamed
// when it is complete.
#pragma once

#include <filesystem>
#include <vector>

#include "sluice/core.h"

namespace sluice::io {

class OutputFolder {
 public:
  // `target` must not exist or be an empty folder. With `replace` it may also be a folder that holds a config.json:
  // commit puts the new one into its place in one step and removes the old one then. Makes missing parents.
  static Result<OutputFolder> create(const std::filesystem::path& target, bool replace);
  OutputFolder(OutputFolder&& other) noexcept;
  OutputFolder& operator=(OutputFolder&&) = delete;
  ~OutputFolder();  // what was not committed is removed, and the parents that were made for it

  const std::filesystem::path& path() const { return temporary_; }  // where to write
  const std::filesystem::path& target() const { return target_; }   // absolute, links resolved
  Status commit();

 private:
  OutputFolder() = default;
  std::filesystem::path temporary_, target_;
  std::vector<std::filesystem::path> new_parents_;  // innermost first
  bool replace_ = false;
};

}  // namespace sluice::io
