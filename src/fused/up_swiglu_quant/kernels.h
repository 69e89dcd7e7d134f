// The fused kernels between host and device code.
#pragma once

#include "fused/up_swiglu_quant/config.h"
#include "grouped_gemm/wgmma.h"

namespace sluice::up_swiglu_quant {

struct FusedParams : grouped_gemm::wgmma::Params {
  Activation activation;
  ScaleFormat format;
  std::uint8_t* a;  // [R,I] e4m3
  std::int64_t a_row;
  float* scale_out;  // [Ib,R]
  std::int64_t scale_out_block, scale_out_row;
};

using Kernel = void (*)(FusedParams);
// The kernel of a layout, or null where it was not compiled.
Kernel ring_kernel(const Config& config);
constexpr int kClusterThreads = 256;  // of the kernel whose blocks share a tile
Kernel cluster_kernel(const Config& config);

}  // namespace sluice::up_swiglu_quant
