// Who holds which columns of I, and weights cut to one rank's part.
#include "core/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "cpu/parallel.h"
#include "layer/tensors.h"
#include "sluice/transport.h"

namespace sluice {
namespace {

Status invalid(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }

// Rows [row, row + rows) and columns [col, col + cols) of every matrix of src.
struct Window {
  std::int64_t row = 0, rows = 0, col = 0, cols = 0;
};

std::byte* element(const TensorView& v, std::int64_t i, std::int64_t row, std::int64_t col) {
  return v.row(i) + (row * v.stride[1] + col * v.stride[2]) * size_bytes(v.dtype);
}

void copy_window(const TensorView& src, std::int64_t i, const Window& from, const TensorView& dst, std::int64_t to,
                 std::int64_t to_row) {
  const std::int64_t size = size_bytes(src.dtype);
  const bool dense = src.stride[2] == 1 || from.cols == 1;
  for (std::int64_t r = 0; r < from.rows; ++r) {
    std::byte* const out = element(dst, to, to_row + r, 0);
    const std::byte* const in = element(src, i, from.row + r, from.col);
    if (dense) {
      std::memcpy(out, in, static_cast<std::size_t>(from.cols * size));
      continue;
    }
    for (std::int64_t c = 0; c < from.cols; ++c)
      std::memcpy(out + c * size, in + c * src.stride[2] * size, static_cast<std::size_t>(size));
  }
}

// [L,N] seen as [L,N,1].
TensorView as_matrices(TensorView view) {
  if (view.rank == 2) {
    view.rank = 3;
    view.shape[2] = 1;
    view.stride[2] = 1;
  }
  return view;
}

// Copies of windows, in memory the result owns.
class Copier {
 public:
  explicit Copier(LayerWeights& result) : result_(result) {}

  // For every expert of `experts` the windows of src, one under the other; absent stays absent.
  Status take(std::string_view name, const TensorView& src, std::span<const std::int32_t> experts,
              std::initializer_list<Window> windows, TensorView& out) {
    if (!src.is_present()) {
      out = {};
      return Status::ok();
    }
    const TensorView from = as_matrices(src);
    std::int64_t rows = 0;
    for (const Window& w : windows) rows += w.rows;
    const auto count = static_cast<std::int64_t>(experts.size());
    TensorView to = TensorView::dense(nullptr, src.dtype, {count, rows, windows.begin()->cols});
    SLUICE_TRY(allocate(name, to));
    const int threads = Machine::detect_cpu().num_threads;
    cpu::parallel_for(count, threads, [&](std::int64_t i, int) {
      std::int64_t row = 0;
      for (const Window& w : windows) {
        copy_window(from, experts[static_cast<std::size_t>(i)], w, to, i, row);
        row += w.rows;
      }
    });
    if (src.rank == 2) to = TensorView::dense(to.data, to.dtype, {count, rows});
    out = to;
    return Status::ok();
  }

 private:
  Status allocate(std::string_view name, TensorView& view) {
    constexpr std::align_val_t kAlign{64};
    const auto bytes = static_cast<std::size_t>(view.num_bytes());
    if (bytes == 0) return Status::ok();
    view.data = ::operator new(bytes, kAlign, std::nothrow);
    if (view.data == nullptr)
      return {StatusCode::kIoError, fmt::format("no memory for {} = {} ({} bytes)", name, view.to_string(), bytes)};
    result_.owners.emplace_back(view.data, [](const void* p) { ::operator delete(const_cast<void*>(p), kAlign); });
    return Status::ok();
  }

