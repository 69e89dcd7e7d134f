// Stage 2 on a GPU: a stable counting sort without atomics on rows, so that the plan is the same bits every time.
//
// A warp owns consecutive slots and keeps its own histogram of local experts, so that order inside an expert is
// (block, warp, position) = ascending slot. Few slots take one block and one launch; more take three:
//   count:   histogram of each block's slots            -> block_count[blocks, L]
//   offsets: prefix over blocks and experts             -> block_base[blocks, L], expert_offset, num_rows
//   place:   the warps walk their slots again and write row_token, row_slot, slot_row
#include <algorithm>

#include "cuda/launch.h"
#include "route/cuda.h"

namespace sluice::route {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int kWarpLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
  const std::int32_t* topk_idx;  // [T,S]
  std::int64_t topk_idx_stride;
  std::int32_t num_slots;    // S
  std::int64_t num_items;    // T*S
  std::int32_t num_experts;  // E
  std::int32_t first_expert;
  std::int32_t num_local;        // L
  std::int64_t items_per_block;  // a multiple of kThreads
  std::int32_t num_blocks;
  std::int32_t* block_count;    // [blocks, L]; after `offsets`: first row of the block's slots of that expert
  std::int32_t* expert_offset;  // [L+1]
  std::int32_t* row_token;
  std::int32_t* row_slot;
  std::int32_t* slot_row;  // [T,S]
  std::int64_t slot_row_stride;
  std::int32_t* num_rows;
  unsigned long long* counters;  // null: not counted
};

// The local expert of a flat slot, or -1. Invalid ids are told apart for the counter.
__device__ __forceinline__ int local_expert(const Params& p, std::int64_t item, bool& invalid) {
  const std::int64_t token = item / p.num_slots;
  const std::int32_t id = p.topk_idx[token * p.topk_idx_stride + (item - token * p.num_slots)];
  invalid = id < -1 || id >= p.num_experts;
  const std::int64_t local = static_cast<std::int64_t>(id) - p.first_expert;
  return invalid || id < 0 || local < 0 || local >= p.num_local ? -1 : static_cast<int>(local);
}

// Lanes with my expert; only meaningful for lanes that have one.
__device__ __forceinline__ unsigned peers_of(int expert) { return __match_any_sync(kAll, expert); }

// Adds the warp's share of items [begin, end) to its own histogram row; returns the invalid ids this lane saw.
__device__ __forceinline__ int count_warp(const Params& p, std::int64_t begin, std::int64_t end,
                                          std::int32_t* histogram) {
  const int lane = threadIdx.x % kWarpLanes;
  int num_invalid = 0;
  for (std::int64_t first = begin; first < end; first += kWarpLanes) {
    const std::int64_t item = first + lane;
    bool invalid = false;
    const int expert = item < end ? local_expert(p, item, invalid) : -1;
    num_invalid += invalid ? 1 : 0;
    const unsigned peers = peers_of(expert);
    if (expert >= 0 && lane == __ffs(peers) - 1) histogram[expert] += __popc(peers);
    __syncwarp();
  }
  return num_invalid;
}

// Walks the items again; histogram holds the next free row per expert.
__device__ __forceinline__ void place_warp(const Params& p, std::int64_t begin, std::int64_t end, std::int32_t* next) {
  const int lane = threadIdx.x % kWarpLanes;
  for (std::int64_t first = begin; first < end; first += kWarpLanes) {
    const std::int64_t item = first + lane;
    bool invalid = false;
    const int expert = item < end ? local_expert(p, item, invalid) : -1;
    const unsigned peers = peers_of(expert);
    const int rank = __popc(peers & ((1u << lane) - 1u));
    const std::int32_t row = expert >= 0 ? next[expert] + rank : -1;
    __syncwarp();
    if (expert >= 0 && rank == 0) next[expert] += __popc(peers);
    __syncwarp();
    if (item >= end) continue;
    const std::int64_t token = item / p.num_slots;
    p.slot_row[token * p.slot_row_stride + (item - token * p.num_slots)] = row;
    if (row < 0) continue;
    p.row_token[row] = static_cast<std::int32_t>(token);
    p.row_slot[row] = static_cast<std::int32_t>(item);
  }
}

struct WarpRange {
  std::int64_t begin;
  std::int64_t end;
};
__device__ __forceinline__ WarpRange warp_range(const Params& p, std::int64_t block) {
  const std::int64_t share = p.items_per_block / kWarps;
  const std::int64_t begin = block * p.items_per_block + (threadIdx.x / kWarpLanes) * share;
  const std::int64_t end = begin + share;
  return {begin < p.num_items ? begin : p.num_items, end < p.num_items ? end : p.num_items};
}

