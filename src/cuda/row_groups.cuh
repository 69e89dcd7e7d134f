// Which rows of a [R,...] tensor an expert owns, on the device.
#pragma once

#include <cstdint>

#include "sluice/plan.h"

namespace sluice::cuda {

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

  __device__ __forceinline__ bool owns(std::int64_t row) const {
    if (expert_offset != nullptr) return row >= expert_offset[0] && row < expert_offset[num_groups];
    if (counts != nullptr) return row % rows_per_group < counts[row / rows_per_group];
    return true;
  }
};

}  // namespace sluice::cuda
