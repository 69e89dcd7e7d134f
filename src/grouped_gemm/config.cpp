// The choice of item sizes.
#include "grouped_gemm/config.h"

#include <fmt/format.h>

namespace sluice::grouped_gemm {

std::string Config::to_string() const {
  return fmt::format("items of {} rows x {} columns, at most {} of them", chunk_rows, chunk_cols, num_items);
}

Config choose_config(const Problem& p) {
  Config config{kMaxChunkRows, kMaxChunkCols, 0};
  config.chunk_rows = std::clamp<std::int64_t>(p.max_group_rows, 1, kMaxChunkRows);
  const auto count = [&] {
    // Rows of one group at most; the others are taken as even.
    const std::int64_t row_chunks = std::max(p.num_active, ceil_div(p.num_rows, config.chunk_rows));
    return row_chunks * num_col_chunks(p.n, p.part_rows, config.chunk_cols);
  };
  // Four items per thread keep the wait for the last one short. Narrower columns decode A more often, shorter row
  // chunks decode w more often; the former costs less until an item is as narrow as a scale row.
  const std::int64_t wanted = p.num_threads > 1 ? 4 * static_cast<std::int64_t>(p.num_threads) : 1;
  while (count() < wanted) {
    if (config.chunk_cols > kScaleBlock) {
      config.chunk_cols /= 2;
    } else if (config.chunk_rows > 64) {
      config.chunk_rows = ceil_div(config.chunk_rows, 2);
    } else if (config.chunk_cols > kMinChunkCols) {
      config.chunk_cols /= 2;
    } else {
      break;
    }
  }
  config.num_items = count();
  return config;
}

}  // namespace sluice::grouped_gemm
