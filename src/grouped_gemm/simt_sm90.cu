// The grouped GEMM by plain fused multiply-adds: any dtypes, any shape, any stride, f32 or bf16 out, with the CPU's bits
// (docs/numerics.md), because every output is the same chain in the same order. For what the tensor cores cannot do
// (f32, bf16 rows on e4m3 weights, rows that are no multiple of 16 bytes) and as their yardstick; 10 to 50 times slower.
#include "cuda/columns.cuh"
#include "cuda/launch.h"
#include "grouped_gemm/cuda.h"
#include "grouped_gemm/device_scales.h"
#include "grouped_gemm/tile_table.cuh"

namespace sluice::grouped_gemm {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

using namespace sluice::cuda;  // NOLINT: the device helpers, in this file alone

constexpr int kTokens = 16;
constexpr int kColumns = 64;
constexpr int kThreads = 256;
constexpr int kRowsPerThread = kTokens * kColumns / kThreads;
constexpr int kBlock = static_cast<int>(kScaleBlock);

struct Params : DeviceScales {
  const void* a;  // [R,K]
  DType a_dtype;
  std::int64_t a_row;
  const void* w;  // [L,N,K]
  DType w_dtype;
  std::int64_t w_group, w_row;
  void* out;  // [R,N]
  bool out_bf16;
  std::int64_t out_row;
  DeviceRowGroups groups;
  std::int32_t num_groups, num_rows, num_columns, depth, part_rows, column_tiles;
  bool row_scales;
};

struct Shared {
  float a[kTokens][kBlock];
  float w[kColumns][kBlock + 1];  // the pad keeps neighbouring columns in different banks
};

__device__ __forceinline__ float decode(const void* data, DType dtype, std::int64_t element) {
  switch (dtype) {
    case DType::kF32: return static_cast<const float*>(data)[element];
    case DType::kBF16: return f32_from_bf16(static_cast<const std::uint16_t*>(data)[element]);
    case DType::kI8: return static_cast<float>(static_cast<const std::int8_t*>(data)[element]);
    default: break;
  }
  const std::uint32_t byte = static_cast<const std::uint8_t*>(data)[element];
  std::uint32_t halves;  // e4m3 is exact in f16
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(byte)));
  float value;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo; }" : "=f"(value) : "r"(halves));
  return value;
}

