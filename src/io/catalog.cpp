#include "io/catalog.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include <nlohmann/json.hpp>

#include "io/text_file.h"

namespace sluice::io {
namespace {

namespace fs = std::filesystem;

Status bad(std::string text) { return {StatusCode::kBadData, std::move(text)}; }

// Reads {"metadata": {...}, "weight_map": {name: file}} without building a document: an index of a large model has
// a hundred thousand names.
class IndexHandler {
 public:
  using json = nlohmann::json;

  std::vector<std::pair<std::string, std::uint32_t>> names;  // tensor, shard
  std::vector<std::string> shards;
  bool has_weight_map = false;
  std::string error;

  bool start_object(std::size_t) {
    if (in_map()) return fail(fmt::format("weight_map['{}'] is an object, expected a file name", key_));
    if (depth_ == 1 && key_ == "weight_map") {
      if (has_weight_map) return fail("'weight_map' appears twice");
      has_weight_map = in_map_ = true;
    }
    return ++depth_, true;
  }
  bool end_object() {
    if (--depth_ == 1) in_map_ = false;
    return true;
  }
  bool key(std::string& text) {
    key_ = text;
    return true;
  }
  bool string(std::string& text) {
    if (!in_map()) return scalar("a string");
    const auto [it, is_new] = shard_ids_.emplace(text, static_cast<std::uint32_t>(shards.size()));
    if (is_new) shards.push_back(text);
    names.emplace_back(key_, it->second);
    return true;
  }
  bool start_array(std::size_t) {
    if (!scalar("an array")) return false;
    return ++depth_, true;
  }
  bool end_array() { return --depth_, true; }
  bool null() { return scalar("null"); }
  bool boolean(bool) { return scalar("a boolean"); }
  bool number_integer(json::number_integer_t) { return scalar("a number"); }
  bool number_unsigned(json::number_unsigned_t) { return scalar("a number"); }
  bool number_float(json::number_float_t, const std::string&) { return scalar("a number"); }
  bool binary(json::binary_t&) { return false; }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) {
    return fail(fmt::format("JSON error at byte {}: {}", position, e.what()));
  }

 private:
  bool in_map() const { return in_map_ && depth_ == 2; }
  bool scalar(std::string_view what) {
    if (in_map()) return fail(fmt::format("weight_map['{}'] is {}, expected a file name", key_, what));
    if (depth_ == 0) return fail(fmt::format("the index is {}, expected an object", what));
    if (depth_ == 1 && key_ == "weight_map") return fail(fmt::format("'weight_map' is {}, expected an object", what));
    return true;
  }
  bool fail(std::string text) {
    error = std::move(text);
    return false;
  }
  int depth_ = 0;
  bool in_map_ = false;
  std::string key_;
  std::map<std::string, std::uint32_t> shard_ids_;
};

// A shard is a file of the folder (or a folder in it); links may lead out, names may not.
bool stays_inside(const std::string& name) {
  const fs::path path(name);
  if (name.empty() || path.is_absolute() || name.find('\\') != std::string::npos ||
      name.find('\0') != std::string::npos)
    return false;
  return std::none_of(path.begin(), path.end(), [](const fs::path& part) { return part == ".."; });
}

std::string first_few(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < 4; ++i) text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > 4) text += fmt::format(" and {} more", names.size() - 4);
  return text;
}

}  // namespace

Status Catalog::add_all(std::shared_ptr<const SafetensorsFile> file) {
  for (const TensorEntry& entry : file->tensors()) tensors_.push_back({&entry, file.get()});
  files_.push_back(std::move(file));
  return Status::ok();
}

