// Times every tile of the tensor-core grouped GEMM on the grid of docs/performance.md, after comparing its bits with the
// first tile's and its values with the plain kernel's: the table choose_tile (src/grouped_gemm/gpu_config.cpp) is made from.
//   gemm_tiles_cuda [--dtype e4m3|e4m3-row|int8|bf16] [--shape PREFIX] [--tile NAME] [--once] [--all]
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "grouped_gemm/cuda.h"

namespace {

using namespace sluice;  // NOLINT: a program, not a header
using grouped_gemm::Args;
using grouped_gemm::GpuProblem;
using grouped_gemm::GpuTile;

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void require(const Status& status) {
  if (status.is_ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

struct DeviceMemory {
  void* data = nullptr;
  explicit DeviceMemory(std::int64_t bytes) {
    require(cudaMalloc(&data, std::max<std::int64_t>(bytes, 256)), "malloc");
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data); }
};

__device__ std::uint32_t mix(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x7FB5D329728EA185ull;
  x = (x ^ (x >> 27)) * 0x81DADEF4BC2DD44Dull;
  return static_cast<std::uint32_t>(x >> 32);
}
// Near enough to a normal distribution: the sum of four bytes.
__global__ void fill(void* data, DType dtype, std::int64_t count, std::uint64_t seed, float scale, float offset) {
  for (std::int64_t i = blockIdx.x * 256LL + threadIdx.x; i < count; i += gridDim.x * 256LL) {
    const std::uint32_t r = mix(seed * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(i));
    const float v =
        scale * (static_cast<float>((r & 255) + (r >> 8 & 255) + (r >> 16 & 255) + (r >> 24)) - 510.0f) / 147.8f +
        offset;
    if (dtype == DType::kF32) static_cast<float*>(data)[i] = v;
    if (dtype == DType::kBF16)
      static_cast<std::uint16_t*>(data)[i] = static_cast<std::uint16_t>(__float_as_uint(v) >> 16);
    if (dtype == DType::kI8)
      static_cast<std::int8_t*>(data)[i] = static_cast<std::int8_t>(fminf(fmaxf(v * 32.0f, -127.0f), 127.0f));
    if (dtype == DType::kE4M3) {
      std::uint16_t packed;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(0.0f), "f"(v));
      static_cast<std::uint8_t*>(data)[i] = static_cast<std::uint8_t>(packed);
    }
  }
}
void fill_tensor(const TensorView& view, std::uint64_t seed, float scale, float offset = 0.0f) {
  fill<<<1056, 256>>>(view.data, view.dtype, view.num_elements(), seed, scale, offset);
  require(cudaGetLastError(), "fill");
}

// [0]: elements whose bits differ; as doubles [1], [2]: squared distance and squared norm.
__global__ void compare(const std::uint16_t* x, const std::uint16_t* y, std::int64_t count, unsigned long long* differ,
                        double* sums) {
  double distance = 0.0, norm = 0.0;
  unsigned long long bits = 0;
  for (std::int64_t i = blockIdx.x * 256LL + threadIdx.x; i < count; i += gridDim.x * 256LL) {
    const float a = __uint_as_float(static_cast<std::uint32_t>(x[i]) << 16);
    const float b = __uint_as_float(static_cast<std::uint32_t>(y[i]) << 16);
    bits += x[i] != y[i];
    distance += static_cast<double>(a - b) * (a - b);
    norm += static_cast<double>(b) * b;
  }
  atomicAdd(differ, bits);
  atomicAdd(sums, distance);
  atomicAdd(sums + 1, norm);
}

struct Shape {
  std::string name;
  std::int64_t groups, n, k, parts, rows;
};

constexpr int kRoutings = 6;  // draws of the routing in one graph, so that no draw's weights stay in L2

double time_us(const std::function<void(cudaStream_t, int)>& launch, int repeats) {
  cudaStream_t stream;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < kRoutings; ++i) launch(stream, i);
  require(cudaStreamEndCapture(stream, &graph), "capture");
  require(cudaGraphInstantiate(&exec, graph, 0), "graph");
  std::vector<cudaEvent_t> events(static_cast<std::size_t>(repeats) + 1);
  for (cudaEvent_t& e : events) require(cudaEventCreate(&e), "event");
  require(cudaGraphLaunch(exec, stream), "launch");
  for (int i = 0; i <= repeats; ++i) {
    require(cudaEventRecord(events[static_cast<std::size_t>(i)], stream), "event");
    if (i < repeats) require(cudaGraphLaunch(exec, stream), "launch");
  }
  require(cudaStreamSynchronize(stream), "run");
  std::vector<float> ms;
  for (int i = 0; i < repeats; ++i) {
    float t = 0;
    cudaEventElapsedTime(&t, events[static_cast<std::size_t>(i)], events[static_cast<std::size_t>(i) + 1]);
    ms.push_back(t);
  }
  std::sort(ms.begin(), ms.end());
  for (cudaEvent_t e : events) cudaEventDestroy(e);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return 1e3 * ms[ms.size() / 2] / kRoutings;
}

}  // namespace

