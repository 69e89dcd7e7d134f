// Row groups and expert ownership.
#include "sluice/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "sluice/transport.h"

namespace sluice {

Status check_row_groups(std::string_view stage, const RowGroups& groups, std::int64_t num_local, std::int64_t num_rows,
                        Phase phase) {
  const bool has_offsets = groups.expert_offset.view.is_present();
  const bool has_counts = groups.counts.is_present();
  const bool wants_offsets = groups.form == RowGroups::Form::kContiguous;
  const bool wants_counts = groups.form == RowGroups::Form::kMasked;
  if (has_offsets != wants_offsets || has_counts != wants_counts) {
    const auto say = [](bool has) { return has ? "given" : "missing"; };
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: {} row groups take {}; expert_offset[L+1] is {}, counts[L] is {}", stage,
                        wants_offsets  ? "contiguous"
                        : wants_counts ? "masked"
                                       : "whole",
                        wants_offsets  ? "expert_offset alone"
                        : wants_counts ? "counts alone"
                                       : "neither",
                        say(has_offsets), say(has_counts))};
  }
  AxisBinder binder(stage);
  binder.set(Axis::kL, num_local, "the weights");
  if (wants_offsets) return binder.bind({"expert_offset", DType::kI32, {Axis::kL1}}, groups.expert_offset.view, phase);
  if (wants_counts) {
    SLUICE_TRY(binder.bind({"counts", DType::kI32, {Axis::kL}}, groups.counts, phase));
    if (groups.rows_per_group >= 0 && groups.rows_per_group * num_local == num_rows) return Status::ok();
    return {StatusCode::kInvalidArgument, fmt::format("{}: {} groups of rows_per_group = {} do not make R = {} rows",
                                                      stage, num_local, groups.rows_per_group, num_rows)};
  }
  if (num_local == 1) return Status::ok();
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: whole row groups are one expert's, the weights hold L = {}", stage, num_local)};
}

Status check_row_values(std::string_view stage, const RowGroups& groups, std::int64_t num_rows) {
  if (groups.form == RowGroups::Form::kWhole) return Status::ok();
  const bool masked = groups.form == RowGroups::Form::kMasked;
  std::int64_t low = 0;
  for (std::int64_t i = 0; i < groups.num_groups() + (masked ? 0 : 1); ++i) {
    const std::int64_t value = (masked ? groups.counts : groups.expert_offset.view).as<const std::int32_t>()[i];
    const std::int64_t high = masked ? groups.rows_per_group : num_rows;
    if (value < low || value > high) {
      return {StatusCode::kInvalidArgument, fmt::format("{}: {}[{}] is {}, expected {} to {}", stage,
                                                        masked ? "num_rows" : "expert_offset", i, value, low, high)};
    }
    if (!masked) low = value;
  }
  return Status::ok();
}

RowRange row_range(const RowGroups& groups, std::int64_t group, std::int64_t num_rows) {
  switch (groups.form) {
    case RowGroups::Form::kWhole: return {0, num_rows};
    case RowGroups::Form::kMasked: {
      const std::int64_t begin = std::min(group * groups.rows_per_group, num_rows);
      const std::int64_t count =
          std::clamp<std::int64_t>(groups.counts.as<const std::int32_t>()[group], 0, groups.rows_per_group);
      return {begin, std::min(begin + count, num_rows)};
    }
    case RowGroups::Form::kContiguous: break;
  }
  const auto* offset = groups.expert_offset.view.as<const std::int32_t>();
  const std::int64_t begin = std::clamp<std::int64_t>(offset[group], 0, num_rows);
  return {begin, std::clamp<std::int64_t>(offset[group + 1], begin, num_rows)};
}

ExpertRange experts_of_rank(std::int64_t num_experts, std::int64_t num_ranks, std::int64_t rank) {
  const std::int64_t base = num_experts / num_ranks;
  const std::int64_t rem = num_experts % num_ranks;
  const std::int64_t begin = rank * base + std::min(rank, rem);
  return {begin, begin + base + (rank < rem ? 1 : 0)};
}

std::int64_t owner(std::int64_t num_experts, std::int64_t num_ranks, std::int64_t expert) {
  const std::int64_t base = num_experts / num_ranks;
  const std::int64_t rem = num_experts % num_ranks;
  const std::int64_t in_larger = rem * (base + 1);  // experts held by the ranks that have one more
  if (expert < in_larger) return expert / (base + 1);
  return rem + (expert - in_larger) / base;
}

}  // namespace sluice
