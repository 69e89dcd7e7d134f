#include "input.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "io/npy.h"
#include "io/safetensors.h"

namespace sluice::cli {

namespace {

namespace fs = std::filesystem;

Status bad(std::string text) { return Status(StatusCode::kBadData, std::move(text)); }

class SafetensorsInput : public TokenInput {
 public:
  static Result<std::unique_ptr<TokenInput>> open(const std::string& path, const std::string& tensor) {
    auto file = io::SafetensorsFile::open(path);
    if (!file) return file.status();
    const std::vector<io::TensorEntry>& tensors = (*file)->tensors();
    const io::TensorEntry* entry = tensor.empty() && tensors.size() == 1 ? tensors.data() : (*file)->find(tensor);
    if (entry == nullptr) {
      constexpr std::size_t kListed = 20;
      std::vector<std::string> names;
      for (std::size_t i = 0; i < std::min(tensors.size(), kListed); ++i) {
        names.push_back(
            fmt::format("{} {}[{}]", tensors[i].name, to_string(tensors[i].dtype), fmt::join(tensors[i].shape, ",")));
      }
      if (tensors.size() > kListed) names.push_back(fmt::format("... {} in all", tensors.size()));
      return Status(StatusCode::kNotFound,
                    fmt::format("{}: {}; it holds {}", path,
                                tensor.empty() ? fmt::format("{} tensors, name one as {}:TENSOR", tensors.size(), path)
                                               : fmt::format("no tensor '{}'", tensor),
                                names.empty() ? std::string("nothing") : fmt::format("{}", fmt::join(names, ", "))));
    }
    auto input = std::make_unique<SafetensorsInput>();
    input->path_ = path;
    input->name_ = fmt::format("{}:{}", path, entry->name);
    input->file_ = *file;
    input->entry_ = entry;
    SLUICE_TRY(input->set(entry->dtype, entry->shape));
    return std::unique_ptr<TokenInput>(std::move(input));
  }

  Status read(std::int64_t begin, std::int64_t count, std::byte* rows) override {
    const std::int64_t row_bytes = hidden_ * size_bytes(dtype_);
    if (count > 0 && row_bytes > 0) {
      std::memcpy(rows, file_->data(*entry_) + begin * row_bytes, static_cast<std::size_t>(count * row_bytes));
    }
    file_->drop(*entry_);
    return {};
  }

 private:
  std::shared_ptr<const io::SafetensorsFile> file_;
  const io::TensorEntry* entry_ = nullptr;
};

class NpyInput : public TokenInput {
 public:
  static Result<std::unique_ptr<TokenInput>> open(const std::string& path, const std::string& tensor) {
    if (!tensor.empty())
      return bad(fmt::format("{}: a .npy file has no tensor names, but '{}' was given", path, tensor));
    Result<io::NpyHeader> header = io::read_npy_header(path);
    if (!header) return header.status();
    auto input = std::make_unique<NpyInput>();
    input->path_ = input->name_ = path;
    SLUICE_TRY(input->set(header->dtype, header->shape));
    input->data_offset_ = header->data_offset;
    input->stream_.open(path, std::ios::binary);
    return std::unique_ptr<TokenInput>(std::move(input));
  }

  Status read(std::int64_t begin, std::int64_t count, std::byte* rows) override {
    const std::int64_t row_bytes = hidden_ * size_bytes(dtype_);
    stream_.seekg(data_offset_ + begin * row_bytes);
    stream_.read(reinterpret_cast<char*>(rows), count * row_bytes);
    if (!stream_)
      return Status(StatusCode::kIoError,
                    fmt::format("{}: reading tokens {} to {} failed", path_, begin, begin + count));
    return {};
  }

 private:
  std::ifstream stream_;
  std::int64_t data_offset_ = 0;
};

}  // namespace

Status TokenInput::set(DType dtype, const std::vector<std::int64_t>& shape) {
  if (dtype != DType::kBF16 && dtype != DType::kF32) {
    return bad(fmt::format("{} is {}, expected bf16 or f32", name_, to_string(dtype)));
  }
  if (shape.size() != 2) return bad(fmt::format("{} has shape [{}], expected [T,H]", name_, fmt::join(shape, ",")));
  dtype_ = dtype;
  num_tokens_ = shape[0];
  hidden_ = shape[1];
  return {};
}

Result<std::unique_ptr<TokenInput>> TokenInput::open(const std::string& spec, std::int64_t hidden) {
  std::error_code ec;
  std::string path = spec, tensor;
  // A colon may be part of a file's name: what exists as it stands is taken as it stands.
  if (const std::size_t colon = spec.rfind(':'); colon != std::string::npos && !fs::exists(spec, ec)) {
    path = spec.substr(0, colon);
    tensor = spec.substr(colon + 1);
  }
  if (!fs::exists(path, ec)) return Status(StatusCode::kNotFound, fmt::format("{}: no such file", path));
  if (!fs::is_regular_file(path, ec)) return bad(fmt::format("{}: is no regular file", path));
  const std::string extension = fs::path(path).extension().string();
  if (extension != ".safetensors" && extension != ".npy") {
    return bad(fmt::format("{}: activations are read from .safetensors or .npy", path));
  }
  auto input = extension == ".npy" ? NpyInput::open(path, tensor) : SafetensorsInput::open(path, tensor);
  if (!input) return input.status();
  if (hidden >= 0 && (*input)->hidden() != hidden) {
    return bad(fmt::format("{} has width {}, the layer's hidden size is H = {}", (*input)->name(), (*input)->hidden(),
                           hidden));
  }
  return input;
}

}  // namespace sluice::cli
