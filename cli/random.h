// Random activations and weights in memory: the same seed gives the same bytes on every machine and thread count.
#pragma once

#include <functional>
#include <vector>

#include "sluice/sluice.h"

namespace sluice::cli {

std::vector<std::byte> random_normal_bf16(std::int64_t count, double deviation, std::uint64_t seed);

enum class Fill {
  kNone,    // virtual memory that is never touched, for planning without running
  kRandom,  // values whose outputs stay near 1
};

// How the matrices of an FFN are stored. e4m3 has scales of 128x128 blocks or one a row, i8 one a row.
struct WeightForm {
  DType dtype = DType::kBF16;
  bool row_scales = false;

  WeightForm(DType d) : dtype(d), row_scales(d == DType::kI8) {}  // NOLINT: implicit by design
  WeightForm(DType d, bool rows) : dtype(d), row_scales(d == DType::kI8 || (d == DType::kE4M3 && rows)) {}
};
// Weights for `config` with experts and the shared expert in the given forms; only the local experts exist.
Result<LayerWeights> make_weights(const MoeConfig& config, WeightForm experts, WeightForm shared, Fill fill,
                                  std::uint64_t seed, int num_threads);
// Bytes make_weights would map.
std::int64_t weights_bytes(const MoeConfig& config, DType experts, DType shared);

// Expert ids [T,S], distinct per token. kUniform: each equally likely. kZipf: expert e with weight 1/(e+1).
// kOneExpert: every token's first slot is expert 0, the others uniform over the rest.
enum class Route { kUniform, kZipf, kOneExpert };
std::vector<std::int32_t> random_ids(Route route, std::int64_t num_tokens, std::int64_t top_k, std::int64_t num_experts,
                                     std::uint64_t seed);

// Global ids [T,S] of the set of routes number `set`; those of experts that are not local may be among them.
using DrawRoutes = std::function<std::vector<std::int32_t>(std::int64_t num_tokens, std::size_t set)>;

}  // namespace sluice::cli
