// Reading: the header is judged completely before any tensor can be seen, because every later access trusts it.
#include "io/safetensors.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>

#include <nlohmann/json.hpp>

#include "io/text_file.h"

// Tensor bytes are used where they lie; only the decode helpers below would survive another byte order.
static_assert(std::endian::native == std::endian::little, "safetensors data is little endian; this host is not");

namespace sluice::io {

namespace {

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr DTypeName kDTypeNames[] = {
    {DType::kF32, "F32"},      {DType::kBF16, "BF16"},    {DType::kF16, "F16"},      {DType::kF64, "F64"},
    {DType::kE4M3, "F8_E4M3"}, {DType::kE5M2, "F8_E5M2"}, {DType::kE8M0, "F8_E8M0"}, {DType::kI8, "I8"},
    {DType::kU8, "U8"},        {DType::kI16, "I16"},      {DType::kU16, "U16"},      {DType::kI32, "I32"},
    {DType::kU32, "U32"},      {DType::kI64, "I64"},      {DType::kU64, "U64"},      {DType::kBool, "BOOL"},
};

// Types the format or its users know and Sluice has no element for; named so that the refusal says more than "unknown".
constexpr std::string_view kUnsupportedDTypes[] = {
    "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E3M4", "F8_E4M3B11FNUZ", "C64", "C128", "I4", "U4"};

}  // namespace

std::string_view dtype_name(DType dtype) {
  for (const DTypeName& row : kDTypeNames) {
    if (row.dtype == dtype) return row.name;
  }
  return "?";
}

std::optional<DType> parse_dtype(std::string_view name) {
  for (const DTypeName& row : kDTypeNames) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text(1, '[');
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ',';
    text += std::to_string(shape[i]);
  }
  text += ']';
  return text;
}

Result<std::int64_t> checked_num_bytes(std::span<const std::int64_t> shape, DType dtype) {
  std::int64_t bytes = size_bytes(dtype);
  bool empty = false;
  for (std::int64_t extent : shape) {
    if (extent < 0)
      return Status(StatusCode::kBadData, fmt::format("shape {} has a negative extent", shape_text(shape)));
    empty = empty || extent == 0;
  }
  if (empty) return std::int64_t{0};
  for (std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return Status(StatusCode::kBadData,
                    fmt::format("shape {} of {} does not fit 64 bits", shape_text(shape), dtype_name(dtype)));
    }
  }
  return bytes;
}

namespace {

// Builds the entries while the JSON is read: no document is kept, so 1.3 million tensors cost only their entries.
// Returning false stops the parser; `error` then says why.
class HeaderHandler {
 public:
  using json = nlohmann::json;
  using number_integer_t = json::number_integer_t;
  using number_unsigned_t = json::number_unsigned_t;
  using number_float_t = json::number_float_t;
  using string_t = json::string_t;
  using binary_t = json::binary_t;

  std::vector<TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
  std::string error;

