// Counts the CUDA calls that allocate, free, copy on the host's time or wait: a forward makes none. Nor does it ask the driver
// again what it was told before. The linker sends each of them here first (tests/CMakeLists.txt), also those of the
// library, which is linked statically into this program.
#include <atomic>

#include "gpu/gpu_layer.h"

namespace {
std::atomic<std::int64_t> g_num_calls{0};
std::atomic<std::int64_t> g_num_queries{0};
}  // namespace

#define SLUICE_COUNT(counter, name, parameters, arguments) \
  extern "C" cudaError_t __real_##name parameters;         \
  extern "C" cudaError_t __wrap_##name parameters;         \
  extern "C" cudaError_t __wrap_##name parameters {        \
    ++counter;                                             \
    return __real_##name arguments;                        \
  }
#define SLUICE_COUNTED(name, parameters, arguments) SLUICE_COUNT(g_num_calls, name, parameters, arguments)
SLUICE_COUNTED(cudaMalloc, (void** p, std::size_t n), (p, n))
SLUICE_COUNTED(cudaMallocHost, (void** p, std::size_t n), (p, n))
SLUICE_COUNTED(cudaHostAlloc, (void** p, std::size_t n, unsigned f), (p, n, f))
SLUICE_COUNTED(cudaMallocManaged, (void** p, std::size_t n, unsigned f), (p, n, f))
SLUICE_COUNTED(cudaMallocAsync, (void** p, std::size_t n, cudaStream_t s), (p, n, s))
SLUICE_COUNTED(cudaFree, (void* p), (p))
SLUICE_COUNTED(cudaFreeHost, (void* p), (p))
SLUICE_COUNTED(cudaFreeAsync, (void* p, cudaStream_t s), (p, s))
SLUICE_COUNTED(cudaMemcpy, (void* t, const void* f, std::size_t n, cudaMemcpyKind k), (t, f, n, k))
SLUICE_COUNTED(cudaMemcpyAsync, (void* t, const void* f, std::size_t n, cudaMemcpyKind k, cudaStream_t s),
               (t, f, n, k, s))
SLUICE_COUNTED(cudaMemset, (void* t, int b, std::size_t n), (t, b, n))
SLUICE_COUNTED(cudaDeviceSynchronize, (), ())
SLUICE_COUNTED(cudaStreamSynchronize, (cudaStream_t s), (s))
SLUICE_COUNTED(cudaStreamQuery, (cudaStream_t s), (s))
SLUICE_COUNTED(cudaEventSynchronize, (cudaEvent_t e), (e))
SLUICE_COUNTED(cudaEventQuery, (cudaEvent_t e), (e))
SLUICE_COUNTED(cudaEventCreateWithFlags, (cudaEvent_t * e, unsigned f), (e, f))
SLUICE_COUNTED(cudaStreamCreateWithFlags, (cudaStream_t * s, unsigned f), (s, f))
SLUICE_COUNT(g_num_queries, cudaDeviceGetAttribute, (int* v, cudaDeviceAttr a, int d), (v, a, d))
SLUICE_COUNT(g_num_queries, cudaFuncSetAttribute, (const void* k, cudaFuncAttribute a, int v), (k, a, v))

namespace sluice::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Paths, GpuVariants, testing::ValuesIn(kVariants), variant_name);

TEST_P(GpuVariants, ForwardNeitherAllocatesNorWaits) {
  MoeConfig config = small_config();
  config.has_shared_gate = true;
  const RandomLayer m = model(config);
  LayerOptions options = gpu_options(precision(), 2048);
  options.max_rows_per_expert = 8;
  const DataPath path = path_of(GetParam());
  static std::int64_t num_queries_ever = 0;  // of all variants: kernels that were met before are not asked about again
  for_each_gemm(m, options, [&](const Layer& layer, const GpuGemm&) {
    EXPECT_GT(g_num_calls.exchange(0), 0) << "the calls of the upload were not counted: this test sees nothing";
    for (std::int64_t tokens : {1, 16, 2048}) {
      const Buffer x = random_x(tokens, 256);
      const Outcome routing = run_on_gpu(layer, x.view());
      Buffer out(DType::kF32, {tokens, 256}), rows = random_x(128, 256), y(path.y, {128, 256});
      Buffer offset(DType::kI32, {17}), count(DType::kI32, {16});
      offset.fill_with([](std::int64_t i) { return static_cast<double>(8 * i); });
      count.fill_constant(5);
      const Twin xd(x), outd(out), ids(routing.topk_idx), weights(routing.topk_weight), rowsd(rows), yd(y);
      const Twin offsetd(offset), countd(count);
      const GpuWorkspace workspace(layer);
      const Ctx ctx = workspace.ctx();
      const auto forward_all = [&] {
        EXPECT_TRUE(layer.forward(xd.view(), outd.view(), ctx).is_ok());
        EXPECT_TRUE(layer.forward_routed({xd.view(), {}, {ids.view()}, weights.view(), {}}, outd.view(), ctx).is_ok());
        EXPECT_TRUE(layer.forward_grouped({rowsd.view(), {}}, {offsetd.view()}, yd.view(), ctx).is_ok());
        EXPECT_TRUE(layer.forward_masked({rowsd.view(), {}}, countd.view(), yd.view(), ctx).is_ok());
      };
      g_num_calls = 0;
      forward_all();
      EXPECT_EQ(g_num_calls, 0) << tokens << " tokens";
      num_queries_ever += g_num_queries.exchange(0);
      forward_all();
      EXPECT_EQ(g_num_queries, 0) << tokens << " tokens: asked again";
      EXPECT_TRUE(device::synchronise(kGpu).is_ok());
    }
  });
  EXPECT_GT(num_queries_ever, 0) << "not even the first forwards asked: the second count sees nothing";
}

}  // namespace
}  // namespace sluice::test
