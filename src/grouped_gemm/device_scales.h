// Scales and bias of a grouped GEMM as its kernels read them.
#pragma once

#include <cstdint>

#include "sluice/stage/grouped_gemm.h"

namespace sluice::grouped_gemm {

// Base of the kernels' Params.
struct DeviceScales {
  const float* a_scale = nullptr;  // [Kb,R] or [1,R], or null
  std::int64_t a_scale_step = 0, a_scale_row = 0;
  const float* w_scale = nullptr;  // [L,Nb,Kb] or [L,N,1], or null
  std::int64_t w_scale_group = 0, w_scale_row = 0, w_scale_step = 0;
  const float* bias = nullptr;  // [L,N] or null
  std::int64_t bias_group = 0;

  void set(const Args& args) {
    if (args.a_scale.is_present()) {
      a_scale = args.a_scale.as<const float>();
      a_scale_step = args.a_scale.stride[0];
      a_scale_row = args.a_scale.stride[1];
    }
    if (args.w_scale.is_present()) {
      w_scale = args.w_scale.as<const float>();
      w_scale_group = args.w_scale.stride[0];
      w_scale_row = args.w_scale.stride[1];
      w_scale_step = args.w_scale.stride[2];
    }
    if (args.bias.is_present()) {
      bias = args.bias.as<const float>();
      bias_group = args.bias.stride[0];
    }
  }
};

}  // namespace sluice::grouped_gemm