  LayerWeights& result_;
};

Status check_on_cpu(std::string_view where, const LayerWeights& weights) {
  Status status;
  for_each_tensor(weights, [&](std::string_view name, const TensorView& view) {
    if (status.is_ok() && view.device.kind != DeviceKind::kCpu)
      status = invalid(fmt::format("{}: {} is on a GPU; host memory is needed, upload comes after", where, name));
  });
  return status;
}

std::vector<std::int32_t> all_of(const FfnWeights& ffn) {
  std::vector<std::int32_t> experts(static_cast<std::size_t>(ffn.w13.shape[0]));
  for (std::size_t i = 0; i < experts.size(); ++i) experts[i] = static_cast<std::int32_t>(i);
  return experts;
}

Status shard_ffn(const FfnWeights& ffn, const ShardRange& columns, bool has_w2_bias, Copier& copy, FfnWeights& out) {
  const std::int64_t H = ffn.w2.shape[1], I = ffn.w2.shape[2];
  const std::int64_t begin = columns.begin, count = columns.end - columns.begin;
  const std::vector<std::int32_t> experts = all_of(ffn);
  SLUICE_TRY(copy.take("w13", ffn.w13, experts, {{begin, count, 0, H}, {I + begin, count, 0, H}}, out.w13));
  SLUICE_TRY(copy.take("w2", ffn.w2, experts, {{0, H, begin, count}}, out.w2));
  SLUICE_TRY(
      copy.take("w13_bias", ffn.w13_bias, experts, {{begin, count, 0, 1}, {I + begin, count, 0, 1}}, out.w13_bias));
  out.w2_bias = has_w2_bias ? ffn.w2_bias : TensorView{};
  if (has_row_scales(ffn)) {
    out.w2_scale = ffn.w2_scale;
    return copy.take("w13_scale", ffn.w13_scale, experts, {{begin, count, 0, 1}, {I + begin, count, 0, 1}},
                     out.w13_scale);
  }
  const std::int64_t Ib = ceil_div(I, kScaleBlock), Hb = ceil_div(H, kScaleBlock);
  const std::int64_t first = begin / kScaleBlock, blocks = ceil_div(count, kScaleBlock);
  SLUICE_TRY(copy.take("w13_scale", ffn.w13_scale, experts, {{first, blocks, 0, Hb}, {Ib + first, blocks, 0, Hb}},
                       out.w13_scale));
  return copy.take("w2_scale", ffn.w2_scale, experts, {{0, Hb, first, blocks}}, out.w2_scale);
}

}  // namespace

Status validate(const TensorShard& part) {
  if (part.size >= 1 && part.rank >= 0 && part.rank < part.size) return Status::ok();
  return invalid(fmt::format("tensor_shard: rank = {} is not in a group of size = {}", part.rank, part.size));
}

ShardRange shard_of(std::int64_t intermediate, std::int64_t size, std::int64_t rank, std::int64_t unit) {
  const std::int64_t units = ceil_div(intermediate, unit);
  if (units >= size) {
    const ExpertRange mine = experts_of_rank(units, size, rank);
    return {std::min(mine.begin * unit, intermediate), std::min(mine.end * unit, intermediate)};
  }
  if (units == 0) return {};
  const std::int64_t shared = owner(size, units, rank);
  const ExpertRange ranks = experts_of_rank(size, units, shared);
  const std::int64_t first = shared * unit, end = std::min(first + unit, intermediate);
  const std::int64_t pieces = ceil_div(end - first, kShardColumns);
  const ExpertRange mine = experts_of_rank(pieces, ranks.end - ranks.begin, rank - ranks.begin);
  return {std::min(first + mine.begin * kShardColumns, end), std::min(first + mine.end * kShardColumns, end)};
}

std::int64_t shard_owner(std::int64_t intermediate, std::int64_t size, std::int64_t unit, std::int64_t column) {
  const std::int64_t units = ceil_div(intermediate, unit);
  if (units >= size) return owner(units, size, column / unit);
  const std::int64_t shared = column / unit, first = shared * unit;
  const ExpertRange ranks = experts_of_rank(size, units, shared);
  const std::int64_t pieces = ceil_div(std::min(unit, intermediate - first), kShardColumns);
  return ranks.begin + owner(pieces, ranks.end - ranks.begin, (column - first) / kShardColumns);
}

std::int64_t shard_unit(bool has_block_scales) { return has_block_scales ? kScaleBlock : kShardColumns; }

std::int64_t shard_unit(const FfnWeights& weights) {
  return shard_unit(weights.w13.dtype == DType::kE4M3 && !has_row_scales(weights));
}

Result<ShardRange> needed_columns(std::string_view where, std::int64_t intermediate, const TensorShard& part,
                                  std::int64_t unit) {
  const ShardRange columns = shard_of(intermediate, part.size, part.rank, unit);
  if (columns.begin < columns.end) return columns;
  const std::string blocks = unit == kShardColumns ? "" : fmt::format(" in blocks of {}", unit);
  return invalid(fmt::format("{}: I = {}{} leaves rank {} of TP = {} no column; {} columns are never cut", where,
                             intermediate, blocks, part.rank, part.size, kShardColumns));
}

Result<LayerWeights> shard(const MoeConfig& config, const LayerWeights& weights, const TensorShard& part,
                           MoeConfig& sharded) {
  SLUICE_TRY(validate(part));
  SLUICE_TRY(check_weights(config, weights).with_context("shard"));
  SLUICE_TRY(check_on_cpu("shard", weights));
  if (part.size == 1) {
    sharded = config;
    return weights;
  }
  LayerWeights result = weights;
  MoeConfig mine = config;
  Copier copy(result);
  const Result<ShardRange> columns = needed_columns("shard", config.intermediate, part, shard_unit(weights.experts));
  if (!columns) return columns.status();
  mine.intermediate = columns->end - columns->begin;
  SLUICE_TRY(shard_ffn(weights.experts, *columns, part.rank == 0, copy, result.experts).with_context("shard"));
  if (config.shared_intermediate > 0) {
    const ShardRange of_shared = shard_of(config.shared_intermediate, part.size, part.rank, shard_unit(weights.shared));
    mine.shared_intermediate = of_shared.end - of_shared.begin;
    if (mine.shared_intermediate > 0) {
      SLUICE_TRY(shard_ffn(weights.shared, of_shared, part.rank == 0, copy, result.shared).with_context("shard"));
    } else {
      result.shared = {};
      result.shared_gate = {};
      mine.has_shared_gate = false;
    }
  }
  sharded = mine;
  return result;
}

Result<LayerWeights> slots(const LayerWeights& weights, std::span<const std::int32_t> experts) {
  SLUICE_TRY(check_on_cpu("slots", weights));
  const std::int64_t L = weights.experts.w13.shape[0];
  bool neighbours = true;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    if (experts[i] < 0 || experts[i] >= L)
      return invalid(fmt::format("slots: experts[{}] is {}, the weights hold L = {}", i, experts[i], L));
    neighbours = neighbours && (i == 0 || experts[i] == experts[i - 1] + 1);
  }
  LayerWeights result = weights;
  Copier copy(result);
  Status status;
  const FfnWeights& from = weights.experts;
  FfnWeights& to = result.experts;
  for (const auto& [name, src, dst] : {std::tuple("w13", &from.w13, &to.w13),
                                       {"w13_scale", &from.w13_scale, &to.w13_scale},
                                       {"w13_bias", &from.w13_bias, &to.w13_bias},
                                       {"w2", &from.w2, &to.w2},
                                       {"w2_scale", &from.w2_scale, &to.w2_scale},
                                       {"w2_bias", &from.w2_bias, &to.w2_bias}}) {
    if (!src->is_present()) continue;
    if (neighbours) {
      *dst = src->slice(experts.empty() ? 0 : experts.front(), static_cast<std::int64_t>(experts.size()));
    } else {
      const TensorView matrices = as_matrices(*src);
      SLUICE_TRY(
          copy.take(name, *src, experts, {{0, matrices.shape[1], 0, matrices.shape[2]}}, *dst).with_context("slots"));
    }
  }
  return result;
}

}  // namespace sluice
