#include "fused/up_swiglu_quant/config.h"

#include <fmt/format.h>

#include <algorithm>

#include "grouped_gemm/tile_memory.h"

namespace sluice::up_swiglu_quant {

namespace {
using grouped_gemm::GpuProblem;

constexpr std::int64_t kMaxClusterStages = 32;
constexpr std::int64_t kClusterBatch = 4;            // stages a consumer holds at a time
constexpr std::int64_t kTileRows = 2 * kScaleBlock;  // weight rows: 128 of gate, 128 of up
// Rows an expert up to which the fused form is the faster one: from 64 on its epilogue costs more than h's way through
// memory (docs/performance.md).
constexpr std::int64_t kMostRowsPerGroup = 40;

Status decline(std::string text) { return {StatusCode::kUnsupported, std::move(text)}; }
}  // namespace

std::string Config::to_string() const {
  if (split == 1) return tile.to_string();
  return fmt::format("tiles of {} tokens x {} weight rows, {} blocks a tile, {} stages, {} bytes of shared memory",
                     tile.tokens, tile.weight_rows * split, split, tile.stages, tile.shared_bytes);
}

Config with_stages(Config config, const GpuProblem& p) {
  config.tile.paired = true;
  config.tile.weight_rows = kTileRows;
  if (config.split == 1) {
    config.tile = grouped_gemm::with_stages(config.tile, p);
    return config;
  }
  config.tile.tokens = kClusterTokens;
  config.tile.weight_rows = kTileRows / config.split;  // of each block
  const std::int64_t k_blocks = ceil_div(p.k, kScaleBlock);
  const auto memory = grouped_gemm::TileMemory::of(kClusterTokens, static_cast<int>(config.tile.weight_rows), false);
  const std::int64_t scale_bytes = k_blocks * kClusterTokens * 2 * 4;
  const std::int64_t fixed_bytes =
      memory.fixed_bytes(p.num_groups) + scale_bytes + (kClusterUpFloats + kClusterTokens) * 4;
  config.tile.stages =
      std::min({kMaxClusterStages, k_blocks + kClusterBatch, (p.shared_bytes - fixed_bytes) / memory.stage_bytes()});
  config.tile.shared_bytes = fixed_bytes + config.tile.stages * memory.stage_bytes();
  return config;
}

Config choose_config(const GpuProblem& p) {
  const std::int64_t groups = std::max<std::int64_t>(1, std::min(p.num_groups, p.num_rows));
  const double mean = static_cast<double>(p.num_rows) / static_cast<double>(groups);
  Config config;
  config.tile.tokens = mean > 64 ? 96 : mean > 20 ? 64 : mean > 10 ? 32 : mean > 2 ? 16 : 8;
  // Tiles there can be; too few to occupy the device are shared by clusters, as long as all run at once.
  const std::int64_t tiles =
      (p.num_rows + (kClusterTokens - 1) * groups) / kClusterTokens * ceil_div(p.part_rows, kScaleBlock);
  // Two blocks a tile gained nothing where they fit (docs/performance.md).
  if (4 * tiles <= p.num_sms) {
    config.split = 4;
    const Config shared = with_stages(config, p);
    if (shared.tile.stages > kClusterBatch) return shared;
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
