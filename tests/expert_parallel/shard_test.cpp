// The parts of a layer that ranks have: shards of I, and experts by the slots of a placement.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <numeric>

#include "expert_parallel/ranks.h"
#include "sluice/checkpoint.h"

namespace sluice::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::int64_t> widths(std::int64_t intermediate, std::int64_t size, bool blocks) {
  std::vector<std::int64_t> list;
  std::int64_t at = 0;
  for (std::int64_t rank = 0; rank < size; ++rank) {
    const Result<ShardRange> range = shard_range(intermediate, {rank, size}, blocks);
    EXPECT_TRUE(range.is_ok()) << range.status().message();
    EXPECT_EQ(range->begin, at) << "a gap or an overlap";
    at = range->end;
    list.push_back(range->end - range->begin);
  }
  EXPECT_EQ(at, intermediate);
  return list;
}

TEST(Shard, Case44_RangesAreWholeBlocksOrRefused) {
  EXPECT_THAT(widths(1536, 8, true), ElementsAre(256, 256, 256, 256, 128, 128, 128, 128));
  EXPECT_THAT(widths(2048, 8, true), ElementsAre(256, 256, 256, 256, 256, 256, 256, 256));
  EXPECT_THAT(widths(320, 3, true), ElementsAre(128, 128, 64));
  EXPECT_THAT(widths(1536, 8, false), ElementsAre(192, 192, 192, 192, 192, 192, 192, 192));
  EXPECT_THAT(widths(40, 8, false), ElementsAre(8, 8, 4, 4, 4, 4, 4, 4));
  EXPECT_THAT(widths(5, 4, false), ElementsAre(2, 1, 1, 1));
  const Status few = shard_range(896, {0, 8}, true).status();
  EXPECT_EQ(few.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(few.message(), HasSubstr("I = 896 has 7 units of 128 columns, fewer than the 8 shards"));
  EXPECT_THAT(shard_range(3, {0, 4}, false).status().message(), HasSubstr("I = 3 has 3 units of 1 columns"));
  EXPECT_THAT(shard_range(256, {2, 2}, false).status().message(), HasSubstr("rank 2 of 2 shards is none of them"));
  EXPECT_FALSE(shard_range(256, {-1, 2}, false).is_ok());
  EXPECT_FALSE(shard_range(256, {0, 0}, false).is_ok());
}

struct Kind {
  DType experts;
  bool row_scales = false;
  bool bias = false;
};

// Element (l, n, k) of the whole is element (l, n', k') of exactly one shard.
void expect_slices(const TensorView& part, const TensorView& whole, const char* name, std::int64_t rows_begin,
                   std::int64_t cols_begin, bool halves) {
  ASSERT_EQ(part.is_present(), whole.is_present()) << name;
  if (!part.is_present()) return;
  const std::vector<double> got = to_doubles(part), want = to_doubles(whole);
  const std::int64_t L = part.shape[0], N = part.shape[1], K = part.rank == 3 ? part.shape[2] : 1;
  const std::int64_t whole_n = whole.shape[1], whole_k = whole.rank == 3 ? whole.shape[2] : 1;
  ASSERT_EQ(L, whole.shape[0]) << name;
  for (std::int64_t i = 0; i < L * N * K; ++i) {
    const std::int64_t l = i / (N * K), n = i / K % N, k = i % K;
    const std::int64_t from_n = halves ? (n < N / 2 ? rows_begin + n : whole_n / 2 + rows_begin + n - N / 2) : n;
    ASSERT_EQ(got[static_cast<std::size_t>(i)],
              want[static_cast<std::size_t>((l * whole_n + from_n) * whole_k + cols_begin + k)])
        << name << " [" << l << "," << n << "," << k << "]";
  }
}

TEST(Shard, Cases44And50_EveryElementGoesWhereItsScaleGoes) {
  for (const Kind& kind :
       {Kind{DType::kF32}, {DType::kBF16, false, true}, {DType::kE4M3}, {DType::kE4M3, true}, {DType::kI8}}) {
    MoeConfig config = small_config();
    config.num_experts = 3;
    config.top_k = 2;
    config.gate = gate_preset(GateId::kG8);
    config.hidden = 200;
    config.intermediate = 448;  // blocks of 128, 128, 128 and 64
    config.shared_intermediate = 300;
    const RandomLayer whole = random_layer(config, {.expert_dtype = kind.experts,
                                                    .shared_dtype = kind.experts,
                                                    .expert_bias = kind.bias,
                                                    .seed = 21,
                                                    .row_scales = kind.row_scales});
    const bool blocks = kind.experts == DType::kE4M3 && !kind.row_scales;
    for (const std::int64_t size : {1, 2, 3}) {
      for (std::int64_t rank = 0; rank < size; ++rank) {
        SCOPED_TRACE(fmt::format("{} {}, shard {} of {}", to_string(kind.experts), kind.row_scales, rank, size));
        const Result<ShardedLayer> part = shard(whole.config, whole.weights, {rank, size});
        ASSERT_TRUE(part.is_ok()) << part.status().message();
        ASSERT_TRUE(check_weights(part->config, part->weights).is_ok());
        EXPECT_FALSE(part->shared_is_whole);
        const auto judge = [&](const FfnWeights& p, const FfnWeights& w, std::int64_t width, std::int64_t whole_width) {
          const ShardRange range = shard_range(whole_width, {rank, size}, blocks).value();
          EXPECT_EQ(width, range.end - range.begin);
          expect_slices(p.w13, w.w13, "w13", range.begin, 0, true);
          expect_slices(p.w2, w.w2, "w2", 0, range.begin, false);
          expect_slices(p.w13_scale, w.w13_scale, "w13_scale", blocks ? range.begin / 128 : range.begin, 0, true);
          expect_slices(p.w2_scale, w.w2_scale, "w2_scale", 0, blocks ? range.begin / 128 : 0, false);
          expect_slices(p.w13_bias, w.w13_bias, "w13_bias", range.begin, 0, true);
          EXPECT_EQ(p.w2_bias.is_present(), w.w2_bias.is_present() && rank == 0) << "added once";
        };
        judge(part->weights.experts, whole.weights.experts, part->config.intermediate, config.intermediate);
        judge(part->weights.shared, whole.weights.shared, part->config.shared_intermediate, config.shared_intermediate);
      }
    }
  }
}

TEST(Shard, ASharedExpertTooNarrowToCutStaysWhole) {
  MoeConfig config = small_config();
  config.intermediate = 256;
  config.shared_intermediate = 128;
  const RandomLayer whole =
      random_layer(config, {.expert_dtype = DType::kE4M3, .shared_dtype = DType::kE4M3, .seed = 22});
  const Result<ShardedLayer> part = shard(whole.config, whole.weights, {1, 2});
  ASSERT_TRUE(part.is_ok()) << part.status().message();
  EXPECT_TRUE(part->shared_is_whole);
  EXPECT_EQ(part->config.shared_intermediate, 128);
  EXPECT_EQ(part->weights.shared.w13.data, whole.weights.shared.w13.data);
}

Result<LoadedLayer> load_tiny(const LoadOptions& options) {
  const Result<Checkpoint> checkpoint = Checkpoint::open(SLUICE_SOURCE_DIR "/data/tiny-dsv3");
  if (!checkpoint) return checkpoint.status();
  return checkpoint->load(1, options);
}

// A trained layer, cut over two ranks from the files. Its experts are one block wide: in e4m3 they cannot be cut.
TEST(Shard, TinyDsv3CutOverTwoRanks) {
  for (const Precision precision : {Precision::kW8A8, Precision::kF32, Precision::kW8A16}) {
    LoadOptions load{.precision = precision};
    load.tensor_shard = {0, 2};
    EXPECT_THAT(load_tiny(load).status().message(), HasSubstr("I = 128 has 1 units of 128 columns, fewer than the 2"));
  }
  const Result<LoadedLayer> whole = load_tiny({.precision = Precision::kBF16});
  ASSERT_TRUE(whole.is_ok()) << whole.status().message();
  const LayerOptions options = options_for(Precision::kBF16, 16, 1);
  Result<Layer> alone = Layer::create(whole->config, whole->weights, options);
  ASSERT_TRUE(alone.is_ok()) << alone.status().message();
  const RankResult want = forward_once(*alone, call_of(16, 23));
  const ThreadRanks ranks(2);
  ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
    LoadOptions load{.precision = Precision::kBF16};
    load.tensor_shard = {rank, 2};
    const Result<LoadedLayer> part = load_tiny(load);
    ASSERT_TRUE(part.is_ok()) << part.status().message();
    LayerOptions mine = options;
    mine.tensor_transport = transport;
    mine.shared_is_whole = part->shared_is_whole;
    Result<Layer> layer = Layer::create(part->config, part->weights, mine);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    const RankResult got = forward_once(*layer, call_of(16, 23));
    ASSERT_TRUE(got.status.is_ok()) << got.status.message();
    EXPECT_LE(worst_row(got.out->view(), want.out->view()), 0x1p-8);
  });
}

