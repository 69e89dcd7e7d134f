#include "io/unpack.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace sluice::io {
namespace {

template <class T>
T load(const std::byte* src, std::int64_t index) {
  T value;
  std::memcpy(&value, src + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

bool is_nan(float value) { return value != value; }
bool is_nan_bf16(std::uint16_t bits) { return (bits & 0x7FFF) > 0x7F80; }
bool is_nan_f16(std::uint16_t bits) { return (bits & 0x7FFF) > 0x7C00; }

// All 256 values of e4m3, built from the definition once.
const std::array<float, 256>& e4m3_table() {
  static const std::array<float, 256> kTable = [] {
    std::array<float, 256> table{};
    for (int byte = 0; byte < 256; ++byte) {
      const int exponent = byte >> 3 & 15, mantissa = byte & 7;
      float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      if ((byte & 0x7F) == 0x7F) value = std::numeric_limits<float>::quiet_NaN();
      table[static_cast<std::size_t>(byte)] = (byte & 0x80) != 0 ? -value : value;
    }
    return table;
  }();
  return kTable;
}

constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

constexpr std::int64_t kMxColumns = 32;  // columns that share one e8m0 scale

// value * 2^e as bf16 where value has at most 8 significant bits; the product is formed in double, which holds it.
std::uint16_t scaled_bf16(float value, double scale, bool& exact) {
  const double product = static_cast<double>(value) * scale;
  const auto narrow = static_cast<float>(product);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(narrow);
  if (!std::isnan(product) && (static_cast<double>(narrow) != product || (bits & 0xFFFF) != 0)) exact = false;
  return std::isnan(product) ? to_bf16(narrow) : static_cast<std::uint16_t>(bits >> 16);
}

double e8m0_double(std::uint8_t byte) {
  return byte == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, static_cast<int>(byte) - 127);
}

template <class Src, class Dst, class Convert, class IsNan>
std::int64_t transpose_as(const Transpose& t, const std::byte* src, Dst* dst, const Convert& convert,
                          const IsNan& nan) {
  // Squares that keep a cache line of both sides in use.
  constexpr std::int64_t kTile = 32;
  const std::int64_t pitch = t.pitch == 0 ? t.cols : t.pitch;
  std::int64_t num_nan = 0;
  for (std::int64_t c0 = 0; c0 < t.cols; c0 += kTile) {
    const std::int64_t c1 = std::min(t.cols, c0 + kTile);
    std::array<std::int64_t, kTile> row{};
    for (std::int64_t c = c0; c < c1; ++c)
      row[static_cast<std::size_t>(c - c0)] = t.intermediate == 0 ? c : w13_row(t.order, c, t.intermediate);
    for (std::int64_t r0 = 0; r0 < t.rows; r0 += kTile) {
      const std::int64_t r1 = std::min(t.rows, r0 + kTile);
      for (std::int64_t c = c0; c < c1; ++c) {
        Dst* out = dst + row[static_cast<std::size_t>(c - c0)] * t.rows;
        for (std::int64_t r = r0; r < r1; ++r) {
          const Src value = load<Src>(src, r * pitch + c);
          num_nan += nan(value) ? 1 : 0;
          out[r] = convert(value);
        }
      }
    }
  }
  return num_nan;
}

}  // namespace

std::int64_t w13_row(GateUp order, std::int64_t n, std::int64_t intermediate) {
  switch (order) {
    case GateUp::kGateFirst: return n;
    case GateUp::kUpFirst: return n < intermediate ? intermediate + n : n - intermediate;
    case GateUp::kInterleaved: return n % 2 == 0 ? n / 2 : intermediate + n / 2;
  }
  return n;
}

float bf16_value(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

float f16_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                : exponent == 31
                    ? (mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN())
                    : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

float e4m3_value(std::uint8_t byte) { return e4m3_table()[byte]; }

float e8m0_value(std::uint8_t byte) {
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  return byte == 0 ? std::ldexp(1.0f, -127) : std::bit_cast<float>(static_cast<std::uint32_t>(byte) << 23);
}

std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (is_nan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

std::uint8_t to_e4m3(float value) {
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (is_nan(value)) return sign | 0x7F;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448.0f) return sign | 0x7E;
  if (magnitude < 0x1p-6f) {  // subnormals are multiples of 2^-9; eight of them are the smallest normal's code
    return sign | static_cast<std::uint8_t>(std::nearbyint(magnitude * 512.0f));
  }
  // Keep three mantissa bits: add half of the last kept bit, less one when that bit is even.
  std::uint32_t bits = std::bit_cast<std::uint32_t>(magnitude);
  bits += 0x7FFFF + (bits >> 20 & 1);
  return sign | static_cast<std::uint8_t>(std::min<std::uint32_t>((bits >> 20) - ((127 - 7) << 3), 0x7E));
}

std::int64_t count_nan(DType dtype, const std::byte* src, std::int64_t count) {
  std::int64_t num_nan = 0;
  switch (dtype) {
    case DType::kF32:
      for (std::int64_t i = 0; i < count; ++i)
        num_nan += (load<std::uint32_t>(src, i) & 0x7FFFFFFF) > 0x7F800000 ? 1 : 0;
      break;
    case DType::kBF16:
      for (std::int64_t i = 0; i < count; ++i) num_nan += is_nan_bf16(load<std::uint16_t>(src, i)) ? 1 : 0;
      break;
    case DType::kF16:
      for (std::int64_t i = 0; i < count; ++i) num_nan += is_nan_f16(load<std::uint16_t>(src, i)) ? 1 : 0;
      break;
    case DType::kE4M3:
      for (std::int64_t i = 0; i < count; ++i) num_nan += (std::to_integer<int>(src[i]) & 0x7F) == 0x7F ? 1 : 0;
      break;
    case DType::kE8M0:
    case DType::kU8:
      for (std::int64_t i = 0; i < count; ++i) num_nan += std::to_integer<int>(src[i]) == 255 ? 1 : 0;
      break;
    default: break;
  }
  return num_nan;
}

std::int64_t copy_elements(DType dtype, const std::byte* src, std::int64_t count, void* dst) {
  // In pieces that stay in the cache between the copy and the look for NaN.
  constexpr std::int64_t kPiece = 16384;
  const std::int64_t size = size_bytes(dtype);
  std::int64_t num_nan = 0;
  for (std::int64_t begin = 0; begin < count; begin += kPiece) {
    const std::int64_t n = std::min(kPiece, count - begin);
    std::memcpy(static_cast<std::byte*>(dst) + begin * size, src + begin * size, static_cast<std::size_t>(n * size));
    num_nan += count_nan(dtype, src + begin * size, n);
  }
  return num_nan;
}

std::int64_t to_f32(DType dtype, const std::byte* src, std::int64_t count, float* dst) {
  switch (dtype) {
    case DType::kF32: std::memcpy(dst, src, static_cast<std::size_t>(count) * sizeof(float)); break;
    case DType::kBF16:
      for (std::int64_t i = 0; i < count; ++i) dst[i] = bf16_value(load<std::uint16_t>(src, i));
      break;
    case DType::kF16:
      for (std::int64_t i = 0; i < count; ++i) dst[i] = f16_value(load<std::uint16_t>(src, i));
      break;
    default:
      for (std::int64_t i = 0; i < count; ++i) dst[i] = e8m0_value(std::to_integer<std::uint8_t>(src[i]));
      break;
  }
  return count_nan(dtype, src, count);
}

std::int64_t transpose(const Transpose& shape, const std::byte* src, void* dst) {
  switch (shape.dtype) {
    case DType::kF32:
      return transpose_as<std::uint32_t>(
          shape, src, static_cast<std::uint32_t*>(dst), [](std::uint32_t v) { return v; },
          [](std::uint32_t v) { return (v & 0x7FFFFFFF) > 0x7F800000; });
    case DType::kF16: return transpose_as<std::uint16_t>(shape, src, static_cast<float*>(dst), f16_value, is_nan_f16);
    default:
      return transpose_as<std::uint16_t>(
          shape, src, static_cast<std::uint16_t*>(dst), [](std::uint16_t v) { return v; }, is_nan_bf16);
  }
}

std::int64_t dequantise_blocks(const std::byte* src, const float* scale, std::int64_t rows, std::int64_t cols,
                               std::uint16_t* dst) {
  const std::int64_t blocks = ceil_div(cols, kScaleBlock);
  const std::array<float, 256>& value = e4m3_table();
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row_scale = scale + r / kScaleBlock * blocks;
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t end = std::min(cols, (b + 1) * kScaleBlock);
      for (std::int64_t c = b * kScaleBlock; c < end; ++c) {
        dst[r * cols + c] = to_bf16(value[std::to_integer<std::size_t>(src[r * cols + c])] * row_scale[b]);
      }
    }
  }
  return count_nan(DType::kE4M3, src, rows * cols);
}

