// The tensor-core grouped GEMM between host and device code: tile configurations, kernel parameters, launchers.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/row_groups.cuh"
#include "grouped_gemm/device_scales.h"
#include "grouped_gemm/gpu_config.h"
#include "sluice/stage/grouped_gemm.h"

namespace sluice::grouped_gemm::wgmma {

// What the kernel is compiled for beside the tile: where scales enter.
//   kNone    none (bf16)
//   kBlock   a_scale * w_scale after every 128 of K
//   kRow     a_scale[r] * w_scale[n] after the whole sum
enum class Scaling : std::uint8_t { kNone, kBlock, kRow };

struct Params : DeviceScales {
  CUtensorMap weights;  // w as [L, parts, part_rows, K], boxes of one weight tile by 128 bytes
  CUtensorMap tokens;   // a as [R, K], boxes of one token tile by 128 bytes
  cuda::DeviceRowGroups groups;
  std::int32_t num_groups, num_rows;  // L, R
  std::int32_t num_k_steps;           // of 128 bytes
  std::int32_t part_rows;             // rows of one of the stacked matrices
  std::int32_t column_tiles_per_part, column_tiles;
  std::int32_t scale_rows_per_part;  // ceil(part_rows/128)
  std::uint32_t num_stages;
  std::uint16_t* out;  // [R,N] bf16
  std::int64_t out_row;
  bool wide;  // 16-byte stores are legal
  bool groups_settled;
};

constexpr int kThreads = 384;  // a producer and two consumer warpgroups

Scaling scaling_of(const Args& args);
// Of legal args: everything but the kernel. A paired tile covers the same columns of two stacked matrices.
Status make_params(const Args& args, const GpuTile& tile, Params& p);
// Blocks of a persistent launch: the device's multiprocessors, or as many as there can be tiles.
Status num_blocks(const Args& args, const GpuTile& tile, const Params& p, unsigned& blocks);

using Kernel = void (*)(Params);
// The kernel of a tile, or null where it was not compiled. One function per operand type: each is a file of its own,
// so that they compile side by side.
Kernel fp8_block_kernel(const GpuTile& tile);
Kernel fp8_row_kernel(const GpuTile& tile);
Kernel int8_row_kernel(const GpuTile& tile);
Kernel bf16_kernel(const GpuTile& tile);

}  // namespace sluice::grouped_gemm::wgmma