  bool start_object(std::size_t) {
    if (where_ == Where::kStart) return where_ = Where::kTop, true;
    if (where_ == Where::kTopValue) {
      where_ = name_ == "__metadata__" ? Where::kMetadata : Where::kTensor;
      if (where_ == Where::kTensor) {
        current_ = {};
        current_.name = name_;
        seen_ = 0;
      } else if (metadata_seen_) {
        return fail("__metadata__ appears twice");
      } else {
        metadata_seen_ = true;
      }
      return true;
    }
    return unexpected("an object");
  }
  bool end_object() {
    if (where_ == Where::kTensor) {
      if (seen_ != 7) {
        return fail(fmt::format("tensor '{}' lacks {}", name_,
                                (seen_ & 1) == 0   ? "dtype"
                                : (seen_ & 2) == 0 ? "shape"
                                                   : "data_offsets"));
      }
      tensors.push_back(std::move(current_));
    }
    where_ = where_ == Where::kTop ? Where::kEnd : Where::kTop;
    return true;
  }
  bool key(string_t& text) {
    switch (where_) {
      case Where::kTop:
        name_ = text;
        where_ = Where::kTopValue;
        return true;
      case Where::kMetadata:
        metadata_key_ = text;
        where_ = Where::kMetadataValue;
        return true;
      case Where::kTensor: {
        const int bit = text == "dtype" ? 1 : text == "shape" ? 2 : text == "data_offsets" ? 4 : 0;
        if (bit == 0) return fail(fmt::format("tensor '{}' has the unknown key '{}'", name_, text));
        if ((seen_ & bit) != 0) return fail(fmt::format("tensor '{}' has the key '{}' twice", name_, text));
        seen_ |= bit;
        where_ = bit == 1 ? Where::kDType : bit == 2 ? Where::kShape : Where::kOffsets;
        return true;
      }
      default: return unexpected("a key");
    }
  }
  bool string(string_t& text) {
    if (where_ == Where::kMetadataValue) {
      where_ = Where::kMetadata;
      if (!metadata.emplace(metadata_key_, text).second)
        return fail(fmt::format("__metadata__ has the key '{}' twice", metadata_key_));
      return true;
    }
    if (where_ != Where::kDType) return unexpected("a string");
    where_ = Where::kTensor;
    if (const auto dtype = parse_dtype(text)) return current_.dtype = *dtype, true;
    const bool known =
        std::find(std::begin(kUnsupportedDTypes), std::end(kUnsupportedDTypes), text) != std::end(kUnsupportedDTypes);
    return fail(fmt::format("tensor '{}' has the {} dtype '{}'", name_, known ? "unsupported" : "unknown", text));
  }
  bool start_array(std::size_t) {
    if (where_ == Where::kShape) return where_ = Where::kShapeItems, true;
    if (where_ == Where::kOffsets) return num_offsets_ = 0, where_ = Where::kOffsetItems, true;
    return unexpected("an array");
  }
  bool end_array() {
    if (where_ == Where::kOffsetItems && num_offsets_ != 2) {
      return fail(fmt::format("tensor '{}' has {} data_offsets, expected 2", name_, num_offsets_));
    }
    where_ = Where::kTensor;
    return true;
  }
  bool number_unsigned(number_unsigned_t value) {
    if (where_ != Where::kShapeItems && where_ != Where::kOffsetItems) return unexpected("a number");
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max())) {
      return fail(fmt::format("tensor '{}' has the {} {}, above 2^63-1", name_, what(), value));
    }
    const auto number = static_cast<std::int64_t>(value);
    if (where_ == Where::kShapeItems) {
      current_.shape.push_back(number);
    } else if (num_offsets_++ == 0) {
      current_.begin = number;
    } else {
      current_.end = number;
    }
    return true;
  }
  bool number_integer(number_integer_t value) {
    if (where_ != Where::kShapeItems && where_ != Where::kOffsetItems) return unexpected("a number");
    return fail(fmt::format("tensor '{}' has the negative {} {}", name_, what(), value));
  }
  bool number_float(number_float_t, const string_t& text) {
    if (where_ != Where::kShapeItems && where_ != Where::kOffsetItems) return unexpected("a number");
    return fail(fmt::format("tensor '{}' has the {} {}, which is no 64-bit integer", name_, what(), text));
  }
  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a boolean"); }
  bool binary(binary_t&) { return unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) {
    // The library's text repeats the position in its own numbering; only its reason is kept.
    std::string reason = e.what();
    if (const auto at = reason.find(": ", reason.find("parse error")); at != std::string::npos)
      reason = reason.substr(at + 2);
    return fail(fmt::format("JSON error at byte {}: {}", position + 8, reason));
  }

 private:
  enum class Where : std::uint8_t {
    kStart,
    kTop,
    kTopValue,
    kTensor,
    kDType,
    kShape,
    kShapeItems,
    kOffsets,
    kOffsetItems,
    kMetadata,
    kMetadataValue,
    kEnd,
  };
  bool fail(std::string text) {
    error = std::move(text);
    return false;
  }
  std::string_view what() const { return where_ == Where::kShapeItems ? "extent" : "offset"; }
  bool unexpected(std::string_view what) {
    switch (where_) {
      case Where::kStart: return fail(fmt::format("the header is {}, expected an object", what));
      case Where::kTopValue: return fail(fmt::format("'{}' is {}, expected an object", name_, what));
      case Where::kMetadataValue:
        return fail(fmt::format("__metadata__['{}'] is {}, expected a string", metadata_key_, what));
      case Where::kDType: return fail(fmt::format("tensor '{}': dtype is {}, expected a string", name_, what));
      default: return fail(fmt::format("tensor '{}': {} where integers are expected", name_, what));
    }
  }

  Where where_ = Where::kStart;
  std::string name_, metadata_key_;
  TensorEntry current_;
  int seen_ = 0;  // bits of the three keys
  int num_offsets_ = 0;
  bool metadata_seen_ = false;
};

