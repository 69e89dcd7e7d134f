// The kernel of stage 6 for many rows on Hopper (stream_sm90.cu).
#pragma once

#include <cuda_runtime.h>

#include "cuda/row_groups.cuh"
#include "sluice/config.h"

namespace sluice::swiglu_quant {

struct StreamParams {
  const std::uint16_t* h;  // [R,2I] bf16
  std::int64_t h_stride;
  cuda::DeviceRowGroups groups;
  Activation activation;
  void* a;  // [R,I] e4m3 or int8
  std::int64_t a_stride;
  float* a_scale;  // [Ib or 1,R]
  std::int64_t a_scale_block, a_scale_row;
  std::int32_t num_rows, width;  // R, I
  ScaleFormat scale_format;
  std::int32_t team_warps, num_teams, num_stages;  // set by launch_stream
};

// Rows of whole 16 bytes that a thread block can hold.
constexpr bool stream_serves(std::int64_t width) { return width % 16 == 0 && width <= 16384; }
// Rows of h and of a begin on multiples of 16 bytes.
Status launch_stream(StreamParams p, DType a, bool row_scale, int num_sms, cudaStream_t stream);

}  // namespace sluice::swiglu_quant
