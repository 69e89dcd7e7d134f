// The router GEMM on Hopper's tensor cores: logits[t,e] = sum_h x[t,h] * w_gate[e,h] + router_bias[e] from bf16.
//
// K is cut into chunks of kChunkColumns, whatever T and E are. A chunk is one chain of wgmma from zero, k16 after k16; the
// sums of the chunks are added in ascending order in fp32. So a logit's bits depend on its row, its expert's weights and H
// alone: neither the tile, nor how many blocks share K, nor the batch can be seen in them.
//
//   producer: one thread loads [tokens, 64] and [experts, 64] tiles
//   consumers: a warpgroup per 64 tokens multiplies, and adds a chunk's sum to the total (no split) or writes it (split)
// Clusters that load x and w for each other by multicast lost: 51 us at T = 8192 became 102 with two blocks, 190 with four.
//   add_chunks: with split K, adds the chunks' sums in order; 14 of them at H = 7168
#include <cstdint>
#include <string>
#include <utility>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90.cuh"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.cuh"
#include "gate/cuda.h"
#include "gate/gpu_config.h"

namespace sluice::gate::wgmma {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

namespace sm90 = cuda::sm90;

struct Params {
  CUtensorMap x;  // [T,H] bf16
  CUtensorMap w;  // [E,H] bf16
  float* logits;  // [T,E]
  std::int64_t logits_stride;
  const float* bias;  // [E] or null
  float* partial;     // [chunks, T, pitch], null without split K
  std::int64_t partial_pitch;
  std::int32_t num_tokens, num_experts;
  std::int32_t num_steps, num_chunks;  // ceil(H / 64), ceil(H / kChunkColumns)
  std::int32_t expert_tiles;
  bool paired;  // 8-byte stores to logits are legal
};

constexpr int kStepColumns = 64;  // 128 bytes of bf16
constexpr int kStepsPerChunk = static_cast<int>(kChunkColumns) / kStepColumns;
constexpr int kInstructionColumns = 16;
constexpr int kAddThreads = 64;

template <class Cfg>
struct SharedStorage {
  alignas(1024) std::uint8_t x[Cfg::kStages][Cfg::kTokens * sm90::kSwizzleBytes];
  alignas(1024) std::uint8_t w[Cfg::kStages][Cfg::kExperts * sm90::kSwizzleBytes];
  std::uint64_t full[Cfg::kStages];
  std::uint64_t empty[Cfg::kStages];
};

// kSplit: blocks share K (gridDim.y of them) and every chunk's sum goes to p.partial.
template <class Cfg, bool kSplit>
__global__ void __launch_bounds__(Cfg::kThreads, 1) router_gemm(const __grid_constant__ Params p) {
  extern __shared__ std::uint8_t g_bytes[];
  // The start of dynamic shared memory is not aligned by itself.
  SharedStorage<Cfg>& s =
      *reinterpret_cast<SharedStorage<Cfg>*>(g_bytes + (1024 - sm90::shared_address(g_bytes) % 1024) % 1024);
  constexpr int kN = Cfg::kExperts;
  const int warpgroup = static_cast<int>(threadIdx.x) / sm90::kWarpgroupThreads;
  const int first_token = static_cast<int>(blockIdx.x) / p.expert_tiles * Cfg::kTokens;
  const int first_expert = static_cast<int>(blockIdx.x) % p.expert_tiles * Cfg::kExperts;
  const int split = static_cast<int>(blockIdx.y);
  const int first_chunk = kSplit ? split * p.num_chunks / static_cast<int>(gridDim.y) : 0;
  const int end_chunk = kSplit ? (split + 1) * p.num_chunks / static_cast<int>(gridDim.y) : p.num_chunks;
  const int first_step = first_chunk * kStepsPerChunk;
  const int end_step = min(end_chunk * kStepsPerChunk, p.num_steps);

  if (threadIdx.x == 0) {
    sm90::prefetch_map(&p.x);  // parameters of the launch, not memory a kernel before may write
    sm90::prefetch_map(&p.w);
    for (int i = 0; i < Cfg::kStages; ++i) {
      sm90::barrier_init(&s.full[i], 1);
      sm90::barrier_init(&s.empty[i], Cfg::kWarpgroups);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  cuda::wait_for_previous();
  cuda::allow_next();

  sm90::RingPosition at;
  if (warpgroup == Cfg::kWarpgroups) {
    // ---- producer ----
    if constexpr (Cfg::kWarpgroups == 2) sm90::registers_shrink<40>();
    if (threadIdx.x % sm90::kWarpgroupThreads == 0) {
      constexpr std::uint32_t kBytes = (Cfg::kTokens + Cfg::kExperts) * sm90::kSwizzleBytes;
      for (int step = first_step; step < end_step; ++step) {
        sm90::barrier_wait(&s.empty[at.stage], at.parity ^ 1u);
        sm90::barrier_arrive_expect(&s.full[at.stage], kBytes);
        sm90::tma_load_2d(&p.w, &s.full[at.stage], s.w[at.stage], step * kStepColumns, first_expert);
        sm90::tma_load_2d(&p.x, &s.full[at.stage], s.x[at.stage], step * kStepColumns, first_token);
        at.advance(Cfg::kStages);
      }
    }
  } else {
    // ---- consumers ----
    if constexpr (Cfg::kWarpgroups == 2) sm90::registers_grow<232>();
    float sum[kN / 2];    // of the chunk
    float total[kN / 2];  // of the chunks before, without a split
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int thread = static_cast<int>(threadIdx.x) % sm90::kWarpgroupThreads;
    const int row = first_token + warpgroup * 64 + thread / 32 * 16 + lane / 4;
    const int column = first_expert + lane % 4 * 2;
    const auto release = [&](std::uint32_t stage) {
      if (thread == 0) sm90::barrier_arrive(&s.empty[stage]);
    };
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
      const int end = min((chunk + 1) * kStepsPerChunk, p.num_steps);
      std::uint32_t previous = 0;
      for (int step = chunk * kStepsPerChunk; step < end; ++step) {
        sm90::barrier_wait(&s.full[at.stage], at.parity);
        const std::uint64_t x = sm90::operand_descriptor(s.x[at.stage] + warpgroup * 64 * sm90::kSwizzleBytes);
        const std::uint64_t w = sm90::operand_descriptor(s.w[at.stage]);
        sm90::hold(sum);
        sm90::fence();
#pragma unroll
        for (int k = 0; k < kStepColumns / kInstructionColumns; ++k) {
          sm90::issue<typename sm90::Bf16Shape<kN>::Instruction>(
              x + k * sm90::kDescriptorStep, w + k * sm90::kDescriptorStep, sum,
              step != chunk * kStepsPerChunk || k != 0, std::make_index_sequence<kN / 2>());
        }
        sm90::commit();
        sm90::hold(sum);
        if (step != chunk * kStepsPerChunk) {
          sm90::wait<1>();
          release(previous);
        }
        previous = at.stage;
        at.advance(Cfg::kStages);
      }
      sm90::wait<0>();
      sm90::hold(sum);
      release(previous);
      if constexpr (kSplit) {
        float* const to =
            p.partial + (static_cast<std::int64_t>(chunk) * p.num_tokens + row) * p.partial_pitch + column;
#pragma unroll
        for (int i = 0; i < kN / 2; i += 2) {
          const int r = i % 4 / 2 * 8;
          const int c = i / 4 * 8;
          if (row + r < p.num_tokens && column + c < p.partial_pitch)  // columns behind E are zeros
            *reinterpret_cast<float2*>(to + r * p.partial_pitch + c) = make_float2(sum[i], sum[i + 1]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) total[i] = chunk == first_chunk ? sum[i] : __fadd_rn(total[i], sum[i]);
      }
    }
    if constexpr (!kSplit) {
      // Loaded together: behind the first store the compiler may not move a load forward.
      float bias[kN / 4];
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        const int c = column + i / 2 * 8 + i % 2;
        bias[i] = p.bias != nullptr && c < p.num_experts ? __ldg(p.bias + c) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kN / 2; i += 2) {
        const int r = row + i % 4 / 2 * 8;
        const int c = column + i / 4 * 8;
        float value[2] = {total[i], total[i + 1]};
        if (p.bias != nullptr) {
          value[0] = __fadd_rn(value[0], bias[i / 4 * 2]);
          value[1] = __fadd_rn(value[1], bias[i / 4 * 2 + 1]);
        }
        if (r >= p.num_tokens || c >= p.num_experts) continue;
        float* const to = p.logits + r * p.logits_stride + c;
        if (p.paired) {
          *reinterpret_cast<float2*>(to) = make_float2(value[0], value[1]);
        } else {
          to[0] = value[0];
          if (c + 1 < p.num_experts) to[1] = value[1];
        }
      }
    }
  }
}

// logits[t,e] = ((partial[0,t,e] + partial[1,t,e]) + ...) + bias[e]; a thread takes four experts.
__global__ void __launch_bounds__(kAddThreads) add_chunks(const __grid_constant__ Params p) {
  cuda::wait_for_previous();
  cuda::allow_next();
  const int fours = static_cast<int>(p.partial_pitch / 4);
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kAddThreads + threadIdx.x;
  const int token = static_cast<int>(at / fours);
  const int expert = static_cast<int>(at % fours) * 4;
  if (token >= p.num_tokens) return;
  const std::int64_t chunk_pitch = p.num_tokens * p.partial_pitch;
  const float* const from = p.partial + token * p.partial_pitch + expert;
  float bias[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (p.bias != nullptr && expert + i < p.num_experts) bias[i] = __ldg(p.bias + expert + i);
  }
  float4 sum = {};
  // As many loads in flight as there usually are chunks; one after the other they cost 0.35 us each.
  constexpr int kBatch = 16;
  for (int first = 0; first < p.num_chunks; first += kBatch) {
    float4 next[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < p.num_chunks) next[i] = *reinterpret_cast<const float4*>(from + (first + i) * chunk_pitch);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= p.num_chunks) continue;
      const bool starts = first + i == 0;
      sum.x = starts ? next[i].x : __fadd_rn(sum.x, next[i].x);
      sum.y = starts ? next[i].y : __fadd_rn(sum.y, next[i].y);
      sum.z = starts ? next[i].z : __fadd_rn(sum.z, next[i].z);
      sum.w = starts ? next[i].w : __fadd_rn(sum.w, next[i].w);
    }
  }
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (expert + i >= p.num_experts) continue;
    p.logits[token * p.logits_stride + expert + i] = p.bias != nullptr ? __fadd_rn(values[i], bias[i]) : values[i];
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

template <int kWarpgroups_, int kExperts_, int kStages_>
struct Config {
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kTokens = 64 * kWarpgroups;
  static constexpr int kExperts = kExperts_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = (kWarpgroups + 1) * sm90::kWarpgroupThreads;
  static constexpr int kSharedBytes = static_cast<int>(sizeof(SharedStorage<Config>)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
};

struct Kernel {
  LogitsTile tile;  // split: 1, or 0 for any
  void (*function)(Params) = nullptr;
  int num_threads = 0;
  int shared_bytes = 0;
};

template <class Cfg, bool kSplit>
constexpr Kernel kernel() {
  return {{Cfg::kTokens, Cfg::kExperts, kSplit ? 0 : 1}, router_gemm<Cfg, kSplit>, Cfg::kThreads, Cfg::kSharedBytes};
}

// What choose_logits_tile may choose.
const Kernel kKernels[] = {
    kernel<Config<1, 8, 8>, true>(),    kernel<Config<1, 8, 8>, false>(),   kernel<Config<1, 16, 8>, true>(),
    kernel<Config<1, 16, 8>, false>(),  kernel<Config<1, 32, 8>, true>(),   kernel<Config<1, 32, 12>, false>(),
    kernel<Config<1, 64, 8>, true>(),   kernel<Config<1, 64, 12>, false>(), kernel<Config<1, 128, 8>, false>(),
    kernel<Config<2, 64, 8>, true>(),   kernel<Config<2, 64, 8>, false>(),  kernel<Config<2, 128, 6>, true>(),
    kernel<Config<2, 128, 6>, false>(),
};

const Kernel* find_kernel(const LogitsTile& tile) {
  LogitsTile wanted = tile;
  if (tile.split > 1) wanted.split = 0;
  for (const Kernel& kernel : kKernels) {
    if (kernel.tile == wanted) return &kernel;
  }
  return nullptr;
}

}  // namespace
}  // namespace sluice::gate::wgmma