std::int64_t dequantise_channels(DType dtype, const std::byte* src, const float* scale, std::int64_t rows,
                                 std::int64_t cols, std::uint16_t* dst) {
  const std::array<float, 256>& e4m3 = e4m3_table();
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = r * cols; i < (r + 1) * cols; ++i) {
      const auto byte = std::to_integer<std::uint8_t>(src[i]);
      const float value = dtype == DType::kI8 ? static_cast<float>(static_cast<std::int8_t>(byte)) : e4m3[byte];
      dst[i] = to_bf16(value * scale[r]);
    }
  }
  return count_nan(dtype, src, rows * cols);
}

Dequantised dequantise_mx_row(const std::byte* src, const std::byte* scale, std::int64_t cols, std::uint16_t* dst) {
  Dequantised result;
  const std::array<float, 256>& value = e4m3_table();
  for (std::int64_t c = 0; c < cols; ++c) {
    const double factor = e8m0_double(std::to_integer<std::uint8_t>(scale[c / kMxColumns]));
    dst[c] = scaled_bf16(value[std::to_integer<std::size_t>(src[c])], factor, result.exact);
    result.num_nan += is_nan_bf16(dst[c]) ? 1 : 0;
  }
  return result;
}

Dequantised dequantise_mxfp4_row(const std::byte* blocks, const std::byte* scale, std::int64_t cols,
                                 std::uint16_t* dst) {
  Dequantised result;
  for (std::int64_t begin = 0; begin < cols; begin += kMxColumns) {
    // The sixteen products of this scale, once, and then only looked up.
    const double factor = e8m0_double(std::to_integer<std::uint8_t>(scale[begin / kMxColumns]));
    std::array<std::uint16_t, 16> product{};
    std::array<bool, 16> exact{};
    for (std::size_t code = 0; code < 16; ++code) {
      exact[code] = true;
      product[code] = scaled_bf16(kE2M1[code], factor, exact[code]);
    }
    const std::int64_t end = std::min(cols, begin + kMxColumns);
    for (std::int64_t c = begin; c < end; ++c) {
      const auto byte = std::to_integer<unsigned>(blocks[c / 2]);
      const std::size_t code = c % 2 == 0 ? byte & 15 : byte >> 4;
      dst[c] = product[code];
      result.exact = result.exact && exact[code];
      result.num_nan += is_nan_bf16(dst[c]) ? 1 : 0;
    }
  }
  return result;
}

}  // namespace sluice::io
