// Every float of the domains of cuda/fast_math.cuh against the specified functions, on the device itself: whether one
// residual step gives the IEEE quotient depends on the reciprocal the hardware approximates.
#include <gtest/gtest.h>

#include "cuda/columns.cuh"
#include "cuda/fast_math.cuh"
#include "gpu/device_mirror.h"

namespace sluice::test {
namespace {

// Of every float, subnormals, infinities and NaN included.
__global__ void compare_any(unsigned long long* sigmoid, unsigned long long* scale) {
  unsigned long long sigmoids = 0, scales = 0;
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t bits = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; bits < (1ull << 32); bits += stride) {
    const float x = __uint_as_float(static_cast<std::uint32_t>(bits));
    const float got = cuda::any_sigmoid(x), want = cuda::spec_sigmoid(x);
    if (x == x ? __float_as_uint(got) != __float_as_uint(want) : got == got) ++sigmoids;
    if (!(x >= 0.0f) || !cuda::is_finite(x)) continue;
    const float amax = fmaxf(x, 1e-10f);
    if (cuda::scale_of<std::uint8_t>(x, ScaleFormat::kF32) != __fdiv_rn(amax, 448.0f)) ++scales;
    if (cuda::scale_of<std::int8_t>(x, ScaleFormat::kF32) != __fdiv_rn(amax, 127.0f)) ++scales;
  }
  atomicAdd(sigmoid, sigmoids);
  atomicAdd(scale, scales);
}

struct Mismatches {
  unsigned long long exp, sigmoid, divide, compared;
  unsigned int first_bits;  // of a sigmoid that differs
};

__global__ void compare_all(Mismatches* out) {
  Mismatches mine = {};
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t bits = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; bits < (1ull << 32); bits += stride) {
    const float x = __uint_as_float(static_cast<std::uint32_t>(bits));
    if (!(fabsf(x) <= cuda::kFastLimit)) continue;
    ++mine.compared;
    if (x <= 0.0f) {
      const float e = cuda::spec_exp(x);
      if (__float_as_uint(cuda::fast_exp(x)) != __float_as_uint(e)) ++mine.exp;
      // A softmax's quotient, with a divisor that is another hash of x.
      const float b = __fadd_rn(1.0f, static_cast<float>(static_cast<std::uint32_t>(bits) * 2654435761u) * 0x1p-24f);
      if (__float_as_uint(cuda::fast_divide(e, b, __frcp_rn(b))) != __float_as_uint(__fdiv_rn(e, b))) ++mine.divide;
    }
    if (__float_as_uint(cuda::fast_sigmoid(x)) != __float_as_uint(cuda::spec_sigmoid(x))) {
      ++mine.sigmoid;
      out->first_bits = static_cast<unsigned int>(bits);
    }
  }
  atomicAdd(&out->exp, mine.exp);
  atomicAdd(&out->sigmoid, mine.sigmoid);
  atomicAdd(&out->divide, mine.divide);
  atomicAdd(&out->compared, mine.compared);
}

TEST(FastMathCuda, EveryFloatOfTheDomainHasTheSpecifiedBits) {
  if (const std::string reason = no_gpu_reason(); !reason.empty()) GTEST_SKIP() << reason;
  Mismatches* found = nullptr;
  ASSERT_EQ(cudaMallocManaged(&found, sizeof(Mismatches)), cudaSuccess);
  *found = {};
  compare_all<<<1024, 256>>>(found);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(found->compared, 2ull * (0x42700000ull + 1));  // 60.0f, both signs
  EXPECT_EQ(found->exp, 0u);
  EXPECT_EQ(found->sigmoid, 0u) << "e.g. bits " << found->first_bits;
  EXPECT_EQ(found->divide, 0u);
  cudaFree(found);
}

TEST(FastMathCuda, EveryFloatHasTheSpecifiedSigmoidAndScale) {
  if (const std::string reason = no_gpu_reason(); !reason.empty()) GTEST_SKIP() << reason;
  unsigned long long* found = nullptr;
  ASSERT_EQ(cudaMallocManaged(&found, 2 * sizeof(*found)), cudaSuccess);
  found[0] = found[1] = 0;
  compare_any<<<1024, 256>>>(found, found + 1);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(found[0], 0u);
  EXPECT_EQ(found[1], 0u);
  cudaFree(found);
}

}  // namespace
}  // namespace sluice::test
