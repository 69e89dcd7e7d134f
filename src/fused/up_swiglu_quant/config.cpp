#include "fused/up_swiglu_quant/config.h"

#include <fmt/format.h>

#include <algorithm>

#include "grouped_gemm/tile_memory.h"

namespace sluice::up_swiglu_quant {

namespace {
using grouped_gemm::GpuProblem;

constexpr std::int64_t kMaxStages = 16;
constexpr std::int64_t kTileRows = 2 * kScaleBlock;  // weight rows: 128 of gate, 128 of up
// Rows an expert up to which the fused form is the faster one: from 32 on its epilogue costs more than h's way through
// memory (docs/performance.md).
constexpr std::int64_t kMostRowsPerGroup = 20;

Status decline(std::string text) { return {StatusCode::kUnsupported, std::move(text)}; }
}  // namespace

std::string Config::to_string() const {
  if (split == 1) return tile.to_string();
  return fmt::format("tiles of {} tokens x {} weight rows, {} blocks sharing K, {} stages, {} bytes of shared memory",
                     tile.tokens, tile.weight_rows, split, tile.stages, tile.shared_bytes);
}

Config with_stages(Config config, const GpuProblem& p) {
  config.tile.paired = true;
  config.tile.weight_rows = kTileRows;
  if (config.split == 1) {
    config.tile = grouped_gemm::with_stages(config.tile, p);
    return config;
  }
  config.tile.tokens = kSplitTokens;
  const std::int64_t k_blocks = ceil_div(p.k, kScaleBlock);
  // Every block of the cluster gets the sums of all blocks of K for its share of the columns, and all scales.
  const std::int64_t sums_bytes = k_blocks * kSplitTokens * (kTileRows / config.split) * 4;
  const std::int64_t scale_bytes = k_blocks * kSplitTokens * 2 * 4;
  const auto memory = grouped_gemm::TileMemory::of(false, kSplitTokens, kTileRows, false);
  const std::int64_t fixed_bytes = memory.fixed_bytes(p.num_groups) + sums_bytes + scale_bytes + kSplitTokens * 4;
  const std::int64_t stage_bytes = memory.stage_bytes();
  config.tile.stages =
      std::min({kMaxStages, ceil_div(k_blocks, config.split), (p.shared_bytes - fixed_bytes) / stage_bytes});
  config.tile.shared_bytes = fixed_bytes + config.tile.stages * stage_bytes;
  return config;
}

Config choose_config(const GpuProblem& p) {
  const std::int64_t groups = std::max<std::int64_t>(1, std::min(p.num_groups, p.num_rows));
  const double mean = static_cast<double>(p.num_rows) / static_cast<double>(groups);
  Config config;
  config.tile.tokens = mean > 64 ? 96 : mean > 20 ? 64 : mean > 10 ? 32 : mean > 2 ? 16 : 8;
  // Tiles there can be; too few to occupy the device are shared by clusters, as long as that is one wave.
  const std::int64_t k_blocks = ceil_div(p.k, kScaleBlock);
  const std::int64_t tiles =
      (p.num_rows + (kSplitTokens - 1) * groups) / kSplitTokens * ceil_div(p.part_rows, kScaleBlock);
  for (int split : {8, 4, 2}) {
    if (tiles * split > p.num_sms || k_blocks < 2 * split) continue;
    config.split = split;
    const Config shared = with_stages(config, p);
    if (shared.tile.stages >= 2) return shared;
  }
  config.split = 1;
  return with_stages(config, p);
}

Status can_run_cuda(const Args& args, const Machine& machine) {
  SLUICE_TRY(grouped_gemm::can_run_wgmma(args.up, machine));
  const GpuProblem p = grouped_gemm::problem_of(args.up);
  if (args.up.a.dtype != DType::kE4M3 || !p.block_scales) {
    return decline(fmt::format("takes e4m3 rows with a scale for 128 columns, they are {}{}",
                               to_string(args.up.a.dtype),
                               args.up.a_scale.is_present() ? " with one scale a row" : ""));
  }
  const TensorView& a = args.act.a;
  if (a.dtype != DType::kE4M3 || (args.act.a_scale.shape[0] == 1 && a.shape[1] > kScaleBlock)) {
    return decline(fmt::format("makes e4m3 with a scale for 128 columns, a is {}{}", to_string(a.dtype),
                               args.act.a_scale.is_present() ? " with one scale a row" : ""));
  }
  if (2 * p.part_rows != p.n) {
    return decline(fmt::format("needs gate and up stacked in w, which has parts of {} rows of {}", p.part_rows, p.n));
  }
  if (a.stride[0] % 16 != 0 || reinterpret_cast<std::uintptr_t>(a.data) % 16 != 0) {
    return decline(fmt::format("a = {} (stride {}) does not lie on 16-byte boundaries", a.to_string(), a.stride[0]));
  }
  const Config config = choose_config(p);
  if (config.tile.stages < 2)
    return decline(fmt::format("{} groups leave no room: {}", p.num_groups, config.to_string()));
  return Status::ok();
}

std::string describe_cuda(const Args& args, const Machine&) {
  return choose_config(grouped_gemm::problem_of(args.up)).to_string();
}

std::int64_t most_rows(const Args& args) { return kMostRowsPerGroup * args.up.w.shape[0]; }

}  // namespace sluice::up_swiglu_quant
