// Host side of the fused kernels.
#include "fused/up_swiglu_quant/cuda.h"

#include <algorithm>

#include "cuda/dependent_launch.cuh"
#include "fused/up_swiglu_quant/kernels.h"

namespace sluice::up_swiglu_quant {

namespace wgmma = grouped_gemm::wgmma;

Status run_cuda(const Args& args, const Ctx& ctx) {
  return run_cuda_config(args, ctx, choose_config(grouped_gemm::problem_of(args.up)));
}

Status run_cuda_config(const Args& args, const Ctx& ctx, const Config& config) {
  const std::int64_t num_rows = args.up.a.shape[0];
  if (num_rows == 0 || args.up.w.shape[0] == 0) return Status::ok();
  SLUICE_TRY(grouped_gemm::check_alignment(args.up));
  const device::Current current(args.up.a.device);
  SLUICE_TRY(current.status().with_context("up_swiglu_quant"));
  FusedParams p = {};
  SLUICE_TRY(wgmma::make_params(args.up, config.tile, p));
  p.activation = args.act.activation;
  p.format = args.act.scale_format;
  p.a = args.act.a.as<std::uint8_t>();
  p.a_row = args.act.a.stride[0];
  p.scale_out = args.act.a_scale.as<float>();
  p.scale_out_block = args.act.a_scale.stride[0];
  p.scale_out_row = args.act.a_scale.stride[1];
  const Kernel kernel = config.split == 1 ? ring_kernel(config) : cluster_kernel(config);
  if (kernel == nullptr)
    return {StatusCode::kInternal, "up_swiglu_quant: no kernel was compiled for " + config.to_string()};
  const std::int64_t shared_bytes = config.tile.shared_bytes;
  unsigned blocks = 0;
  if (config.split == 1) {
    SLUICE_TRY(wgmma::num_blocks(args.up, config.tile, p, blocks));
  } else {
    // A cluster a tile of 128 columns: as many as there can be.
    p.column_tiles = p.column_tiles_per_part = static_cast<std::int32_t>(ceil_div(args.act.a.shape[1], kScaleBlock));
    const std::int64_t active = std::min(args.up.w.shape[0], num_rows);
    const std::int64_t row_tiles = (num_rows + (kClusterTokens - 1) * active) / kClusterTokens;
    blocks = static_cast<unsigned>(row_tiles * p.column_tiles * config.split);
  }
  return cuda::launch_after("up_swiglu_quant", kernel, blocks, config.split == 1 ? wgmma::kThreads : kClusterThreads,
                            static_cast<std::size_t>(shared_bytes), cuda::stream_of(ctx), p, config.split);
}

}  // namespace sluice::up_swiglu_quant
