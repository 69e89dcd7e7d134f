// Seeded fills: the same seed gives the same bytes on every platform. std::mt19937_64 is specified to the bit, the
// std:: distributions are not, so the mapping from draws to values is our own and uses exact operations only.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "sluice/core.h"

namespace sluice::test {

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t bits() { return engine_(); }
  double uniform();  // [0, 1), 53 bits
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  std::int64_t integer(std::int64_t low, std::int64_t high);  // [low, high], both ends included
  // Bell-shaped, mean 0, variance 1, never beyond 3.47: the sum of four uniforms. No libm, hence the same everywhere.
  double normal();

 private:
  std::mt19937_64 engine_;
};

// Every fill walks the elements in row-major order of the view, leaves gaps between rows alone, and rounds each
// value once to the view's dtype (codec.h).
void fill_with(const TensorView& view, const std::function<double(std::int64_t index)>& value);
void fill_values(const TensorView& view, const std::vector<double>& values);  // throws unless the sizes agree
void fill_constant(const TensorView& view, double value);
void fill_normal(const TensorView& view, std::uint64_t seed, double sigma = 1.0);
void fill_uniform(const TensorView& view, std::uint64_t seed, double low = -1.0, double high = 1.0);
void fill_integers(const TensorView& view, std::uint64_t seed, std::int64_t low, std::int64_t high);
// 2^e with e drawn from [low, high]: scales under which products stay exact.
void fill_powers_of_two(const TensorView& view, std::uint64_t seed, int low_exponent = -3, int high_exponent = 3);
// Any bytes at all: NaN, infinities, subnormals and negative zero included.
void fill_random_bits(const TensorView& view, std::uint64_t seed);

// The elements in row-major order of the view, whatever its strides.
std::vector<double> to_doubles(const TensorView& view);

// Address of the element at row-major position `index` of the view.
std::byte* element(const TensorView& view, std::int64_t index);

}  // namespace sluice::test
