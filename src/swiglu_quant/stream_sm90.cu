// Stage 6 for many rows on Hopper: rows come and go through the copy engine.
//
// A team of warps takes a whole row. Its h, both halves, is one piece of memory and arrives by one bulk copy, a few rows
// ahead; its a leaves by another. Memory sees runs of kilobytes where warps would ask for 256 bytes at a time, and that is
// what it was waiting for: 204 us of loads and stores became 172 for 65536 rows of 2048, 164 with nothing computed.
//
//   leader of a team   [row i+1 | row i+2 | ...]   h to the team's ring in shared memory
//   the team           wait, read, activate, amax, quantise, a to shared memory
//   leader             a to memory, while the team is at the next row
#include <algorithm>

#include "cuda/dependent_launch.cuh"
#include "cuda/sm90.cuh"
#include "swiglu_quant/gate_table.cuh"
#include "swiglu_quant/stream.h"

namespace sluice::swiglu_quant {

// ---------------------------------------------------------------------------------------------------------
// Kernels
// ---------------------------------------------------------------------------------------------------------

namespace {

namespace sm90 = cuda::sm90;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxStages = 4;
constexpr int kMaxSharedTeams = 15;  // of several warps each: named barriers 1 to 15
constexpr int kWarpColumns = 32 * kUnitColumns;
constexpr int kSharedBytes = 227 << 10;
constexpr int kRowAlign = 128;  // of the rings

struct SharedStorage {
  float table[kTableNegative + kTableCount];
  std::uint64_t full[kWarps][kMaxStages];  // a team's rows of h have arrived
  float of_warp[2][kWarps];
};
constexpr int kFixedBytes = (static_cast<int>(sizeof(SharedStorage)) + kRowAlign - 1) / kRowAlign * kRowAlign;

// The largest of the lanes' values, NaN where one of them is.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value = max_nan(value, __shfl_xor_sync(kAllLanes, value, d));
  return value;
}

// kPlainUp: the up column is taken as it is (kSilu).
template <class Q, bool kPlainUp, bool kRowScale>
__global__ void __launch_bounds__(kThreads, 1) swiglu_stream(const __grid_constant__ StreamParams p) {
  extern __shared__ uint4 g_shared[];  // SharedStorage, then for each team its ring of rows of h and two rows of a
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(g_shared);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int team = warp / p.team_warps;
  const int member = warp - team * p.team_warps;
  const bool works = team < p.num_teams;
  const bool is_leader = works && member == 0 && lane == 0;
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(p.width) * 4;
  std::uint8_t* const ring = reinterpret_cast<std::uint8_t*>(g_shared) + kFixedBytes +
                             team * (row_bytes * p.num_stages + 2 * static_cast<std::uint32_t>(p.width));
  std::uint8_t* const rows_of_a = ring + row_bytes * p.num_stages;
  if (is_leader) {
    for (int i = 0; i < p.num_stages; ++i) sm90::barrier_init(&s.full[team][i], 1);
    sm90::barrier_init_fence();
  }
  make_table(p.activation, s.table);  // ends with a barrier of the block
  wait_for_previous();
  allow_next();
  if (!works) return;

  const OwnedRows owned(p.groups, p.num_rows);
  const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * p.num_teams + team;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * p.num_teams;
  // A row that nobody owns passes through the ring without being read.
  const auto request = [&](std::int64_t row, std::uint32_t stage) {
    if (owned.has(row)) {
      sm90::barrier_arrive_expect(&s.full[team][stage], row_bytes);
      sm90::bulk_load(ring + stage * row_bytes, p.h + row * p.h_stride, row_bytes, &s.full[team][stage]);
    } else {
      sm90::barrier_arrive(&s.full[team][stage]);
    }
  };
  const auto team_barrier = [&] {
    if (p.team_warps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(p.team_warps * 32) : "memory");
    }
  };
  // Before a row of a is overwritten the copy of the row before the last must have read it. The leader's alone to ask.
  const auto wait_for_row_of_a = [&] {
    if (is_leader) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
  };
  if (is_leader) {
    for (int i = 0; i < p.num_stages; ++i) request(first_row + i * step, static_cast<std::uint32_t>(i));
  }