__global__ void __launch_bounds__(kThreads) grouped_gemm_simt(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) std::byte memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const TileTable table = TileTable::at(memory + sizeof(Shared), p.num_groups);
  table.fill(p.groups, p.num_rows, kTokens, p.column_tiles);
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const int first_row = static_cast<int>(threadIdx.x) / kColumns * kRowsPerThread;
  const bool int8 = p.a_dtype == DType::kI8 && p.w_dtype == DType::kI8;
  TileWalk walk{table, kTokens, static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(gridDim.x)};
  Tile tile;
  while (walk.next(tile)) {
    const std::int32_t n0 = tile.column_tile * kColumns;
    const std::int32_t n = n0 + column;
    const int rows = min(kTokens, tile.end - tile.row);
    const int columns = min(kColumns, p.num_columns - n0);
    float acc[kRowsPerThread] = {};
    std::int32_t sum[kRowsPerThread] = {};
    for (std::int32_t k0 = 0; k0 < p.depth; k0 += kBlock) {
      const int width = min(kBlock, p.depth - k0);
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < kTokens * kBlock; i += kThreads) {
        const int r = i / kBlock;
        const int k = i % kBlock;
        const bool inside = r < rows && k < width;
        s.a[r][k] = inside ? decode(p.a, p.a_dtype, (tile.row + r) * p.a_row + k0 + k) : 0.0f;
      }
      for (int i = static_cast<int>(threadIdx.x); i < kColumns * kBlock; i += kThreads) {
        const int c = i / kBlock;
        const int k = i % kBlock;
        const bool inside = c < columns && k < width;
        s.w[c][k] = inside ? decode(p.w, p.w_dtype, tile.group * p.w_group + (n0 + c) * p.w_row + k0 + k) : 0.0f;
      }
      __syncthreads();
      float part[kRowsPerThread] = {};
      for (int k = 0; k < width; ++k) {
        const float w = s.w[column][k];
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) part[i] = __fmaf_rn(s.a[first_row + i][k], w, part[i]);
      }
      // A block of int8 products stays below 2^24: exact in fp32, summed in int32.
      float w_scale = 1.0f;
      if (p.w_scale != nullptr && !p.row_scales && n < p.num_columns) {
        const std::int32_t scale_row =
            n / p.part_rows * ((p.part_rows + kBlock - 1) / kBlock) + n % p.part_rows / kBlock;
        w_scale = p.w_scale[tile.group * p.w_scale_group + scale_row * p.w_scale_row + k0 / kBlock * p.w_scale_step];
      }
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        if (int8) {
          sum[i] += __float2int_rn(part[i]);
        } else if (p.row_scales || (p.a_scale == nullptr && p.w_scale == nullptr)) {
          acc[i] = __fadd_rn(acc[i], part[i]);
        } else {
          float scale = w_scale;
          if (p.a_scale != nullptr && first_row + i < rows) {
            const float a_scale = p.a_scale[k0 / kBlock * p.a_scale_step + (tile.row + first_row + i) * p.a_scale_row];
            scale = p.w_scale != nullptr ? __fmul_rn(a_scale, w_scale) : a_scale;
          }
          acc[i] = __fmaf_rn(part[i], scale, acc[i]);
        }
      }
    }
    if (n >= p.num_columns) continue;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (first_row + i >= rows) continue;
      const std::int64_t row = tile.row + first_row + i;
      float v = int8 ? __int2float_rn(sum[i]) : acc[i];
      if (p.row_scales) {
        float scale = p.w_scale != nullptr ? p.w_scale[tile.group * p.w_scale_group + n * p.w_scale_row] : 1.0f;
        if (p.a_scale != nullptr) {
          const float a_scale = p.a_scale[row * p.a_scale_row];
          scale = p.w_scale != nullptr ? __fmul_rn(a_scale, scale) : a_scale;
        }
        v = __fmul_rn(v, scale);
      }
      if (p.bias != nullptr) v = __fadd_rn(v, p.bias[tile.group * p.bias_group + n]);
      v = canonical(v);
      if (p.out_bf16) {
        static_cast<std::uint16_t*>(p.out)[row * p.out_row + n] = bf16_from_f32(v);
      } else {
        static_cast<float*>(p.out)[row * p.out_row + n] = v;
      }
    }
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

Status run_simt(const Args& args, const Ctx& ctx) {
  if (args.a.shape[0] == 0 || args.w.shape[0] == 0) return Status::ok();
  const device::Current current(args.a.device);
  SLUICE_TRY(current.status().with_context("grouped_gemm"));
  Params p = {};
  p.a = args.a.data;
  p.a_dtype = args.a.dtype;
  p.a_row = args.a.stride[0];
  p.w = args.w.data;
  p.w_dtype = args.w.dtype;
  p.w_group = args.w.stride[0];
  p.w_row = args.w.stride[1];
  p.set(args);
  p.out = args.out.data;
  p.out_bf16 = args.out.dtype == DType::kBF16;
  p.out_row = args.out.stride[0];
  p.groups = DeviceRowGroups::from(args.groups);
  p.num_groups = static_cast<std::int32_t>(args.w.shape[0]);
  p.num_rows = static_cast<std::int32_t>(args.a.shape[0]);
  p.num_columns = static_cast<std::int32_t>(args.w.shape[1]);
  p.depth = static_cast<std::int32_t>(args.w.shape[2]);
  p.part_rows = args.part_rows > 0 ? static_cast<std::int32_t>(args.part_rows) : p.num_columns;
  p.column_tiles = (p.num_columns + kColumns - 1) / kColumns;
  p.row_scales = has_row_scales(args);
  const std::size_t shared_bytes = sizeof(Shared) + static_cast<std::size_t>(TileTable::bytes(p.num_groups));
  DeviceFacts facts;
  SLUICE_TRY(facts_of(args.a.device.index, facts).with_context("grouped_gemm"));
  const std::int64_t row_tiles = p.num_rows / kTokens + std::min(p.num_groups, p.num_rows);
  const std::int64_t blocks = std::min<std::int64_t>(4 * facts.num_sms, row_tiles * p.column_tiles);
  return launch("grouped_gemm_simt", grouped_gemm_simt, static_cast<unsigned>(blocks), kThreads, shared_bytes,
                stream_of(ctx), p);
}

}  // namespace sluice::grouped_gemm
