// Parts of a layer's weights: the columns of I that one rank of a tensor-parallel group holds, and experts in the order of a
// rank's slots. The sum over a group's ranks of what their layers give is what the whole layer gives (docs/numerics.md).
#pragma once

#include <span>

#include "sluice/weights.h"

namespace sluice {

// One rank of a tensor-parallel group.
struct TensorShard {
  std::int64_t rank = 0;
  std::int64_t size = 1;
};
Status validate(const TensorShard& part);

// Columns [begin, end) of I; empty where begin == end.
struct ShardRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  friend bool operator==(const ShardRange&, const ShardRange&) = default;
};

// What is never cut further: rows of w2 in eight-bit weights then stay multiples of the 16 bytes that tensor maps want.
inline constexpr std::int64_t kShardColumns = 16;

// The balanced split of I over `size` ranks, in order. In whole units where there are as many as ranks: I = 1536 in blocks of
// 128 over 8 ranks is 2,2,2,2,1,1,1,1 blocks. Where there are fewer, the ranks are split over the units, and the ranks of one
// unit split it in pieces of kShardColumns: so a rank's columns either begin with a unit or lie inside one. The last unit and
// the last piece may be short. A rank that gets no piece has an empty range. unit: a multiple of kShardColumns.
ShardRange shard_of(std::int64_t intermediate, std::int64_t size, std::int64_t rank, std::int64_t unit);
// Its inverse: the rank that holds a column.
std::int64_t shard_owner(std::int64_t intermediate, std::int64_t size, std::int64_t unit, std::int64_t column);
// The unit of weights of a form: 128 with scales of 128x128 blocks, so that every shard's scales are whole rows and columns of
// the layer's; else kShardColumns.
std::int64_t shard_unit(bool has_block_scales);
std::int64_t shard_unit(const FfnWeights& weights);

// A rank's columns of the experts' I and of the shared expert's, each split by itself. Refused, with I, the size and the unit
// named, where the experts leave the rank nothing; a rank that gets nothing of the shared expert has none. `sharded` is
// `config` with the rank's intermediate and shared_intermediate.
//   w13       rows [begin,end) of gate and of up          w13_scale, w13_bias   those of these rows
//   w2        columns [begin,end)                         w2_scale              those columns of blocks; whole, one a row
//   w2_bias   on rank 0 alone, so that the sum over the ranks has it once
// Gate rows and up rows become neighbours and rows of w2 dense, so both FFNs are copies, of as many bytes as the shard has; the
// other tensors are the given ones, and all owners are kept: to hold one part in memory, load it (LoadOptions::tensor_shard).
// Weights in host memory. In a group of 1 everything is as given.
Result<LayerWeights> shard(const MoeConfig& config, const LayerWeights& weights, const TensorShard& part,
                           MoeConfig& sharded);

// The experts' weights in the order of `experts`, indices into the local experts of `weights`; repeats and gaps are legal.
// Neighbours in ascending order stay a view of what was given, everything else is copied. A layer of them needs num_local =
// experts.size(), or kNoExperts, and takes slots for ids. Weights in host memory.
Result<LayerWeights> slots(const LayerWeights& weights, std::span<const std::int32_t> experts);

}  // namespace sluice
