// Stage 9 on a GPU: a thread takes eight columns of a token and adds its slots in order, so the sum needs no atomics and
// has one order. Bytes moved: every present row of y once, out once.
#include "combine/impls.h"
#include "cuda/columns.cuh"
#include "cuda/dependent_launch.cuh"

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
  std::int64_t num_tokens, hidden, warps_per_token;
  std::int32_t num_slots;
  bool wide_y, wide_shared, wide_out;
};

// Eight columns as they come from memory.
template <class Y>
struct RawUnit {
  static constexpr int kParts = static_cast<int>(sizeof(Y)) / 2;
  uint4 part[kParts];
  __device__ __forceinline__ void load(const Y* from) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) part[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  }
  __device__ __forceinline__ float column(int i) const {
    const uint4& bits = part[i * kParts / kColumns];
    const int word_of = i * kParts % kColumns / 2;
    const std::uint32_t word = word_of == 0 ? bits.x : word_of == 1 ? bits.y : word_of == 2 ? bits.z : bits.w;
    if constexpr (sizeof(Y) == 4) return __uint_as_float(word);
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000u);
  }
};

template <class Y, class Out>
__global__ void __launch_bounds__(kThreads, 4) combine_tokens(const __grid_constant__ Params p) {
  wait_for_previous();
  allow_next();
  const std::int64_t warp = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const std::int64_t token = warp / p.warps_per_token;
  if (token >= p.num_tokens) return;
  const std::int64_t column = ((warp - token * p.warps_per_token) * 32 + threadIdx.x % 32) * kColumns;
  const int count = columns_left(p.hidden, column, kColumns);
  if (count == 0) return;
  const bool whole = count == kColumns;
  const std::int32_t* const slot_row = p.slot_row + token * p.slot_row_stride;
  const float* const weight = p.weight == nullptr ? nullptr : p.weight + token * p.weight_stride;
  float acc[kColumns] = {};
  bool any = false;
  // The loads of a few slots are in flight together; the sums keep their order. Eight at a time take so many registers
  // that half as many warps fit (321 us instead of 249 at 8192 tokens), two leave memory idle (264 us).
  constexpr int kBatch = 4 / RawUnit<Y>::kParts;
  for (int first = 0; first < p.num_slots; first += kBatch) {
    std::int32_t row[kBatch];
    float w[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool is_slot = first + j < p.num_slots;
      row[j] = is_slot ? __ldg(slot_row + first + j) : -1;
      w[j] = is_slot && weight != nullptr ? __ldg(weight + first + j) : 1.0f;
      if (row[j] >= p.capacity) row[j] = -1;
      any = any || row[j] >= 0;
    }
    if (p.wide_y && whole) {
      RawUnit<Y> raw[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (row[j] >= 0) raw[j].load(static_cast<const Y*>(p.y) + row[j] * p.y_stride + column);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (row[j] < 0) continue;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) acc[i] = __fmaf_rn(w[j], raw[j].column(i), acc[i]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (row[j] < 0) continue;
        float y[kColumns];
        load_unit(static_cast<const Y*>(p.y) + row[j] * p.y_stride + column, count, false, y);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) acc[i] = __fmaf_rn(w[j], y[i], acc[i]);
      }
    }
  }
  if (p.shared != nullptr) {
    any = true;
    const float w = p.shared_gate == nullptr ? 1.0f : spec_sigmoid(p.shared_gate[token * p.shared_gate_stride]);
    float y[kColumns];
    const std::int64_t at = token * p.shared_stride + column;
    if (p.shared_is_bf16) {
      load_unit(static_cast<const std::uint16_t*>(p.shared) + at, count, p.wide_shared && whole, y);
    } else {
      load_unit(static_cast<const float*>(p.shared) + at, count, p.wide_shared && whole, y);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) acc[i] = __fmaf_rn(w, y[i], acc[i]);  // w = 1: y + acc
  }
  Out* const out = static_cast<Out*>(p.out) + token * p.out_stride + column;
  if (p.accumulate) {
    if (!any) return;  // out keeps its bits
    float old[kColumns];
    load_unit(out, count, false, old);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) acc[i] = __fadd_rn(old[i], acc[i]);
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) acc[i] = canonical(acc[i]);
  store_unit(acc, out, count, p.wide_out && whole);
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
  const device::Current current(args.out.device);
  SLUICE_TRY(current.status().with_context("combine"));
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
  p.warps_per_token = ceil_div(p.hidden, 32 * kColumns);
  p.wide_y = allows_wide(args.y);
  p.wide_out = allows_wide(args.out);
  if (p.num_tokens == 0 || p.hidden == 0) return Status::ok();
  const auto kernel =
      args.y.dtype == DType::kBF16 ? kernel_for<std::uint16_t>(args.out.dtype) : kernel_for<float>(args.out.dtype);
  const std::int64_t blocks = ceil_div(p.num_tokens * p.warps_per_token, kThreads / 32);
  return launch_after("combine", kernel, static_cast<unsigned>(blocks), kThreads, 0, stream_of(ctx), p);
}

}  // namespace sluice::combine
