// The weights of one MoE layer as views, and whatever owns their memory.
#pragma once

#include <memory>
#include <vector>

#include "sluice/config.h"

namespace sluice {

// One gated FFN for L experts. Eight-bit weights have f32 scales in one of two shapes, both tensors in the same:
//   128x128 blocks (e4m3): the scale of an element is w_scale[l, scale_row(n), k/128]; a scale row never spans the
//                          gate/up boundary: rows [0,I) use scale rows n/128, rows [I,2I) use Ib + (n-I)/128
//   one a row (e4m3, i8):  w_scale[l, n, 0], n the output channel. A stride of 0 repeats a value: a scale of a whole
//                          matrix, or of the whole tensor, is this form
struct FfnWeights {
  TensorView w13;        // [L,2I,H] e4m3, i8, bf16 or f32; gate rows first, then up rows
  TensorView w13_scale;  // [L,2Ib,Hb] or [L,2I,1] f32; present exactly when w13 is e4m3 or i8
  TensorView w13_bias;   // [L,2I] f32; optional (gpt-oss)
  TensorView w2;         // [L,H,I]
  TensorView w2_scale;   // [L,Hb,Ib] or [L,H,1] f32
  TensorView w2_bias;    // [L,H] f32; optional
};

struct LayerWeights {
  TensorView w_gate;       // [E,H] bf16 or f32
  TensorView router_bias;  // [E] f32; present exactly when config.gate.has_router_bias
  TensorView score_bias;   // [E] f32; present exactly when config.gate.has_score_bias; bits equal to the file's
  FfnWeights experts;      // L local experts
  FfnWeights shared;       // L = 1, I = shared_intermediate; present exactly when that is > 0
  TensorView shared_gate;  // [1,H] bf16 or f32; present exactly when config.has_shared_gate
  std::vector<std::shared_ptr<const void>> owners;  // keeps the memory behind the views; empty: the caller does
};

// Shapes, dtypes, presence and strides against the config: every tensor present, filled and of one meaning.
Status check_weights(const MoeConfig& config, const LayerWeights& weights);

// Whether the scales are one a row. Where blocks have the same shape (no dimension above 1) they are blocks.
bool has_row_scales(const FfnWeights& weights);
// data_path (sluice/config.h) for these weights.
Result<DataPath> data_path(Precision precision, const FfnWeights& weights);

// One of `size` ranks that I is cut over (LayerOptions::tensor_transport).
struct TensorShard {
  std::int64_t rank = 0;
  std::int64_t size = 1;
};
// Columns [begin, end) of I of a shard: the balanced split of sluice/transport.h over units of columns. A unit is a block of
// 128 where scales are of blocks, so that a block's scale stays the scale of whole blocks (1536 over 8 is 2, 2, 2, 2, 1, 1,
// 1, 1 blocks); else 16 columns, or the largest power of two below that gives every shard one. An I with fewer units than
// shards is kInvalidArgument, naming I, the shards and the unit.
struct ShardRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
Result<ShardRange> shard_range(std::int64_t intermediate, TensorShard shard, bool block_scales);

// A rank's part of a layer cut along I, in memory of its own but for what is not cut: rows [begin,end) and [I+begin,I+end)
// of w13 with their scales and biases, columns [begin,end) of w2 with theirs (a scale a row of w2 is every shard's), w2_bias on
// the first shard alone, since partial sums are added. The shared expert is cut over its own I, or, where that has fewer units
// than shards, left whole: LayerOptions::shared_is_whole must then be what `shared_is_whole` says.
struct ShardedLayer {
  MoeConfig config;
  LayerWeights weights;
  bool shared_is_whole = false;
};
Result<ShardedLayer> shard(const MoeConfig& config, const LayerWeights& weights, TensorShard shard);

// Bytes of all tensors present.
std::int64_t num_bytes(const FfnWeights& weights);
std::int64_t num_bytes(const LayerWeights& weights);

}  // namespace sluice
