// Comparators and the bounds they are given.
#include "harness/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "harness/codec.h"
#include "harness/fill.h"

namespace sluice::test {
namespace {

std::string position(const TensorView& view, std::int64_t index) {
  std::string text;
  for (int i = view.rank - 1; i >= 0; --i) {
    const std::int64_t extent = view.shape[static_cast<std::size_t>(i)];
    text = fmt::format("{}{}{}", index % extent, text.empty() ? "" : ",", text);
    index /= extent;
  }
  return "[" + text + "]";
}

std::string shown(const TensorView& view, std::int64_t index) {
  const std::uint64_t bits = load_bits(view.dtype, element(view, index));
  return fmt::format("{} (0x{:0{}x})", decode(view.dtype, bits), bits, 2 * size_bytes(view.dtype));
}

}  // namespace

testing::AssertionResult same_bits(const TensorView& got, const TensorView& want) {
  bool same_shape = got.dtype == want.dtype && got.rank == want.rank && got.rank > 0;
  for (int i = 0; i < got.rank; ++i) {
    same_shape = same_shape && got.shape[static_cast<std::size_t>(i)] == want.shape[static_cast<std::size_t>(i)];
  }
  if (!same_shape) return testing::AssertionFailure() << "got " << got.to_string() << ", want " << want.to_string();
  const std::int64_t count = got.num_elements();
  std::int64_t num_different = 0;
  std::int64_t first = -1;
  for (std::int64_t i = 0; i < count; ++i) {
    if (load_bits(got.dtype, element(got, i)) == load_bits(want.dtype, element(want, i))) continue;
    if (first < 0) first = i;
    ++num_different;
  }
  if (num_different == 0) return testing::AssertionSuccess() << got.to_string() << ": the same bits";
  return testing::AssertionFailure() << got.to_string() << ": " << num_different << " of " << count
                                     << " elements differ, the first at " << position(got, first) << ": got "
                                     << shown(got, first) << ", want " << shown(want, first);
}

testing::AssertionResult rows_within(const TensorView& got, std::span<const double> want, const Bounds& bounds,
                                     std::span<const std::string> row_names) {
  if (!got.is_present()) return testing::AssertionFailure() << "got an absent tensor";
  const std::int64_t cols = got.shape[static_cast<std::size_t>(got.rank - 1)];
  const std::int64_t count = got.num_elements();
  const std::int64_t num_rows = cols > 0 ? count / cols : 0;
  if (static_cast<std::int64_t>(want.size()) != count) {
    return testing::AssertionFailure() << fmt::format(
               "got {} ({} rows of {}), want {} values{}", got.to_string(), num_rows, cols, want.size(),
               cols > 0 && static_cast<std::int64_t>(want.size()) % cols == 0
                   ? fmt::format(" ({} rows)", static_cast<std::int64_t>(want.size()) / cols)
                   : "");
  }
  if (bounds.max_abs.size() != want.size() || static_cast<std::int64_t>(bounds.l2.size()) != num_rows) {
    return testing::AssertionFailure() << fmt::format("{} rows of {} need {} and {} bounds, got {} and {}", num_rows,
                                                      cols, want.size(), num_rows, bounds.max_abs.size(),
                                                      bounds.l2.size());
  }
  const auto row_name = [&](std::int64_t row) {
    const auto i = static_cast<std::size_t>(row);
    return i < row_names.size() ? fmt::format("row {} ({})", row, row_names[i]) : fmt::format("row {}", row);
  };

  // The worst row is the one that exceeds its bound by the largest factor, not the one with the largest error. A zero
  // bound with an error is an infinite factor. Comparisons are written so that a NaN bound fails.
  const auto excess = [](double error, double bound) { return error == 0 && bound >= 0 ? 0.0 : error / bound; };
  std::int64_t num_bad_rows = 0;
  double worst = -1;
  std::string worst_text;
  const auto note = [&](double factor, std::string text) {
    if (factor > worst || std::isnan(factor)) {
      worst = std::isnan(factor) ? std::numeric_limits<double>::infinity() : factor;
      worst_text = std::move(text);
    }
  };
  for (std::int64_t row = 0; row < num_rows; ++row) {
    bool bad = false;
    double error_squares = 0;
    double want_squares = 0;
    const std::byte* at = cols > 0 ? element(got, row * cols) : nullptr;
    const std::int64_t step_bytes = got.stride[static_cast<std::size_t>(got.rank - 1)] * size_bytes(got.dtype);
    for (std::int64_t col = 0; col < cols; ++col) {
      const auto i = static_cast<std::size_t>(row * cols + col);
      const double value = decode(got.dtype, load_bits(got.dtype, at + col * step_bytes));
      if (!std::isfinite(value) || !std::isfinite(want[i])) {
        const bool both_nan = std::isnan(value) && std::isnan(want[i]);
        if (both_nan || value == want[i]) continue;  // infinities of the same sign compare equal
        bad = true;
        note(std::numeric_limits<double>::infinity(),
             fmt::format("{}, column {}: got {}, want {}", row_name(row), col, value, want[i]));
        continue;
      }
      const double error = std::fabs(value - want[i]);
      error_squares += error * error;
      want_squares += want[i] * want[i];
      if (!(error <= bounds.max_abs[i])) {
        bad = true;
        note(excess(error, bounds.max_abs[i]),
             fmt::format("{}, column {}: got {}, want {}, error {:.3g}, bound {:.3g}", row_name(row), col, value,
                         want[i], error, bounds.max_abs[i]));
      }
    }
    const double l2 = std::sqrt(error_squares);
    const double bound = bounds.l2[static_cast<std::size_t>(row)];
    if (!(l2 <= bound)) {
      bad = true;
      const double norm = std::sqrt(want_squares);
      note(excess(l2, bound), fmt::format("{}: relative L2 error {:.3g}, bound {:.3g} (norm {:.3g})", row_name(row),
                                          norm > 0 ? l2 / norm : l2, norm > 0 ? bound / norm : bound, norm));
    }
    if (bad) ++num_bad_rows;
  }
  if (num_bad_rows == 0) return testing::AssertionSuccess() << got.to_string() << ": every row within its bound";
  return testing::AssertionFailure() << got.to_string() << ": " << num_bad_rows << " of " << num_rows
                                     << " rows are out of bounds; the worst is " << worst_text;
}

double gamma(std::int64_t num_roundings) {
  const double nu = static_cast<double>(num_roundings) * kUnitRoundoff;
  return nu / (1 - nu);
}

double output_eps(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 0;  // the accumulator's own dtype: nothing is rounded once more
    case DType::kBF16: return 0x1p-8;
    case DType::kF16: return 0x1p-11;
    case DType::kE4M3: return 0x1p-4;
    default: throw std::invalid_argument("output_eps: " + std::string(to_string(dtype)) + " is no output of a GEMM");
  }
}

