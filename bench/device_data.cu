// Hash fills, the sampled check and the graph timing of device_data.h.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <utility>

#include "device_data.h"

namespace sluice::bench {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

__device__ std::uint32_t hash(std::uint64_t index, std::uint32_t salt) {
  std::uint32_t x = static_cast<std::uint32_t>(index) ^ (static_cast<std::uint32_t>(index >> 32) * 0x9E3779B9u + salt);
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The sum of four bytes: bell-shaped, and exact in every format on the way to the last rounding.
__device__ float value(std::uint64_t index, Salt salt) {
  const std::uint32_t h = hash(index, static_cast<std::uint32_t>(salt) * 0x01000193u);
  const int sum = static_cast<int>((h & 255u) + (h >> 8 & 255u) + (h >> 16 & 255u) + (h >> 24)) - 510;
  return static_cast<float>(sum) * 0.25f;
}
__device__ float scale(std::uint64_t index, Salt salt) {
  const std::uint32_t h = hash(index, static_cast<std::uint32_t>(salt) * 0x01000193u);
  return static_cast<float>(65536 + (h & 0xFFFFu)) * (salt == Salt::kAScale ? 0x1p-24f : 0x1p-28f);
}
__device__ std::uint8_t e4m3(float v) { return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3); }
__device__ double from_e4m3(float v) {
  __nv_fp8_e4m3 q;
  q.__x = e4m3(v);
  return static_cast<double>(static_cast<float>(q));
}
__device__ double from_bf16(float v) { return static_cast<double>(__bfloat162float(__float2bfloat16_rn(v))); }

__global__ void fill_e4m3_kernel(std::uint8_t* out, std::int64_t count, Salt salt) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x * 4;
  for (std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4; i < count; i += step) {
    for (std::int64_t j = i; j < i + 4 && j < count; ++j) out[j] = e4m3(value(static_cast<std::uint64_t>(j), salt));
  }
}
__global__ void fill_bf16_kernel(std::uint16_t* out, std::int64_t count, Salt salt) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    out[i] = __bfloat16_as_ushort(__float2bfloat16_rn(value(static_cast<std::uint64_t>(i), salt)));
}
__global__ void fill_rows_kernel(std::uint8_t* out, const std::int32_t* source, std::int64_t k) {
  const std::int32_t from = source[blockIdx.x];
  for (std::int64_t i = threadIdx.x; i < k; i += blockDim.x) {
    out[blockIdx.x * k + i] =
        from < 0 ? std::uint8_t{0} : e4m3(value(static_cast<std::uint64_t>(from * k + i), Salt::kA));
  }
}
__global__ void fill_a_scale_kernel(float* out, const std::int32_t* source, std::int64_t blocks,
                                    std::int64_t row_stride, std::int64_t block_stride) {
  const std::int64_t from = source == nullptr ? blockIdx.x : source[blockIdx.x];
  for (std::int64_t b = threadIdx.x; b < blocks; b += blockDim.x) {
    out[b * block_stride + blockIdx.x * row_stride] =
        from < 0 ? 0.0f : scale(static_cast<std::uint64_t>(from * blocks + b), Salt::kAScale);
  }
}
__global__ void fill_w_scale_kernel(float* out, std::int64_t n_blocks, std::int64_t k_blocks, bool k_major) {
  for (std::int64_t i = threadIdx.x; i < n_blocks * k_blocks; i += blockDim.x) {
    const std::int64_t nb = i / k_blocks, kb = i % k_blocks;
    const std::int64_t at = k_major ? i : kb * n_blocks + nb;
    out[blockIdx.x * n_blocks * k_blocks + at] =
        scale(static_cast<std::uint64_t>(blockIdx.x * n_blocks * k_blocks + i), Salt::kWScale);
  }
}

