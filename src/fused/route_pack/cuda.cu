// Few tokens: every block finds the place of every slot by comparing the experts of all, so that no kernel has to sort before
// rows can be packed. x is on its way meanwhile. A warp packs 512 columns of a token into all its rows, as in src/pack; the
// first block also writes the plan.
#include <algorithm>
#include <string>

#include "cuda/columns.cuh"
#include "cuda/dependent_launch.cuh"
#include "fused/route_pack/impls.h"

namespace sluice::route_pack {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

using namespace sluice::cuda;  // NOLINT: the device helpers, in this file alone

constexpr int kThreads = 128;
constexpr int kWarpColumns = 32 * kUnitColumns;
constexpr int kBlockColumns = kThreads / 32 * kWarpColumns;
constexpr int kMost = static_cast<int>(kMostSlots);
static_assert(kMost == kThreads);

struct Params {
  const std::int32_t* topk_idx;  // [T,S]
  std::int64_t topk_idx_stride;
  std::int32_t num_slots, num_items;  // S, T*S
  std::int32_t num_experts, first_expert, num_local;
  std::int32_t* expert_offset;  // [L+1]
  std::int32_t* row_token;      // [R]
  std::int32_t* row_slot;
  std::int32_t* slot_row;  // [T,S]
  std::int64_t slot_row_stride;
  std::int32_t* num_rows;
  unsigned long long* counters;  // null: not counted
  const void* x;                 // [T,H]
  std::int64_t x_stride, hidden;
  std::uint8_t* rows;  // [R,H]
  std::int64_t rows_stride, capacity;
  float* rows_scale;  // [Hb,R]
  std::int64_t rows_scale_block, rows_scale_row;
  std::int32_t blocks_per_token;
  ScaleFormat scale_format;
  bool wide_x, wide_rows;
};

constexpr std::int32_t kNowhere = INT32_MAX;  // behind every expert

// The row of a slot of this expert: slots of lower experts, and earlier ones of the same, come first.
__device__ __forceinline__ std::int32_t row_of(const std::int32_t* experts, std::int32_t num_items, std::int32_t expert,
                                               std::int32_t item) {
  std::int32_t before = 0;
#pragma unroll 4
  for (std::int32_t i = 0; i < num_items; ++i)
    before += experts[i] < expert || (experts[i] == expert && i < item) ? 1 : 0;
  return before;
}

// X: float or std::uint16_t (bf16).
template <class X>
__global__ void __launch_bounds__(kThreads) route_and_pack(const __grid_constant__ Params p) {
  __shared__ std::int32_t experts[kMost];
  wait_for_previous();
  allow_next();
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const int lane = thread % 32;
  const std::int32_t token = static_cast<std::int32_t>(blockIdx.x) / p.blocks_per_token;
  const std::int32_t part = static_cast<std::int32_t>(blockIdx.x) - token * p.blocks_per_token;
  const std::int64_t column = static_cast<std::int64_t>(part) * kBlockColumns + thread * kUnitColumns;
  const int count = columns_left(p.hidden, column, kUnitColumns);
  float v[kUnitColumns];
  load_unit(static_cast<const X*>(p.x) + (count > 0 ? token * p.x_stride + column : 0), count,
            p.wide_x && count == kUnitColumns, v);

  bool invalid = false;
  if (thread < p.num_items) {
    const std::int32_t of = thread / p.num_slots;
    const std::int32_t id = p.topk_idx[of * p.topk_idx_stride + (thread - of * p.num_slots)];
    invalid = id < -1 || id >= p.num_experts;
    const std::int64_t local = static_cast<std::int64_t>(id) - p.first_expert;
    const bool is_here = !invalid && id >= 0 && local >= 0 && local < p.num_local;
    experts[thread] = is_here ? static_cast<std::int32_t>(local) : kNowhere;
  }
  __syncthreads();

  // ---- the rows of this warp's token ----
  std::int32_t my_row = -1;
  const std::int32_t item = token * p.num_slots + lane;
  if (lane < p.num_slots && item < p.num_items) {
    const std::int32_t expert = experts[item];
    if (expert != kNowhere) my_row = row_of(experts, p.num_items, expert, item);
  }
  __syncwarp();
  const GroupAmax group = block_amax(v);
  const float scale = scale_of<std::uint8_t>(group.amax, p.scale_format);
  const uint4 q = quantise_unit<std::uint8_t>(v, scale, group.finite);
  const bool first_of_block = lane % kUnitsPerBlock == 0 && count > 0;
  for (std::int32_t s = 0; s < p.num_slots; ++s) {
    const std::int64_t row = __shfl_sync(kAllLanes, my_row, s);
    if (row < 0 || row >= p.capacity) continue;
    store_bytes(q, p.rows + row * p.rows_stride + column, count, p.wide_rows && count == kUnitColumns);
    if (first_of_block) p.rows_scale[column / kScaleBlock * p.rows_scale_block + row * p.rows_scale_row] = scale;
  }

  // ---- the plan ----
  if (blockIdx.x != 0) return;
  if (thread < p.num_items) {
    const std::int32_t expert = experts[thread];
    const std::int32_t row = expert == kNowhere ? -1 : row_of(experts, p.num_items, expert, thread);
    const std::int32_t of = thread / p.num_slots;
    p.slot_row[of * p.slot_row_stride + (thread - of * p.num_slots)] = row;
    if (row >= 0) {
      p.row_token[row] = of;
      p.row_slot[row] = thread;
    }
  }
  for (std::int32_t e = thread; e <= p.num_local; e += kThreads) {
    const std::int32_t rows = row_of(experts, p.num_items, e, 0);
    p.expert_offset[e] = rows;
    if (e == p.num_local) *p.num_rows = rows;
  }
  if (p.counters != nullptr) {
    const int total = __popc(__ballot_sync(kAllLanes, invalid));
    if (lane == 0 && total > 0)
      atomicAdd(p.counters + static_cast<int>(Counter::kInvalidIds), static_cast<unsigned long long>(total));
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

}  // namespace

Status run_cuda(const Args& args, const Ctx& ctx) {
  const route::Args& route = args.route;
  const pack::Args& pack = args.pack;
  const TensorView& ids = route.topk_idx.view;
  if (ids.num_elements() > kMostSlots) {
    return {StatusCode::kInternal, "route_pack: " + std::to_string(ids.num_elements()) + " slots, at most " +
                                       std::to_string(kMostSlots) + " are for one kernel"};
  }
  const device::Current current(pack.x.device);
  SLUICE_TRY(current.status().with_context("route_pack"));
  Params p = {};
  p.topk_idx = ids.as<const std::int32_t>();
  p.topk_idx_stride = ids.stride[0];
  p.num_slots = static_cast<std::int32_t>(ids.shape[1]);
  p.num_items = static_cast<std::int32_t>(ids.num_elements());
  p.num_experts = static_cast<std::int32_t>(route.num_experts);
  p.first_expert = static_cast<std::int32_t>(route.first_expert);
  p.num_local = static_cast<std::int32_t>(route.plan.expert_offset.view.shape[0] - 1);
  p.expert_offset = route.plan.expert_offset.view.as<std::int32_t>();
  p.row_token = route.plan.row_token.as<std::int32_t>();
  p.row_slot = route.plan.row_slot.as<std::int32_t>();
  p.slot_row = route.plan.slot_row.as<std::int32_t>();
  p.slot_row_stride = route.plan.slot_row.stride[0];
  p.num_rows = route.plan.num_rows.as<std::int32_t>();
  if (route.counters.is_present()) p.counters = route.counters.as<unsigned long long>();
  p.x = pack.x.data;
  p.x_stride = pack.x.stride[0];
  p.hidden = pack.x.shape[1];
  p.rows = pack.rows.as<std::uint8_t>();
  p.rows_stride = pack.rows.stride[0];
  p.capacity = pack.rows.shape[0];
  p.rows_scale = pack.rows_scale.as<float>();
  p.rows_scale_block = pack.rows_scale.stride[0];
  p.rows_scale_row = pack.rows_scale.stride[1];
  p.blocks_per_token = static_cast<std::int32_t>(ceil_div(p.hidden, kBlockColumns));
  p.scale_format = pack.scale_format;
  p.wide_x = allows_wide(pack.x);
  p.wide_rows = allows_wide(pack.rows);
  // Without tokens there still is a plan to write.
  if (ids.shape[0] == 0) p.hidden = 0;
  const auto blocks = static_cast<unsigned>(std::max<std::int64_t>(ids.shape[0] * p.blocks_per_token, 1));
  return launch_after("route_pack",
                      pack.x.dtype == DType::kBF16 ? route_and_pack<std::uint16_t> : route_and_pack<float>, blocks,
                      kThreads, 0, stream_of(ctx), p);
}

}  // namespace sluice::route_pack
