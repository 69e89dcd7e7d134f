// Writing: the header is known before the data, so every tensor has its place in a temporary file from the start.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "io/temporary_file.h"

namespace sluice::io {
namespace {

constexpr std::size_t kDataAlignment = 64;  // a cache line, so that views into the mapping load as owned memory does

}  // namespace

struct SafetensorsOutput::State {
  explicit State(const std::filesystem::path& path) : where(path.string()), file(path) {}
  std::string where;
  TemporaryFile file;
  std::vector<TensorSlot> tensors;
  std::vector<std::int64_t> begin, bytes, written;  // of each tensor, `begin` from the start of the file

  Status invalid(std::string text) const { return {StatusCode::kInvalidArgument, fmt::format("{}: {}", where, text)}; }
};

SafetensorsOutput::SafetensorsOutput(std::unique_ptr<State> state) : state_(std::move(state)) {}
SafetensorsOutput::SafetensorsOutput(SafetensorsOutput&&) noexcept = default;
SafetensorsOutput& SafetensorsOutput::operator=(SafetensorsOutput&&) noexcept = default;
SafetensorsOutput::~SafetensorsOutput() = default;

Result<SafetensorsOutput> SafetensorsOutput::create(const std::filesystem::path& path, std::vector<TensorSlot> tensors,
                                                    const std::map<std::string, std::string>& metadata) {
  const auto invalid = [&](std::string text) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: {}", path.string(), text));
  };
  const std::size_t count = tensors.size();
  std::vector<std::int64_t> bytes(count), begin(count);
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < count; ++i) {
    const TensorSlot& t = tensors[i];
    if (t.name == "__metadata__") return invalid("the tensor name '__metadata__' is reserved by the format");
    auto size = checked_num_bytes(t.shape, t.dtype);
    if (!size) return invalid(fmt::format("tensor '{}': {}", t.name, size.status().message()));
    bytes[i] = *size;
    names.push_back(t.name);
  }
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end()) {
    return invalid(fmt::format("tensor '{}' is given twice", *twice));
  }
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return size_bytes(tensors[a].dtype) > size_bytes(tensors[b].dtype);
  });

  std::string header = "{";
  const auto quoted = [](const std::string& text) { return nlohmann::json(text).dump(); };
  std::int64_t offset = 0;
  try {
    if (!metadata.empty()) {
      header += "\"__metadata__\":{";
      for (const auto& [key, value] : metadata)
        header += fmt::format("{}{}:{}", header.back() == '{' ? "" : ",", quoted(key), quoted(value));
      header += '}';
    }
    for (std::size_t i : order) {
      const TensorSlot& t = tensors[i];
      if (header.size() > 1) header += ',';
      header += fmt::format(R"({}:{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", quoted(t.name),
                            dtype_name(t.dtype), shape_text(t.shape), offset, offset + bytes[i]);
      begin[i] = offset;
      offset += bytes[i];
    }
  } catch (const std::exception& e) {  // a name or value that is not UTF-8
    return invalid(e.what());
  }
  header += '}';
  header.append((kDataAlignment - (8 + header.size()) % kDataAlignment) % kDataAlignment, ' ');
  const auto data_begin = static_cast<std::int64_t>(8 + header.size());
  for (std::int64_t& b : begin) b += data_begin;

  auto state = std::make_unique<State>(path);
  SLUICE_TRY(state->file.opened());
  SLUICE_TRY(state->file.reserve(data_begin + offset));
  std::array<std::byte, 8> length{};
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(header.size() >> (8 * i) & 0xFF);
  SLUICE_TRY(state->file.write(0, length));
  SLUICE_TRY(state->file.write(8, std::as_bytes(std::span(header))));
  state->tensors = std::move(tensors);
  state->bytes = std::move(bytes);
  state->begin = std::move(begin);
  state->written.assign(count, 0);
  return SafetensorsOutput(std::move(state));
}

Status SafetensorsOutput::write(std::size_t tensor, std::int64_t at_bytes, std::span<const std::byte> bytes) {
  State& s = *state_;
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (tensor >= s.tensors.size() || at_bytes < 0 || size > s.bytes[tensor] - at_bytes) {
    return {StatusCode::kInternal, fmt::format("{}: bytes [{},{}) of tensor {} are outside of it", s.where, at_bytes,
                                               at_bytes + size, tensor)};
  }
  s.written[tensor] += size;
  return s.file.write(s.begin[tensor] + at_bytes, bytes);
}

Status SafetensorsOutput::commit(bool to_disk) {
  State& s = *state_;
  for (std::size_t i = 0; i < s.tensors.size(); ++i) {
    if (s.written[i] != s.bytes[i])
      return s.invalid(
          fmt::format("tensor '{}' produced {} of its {} bytes", s.tensors[i].name, s.written[i], s.bytes[i]));
  }
  if (to_disk) SLUICE_TRY(s.file.flush());
  return s.file.commit();
}

Status write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  const auto invalid = [&](std::string text) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{}: {}", path.string(), text));
  };
  std::vector<TensorSlot> slots;
  std::vector<std::int64_t> bytes;
  for (const TensorToWrite& t : tensors) {
    const auto size = checked_num_bytes(t.shape, t.dtype);
    bytes.push_back(size ? *size : 0);  // a shape that is wrong is refused below
    if (bytes.back() > 0 && t.data == nullptr && !t.produce)
      return invalid(fmt::format("tensor '{}' has neither data nor a producer", t.name));
    slots.push_back({t.name, t.dtype, t.shape});
  }
  auto output = SafetensorsOutput::create(path, std::move(slots), metadata);
  if (!output) return output.status();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorToWrite& t = tensors[i];
    if (t.data != nullptr) {
      SLUICE_TRY(output->write(i, 0, {static_cast<const std::byte*>(t.data), static_cast<std::size_t>(bytes[i])}));
      continue;
    }
    if (!t.produce) continue;  // empty tensor
    std::int64_t written = 0;
    SLUICE_TRY(t.produce([&](std::span<const std::byte> piece) -> Status {
      const std::int64_t at = written;
      written += static_cast<std::int64_t>(piece.size());
      if (written > bytes[i])
        return invalid(fmt::format("tensor '{}' produced more than its {} bytes", t.name, bytes[i]));
      return output->write(i, at, piece);
    }));
  }
  return output->commit(false);
}

}  // namespace sluice::io