__device__ __forceinline__ void add_invalid(const Params& p, int num_invalid) {
  if (p.counters == nullptr) return;
  const int total = __reduce_add_sync(kAll, num_invalid);
  if (threadIdx.x % kWarpLanes == 0 && total > 0) {
    atomicAdd(p.counters + static_cast<int>(Counter::kInvalidIds), static_cast<unsigned long long>(total));
  }
}

// Exclusive prefix over experts of total[e], by the whole block; returns the grand total to every thread.
__device__ std::int32_t prefix_experts(std::int32_t* total, std::int32_t num_local,
                                       std::int32_t* warp_sum /*[kWarps+1]*/) {
  const int lane = threadIdx.x % kWarpLanes;
  const int warp = threadIdx.x / kWarpLanes;
  std::int32_t carried = 0;
  for (int first = 0; first < num_local; first += kThreads) {
    const int e = first + static_cast<int>(threadIdx.x);
    const std::int32_t mine = e < num_local ? total[e] : 0;
    std::int32_t sum = mine;
    for (int d = 1; d < kWarpLanes; d *= 2) {
      const std::int32_t below = __shfl_up_sync(kAll, sum, d);
      if (lane >= d) sum += below;
    }
    if (lane == kWarpLanes - 1) warp_sum[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      std::int32_t running = 0;
      for (int w = 0; w < kWarps; ++w) {
        const std::int32_t s = warp_sum[w];
        warp_sum[w] = running;
        running += s;
      }
      warp_sum[kWarps] = running;
    }
    __syncthreads();
    if (e < num_local) total[e] = carried + warp_sum[warp] + sum - mine;
    carried += warp_sum[kWarps];
    __syncthreads();
  }
  return carried;
}

