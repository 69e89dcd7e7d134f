// A MoE layer of random weights in guarded buffers, for tests of the layer and of whatever is built on it.
#pragma once

#include <memory>
#include <vector>

#include "harness/buffer.h"
#include "sluice/layer.h"

namespace sluice::test {

struct RandomLayerOptions {
  DType expert_dtype = DType::kBF16;  // e4m3 brings 128x128 scales, i8 one scale a row
  DType shared_dtype = DType::kBF16;
  bool expert_bias = false;
  std::uint64_t seed = 1;
  // Small integers and selections instead of real values, so that every sum is exact in fp32 and every path gives one
  // answer: w13 in {-1,0,1} with few ones per row, w2 one entry of 1 or 2 per row, scales powers of two.
  bool exact = false;
  bool row_scales = false;  // e4m3 too has one scale a row
};

// Owns the memory its weights point into.
struct RandomLayer {
  MoeConfig config;
  LayerWeights weights;
  std::vector<std::unique_ptr<Buffer>> buffers;

  testing::AssertionResult guards_intact() const;
};

RandomLayer random_layer(const MoeConfig& config, const RandomLayerOptions& options);

// A small DeepSeek-V3-like layer: sigmoid gate with bias and groups, one shared expert.
MoeConfig small_config();

// Memory for one forward with inaccessible pages on both sides; the last byte ends at the page border.
class GuardedWorkspace {
 public:
  explicit GuardedWorkspace(std::int64_t bytes);
  ~GuardedWorkspace();
  GuardedWorkspace(const GuardedWorkspace&) = delete;
  GuardedWorkspace& operator=(const GuardedWorkspace&) = delete;
  std::span<std::byte> span() const { return {data_, bytes_}; }
  void fill(int byte) const;  // 0xFF: NaN in every floating-point dtype

 private:
  std::byte* map_ = nullptr;
  std::size_t map_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace sluice::test