int main(int argc, char** argv) {
  std::string dtype_name = "e4m3";
  std::string prefix;
  std::string only;
  bool all = false;
  bool once = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--dtype") == 0 && i + 1 < argc) dtype_name = argv[++i];
    if (std::strcmp(argv[i], "--shape") == 0 && i + 1 < argc) prefix = argv[++i];
    if (std::strcmp(argv[i], "--tile") == 0 && i + 1 < argc) only = argv[++i];
    if (std::strcmp(argv[i], "--all") == 0) all = true;
    if (std::strcmp(argv[i], "--once") == 0) once = true;
  }
  const DType dtype = dtype_name == "bf16" ? DType::kBF16 : dtype_name == "int8" ? DType::kI8 : DType::kE4M3;
  const bool row_scales = dtype_name == "e4m3-row" || dtype == DType::kI8;
  const Device gpu{DeviceKind::kCuda, 0};

  std::vector<Shape> shapes;
  const auto add = [&](const std::string& name, std::int64_t e, std::int64_t h, std::int64_t i,
                       const std::vector<std::int64_t>& rows) {
    for (std::int64_t r : rows) {
      shapes.push_back({name + " up " + std::to_string(r), e, 2 * i, h, 2, r});
      shapes.push_back({name + " down " + std::to_string(r), e, h, i, 1, r});
    }
  };
  if (dtype != DType::kBF16) add("dsv3", 256, 7168, 2048, {8, 256, 1024, 4096, 65536});
  add("ep8", 32, 7168, 2048, {260, 999, 32677});
  if (dtype != DType::kBF16) add("tp8", 256, 7168, 256, {8, 64, 256, 1024, 4096, 16384, 65536});
  add("qwen3", 128, 2048, 768, {8, 256, 4096, 65536});
  if (dtype == DType::kBF16) add("mixtral", 8, 4096, 14336, {8192});

  for (const Shape& shape : shapes) {
    if (!prefix.empty() && shape.name.rfind(prefix, 0) != 0) continue;
    const std::int64_t bytes = size_bytes(dtype);
    const std::int64_t part = shape.n / shape.parts;
    DeviceMemory w(shape.groups * shape.n * shape.k * bytes), a(shape.rows * shape.k * bytes),
        out(shape.rows * shape.n * 2), first(shape.rows * shape.n * 2),
        w_scale(shape.groups * shape.n * ceil_div(shape.k, 128) * 4), a_scale(shape.rows * ceil_div(shape.k, 128) * 4),
        offsets(kRoutings * (shape.groups + 1) * 4), sums(64);
    Args args;
    args.a = TensorView::dense(a.data, dtype, {shape.rows, shape.k}, gpu);
    args.w = TensorView::dense(w.data, dtype, {shape.groups, shape.n, shape.k}, gpu);
    args.out = TensorView::dense(out.data, DType::kBF16, {shape.rows, shape.n}, gpu);
    args.part_rows = part;
    fill_tensor(args.a, 1, 1.0f);
    fill_tensor(args.w, 2, 1.0f);
    if (dtype != DType::kBF16) {
      args.a_scale =
          TensorView::dense(a_scale.data, DType::kF32, {row_scales ? 1 : ceil_div(shape.k, 128), shape.rows}, gpu);
      args.w_scale = row_scales ? TensorView::dense(w_scale.data, DType::kF32, {shape.groups, shape.n, 1}, gpu)
                                : TensorView::dense(
                                      w_scale.data, DType::kF32,
                                      {shape.groups, shape.parts * ceil_div(part, 128), ceil_div(shape.k, 128)}, gpu);
      fill_tensor(args.a_scale, 3, 0.1f, 1.0f);
      fill_tensor(args.w_scale, 4, 0.1f, 1.0f);
    }
    // Uniform routing: every token takes 8 distinct experts, here 8 draws without replacement approximated per row.
    std::mt19937_64 random(7);
    std::vector<std::int32_t> host(static_cast<std::size_t>(kRoutings * (shape.groups + 1)));
    double active = 0;
    for (int i = 0; i < kRoutings; ++i) {
      std::vector<std::int32_t> count(static_cast<std::size_t>(shape.groups));
      std::int64_t left = shape.rows;
      while (left > 0) {
        std::vector<std::int32_t> drawn;
        for (std::int64_t s = 0; s < std::min<std::int64_t>(8, left); ++s) {
          std::int32_t e;
          do e = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(shape.groups));
          while (std::find(drawn.begin(), drawn.end(), e) != drawn.end());
          drawn.push_back(e);
          ++count[static_cast<std::size_t>(e)];
        }
        left -= static_cast<std::int64_t>(drawn.size());
      }
      std::int32_t sum = 0;
      for (std::int64_t e = 0; e <= shape.groups; ++e) {
        host[static_cast<std::size_t>(i * (shape.groups + 1) + e)] = sum;
        if (e < shape.groups)
          sum += count[static_cast<std::size_t>(e)], active += count[static_cast<std::size_t>(e)] > 0;
      }
    }
    active /= kRoutings;
    require(cudaMemcpy(offsets.data, host.data(), host.size() * 4, cudaMemcpyHostToDevice), "offsets");
    const auto routed = [&](int i) {
      Args r = args;
      r.groups = RowGroups::contiguous({TensorView::dense(
          static_cast<std::int32_t*>(offsets.data) + i * (shape.groups + 1), DType::kI32, {shape.groups + 1}, gpu)});
      return r;
    };
    GpuProblem problem{shape.groups, shape.rows, shape.n, shape.k, part, bytes, dtype == DType::kE4M3 && !row_scales};
    const double flops = 2.0 * static_cast<double>(shape.rows * shape.n) * static_cast<double>(shape.k);
    const double moved = active * static_cast<double>(shape.n * shape.k * bytes) +
                         static_cast<double>(shape.rows * (shape.k * bytes + shape.n * 2));
    const double floor_us = 1e6 * std::max(moved / 4.5e12, flops / (dtype == DType::kBF16 ? 0.79e15 : 1.49e15));

    const auto check = [&](const char* what, const Args& r, const void* against, bool bits) {
      unsigned long long differ = 0;
      double sum[2] = {};
      require(cudaMemset(sums.data, 0, 64), "memset");
      compare<<<1056, 256>>>(static_cast<const std::uint16_t*>(r.out.data), static_cast<const std::uint16_t*>(against),
                             r.out.num_elements(), static_cast<unsigned long long*>(sums.data),
                             static_cast<double*>(sums.data) + 1);
      require(cudaMemcpy(&differ, sums.data, 8, cudaMemcpyDeviceToHost), "compare");
      require(cudaMemcpy(sum, static_cast<double*>(sums.data) + 1, 16, cudaMemcpyDeviceToHost), "compare");
      const double error = std::sqrt(sum[0] / std::max(sum[1], 1e-300));
      if ((bits && differ != 0) || !(error < 5e-3)) {
        std::printf("  WRONG %s: %llu of %lld differ, relative L2 %.3g, norm %.3g\n", what, differ,
                    static_cast<long long>(r.out.num_elements()), error, std::sqrt(sum[1]));
      }
    };
    const bool plain = shape.rows <= 1100 && shape.groups * shape.n * shape.k < (std::int64_t{1} << 31);
    std::printf("%-18s floor %7.1f us:", shape.name.c_str(), floor_us);
    const double mean = static_cast<double>(shape.rows) /
                        std::min<double>(static_cast<double>(shape.groups), static_cast<double>(shape.rows));
    double best = 1e30;
    std::string best_name;
    bool have_first = false;
    std::vector<GpuTile> tiles;
    for (std::int64_t tokens : {8, 16, 32, 64, 96}) {
      for (std::int64_t weight_rows : {128, 256}) tiles.push_back({false, tokens, weight_rows});
    }
    tiles.push_back({true, 128, 256});
    for (GpuTile tile : tiles) {
      const auto tokens = static_cast<double>(tile.tokens);
      if (!all && (tokens < 0.7 * std::min(mean, 128.0) || (tokens > 5 * mean && tile.tokens > 16))) continue;
      char name[64];
      std::snprintf(name, sizeof name, "%c%lldx%lld", tile.tokens_on_m ? 't' : 'w', static_cast<long long>(tile.tokens),
                    static_cast<long long>(tile.weight_rows));
      if (!only.empty() && only != name) continue;
      tile = grouped_gemm::with_stages(tile, problem);
      require(cudaMemset(out.data, 0xFF, static_cast<std::size_t>(args.out.num_bytes())), "poison");
      Args r = routed(0);
      require(run_wgmma_tile(r, {}, tile));
      require(cudaDeviceSynchronize(), "kernel");
      if (!have_first) {
        have_first = true;
        require(
            cudaMemcpy(first.data, out.data, static_cast<std::size_t>(args.out.num_bytes()), cudaMemcpyDeviceToDevice),
            "copy");
        if (plain) {
          Args simt = r;
          DeviceMemory simt_out(args.out.num_bytes());
          simt.out.data = simt_out.data;
          require(grouped_gemm::run_simt(simt, {}));
          require(cudaDeviceSynchronize(), "simt");
          check("against the plain kernel", r, simt_out.data, false);
        }
      } else {
        check(name, r, first.data, true);
      }
      if (once) continue;
      const double us = time_us(
          [&](cudaStream_t stream, int i) {
            require(run_wgmma_tile(routed(i), {stream, {}, 0}, tile));
          },
          floor_us > 500 ? 5 : 15);
      std::printf(" %s %.1f", name, us);
      if (us < best) best = us, best_name = name;
    }
    std::printf(" | best %s %.1f us, %.2f of floor, %.0f TFLOP/s; chosen %s\n", best_name.c_str(), best,
                floor_us / best, flops / best * 1e-6,
                grouped_gemm::choose_tile(problem).to_string().substr(0, 40).c_str());
    std::fflush(stdout);
  }
  return 0;
}