struct CheckParams {
  Output output;
  const std::int32_t* row;     // [samples] logical row
  const std::int32_t* expert;  // [samples]
  std::int64_t n, k;
  bool bf16;
  float* ratio;  // [samples, columns]
};
constexpr int kCheckColumns = 48;
__global__ void check_kernel(CheckParams p) {
  const std::int64_t row = p.row[blockIdx.x], expert = p.expert[blockIdx.x];
  // First and last columns are always among the samples.
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * (p.n - 1) / (kCheckColumns - 1);
  const std::int64_t k_blocks = (p.k + 127) / 128, n_blocks = (p.n + 127) / 128;
  double sum = 0, magnitude = 0;
  for (std::int64_t i = threadIdx.x; i < p.k; i += 32) {
    const float a = value(static_cast<std::uint64_t>(row * p.k + i), Salt::kA);
    const float w = value(static_cast<std::uint64_t>((expert * p.n + column) * p.k + i), Salt::kW);
    double product = 0;
    if (p.bf16) {
      product = from_bf16(a) * from_bf16(w);
    } else {
      const auto a_at = static_cast<std::uint64_t>(row * k_blocks + i / 128);
      const auto w_at = static_cast<std::uint64_t>((expert * n_blocks + column / 128) * k_blocks + i / 128);
      product = from_e4m3(a) * scale(a_at, Salt::kAScale) * (from_e4m3(w) * scale(w_at, Salt::kWScale));
    }
    sum += product;
    magnitude += fabs(product);
  }
  for (int d = 16; d > 0; d /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, d);
    magnitude += __shfl_xor_sync(0xFFFFFFFFu, magnitude, d);
  }
  if (threadIdx.x != 0) return;
  const std::int64_t at = p.output.position == nullptr ? row : p.output.position[row];
  const double got =
      static_cast<double>(__bfloat162float(__ushort_as_bfloat16(p.output.data[at * p.output.row_stride + column])));
  const double ratio = fabs(got - sum) / (0x1p-8 * fabs(sum) + 0x1p-12 * magnitude);
  p.ratio[blockIdx.x * kCheckColumns + blockIdx.y] = got == got ? static_cast<float>(ratio) : 1e30f;
}

constexpr int kFillBlocks = 132 * 8;
constexpr int kFillThreads = 256;

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// Host side
// ---------------------------------------------------------------------------------------------------------

void fill_e4m3(std::uint8_t* out, std::int64_t count, Salt salt) {
  fill_e4m3_kernel<<<kFillBlocks, kFillThreads>>>(out, count, salt);
  must(cudaGetLastError(), "fill_e4m3");
}
void fill_bf16(std::uint16_t* out, std::int64_t count, Salt salt) {
  fill_bf16_kernel<<<kFillBlocks, kFillThreads>>>(out, count, salt);
  must(cudaGetLastError(), "fill_bf16");
}
void fill_rows_e4m3(std::uint8_t* out, const std::int32_t* source, std::int64_t rows, std::int64_t k) {
  if (rows > 0) fill_rows_kernel<<<static_cast<unsigned>(rows), kFillThreads>>>(out, source, k);
  must(cudaGetLastError(), "fill_rows_e4m3");
}
void fill_a_scale(float* out, const std::int32_t* source, std::int64_t rows, std::int64_t blocks,
                  std::int64_t row_stride, std::int64_t block_stride) {
  if (rows > 0) fill_a_scale_kernel<<<static_cast<unsigned>(rows), 64>>>(out, source, blocks, row_stride, block_stride);
  must(cudaGetLastError(), "fill_a_scale");
}
void fill_w_scale(float* out, std::int64_t experts, std::int64_t n_blocks, std::int64_t k_blocks, bool k_major) {
  fill_w_scale_kernel<<<static_cast<unsigned>(experts), kFillThreads>>>(out, n_blocks, k_blocks, k_major);
  must(cudaGetLastError(), "fill_w_scale");
}

double worst_error(const GridRow& row, const GemmShape& gemm, const std::vector<std::int32_t>& offset,
                   const Output& output) {
  std::vector<std::int32_t> rows, experts;
  const std::int64_t num_rows = offset.back();
  const std::int64_t samples = std::min<std::int64_t>(num_rows, 257);
  for (std::int64_t i = 0; i < samples; ++i) {
    const std::int64_t r = samples == 1 ? 0 : i * (num_rows - 1) / (samples - 1);
    const auto next = std::upper_bound(offset.begin(), offset.end(), static_cast<std::int32_t>(r));
    rows.push_back(static_cast<std::int32_t>(r));
    experts.push_back(static_cast<std::int32_t>(next - offset.begin() - 1));
  }
  if (rows.empty()) return 0;
  const DeviceBuffer row_list = upload(rows), expert_list = upload(experts);
  std::vector<float> ratio(rows.size() * kCheckColumns, 0.0f);
  const DeviceBuffer device_ratio = upload(ratio);
  const CheckParams params{output,   row_list.as<std::int32_t>(), expert_list.as<std::int32_t>(), gemm.n, gemm.k,
                           row.bf16, device_ratio.as<float>()};
  check_kernel<<<dim3(static_cast<unsigned>(rows.size()), kCheckColumns), 32>>>(params);
  must(cudaGetLastError(), "check_kernel");
  must(cudaMemcpy(ratio.data(), device_ratio.as<float>(), ratio.size() * sizeof(float), cudaMemcpyDeviceToHost),
       "check");
  return static_cast<double>(*std::max_element(ratio.begin(), ratio.end()));
}