// Every tensor against its own range, then the ranges against each other and the data section.
Status check_ranges(std::vector<TensorEntry>& tensors, std::int64_t data_bytes) {
  const auto bad = [](std::string text) { return Status(StatusCode::kBadData, std::move(text)); };
  for (const TensorEntry& t : tensors) {
    auto bytes = checked_num_bytes(t.shape, t.dtype);
    if (!bytes) return bytes.status().with_context(fmt::format("tensor '{}'", t.name));
    if (t.begin > t.end) return bad(fmt::format("tensor '{}' begins at {} after its end {}", t.name, t.begin, t.end));
    if (t.end > data_bytes) {
      return bad(fmt::format("tensor '{}' ends at byte {} of the data, which has {}", t.name, t.end, data_bytes));
    }
    if (t.end - t.begin != *bytes) {
      return bad(fmt::format("tensor '{}' is {}{}, which takes {} bytes, but its offsets [{},{}] span {}", t.name,
                             dtype_name(t.dtype), shape_text(t.shape), *bytes, t.begin, t.end, t.end - t.begin));
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i - 1].name == tensors[i].name)
      return bad(fmt::format("tensor '{}' appears twice in the header", tensors[i].name));
  }
  std::vector<std::uint32_t> order(tensors.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  // Empty tensors sort before the one that begins where they lie.
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::pair(tensors[a].begin, tensors[a].end) < std::pair(tensors[b].begin, tensors[b].end);
  });
  std::int64_t covered = 0;
  const TensorEntry* last = nullptr;
  for (std::uint32_t i : order) {
    const TensorEntry& t = tensors[i];
    if (t.begin < covered) {
      return bad(fmt::format("tensors '{}' [{},{}] and '{}' [{},{}] overlap", last->name, last->begin, last->end,
                             t.name, t.begin, t.end));
    }
    if (t.begin > covered) {
      return bad(fmt::format("data bytes [{},{}] before tensor '{}' belong to no tensor", covered, t.begin, t.name));
    }
    covered = t.end;
    last = &t;
  }
  if (covered != data_bytes) {
    return bad(
        fmt::format("{} bytes after the last tensor belong to no tensor (the tensors end at {}, the data has {})",
                    data_bytes - covered, covered, data_bytes));
  }
  return Status::ok();
}

// The length field and the first byte after it, before anything is read. A file that fails here is most probably
// something else, and is named; one that passes is not, since any bytes may be a legal length.
Status judge_start(std::string_view start, std::uint64_t length, std::uint64_t file_bytes) {
  const bool fits = length <= kMaxHeaderBytes && length <= file_bytes - 8;
  if (fits && length > 0 && start[8] == '{') return Status::ok();
  const auto bad = [](std::string text) { return Status(StatusCode::kBadData, std::move(text)); };
  if (start.starts_with("version https://git-lfs")) {
    return bad(fmt::format("this is a Git LFS pointer of {} bytes, not the file itself; fetch it with 'git lfs pull'",
                           file_bytes));
  }
  if (start.starts_with("PK\x03\x04"))
    return bad("this is a zip archive (a PyTorch .bin or .pt file?), not safetensors");
  if (start.starts_with("\x80\x02")) return bad("this is a Python pickle, not safetensors");
  if (start.starts_with("<!DOCTYPE") || start.starts_with("<!doctype") || start.starts_with("<html")) {
    return bad("this is an HTML page (a failed download?), not safetensors");
  }
  if (!fits) {
    return bad(fmt::format(
        "header length {} is more than {}: the file has {} bytes after the length field, the limit is {} bytes", length,
        length > kMaxHeaderBytes ? "the limit" : "the file holds", file_bytes - 8, kMaxHeaderBytes));
  }
  return bad(fmt::format("the header of {} bytes does not begin with '{{'", length));
}

}  // namespace

