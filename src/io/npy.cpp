#include "io/npy.h"

#include <fmt/format.h>

#include <cctype>
#include <fstream>
#include <optional>

#include "io/safetensors.h"

namespace sluice::io {
namespace {

struct Descr {
  std::string_view text;
  DType dtype;
};
constexpr Descr kDescrs[] = {
    {"<f4", DType::kF32},  {"<f2", DType::kF16},       {"<f8", DType::kF64},  {"<V2", DType::kBF16},
    {"|V2", DType::kBF16}, {"bfloat16", DType::kBF16}, {"|i1", DType::kI8},   {"|u1", DType::kU8},
    {"<i2", DType::kI16},  {"<u2", DType::kU16},       {"<i4", DType::kI32},  {"<u4", DType::kU32},
    {"<i8", DType::kI64},  {"<u8", DType::kU64},       {"|b1", DType::kBool},
};

constexpr std::uint32_t kMaxNpyHeaderBytes = 1 << 20;  // a header is some hundred bytes

// The header is a Python dict literal with three known keys; only that much of Python is understood.
class DictReader {
 public:
  explicit DictReader(std::string_view text) : text_(text) {}

  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<std::int64_t>> shape;
  std::string error;

  bool parse() {
    if (!take('{')) return fail("a '{'");
    while (!take('}')) {
      std::string key;
      if (!string(key)) return fail("a quoted key");
      if (!take(':')) return fail("a ':'");
      if (key == "descr" && !descr) {
        std::string value;
        if (!string(value)) return fail("a dtype string (records are not supported)");
        descr = value;
      } else if (key == "fortran_order" && !fortran_order) {
        if (word("True")) {
          fortran_order = true;
        } else if (word("False")) {
          fortran_order = false;
        } else {
          return fail("True or False");
        }
      } else if (key == "shape" && !shape) {
        if (!tuple()) return fail("a tuple of sizes");
      } else {
        return fail("one each of 'descr', 'fortran_order', 'shape'");
      }
      if (!take(',') && !peek('}')) return fail("',' or '}'");
    }
    skip();
    if (at_ != text_.size()) return fail("the end");
    if (!descr || !fortran_order || !shape) return fail("all of 'descr', 'fortran_order', 'shape'");
    return true;
  }

 private:
  void skip() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
  }
  bool peek(char c) {
    skip();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool take(char c) {
    if (!peek(c)) return false;
    ++at_;
    return true;
  }
  bool word(std::string_view w) {
    skip();
    if (text_.substr(at_, w.size()) != w) return false;
    at_ += w.size();
    return true;
  }
  bool string(std::string& out) {
    if (!peek('\'') && !peek('"')) return false;
    const auto end = text_.find(text_[at_], at_ + 1);
    if (end == std::string_view::npos) return false;
    out = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return true;
  }
  bool tuple() {
    if (!take('(')) return false;
    std::vector<std::int64_t> sizes;
    while (!take(')')) {
      skip();
      std::int64_t value = 0;
      const std::size_t start = at_;
      for (; at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])) != 0; ++at_) {
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, text_[at_] - '0', &value))
          return false;
      }
      if (at_ == start) return false;
      if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote long integers so
      sizes.push_back(value);
      if (!take(',') && !peek(')')) return false;
    }
    shape = std::move(sizes);
    return true;
  }
  bool fail(std::string_view expected) {
    error = fmt::format("the header is not understood at its byte {}: expected {}", at_, expected);
    return false;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Result<NpyHeader> read_npy_header(const std::filesystem::path& path) {
  const std::string where = path.string();
  const auto bad = [&](std::string text) { return Status(StatusCode::kBadData, fmt::format("{}: {}", where, text)); };
  std::error_code error;
  const auto file_bytes = std::filesystem::file_size(path, error);
  if (error) return Status(StatusCode::kNotFound, fmt::format("{}: {}", where, error.message()));
  std::ifstream stream(path, std::ios::binary);
  std::array<unsigned char, 12> start{};
  stream.read(reinterpret_cast<char*>(start.data()), 8);
  if (!stream || std::string_view(reinterpret_cast<char*>(start.data()), 6) != "\x93NUMPY") {
    return bad(fmt::format("this is no .npy file ({} bytes, no NumPy magic)", file_bytes));
  }
  const int major = start[6];
  if (major < 1 || major > 3) return bad(fmt::format(".npy version {}.{} is not known; 1 to 3 are", major, start[7]));
  const int length_bytes = major == 1 ? 2 : 4;
  stream.read(reinterpret_cast<char*>(start.data() + 8), length_bytes);
  std::uint32_t header_bytes = 0;
  for (int i = 0; i < length_bytes; ++i)
    header_bytes |= static_cast<std::uint32_t>(start[8 + static_cast<std::size_t>(i)]) << (8 * i);
  const std::uint64_t before_data = 8 + static_cast<std::uint64_t>(length_bytes) + header_bytes;
  if (!stream || header_bytes > kMaxNpyHeaderBytes || before_data > file_bytes) {
    return bad(fmt::format("header length {} does not fit the file of {} bytes (limit {})", header_bytes, file_bytes,
                           kMaxNpyHeaderBytes));
  }
  std::string header(header_bytes, '\0');
  stream.read(header.data(), header_bytes);
  DictReader dict(header);
  if (!stream || !dict.parse()) return bad(dict.error);
  if (*dict.fortran_order) return bad("the array is in Fortran order; save it in C order (numpy.ascontiguousarray)");
  NpyHeader array;
  array.shape = *dict.shape;
  array.data_offset = static_cast<std::int64_t>(before_data);
  bool known = false;
  for (const Descr& row : kDescrs) {
    if (row.text != *dict.descr) continue;
    array.dtype = row.dtype;
    known = true;
  }
  if (!known) {
    return bad(fmt::format("dtype '{}' is not supported{}", *dict.descr,
                           dict.descr->starts_with('>') ? " (it is big-endian)" : ""));
  }
  auto bytes = checked_num_bytes(array.shape, array.dtype);
  if (!bytes) return bytes.status().with_context(where);
  const std::uint64_t data_bytes = file_bytes - before_data;
  if (static_cast<std::uint64_t>(*bytes) != data_bytes) {
    return bad(fmt::format("{}{} takes {} bytes, but the file holds {}", to_string(array.dtype),
                           shape_text(array.shape), *bytes, data_bytes));
  }
  return array;
}

Result<NpyArray> read_npy(const std::filesystem::path& path) {
  Result<NpyHeader> header = read_npy_header(path);
  if (!header) return header.status();
  NpyArray array{header->dtype, header->shape, {}};
  auto bytes = checked_num_bytes(array.shape, array.dtype);
  if (!bytes) return bytes.status().with_context(path.string());
  array.data.resize(static_cast<std::size_t>(*bytes));
  std::ifstream stream(path, std::ios::binary);
  stream.seekg(header->data_offset);
  stream.read(reinterpret_cast<char*>(array.data.data()), static_cast<std::streamsize>(*bytes));
  if (!stream) return Status(StatusCode::kIoError, fmt::format("{}: reading {} bytes failed", path.string(), *bytes));
  return array;
}

}  // namespace sluice::io
