// Read bandwidth and FMA rate, measured with the widest vectors the machine has.
#include "cpu/ceilings.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/ceilings.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Sums num_bytes (a multiple of 512) as u64 lanes; the sum is returned so that nothing can be left out.
std::uint64_t StreamSum(const std::uint8_t* data, std::int64_t num_bytes) {
  const hn::ScalableTag<std::uint64_t> d;
  const std::int64_t step = static_cast<std::int64_t>(hn::Lanes(d) * sizeof(std::uint64_t));
  auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
  for (std::int64_t i = 0; i < num_bytes; i += 4 * step) {
    const auto at = [&](std::int64_t j)
                        HWY_ATTR { return hn::LoadU(d, reinterpret_cast<const std::uint64_t*>(data + i + j * step)); };
    s0 = hn::Add(s0, at(0));
    s1 = hn::Add(s1, at(1));
    s2 = hn::Add(s2, at(2));
    s3 = hn::Add(s3, at(3));
  }
  // Lane by lane: a vector reduction may add in signed arithmetic, and these sums wrap.
  HWY_ALIGN std::uint64_t lane[hn::MaxLanes(d)];
  hn::Store(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), d, lane);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) sum += lane[i];
  return sum;
}

// 12 independent chains hide the latency of two FMA units of up to 6 cycles. Returns the flops done.
double FmaLoop(std::int64_t iterations, float* sink) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, 0.999F), b = hn::Set(d, 1e-3F);
  auto c0 = hn::Set(d, 0.1F), c1 = hn::Set(d, 0.2F), c2 = hn::Set(d, 0.3F), c3 = hn::Set(d, 0.4F);
  auto c4 = hn::Set(d, 0.5F), c5 = hn::Set(d, 0.6F), c6 = hn::Set(d, 0.7F), c7 = hn::Set(d, 0.8F);
  auto c8 = hn::Set(d, 0.9F), c9 = hn::Set(d, 1.0F), c10 = hn::Set(d, 1.1F), c11 = hn::Set(d, 1.2F);
  for (std::int64_t i = 0; i < iterations; ++i) {
    c0 = hn::MulAdd(a, c0, b);
    c1 = hn::MulAdd(a, c1, b);
    c2 = hn::MulAdd(a, c2, b);
    c3 = hn::MulAdd(a, c3, b);
    c4 = hn::MulAdd(a, c4, b);
    c5 = hn::MulAdd(a, c5, b);
    c6 = hn::MulAdd(a, c6, b);
    c7 = hn::MulAdd(a, c7, b);
    c8 = hn::MulAdd(a, c8, b);
    c9 = hn::MulAdd(a, c9, b);
    c10 = hn::MulAdd(a, c10, b);
    c11 = hn::MulAdd(a, c11, b);
  }
  const auto s = hn::Add(hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)), hn::Add(hn::Add(c4, c5), hn::Add(c6, c7)));
  *sink = hn::GetLane(hn::SumOfLanes(d, hn::Add(s, hn::Add(hn::Add(c8, c9), hn::Add(c10, c11)))));
  return 12.0 * 2.0 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(iterations);
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {
HWY_EXPORT(StreamSum);
HWY_EXPORT(FmaLoop);

namespace {
double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// One thread per worker, for as long as a measurement lasts: a ceiling needs every core at the same moment, which a
// shared pool does not promise.
template <class Body>
void on_threads(int num_threads, const Body& body) {
  std::vector<std::jthread> threads;
  for (int t = 0; t < num_threads; ++t) threads.emplace_back([&body, t] { body(t); });
}

// Seconds between the barrier before the first worker and the barrier after the last; the best of `repeats`.
template <class Body>
double best_seconds(int num_threads, int repeats, const Body& body) {
  double best = 1e30;
  std::barrier<> barrier(num_threads);
  on_threads(num_threads, [&](int t) {
    for (int r = 0; r < repeats; ++r) {
      barrier.arrive_and_wait();
      const double start = now_s();
      body(t);
      barrier.arrive_and_wait();
      if (t == 0) best = std::min(best, now_s() - start);
    }
  });
  return best;
}
}  // namespace

double measure_stream_bytes_per_s(int num_threads, std::int64_t num_bytes) {
  num_threads = std::max(num_threads, 1);
  if (num_bytes <= 0) num_bytes = std::int64_t{512} << 20;
  const std::int64_t part = std::max<std::int64_t>(num_bytes / num_threads / 4096 * 4096, 4096);
  const std::unique_ptr<std::uint8_t, decltype(&std::free)> data(
      static_cast<std::uint8_t*>(std::aligned_alloc(4096, static_cast<std::size_t>(part * num_threads))), &std::free);
  if (data == nullptr) return 0.0;
  // Each thread touches its own part first, so that pages lie on its memory node and none is the shared zero page.
  on_threads(num_threads, [&](int t) { std::memset(data.get() + part * t, 1, static_cast<std::size_t>(part)); });
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(num_threads) * 8);
  const double seconds = best_seconds(num_threads, 5, [&](int t) {
    // volatile: without a use of the sum the passes could be merged.
    volatile std::uint64_t* sum = &sums[static_cast<std::size_t>(t) * 8];
    *sum = HWY_DYNAMIC_DISPATCH(StreamSum)(data.get() + part * t, part);
  });
  return static_cast<double>(part) * num_threads / seconds;
}

double measure_fma_flops_per_s(int num_threads) {
  num_threads = std::max(num_threads, 1);
  constexpr std::int64_t kIterations = 500'000;  // about 1 ms
  std::vector<float> sinks(static_cast<std::size_t>(num_threads) * 16);
  std::vector<double> flops(static_cast<std::size_t>(num_threads) * 8);
  const double seconds = best_seconds(num_threads, 8, [&](int t) {
    flops[static_cast<std::size_t>(t) * 8] =
        HWY_DYNAMIC_DISPATCH(FmaLoop)(kIterations, &sinks[static_cast<std::size_t>(t) * 16]);
  });
  double total = 0.0;
  for (int t = 0; t < num_threads; ++t) total += flops[static_cast<std::size_t>(t) * 8];
  return total / seconds;
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
