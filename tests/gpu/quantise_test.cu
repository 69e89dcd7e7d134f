// Quantisation without a division (quantise_unit of cuda/columns.cuh) where it could round otherwise than a division: at
// every boundary between two bytes of e4m3 and int8, exact ties and the floats beside them, and every quotient that is
// closer to the middle of two floats at a boundary than the arithmetic's error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cuda/columns.cuh"
#include "gpu/device_mirror.h"

namespace sluice::test {
namespace {

constexpr int kUnit = cuda::kUnitColumns;

template <class Q>
__global__ void quantise(const float* v, const float* scale, uint4* bytes, int num_units) {
  const int unit = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (unit >= num_units) return;
  float values[kUnit];
  for (int i = 0; i < kUnit; ++i) values[i] = v[unit * kUnit + i];
  bytes[unit] = cuda::quantise_unit<Q>(values, scale[unit], true);
}

// The magnitudes of e4m3's bytes 0 to 0x7E and of int8's 0 to 127.
float magnitude(int byte, std::uint8_t) {
  const int exponent = byte / 8, mantissa = byte % 8;
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                       : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}
float magnitude(int byte, std::int8_t) { return static_cast<float>(byte); }

// boundaries[i] lies half-way between the magnitudes of bytes i and i + 1.
template <class Q>
std::vector<float> boundaries() {
  std::vector<float> middles;
  for (int byte = 0; byte < (static_cast<Q>(-1) > 0 ? 0x7E : 127); ++byte)
    middles.push_back((magnitude(byte, Q()) + magnitude(byte + 1, Q())) / 2);
  return middles;
}

// The byte of a quotient: by the boundaries below it, a tie to the even one, saturating.
template <class Q>
std::uint8_t expected(float quotient, const std::vector<float>& middles) {
  const auto at = std::lower_bound(middles.begin(), middles.end(), std::fabs(quotient));
  auto byte = static_cast<int>(at - middles.begin());
  if (at != middles.end() && *at == std::fabs(quotient) && byte % 2 != 0) ++byte;
  if (!std::signbit(quotient)) return static_cast<std::uint8_t>(byte);
  return static_cast<std::uint8_t>(static_cast<Q>(-1) > 0 ? byte | 0x80 : -byte);
}

// Pairs to be divided, unit by unit of one scale.
struct Pairs {
  std::vector<float> v, scale;
  void add(float value, float s) {
    scale.push_back(s);
    const float up = std::nextafterf(value, HUGE_VALF), down = std::nextafterf(value, 0.0f);
    const float near[] = {
        value,         up,  down, std::nextafterf(up, HUGE_VALF), std::nextafterf(down, 0.0f), value * 0.5f,
        value * 0.99f, 0.0f};
    for (float n : near) v.insert(v.end(), {n, -n});
  }
};

template <class Q>
void expect_bytes_of_a_division(const Pairs& pairs) {
  const int units = static_cast<int>(pairs.scale.size());
  ASSERT_GT(units, 0);
  float *v = nullptr, *scale = nullptr;
  uint4* bytes = nullptr;
  ASSERT_EQ(cudaMallocManaged(&v, pairs.v.size() * sizeof(float)), cudaSuccess);
  ASSERT_EQ(cudaMallocManaged(&scale, pairs.scale.size() * sizeof(float)), cudaSuccess);
  ASSERT_EQ(cudaMallocManaged(&bytes, pairs.scale.size() * sizeof(uint4)), cudaSuccess);
  std::copy(pairs.v.begin(), pairs.v.end(), v);
  std::copy(pairs.scale.begin(), pairs.scale.end(), scale);
  quantise<Q><<<(units + 255) / 256, 256>>>(v, scale, bytes, units);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto* got = reinterpret_cast<const std::uint8_t*>(bytes);
  const std::vector<float> middles = boundaries<Q>();
  std::int64_t num_wrong = 0;
  for (std::size_t i = 0; i < pairs.v.size(); ++i) {
    const std::uint8_t want = expected<Q>(pairs.v[i] / pairs.scale[i / kUnit], middles);
    if (got[i] == want) continue;
    if (++num_wrong <= 5) {
      ADD_FAILURE() << pairs.v[i] << " / " << pairs.scale[i / kUnit] << " is byte " << int{got[i]} << ", expected "
                    << int{want};
    }
  }
  EXPECT_EQ(num_wrong, 0) << "of " << pairs.v.size();
  cudaFree(v);
  cudaFree(scale);
  cudaFree(bytes);
}

template <class Q>
class QuantiseCuda : public GpuTest {};
using Formats = testing::Types<std::uint8_t, std::int8_t>;
TYPED_TEST_SUITE(QuantiseCuda, Formats);

// v = scale * boundary, exactly: the tie goes to the even byte, a float more or less to the neighbours.
TYPED_TEST(QuantiseCuda, EveryTieAndTheFloatsBesideIt) {
  Pairs pairs;
  std::mt19937_64 rng(5);
  for (float boundary : boundaries<TypeParam>()) {
    for (int i = 0; i < 200; ++i) {
      // Few enough bits for an exact product; and any scale, where the product is rounded.
      const std::uint64_t bits = rng() >> (i < 100 ? 48 : 40) | (i < 100 ? 1u << 15 : 1u << 23);
      const float scale = std::ldexp(static_cast<float>(bits), static_cast<int>(rng() % 140) - 57 - (i < 100 ? 0 : 8));
      pairs.add(scale * boundary, scale);
    }
  }
  expect_bytes_of_a_division<TypeParam>(pairs);
}

// With B = K / 2^b of b+1 bits, scale = S / 2^23 and v = V / 2^23 (or twice that), a quotient this close to B and half a unit
// in the last place has v - scale*B = n / 2^(23+b) and S within 16 of n * 2^(24-b), or of twice that below a power of two.
TYPED_TEST(QuantiseCuda, EveryQuotientNearTheMiddleOfTwoFloatsAtABoundary) {
  constexpr int kBits = static_cast<TypeParam>(-1) > 0 ? 4 : 7;
  Pairs pairs;
  for (float boundary : boundaries<TypeParam>()) {
    int exponent = 0;
    const auto k = static_cast<std::int64_t>(std::ldexp(std::frexp(boundary, &exponent), kBits + 1));
    for (std::int64_t n = 1; n <= std::int64_t{1} << kBits; ++n) {
      for (int half = 0; half < 2; ++half) {
        for (std::int64_t j = -16; j <= 16; ++j) {
          const std::int64_t s = (n << (24 - kBits + half)) + j;
          if (s < (1 << 23) || s >= (1 << 24)) continue;
          for (std::int64_t sign : {-1, 1}) {
            for (int up = 0; up < 2; ++up) {
              const std::int64_t numerator = s * k + sign * n;
              const std::int64_t step = std::int64_t{1} << (kBits + up);
              const std::int64_t v = numerator / step;
              if (numerator % step != 0 || v < (1 << 23) || v >= (1 << 24)) continue;
              pairs.add(std::ldexp(static_cast<float>(v), up - 23 + exponent - 1),
                        std::ldexp(static_cast<float>(s), -23));
            }
          }
        }
      }
    }
  }
  EXPECT_GT(pairs.scale.size(), 100u);
  expect_bytes_of_a_division<TypeParam>(pairs);
}

TYPED_TEST(QuantiseCuda, RandomQuotientsOfEverySize) {
  Pairs pairs;
  std::mt19937_64 rng(6);
  const float top = static_cast<TypeParam>(-1) > 0 ? 448.0f : 127.0f;
  const auto mantissa = [&] { return 1.0f + static_cast<float>(rng() >> 41) * 0x1p-23f; };
  for (int i = 0; i < 200000; ++i) {
    const float scale = std::ldexp(mantissa(), static_cast<int>(rng() % 160) - 42);
    pairs.add(std::ldexp(scale * top * mantissa(), -1 - static_cast<int>(rng() % 20)), scale);
  }
  expect_bytes_of_a_division<TypeParam>(pairs);
}

}  // namespace
}  // namespace sluice::test
