// Shards of I that are layers of their own, each summing its columns: their sum against the layer that was not cut, exactly for
// integers and within the derived bound for real numbers, in every form of weights.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/compare.h"
#include "harness/layer_run.h"

namespace sluice::test {
namespace {

using ::testing::HasSubstr;

struct Form {
  const char* name;
  DType dtype;
  bool row_scales;
};
constexpr Form kForms[] = {{"f32", DType::kF32, false},
                           {"bf16", DType::kBF16, false},
                           {"blocks", DType::kE4M3, false},
                           {"channels", DType::kE4M3, true},
                           {"int8", DType::kI8, false}};
constexpr std::int64_t kT = 4, kS = 2, kE = 3, kH = 144;

MoeConfig config_of(std::int64_t intermediate, std::int64_t shared) {
  MoeConfig config;
  config.hidden = kH;
  config.intermediate = intermediate;
  config.num_experts = kE;
  config.top_k = kS;
  config.gate = gate_preset(GateId::kG4);
  config.shared_intermediate = shared;
  return config;
}

// Gates of 32 or 64, where sigmoid is 1 in fp32, integers everywhere else, and scales of 1 or 2: every sum is exact.
void make_exact(const FfnWeights& ffn, std::uint64_t seed) {
  Rng rng(seed);
  const std::int64_t H = ffn.w13.shape[2], I = ffn.w2.shape[2];
  const auto is_gate = [&](std::int64_t row) { return row % (2 * I) < I; };
  fill_with(ffn.w13, [&](std::int64_t i) {
    const std::int64_t h = i % H;
    if (is_gate(i / H)) return h == 0 ? 1.0 : 0.0;
    return h == 0 || rng.integer(0, 39) > 0 ? 0.0 : static_cast<double>(rng.integer(-2, 2));
  });
  fill_with(ffn.w2, [&](std::int64_t) { return static_cast<double>(rng.integer(-2, 2)); });
  for (const TensorView* scale : {&ffn.w13_scale, &ffn.w2_scale})
    if (scale->is_present()) fill_with(*scale, [&](std::int64_t) { return static_cast<double>(rng.integer(1, 2)); });
  if (!ffn.w13_bias.is_present()) return;
  fill_with(ffn.w13_bias, [&](std::int64_t i) { return is_gate(i) ? 32.0 : static_cast<double>(rng.integer(-3, 3)); });
  fill_with(ffn.w2_bias, [&](std::int64_t) { return static_cast<double>(rng.integer(-50, 50)); });
}

RandomLayer layer_of(const MoeConfig& config, const Form& form, bool exact, bool bias = true) {
  RandomLayer m = random_layer(
      config,
      {.expert_dtype = form.dtype, .shared_dtype = form.dtype, .expert_bias = bias, .row_scales = form.row_scales});
  if (exact) {
    make_exact(m.weights.experts, 5);
    if (config.shared_intermediate > 0) make_exact(m.weights.shared, 6);
  }
  return m;
}

// Tokens with the same routing for every rank: ids of any expert, weights 1 and 2.
struct Tokens {
  Buffer x{DType::kBF16, {kT, kH}}, ids{DType::kI32, {kT, kS}}, weight{DType::kF32, {kT, kS}};

