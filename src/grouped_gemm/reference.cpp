// Grouped GEMM as plain loops in double, one rounding at the end. Shares nothing with the other implementations.
#include <cmath>
#include <cstring>
#include <limits>

#include "grouped_gemm/impls.h"

namespace sluice::grouped_gemm::reference {

namespace {

double value_at(const TensorView& view, std::int64_t element) {
  const auto* bytes = static_cast<const unsigned char*>(view.data);
  if (view.dtype == DType::kI8) return bytes[element] < 128 ? bytes[element] : bytes[element] - 256;
  if (view.dtype == DType::kE4M3) {
    const int byte = bytes[element];
    const int exponent = byte / 8 % 16;
    const int mantissa = byte % 8;
    if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
    const double magnitude = exponent == 0 ? mantissa / 512.0 : std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
    return byte >= 128 ? -magnitude : magnitude;
  }
  unsigned char raw[4] = {0, 0, 0, 0};
  if (view.dtype == DType::kBF16) std::memcpy(raw + 2, bytes + 2 * element, 2);
  if (view.dtype == DType::kF32) std::memcpy(raw, bytes + 4 * element, 4);
  float value = 0.0F;
  std::memcpy(&value, raw, 4);
  return value;
}

// Nearest bf16, ties to even, by the spacing of bf16 at the value's magnitude.
float nearest_bf16(double value) {
  if (std::isnan(value) || std::isinf(value) || value == 0.0) return static_cast<float>(value);
  int exponent = 0;
  std::frexp(value, &exponent);
  const int spacing = exponent - 8 < -133 ? -133 : exponent - 8;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -spacing)), spacing);
  return static_cast<float>(rounded);  // past the largest finite bf16 this is 2^128, which is infinity
}

void store(const Args& args, std::int64_t r, std::int64_t n, double sum) {
  if (std::isnan(sum)) sum = std::numeric_limits<double>::quiet_NaN();
  if (args.out.dtype == DType::kF32) {
    reinterpret_cast<float*>(args.out.row(r))[n] = static_cast<float>(sum);
  } else {
    const float rounded = nearest_bf16(sum);
    std::memcpy(args.out.row(r) + 2 * n, reinterpret_cast<const unsigned char*>(&rounded) + 2, 2);
  }
}

// The bits of int8 by int8 are defined everywhere: an exact sum, then one fp32 operation after the other.
float int8_result(const Args& args, std::int64_t e, std::int64_t r, std::int64_t n, std::int64_t sum) {
  const float a_scale = args.a_scale.as<const float>()[r * args.a_scale.stride[1]];
  const float w_scale = args.w_scale.as<const float>()[e * args.w_scale.stride[0] + n * args.w_scale.stride[1]];
  const float scale = a_scale * w_scale;
  float result = static_cast<float>(sum);
  result = result * scale;
  if (args.bias.is_present()) result = result + args.bias.as<const float>()[e * args.bias.stride[0] + n];
  return result;
}

}  // namespace

Status can_run(const Args&, const Machine&) { return Status::ok(); }

Status run(const Args& args, const Ctx&) {
  const std::int64_t num_local = args.w.shape[0];
  const std::int64_t num_cols = args.w.shape[1];
  const std::int64_t depth = args.w.shape[2];
  const std::int64_t part = args.part_rows > 0 ? args.part_rows : num_cols;
  const std::int64_t num_scale_rows = num_cols / part * ((part + 127) / 128);
  const std::int64_t num_scale_cols = (depth + 127) / 128;
  // Read as blocks wherever the shape allows it; with one column and one row each, both readings are the same numbers.
  const bool w_blocks = args.w_scale.shape[1] == num_scale_rows && args.w_scale.shape[2] == num_scale_cols;
  const bool a_blocks = args.a_scale.shape[0] == num_scale_cols;
  const bool int8 = args.a.dtype == DType::kI8 && args.w.dtype == DType::kI8;
  for (std::int64_t e = 0; e < num_local; ++e) {
    const RowRange range = row_range(args.groups, e, args.a.shape[0]);
    for (std::int64_t r = range.begin; r < range.end; ++r) {
      for (std::int64_t n = 0; n < num_cols; ++n) {
        const std::int64_t scale_row = n / part * ((part + 127) / 128) + n % part / 128;
        if (int8) {
          std::int64_t exact = 0;
          for (std::int64_t k = 0; k < depth; ++k) {
            exact += static_cast<std::int64_t>(value_at(args.a, r * args.a.stride[0] + k)) *
                     static_cast<std::int64_t>(value_at(args.w, e * args.w.stride[0] + n * args.w.stride[1] + k));
          }
          store(args, r, n, static_cast<double>(int8_result(args, e, r, n, exact)));
          continue;
        }
        double sum = 0.0;
        for (std::int64_t k = 0; k < depth; ++k) {
          double a = value_at(args.a, r * args.a.stride[0] + k);
          double w = value_at(args.w, e * args.w.stride[0] + n * args.w.stride[1] + k);
          if (args.a_scale.is_present()) {
            const std::int64_t block = a_blocks ? k / 128 : 0;
            a *= args.a_scale.as<const float>()[block * args.a_scale.stride[0] + r * args.a_scale.stride[1]];
          }
          if (args.w_scale.is_present()) {
            const std::int64_t scale = w_blocks ? scale_row * args.w_scale.stride[1] + k / 128 * args.w_scale.stride[2]
                                                : n * args.w_scale.stride[1];
            w *= args.w_scale.as<const float>()[e * args.w_scale.stride[0] + scale];
          }
          sum += a * w;
        }
        if (args.bias.is_present()) sum += args.bias.as<const float>()[e * args.bias.stride[0] + n];
        store(args, r, n, sum);
      }
    }
  }
  return Status::ok();
}

}  // namespace sluice::grouped_gemm::reference