TEST(ExpertList, Cases116And117_EverySlotHoldsItsExpert) {
  const std::filesystem::path root = SLUICE_SOURCE_DIR "/tests/fixtures/families";
  int num_layers = 0;
  for (const auto& entry : std::filesystem::directory_iterator(root)) {
    if (!entry.is_directory()) continue;
    const Result<Checkpoint> checkpoint = Checkpoint::open(entry.path());
    ASSERT_TRUE(checkpoint.is_ok()) << checkpoint.status().message();
    const std::int64_t layer = checkpoint->moe_layers().back();
    const LayerInfo info = checkpoint->layer_info(layer).value();
    for (const Precision precision : info.precisions) {
      SCOPED_TRACE(fmt::format("{} {}", entry.path().filename().string(), to_string(precision)));
      const Result<LoadedLayer> whole = checkpoint->load(layer, {.precision = precision});
      ASSERT_TRUE(whole.is_ok()) << whole.status().message();
      const auto E = static_cast<std::int32_t>(whole->config.num_experts);
      for (const std::vector<std::int32_t>& list :
           {std::vector<std::int32_t>{E - 1, 0, E - 1}, {1, 2}, {0}, {E / 2, E / 2}}) {
        LoadOptions options{.precision = precision};
        options.experts = list;
        const Result<LoadedLayer> part = checkpoint->load(layer, options);
        ASSERT_TRUE(part.is_ok()) << part.status().message();
        EXPECT_EQ(num_local(part->config), std::ssize(list));
        EXPECT_EQ(part->config.first_expert, 0);
        const FfnWeights &p = part->weights.experts, &w = whole->weights.experts;
        const std::pair<const TensorView*, const TensorView*> pairs[] = {
            {&p.w13, &w.w13}, {&p.w13_scale, &w.w13_scale}, {&p.w13_bias, &w.w13_bias},
            {&p.w2, &w.w2},   {&p.w2_scale, &w.w2_scale},   {&p.w2_bias, &w.w2_bias}};
        for (const auto& [got, want] : pairs) {
          ASSERT_EQ(got->is_present(), want->is_present());
          for (std::size_t slot = 0; got->is_present() && slot < list.size(); ++slot) {
            EXPECT_TRUE(same_bits(got->slice(static_cast<std::int64_t>(slot), 1), want->slice(list[slot], 1)))
                << "slot " << slot;
          }
        }
        ++num_layers;
      }
    }
  }
  EXPECT_GT(num_layers, 100);
}

TEST(ExpertList, ConflictsAndStrangersAreRefused) {
  LoadOptions options{.precision = Precision::kF32};
  options.experts = {0, 32};
  EXPECT_THAT(load_tiny(options).status().message(), HasSubstr("expert 32 of the list is none of the layer's 32"));
  options.experts = {-1};
  EXPECT_THAT(load_tiny(options).status().message(), HasSubstr("expert -1 of the list"));
  options.experts = {3, 4};
  options.num_local = 2;
  EXPECT_THAT(load_tiny(options).status().message(), HasSubstr("experts are listed, and first_expert = 0"));
}

}  // namespace
}  // namespace sluice::test
