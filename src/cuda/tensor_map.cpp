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

}  // namespace

Status make_operand_map(std::string_view what, const TensorView& view, std::span<const cuuint64_t> extent,
                        std::span<const cuuint64_t> stride_bytes, int box_rows, CUtensorMap& map) {
  const EncodeTiled encode = encoder();
  if (encode == nullptr) {
    return {StatusCode::kUnsupported,
            fmt::format("{}: the driver has no cuTensorMapEncodeTiled (12.0 is needed)", what)};
  }
  constexpr int kMostAxes = 5;  // of a tensor map
  const cuuint32_t box[kMostAxes] = {static_cast<cuuint32_t>(128 / size_bytes(view.dtype)),
                                     static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  const cuuint32_t steps[kMostAxes] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      view.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const CUresult result =
      encode(&map, type, static_cast<cuuint32_t>(extent.size()), view.data, extent.data(), stride_bytes.data(), box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status::ok();
  return {StatusCode::kInternal, fmt::format("{}: the tensor map of {} with boxes of {} rows was refused (CUresult {})",
                                             what, view.to_string(), box_rows, static_cast<int>(result))};
}

Status make_rows_map(std::string_view what, const TensorView& view, int box_rows, CUtensorMap& map) {
  const cuuint64_t extent[2] = {static_cast<cuuint64_t>(view.shape[1]), static_cast<cuuint64_t>(view.shape[0])};
  // A single row may have any pitch; the encoder wants one that holds the row.
  const cuuint64_t pitch_bytes[1] = {static_cast<cuuint64_t>(view.stride[0] * size_bytes(view.dtype))};
  return make_operand_map(what, view, extent, pitch_bytes, box_rows, map);
}

}  // namespace sluice::cuda
