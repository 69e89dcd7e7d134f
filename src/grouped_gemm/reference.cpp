// Grouped GEMM as plain loops in double, one rounding at the end. Shares nothing with the other implementations.
#include <cmath>
#include <cstring>
#include <limits>

#include "grouped_gemm/impls.h"

namespace sluice::grouped_gemm::reference {

namespace {

double value_at(const TensorView& view, std::int64_t element) {
  const auto* bytes = static_cast<const unsigned char*>(view.data);
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

}  // namespace

Status can_run(const Args&, const Machine&) { return Status::ok(); }

Status run(const Args& args, const Ctx&) {
  const std::int64_t num_local = args.w.shape[0];
  const std::int64_t num_cols = args.w.shape[1];
  const std::int64_t depth = args.w.shape[2];
  const std::int64_t part = args.part_rows > 0 ? args.part_rows : num_cols;
  for (std::int64_t e = 0; e < num_local; ++e) {
    const RowRange range = row_range(args.groups, e, args.a.shape[0]);
    for (std::int64_t r = range.begin; r < range.end; ++r) {
      for (std::int64_t n = 0; n < num_cols; ++n) {
        const std::int64_t scale_row = n / part * ((part + 127) / 128) + n % part / 128;
        double sum = 0.0;
        for (std::int64_t k = 0; k < depth; ++k) {
          double a = value_at(args.a, r * args.a.stride[0] + k);
          double w = value_at(args.w, e * args.w.stride[0] + n * args.w.stride[1] + k);
          if (args.a_scale.is_present()) {
            a *= args.a_scale.as<const float>()[k / 128 * args.a_scale.stride[0] + r * args.a_scale.stride[1]];
          }
          if (args.w_scale.is_present()) {
            w *= args.w_scale
                     .as<const float>()[e * args.w_scale.stride[0] + scale_row * args.w_scale.stride[1] + k / 128];
          }
          sum += a * w;
        }
        if (args.bias.is_present()) sum += args.bias.as<const float>()[e * args.bias.stride[0] + n];
        if (std::isnan(sum)) sum = std::numeric_limits<double>::quiet_NaN();
        if (args.out.dtype == DType::kF32) {
          reinterpret_cast<float*>(args.out.row(r))[n] = static_cast<float>(sum);
        } else {
          const float rounded = nearest_bf16(sum);
          std::memcpy(args.out.row(r) + 2 * n, reinterpret_cast<const unsigned char*>(&rounded) + 2, 2);
        }
      }
    }
  }
  return Status::ok();
}

}  // namespace sluice::grouped_gemm::reference
