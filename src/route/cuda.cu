// Stage 2 on a GPU: a stable counting sort without atomics on rows, so that the plan is the same bits every time.
//
// A warp owns consecutive slots and keeps its own histogram of local experts, so that order inside an expert is
// (block, warp, position) = ascending slot. Few slots take one block and one launch; more take two:
//   count:  histogram of each block's slots                      -> block_count[blocks, L]
//   place:  every block adds up the counts of the blocks before it and of all, and its warps write their slots' rows
// A kernel of its own for the offsets cost more than the sums done by every block: 64 blocks of 256 experts are 64 KiB of
// counts out of L2.
#include <algorithm>
#include <string>

#include "cuda/dependent_launch.cuh"
#include "route/cuda.h"

namespace sluice::route {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int kLanes = 32;
constexpr int kMaxWarps = 32;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
  const std::int32_t* topk_idx;  // [T,S]
  std::int64_t topk_idx_stride;
  std::uint32_t num_slots;   // S
  std::uint32_t num_items;   // T*S < 2^31
  std::int32_t num_experts;  // E
  std::int32_t first_expert;
  std::int32_t num_local;        // L
  std::uint32_t items_per_warp;  // a multiple of 32
  std::int32_t num_warps;        // of a block
  std::int32_t num_blocks;
  std::int32_t* block_count;    // [blocks, L]
  std::int32_t* expert_offset;  // [L+1]
  std::int32_t* row_token;
  std::int32_t* row_slot;
  std::int32_t* slot_row;  // [T,S]
  std::int64_t slot_row_stride;
  std::int32_t* num_rows;
  unsigned long long* counters;  // null: not counted
};

// Of a warp, [begin, end).
struct Range {
  std::uint32_t begin, end;
};
__device__ __forceinline__ Range warp_range(const Params& p) {
  const std::uint64_t begin =
      (static_cast<std::uint64_t>(blockIdx.x) * static_cast<unsigned>(p.num_warps) + threadIdx.x / kLanes) *
      p.items_per_warp;
  const std::uint64_t end = begin + p.items_per_warp;
  return {static_cast<std::uint32_t>(min(begin, static_cast<std::uint64_t>(p.num_items))),
          static_cast<std::uint32_t>(min(end, static_cast<std::uint64_t>(p.num_items)))};
}

// The local expert of a flat slot, or -1. Invalid ids are told apart for the counter.
__device__ __forceinline__ int local_expert(const Params& p, std::uint32_t item, bool& invalid) {
  const std::uint32_t token = item / p.num_slots;
  const std::int32_t id = p.topk_idx[token * p.topk_idx_stride + (item - token * p.num_slots)];
  invalid = id < -1 || id >= p.num_experts;
  const std::int64_t local = static_cast<std::int64_t>(id) - p.first_expert;
  return invalid || id < 0 || local < 0 || local >= p.num_local ? -1 : static_cast<int>(local);
}

// Calls use(expert, peers) for each step of 32 slots: peers are the lanes with the same expert. Counts invalid ids.
template <class Use>
__device__ __forceinline__ int walk(const Params& p, Range range, Use use) {
  int num_invalid = 0;
  for (std::uint32_t first = range.begin; first < range.end; first += kLanes) {
    const std::uint32_t item = first + threadIdx.x % kLanes;
    bool invalid = false;
    const int expert = item < range.end ? local_expert(p, item, invalid) : -1;
    num_invalid += invalid ? 1 : 0;
    use(item, expert, __match_any_sync(kAll, expert));
  }
  return num_invalid;
}

__device__ __forceinline__ bool is_first(unsigned peers) { return (peers & ((1u << threadIdx.x % kLanes) - 1u)) == 0; }

__device__ __forceinline__ void add_invalid(const Params& p, int num_invalid) {
  if (p.counters == nullptr) return;
  const int total = __reduce_add_sync(kAll, num_invalid);
  if (threadIdx.x % kLanes == 0 && total > 0) {
    atomicAdd(p.counters + static_cast<int>(Counter::kInvalidIds), static_cast<unsigned long long>(total));
  }
}

__device__ __forceinline__ void clear(std::int32_t* values, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) values[i] = 0;
}

extern __shared__ std::int32_t g_shared[];

__global__ void __launch_bounds__(kMaxWarps* kLanes) route_count(const __grid_constant__ Params p) {
  std::int32_t* const histogram = g_shared;  // [L]
  clear(histogram, p.num_local);
  __syncthreads();
  cuda::wait_for_previous();
  cuda::allow_next();
  // Sums of integers: the order in which warps add them cannot be seen.
  add_invalid(p, walk(p, warp_range(p), [&](std::uint32_t, int expert, unsigned peers) {
                if (expert >= 0 && is_first(peers)) atomicAdd(histogram + expert, __popc(peers));
              }));
  __syncthreads();
  std::int32_t* const count = p.block_count + static_cast<std::int64_t>(blockIdx.x) * p.num_local;
  for (int e = static_cast<int>(threadIdx.x); e < p.num_local; e += static_cast<int>(blockDim.x)) {
    count[e] = histogram[e];
  }
}

