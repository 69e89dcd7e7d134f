// Times DeepGEMM's grouped FP8 GEMMs on the grid: the contiguous layout (rows of an expert padded to 128) and, where no
// expert has more than 128 rows, the masked one. Only useful rows count as work. Prints JSON lines.
//   peer_deepgemm [part of a shape's name]
#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "../device_data.h"
#include "deepgemm.h"

namespace sluice::bench {
namespace {

constexpr std::int64_t kAlign = 128;
constexpr std::int64_t kMaskedRows = 128;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

decltype(&cuTensorMapEncodeTiled) encode_function() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  must(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
       "cuTensorMapEncodeTiled");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

CUtensorMap tensor_map(void* data, CUtensorMapDataType dtype, int elem_bytes, std::int64_t inner, std::int64_t outer,
                       int box_inner, int box_outer, int swizzle) {
  static const auto encode = encode_function();
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(outer)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(inner * elem_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(swizzle > 0 ? swizzle / elem_bytes : box_inner),
                             static_cast<cuuint32_t>(box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  const CUtensorMapSwizzle mode = swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                  : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                  : swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                  : CU_TENSOR_MAP_SWIZZLE_NONE;
  CUtensorMap map;
  const CUresult error = encode(&map, dtype, 2, data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, mode,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled: error %d\n", static_cast<int>(error));
    std::exit(1);
  }
  return map;
}

// One draw of rows in one of the two layouts.
struct Input {
  std::vector<std::int32_t> offset;
  std::int64_t padded_rows = 0;
  DeviceBuffer a, a_scale, layout, position, out;
};

Input make_input(const GridRow& row, const GemmShape& gemm, std::vector<std::int32_t> offset, bool masked) {
  Input input;
  std::vector<std::int32_t> source, group, counts, position(static_cast<std::size_t>(offset.back()));
  for (std::size_t e = 0; e + 1 < offset.size(); ++e) {
    const std::int64_t count = offset[e + 1] - offset[e];
    const std::int64_t padded = masked ? kMaskedRows : round_up(count, kAlign);
    for (std::int64_t i = 0; i < padded; ++i) {
      const bool used = i < count;
      if (used) position[static_cast<std::size_t>(offset[e] + i)] = static_cast<std::int32_t>(source.size());
      source.push_back(used ? static_cast<std::int32_t>(offset[e] + i) : -1);
      group.push_back(used ? static_cast<std::int32_t>(e) : -1);
    }
    counts.push_back(static_cast<std::int32_t>(count));
  }
  input.padded_rows = static_cast<std::int64_t>(source.size());
  const std::int64_t blocks = ceil_div(gemm.k, 128);
  const DeviceBuffer device_source = upload(source);
  input.a = DeviceBuffer(input.padded_rows * gemm.k);
  fill_rows_e4m3(input.a.as<std::uint8_t>(), device_source.as<std::int32_t>(), input.padded_rows, gemm.k);
  input.a_scale = DeviceBuffer(input.padded_rows * blocks * 4);
  if (masked) {  // [L, Kb, Mmax]
    for (std::int64_t e = 0; e < row.local_experts; ++e) {
      fill_a_scale(input.a_scale.as<float>() + e * blocks * kMaskedRows,
                   device_source.as<std::int32_t>() + e * kMaskedRows, kMaskedRows, blocks, 1, kMaskedRows);
    }
  } else {  // [Kb, M]
    fill_a_scale(input.a_scale.as<float>(), device_source.as<std::int32_t>(), input.padded_rows, blocks, 1,
                 input.padded_rows);
  }
  input.layout = upload(masked ? counts : group);
  input.position = upload(position);
  input.out = DeviceBuffer(input.padded_rows * gemm.n * 2);
  must(cudaMemset(input.out.as<void>(), 0xFF, static_cast<std::size_t>(input.padded_rows * gemm.n * 2)), "poison");
  must(cudaDeviceSynchronize(), "fill");
  input.offset = std::move(offset);
  return input;
}

struct Launch {
  float* w_scale;
  std::int32_t* layout;
  std::uint32_t m, n, k;
  CUtensorMap a, b, d, a_scale;
};

bool launch(const DeepGemmKernel& kernel, Launch& args, int smem_bytes, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = 132;
  config.blockDim = static_cast<unsigned>(128 + (kernel.block_m <= 64 ? 128 : 256));
  config.dynamicSmemBytes = static_cast<std::size_t>(smem_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(kernel.cluster), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* pointers[] = {&args.w_scale, &args.layout, &args.m, &args.n, &args.k, &args.a, &args.b, &args.d, &args.a_scale};
  return cudaLaunchKernelExC(&config, kernel.function, pointers) == cudaSuccess;
}

int shared_bytes(const DeepGemmKernel& kernel) {
  const auto up = [](int v, int to) { return (v + to - 1) / to * to; };
  const int scales = up((kernel.k + 127) / 128 * 4 * (128 % kernel.block_n == 0 ? 1 : 2), 8);
  const int stage = kernel.block_m * 128 + kernel.block_n * 128 + up(kernel.block_m * 4, 128);
  return up(kernel.block_m * kernel.block_n * 2, 1024) + 16 * 8 * 2 + scales + kernel.stages * stage;
}

void run_kernel(const DeepGemmKernel& kernel, const GridRow& row, const GemmShape& gemm, std::vector<Input>& inputs,
                const DeviceBuffer& w, const DeviceBuffer& w_scale) {
  const bool masked = kernel.groups > 0;
  const int smem_bytes = shared_bytes(kernel);
  must(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes), "shared memory");
  const int swizzle = kernel.block_n * 2 % 128 == 0 ? 128 : kernel.block_n * 2 % 64 == 0 ? 64 : 32;
  const std::int64_t blocks = ceil_div(gemm.k, 128);
  std::vector<Launch> launches;
  for (Input& input : inputs) {
    Launch args = {};
    args.w_scale = w_scale.as<float>();
    args.layout = input.layout.as<std::int32_t>();
    args.m = static_cast<std::uint32_t>(masked ? kMaskedRows : input.padded_rows);
    args.n = static_cast<std::uint32_t>(gemm.n);
    args.k = static_cast<std::uint32_t>(gemm.k);
    args.a = tensor_map(input.a.as<void>(), CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, gemm.k, input.padded_rows, 128,
                        kernel.block_m, 128);
    args.b = tensor_map(w.as<void>(), CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, gemm.k, gemm.n * row.local_experts, 128,
                        kernel.block_n, 128);
    args.d = tensor_map(input.out.as<void>(), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, gemm.n, input.padded_rows,
                        kernel.block_n, kernel.block_m, swizzle);
    args.a_scale = tensor_map(input.a_scale.as<void>(), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4,
                              masked ? kMaskedRows : input.padded_rows, blocks * (masked ? row.local_experts : 1),
                              kernel.block_m, 1, 0);
    launches.push_back(args);
  }
  if (!launch(kernel, launches[0], smem_bytes, nullptr) || cudaDeviceSynchronize() != cudaSuccess) {
    std::fprintf(stderr, "%s %s: %s\n", row.shape, gemm.name, cudaGetErrorString(cudaGetLastError()));
    std::exit(1);
  }
  const Output output{inputs[0].out.as<std::uint16_t>(), inputs[0].position.as<std::int32_t>(), gemm.n};
  const double worst = worst_error(row, gemm, inputs[0].offset, output);
  const Floor floor = gemm_floor(row, gemm, inputs[0].offset);
  Timing timing;
  if (worst < 1) {
    timing = time_graph(static_cast<int>(inputs.size()), floor.us, [&](cudaStream_t stream, int variant) {
      return launch(kernel, launches[static_cast<std::size_t>(variant)], smem_bytes, stream);
    });
  } else {
    timing.error = "wrong result";
  }
  char config[96];
  std::snprintf(config, sizeof(config), "%s %dx%d stages %d cluster %d%s", masked ? "masked" : "contiguous",
                kernel.block_m, kernel.block_n, kernel.stages, kernel.cluster, kernel.multicast_on_a ? " on a" : "");
  print_figure("deepgemm", row, gemm, inputs[0].offset, timing, worst, config);
}

int main_program(const char* only) {
  std::printf("{\"bench\":\"routes\",\"impl\":\"deepgemm\",\"digest\":\"%016llx\"}\n",
              static_cast<unsigned long long>(route_digest()));
  std::int64_t held_n = 0, held_k = 0, held_experts = 0;
  DeviceBuffer w[2], w_scale[2];
  for (const GridRow& row : grid()) {
    if (row.bf16 || std::strstr(row.shape, only) == nullptr) continue;
    for (int which = 0; which < 2; ++which) {
      const GemmShape gemm = gemms(row)[static_cast<std::size_t>(which)];
      const GemmShape up = gemms(row)[0];
      if (which == 0 && (held_n != up.n || held_k != up.k || held_experts != row.local_experts)) {
        for (int i = 0; i < 2; ++i) {
          const GemmShape g = gemms(row)[static_cast<std::size_t>(i)];
          w[i] = DeviceBuffer();
          w[i] = DeviceBuffer(row.local_experts * g.n * g.k);
          fill_e4m3(w[i].as<std::uint8_t>(), row.local_experts * g.n * g.k, Salt::kW);
          w_scale[i] = DeviceBuffer(row.local_experts * ceil_div(g.n, 128) * ceil_div(g.k, 128) * 4);
          fill_w_scale(w_scale[i].as<float>(), row.local_experts, ceil_div(g.n, 128), ceil_div(g.k, 128), true);
        }
        held_n = up.n;
        held_k = up.k;
        held_experts = row.local_experts;
      }
      const int variants = num_variants(gemm_floor(row, gemm, expert_offsets(row, 0)));
      for (const bool masked : {false, true}) {
        std::vector<Input> inputs;
        for (const DeepGemmKernel& kernel : deepgemm_kernels()) {
          if (kernel.n != gemm.n || kernel.k != gemm.k || (kernel.groups > 0) != masked) continue;
          if (masked && kernel.groups != row.local_experts) continue;
          if (inputs.empty()) {
            bool fits = true;
            for (int v = 0; v < variants; ++v) {
              std::vector<std::int32_t> offset = expert_offsets(row, v);
              for (std::size_t e = 0; masked && e + 1 < offset.size(); ++e)
                fits = fits && offset[e + 1] - offset[e] <= kMaskedRows;
              if (!fits) break;
              inputs.push_back(make_input(row, gemm, std::move(offset), masked));
            }
            if (!fits) break;
          }
          run_kernel(kernel, row, gemm, inputs, w[which], w_scale[which]);
        }
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::main_program(argc > 1 ? argv[1] : ""); }
