// The choice of tiles for the tensor cores, and what they refuse.
#include "grouped_gemm/gpu_config.h"

#include <fmt/format.h>

#include <algorithm>

#include "grouped_gemm/tile_memory.h"
#include "grouped_gemm/tokens_memory.h"
#include "sluice/core.h"

namespace sluice::grouped_gemm {

namespace {
constexpr std::int64_t kMaxStages = 16;
}  // namespace

std::string GpuTile::to_string() const {
  return fmt::format("tiles of {} tokens x {} weight rows, {} on the M side, {} stages, {} bytes of shared memory",
                     tokens, weight_rows, tokens_on_m ? "tokens" : "weights", stages, shared_bytes);
}

std::int64_t GpuTile::box_tokens() const { return tokens_on_m ? grouped_gemm::tokens_on_m::kRowsEach : tokens; }

unsigned GpuTile::threads() const {
  const int consumers = tokens_on_m ? grouped_gemm::tokens_on_m::kConsumers
                                    : consumers_of(static_cast<int>(tokens), static_cast<int>(weight_rows), paired);
  return static_cast<unsigned>(128 * (1 + consumers));
}

GpuTile with_stages(GpuTile tile, const GpuProblem& p) {
  if (tile.tokens_on_m) {
    tile.shared_bytes = tokens_on_m::shared_bytes(p.num_groups);
    tile.stages = tile.shared_bytes <= p.shared_bytes ? tokens_on_m::kStages : 0;
    return tile;
  }
  const TileMemory memory =
      TileMemory::of(static_cast<int>(tile.tokens), static_cast<int>(tile.weight_rows), p.block_scales, tile.paired);
  const std::int64_t stage_bytes = memory.stage_bytes(), fixed_bytes = memory.fixed_bytes(p.num_groups);
  tile.stages = std::min(kMaxStages, (p.shared_bytes - fixed_bytes) / stage_bytes);
  tile.shared_bytes = fixed_bytes + tile.stages * stage_bytes;
  return tile;
}

// From `gpu_gemm_tiles` on an H200 (docs/performance.md). An expert's rows are not known here, only their mean if all experts
// take part: uniform routing spreads them by the root of that, and a second tile of an expert reads its weights again,
// from L2.
GpuTile choose_tile(const GpuProblem& p) {
  const std::int64_t groups = std::max<std::int64_t>(1, std::min(p.num_groups, p.num_rows));
  const double mean = static_cast<double>(p.num_rows) / static_cast<double>(groups);
  GpuTile tile;
  // Where a tile has few steps of K its store counts most, and tokens on M store it in whole rows.
  const bool short_k = p.k * p.element_bytes <= 4 * TileMemory::kStepBytes;
  if (mean > (short_k ? 40 : 96)) {
    tile.tokens_on_m = true;
    tile.tokens = 128;
    tile.weight_rows = 256;
    return with_stages(tile, p);
  }
  tile.tokens = mean > 48 ? 96 : mean > 20 ? 64 : mean > 6 ? 32 : mean > 2 ? 16 : 8;
  // 256 rows keep the tensor cores busier, but halve the number of tiles: not where they would leave SMs idle. With few rows
  // an expert the down GEMM runs faster in 128 (DeepSeek-V3 T = 32: 547 us instead of 558), and where its K is short from 32
  // tokens on (T = 512, I = 256: 129 instead of 134), the other way round below (T = 8: 32.7 instead of 30.8).
  const std::int64_t wide_tiles = groups * (p.n / p.part_rows) * ceil_div(p.part_rows, 2 * kScaleBlock);
  const bool is_down = p.n == p.part_rows;
  const bool prefers_128 = is_down && tile.tokens <= 32 && short_k == (tile.tokens == 32);
  tile.weight_rows = 10 * wide_tiles >= 9 * p.num_sms && !prefers_128 ? 256 : 128;
  return with_stages(tile, p);
}

bool scales_by_row(const Args& args) { return args.a.dtype == DType::kI8 || has_row_scales(args); }

GpuProblem problem_of(const Args& args) {
  GpuProblem p;
  p.num_groups = args.w.shape[0];
  p.num_rows = args.a.shape[0];
  p.n = args.w.shape[1];
  p.k = args.w.shape[2];
  p.part_rows = args.part_rows > 0 ? args.part_rows : p.n;
  p.element_bytes = size_bytes(args.a.dtype);
  p.block_scales = args.a_scale.is_present() && !scales_by_row(args);
  return p;
}

// ---------------------------------------------------------------------------------------------------------
// Refusals
// ---------------------------------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kTmaAlignBytes = 16;

Status decline(std::string text) { return {StatusCode::kUnsupported, std::move(text)}; }

Status needs_hopper(const Machine& machine) {
  if (machine.gpu.capability.major == 9) return Status::ok();
  return decline(fmt::format("needs a GPU of compute capability 9.x (Hopper), '{}' has {}", machine.gpu.name,
                             to_string(machine.gpu.capability)));
}

Status check_strides(std::string_view name, const TensorView& view) {
  for (int axis = 0; axis + 1 < view.rank; ++axis) {
    const std::int64_t stride = view.stride[static_cast<std::size_t>(axis)];
    if (stride * size_bytes(view.dtype) % kTmaAlignBytes != 0) {
      return decline(fmt::format("{} = {} has a stride of {} elements, which is no multiple of {} bytes", name,
                                 view.to_string(), stride, kTmaAlignBytes));
    }
  }
  return Status::ok();
}

Status check_start(std::string_view name, const TensorView& view) {
  const auto past = reinterpret_cast<std::uintptr_t>(view.data) % kTmaAlignBytes;
  if (past == 0) return Status::ok();
  return {StatusCode::kInvalidArgument, fmt::format("grouped_gemm: {} = {} starts {} bytes past a {}-byte boundary",
                                                    name, view.to_string(), past, kTmaAlignBytes)};
}

}  // namespace

Status can_run_wgmma(const Args& args, const Machine& machine) {
  SLUICE_TRY(needs_hopper(machine));
  if (args.a.dtype != args.w.dtype) {
    return decline(fmt::format("the tensor cores want a and w of one dtype, a is {} and w is {}",
                               to_string(args.a.dtype), to_string(args.w.dtype)));
  }
  if (args.a.dtype == DType::kF32) return decline("the tensor cores have no exact f32");
  if (args.out.dtype != DType::kBF16)
    return decline(fmt::format("out must be bf16, it is {}", to_string(args.out.dtype)));
  SLUICE_TRY(check_strides("a", args.a));
  SLUICE_TRY(check_strides("w", args.w));
  SLUICE_TRY(check_alignment(args));  // at a plan there are no addresses yet, and nothing to object to
  const GpuTile tile = choose_tile(problem_of(args));
  if (tile.stages < 2) return decline(fmt::format("{} groups leave no room: {}", args.w.shape[0], tile.to_string()));
  return Status::ok();
}

std::string describe_wgmma(const Args& args, const Machine&) { return choose_tile(problem_of(args)).to_string(); }

Status check_alignment(const Args& args) {
  SLUICE_TRY(check_start("a", args.a));
  return check_start("w", args.w);
}

Status can_run_simt(const Args&, const Machine& machine) { return needs_hopper(machine); }

}  // namespace sluice::grouped_gemm
