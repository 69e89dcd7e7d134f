// The grid: layer shapes and batch sizes, the routing, and the floor of one GEMM. The one place in C++ where its rows are
// written down: the GPU benchmarks, the peers' programs and `sluice bench --grid` read them here. Plain C++ without a
// dependency; bench/peers/routes.py says the same in Python, and prints a digest of its routes that the programs print
// too.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace sluice::bench {

struct GridRow {
  const char* shape;
  std::int64_t tokens;         // T, before any split over ranks
  std::int64_t num_experts;    // E
  std::int64_t local_experts;  // L: the first L of E
  std::int64_t hidden;         // H
  std::int64_t intermediate;   // I
  std::int64_t top_k;          // S
  bool bf16;                   // else e4m3 with 1x128 and 128x128 scales
};

inline std::vector<GridRow> grid() {
  std::vector<GridRow> rows;
  for (std::int64_t t : {1, 32, 128, 512, 8192}) rows.push_back({"dsv3", t, 256, 256, 7168, 2048, 8, false});
  for (std::int64_t t : {256, 1024, 32768}) rows.push_back({"dsv3-ep8", t, 256, 32, 7168, 2048, 8, false});
  for (std::int64_t t : {1, 8, 32, 128, 512, 2048, 8192})
    rows.push_back({"dsv3-tp8", t, 256, 256, 7168, 256, 8, false});
  for (std::int64_t t : {1, 32, 512, 8192}) rows.push_back({"qwen3-30b", t, 128, 128, 2048, 768, 8, false});
  for (std::int64_t t : {512, 8192}) rows.push_back({"qwen3-30b-bf16", t, 128, 128, 2048, 768, 8, true});
  for (std::int64_t t : {1024, 32768}) rows.push_back({"dsv3-ep8-bf16", t, 256, 32, 7168, 2048, 8, true});
  for (std::int64_t t : {128, 4096}) rows.push_back({"mixtral-bf16", t, 8, 8, 4096, 14336, 2, true});
  return rows;
}

// One of the two GEMMs of a row: out[R,N] from a[R,K] and w[L,N,K].
struct GemmShape {
  const char* name;  // "up" or "down"
  std::int64_t n, k;
};
inline std::array<GemmShape, 2> gemms(const GridRow& row) {
  return {GemmShape{"up", 2 * row.intermediate, row.hidden}, GemmShape{"down", row.hidden, row.intermediate}};
}

inline std::uint64_t next_random(std::uint64_t& state) {
  state += 0x9E3779B97F4A7C15ULL;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// [T,S]: every token draws S distinct experts of all E, uniformly; `variant` is another draw.
inline std::vector<std::int32_t> expert_ids(const GridRow& row, int variant) {
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(row.tokens * row.top_k));
  std::uint64_t state = 1234 + static_cast<std::uint64_t>(variant);
  for (std::int64_t t = 0; t < row.tokens; ++t) {
    const auto first = static_cast<std::ptrdiff_t>(ids.size());
    while (static_cast<std::int64_t>(ids.size()) < (t + 1) * row.top_k) {
      const auto e =
          static_cast<std::int32_t>((next_random(state) >> 33) % static_cast<std::uint64_t>(row.num_experts));
      if (std::find(ids.begin() + first, ids.end(), e) == ids.end()) ids.push_back(e);
    }
  }
  return ids;
}

// [L+1]: first row of each local expert under the routes of expert_ids.
inline std::vector<std::int32_t> expert_offsets(const GridRow& row, int variant) {
  std::vector<std::int32_t> offset(static_cast<std::size_t>(row.local_experts) + 1, 0);
  for (const std::int32_t e : expert_ids(row, variant)) {
    if (e < row.local_experts) ++offset[static_cast<std::size_t>(e) + 1];
  }
  for (std::size_t e = 1; e < offset.size(); ++e) offset[e] += offset[e - 1];
  return offset;
}

inline std::int64_t active_experts(const std::vector<std::int32_t>& offset) {
  std::int64_t active = 0;
  for (std::size_t e = 1; e < offset.size(); ++e) active += offset[e] > offset[e - 1] ? 1 : 0;
  return active;
}

// Rates measured on an H200 (docs/performance.md); shares of the floor hold for that GPU alone.
inline constexpr double kStreamBytesPerUs = 4.5e6;
inline constexpr double kFp8FlopsPerUs = 1.49e9;
inline constexpr double kBf16FlopsPerUs = 0.79e9;

struct Floor {
  double bytes = 0;  // weights and weight scales of the experts that have rows, a and its scales read, out written
  double flops = 0;  // 2 R N K
  double us = 0;     // max(bytes / 4.5 TB/s, flops / 1.49 PFLOP/s (e4m3) or 0.79 PFLOP/s (bf16))
};
inline Floor gemm_floor(const GridRow& row, const GemmShape& gemm, const std::vector<std::int32_t>& offset) {
  const auto rows = static_cast<double>(offset.back());
  const auto active = static_cast<double>(active_experts(offset));
  const auto n = static_cast<double>(gemm.n), k = static_cast<double>(gemm.k);
  const double elem_bytes = row.bf16 ? 2 : 1;
  Floor floor;
  floor.bytes = active * n * k * elem_bytes + rows * k * elem_bytes + rows * n * 2;
  if (!row.bf16) floor.bytes += active * (n / 128) * (k / 128) * 4 + rows * (k / 128) * 4;
  floor.flops = 2 * rows * n * k;
  floor.us = std::max(floor.bytes / kStreamBytesPerUs, floor.flops / (row.bf16 ? kBf16FlopsPerUs : kFp8FlopsPerUs));
  return floor;
}

// Draws to rotate through so that a replay does not find its weights in the L2 of 60 MB.
inline int num_variants(const Floor& floor) {
  constexpr double kRotated = 240e6;
  return floor.bytes > 0 && floor.bytes < kRotated / 2 ? static_cast<int>(kRotated / floor.bytes) + 1 : 1;
}

}  // namespace sluice::bench
