// The driver's encoder, found through the runtime.
#include "cuda/tensor_map.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

namespace sluice::cuda {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled encoder() {
  static const EncodeTiled found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return found;
}

// A map in the 128-byte swizzle; extents, strides and box from the innermost axis outwards.
Status encode(std::string_view what, const TensorView& view, CUtensorMapDataType type,
              std::span<const cuuint64_t> extent, std::span<const cuuint64_t> stride_bytes,
              std::span<const cuuint32_t> box, CUtensorMap& map) {
  const EncodeTiled function = encoder();
  if (function == nullptr) {
    return {StatusCode::kUnsupported,
            fmt::format("{}: the driver has no cuTensorMapEncodeTiled (12.0 is needed)", what)};
  }
  constexpr cuuint32_t kSteps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      function(&map, type, static_cast<cuuint32_t>(extent.size()), view.data, extent.data(), stride_bytes.data(),
               box.data(), kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status::ok();
  return {StatusCode::kInternal,
          fmt::format("{}: the tensor map of {} with boxes of {} by {} was refused (CUresult {})", what,
                      view.to_string(), box[1], box[0], static_cast<int>(result))};
}

}  // namespace

Status make_operand_map(std::string_view what, const TensorView& view, std::span<const cuuint64_t> extent,
                        std::span<const cuuint64_t> stride_bytes, int box_rows, CUtensorMap& map) {
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(128 / size_bytes(view.dtype)), static_cast<cuuint32_t>(box_rows),
                             1, 1, 1};
  const CUtensorMapDataType type =
      view.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return encode(what, view, type, extent, stride_bytes, box, map);
}

Status make_output_map(std::string_view what, const TensorView& view, std::int64_t part_columns, std::int64_t parts,
                       int box_blocks, int box_rows, CUtensorMap& map) {
  constexpr std::int64_t kBlockColumns = 64;  // 128 bytes
  const cuuint64_t extent[4] = {kBlockColumns, static_cast<cuuint64_t>(view.shape[0]),
                                static_cast<cuuint64_t>(part_columns / kBlockColumns), static_cast<cuuint64_t>(parts)};
  const std::int64_t elem_bytes = size_bytes(view.dtype);
  const cuuint64_t stride_bytes[3] = {static_cast<cuuint64_t>(view.stride[0] * elem_bytes),
                                      static_cast<cuuint64_t>(kBlockColumns * elem_bytes),
                                      static_cast<cuuint64_t>(part_columns * elem_bytes)};
  const cuuint32_t box[4] = {kBlockColumns, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_blocks), 1};
  return encode(what, view, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, extent, stride_bytes, box, map);
}

Status make_rows_map(std::string_view what, const TensorView& view, int box_rows, CUtensorMap& map) {
  const cuuint64_t extent[2] = {static_cast<cuuint64_t>(view.shape[1]), static_cast<cuuint64_t>(view.shape[0])};
  // A single row may have any pitch; the encoder wants one that holds the row.
  const cuuint64_t pitch_bytes[1] = {static_cast<cuuint64_t>(view.stride[0] * size_bytes(view.dtype))};
  return make_operand_map(what, view, extent, pitch_bytes, box_rows, map);
}

}  // namespace sluice::cuda