  explicit Tokens(bool exact) {
    if (exact) {
      x.fill_integers(3, -2, 2);
      for (std::int64_t t = 0; t < kT; ++t) x.set(t * kH, 32.0);
    } else {
      x.fill_normal(3);
    }
    for (std::int64_t i = 0; i < kT * kS; ++i) {
      ids.set(i, static_cast<double>((i * 2 + i / 3) % kE));
      weight.set(i, exact ? static_cast<double>(1 + i % 2) : 0.3 + 0.1 * static_cast<double>(i));
    }
  }
};

Buffer run_routed(const MoeConfig& config, const LayerWeights& weights, LayerOptions options, const Tokens& in) {
  const Result<Layer> layer = Layer::create(config, weights, options);
  Buffer out(DType::kF32, {kT, config.hidden});
  EXPECT_TRUE(layer.is_ok()) << layer.status().message();
  if (!layer) return out;
  GuardedWorkspace workspace(layer->workspace_bytes());
  workspace.fill(0xFF);
  Ctx ctx;
  ctx.workspace = workspace.span();
  const Status status =
      layer->forward_routed({in.x.view(), {}, {in.ids.view()}, in.weight.view(), {}}, out.view(), ctx);
  EXPECT_TRUE(status.is_ok()) << status.message();
  return out;
}

void add_to(Buffer& sum, const Buffer& part, bool first) {
  for (std::int64_t i = 0; i < sum.num_elements(); ++i)
    sum.as<float>()[i] = first ? part.as<float>()[i] : sum.as<float>()[i] + part.as<float>()[i];
}

// The ranks' outputs, added in fp32 in the order of the ranks; a shared expert that was left whole is the first one's.
Buffer sum_of_ranks(const RandomLayer& m, Precision precision, std::int64_t size, const Tokens& in) {
  Buffer sum(DType::kF32, {kT, m.config.hidden});
  std::int64_t columns = 0, shared = 0;
  for (std::int64_t rank = 0; rank < size; ++rank) {
    const Result<ShardedLayer> part = shard(m.config, m.weights, {rank, size});
    EXPECT_TRUE(part.is_ok()) << part.status().message();
    if (!part) return sum;
    columns += part->config.intermediate;
    if (rank == 0 || !part->shared_is_whole) shared += part->config.shared_intermediate;
    LayerOptions options = options_for(precision, kT);
    options.routed_only = part->shared_is_whole && rank > 0;
    add_to(sum, run_routed(part->config, part->weights, options, in), rank == 0);
  }
  EXPECT_EQ(columns, m.config.intermediate);
  EXPECT_EQ(shared, m.config.shared_intermediate);
  return sum;
}

// Sizes of groups that the layer can be cut over: blocks need as many as ranks.
std::vector<std::int64_t> sizes(const RandomLayer& m) {
  const bool blocks = m.weights.experts.w13.dtype == DType::kE4M3 && !has_row_scales(m.weights.experts);
  std::vector<std::int64_t> found;
  for (const std::int64_t size : {1, 2, 3, 4, 8})
    if (!blocks || ceil_div(m.config.intermediate, kScaleBlock) >= size) found.push_back(size);
  return found;
}

TEST(TensorShards, IntegersSumToTheWholeLayerBitForBit) {
  const Tokens in(true);
  for (const std::int64_t intermediate : {1160, 300}) {
    for (const Form& form : kForms) {
      const RandomLayer m = layer_of(config_of(intermediate, 200), form, true);
      const Buffer want = run_routed(m.config, m.weights, options_for(Precision::kF32, kT), in);
      double largest = 0.0;
      for (const double v : want.to_doubles()) {
        EXPECT_EQ(v, std::rint(v));
        largest = std::max(largest, std::abs(v));
      }
      EXPECT_GT(largest, 1000.0);
      EXPECT_LT(largest, 0x1p23);
      for (const std::int64_t size : sizes(m)) {
        EXPECT_TRUE(same_bits(sum_of_ranks(m, Precision::kF32, size, in).view(), want.view()))
            << form.name << ", I = " << intermediate << ", TP = " << size;
      }
      EXPECT_TRUE(m.guards_intact());
    }
  }
}

// Weights as the real numbers they stand for; scale blocks start anew with every `part` rows.
std::vector<double> dequantised(const TensorView& w, const TensorView& scale, bool blocks, std::int64_t part) {
  std::vector<double> values = to_doubles(w);
  if (!scale.is_present()) return values;
  const std::vector<double> s = to_doubles(scale);
  const std::int64_t rows = w.shape[1], cols = w.shape[2];
  for (std::int64_t i = 0; i < w.num_elements(); ++i) {
    const std::int64_t e = i / (rows * cols), n = i / cols % rows, k = i % cols;
    const std::int64_t row = blocks ? n / part * ceil_div(part, 128) + n % part / 128 : n;
    const std::int64_t col = blocks ? k / 128 : 0;
    values[static_cast<std::size_t>(i)] *=
        s[static_cast<std::size_t>((e * scale.shape[1] + row) * scale.shape[2] + col)];
  }
  return values;
}

// Per token and column: the sum of magnitudes |w| |a| |w2| of one FFN for the given experts and weights.
void add_magnitudes(const FfnWeights& ffn, bool blocks, const Tokens& in, bool shared, std::vector<double>& out) {
  const std::vector<double> x = in.x.to_doubles();
  const std::int64_t I = ffn.w2.shape[2];
  const std::vector<double> w13 = dequantised(ffn.w13, ffn.w13_scale, blocks, I);
  const std::vector<double> w2 = dequantised(ffn.w2, ffn.w2_scale, blocks, kH);
  for (std::int64_t t = 0; t < kT; ++t) {
    for (std::int64_t s = 0; s < (shared ? 1 : kS); ++s) {
      const std::int64_t e = shared ? 0 : static_cast<std::int64_t>(in.ids.at(t * kS + s));
      const double weight = shared ? 1.0 : std::abs(in.weight.at(t * kS + s));
      for (std::int64_t i = 0; i < I; ++i) {
        double g = 0.0, u = 0.0;
        for (std::int64_t k = 0; k < kH; ++k) {
          const double v = x[static_cast<std::size_t>(t * kH + k)];
          g += v * w13[static_cast<std::size_t>(((e * 2) * I + i) * kH + k)];
          u += v * w13[static_cast<std::size_t>(((e * 2 + 1) * I + i) * kH + k)];
        }
        const double a = weight * std::abs(g / (1.0 + std::exp(-g)) * u);
        for (std::int64_t h = 0; h < kH; ++h)
          out[static_cast<std::size_t>(t * kH + h)] += a * std::abs(w2[static_cast<std::size_t>((e * kH + h) * I + i)]);
      }
    }
  }
}

// docs/numerics.md, "Over several ranks": both sums are of the same products, so each is within gamma of the exact one.
TEST(TensorShards, RealValuesAreWithinTheDerivedBoundInF32) {
  const Tokens in(false);
  for (const std::int64_t intermediate : {1160, 300}) {
    for (const Form& form : kForms) {
      MoeConfig config = config_of(intermediate, 200);
      config.has_shared_gate = true;
      const RandomLayer m = layer_of(config, form, false, false);
      const bool blocks = std::string(form.name) == "blocks";
      std::vector<double> magnitude(static_cast<std::size_t>(kT * kH), 0.0);
      add_magnitudes(m.weights.experts, blocks, in, false, magnitude);
      add_magnitudes(m.weights.shared, blocks, in, true, magnitude);
      const Buffer want = run_routed(config, m.weights, options_for(Precision::kF32, kT), in);
      for (const std::int64_t size : sizes(m)) {
        const Buffer got = sum_of_ranks(m, Precision::kF32, size, in);
        const double bound = 2.0 * gamma(128 + ceil_div(intermediate, 128) + 2 + kS + 2 + size);
        for (std::int64_t i = 0; i < kT * kH; ++i) {
          // 1.01: the magnitudes are of exact activations, the layers' are rounded.
          ASSERT_LE(std::abs(got.at(i) - want.at(i)), 1.01 * bound * magnitude[static_cast<std::size_t>(i)])
              << form.name << ", I = " << intermediate << ", TP = " << size << ", element " << i;
        }
        EXPECT_TRUE(same_bits(got.view(), sum_of_ranks(m, Precision::kF32, size, in).view())) << "another run";
        if (size == 1) {
          EXPECT_TRUE(same_bits(got.view(), want.view()));
        }
      }
    }
  }
}

// ---- cases ----

TEST(TensorShards, Case44_EveryRankHasItsTrueBlocks) {
  const Tokens in(true);
  RandomLayer m = layer_of(config_of(1536, 0), kForms[2], true, false);
  // Distinct powers of two: any other block's scale shows.
  fill_with(m.weights.experts.w13_scale, [](std::int64_t i) { return std::ldexp(1.0, static_cast<int>(i % 12 % 3)); });
  const Buffer want = run_routed(m.config, m.weights, options_for(Precision::kF32, kT), in);
  EXPECT_TRUE(same_bits(sum_of_ranks(m, Precision::kF32, 8, in).view(), want.view()));
  Buffer naive(DType::kF32, {kT, kH});
  for (std::int64_t rank = 0; rank < 8; ++rank) {
    ShardedLayer cut = shard(m.config, m.weights, {rank, 8}).value();
    const MoeConfig& config = cut.config;
    LayerWeights& part = cut.weights;
    const ShardRange columns = shard_range(1536, {rank, 8}, true).value();
    ASSERT_EQ(config.intermediate, columns.end - columns.begin);
    const std::int64_t blocks = config.intermediate / 128, first = columns.begin / 128;
    ASSERT_EQ(part.experts.w13_scale.to_string(), fmt::format("f32[3,{},2]", 2 * blocks));
    ASSERT_EQ(part.experts.w2_scale.to_string(), fmt::format("f32[3,2,{}]", blocks));
    const auto w13 = to_doubles(part.experts.w13_scale), whole13 = to_doubles(m.weights.experts.w13_scale);
    const auto w2 = to_doubles(part.experts.w2_scale), whole2 = to_doubles(m.weights.experts.w2_scale);
    for (std::int64_t e = 0; e < kE; ++e) {
      for (std::int64_t b = 0; b < blocks; ++b) {
        for (std::int64_t c = 0; c < 2; ++c) {
          for (std::int64_t half = 0; half < 2; ++half)
            EXPECT_EQ(w13[static_cast<std::size_t>(((e * 2 + half) * blocks + b) * 2 + c)],
                      whole13[static_cast<std::size_t>(((e * 2 + half) * 12 + first + b) * 2 + c)]);
          EXPECT_EQ(w2[static_cast<std::size_t>((e * 2 + c) * blocks + b)],
                    whole2[static_cast<std::size_t>((e * 2 + c) * 12 + first + b)]);
        }
      }
    }
    // Scales by the local row, as in the fault, are another layer.
    part.experts.w13_scale.data = m.weights.experts.w13_scale.data;
    part.experts.w13_scale.stride = m.weights.experts.w13_scale.stride;
    add_to(naive, run_routed(config, part, options_for(Precision::kF32, kT), in), rank == 0);
  }
  EXPECT_FALSE(same_bits(naive.view(), want.view()));
}

TEST(TensorShards, WeightsOnAGpuAreRefusedByName) {
  const RandomLayer m = layer_of(config_of(64, 0), kForms[1], true, false);
  LayerWeights on_gpu = m.weights;
  on_gpu.experts.w2.device.kind = DeviceKind::kCuda;
  EXPECT_THAT(shard(m.config, on_gpu, {0, 2}).status().message(), HasSubstr("shard: experts.w2 is on a GPU"));
}

TEST(TensorShards, Case45_AShardsLastBlockMayBeShort) {
  const Tokens in(true);
  const RandomLayer m = layer_of(config_of(1000, 0), kForms[2], true, false);
  const Buffer want = run_routed(m.config, m.weights, options_for(Precision::kF32, kT), in);
  EXPECT_TRUE(same_bits(sum_of_ranks(m, Precision::kF32, 2, in).view(), want.view()));
  const ShardedLayer second = shard(m.config, m.weights, {1, 2}).value();
  EXPECT_EQ(second.config.intermediate, 488);  // blocks of 128,128,128,104: not four of 122
  EXPECT_EQ(second.weights.experts.w13_scale.to_string(), "f32[3,8,2]");
}

TEST(TensorShards, Case50_ScalesAreCutAlongKWithTheWeights) {
  const RandomLayer m = layer_of(config_of(512, 0), kForms[2], true, false);
  ShardedLayer part = shard(m.config, m.weights, {1, 2}).value();
  LayerWeights& half = part.weights;
  EXPECT_EQ(half.experts.w2.to_string(), "e4m3[3,144,256]");
  EXPECT_EQ(half.experts.w2_scale.to_string(), "f32[3,2,2]");
  EXPECT_TRUE(check_weights(part.config, half).is_ok());
  half.experts.w2_scale = m.weights.experts.w2_scale;
  EXPECT_THAT(check_weights(part.config, half).message(), HasSubstr("w2_scale"));
}

// A shared FFN that gives x back: gates of 32, up rows that halve five times, w2 a sum of identities.
RandomLayer identity_layer(std::int64_t num_shared) {
  MoeConfig config = config_of(64, num_shared * kH);
  config.gate.routed_scaling_factor = 2.5f;
  RandomLayer m = layer_of(config, kForms[0], true, false);
  fill_with(m.weights.experts.w2, [](std::int64_t) { return 0.0; });
  const std::int64_t I = config.shared_intermediate;
  fill_with(m.weights.shared.w13, [&](std::int64_t i) {
    const std::int64_t row = i / kH, h = i % kH;
    if (row < I) return h == 0 ? 1.0 : 0.0;
    return h == (row - I) % kH ? 0x1p-5 : 0.0;
  });
  fill_with(m.weights.shared.w2,
            [&](std::int64_t i) { return i / I == i % I % kH ? 1.0 / static_cast<double>(num_shared) : 0.0; });
  return m;
}

TEST(TensorShards, Case92_TheSharedIdentityGivesXForEveryGroup) {
  const Tokens in(true);
  for (const std::int64_t num_shared : {1, 2}) {
    const RandomLayer m = identity_layer(num_shared);
    for (const std::int64_t size : {1, 2, 3, 4})
      EXPECT_EQ(sum_of_ranks(m, Precision::kF32, size, in).to_doubles(), in.x.to_doubles())
          << num_shared << " shared, TP = " << size;
  }
}

TEST(TensorShards, Case93_TheSharedExpertIsAddedOnceForEverySizeOfGroup) {
  const Tokens in(true);
  const RandomLayer m =
      layer_of(config_of(512, 384), kForms[2], true, false);  // over 4 ranks its shared expert stays whole
  fill_with(m.weights.experts.w2, [](std::int64_t) { return 0.0; });
  const Buffer want = run_routed(m.config, m.weights, options_for(Precision::kF32, kT), in);
  for (const std::int64_t size : {1, 2, 4})
    EXPECT_TRUE(same_bits(sum_of_ranks(m, Precision::kF32, size, in).view(), want.view())) << "TP = " << size;
}

// A scale of the whole tensor, seen with a stride of 0, is that of every shard.
TEST(TensorShards, RepeatedScalesKeepTheirValue) {
  RandomLayer m = layer_of(config_of(300, 0), kForms[3], true, false);
  for (TensorView* scale : {&m.weights.experts.w13_scale, &m.weights.experts.w2_scale}) scale->stride = {0, 0, 0};
  const Tokens in(true);
  const Buffer want = run_routed(m.config, m.weights, options_for(Precision::kF32, kT), in);
  EXPECT_TRUE(same_bits(sum_of_ranks(m, Precision::kF32, 3, in).view(), want.view()));
}

}  // namespace
}  // namespace sluice::test
