// All tensors of a checkpoint under one roof: which file holds which, as the index says or, without one, as the files
// do.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "io/safetensors.h"

namespace sluice::io {

struct TensorRef {
  const TensorEntry* entry = nullptr;
  const SafetensorsFile* file = nullptr;

  explicit operator bool() const { return entry != nullptr; }
  const std::byte* data() const { return file->data(*entry); }
  std::int64_t num_bytes() const { return entry->end - entry->begin; }
};

class Catalog {
 public:
  // A folder with model.safetensors.index.json and its shards, with one model.safetensors, or with several files that
  // share no name; or one .safetensors file.
  static Result<Catalog> open(const std::filesystem::path& path);

  TensorRef find(std::string_view name) const;
  std::span<const TensorRef> with_prefix(std::string_view prefix) const;  // sorted by name
  std::span<const TensorRef> tensors() const { return tensors_; }         // sorted by name
  std::size_t num_tensors() const { return tensors_.size(); }
  std::span<const std::shared_ptr<const SafetensorsFile>> files() const { return files_; }  // those that are read

 private:
  Status add_all(std::shared_ptr<const SafetensorsFile> file);
  Status add_indexed(const std::filesystem::path& folder, const std::filesystem::path& index);
  Status sort();

  std::vector<std::shared_ptr<const SafetensorsFile>> files_;
  std::vector<TensorRef> tensors_;
};

}  // namespace sluice::io
