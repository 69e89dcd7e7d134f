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
        MoeConfig cut;
        const Result<LayerWeights> part = shard(whole.config, whole.weights, {rank, size}, cut);
        ASSERT_TRUE(part.is_ok()) << part.status().message();
        ASSERT_TRUE(check_weights(cut, *part).is_ok());
        const auto judge = [&](const FfnWeights& p, const FfnWeights& w, std::int64_t width, std::int64_t whole_width) {
          const ShardRange range = shard_of(whole_width, size, rank, blocks ? 128 : 16);
          EXPECT_EQ(width, range.end - range.begin);
          expect_slices(p.w13, w.w13, "w13", range.begin, 0, true);
          expect_slices(p.w2, w.w2, "w2", 0, range.begin, false);
          expect_slices(p.w13_scale, w.w13_scale, "w13_scale", blocks ? range.begin / 128 : range.begin, 0, true);
          expect_slices(p.w2_scale, w.w2_scale, "w2_scale", 0, blocks ? range.begin / 128 : 0, false);
          expect_slices(p.w13_bias, w.w13_bias, "w13_bias", range.begin, 0, true);
          EXPECT_EQ(p.w2_bias.is_present(), w.w2_bias.is_present() && rank == 0) << "added once";
        };
        judge(part->experts, whole.weights.experts, cut.intermediate, config.intermediate);
        judge(part->shared, whole.weights.shared, cut.shared_intermediate, config.shared_intermediate);
      }
    }
  }
}

Result<LoadedLayer> load_tiny(const LoadOptions& options) {
  const Result<Checkpoint> checkpoint = Checkpoint::open(SLUICE_SOURCE_DIR "/data/tiny-dsv3");
  if (!checkpoint) return checkpoint.status();
  return checkpoint->load(1, options);
}

// A trained layer, cut over ranks from the files. Its experts are one block wide: the ranks share the block's scales.
TEST(Shard, TinyDsv3CutOverRanks) {
  for (const Precision precision : {Precision::kBF16, Precision::kF32, Precision::kW8A16, Precision::kW8A8}) {
    const Result<LoadedLayer> whole = load_tiny({.precision = precision});
    ASSERT_TRUE(whole.is_ok()) << whole.status().message();
    const LayerOptions options = options_for(precision, 16, 1);
    Result<Layer> alone = Layer::create(whole->config, whole->weights, options);
    ASSERT_TRUE(alone.is_ok()) << alone.status().message();
    const RankResult want = forward_once(*alone, call_of(16, 23));
    // As in tensor_parallel_test.cpp: order of sums; y rounded once a rank; scales of a over a part of its 128 columns.
    const double bound = precision == Precision::kF32 ? 4 * 0x1p-24 : precision == Precision::kW8A8 ? 0.04 : 0x1p-8;
    const ThreadRanks ranks(3);
    ranks.run([&](std::int64_t rank, std::shared_ptr<Transport> transport) {
      LoadOptions load{.precision = precision};
      load.tensor_shard = {rank, 3};
      const Result<LoadedLayer> part = load_tiny(load);
      ASSERT_TRUE(part.is_ok()) << part.status().message();
      LayerOptions mine = options;
      mine.tensor_transport = transport;
      Result<Layer> layer = Layer::create(part->config, part->weights, mine);
      ASSERT_TRUE(layer.is_ok()) << layer.status().message();
      const RankResult got = forward_once(*layer, call_of(16, 23));
      ASSERT_TRUE(got.status.is_ok()) << got.status.message();
      EXPECT_LE(worst_row(got.out->view(), want.out->view()), bound) << to_string(precision);
    });
  }
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
  EXPECT_THAT(load_tiny(options).status().message(), HasSubstr("experts[1] is 32, expected 0 to 31"));
  options.experts = {-1};
  EXPECT_THAT(load_tiny(options).status().message(), HasSubstr("experts[0] is -1, expected 0 to 31"));
  options.experts = {3, 4};
  options.num_local = 2;
  EXPECT_THAT(load_tiny(options).status().message(), HasSubstr("experts lists 2 slots, and first_expert = 0 and num_local = 2 name a range"));
}

}  // namespace
}  // namespace sluice::test