namespace sluice::gate {

bool has_logits_kernel(const LogitsTile& tile) { return wgmma::find_kernel(tile) != nullptr; }

Status logits_wgmma(const LogitsArgs& args, const Ctx& ctx) {
  cuda::DeviceFacts facts;
  SLUICE_TRY(cuda::facts_of(args.logits.device.index, facts).with_context("gate.logits"));
  return logits_wgmma_tile(args, ctx,
                           choose_logits_tile(args.x.shape[0], args.x.shape[1], args.w_gate.shape[0], facts.num_sms));
}

namespace {
// sums null: the chunks are added here.
Status run_tile(const LogitsArgs& args, const Ctx& ctx, const LogitsTile& tile, ChunkSums* sums) {
  const device::Current current(args.logits.device);
  SLUICE_TRY(current.status().with_context("gate.logits"));
  const std::int64_t num_tokens = args.x.shape[0];
  const std::int64_t hidden = args.x.shape[1];
  const std::int64_t num_experts = args.w_gate.shape[0];
  if (num_tokens == 0 || num_experts == 0) return Status::ok();
  SLUICE_TRY(check_logits_wgmma(args));
  const wgmma::Kernel* const kernel = wgmma::find_kernel(tile);
  if (kernel == nullptr) return {StatusCode::kInternal, "gate.logits: no kernel was compiled for " + tile.to_string()};

  wgmma::Params p = {};
  SLUICE_TRY(cuda::make_rows_map("gate.logits: x", args.x, tile.tokens, p.x));
  SLUICE_TRY(cuda::make_rows_map("gate.logits: w_gate", args.w_gate, tile.experts, p.w));
  p.logits = args.logits.as<float>();
  p.logits_stride = args.logits.stride[0];
  p.paired = reinterpret_cast<std::uintptr_t>(args.logits.data) % 8 == 0 && args.logits.stride[0] % 2 == 0 &&
             num_experts % 2 == 0;
  if (args.router_bias.is_present()) p.bias = args.router_bias.as<const float>();
  p.num_tokens = static_cast<std::int32_t>(num_tokens);
  p.num_experts = static_cast<std::int32_t>(num_experts);
  p.num_steps = static_cast<std::int32_t>(ceil_div(hidden, wgmma::kStepColumns));
  p.num_chunks = static_cast<std::int32_t>(ceil_div(hidden, kChunkColumns));
  if (tile.split > 1) {
    p.partial_pitch = ceil_div(num_experts, 4) * 4;
    const std::int64_t needed = p.num_chunks * num_tokens * p.partial_pitch * static_cast<std::int64_t>(sizeof(float));
    if (static_cast<std::int64_t>(ctx.workspace.size()) < needed) {
      return {StatusCode::kWorkspaceTooSmall, "gate.logits: workspace has " + std::to_string(ctx.workspace.size()) +
                                                  " bytes, " + std::to_string(needed) + " needed"};
    }
    p.partial = reinterpret_cast<float*>(ctx.workspace.data());
  }
  p.expert_tiles = static_cast<std::int32_t>(ceil_div(num_experts, tile.experts));
  const dim3 grid(static_cast<unsigned>(ceil_div(num_tokens, tile.tokens) * p.expert_tiles),
                  static_cast<unsigned>(tile.split));
  SLUICE_TRY(cuda::launch_after("gate_router_gemm", kernel->function, grid, static_cast<unsigned>(kernel->num_threads),
                                static_cast<std::size_t>(kernel->shared_bytes), cuda::stream_of(ctx), p));
  if (tile.split == 1) return Status::ok();
  if (sums != nullptr) {
    *sums = {p.partial, num_tokens * p.partial_pitch, p.partial_pitch, p.num_chunks, p.bias};
    return Status::ok();
  }
  const std::int64_t fours = num_tokens * p.partial_pitch / 4;
  return cuda::launch_after("gate_add_chunks", wgmma::add_chunks,
                            static_cast<unsigned>(ceil_div(fours, wgmma::kAddThreads)), wgmma::kAddThreads, 0,
                            cuda::stream_of(ctx), p);
}

}  // namespace

Status logits_wgmma_tile(const LogitsArgs& args, const Ctx& ctx, const LogitsTile& tile) {
  return run_tile(args, ctx, tile, nullptr);
}

Status logits_wgmma_sums(const LogitsArgs& args, const Ctx& ctx, ChunkSums& sums) {
  cuda::DeviceFacts facts;
  SLUICE_TRY(cuda::facts_of(args.logits.device.index, facts).with_context("gate.logits"));
  return run_tile(args, ctx, choose_logits_tile(args.x.shape[0], args.x.shape[1], args.w_gate.shape[0], facts.num_sms),
                  &sums);
}

}  // namespace sluice::gate
