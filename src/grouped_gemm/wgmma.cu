// Host side of the tensor-core grouped GEMM: tensor maps and launch.
#include "cuda/launch.h"
#include "grouped_gemm/cuda.h"
#include "grouped_gemm/tile_table.cuh"
#include "grouped_gemm/wgmma.h"

namespace sluice::grouped_gemm {

namespace {

using wgmma::Scaling;

Scaling scaling_of(const Args& args) {
  if (!args.a_scale.is_present()) return Scaling::kNone;
  return scales_by_row(args) ? Scaling::kRow : Scaling::kBlock;
}

wgmma::Kernel kernel_for(const Args& args, const GpuTile& tile) {
  if (args.a.dtype == DType::kBF16) return wgmma::bf16_kernel(tile);
  if (args.a.dtype == DType::kI8) return wgmma::int8_row_kernel(tile);
  return scaling_of(args) == Scaling::kRow ? wgmma::fp8_row_kernel(tile) : wgmma::fp8_block_kernel(tile);
}

// The driver's encoder, found without linking the driver.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
EncodeTiled encoder() {
  static const EncodeTiled found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<EncodeTiled>(error == cudaSuccess && result == cudaDriverEntryPointSuccess ? entry
                                                                                                       : nullptr);
  }();
  return found;
}

// A K-major operand: extents and strides (of the outer axes, in bytes) from K outwards, boxes of 128 bytes of K by
// `box_rows` rows. What lies outside the extents arrives as zeros.
template <int kRank>
Status encode(std::string_view what, CUtensorMap& map, const TensorView& view, const cuuint64_t (&extent)[kRank],
              const cuuint64_t (&stride_bytes)[kRank - 1], cuuint32_t box_rows) {
  const EncodeTiled encode_tiled = encoder();
  if (encode_tiled == nullptr)
    return {StatusCode::kUnsupported,
            "grouped_gemm: the driver has no cuTensorMapEncodeTiled (CUDA 12.0 or newer is needed)"};
  const bool bf16 = view.dtype == DType::kBF16;
  cuuint32_t box[kRank] = {static_cast<cuuint32_t>(128 / size_bytes(view.dtype)), box_rows};
  cuuint32_t steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    steps[i] = 1;
    if (i >= 2) box[i] = 1;
  }
  const CUresult result =
      encode_tiled(&map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, kRank, view.data,
                   extent, stride_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status::ok();
  return {StatusCode::kInternal, "grouped_gemm: the tensor map of " + std::string(what) + " = " + view.to_string() +
                                     " was refused (CUresult " + std::to_string(static_cast<int>(result)) + ")"};
}

}  // namespace

Status run_wgmma(const Args& args, const Ctx& ctx) { return run_wgmma_tile(args, ctx, choose_tile(problem_of(args))); }

Status run_wgmma_tile(const Args& args, const Ctx& ctx, const GpuTile& tile) {
  const std::int64_t num_rows = args.a.shape[0];
  const std::int64_t depth = args.w.shape[2];
  if (num_rows == 0) return Status::ok();
  SLUICE_TRY(check_alignment(args));
  const cuda::DeviceGuard guard(args.a.device.index);
  SLUICE_TRY(cuda::to_status(guard.error(), "grouped_gemm: set device"));
  const GpuProblem problem = problem_of(args);
  const std::int64_t parts = problem.n / problem.part_rows;
  const std::int64_t bytes = problem.element_bytes;

  wgmma::Params p = {};
  const cuuint64_t w_extent[4] = {static_cast<cuuint64_t>(depth), static_cast<cuuint64_t>(problem.part_rows),
                                  static_cast<cuuint64_t>(parts), static_cast<cuuint64_t>(problem.num_groups)};
  const cuuint64_t w_stride[3] = {static_cast<cuuint64_t>(args.w.stride[1] * bytes),
                                  static_cast<cuuint64_t>(args.w.stride[1] * bytes * problem.part_rows),
                                  static_cast<cuuint64_t>(args.w.stride[0] * bytes)};
  SLUICE_TRY(encode<4>("w", p.weights, args.w, w_extent, w_stride, static_cast<cuuint32_t>(tile.weight_rows)));
  const cuuint64_t a_extent[2] = {static_cast<cuuint64_t>(depth), static_cast<cuuint64_t>(num_rows)};
  const cuuint64_t a_stride[1] = {static_cast<cuuint64_t>(args.a.stride[0] * bytes)};
  SLUICE_TRY(encode<2>("a", p.tokens, args.a, a_extent, a_stride, static_cast<cuuint32_t>(tile.tokens)));
  p.groups = cuda::DeviceRowGroups::from(args.groups);
  p.num_groups = static_cast<std::int32_t>(problem.num_groups);
  p.num_rows = static_cast<std::int32_t>(num_rows);
  p.num_k_steps = static_cast<std::int32_t>(ceil_div(depth * bytes, 128));
  p.part_rows = static_cast<std::int32_t>(problem.part_rows);
  p.column_tiles_per_part = static_cast<std::int32_t>(ceil_div(problem.part_rows, tile.weight_rows));
  p.column_tiles = static_cast<std::int32_t>(p.column_tiles_per_part * parts);
  p.scale_rows_per_part = static_cast<std::int32_t>(ceil_div(problem.part_rows, kScaleBlock));
  p.num_stages = static_cast<std::uint32_t>(tile.stages);
  if (args.a_scale.is_present()) {
    p.a_scale = args.a_scale.as<const float>();
    p.a_scale_step = args.a_scale.stride[0];
    p.a_scale_row = args.a_scale.stride[1];
    p.w_scale = args.w_scale.as<const float>();
    p.w_scale_group = args.w_scale.stride[0];
    p.w_scale_row = args.w_scale.stride[1];
    p.w_scale_step = args.w_scale.stride[2];
  }
  if (args.bias.is_present()) {
    p.bias = args.bias.as<const float>();
    p.bias_group = args.bias.stride[0];
  }
  p.out = args.out.as<std::uint16_t>();
  p.out_row = args.out.stride[0];
  p.wide = reinterpret_cast<std::uintptr_t>(args.out.data) % 16 == 0 && args.out.stride[0] % 8 == 0 &&
           problem.part_rows % 8 == 0;

  const wgmma::Kernel kernel = kernel_for(args, tile);
  if (kernel == nullptr) return {StatusCode::kInternal, "grouped_gemm: no kernel was compiled for " + tile.to_string()};
  SLUICE_TRY(cuda::to_status(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(tile.shared_bytes)),
      "grouped_gemm: shared memory of the kernel"));
  int num_sms = 0;
  SLUICE_TRY(cuda::to_status(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, args.a.device.index),
                             "grouped_gemm: number of SMs"));
  // No more blocks than there can be tiles: at most one partly filled row tile a group.
  const std::int64_t row_tiles = num_rows / tile.tokens + std::min(problem.num_groups, num_rows);
  const std::int64_t blocks = std::min<std::int64_t>(num_sms, row_tiles * p.column_tiles);
  return cuda::launch("grouped_gemm_wgmma", kernel, static_cast<unsigned>(blocks), wgmma::kThreads,
                      static_cast<std::size_t>(tile.shared_bytes), cuda::stream_of(ctx), p);
}

}  // namespace sluice::grouped_gemm
