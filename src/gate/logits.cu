// The router GEMM on any GPU, for any dtypes, strides and alignment, with the CPU's bits (docs/numerics.md, "Gate"):
// p = fma(x, w, p) in ascending h inside a block of 128 columns, acc = acc + p over the blocks. Fused multiply-adds are
// written as such, so that f32 inputs round where the CPU rounds.
//
// The blocks of 128 are independent until they are added: each of a thread block's warps takes another one for the same
// kTokens x kExperts logits, a lane an expert, and their sums are added in ascending order.
#include <cstdint>

#include "cuda/columns.cuh"
#include "cuda/dependent_launch.cuh"
#include "gate/cuda.h"

namespace sluice::gate {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int kTokens = 8;
constexpr int kExperts = 32;  // the lanes of a warp
constexpr int kWarps = 8;
constexpr int kPart = 32;  // columns in shared memory at a time
constexpr int kBlockColumns = static_cast<int>(kScaleBlock);

struct Params {
  const void* x;  // [T,H]
  std::int64_t x_stride;
  const void* w;  // [E,H]
  std::int64_t w_stride;
  const float* bias;  // [E] or null
  float* logits;      // [T,E]
  std::int64_t logits_stride;
  std::int64_t num_tokens, hidden;
  std::int32_t num_experts, expert_tiles;
};

struct SharedStorage {
  float x[kWarps][kPart][kTokens];
  // Lanes read down a column, hence one more. A warp's sums of its 128 columns [kTokens, kExperts] lie here after them.
  float w[kWarps][kExperts][kPart + 1];
};

__device__ __forceinline__ float to_f32(std::uint16_t bits) { return cuda::f32_from_bf16(bits); }
__device__ __forceinline__ float to_f32(float value) { return value; }

template <class X, class W>
__global__ void __launch_bounds__(kWarps * 32) logits_plain(const __grid_constant__ Params p) {
  __shared__ SharedStorage s;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t first_token = static_cast<std::int64_t>(blockIdx.x) / p.expert_tiles * kTokens;
  const int first_expert = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.expert_tiles)) * kExperts;
  const X* const x = static_cast<const X*>(p.x);
  const W* const w = static_cast<const W*>(p.w);
  cuda::wait_for_previous();
  cuda::allow_next();
  const std::int64_t num_blocks = (p.hidden + kBlockColumns - 1) / kBlockColumns;
  float acc = 0.0f;  // of token `warp`, expert `lane`
  for (std::int64_t first_block = 0; first_block < num_blocks; first_block += kWarps) {
    const std::int64_t begin = (first_block + warp) * kBlockColumns;
    const std::int64_t end = begin + kBlockColumns < p.hidden ? begin + kBlockColumns : p.hidden;
    float sum[kTokens] = {};
    for (std::int64_t part = begin; part < end; part += kPart) {
      // Columns behind the end are not multiplied: a product with zero would turn a sum of -0 into +0.
      const int count = end - part < kPart ? static_cast<int>(end - part) : kPart;
      const bool inside = lane < count;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const bool here = inside && first_token + t < p.num_tokens;
        s.x[warp][lane][t] = here ? to_f32(x[(first_token + t) * p.x_stride + part + lane]) : 0.0f;
      }
#pragma unroll 16
      for (int e = 0; e < kExperts; ++e) {
        const bool here = inside && first_expert + e < p.num_experts;
        s.w[warp][e][lane] = here ? to_f32(w[(first_expert + e) * p.w_stride + part + lane]) : 0.0f;
      }
      __syncwarp();
#pragma unroll 8
      for (int k = 0; k < count; ++k) {
        const float weight = s.w[warp][lane][k];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) sum[t] = __fmaf_rn(s.x[warp][k][t], weight, sum[t]);
      }
      __syncwarp();
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) (&s.w[warp][0][0])[t * kExperts + lane] = sum[t];
    __syncthreads();
    for (int b = 0; b < kWarps && first_block + b < num_blocks; ++b) {
      acc = __fadd_rn(acc, (&s.w[b][0][0])[warp * kExperts + lane]);
    }
    __syncthreads();
  }
  const std::int64_t token = first_token + warp;
  const int expert = first_expert + lane;
  if (token >= p.num_tokens || expert >= p.num_experts) return;
  if (p.bias != nullptr) acc = __fadd_rn(acc, p.bias[expert]);
  p.logits[token * p.logits_stride + expert] = cuda::canonical(acc);
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

static_assert(kWarps == kTokens);  // a warp writes a token

auto kernel_for(const LogitsArgs& args) {
  const bool x_is_bf16 = args.x.dtype == DType::kBF16;
  if (args.w_gate.dtype == DType::kBF16) {
    return x_is_bf16 ? logits_plain<std::uint16_t, std::uint16_t> : logits_plain<float, std::uint16_t>;
  }
  return x_is_bf16 ? logits_plain<std::uint16_t, float> : logits_plain<float, float>;
}

}  // namespace

Status logits_cuda(const LogitsArgs& args, const Ctx& ctx) {
  const device::Current current(args.logits.device);
  SLUICE_TRY(current.status().with_context("gate.logits"));
  Params p = {};
  p.x = args.x.data;
  p.x_stride = args.x.stride[0];
  p.w = args.w_gate.data;
  p.w_stride = args.w_gate.stride[0];
  if (args.router_bias.is_present()) p.bias = args.router_bias.as<const float>();
  p.logits = args.logits.as<float>();
  p.logits_stride = args.logits.stride[0];
  p.num_tokens = args.x.shape[0];
  p.hidden = args.x.shape[1];
  p.num_experts = static_cast<std::int32_t>(args.w_gate.shape[0]);
  p.expert_tiles = static_cast<std::int32_t>(ceil_div(p.num_experts, kExperts));
  if (p.num_tokens == 0 || p.num_experts == 0) return Status::ok();
  const std::int64_t blocks = ceil_div(p.num_tokens, kTokens) * p.expert_tiles;
  return cuda::launch_after("gate_logits", kernel_for(args), static_cast<unsigned>(blocks), kWarps * 32, 0,
                            cuda::stream_of(ctx), p);
}

}  // namespace sluice::gate
