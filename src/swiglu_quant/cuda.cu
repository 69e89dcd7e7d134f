// Stage 6 on a GPU: a thread takes sixteen columns of both halves of a row, eight threads share a scale. Bytes moved: h
// once, a once. The arithmetic is the limit to watch: the specified sigmoid and two quotients an element.
#include "cuda/columns.cuh"
#include "cuda/launch.h"
#include "cuda/row_groups.cuh"
#include "swiglu_quant/cuda.h"

namespace sluice::swiglu_quant {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

using namespace sluice::cuda;  // NOLINT: the device helpers, in this file alone

constexpr int kThreads = 256;

struct Params {
  const void* h;  // [R,2I]
  std::int64_t h_stride;
  DeviceRowGroups groups;
  Activation activation;
  void* a;  // [R,I]
  std::int64_t a_stride;
  float* a_scale;  // [Ib,R]
  std::int64_t a_scale_block, a_scale_row;
  std::int64_t num_rows, width;  // R, I
  std::int64_t units_per_row;    // 8 * Ib
  ScaleFormat scale_format;
  bool wide_g, wide_u, wide_a;
};

__device__ __forceinline__ float activate(const Activation& activation, float g, float u) {
  if (activation.kind != ActivationKind::kSilu) {
    if (g > activation.limit) g = activation.limit;
    if (u > activation.limit) u = activation.limit;
    if (u < -activation.limit) u = -activation.limit;
  }
  if (activation.kind == ActivationKind::kGptOss) {
    const float z = __fmul_rn(g, spec_sigmoid(__fmul_rn(activation.alpha, g)));
    return __fmul_rn(__fadd_rn(u, 1.0f), z);
  }
  return __fmul_rn(spec_silu(g), u);
}

template <class X, class Q>
__global__ void __launch_bounds__(kThreads) swiglu(const __grid_constant__ Params p) {
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t row = unit / p.units_per_row;
  const std::int64_t column = (unit - row * p.units_per_row) * kUnitColumns;
  // Whole blocks of eight lanes leave together; those that stay shuffle among themselves only, but under a full mask,
  // so rows nobody owns go through with zeros.
  const bool owned = row < p.num_rows && p.groups.owns(row);
  const int count = owned ? columns_left(p.width, column, kUnitColumns) : 0;
  float v[kUnitColumns];
  float u[kUnitColumns];
  const X* const h = static_cast<const X*>(p.h) + (count > 0 ? row * p.h_stride + column : 0);
  load_unit(h, count, p.wide_g && count == kUnitColumns, v);
  load_unit(count > 0 ? h + p.width : h, count, p.wide_u && count == kUnitColumns, u);
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) v[i] = canonical(activate(p.activation, v[i], u[i]));
  const bool wide = p.wide_a && count == kUnitColumns;
  if constexpr (sizeof(Q) == 1) {
    const float scale = block_scale(v, p.scale_format);
    if (count == 0) return;
    uint4 q;
    quantise_unit(v, scale, q);
    store_bytes(q, static_cast<std::uint8_t*>(p.a) + row * p.a_stride + column, count, wide);
    if (threadIdx.x % kUnitsPerBlock == 0)
      p.a_scale[column / kScaleBlock * p.a_scale_block + row * p.a_scale_row] = scale;
  } else {
    if (count > 0) store_unit(v, static_cast<Q*>(p.a) + row * p.a_stride + column, count, wide);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

template <class X>
void (*kernel_for(DType a))(Params) {
  if (a == DType::kE4M3) return swiglu<X, std::uint8_t>;
  if (a == DType::kBF16) return swiglu<X, std::uint16_t>;
  return swiglu<X, float>;
}

}  // namespace

Status run_cuda(const Args& args, const Ctx& ctx) {
  const DeviceGuard guard(args.h.device.index);
  SLUICE_TRY(to_status(guard.error(), "swiglu_quant: set device"));
  Params p = {};
  p.h = args.h.data;
  p.h_stride = args.h.stride[0];
  p.groups = DeviceRowGroups::from(args.groups);
  p.activation = args.activation;
  p.a = args.a.data;
  p.a_stride = args.a.stride[0];
  if (args.a_scale.is_present()) {
    p.a_scale = args.a_scale.as<float>();
    p.a_scale_block = args.a_scale.stride[0];
    p.a_scale_row = args.a_scale.stride[1];
  }
  p.num_rows = args.h.shape[0];
  p.width = args.a.shape[1];
  p.units_per_row = ceil_div(p.width, kScaleBlock) * kUnitsPerBlock;
  p.scale_format = args.scale_format;
  p.wide_g = allows_wide(args.h);
  p.wide_u = p.wide_g && p.width * size_bytes(args.h.dtype) % 16 == 0;
  p.wide_a = allows_wide(args.a);
  if (p.num_rows == 0 || p.width == 0) return Status::ok();
  const auto kernel =
      args.h.dtype == DType::kBF16 ? kernel_for<std::uint16_t>(args.a.dtype) : kernel_for<float>(args.a.dtype);
  const std::int64_t blocks = ceil_div(p.num_rows * p.units_per_row, kThreads);
  return launch("swiglu", kernel, static_cast<unsigned>(blocks), kThreads, 0, stream_of(ctx), p);
}

}  // namespace sluice::swiglu_quant
