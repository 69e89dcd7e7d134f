// Stage 9 on a GPU: a thread takes eight columns of a token and walks its slots in order, so the sum needs no atomics and
// has one order. Bytes moved: every present row of y once, out once.
#include "cuda/columns.cuh"
#include "cuda/launch.h"
#include "combine/cuda.h"

namespace sluice::combine {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

using namespace sluice::cuda;  // NOLINT: the device helpers, in this file alone

constexpr int kThreads = 256;
constexpr int kColumns = 8;

struct Params {
  const void* y;  // [R,H]
  std::int64_t y_stride, capacity;
  const std::int32_t* slot_row;  // [T,S]
  std::int64_t slot_row_stride;
  const float* weight;  // [T,S]; null: 1
  std::int64_t weight_stride;
  const void* shared;  // [T,H]; null: none
  std::int64_t shared_stride;
  bool shared_is_bf16;
  const float* shared_gate;  // [T,1]; null: none
  std::int64_t shared_gate_stride;
  bool accumulate;
  void* out;  // [T,H]
  std::int64_t out_stride;
  std::int64_t num_tokens, hidden, units_per_token;
  std::int32_t num_slots;
  bool wide_y, wide_shared, wide_out;
};

__device__ __forceinline__ void load8(const std::uint16_t* from, int count, bool wide, float (&v)[kColumns]) {
  if (wide) {
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from));
    const std::uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j * 2] = __uint_as_float(word[j] << 16);
      v[j * 2 + 1] = __uint_as_float(word[j] & 0xFFFF0000u);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) v[i] = i < count ? f32_from_bf16(from[i]) : 0.0f;
}
__device__ __forceinline__ void load8(const float* from, int count, bool wide, float (&v)[kColumns]) {
  if (wide) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 f = *(reinterpret_cast<const float4*>(from) + i);
      v[i * 4] = f.x;
      v[i * 4 + 1] = f.y;
      v[i * 4 + 2] = f.z;
      v[i * 4 + 3] = f.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) v[i] = i < count ? from[i] : 0.0f;
}

template <class Y, class Out>
__global__ void __launch_bounds__(kThreads) combine_tokens(const __grid_constant__ Params p) {
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t token = unit / p.units_per_token;
  if (token >= p.num_tokens) return;
  const std::int64_t column = (unit - token * p.units_per_token) * kColumns;
  const int count = columns_left(p.hidden, column, kColumns);
  const bool whole = count == kColumns;
  const std::int32_t* const slot_row = p.slot_row + token * p.slot_row_stride;
  const float* const weight = p.weight == nullptr ? nullptr : p.weight + token * p.weight_stride;
  float acc[kColumns] = {};
  bool any = false;
#pragma unroll 8
  for (int s = 0; s < p.num_slots; ++s) {
    const std::int32_t row = __ldg(slot_row + s);
    if (row < 0 || row >= p.capacity) continue;
    any = true;
    const float w = weight == nullptr ? 1.0f : __ldg(weight + s);
    float y[kColumns];
    load8(static_cast<const Y*>(p.y) + row * p.y_stride + column, count, p.wide_y && whole, y);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) acc[i] = __fmaf_rn(w, y[i], acc[i]);
  }
  if (p.shared != nullptr) {
    any = true;
    const float w = p.shared_gate == nullptr ? 1.0f : spec_sigmoid(p.shared_gate[token * p.shared_gate_stride]);
    float y[kColumns];
    const std::int64_t at = token * p.shared_stride + column;
    if (p.shared_is_bf16) {
      load8(static_cast<const std::uint16_t*>(p.shared) + at, count, p.wide_shared && whole, y);
    } else {
      load8(static_cast<const float*>(p.shared) + at, count, p.wide_shared && whole, y);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) acc[i] = __fmaf_rn(w, y[i], acc[i]);  // w = 1: y + acc
  }
  Out* const out = static_cast<Out*>(p.out) + token * p.out_stride + column;
  if (p.accumulate) {
    if (!any) return;  // out keeps its bits
    float old[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if constexpr (sizeof(Out) == 2) {
        old[i] = i < count ? f32_from_bf16(out[i]) : 0.0f;
      } else {
        old[i] = i < count ? out[i] : 0.0f;
      }
      acc[i] = __fadd_rn(old[i], acc[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) acc[i] = canonical(acc[i]);
  if constexpr (sizeof(Out) == 2) {
    if (p.wide_out && whole) {
      std::uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        word[j] = bf16_from_f32(acc[j * 2]) | static_cast<std::uint32_t>(bf16_from_f32(acc[j * 2 + 1])) << 16;
      *reinterpret_cast<uint4*>(out) = make_uint4(word[0], word[1], word[2], word[3]);
      return;
    }
  } else {
    if (p.wide_out && whole) {
      reinterpret_cast<float4*>(out)[0] = make_float4(acc[0], acc[1], acc[2], acc[3]);
      reinterpret_cast<float4*>(out)[1] = make_float4(acc[4], acc[5], acc[6], acc[7]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i >= count) break;
    if constexpr (sizeof(Out) == 2) {
      out[i] = bf16_from_f32(acc[i]);
    } else {
      out[i] = acc[i];
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

template <class Y>
void (*kernel_for(DType out))(Params) {
  return out == DType::kBF16 ? combine_tokens<Y, std::uint16_t> : combine_tokens<Y, float>;
}

}  // namespace

Status run_cuda(const Args& args, const Ctx& ctx) {
  const DeviceGuard guard(args.out.device.index);
  SLUICE_TRY(to_status(guard.error(), "combine: set device"));
  Params p = {};
  p.y = args.y.data;
  p.y_stride = args.y.stride[0];
  p.capacity = args.y.shape[0];
  p.slot_row = args.slot_row.as<const std::int32_t>();
  p.slot_row_stride = args.slot_row.stride[0];
  p.num_slots = static_cast<std::int32_t>(args.slot_row.shape[1]);
  if (!args.unweighted) {
    p.weight = args.topk_weight.as<const float>();
    p.weight_stride = args.topk_weight.stride[0];
  }
  if (args.shared.is_present()) {
    p.shared = args.shared.data;
    p.shared_stride = args.shared.stride[0];
    p.shared_is_bf16 = args.shared.dtype == DType::kBF16;
    p.wide_shared = allows_wide(args.shared);
  }
  if (args.shared_gate.is_present()) {
    p.shared_gate = args.shared_gate.as<const float>();
    p.shared_gate_stride = args.shared_gate.stride[0];
  }
  p.accumulate = args.accumulate;
  p.out = args.out.data;
  p.out_stride = args.out.stride[0];
  p.num_tokens = args.out.shape[0];
  p.hidden = args.out.shape[1];
  p.units_per_token = ceil_div(p.hidden, kColumns);
  p.wide_y = allows_wide(args.y);
  p.wide_out = allows_wide(args.out);
  if (p.num_tokens == 0 || p.hidden == 0) return Status::ok();
  const auto kernel =
      args.y.dtype == DType::kBF16 ? kernel_for<std::uint16_t>(args.out.dtype) : kernel_for<float>(args.out.dtype);
  const std::int64_t blocks = ceil_div(p.num_tokens * p.units_per_token, kThreads);
  return launch("combine", kernel, static_cast<unsigned>(blocks), kThreads, 0, stream_of(ctx), p);
}

}  // namespace sluice::combine