  // A thread's columns are two pieces of eight. With a scale for 128 columns eight lanes share a block.
  constexpr int kPitch = kRowScale ? 32 * kPiece : static_cast<int>(kScaleBlock) / 2;
  const int in_warp = kRowScale
                          ? lane * kPiece
                          : lane / kUnitsPerBlock * static_cast<int>(kScaleBlock) + lane % kUnitsPerBlock * kPiece;
  const int column = member * kWarpColumns + in_warp;
  const bool first = column < p.width;
  const bool second = column + kPitch < p.width;
  sm90::RingPosition at;
  int phase = 0;   // of of_warp: used again two rounds later, when a barrier lies in between
  int buffer = 0;  // of rows_of_a
  for (std::int64_t row = first_row; row < p.num_rows; row += step) {
    sm90::barrier_wait(&s.full[team][at.stage], at.parity);
    const bool has = owned.has(row);
    RawUnit raw = ones();
    const std::uint8_t* const from = ring + at.stage * row_bytes + column * 2;
    if (first && has) {
      raw.g[0] = *reinterpret_cast<const uint4*>(from);
      raw.u[0] = *reinterpret_cast<const uint4*>(from + p.width * 2);
    }
    if (second && has) {
      raw.g[1] = *reinterpret_cast<const uint4*>(from + kPitch * 2);
      raw.u[1] = *reinterpret_cast<const uint4*>(from + kPitch * 2 + p.width * 2);
    }
    float v[kUnitColumns];
    activate_raw<kPlainUp>(p.activation, s.table, raw, v);
    if (!second) {  // the row ends here
#pragma unroll
      for (int i = 0; i < kUnitColumns; ++i) v[i] = i < kPiece && first ? v[i] : 0.0f;
    }

    GroupAmax group;
    wait_for_row_of_a();
    if constexpr (kRowScale) {
      const auto team_max = [&](float amax) {
        amax = warp_max(amax);
        if (p.team_warps == 1) return amax;
        if (lane == 0) s.of_warp[phase][warp] = amax;
        team_barrier();
#pragma unroll 4
        for (int w = 0; w < p.team_warps; ++w) amax = max_nan(amax, s.of_warp[phase][team * p.team_warps + w]);
        phase ^= 1;
        return amax;
      };
      group = {team_max(amax_of(v)), true};
      if (!is_finite(group.amax)) group = {team_max(finite_amax(v)), false};
      if (p.team_warps == 1) __syncwarp();
    } else {
      team_barrier();
      group = block_amax(v);
    }
    // Everybody has read the row.
    if (is_leader) request(row + p.num_stages * step, at.stage);
    at.advance(p.num_stages);
    if (!has) continue;

    const float scale = scale_of<Q>(group.amax, p.scale_format);
    if (!group.finite) {
#pragma unroll
      for (int i = 0; i < kUnitColumns; ++i) v[i] = canonical(v[i]);
    }
    const uint4 q = quantise_unit<Q>(v, scale, group.finite);
    std::uint8_t* const to = rows_of_a + buffer * p.width;
    if (first) *reinterpret_cast<uint2*>(to + column) = make_uint2(q.x, q.y);
    if (second) *reinterpret_cast<uint2*>(to + column + kPitch) = make_uint2(q.z, q.w);
    sm90::async_fence();
    team_barrier();
    if (is_leader) {
      sm90::bulk_store(static_cast<Q*>(p.a) + row * p.a_stride, to, static_cast<std::uint32_t>(p.width));
      sm90::bulk_commit();
    }
    buffer ^= 1;
    if constexpr (kRowScale) {
      if (is_leader) p.a_scale[row * p.a_scale_row] = scale;
    } else if (lane % kUnitsPerBlock == 0 && first) {
      p.a_scale[column / kScaleBlock * p.a_scale_block + row * p.a_scale_row] = scale;
    }
  }
  if (is_leader) sm90::bulk_wait_read();
}

// ---------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------

template <bool kPlainUp>
auto kernel_for(DType a, bool row_scale) {
  if (a == DType::kI8) return swiglu_stream<std::int8_t, kPlainUp, true>;
  return row_scale ? swiglu_stream<std::uint8_t, kPlainUp, true> : swiglu_stream<std::uint8_t, kPlainUp, false>;
}

}  // namespace

Status launch_stream(StreamParams p, DType a, bool row_scale, int num_sms, cudaStream_t stream) {
  p.team_warps = static_cast<std::int32_t>(ceil_div(p.width, kWarpColumns));
  p.num_teams = kWarps / p.team_warps;
  if (p.team_warps > 1) p.num_teams = std::min(p.num_teams, kMaxSharedTeams);
  // What a team may have; the widest row fits twice.
  const int team_bytes = (kSharedBytes - kFixedBytes) / p.num_teams - 2 * p.width;
  p.num_stages = std::min(kMaxStages, team_bytes / (4 * p.width));
  const int shared_bytes = kFixedBytes + p.num_teams * (p.num_stages * 4 + 2) * p.width;
  const std::int64_t blocks = std::min<std::int64_t>(ceil_div(p.num_rows, p.num_teams), num_sms);
  const auto kernel =
      p.activation.kind == ActivationKind::kSilu ? kernel_for<true>(a, row_scale) : kernel_for<false>(a, row_scale);
  return launch_after("swiglu", kernel, static_cast<unsigned>(blocks), kThreads, static_cast<std::size_t>(shared_bytes),
                      stream, p);
}

}  // namespace sluice::swiglu_quant