Result<std::shared_ptr<const SafetensorsFile>> SafetensorsFile::open(const std::filesystem::path& path) {
  const std::string where = path.string();
  const Result<RegularFile> opened = RegularFile::open(path);
  if (!opened) return opened.status();
  const std::uint64_t file_bytes = opened->size_bytes();
  if (file_bytes < 8) {
    return Status(StatusCode::kBadData,
                  fmt::format("{}: the file has {} bytes, a safetensors file has at least 8", where, file_bytes));
  }
  std::shared_ptr<SafetensorsFile> file(new SafetensorsFile());
  file->path_ = path;
  void* map = ::mmap(nullptr, file_bytes, PROT_READ, MAP_PRIVATE, opened->fd(), 0);
  if (map == MAP_FAILED)
    return Status(StatusCode::kIoError,
                  fmt::format("{}: mmap of {} bytes: {}", where, file_bytes, std::strerror(errno)));
  file->map_ = static_cast<const std::byte*>(map);
  file->map_bytes_ = file_bytes;

  const char* text = static_cast<const char*>(map);
  std::uint64_t length = 0;
  for (int i = 0; i < 8; ++i) length |= static_cast<std::uint64_t>(static_cast<unsigned char>(text[i])) << (8 * i);
  SLUICE_TRY(judge_start({text, std::min<std::size_t>(file_bytes, 32)}, length, file_bytes).with_context(where));
  file->data_offset_ = 8 + length;
  // The JSON parser takes a NUL for the end of its input, and would not see what follows it.
  if (const void* nul = std::memchr(text + 8, 0, length); nul != nullptr) {
    return Status(StatusCode::kBadData,
                  fmt::format("{}: the header has a NUL at byte {}", where, static_cast<const char*>(nul) - text));
  }
  HeaderHandler handler;
  bool parsed = false;
  try {
    parsed = nlohmann::json::sax_parse(text + 8, text + 8 + length, &handler);
  } catch (const std::exception& e) {  // allocation failure, or a defect of the parser
    handler.error = e.what();
  }
  if (!parsed) return Status(StatusCode::kBadData, fmt::format("{}: {}", where, handler.error));
  // The header's pages are not needed again; in a file of a million tensors they are the larger part of what was
  // touched.
  ::madvise(map, file->data_offset_, MADV_DONTNEED);
  SLUICE_TRY(
      check_ranges(handler.tensors, static_cast<std::int64_t>(file_bytes - file->data_offset_)).with_context(where));
  file->tensors_ = std::move(handler.tensors);
  file->tensors_.shrink_to_fit();
  file->metadata_ = std::move(handler.metadata);
  return std::shared_ptr<const SafetensorsFile>(std::move(file));
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) ::munmap(const_cast<std::byte*>(map_), map_bytes_);
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const TensorEntry& entry, std::string_view n) { return std::string_view(entry.name) < n; });
  return it != tensors_.end() && it->name == name ? &*it : nullptr;
}

const std::byte* SafetensorsFile::data(const TensorEntry& entry) const { return map_ + data_offset_ + entry.begin; }

void SafetensorsFile::drop(const TensorEntry& entry, std::int64_t begin_bytes, std::int64_t end_bytes) const {
  if (begin_bytes >= end_bytes) return;
  // Whole pages around the range: those shared with a neighbour are read again if the neighbour is.
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(data(entry) + begin_bytes) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(data(entry) + end_bytes);
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

float decode_f32(const std::byte* bytes) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= std::to_integer<std::uint32_t>(bytes[i]) << (8 * i);
  return std::bit_cast<float>(bits);
}

float decode_bf16(const std::byte* bytes) {
  const std::uint32_t bits = std::to_integer<std::uint32_t>(bytes[0]) << 16 | std::to_integer<std::uint32_t>(bytes[1])
                                                                                  << 24;
  return std::bit_cast<float>(bits);
}

}  // namespace sluice::io