// Sums over blocks, threads sharing the blocks of an expert: total[e] over all, before[e] over those before this one.
__device__ __forceinline__ void sum_blocks(const Params& p, std::int32_t* total, std::int32_t* before) {
  const int padded = max((p.num_local + kLanes - 1) / kLanes * kLanes, kLanes);
  const int sharers = max(static_cast<int>(blockDim.x) / padded, 1);
  const int sharer = static_cast<int>(threadIdx.x) / padded;
  if (sharer >= sharers) return;
  const int mine = static_cast<int>(blockIdx.x);
  for (int e = static_cast<int>(threadIdx.x) % padded; e < p.num_local; e += static_cast<int>(blockDim.x)) {
    std::int32_t sum = 0;
    std::int32_t sum_before = 0;
    constexpr int kBatch = 16;  // loads in flight; a loop of unknown length gets no unrolled tail
    for (int first = sharer; first < p.num_blocks; first += kBatch * sharers) {
      std::int32_t n[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int b = first + i * sharers;
        n[i] = b < p.num_blocks ? p.block_count[static_cast<std::int64_t>(b) * p.num_local + e] : 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        sum += n[i];
        sum_before += first + i * sharers < mine ? n[i] : 0;
      }
    }
    atomicAdd(total + e, sum);
    atomicAdd(before + e, sum_before);
  }
}

// offset[e] = sum of total over the experts below e, by the whole block; returns the grand total to every thread.
__device__ __forceinline__ std::int32_t prefix_experts(const std::int32_t* total, std::int32_t num_local,
                                                       std::int32_t* offset) {
  __shared__ std::int32_t warp_sum[kMaxWarps];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int num_warps = static_cast<int>(blockDim.x) / kLanes;
  std::int32_t carried = 0;
  for (int first = 0; first < num_local; first += static_cast<int>(blockDim.x)) {
    const int e = first + static_cast<int>(threadIdx.x);
    const std::int32_t mine = e < num_local ? total[e] : 0;
    std::int32_t sum = mine;
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
      const std::int32_t below = __shfl_up_sync(kAll, sum, d);
      if (lane >= d) sum += below;
    }
    if (lane == kLanes - 1) warp_sum[warp] = sum;
    __syncthreads();
    const std::int32_t of_warp = lane < num_warps ? warp_sum[lane] : 0;
    const std::int32_t below = __reduce_add_sync(kAll, lane < warp ? of_warp : 0);
    if (e < num_local) offset[e] = carried + below + sum - mine;
    carried += __reduce_add_sync(kAll, of_warp);
    __syncthreads();
  }
  return carried;
}