namespace {

// Half the spacing below the smallest normal, where a relative bound no longer holds.
double half_least_subnormal(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 0x1p-150;
    case DType::kBF16: return 0x1p-134;
    case DType::kF16: return 0x1p-25;
    default: return 0x1p-10;
  }
}

}  // namespace

Product exact_product(std::span<const double> a, std::span<const double> w, std::int64_t num_rows, std::int64_t n,
                      std::int64_t k) {
  if (static_cast<std::int64_t>(a.size()) != num_rows * k || static_cast<std::int64_t>(w.size()) != n * k) {
    throw std::invalid_argument(
        fmt::format("exact_product: {} and {} values for [{},{}] x [{},{}]", a.size(), w.size(), num_rows, k, n, k));
  }
  Product product;
  product.value.reserve(static_cast<std::size_t>(num_rows * n));
  product.magnitude.reserve(static_cast<std::size_t>(num_rows * n));
  for (std::int64_t r = 0; r < num_rows; ++r) {
    for (std::int64_t c = 0; c < n; ++c) {
      double sum = 0;
      double magnitude = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        const double term = a[static_cast<std::size_t>(r * k + i)] * w[static_cast<std::size_t>(c * k + i)];
        sum += term;
        magnitude += std::fabs(term);
      }
      product.value.push_back(sum);
      product.magnitude.push_back(magnitude);
    }
  }
  return product;
}

Bounds rounding_bounds(std::span<const double> value, std::span<const double> magnitude, std::int64_t cols,
                       std::int64_t num_roundings, DType out, double output_spread) {
  if (value.size() != magnitude.size() || cols < 1 || static_cast<std::int64_t>(value.size()) % cols != 0) {
    throw std::invalid_argument(
        fmt::format("bounds: {} values, {} magnitudes, rows of {}", value.size(), magnitude.size(), cols));
  }
  const double relative = gamma(num_roundings);
  const double eps = output_eps(out);
  const double floor = half_least_subnormal(out);
  const double spread = cols >= kMinColsForSpread ? output_spread : 1.0;
  Bounds bounds;
  bounds.max_abs.reserve(value.size());
  double squares = 0;
  for (std::size_t i = 0; i < value.size(); ++i) {
    // The output rounds what was computed, not the exact value; (1 + eps) covers that difference.
    const double computed = relative * magnitude[i] * (1 + eps) + floor;
    bounds.max_abs.push_back(computed + eps * std::fabs(value[i]));
    const double typical = computed + eps * spread * std::fabs(value[i]);
    squares += typical * typical;
    if (static_cast<std::int64_t>(i + 1) % cols == 0) {
      bounds.l2.push_back(std::sqrt(squares));
      squares = 0;
    }
  }
  return bounds;
}

Bounds gemm_bounds(std::span<const double> value, std::span<const double> magnitude, std::int64_t n, std::int64_t k,
                   DType out, double output_spread) {
  return rounding_bounds(value, magnitude, n, kScaleBlock + ceil_div(k, kScaleBlock) + 2, out, output_spread);
}

}  // namespace sluice::test
