// One rank's experts out of a checkpoint: the bytes of the whole layer's, for every family and way of storing experts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "sluice/checkpoint.h"

namespace sluice {
namespace {

std::vector<std::filesystem::path> models() {
  const std::filesystem::path root = SLUICE_SOURCE_DIR;
  std::vector<std::filesystem::path> paths = {root / "data/tiny-dsv3"};
  for (const auto& entry : std::filesystem::directory_iterator(root / "tests/fixtures/families"))
    if (entry.is_directory()) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

void expect_slice(const char* name, const TensorView& part, const TensorView& whole, std::int64_t first) {
  ASSERT_EQ(part.is_present(), whole.is_present()) << name;
  if (!part.is_present()) return;
  ASSERT_EQ(part.dtype, whole.dtype) << name;
  const TensorView want = whole.slice(std::min(first, whole.shape[0]), part.shape[0]);
  ASSERT_EQ(part.shape, want.shape) << name;
  ASSERT_TRUE(part.is_dense() && want.is_dense()) << name;
  if (part.num_bytes() == 0) return;  // no experts, and no memory for them
  EXPECT_EQ(std::memcmp(part.data, want.data, static_cast<std::size_t>(part.num_bytes())), 0) << name;
}

TEST(ExpertRange, PartsAreTheBytesOfTheWhole) {
  int num_layers = 0;
  for (const auto& path : models()) {
    Result<Checkpoint> checkpoint = Checkpoint::open(path);
    ASSERT_TRUE(checkpoint.is_ok()) << checkpoint.status().message();
    const std::int64_t layer = checkpoint->moe_layers().back();
    const LayerInfo info = checkpoint->layer_info(layer).value();
    for (Precision precision : info.precisions) {
      LoadOptions options;
      options.precision = precision;
      const Result<LoadedLayer> whole = checkpoint->load(layer, options);
      ASSERT_TRUE(whole.is_ok()) << whole.status().message();
      const std::int64_t E = whole->config.num_experts;
      EXPECT_EQ(num_local(whole->config), E);
      for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, 1},
                                         {E - 1, 1},
                                         {E / 2, 0},
                                         {1, E - 2},
                                         {0, kNoExperts},
                                         {E, kNoExperts}}) {
        options.first_expert = first;
        options.num_local = count;
        const Result<LoadedLayer> part = checkpoint->load(layer, options);
        ASSERT_TRUE(part.is_ok()) << path << ": " << part.status().message();
        EXPECT_EQ(part->config.first_expert, first);
        EXPECT_EQ(num_local(part->config), count == 0 ? E - first : std::max<std::int64_t>(count, 0));
        EXPECT_EQ(part->config.num_experts, E);
        const FfnWeights &p = part->weights.experts, &w = whole->weights.experts;
        expect_slice("w13", p.w13, w.w13, first);
        expect_slice("w13_scale", p.w13_scale, w.w13_scale, first);
        expect_slice("w13_bias", p.w13_bias, w.w13_bias, first);
        expect_slice("w2", p.w2, w.w2, first);
        expect_slice("w2_scale", p.w2_scale, w.w2_scale, first);
        expect_slice("w2_bias", p.w2_bias, w.w2_bias, first);
        expect_slice("w_gate", part->weights.w_gate, whole->weights.w_gate, 0);
        expect_slice("shared.w13", part->weights.shared.w13, whole->weights.shared.w13, 0);
        expect_slice("shared.w2", part->weights.shared.w2, whole->weights.shared.w2, 0);
        if (HasFailure()) FAIL() << path << " in " << to_string(precision) << ", experts " << first << "+" << count;
        ++num_layers;
      }
    }
  }
  EXPECT_GT(num_layers, 100);
}

TEST(ExpertRange, RangesOutsideTheLayerAreRefusedWithTheNumbers) {
  const Result<Checkpoint> checkpoint = Checkpoint::open(std::filesystem::path(SLUICE_SOURCE_DIR) / "data/tiny-dsv3");
  ASSERT_TRUE(checkpoint.is_ok());
  const std::int64_t E = checkpoint->layer_info(1)->config.num_experts;
  for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{-1, 1},
                                     {E, 0},
                                     {E, 1},
                                     {0, E + 1},
                                     {E - 1, 2},
                                     {0, -2},
                                     {E + 1, kNoExperts},
                                     {INT64_MAX, 1},
                                     {1, INT64_MAX}}) {
    LoadOptions options;
    options.first_expert = first;
    options.num_local = count;
    const Result<LoadedLayer> loaded = checkpoint->load(1, options);
    ASSERT_FALSE(loaded.is_ok()) << first << "+" << count;
    EXPECT_EQ(loaded.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(loaded.status().message(), testing::HasSubstr("first_expert = " + std::to_string(first)));
  }
}

}  // namespace
}  // namespace sluice
