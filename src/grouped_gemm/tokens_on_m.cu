// Host side of the grouped GEMM for many rows an expert.
#include "grouped_gemm/tokens_on_m.h"

#include "cuda/dependent_launch.cuh"
#include "cuda/tensor_map.h"

namespace sluice::grouped_gemm {

namespace {

tokens_on_m::Kernel kernel_for(const Args& args) {
  if (args.a.dtype == DType::kBF16) return tokens_on_m::bf16_kernel();
  if (args.a.dtype == DType::kI8) return tokens_on_m::int8_row_kernel();
  return wgmma::scaling_of(args) == wgmma::Scaling::kRow ? tokens_on_m::fp8_row_kernel()
                                                         : tokens_on_m::fp8_block_kernel();
}

}  // namespace

Status run_tokens_on_m(const Args& args, const Ctx& ctx, const GpuTile& tile) {
  if (tile.tokens != tokens_on_m::kTokens || tile.weight_rows != tokens_on_m::kColumns || tile.stages == 0) {
    return {StatusCode::kInternal, "grouped_gemm: no kernel was compiled for " + tile.to_string()};
  }
  tokens_on_m::Params p = {};
  SLUICE_TRY(wgmma::make_params(args, tile, p));
  p.slabs = p.wide && p.part_rows % tokens_on_m::kBlockColumns == 0;
  if (p.slabs) {
    const std::int64_t parts = args.out.shape[1] / p.part_rows;
    SLUICE_TRY(cuda::make_output_map("grouped_gemm: out", args.out, p.part_rows, parts, tokens_on_m::kBlocks,
                                     tokens_on_m::kSlabRows, p.out_slabs));
  }
  unsigned blocks = 0;
  SLUICE_TRY(wgmma::num_blocks(args, tile, p, blocks));
  return cuda::launch_after("grouped_gemm_tokens_on_m", kernel_for(args), blocks, tile.threads(),
                            static_cast<std::size_t>(tile.shared_bytes), cuda::stream_of(ctx), p);
}

}  // namespace sluice::grouped_gemm
