// What the launcher remembers of a device: the same as the driver says, and the largest shared memory anybody asked for.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "cuda/launch.h"
#include "gpu/device_mirror.h"

namespace sluice::test {
namespace {

struct Params {
  std::uint32_t* out;
  std::uint32_t words;
};

// Writes the last word of its dynamic shared memory and brings it home.
template <int kWhich>
__global__ void touch(const Params p) {
  extern __shared__ std::uint32_t memory[];
  memory[p.words - 1] = p.words + kWhich;
  *p.out = memory[p.words - 1];
}

TEST(LaunchCuda, FactsAreTheDriversHoweverOftenAsked) {
  if (const std::string reason = no_gpu_reason(); !reason.empty()) GTEST_SKIP() << reason;
  for (int i = 0; i < 3; ++i) {
    cuda::DeviceFacts facts, current;
    ASSERT_TRUE(cuda::facts_of(0, facts).is_ok());
    ASSERT_TRUE(cuda::facts_of_current(current).is_ok());
    EXPECT_EQ(facts.num_sms, first_gpu().gpu.num_sms);
    EXPECT_EQ(facts.capability_major, first_gpu().gpu.capability.major);
    EXPECT_EQ(current.num_sms, facts.num_sms);
  }
  for (int index : {-1, 1000}) {
    cuda::DeviceFacts facts;
    EXPECT_FALSE(cuda::facts_of(index, facts).is_ok()) << index << " is no device here, asked twice or not";
    EXPECT_FALSE(cuda::facts_of(index, facts).is_ok()) << index;
    EXPECT_EQ(facts.num_sms, 0);
  }
}

// Threads that want different amounts for the same kernels: whoever comes last, the largest stays allowed, and every
// launch finds at least its own.
TEST(LaunchCuda, SharedMemoryOnlyGrowsAndEveryThreadGetsItsOwn) {
  if (const std::string reason = no_gpu_reason(); !reason.empty()) GTEST_SKIP() << reason;
  constexpr int kThreads = 8, kRounds = 40;
  constexpr std::uint32_t kLeast = 49 << 10, kStep = 512;
  const auto words_of = [](int thread, int round) {
    return (kLeast + kStep * static_cast<std::uint32_t>((thread * 7 + round * 3) % (kThreads * 8))) / 4;
  };
  std::uint32_t* out = nullptr;
  ASSERT_EQ(cudaMalloc(&out, kThreads * sizeof(*out)), cudaSuccess);
  std::vector<int> wrong(kThreads, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      cudaStream_t stream = nullptr;
      wrong[t] += cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess;
      for (int round = 0; round < kRounds; ++round) {
        const Params p{out + t, words_of(t, round)};
        const bool even = round % 2 == 0;
        const Status status = cuda::launch("touch", even ? touch<0> : touch<1>, 1, 1, 4 * p.words, stream, p);
        std::uint32_t got = 0;
        wrong[t] += !status.is_ok();
        wrong[t] += cudaMemcpyAsync(&got, p.out, sizeof(got), cudaMemcpyDeviceToHost, stream) != cudaSuccess;
        wrong[t] += cudaStreamSynchronize(stream) != cudaSuccess;
        wrong[t] += got != p.words + (even ? 0 : 1);
      }
      wrong[t] += cudaStreamDestroy(stream) != cudaSuccess;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kThreads; ++t) EXPECT_EQ(wrong[t], 0) << "thread " << t;
  std::uint32_t most[2] = {};
  for (int t = 0; t < kThreads; ++t) {
    for (int round = 0; round < kRounds; ++round) most[round % 2] = std::max(most[round % 2], 4 * words_of(t, round));
  }
  const auto allowed = [](const void* kernel) {
    cudaFuncAttributes attributes = {};
    EXPECT_EQ(cudaFuncGetAttributes(&attributes, kernel), cudaSuccess);
    return static_cast<std::uint32_t>(attributes.maxDynamicSharedSizeBytes);
  };
  EXPECT_EQ(allowed(reinterpret_cast<const void*>(touch<0>)), most[0]);
  EXPECT_EQ(allowed(reinterpret_cast<const void*>(touch<1>)), most[1]);
  cudaFree(out);
}

TEST(LaunchCuda, MoreThanTheDeviceHasIsRefusedByNameAndLeavesNoErrorBehind) {
  if (const std::string reason = no_gpu_reason(); !reason.empty()) GTEST_SKIP() << reason;
  const std::size_t most = static_cast<std::size_t>(first_gpu().gpu.shared_bytes_per_block);
  const Status status = cuda::launch("touch", touch<2>, 1, 1, most + 1, nullptr, Params{});
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_NE(status.message().find("touch: " + std::to_string(most + 1) + " bytes of shared memory"), std::string::npos)
      << status.message();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_TRUE(cuda::allow_shared_bytes("touch", reinterpret_cast<const void*>(touch<2>), most).is_ok());
}

}  // namespace
}  // namespace sluice::test