// Per-warp histograms [kWarps, L] in shared memory -> next free row per (warp, expert), given the block's base.
__device__ __forceinline__ void warp_bases(std::int32_t* histogram, std::int32_t num_local, const std::int32_t* base) {
  for (int e = threadIdx.x; e < num_local; e += kThreads) {
    std::int32_t running = base[e];
    for (int w = 0; w < kWarps; ++w) {
      const std::int32_t n = histogram[w * num_local + e];
      histogram[w * num_local + e] = running;
      running += n;
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void clear(std::int32_t* values, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) values[i] = 0;
  __syncthreads();
}

extern __shared__ std::int32_t g_histogram[];  // [kWarps, L], then [L] totals

__global__ void __launch_bounds__(kThreads) route_one_block(const __grid_constant__ Params p) {
  __shared__ std::int32_t warp_sum[kWarps + 1];
  std::int32_t* const total = g_histogram + kWarps * p.num_local;
  std::int32_t* const mine = g_histogram + (threadIdx.x / kWarpLanes) * p.num_local;
  clear(g_histogram, kWarps * p.num_local);
  const WarpRange range = warp_range(p, 0);
  add_invalid(p, count_warp(p, range.begin, range.end, mine));
  __syncthreads();
  for (int e = threadIdx.x; e < p.num_local; e += kThreads) {
    std::int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += g_histogram[w * p.num_local + e];
    total[e] = sum;
  }
  __syncthreads();
  const std::int32_t rows = prefix_experts(total, p.num_local, warp_sum);
  for (int e = threadIdx.x; e < p.num_local; e += kThreads) p.expert_offset[e] = total[e];
  if (threadIdx.x == 0) {
    p.expert_offset[p.num_local] = rows;
    *p.num_rows = rows;
  }
  warp_bases(g_histogram, p.num_local, total);
  place_warp(p, range.begin, range.end, mine);
}

__global__ void __launch_bounds__(kThreads) route_count(const __grid_constant__ Params p) {
  std::int32_t* const mine = g_histogram + (threadIdx.x / kWarpLanes) * p.num_local;
  clear(g_histogram, kWarps * p.num_local);
  const WarpRange range = warp_range(p, blockIdx.x);
  add_invalid(p, count_warp(p, range.begin, range.end, mine));
  __syncthreads();
  for (int e = threadIdx.x; e < p.num_local; e += kThreads) {
    std::int32_t sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += g_histogram[w * p.num_local + e];
    p.block_count[static_cast<std::int64_t>(blockIdx.x) * p.num_local + e] = sum;
  }
}

// One block: there are at most kMaxBlocks * L counts, all in L2.
__global__ void __launch_bounds__(kThreads) route_offsets(const __grid_constant__ Params p) {
  __shared__ std::int32_t warp_sum[kWarps + 1];
  std::int32_t* const total = g_histogram;  // [L]
  for (int e = threadIdx.x; e < p.num_local; e += kThreads) {
    std::int32_t sum = 0;
#pragma unroll 8
    for (int b = 0; b < p.num_blocks; ++b) sum += p.block_count[static_cast<std::int64_t>(b) * p.num_local + e];
    total[e] = sum;
  }
  __syncthreads();
  const std::int32_t rows = prefix_experts(total, p.num_local, warp_sum);
  for (int e = threadIdx.x; e < p.num_local; e += kThreads) {
    std::int32_t running = total[e];
    p.expert_offset[e] = running;
#pragma unroll 8
    for (int b = 0; b < p.num_blocks; ++b) {
      std::int32_t* const count = p.block_count + static_cast<std::int64_t>(b) * p.num_local + e;
      const std::int32_t n = *count;
      *count = running;
      running += n;
    }
  }
  if (threadIdx.x == 0) {
    p.expert_offset[p.num_local] = rows;
    *p.num_rows = rows;
  }
}

__global__ void __launch_bounds__(kThreads) route_place(const __grid_constant__ Params p) {
  std::int32_t* const mine = g_histogram + (threadIdx.x / kWarpLanes) * p.num_local;
  clear(g_histogram, kWarps * p.num_local);
  const WarpRange range = warp_range(p, blockIdx.x);
  count_warp(p, range.begin, range.end, mine);
  __syncthreads();
  warp_bases(g_histogram, p.num_local, p.block_count + static_cast<std::int64_t>(blockIdx.x) * p.num_local);
  place_warp(p, range.begin, range.end, mine);
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

constexpr std::int64_t kOneBlockItems = 4096;
constexpr std::int64_t kMaxBlocks = 256;

struct Shape {
  std::int64_t items_per_block;
  std::int64_t num_blocks;
};
Shape shape_of(const Args& args) {
  const std::int64_t items = args.topk_idx.view.shape[0] * args.topk_idx.view.shape[1];
  if (items <= kOneBlockItems) return {ceil_div(std::max<std::int64_t>(items, 1), kThreads) * kThreads, 1};
  const std::int64_t per_block =
      std::max<std::int64_t>(ceil_div(ceil_div(items, kMaxBlocks), kThreads) * kThreads, 2 * kThreads);
  return {per_block, ceil_div(items, per_block)};
}

}  // namespace

std::int64_t scratch_bytes_cuda(const Args& args, const Machine&) {
  const Shape shape = shape_of(args);
  const std::int64_t num_local = args.plan.expert_offset.view.shape[0] - 1;
  return shape.num_blocks == 1 ? 0 : shape.num_blocks * num_local * static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status run_cuda(const Args& args, const Ctx& ctx) {
  const cuda::DeviceGuard guard(args.topk_idx.view.device.index);
  SLUICE_TRY(cuda::to_status(guard.error(), "route: set device"));
  const Shape shape = shape_of(args);
  Params p = {};
  p.topk_idx = args.topk_idx.view.as<const std::int32_t>();
  p.topk_idx_stride = args.topk_idx.view.stride[0];
  p.num_slots = static_cast<std::int32_t>(args.topk_idx.view.shape[1]);
  p.num_items = args.topk_idx.view.shape[0] * args.topk_idx.view.shape[1];
  p.num_experts = static_cast<std::int32_t>(args.num_experts);
  p.first_expert = static_cast<std::int32_t>(args.first_expert);
  p.num_local = static_cast<std::int32_t>(args.plan.expert_offset.view.shape[0] - 1);
  p.items_per_block = shape.items_per_block;
  p.num_blocks = static_cast<std::int32_t>(shape.num_blocks);
  p.block_count = reinterpret_cast<std::int32_t*>(ctx.workspace.data());
  p.expert_offset = args.plan.expert_offset.view.as<std::int32_t>();
  p.row_token = args.plan.row_token.as<std::int32_t>();
  p.row_slot = args.plan.row_slot.as<std::int32_t>();
  p.slot_row = args.plan.slot_row.as<std::int32_t>();
  p.slot_row_stride = args.plan.slot_row.stride[0];
  p.num_rows = args.plan.num_rows.as<std::int32_t>();
  p.counters = args.counters.is_present() ? args.counters.as<unsigned long long>() : nullptr;

  const cudaStream_t stream = cuda::stream_of(ctx);
  const std::size_t histograms =
      static_cast<std::size_t>(kWarps) * static_cast<std::size_t>(p.num_local) * sizeof(std::int32_t);
  const std::size_t totals = static_cast<std::size_t>(p.num_local) * sizeof(std::int32_t);
  if (shape.num_blocks == 1)
    return cuda::launch("route_one_block", route_one_block, 1, kThreads, histograms + totals, stream, p);
  const unsigned blocks = static_cast<unsigned>(shape.num_blocks);
  SLUICE_TRY(cuda::launch("route_count", route_count, blocks, kThreads, histograms, stream, p));
  SLUICE_TRY(cuda::launch("route_offsets", route_offsets, 1, kThreads, totals, stream, p));
  return cuda::launch("route_place", route_place, blocks, kThreads, histograms, stream, p);
}

}  // namespace sluice::route
