// The route plan: made once by stage `route`, read-only afterwards, the only metadata that flows down a layer.
#pragma once

#include "sluice/core.h"

namespace sluice {

// Rows are grouped by expert, ascending token inside an expert, no padding between experts. On a device all
// of it stays there; the host sizes buffers by the bound R <= T*S and never reads the real count.
struct RoutePlan {
  ExpertOffsets expert_offset;  // [L+1] i32: rows of local expert e are [offset[e], offset[e+1])
  TensorView row_token;  // [R] i32: source token of each row; R is the bound, entries past num_rows are not written
  TensorView row_slot;   // [R] i32: flat slot t*S+s of each row
  TensorView slot_row;   // [T,S] i32: row of each slot; -1: not routed, or routed to an expert held elsewhere
  TensorView num_rows;   // [1] i32: rows in use
};

// How the rows of a [R,...] tensor belong to experts.
//  - contiguous: expert_offset [L+1]; expert e owns rows [offset[e], offset[e+1])
//  - masked:     counts [L] and rows_per_group = Mmax; expert e owns rows [e*Mmax, e*Mmax + counts[e])
//  - whole:      one expert owns every row (the shared expert); nothing is read to know it
// Rows that no expert owns are neither read nor written.
struct RowGroups {
  enum class Form : std::uint8_t { kContiguous, kMasked, kWhole };
  Form form = Form::kContiguous;
  ExpertOffsets expert_offset;
  TensorView counts;
  std::int64_t rows_per_group = 0;

  static RowGroups contiguous(ExpertOffsets offset) { return {Form::kContiguous, offset, {}, 0}; }
  static RowGroups masked(TensorView counts, std::int64_t rows_per_group) {
    return {Form::kMasked, {}, counts, rows_per_group};
  }
  static RowGroups whole() { return {Form::kWhole, {}, {}, 0}; }
  // -1 for a contiguous form without offsets, which check_row_groups refuses.
  std::int64_t num_groups() const {
    if (form == Form::kWhole) return 1;
    return form == Form::kMasked ? counts.shape[0] : expert_offset.view.shape[0] - 1;
  }
};

// Shapes, dtypes and presence of what the form needs, against L groups over R rows.
Status check_row_groups(std::string_view stage, const RowGroups& groups, std::int64_t num_local, std::int64_t num_rows,
                        Phase phase);

// The values of the host arrays behind a form: offsets ascend within [0,R], counts lie within [0, rows_per_group]. Names
// the first group that breaks it.
Status check_row_values(std::string_view stage, const RowGroups& groups, std::int64_t num_rows);

// [begin, end) of one group's rows, for host code; the arrays must be host memory. The values are clamped to
// [0, R] so that no array content can lead outside the row tensor.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
RowRange row_range(const RowGroups& groups, std::int64_t group, std::int64_t num_rows);

}  // namespace sluice
