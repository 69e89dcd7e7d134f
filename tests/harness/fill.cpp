// Seeded fills and reading back.
#include "harness/fill.h"

#include <fmt/format.h>

#include <cmath>
#include <stdexcept>

#include "harness/codec.h"

namespace sluice::test {

double Rng::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

std::int64_t Rng::integer(std::int64_t low, std::int64_t high) {
  const auto count = static_cast<std::uint64_t>(high - low) + 1;  // 0: the whole range
  return low + static_cast<std::int64_t>(count == 0 ? bits() : bits() % count);
}

double Rng::normal() {
  const std::uint64_t draw = bits();
  double sum = 0;
  for (int part = 0; part < 4; ++part) sum += static_cast<double>((draw >> (16 * part)) & 0xFFFF) + 0.5;
  // Four uniforms on [0, 65536): mean 131072, variance 4 * 65536^2 / 12.
  return (sum - 131072.0) / 65536.0 * std::sqrt(3.0);
}

std::byte* element(const TensorView& view, std::int64_t index) {
  std::int64_t offset = 0;
  for (int i = view.rank - 1; i >= 0; --i) {
    const auto axis = static_cast<std::size_t>(i);
    offset += index % view.shape[axis] * view.stride[axis];
    index /= view.shape[axis];
  }
  return static_cast<std::byte*>(view.data) + offset * size_bytes(view.dtype);
}

namespace {

// A template, so that the large fills are not a function pointer call per element.
template <class Value>
void fill_each(const TensorView& view, Value value) {
  const std::int64_t count = view.num_elements();
  for (std::int64_t i = 0; i < count; ++i) store_bits(view.dtype, element(view, i), encode(view.dtype, value(i)));
}

}  // namespace

void fill_with(const TensorView& view, const std::function<double(std::int64_t index)>& value) {
  fill_each(view, std::cref(value));
}

void fill_values(const TensorView& view, const std::vector<double>& values) {
  if (static_cast<std::int64_t>(values.size()) != view.num_elements()) {
    throw std::invalid_argument(fmt::format("fill_values: {} values for {}", values.size(), view.to_string()));
  }
  fill_each(view, [&](std::int64_t i) { return values[static_cast<std::size_t>(i)]; });
}

void fill_constant(const TensorView& view, double value) {
  fill_each(view, [&](std::int64_t) { return value; });
}

void fill_normal(const TensorView& view, std::uint64_t seed, double sigma) {
  fill_each(view, [rng = Rng(seed), sigma](std::int64_t) mutable { return sigma * rng.normal(); });
}

void fill_uniform(const TensorView& view, std::uint64_t seed, double low, double high) {
  fill_each(view, [rng = Rng(seed), low, high](std::int64_t) mutable { return rng.uniform(low, high); });
}

void fill_integers(const TensorView& view, std::uint64_t seed, std::int64_t low, std::int64_t high) {
  fill_each(view,
            [rng = Rng(seed), low, high](std::int64_t) mutable { return static_cast<double>(rng.integer(low, high)); });
}

void fill_powers_of_two(const TensorView& view, std::uint64_t seed, int low_exponent, int high_exponent) {
  fill_each(view, [rng = Rng(seed), low_exponent, high_exponent](std::int64_t) mutable {
    return std::ldexp(1.0, static_cast<int>(rng.integer(low_exponent, high_exponent)));
  });
}

void fill_random_bits(const TensorView& view, std::uint64_t seed) {
  Rng rng(seed);
  const std::int64_t count = view.num_elements();
  for (std::int64_t i = 0; i < count; ++i) store_bits(view.dtype, element(view, i), rng.bits());
}

std::vector<double> to_doubles(const TensorView& view) {
  std::vector<double> values(static_cast<std::size_t>(view.num_elements()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = decode(view.dtype, load_bits(view.dtype, element(view, static_cast<std::int64_t>(i))));
  }
  return values;
}

}  // namespace sluice::test