Status Catalog::add_indexed(const fs::path& folder, const fs::path& index) {
  const std::string where = index.string();
  IndexHandler handler;
  bool parsed = false;
  try {
    const Result<std::string> text = read_text(index, kMaxHeaderBytes);
    if (!text) return text.status();
    parsed = nlohmann::json::sax_parse(*text, &handler);
  } catch (const std::exception& e) {
    handler.error = e.what();
  }
  if (!parsed) return bad(fmt::format("{}: {}", where, handler.error));
  if (!handler.has_weight_map) return bad(fmt::format("{}: there is no 'weight_map'", where));

  std::sort(handler.names.begin(), handler.names.end());
  const auto same_name = [](const auto& a, const auto& b) { return a.first == b.first; };
  if (const auto twice = std::adjacent_find(handler.names.begin(), handler.names.end(), same_name);
      twice != handler.names.end()) {
    return bad(fmt::format("{}: the tensor '{}' appears twice", where, twice->first));
  }
  std::vector<std::string> missing;
  for (const std::string& shard : handler.shards) {
    if (!stays_inside(shard))
      return bad(fmt::format("{}: the file name '{}' leads out of the checkpoint's folder", where, shard));
    std::error_code ignored;
    if (!fs::exists(folder / shard, ignored)) missing.push_back(shard);
  }
  if (!missing.empty()) {
    return {StatusCode::kNotFound,
            fmt::format("{}: {} of its {} files {} not there: {}", where, missing.size(), handler.shards.size(),
                        missing.size() == 1 ? "is" : "are", first_few(missing))};
  }
  for (const std::string& shard : handler.shards) {
    auto file = SafetensorsFile::open(folder / shard);
    if (!file) return file.status();
    files_.push_back(std::move(*file));
  }
  tensors_.reserve(handler.names.size());
  for (const auto& [name, shard] : handler.names) {
    const SafetensorsFile* file = files_[shard].get();
    const TensorEntry* entry = file->find(name);
    if (entry == nullptr) {
      missing.push_back(fmt::format("{} (of {})", name, handler.shards[shard]));
    } else {
      tensors_.push_back({entry, file});
    }
  }
  if (!missing.empty()) {
    return bad(fmt::format("{}: {} tensor(s) are not in the file the index names: {}", where, missing.size(),
                           first_few(missing)));
  }
  return Status::ok();
}

Status Catalog::sort() {
  std::sort(tensors_.begin(), tensors_.end(),
            [](const TensorRef& a, const TensorRef& b) { return a.entry->name < b.entry->name; });
  for (std::size_t i = 1; i < tensors_.size(); ++i) {
    const TensorRef &a = tensors_[i - 1], &b = tensors_[i];
    if (a.entry->name != b.entry->name) continue;
    return bad(fmt::format("tensor '{}' is in {} and in {}, and no index says which counts", a.entry->name,
                           a.file->path().string(), b.file->path().string()));
  }
  return Status::ok();
}

Result<Catalog> Catalog::open(const fs::path& path) {
  Catalog catalog;
  std::error_code ignored;
  if (!fs::exists(path, ignored))
    return Status(StatusCode::kNotFound, fmt::format("{}: there is no such file or folder", path.string()));
  std::vector<fs::path> files;
  if (!fs::is_directory(path, ignored)) {
    files = {path};
  } else if (const fs::path index = path / "model.safetensors.index.json"; fs::exists(index, ignored)) {
    SLUICE_TRY(catalog.add_indexed(path, index));
  } else if (const fs::path single = path / "model.safetensors"; fs::exists(single, ignored)) {
    files = {single};
  } else {
    for (const auto& entry : fs::directory_iterator(path, ignored)) {
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    if (files.empty())
      return Status(StatusCode::kNotFound,
                    fmt::format("{}: there is no .safetensors file in the folder", path.string()));
  }
  for (const fs::path& file : files) {
    auto opened = SafetensorsFile::open(file);
    if (!opened) return opened.status();
    SLUICE_TRY(catalog.add_all(std::move(*opened)));
  }
  SLUICE_TRY(catalog.sort());
  return catalog;
}

TensorRef Catalog::find(std::string_view name) const {
  const auto it =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const TensorRef& ref, std::string_view n) { return std::string_view(ref.entry->name) < n; });
  return it != tensors_.end() && it->entry->name == name ? *it : TensorRef{};
}

std::span<const TensorRef> Catalog::with_prefix(std::string_view prefix) const {
  const auto begin =
      std::lower_bound(tensors_.begin(), tensors_.end(), prefix,
                       [](const TensorRef& ref, std::string_view p) { return std::string_view(ref.entry->name) < p; });
  auto end = begin;
  while (end != tensors_.end() && end->entry->name.starts_with(prefix)) ++end;
  return {begin, end};
}

}  // namespace sluice::io
