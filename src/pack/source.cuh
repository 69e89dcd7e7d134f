// What a pack kernel is given, and the token and rows it works on.
#pragma once

#include "cuda/columns.cuh"
#include "cuda/row_groups.cuh"
#include "pack/copies.h"

namespace sluice::pack {

using namespace sluice::cuda;  // NOLINT: the device helpers; only kernels of this stage include this

// A token and the rows that want it: lane s of a warp holds row s, -1 for none.
struct Source {
  std::int64_t token;
  float weight;
  std::int32_t row;
  int num_slots;
};

// Source i for this warp; false when nothing wants it.
__device__ __forceinline__ bool find_source(const Params& p, std::int64_t i, Source& source) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  source.weight = 1.0f;
  source.row = -1;
  if (p.slot_row != nullptr) {
    source.token = i;
    source.num_slots = p.num_slots;
    if (lane < p.num_slots) source.row = __ldg(p.slot_row + i * p.slot_row_stride + lane);
    if (source.row >= p.capacity) source.row = -1;
    return true;  // not asked here: x is on its way while the rows are
  }
  if ((p.num_rows != nullptr && i >= *p.num_rows) || !p.groups.owns(i)) return false;
  source.num_slots = 1;
  source.token = p.row_token == nullptr ? i : p.row_token[i];
  if (source.token < 0 || source.token >= p.num_tokens) return false;
  if (lane == 0) source.row = static_cast<std::int32_t>(i);
  if (p.weight != nullptr) {
    const std::int32_t slot = p.row_slot[i];
    source.weight = p.weight[slot / p.num_slots * p.weight_stride + slot % p.num_slots];
  }
  return true;
}

// v = x[token, column ...] (* weight); returns how many columns there are.
template <class X>
__device__ __forceinline__ int load_token(const Params& p, const Source& source, std::int64_t column,
                                          float (&v)[kUnitColumns]) {
  const X* const x = static_cast<const X*>(p.x) + source.token * p.x_stride;
  const int count = columns_left(p.hidden, column, kUnitColumns);
  load_unit(count > 0 ? x + column : x, count, p.wide_x && count == kUnitColumns, v);
  if (p.weight != nullptr) {
#pragma unroll
    for (int i = 0; i < kUnitColumns; ++i) v[i] = canonical(__fmul_rn(v[i], source.weight));
  }
  return count;
}

}  // namespace sluice::pack
