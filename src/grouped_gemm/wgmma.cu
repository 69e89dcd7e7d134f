// Host side of the tensor-core grouped GEMM: tensor maps and launch.
#include "cuda/dependent_launch.cuh"
#include "cuda/tensor_map.h"
#include "grouped_gemm/cuda.h"
#include "grouped_gemm/tokens_on_m.h"
#include "grouped_gemm/wgmma.h"

namespace sluice::grouped_gemm {

namespace {

using wgmma::Scaling;

wgmma::Kernel kernel_for(const Args& args, const GpuTile& tile) {
  if (args.a.dtype == DType::kBF16) return wgmma::bf16_kernel(tile);
  if (args.a.dtype == DType::kI8) return wgmma::int8_row_kernel(tile);
  return wgmma::scaling_of(args) == Scaling::kRow ? wgmma::fp8_row_kernel(tile) : wgmma::fp8_block_kernel(tile);
}

}  // namespace

Status run_wgmma(const Args& args, const Ctx& ctx) { return run_wgmma_tile(args, ctx, choose_tile(problem_of(args))); }

namespace wgmma {

Scaling scaling_of(const Args& args) {
  if (!args.a_scale.is_present()) return Scaling::kNone;
  return scales_by_row(args) ? Scaling::kRow : Scaling::kBlock;
}

Status make_params(const Args& args, const GpuTile& tile, Params& p) {
  const std::int64_t depth = args.w.shape[2];
  const GpuProblem problem = problem_of(args);
  const std::int64_t parts = problem.n / problem.part_rows;
  const std::int64_t bytes = problem.element_bytes;
  // Weight rows a copy brings, and output columns of a tile.
  const std::int64_t box_rows = tile.paired ? tile.weight_rows / 2 : tile.weight_rows;
  const cuuint64_t w_extent[4] = {static_cast<cuuint64_t>(depth), static_cast<cuuint64_t>(problem.part_rows),
                                  static_cast<cuuint64_t>(parts), static_cast<cuuint64_t>(problem.num_groups)};
  const cuuint64_t w_stride[3] = {static_cast<cuuint64_t>(args.w.stride[1] * bytes),
                                  static_cast<cuuint64_t>(args.w.stride[1] * bytes * problem.part_rows),
                                  static_cast<cuuint64_t>(args.w.stride[0] * bytes)};
  SLUICE_TRY(
      cuda::make_operand_map("grouped_gemm: w", args.w, w_extent, w_stride, static_cast<int>(box_rows), p.weights));
  SLUICE_TRY(cuda::make_rows_map("grouped_gemm: a", args.a, static_cast<int>(tile.box_tokens()), p.tokens));
  p.groups = cuda::DeviceRowGroups::from(args.groups);
  p.num_groups = static_cast<std::int32_t>(problem.num_groups);
  p.num_rows = static_cast<std::int32_t>(problem.num_rows);
  p.num_k_steps = static_cast<std::int32_t>(ceil_div(depth * bytes, 128));
  p.part_rows = static_cast<std::int32_t>(problem.part_rows);
  p.column_tiles_per_part = static_cast<std::int32_t>(ceil_div(problem.part_rows, box_rows));
  p.column_tiles = static_cast<std::int32_t>(p.column_tiles_per_part * (tile.paired ? 1 : parts));
  p.scale_rows_per_part = static_cast<std::int32_t>(ceil_div(problem.part_rows, kScaleBlock));
  p.num_stages = static_cast<std::uint32_t>(tile.stages);
  p.groups_settled = args.groups_settled;
  p.set(args);
  if (tile.paired) return Status::ok();  // another output
  p.out = args.out.as<std::uint16_t>();
  p.out_row = args.out.stride[0];
  p.wide = reinterpret_cast<std::uintptr_t>(args.out.data) % 16 == 0 && args.out.stride[0] % 8 == 0 &&
           problem.part_rows % 8 == 0;
  return Status::ok();
}

Status num_blocks(const Args& args, const GpuTile& tile, const Params& p, unsigned& blocks) {
  cuda::DeviceFacts facts;
  SLUICE_TRY(cuda::facts_of(args.a.device.index, facts).with_context("grouped_gemm"));
  // No more blocks than there can be tiles: at most one partly filled row tile a group, and no group without a row.
  const std::int64_t num_rows = args.a.shape[0];
  const std::int64_t active = std::min(args.w.shape[0], num_rows);
  const std::int64_t row_tiles = (num_rows + (tile.tokens - 1) * active) / tile.tokens;
  blocks = static_cast<unsigned>(std::min<std::int64_t>(facts.num_sms, row_tiles * p.column_tiles));
  return Status::ok();
}

}  // namespace wgmma

Status run_wgmma_tile(const Args& args, const Ctx& ctx, const GpuTile& tile) {
  if (args.a.shape[0] == 0 || args.w.shape[0] == 0) return Status::ok();
  SLUICE_TRY(check_alignment(args));
  const device::Current current(args.a.device);
  SLUICE_TRY(current.status().with_context("grouped_gemm"));
  if (tile.tokens_on_m) return run_tokens_on_m(args, ctx, tile);
  wgmma::Params p = {};
  SLUICE_TRY(wgmma::make_params(args, tile, p));
  const wgmma::Kernel kernel = kernel_for(args, tile);
  if (kernel == nullptr) return {StatusCode::kInternal, "grouped_gemm: no kernel was compiled for " + tile.to_string()};
  unsigned blocks = 0;
  SLUICE_TRY(wgmma::num_blocks(args, tile, p, blocks));
  return cuda::launch_after("grouped_gemm_wgmma", kernel, blocks, tile.threads(),
                            static_cast<std::size_t>(tile.shared_bytes), cuda::stream_of(ctx), p);
}

}  // namespace sluice::grouped_gemm