// One block (kAlone) or, after route_count, all of them.
template <bool kAlone>
__global__ void __launch_bounds__(kMaxWarps* kLanes) route_place(const __grid_constant__ Params p) {
  std::int32_t* const histogram = g_shared;                          // [warps, L]
  std::int32_t* const total = g_shared + p.num_warps * p.num_local;  // [L]
  std::int32_t* const offset = total + p.num_local;                  // [L]
  std::int32_t* const before = offset + p.num_local;                 // [L]
  std::int32_t* const mine = histogram + static_cast<int>(threadIdx.x) / kLanes * p.num_local;
  clear(g_shared, (p.num_warps + 3) * p.num_local);
  __syncthreads();
  cuda::wait_for_previous();
  cuda::allow_next();
  if constexpr (!kAlone) sum_blocks(p, total, before);
  const Range range = warp_range(p);
  const int num_invalid = walk(p, range, [&](std::uint32_t, int expert, unsigned peers) {
    if (expert >= 0 && is_first(peers)) mine[expert] += __popc(peers);
    __syncwarp();
  });
  if constexpr (kAlone) add_invalid(p, num_invalid);
  __syncthreads();
  // Per warp and expert: rows of the block that come before the warp's.
  for (int e = static_cast<int>(threadIdx.x); e < p.num_local; e += static_cast<int>(blockDim.x)) {
    std::int32_t running = 0;
#pragma unroll 8
    for (int w = 0; w < p.num_warps; ++w) {
      const std::int32_t n = histogram[w * p.num_local + e];
      histogram[w * p.num_local + e] = running;
      running += n;
    }
    if constexpr (kAlone) total[e] = running;
  }
  __syncthreads();
  const std::int32_t rows = prefix_experts(total, p.num_local, offset);
  if (blockIdx.x == 0) {
    for (int e = static_cast<int>(threadIdx.x); e < p.num_local; e += static_cast<int>(blockDim.x)) {
      p.expert_offset[e] = offset[e];
    }
    if (threadIdx.x == 0) {
      p.expert_offset[p.num_local] = rows;
      *p.num_rows = rows;
    }
  }
  walk(p, range, [&](std::uint32_t item, int expert, unsigned peers) {
    const int rank = __popc(peers & ((1u << threadIdx.x % kLanes) - 1u));
    const std::int32_t row = expert >= 0 ? offset[expert] + before[expert] + mine[expert] + rank : -1;
    __syncwarp();
    if (expert >= 0 && rank == 0) mine[expert] += __popc(peers);
    __syncwarp();
    if (item >= range.end) return;
    const std::uint32_t token = item / p.num_slots;
    p.slot_row[token * p.slot_row_stride + (item - token * p.num_slots)] = row;
    if (row < 0) return;
    p.row_token[row] = static_cast<std::int32_t>(token);
    p.row_slot[row] = static_cast<std::int32_t>(item);
  });
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

// One multiprocessor writes scattered rows at one a cycle or so: 4096 slots in one block took 14 us.
constexpr std::int64_t kAloneItems = 1024;
constexpr std::int64_t kBlockWarps = 16;
constexpr std::int64_t kMaxBlocks = 128;

std::int64_t shared_bytes_of(std::int64_t num_warps, std::int64_t num_local) {
  return (num_warps + 3) * num_local * static_cast<std::int64_t>(sizeof(std::int32_t));
}
struct Shape {
  std::int64_t num_warps;
  std::int64_t num_blocks;
  std::int64_t items_per_warp;
};
Shape shape_of(const Args& args) {
  const std::int64_t items = args.topk_idx.view.shape[0] * args.topk_idx.view.shape[1];
  const std::int64_t num_local = args.plan.expert_offset.view.shape[0] - 1;
  const bool alone = items <= kAloneItems;
  Shape shape = {alone ? kMaxWarps : kBlockWarps, 1, 0};
  while (shape.num_warps > 4 && shared_bytes_of(shape.num_warps, num_local) > kRouteSharedBytes) shape.num_warps /= 2;
  if (!alone) shape.num_blocks = std::min(ceil_div(items, shape.num_warps * kLanes), kMaxBlocks);
  shape.items_per_warp =
      std::max<std::int64_t>(ceil_div(ceil_div(items, shape.num_blocks * shape.num_warps), kLanes), 1) * kLanes;
  return shape;
}

}  // namespace

std::int64_t scratch_bytes_cuda(const Args& args, const Machine&) {
  const std::int64_t items = args.topk_idx.view.shape[0] * args.topk_idx.view.shape[1];
  const std::int64_t num_local = args.plan.expert_offset.view.shape[0] - 1;
  // Booked for the planned T, enough for every smaller one.
  if (items <= kAloneItems) return 0;
  return kMaxBlocks * num_local * static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status run_cuda(const Args& args, const Ctx& ctx) {
  const device::Current current(args.topk_idx.view.device);
  SLUICE_TRY(current.status().with_context("route"));
  const Shape shape = shape_of(args);
  const std::int64_t needed = scratch_bytes_cuda(args, {});
  if (static_cast<std::int64_t>(ctx.workspace.size()) < needed) {
    return {StatusCode::kWorkspaceTooSmall, "route: workspace has " + std::to_string(ctx.workspace.size()) +
                                                " bytes, " + std::to_string(needed) + " needed"};
  }
  Params p = {};
  p.topk_idx = args.topk_idx.view.as<const std::int32_t>();
  p.topk_idx_stride = args.topk_idx.view.stride[0];
  p.num_slots = static_cast<std::uint32_t>(args.topk_idx.view.shape[1]);
  p.num_items = static_cast<std::uint32_t>(args.topk_idx.view.shape[0] * args.topk_idx.view.shape[1]);
  p.num_experts = static_cast<std::int32_t>(args.num_experts);
  p.first_expert = static_cast<std::int32_t>(args.first_expert);
  p.num_local = static_cast<std::int32_t>(args.plan.expert_offset.view.shape[0] - 1);
  p.items_per_warp = static_cast<std::uint32_t>(shape.items_per_warp);
  p.num_warps = static_cast<std::int32_t>(shape.num_warps);
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
  const unsigned threads = static_cast<unsigned>(shape.num_warps * kLanes);
  const unsigned blocks = static_cast<unsigned>(shape.num_blocks);
  const std::size_t place_bytes = static_cast<std::size_t>(shared_bytes_of(shape.num_warps, p.num_local));
  if (blocks == 1) return cuda::launch_after("route_place", route_place<true>, 1, threads, place_bytes, stream, p);
  const std::size_t count_bytes = static_cast<std::size_t>(p.num_local) * sizeof(std::int32_t);
  SLUICE_TRY(cuda::launch_after("route_count", route_count, blocks, threads, count_bytes, stream, p));
  return cuda::launch_after("route_place", route_place<false>, blocks, threads, place_bytes, stream, p);
}

}  // namespace sluice::route
