// Which rows of a [R,...] tensor an expert owns, on the device.
#pragma once

#include <cstdint>

#include "sluice/plan.h"

namespace sluice::cuda {

struct DeviceRowRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

struct DeviceRowGroups {
  const std::int32_t* expert_offset = nullptr;  // [L+1], contiguous
  const std::int32_t* counts = nullptr;         // [L], masked
  std::int32_t num_groups = 0;
  std::int32_t rows_per_group = 0;

  static DeviceRowGroups from(const RowGroups& groups) {
    DeviceRowGroups d;
    d.num_groups = static_cast<std::int32_t>(groups.num_groups());
    if (groups.form == RowGroups::Form::kContiguous)
      d.expert_offset = groups.expert_offset.view.as<const std::int32_t>();
    if (groups.form == RowGroups::Form::kMasked) {
      d.counts = groups.counts.as<const std::int32_t>();
      d.rows_per_group = static_cast<std::int32_t>(groups.rows_per_group);
    }
    return d;
  }

  // Clamped as row_range (include/sluice/plan.h) does it: no content of the arrays leads outside the R rows.
  __device__ __forceinline__ DeviceRowRange range(std::int32_t group, std::int32_t num_rows) const {
    if (expert_offset != nullptr) {
      const std::int32_t begin = min(max(expert_offset[group], 0), num_rows);
      return {begin, min(max(expert_offset[group + 1], begin), num_rows)};
    }
    if (counts != nullptr) {
      const std::int64_t first = static_cast<std::int64_t>(group) * rows_per_group;
      const std::int32_t begin = first < num_rows ? static_cast<std::int32_t>(first) : num_rows;
      const std::int32_t count = min(max(counts[group], 0), rows_per_group);
      return {begin, min(count, num_rows - begin) + begin};
    }
    return {0, num_rows};
  }

  __device__ __forceinline__ bool owns(std::int64_t row) const {
    if (expert_offset != nullptr) return row >= expert_offset[0] && row < expert_offset[num_groups];
    if (counts != nullptr) {
      const std::uint32_t group = static_cast<std::uint32_t>(row) / static_cast<std::uint32_t>(rows_per_group);
      return static_cast<std::int32_t>(row - static_cast<std::int64_t>(group) * rows_per_group) < counts[group];
    }
    return true;
  }
};

// The same for one that asks often: what two offsets say is read once.
struct OwnedRows {
  DeviceRowGroups groups;
  std::int64_t begin = 0, end = 0;

  __device__ __forceinline__ OwnedRows(const DeviceRowGroups& g, std::int64_t num_rows) : groups(g), end(num_rows) {
    if (g.expert_offset == nullptr) return;
    begin = g.expert_offset[0];
    end = min(end, static_cast<std::int64_t>(g.expert_offset[g.num_groups]));
  }
  __device__ __forceinline__ bool has(std::int64_t row) const {
    return row >= begin && row < end && (groups.counts == nullptr || groups.owns(row));
  }
};

}  // namespace sluice::cuda