Timing time_graph(int num_variants, double expected_us, const std::function<bool(cudaStream_t, int)>& run) {
  Timing timing;
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  // A graph of about 2 ms keeps the cost of its start below a thousandth; every variant comes equally often.
  const int rounds = std::max(1, static_cast<int>(2000.0 / std::max(expected_us * num_variants, 1.0)));
  const int calls = rounds * num_variants;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  bool good = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
  for (int i = 0; good && i < calls; ++i) good = run(stream, i % num_variants);
  good = cudaStreamEndCapture(stream, &graph) == cudaSuccess && good &&
         cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess;
  cudaEvent_t begin = nullptr, end = nullptr;
  must(cudaEventCreate(&begin), "cudaEventCreate");
  must(cudaEventCreate(&end), "cudaEventCreate");
  if (good) {
    constexpr int kWarmups = 3;
    constexpr int kReplays = 15;
    std::vector<double> us;
    for (int i = 0; good && i < kWarmups + kReplays; ++i) {
      float ms = 0;
      good = cudaEventRecord(begin, stream) == cudaSuccess && cudaGraphLaunch(exec, stream) == cudaSuccess &&
             cudaEventRecord(end, stream) == cudaSuccess && cudaEventSynchronize(end) == cudaSuccess &&
             cudaEventElapsedTime(&ms, begin, end) == cudaSuccess;
      if (i >= kWarmups) us.push_back(static_cast<double>(ms) * 1e3 / calls);
    }
    std::sort(us.begin(), us.end());
    timing = {us[us.size() / 2], us.front(), us.back(), {}};
  }
  if (!good) {
    const cudaError_t error = cudaGetLastError();
    timing.error = std::string("capture or replay failed: ") + cudaGetErrorString(error);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  if (exec != nullptr) cudaGraphExecDestroy(exec);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return timing;
}

namespace {
// Quotes and backslashes of a message inside a JSON string; none of ours has control characters.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}
}  // namespace

void print_figure(const char* impl, const GridRow& row, const GemmShape& gemm, const std::vector<std::int32_t>& offset,
                  const Timing& timing, double worst, const std::string& config) {
  const Floor floor = gemm_floor(row, gemm, offset);
  std::printf(
      "{\"bench\":\"grouped_gemm\",\"impl\":\"%s\",\"shape\":\"%s\",\"tokens\":%lld,\"gemm\":\"%s\",\"rows\":%d,"
      "\"active_experts\":%lld",
      impl, row.shape, static_cast<long long>(row.tokens), gemm.name, offset.back(),
      static_cast<long long>(active_experts(offset)));
  if (timing.error.empty()) {
    std::printf(
        ",\"us\":%.2f,\"min_us\":%.2f,\"max_us\":%.2f,\"floor_us\":%.2f,\"share_of_floor\":%.3f,\"bytes\":%.0f,"
        "\"flops\":%.0f",
        timing.median_us, timing.min_us, timing.max_us, floor.us, floor.us / timing.median_us, floor.bytes,
        floor.flops);
  } else {
    std::printf(",\"error\":\"%s\"", escaped(timing.error).c_str());
  }
  std::printf(",\"worst_error\":%.3g,\"config\":\"%s\"}\n", worst, escaped(config).c_str());
  std::fflush(stdout);
}

std::uint64_t route_digest() {
  std::uint64_t digest = 0xCBF29CE484222325ULL;
  for (const GridRow& row : grid()) {
    for (std::int32_t offset : expert_offsets(row, 0))
      digest = (digest ^ static_cast<std::uint64_t>(offset)) * 0x100000001B3ULL;
  }
  return digest;
}

}  // namespace sluice::bench
