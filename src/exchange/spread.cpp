#include "exchange/spread.h"

#include <fmt/format.h>

#include <cstring>

#include "cpu/parallel.h"

namespace sluice::exchange {

namespace {

constexpr std::int64_t kRecordAlign = 16;
constexpr std::int64_t kBytesPerRange = 65536;  // of rows per hand-out of work

std::int32_t& at(const TensorView& view, std::int64_t i, std::int64_t j) {
  return view.as<std::int32_t>()[i * view.stride[0] + j];
}

Status name_first_invalid(const AimArgs& args, std::int64_t num_experts) {
  const TensorView& ids = args.topk_idx.view;
  for (std::int64_t t = 0; t < ids.shape[0]; ++t) {
    for (std::int64_t s = 0; s < ids.shape[1]; ++s) {
      const std::int32_t id = at(ids, t, s);
      if (id >= -1 && id < num_experts) continue;
      return {StatusCode::kInvalidArgument, fmt::format("exchange: topk_idx of token {}, slot {} is {}, expected -1 or "
                                                        "0 to {}",
                                                        args.first_token + t, s, id, num_experts - 1)};
    }
  }
  return Status::ok();
}

}  // namespace

Status aim(const AimArgs& args) {
  const TensorView& ids = args.topk_idx.view;
  const PlacementIndex& placement = *args.placement;
  const std::int64_t num_experts = std::ssize(placement.replica_begin()) - 1;
  const std::int64_t num_slots = ids.shape[1];
  const std::int64_t num_ways = args.way_rank.shape[1];
  if (args.checked) SLUICE_TRY(name_first_invalid(args, num_experts));
  std::int64_t num_invalid = 0;
  for (std::int64_t t = 0; t < ids.shape[0]; ++t) {
    std::int64_t ways = 0;
    for (std::int64_t s = 0; s < num_slots; ++s) {
      const std::int32_t id = at(ids, t, s);
      std::int32_t rank = -1, local = -1;
      if (id >= 0 && id < num_experts) {
        const std::int32_t slot = placement.slot(id, args.first_token + t + args.rank);
        rank = static_cast<std::int32_t>(placement.rank_of(slot));
        local = placement.local_of(slot);
        bool is_new = true;
        for (std::int64_t w = 0; w < ways && is_new; ++w) is_new = at(args.way_rank, t, w) != rank;
        if (is_new) at(args.way_rank, t, ways++) = rank;
      } else if (id != -1) {
        ++num_invalid;
      }
      at(args.slot_rank, t, s) = rank;
      at(args.slot_local, t, s) = local;
    }
    for (; ways < num_ways; ++ways) at(args.way_rank, t, ways) = -1;
  }
  if (args.counters.is_present())
    args.counters.as<std::int64_t>()[static_cast<int>(Counter::kInvalidIds)] += num_invalid;
  return Status::ok();
}

Record Record::of(const DataPath& path, std::int64_t hidden, std::int64_t top_k) {
  Record record;
  record.hidden = hidden;
  record.dtype = path.rows;
  record.num_scales = is_quantised(path.rows) ? path.scale_blocks(hidden) : 0;
  record.top_k = top_k;
  record.scale_begin = ceil_div(hidden * size_bytes(path.rows), 4) * 4;
  record.ids_begin = record.scale_begin + record.num_scales * 4;
  record.bytes = ceil_div(record.ids_begin + top_k * 4, kRecordAlign) * kRecordAlign;
  return record;
}

TensorView Record::rows(std::byte* base, std::int64_t count) const {
  TensorView view = TensorView::dense(base, dtype, {count, hidden});
  view.stride[0] = bytes / size_bytes(dtype);
  return view;
}

TensorView Record::scales(std::byte* base, std::int64_t count) const {
  if (num_scales == 0) return {};
  TensorView view = TensorView::dense(base == nullptr ? nullptr : base + scale_begin, DType::kF32, {num_scales, count});
  view.stride[0] = 1;
  view.stride[1] = bytes / 4;
  return view;
}

TensorView Record::ids(std::byte* base, std::int64_t count) const {
  TensorView view = TensorView::dense(base == nullptr ? nullptr : base + ids_begin, DType::kI32, {count, top_k});
  view.stride[0] = bytes / 4;
  return view;
}

void address(const RoutePlan& sends, const TensorView& slot_rank, const TensorView& slot_local, const TensorView& ids) {
  const auto* const offset = sends.expert_offset.view.as<const std::int32_t>();
  const std::int64_t num_ranks = sends.expert_offset.view.shape[0] - 1;
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    for (std::int64_t r = offset[rank]; r < offset[rank + 1]; ++r) {
      const std::int64_t t = sends.row_token.as<const std::int32_t>()[r];
      for (std::int64_t s = 0; s < ids.shape[1]; ++s)
        at(ids, r, s) = at(slot_rank, t, s) == rank ? at(slot_local, t, s) : -1;
    }
  }
}

void line_up(const TensorView& y, const TensorView& slot_row, int num_threads, const TensorView& back_row,
             const TensorView& back) {
  auto* const from = back_row.as<std::int32_t>();
  std::int64_t count = 0;
  for (std::int64_t n = 0; n < slot_row.shape[0]; ++n) {
    for (std::int64_t s = 0; s < slot_row.shape[1]; ++s) {
      if (const std::int32_t row = at(slot_row, n, s); row >= 0) from[count++] = row;
    }
  }
  const std::int64_t row_bytes = y.shape[1] * size_bytes(y.dtype);
  const std::int64_t rows_per_range = std::max<std::int64_t>(kBytesPerRange / std::max<std::int64_t>(row_bytes, 1), 1);
  cpu::parallel_ranges(count, rows_per_range, num_threads, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t b = begin; b < end; ++b)
      std::memcpy(back.row(b), y.row(from[b]), static_cast<std::size_t>(row_bytes));
  });
}

void spans_of(const ExpertOffsets& offset, std::span<RowSpan> spans) {
  const auto* const begin = offset.view.as<const std::int32_t>();
  for (std::size_t p = 0; p < spans.size(); ++p) spans[p] = {begin[p], begin[p + 1] - begin[p]};
}

}  // namespace sluice::exchange
