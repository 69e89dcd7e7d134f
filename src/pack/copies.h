// The parameters of the pack kernels, and the one that sends rows by the copy engine (copies_sm90.cu).
#pragma once

#include <cuda_runtime.h>

#include "cuda/row_groups.cuh"
#include "sluice/config.h"

namespace sluice::pack {

struct Params {
  const void* x;  // [T,H]
  std::int64_t x_stride;
  const float* x_scale;  // [Hb or 1,T]
  std::int64_t x_scale_block, x_scale_token;
  const std::int32_t* slot_row;  // [T,S]; null: one source per row
  std::int64_t slot_row_stride;
  const std::int32_t* row_token;  // [R]; null: the row is its token
  const std::int32_t* row_slot;   // [R]
  const std::int32_t* num_rows;   // [1]; null: all
  cuda::DeviceRowGroups groups;
  const float* weight;  // [T,S]; null: unweighted
  std::int64_t weight_stride;
  void* rows;  // [R,H]
  std::int64_t rows_stride;
  float* rows_scale;  // [Hb or 1,R]
  std::int64_t rows_scale_block, rows_scale_row;
  float* token_scale;                                      // [T,Hb] scratch; null: straight to rows_scale
  std::int64_t num_tokens, capacity;                       // T, R
  std::int64_t num_sources, warps_per_source, num_scales;  // num_scales: Hb or 1
  std::int32_t num_slots;                                  // S
  std::int64_t hidden;                                     // H
  ScaleFormat scale_format;
  bool wide_x, wide_rows;
};

// Rows of whole 16 bytes whose sixteen columns a thread fit one block.
constexpr bool copies_serve(std::int64_t hidden) { return hidden % 16 == 0 && hidden <= 16384; }
// bf16 tokens with slot_row to rows of e4m3 or int8 that have one scale each and begin on multiples of 16 bytes.
Status launch_copies(const Params& p, DType rows, cudaStream_t stream);

}  // namespace sluice::pack
