// The part of a layer's weights that one of several ranks has where I is cut over them.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "layer/tensors.h"
#include "sluice/transport.h"
#include "sluice/weights.h"

namespace sluice {

namespace {

Status check_shard(TensorShard shard) {
  if (shard.size >= 1 && shard.rank >= 0 && shard.rank < shard.size) return Status::ok();
  return {StatusCode::kInvalidArgument,
          fmt::format("shard: rank {} of {} shards is none of them", shard.rank, shard.size)};
}

// Takes slices of tensors into memory that the result owns.
class Cutter {
 public:
  explicit Cutter(LayerWeights& owner) : owner_(owner) {}

  // Rows [begin,end) of both halves of axis 1 of [L,2n,...].
  TensorView halves(const TensorView& from, ShardRange rows) {
    if (!from.is_present()) return {};
    const std::int64_t half = from.shape[1] / 2, count = rows.end - rows.begin;
    TensorView to = allocate(from, 1, 2 * count);
    for (std::int64_t l = 0; l < from.shape[0]; ++l) {
      for (const std::int64_t part : {0, 1}) {
        for (std::int64_t r = 0; r < count; ++r)
          copy_row(from, l, part * half + rows.begin + r, 0, to, l, part * count + r);
      }
    }
    return to;
  }
  // Columns [begin,end) of axis 2 of [L,n,K].
  TensorView columns(const TensorView& from, ShardRange columns) {
    if (!from.is_present()) return {};
    TensorView to = allocate(from, 2, columns.end - columns.begin);
    for (std::int64_t l = 0; l < from.shape[0]; ++l) {
      for (std::int64_t r = 0; r < from.shape[1]; ++r) copy_row(from, l, r, columns.begin, to, l, r);
    }
    return to;
  }

 private:
  TensorView allocate(const TensorView& like, int axis, std::int64_t extent) {
    TensorView view = like;
    view.shape[static_cast<std::size_t>(axis)] = extent;
    std::int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.stride[static_cast<std::size_t>(i)] = stride;
      stride *= view.shape[static_cast<std::size_t>(i)];
    }
    auto memory = std::make_shared_for_overwrite<std::byte[]>(
        static_cast<std::size_t>(std::max<std::int64_t>(view.num_bytes(), 1)));
    view.data = memory.get();
    owner_.owners.push_back(std::move(memory));
    return view;
  }
  // Elements from `column` on of row (l,r); a vector [L,n] has rows of one element. A stride of 0 repeats a value.
  static void copy_row(const TensorView& from, std::int64_t l, std::int64_t r, std::int64_t column,
                       const TensorView& to, std::int64_t to_l, std::int64_t to_r) {
    const std::int64_t size = size_bytes(from.dtype), count = to.rank == 3 ? to.shape[2] : 1;
    const std::int64_t step = from.rank == 3 ? from.stride[2] : 1;
    const std::byte* src = static_cast<const std::byte*>(from.data) +
                           (l * from.stride[0] + r * from.stride[1] + column * (from.rank == 3 ? step : 0)) * size;
    std::byte* dst = static_cast<std::byte*>(to.data) + (to_l * to.stride[0] + to_r * to.stride[1]) * size;
    if (step == 1) {
      std::memcpy(dst, src, static_cast<std::size_t>(count * size));
      return;
    }
    for (std::int64_t i = 0; i < count; ++i)
      std::memcpy(dst + i * size, src + i * step * size, static_cast<std::size_t>(size));
  }

  LayerWeights& owner_;
};

FfnWeights cut(const FfnWeights& w, ShardRange range, bool is_first, Cutter& cutter) {
  FfnWeights part;
  part.w13 = cutter.halves(w.w13, range);
  part.w2 = cutter.columns(w.w2, range);
  part.w13_bias = cutter.halves(w.w13_bias, range);
  if (is_first) part.w2_bias = w.w2_bias;
  if (!w.w13_scale.is_present()) return part;
  if (has_row_scales(w)) {
    part.w13_scale = cutter.halves(w.w13_scale, range);
    part.w2_scale = w.w2_scale;
  } else {
    const ShardRange blocks = {range.begin / kScaleBlock, ceil_div(range.end, kScaleBlock)};
    part.w13_scale = cutter.halves(w.w13_scale, blocks);
    part.w2_scale = cutter.columns(w.w2_scale, blocks);
  }
  return part;
}

bool has_block_scales(const FfnWeights& w) { return w.w13_scale.is_present() && !has_row_scales(w); }

void cut_all(ShardedLayer& part, const LayerWeights& weights, TensorShard shard, const ShardRange& range) {
  Cutter cutter(part.weights);
  part.config.intermediate = range.end - range.begin;
  part.weights.experts = cut(weights.experts, range, shard.rank == 0, cutter);
  if (part.config.shared_intermediate > 0) {
    const Result<ShardRange> shared =
        shard_range(part.config.shared_intermediate, shard, has_block_scales(weights.shared));
    part.shared_is_whole = !shared.is_ok();
    if (shared) {
      part.config.shared_intermediate = shared->end - shared->begin;
      part.weights.shared = cut(weights.shared, *shared, shard.rank == 0, cutter);
    }
  }
}

}  // namespace

Result<ShardRange> shard_range(std::int64_t intermediate, TensorShard shard, bool block_scales) {
  SLUICE_TRY(check_shard(shard));
  std::int64_t unit = block_scales ? kScaleBlock : 16;
  while (!block_scales && unit > 1 && ceil_div(intermediate, unit) < shard.size) unit /= 2;
  const std::int64_t units = ceil_div(intermediate, unit);
  if (units < shard.size) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("shard: I = {} has {} units of {} columns, fewer than the {} shards", intermediate, units,
                              unit, shard.size));
  }
  const ExpertRange range = experts_of_rank(units, shard.size, shard.rank);  // the balanced split of anything
  return ShardRange{range.begin * unit, std::min(range.end * unit, intermediate)};
}

Result<ShardedLayer> shard(const MoeConfig& config, const LayerWeights& weights, TensorShard shard) {
  SLUICE_TRY(check_weights(config, weights));
  Status status;
  for_each_tensor(weights, [&](std::string_view name, const TensorView& view) {
    if (status.is_ok() && view.device.kind != DeviceKind::kCpu) {
      status = {StatusCode::kInvalidArgument,
                fmt::format("shard: {} is on a GPU; host memory is needed, upload comes after", name)};
    }
  });
  SLUICE_TRY(status);
  const Result<ShardRange> range = shard_range(config.intermediate, shard, has_block_scales(weights.experts));
  if (!range) return range.status();
  ShardedLayer part{config, weights, false};
  if (shard.size == 1) return part;
  try {
    cut_all(part, weights, shard, *range);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kIoError,
                  fmt::format("shard: no memory for columns [{}, {}) of I", range->begin, range->end));
  }
  return part;
}

}  // namespace sluice
