// Times grouped GEMMs beside the ceilings of the machine, measured in the same run.
//   gemm_bench [threads [target [part of a case's name]]]      target: best, or avx2 to leave AVX-512 out
// GB/s counts each active expert's weights once; GFLOP/s counts 2 R N K. Best of a few passes: other load on the
// machine only ever adds time. One thread is timed by its own CPU time, which other load disturbs less. The weights
// rotate through at least 1 GiB where one set is smaller.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <vector>

#include <hwy/targets.h>

#include "cpu/ceilings.h"
#include "sluice/stage/grouped_gemm.h"

using sluice::DType;
using sluice::TensorView;

namespace {

double seconds(int threads) {
  if (threads > 1) return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Free {
  void operator()(std::uint8_t* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::uint8_t, Free>;

Buffer make(std::int64_t bytes) {
  const std::int64_t rounded = (bytes + 4095) / 4096 * 4096;
  return Buffer(static_cast<std::uint8_t*>(std::aligned_alloc(4096, static_cast<std::size_t>(rounded))));
}

// Finite values of ordinary size: the mix of subnormals is that of uniform bytes, more than in real weights.
void fill(std::uint8_t* p, DType dtype, std::int64_t elems) {
  std::uint64_t state = 88172645463325252ULL;
  for (std::int64_t i = 0; i < elems; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const auto bits = static_cast<std::uint32_t>(state >> 20);
    if (dtype == DType::kE4M3) {
      p[i] = static_cast<std::uint8_t>((bits & 0x7F) == 0x7F ? 0x30 : bits);
    } else {
      const float v = (static_cast<float>(bits & 0xFFFF) - 32768.0F) / 32768.0F;
      if (dtype == DType::kF32) std::memcpy(p + 4 * i, &v, 4);
      if (dtype == DType::kBF16) std::memcpy(p + 2 * i, reinterpret_cast<const char*>(&v) + 2, 2);
    }
  }
}

struct Case {
  const char* name;
  std::int64_t experts, rows_each, n, k;
  DType a, w;
};

void run_case(const Case& c, int threads, double stream, double fma) {
  const auto& impl = sluice::grouped_gemm::impls()[0];
  const std::int64_t rows = c.experts * c.rows_each;
  const std::int64_t set_bytes = c.experts * c.n * c.k * sluice::size_bytes(c.w);
  const std::int64_t sets = std::max<std::int64_t>(1, std::min<std::int64_t>(8, (std::int64_t{1} << 30) / set_bytes));
  const std::int64_t kb = sluice::ceil_div(c.k, 128), nb = sluice::ceil_div(c.n, 128);
  Buffer w = make(set_bytes * sets), a = make(rows * c.k * 4), out = make(rows * c.n * 2);
  fill(w.get(), c.w, c.experts * c.n * c.k);
  for (std::int64_t s = 1; s < sets; ++s)
    std::memcpy(w.get() + s * set_bytes, w.get(), static_cast<std::size_t>(set_bytes));
  fill(a.get(), c.a, rows * c.k);
  std::vector<float> a_scale(static_cast<std::size_t>(rows * kb), 0.01F),
      w_scale(static_cast<std::size_t>(c.experts * nb * kb), 0.02F);
  std::vector<std::int32_t> offset;
  for (std::int64_t e = 0; e <= c.experts; ++e) offset.push_back(static_cast<std::int32_t>(e * c.rows_each));
  sluice::grouped_gemm::Args args;
  args.a = TensorView::dense(a.get(), c.a, {rows, c.k});
  if (c.a == DType::kE4M3) args.a_scale = TensorView::dense(a_scale.data(), DType::kF32, {kb, rows});
  args.groups = sluice::RowGroups::contiguous({TensorView::dense(offset.data(), DType::kI32, {c.experts + 1})});
  if (c.w == DType::kE4M3) args.w_scale = TensorView::dense(w_scale.data(), DType::kF32, {c.experts, nb, kb});
  args.out = TensorView::dense(out.get(), DType::kBF16, {rows, c.n});
  sluice::Machine machine = sluice::Machine::detect_cpu(threads);
  args.w = TensorView::dense(w.get(), c.w, {c.experts, c.n, c.k});
  std::vector<std::byte> workspace(static_cast<std::size_t>(impl.scratch_bytes(args, machine)));
  sluice::Ctx ctx;
  ctx.workspace = workspace;
  ctx.num_threads = threads;
  double best = 1e30, spent = 0.0;
  for (int pass = 0; pass < 3 || (spent < 1.5 && pass < 12); ++pass) {
    args.w = TensorView::dense(w.get() + pass % sets * set_bytes, c.w, {c.experts, c.n, c.k});
    if (auto s = sluice::grouped_gemm::check(args); !s) {
      std::printf("%s\n", s.message().c_str());
      return;
    }
    const double start = seconds(threads);
    if (auto s = impl.run(args, ctx); !s) {
      std::printf("%s\n", s.message().c_str());
      return;
    }
    const double t = seconds(threads) - start;
    spent += t;
    best = std::min(best, t);
  }
  const double gb = static_cast<double>(set_bytes) / best,
               gf = 2.0 * static_cast<double>(rows * c.n) * static_cast<double>(c.k) / best;
  std::printf("%-28s E=%-3ld rows/E=%-4ld N=%-5ld K=%-5ld %9.3f ms %7.2f GB/s (%3.0f%%) %8.1f GFLOP/s (%3.0f%%)\n",
              c.name, c.experts, c.rows_each, c.n, c.k, best * 1e3, gb / 1e9, 100 * gb / stream, gf / 1e9,
              100 * gf / fma);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  if (argc > 2 && std::strcmp(argv[2], "avx2") == 0) {
    hwy::SetSupportedTargetsForTest(HWY_AVX2);
    hwy::GetChosenTarget().DeInit();
  }
  const double stream = sluice::cpu::measure_stream_bytes_per_s(threads),
               fma = sluice::cpu::measure_fma_flops_per_s(threads);
  std::printf("threads %d: stream %.2f GB/s, fma %.1f GFLOP/s\n", threads, stream / 1e9, fma / 1e9);
  const DType q = DType::kE4M3, b = DType::kBF16, f = DType::kF32;
  const char* only = argc > 3 ? argv[3] : "";
  for (const Case& c : std::vector<Case>{
           {"t1 w8a8 up", 8, 1, 4096, 7168, q, q},     {"t1 w8a8 down", 8, 1, 7168, 2048, q, q},
           {"t1 w8a16 up", 8, 1, 4096, 7168, b, q},    {"t1 bf16 up", 8, 1, 4096, 7168, b, b},
           {"t1 f32 up", 4, 1, 4096, 7168, f, f},      {"t2 w8a8 up", 8, 2, 4096, 7168, q, q},
           {"t4 w8a8 up", 8, 4, 4096, 7168, q, q},     {"m8 w8a8 up", 4, 8, 4096, 7168, q, q},
           {"m16 w8a8 up", 4, 16, 4096, 7168, q, q},   {"m32 w8a8 up", 4, 32, 4096, 7168, q, q},
           {"m64 w8a8 up", 2, 64, 4096, 7168, q, q},   {"m16 bf16 up", 4, 16, 4096, 7168, b, b},
           {"m32 bf16 up", 4, 32, 4096, 7168, b, b},   {"m64 bf16 up", 2, 64, 4096, 7168, b, b},
           {"m128 bf16 up", 1, 128, 4096, 7168, b, b}, {"m512 bf16 up", 1, 512, 4096, 2048, b, b},
           {"m512 w8a8 up", 1, 512, 4096, 2048, q, q}, {"m16 f32 up", 4, 16, 4096, 7168, f, f},
           {"m64 f32 up", 2, 64, 4096, 7168, f, f},    {"m512 f32 up", 1, 512, 4096, 2048, f, f},
       }) {
    if (std::strstr(c.name, only) != nullptr) run_case(c, threads, stream, fma);
  }
  return 0;
}
