// The layer on a GPU against the layer on the CPU, and against itself in every way the contract promises equality.
#include <gmock/gmock.h>

#include <cmath>
#include <numeric>
#include <thread>

#include "gpu/gpu_layer.h"

namespace sluice::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Paths, GpuVariants, testing::ValuesIn(kVariants), variant_name);

void expect_cpu_rows(const TensorView& got, const TensorView& want, const GpuGemm& gemm, Precision precision) {
  if (gemm.is_exact) {
    EXPECT_TRUE(same_bits(got, want));
    return;
  }
  // Results a hair apart may be rounded to neighbours in bf16: 2^-8 of an element, at worst of all of them.
  const double rounding = got.dtype == DType::kBF16 ? 0x1p-8 : 0;
  EXPECT_LE(worst_row(got, want), tensor_core_bound(precision) + rounding);
}

// Gate included; the oracle gets the routing the GPU chose, so that only what follows the gate is compared. The gate's own
// choice is compared as sets of ids: logits of a GPU may differ in their last bits, and these have no near ties.
TEST_P(GpuVariants, ForwardIsTheCpuLayer) {
  const RandomLayer m = model(small_config());
  for (std::int64_t tokens : {1, 5, 64, 257}) {
    for_each_gemm(m, gpu_options(precision(), 257), [&](const Layer& layer, const GpuGemm& gemm) {
      for (DType x_dtype : {DType::kBF16, DType::kF32}) {
        for (DType out_dtype : {DType::kF32, DType::kBF16}) {
          const Buffer x = random_x(tokens, 256, 7, x_dtype);
          const Outcome got = run_on_gpu(layer, x.view(), out_dtype);
          const Buffer want =
              routed_on_cpu(m, precision(), x.view(), got.topk_idx.view(), got.topk_weight.view(), out_dtype);
          expect_cpu_rows(got.out.view(), want.view(), gemm, precision());
          const Outcome cpu = run(make_layer(m, options_for(precision(), tokens)), x.view());
          for (std::int64_t i = 0; i < tokens * m.config.top_k; ++i) {
            EXPECT_EQ(got.topk_idx.at(i), cpu.topk_idx.at(i)) << "slot " << i;
            EXPECT_NEAR(got.topk_weight.at(i), cpu.topk_weight.at(i), 1e-5) << "slot " << i;
          }
          EXPECT_EQ(got.counters.at(0), 0.0);
        }
      }
    });
    if (HasFailure()) return;
  }
}

// Every rounding point sees an exactly representable sum, on tensor cores too (these products need few bits): bitwise,
// whatever the order is.
TEST_P(GpuVariants, ExactValuesEqualTheReferenceBitwise) {
  MoeConfig config = small_config();
  config.gate.routed_scaling_factor = 1.0f;
  const RandomLayer m = model(config, true);
  Buffer x(DType::kBF16, {33, config.hidden});
  x.fill_integers(3, -4, 4);
  for_each_gemm(m, gpu_options(precision(), 33), [&](const Layer& layer, const GpuGemm&) {
    const Outcome got = run_on_gpu(layer, x.view());
    const Buffer want =
        routed_on_cpu(m, precision(), x.view(), got.topk_idx.view(), got.topk_weight.view(), DType::kF32, true);
    EXPECT_TRUE(same_bits(got.out.view(), want.view()));
  });
}

TEST_P(GpuVariants, SameBitsForAnyBatchAndRun) {
  const RandomLayer m = model(small_config());
  const Buffer x = random_x(130, 256);
  for_each_gemm(m, gpu_options(precision(), 200), [&](const Layer& layer, const GpuGemm&) {
    const Outcome first = run_on_gpu(layer, x.view());
    const Outcome again = run_on_gpu(layer, x.view());
    EXPECT_TRUE(same_bits(again.out.view(), first.out.view()));
    for (std::int64_t chunk : {1, 17, 64, 129}) {
      for (std::int64_t begin = 0; begin < 130; begin += chunk == 1 ? 43 : chunk) {
        const std::int64_t count = std::min<std::int64_t>(chunk, 130 - begin);
        const Outcome part = run_on_gpu(layer, x.view().slice(begin, count));
        EXPECT_TRUE(same_bits(part.out.view(), first.out.view().slice(begin, count)))
            << "tokens " << begin << "+" << count;
        EXPECT_TRUE(same_bits(part.topk_idx.view(), first.topk_idx.view().slice(begin, count)));
      }
    }
  });
}

// Rows an engine has grouped or padded itself, weighed by hand: the bits of forward.
TEST_P(GpuVariants, TheFourEntryPointsAgree) {
  const MoeConfig config = small_config();
  const RandomLayer m = model(config);
  const std::int64_t tokens = 21, slots = config.top_k, hidden = config.hidden, experts = config.num_experts;
  const std::int64_t per_expert = 22;
  LayerOptions options = gpu_options(precision(), tokens);
  options.max_rows_per_expert = per_expert;
  options.routed_only = true;
  const Buffer x = random_x(tokens, hidden);
  for_each_gemm(m, options, [&](const Layer& layer, const GpuGemm&) {
    const Outcome whole = run_on_gpu(layer, x.view());
    const GpuWorkspace workspace(layer);
    const Twin x_twin(x), ids(whole.topk_idx), weights(whole.topk_weight);
    Buffer routed(DType::kF32, {tokens, hidden});
    const Twin routed_twin(routed);
    Status status = layer.forward_routed({x_twin.view(), {}, {ids.view()}, weights.view(), {}}, routed_twin.view(),
                                         workspace.ctx());
    ASSERT_TRUE(status.is_ok()) << status.message();
    routed_twin.fetch();
    EXPECT_TRUE(same_bits(routed.view(), whole.out.view()));

    // Rows in the order of the plan, with a gap of unowned rows before, after and between nobody's business.
    std::vector<double> offsets{2}, counts;
    std::vector<std::int64_t> token_of, row_of(static_cast<std::size_t>(tokens * slots), -1);
    std::vector<std::int64_t> place_of(row_of.size(), -1);
    for (std::int64_t e = 0; e < experts; ++e) {
      std::int64_t count = 0;
      for (std::int64_t i = 0; i < tokens * slots; ++i) {
        if (whole.topk_idx.at(i) != static_cast<double>(e)) continue;
        place_of[static_cast<std::size_t>(i)] = e * per_expert + count++;
        row_of[static_cast<std::size_t>(i)] = 2 + std::ssize(token_of);
        token_of.push_back(i / slots);
      }
      counts.push_back(static_cast<double>(count));
      offsets.push_back(offsets.back() + static_cast<double>(count));
    }
    const std::int64_t rows = tokens * slots;
    ASSERT_EQ(std::ssize(token_of), rows);
    const DataPath path = path_of(GetParam());
    Buffer grouped_x(DType::kBF16, {rows + 5, hidden});
    Buffer masked_x(DType::kBF16, {experts * per_expert, hidden});
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t c = 0; c < hidden; ++c) {
        const double value = x.at(i / slots * hidden + c);
        grouped_x.set(row_of[static_cast<std::size_t>(i)] * hidden + c, value);
        masked_x.set(place_of[static_cast<std::size_t>(i)] * hidden + c, value);
      }
    }
    Buffer offset(DType::kI32, {experts + 1});
    offset.fill_values(offsets);
    Buffer count(DType::kI32, {experts});
    count.fill_values(counts);
    Buffer grouped_y(path.y, {rows + 5, hidden});
    Buffer masked_y(path.y, {experts * per_expert, hidden});
    const Twin gx(grouped_x), mx(masked_x), go(offset), mc(count), gy(grouped_y), my(masked_y);
    workspace.poison();
    status = layer.forward_grouped({gx.view(), {}}, {go.view()}, gy.view(), workspace.ctx());
    ASSERT_TRUE(status.is_ok()) << status.message();
    gy.fetch();
    workspace.poison();
    status = layer.forward_masked({mx.view(), {}}, mc.view(), my.view(), workspace.ctx());
    ASSERT_TRUE(status.is_ok()) << status.message();
    my.fetch();
    workspace.expect_guards();
    EXPECT_TRUE(is_poison(grouped_y.view().slice(0, 2)));
    EXPECT_TRUE(is_poison(grouped_y.view().slice(rows + 2, 3)));
    for (std::int64_t e = 0; e < experts; ++e) {
      const auto n = static_cast<std::int64_t>(counts[static_cast<std::size_t>(e)]);
      EXPECT_TRUE(same_bits(masked_y.view().slice(e * per_expert, n),
                            grouped_y.view().slice(static_cast<std::int64_t>(offsets[static_cast<std::size_t>(e)]), n)))
          << "expert " << e;
      EXPECT_TRUE(is_poison(masked_y.view().slice(e * per_expert + n, per_expert - n))) << "expert " << e;
    }
    Buffer by_hand(DType::kF32, {tokens, hidden});
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t c = 0; c < hidden; ++c) {
        float acc = 0.0f;
        for (std::int64_t i = t * slots; i < (t + 1) * slots; ++i) {
          acc = std::fma(static_cast<float>(whole.topk_weight.at(i)),
                         static_cast<float>(grouped_y.at(row_of[static_cast<std::size_t>(i)] * hidden + c)), acc);
        }
        by_hand.set(t * hidden + c, acc);
      }
    }
    EXPECT_TRUE(same_bits(by_hand.view(), whole.out.view()));
  });
}

// ---------------------------------------------------------------------------------------------------------

using LayerCuda = GpuTest;

RandomLayer fp8_layer(bool shared = true) {
  MoeConfig config = small_config();
  if (!shared) config.shared_intermediate = 0;
  return random_layer(config, {.expert_dtype = DType::kE4M3, .shared_dtype = DType::kE4M3});
}

// Rows that arrive quantised, in either stride order of their scales, give the bits of bf16 rows.
TEST_F(LayerCuda, QuantisedRowsAreTheRowsTheLayerMakes) {
  const RandomLayer m = fp8_layer(false);
  for (std::int64_t tokens : {3, 32}) {
    Result<Layer> made = make_gpu_layer(m, gpu_options(Precision::kW8A8, tokens));
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    const Buffer x = random_x(tokens, 256);
    const Outcome want = run_on_gpu(*made, x.view());
    for (bool transposed : {false, true}) {
      Buffer q(DType::kE4M3, {tokens, 256});
      Buffer scale(DType::kF32,
                   transposed ? std::vector<std::int64_t>{tokens, 2} : std::vector<std::int64_t>{2, tokens});
      pack::Args quantise;
      quantise.x = x.view();
      quantise.rows = q.view();
      quantise.rows_scale = transposed ? scale.transposed() : scale.view();
      ASSERT_TRUE(pack::impls().back().run(quantise, {}).is_ok());
      const Twin q_twin(q), scale_twin(scale), ids(want.topk_idx), weights(want.topk_weight);
      TensorView scale_view = quantise.rows_scale;
      scale_view.data = scale_twin.view().data;
      scale_view.device = kGpu;
      Buffer out(DType::kF32, {tokens, 256});
      const Twin out_twin(out);
      const GpuWorkspace workspace(*made);
      const Status status = made->forward_routed({q_twin.view(), scale_view, {ids.view()}, weights.view(), {}},
                                                 out_twin.view(), workspace.ctx());
      ASSERT_TRUE(status.is_ok()) << status.message();
      out_twin.fetch();
      EXPECT_TRUE(same_bits(out.view(), want.out.view())) << "transposed " << transposed;
    }
  }
}

TEST_F(LayerCuda, ZeroTokensSucceedWithNullPointers) {
  Result<Layer> layer = make_gpu_layer(fp8_layer(), gpu_options(Precision::kW8A8, 4));
  ASSERT_TRUE(layer.is_ok()) << layer.status().message();
  const TensorView empty = TensorView::dense(nullptr, DType::kBF16, {0, 256}, kGpu);
  const TensorView ids = TensorView::dense(nullptr, DType::kI32, {0, 4}, kGpu);
  const TensorView weights = TensorView::dense(nullptr, DType::kF32, {0, 4}, kGpu);
  EXPECT_TRUE(layer->forward(empty, empty, {}).is_ok());
  EXPECT_TRUE(layer->forward_routed({empty, {}, {ids}, weights, {}}, empty, {}).is_ok());
}

// Case 20 on a GPU: ids that are none are skipped and counted; their neighbours keep their bits. Case 97: a token without
// any expert is exactly zero.
TEST_F(LayerCuda, Case20And97InvalidIdsAreCountedAndLeaveNoTrace) {
  const RandomLayer m = fp8_layer(false);
  Result<Layer> layer = make_gpu_layer(m, gpu_options(Precision::kW8A8, 3));
  ASSERT_TRUE(layer.is_ok()) << layer.status().message();
  const Buffer x = random_x(3, 256);
  Buffer wild(DType::kI32, {3, 4}), clean(DType::kI32, {3, 4}), weights(DType::kF32, {3, 4});
  wild.fill_values({3, 16, 1 << 30, -2147483648.0, 1, 2, -7, 5, -1, -1, -1, -1});
  clean.fill_values({3, -1, -1, -1, 1, 2, -1, 5, -1, -1, -1, -1});
  weights.fill_constant(0.25);
  weights.set(1, NAN);  // of a slot that is not routed: never read
  const auto go = [&](const Buffer& ids, double invalid) {
    Buffer out(DType::kF32, {3, 256}), counters(DType::kI64, {kNumCounters});
    counters.fill_constant(5);
    const Twin x_twin(x), ids_twin(ids), weights_twin(weights), out_twin(out), counters_twin(counters);
    const GpuWorkspace workspace(*layer);
    EXPECT_TRUE(layer
                    ->forward_routed({x_twin.view(), {}, {ids_twin.view()}, weights_twin.view(), counters_twin.view()},
                                     out_twin.view(), workspace.ctx())
                    .is_ok());
    out_twin.fetch();
    counters_twin.fetch();
    workspace.expect_guards();
    EXPECT_EQ(counters.at(static_cast<int>(Counter::kInvalidIds)), 5 + invalid);
    return out;
  };
  const Buffer got = go(wild, 4);
  const Buffer want = go(clean, 0);
  EXPECT_TRUE(same_bits(got.view(), want.view()));
  for (std::int64_t c = 0; c < 256; ++c) EXPECT_EQ(got.at(2 * 256 + c), 0.0);
}

// Case 4: a token of NaN or infinities ends in its own row; the others keep their bits, and its ids are in range.
TEST_F(LayerCuda, Case4NaNAndInfinityStayInTheirRow) {
  for (const Variant& v : kVariants) {
    const RandomLayer m = model_of(v);
    Result<Layer> layer = make_gpu_layer(m, gpu_options(v.precision, 40));
    ASSERT_TRUE(layer.is_ok()) << v.name << ": " << layer.status().message();
    const Buffer good = random_x(40, 256);
    Buffer bad = good.clone();
    for (std::int64_t c = 0; c < 256; ++c) bad.set(7 * 256 + c, NAN);
    bad.set(9 * 256 + 3, INFINITY);
    bad.set(11 * 256 + 200, NAN);
    const Outcome want = run_on_gpu(*layer, good.view());
    const Outcome got = run_on_gpu(*layer, bad.view());
    for (std::int64_t t = 0; t < 40; ++t) {
      if (t == 7 || t == 9 || t == 11) {
        std::vector<double> ids;
        for (std::int64_t s = 0; s < 4; ++s) ids.push_back(got.topk_idx.at(t * 4 + s));
        std::sort(ids.begin(), ids.end());
        EXPECT_EQ(std::unique(ids.begin(), ids.end()), ids.end()) << v.name << " token " << t;
        EXPECT_GE(ids.front(), 0.0);
        EXPECT_LT(ids.back(), 16.0);
        continue;
      }
      EXPECT_TRUE(same_bits(got.out.view().slice(t, 1), want.out.view().slice(t, 1))) << v.name << " token " << t;
    }
    EXPECT_GE(got.counters.at(static_cast<int>(Counter::kNonFiniteTokens)), 1.0) << v.name;
  }
}

// Offsets and counts no host ever sees: whatever they hold, nothing outside out is touched and the call succeeds.
TEST_F(LayerCuda, GarbageOffsetsAndCountsStayInBounds) {
  for (const Variant& v : {variant("w8a8"), variant("w8a8_i8"), variant("bf16"), variant("f32")}) {
    const RandomLayer m = model_of(v);
    LayerOptions options = gpu_options(v.precision, 8);
    options.max_rows_per_expert = 8;
    options.routed_only = true;
    Result<Layer> layer = make_gpu_layer(m, options);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    const DataPath path = path_of(v);
    Rng rng(3);
    for (int round = 0; round < 12; ++round) {
      Buffer x = random_x(128, 256);
      Buffer y(path.y, {128, 256}), offset(DType::kI32, {17}), count(DType::kI32, {16});
      const auto garbage = [&](std::int64_t) -> double {
        const double wild[] = {-2147483648.0, 2147483647.0, -1, 0, 7, 64, 127, 128, 129, 1 << 20};
        return wild[rng.integer(0, 9)];
      };
      offset.fill_with(garbage);
      count.fill_with(garbage);
      const Twin x_twin(x), y_twin(y), offset_twin(offset), count_twin(count);
      const GpuWorkspace workspace(*layer);
      ASSERT_TRUE(
          layer->forward_grouped({x_twin.view(), {}}, {offset_twin.view()}, y_twin.view(), workspace.ctx()).is_ok());
      y_twin.fetch();
      workspace.expect_guards();
      Buffer masked(path.y, {128, 256});
      const Twin masked_twin(masked);
      ASSERT_TRUE(
          layer->forward_masked({x_twin.view(), {}}, count_twin.view(), masked_twin.view(), workspace.ctx()).is_ok());
      masked_twin.fetch();
      workspace.expect_guards();
      // Counts are clamped one by one: rows within them are written, rows past them are not.
      for (std::int64_t e = 0; e < 16; ++e) {
        const auto n = static_cast<std::int64_t>(std::clamp(count.at(e), 0.0, 8.0));
        EXPECT_TRUE(is_poison(masked.view().slice(e * 8 + n, 8 - n))) << v.name << " expert " << e;
        for (double value : to_doubles(masked.view().slice(e * 8, n))) ASSERT_TRUE(std::isfinite(value)) << v.name;
      }
      if (HasFailure()) return;
    }
  }
}

// Experts of one rank: ids of other ranks leave slots empty.
TEST_F(LayerCuda, LocalExpertsOfARankAreTheCpus) {
  MoeConfig config = small_config();
  config.first_expert = 4;
  config.num_local = 6;
  const RandomLayer m = random_layer(config, {.expert_dtype = DType::kE4M3, .shared_dtype = DType::kBF16});
  for (const GpuGemm& gemm : gpu_gemms()) {
    Result<Layer> layer = make_gpu_layer(m, gpu_options(Precision::kW8A8, 50, gemm.name));
    if (!layer) continue;
    const Buffer x = random_x(50, 256);
    const Outcome got = run_on_gpu(*layer, x.view());
    const Buffer want = routed_on_cpu(m, Precision::kW8A8, x.view(), got.topk_idx.view(), got.topk_weight.view());
    expect_cpu_rows(got.out.view(), want.view(), gemm, Precision::kW8A8);
  }
}

// Sizes that are no multiple of 128, 16 or even 8, pitched and misaligned tokens and outputs: run, and right.
TEST_F(LayerCuda, AwkwardSizesAndPlacesAreTheCpus) {
  for (const auto& [hidden, intermediate] : {std::pair<std::int64_t, std::int64_t>{46, 10}, {130, 96}, {200, 129}}) {
    MoeConfig config = small_config();
    config.hidden = hidden;
    config.intermediate = intermediate;
    config.shared_intermediate = intermediate + 1;
    for (const Variant& v : {variant("w8a8"), variant("w8a8_i8"), variant("bf16"), variant("f32")}) {
      const RandomLayer m = model_of(v, config);
      Result<Layer> layer = make_gpu_layer(m, gpu_options(v.precision, 19));
      ASSERT_TRUE(layer.is_ok()) << v.name << " H=" << hidden << ": " << layer.status().message();
      Buffer x(DType::kBF16, {19, hidden}, {.row_pitch_elems = hidden + 3, .offset_elems = 1});
      x.fill_normal(5);
      const Outcome got = run_on_gpu(*layer, x.view());
      const Buffer want = routed_on_cpu(m, v.precision, x.view(), got.topk_idx.view(), got.topk_weight.view());
      EXPECT_LE(worst_row(got.out.view(), want.view()), tensor_core_bound(v.precision)) << v.name << " H=" << hidden;
      const Buffer dense = [&] {
        Buffer d(DType::kBF16, {19, hidden});
        d.fill_values(x.to_doubles());
        return d;
      }();
      // Where tokens lie may decide between two kernels of the gate, whose sums differ in their last bits.
      const Outcome from_dense = run_on_gpu(*layer, dense.view());
      EXPECT_TRUE(same_bits(from_dense.topk_idx.view(), got.topk_idx.view())) << v.name << " H=" << hidden;
      EXPECT_LE(worst_row(from_dense.out.view(), got.out.view()), tensor_core_bound(v.precision)) << v.name;
    }
  }
}

// Every gate rule end to end; Llama 4's weights go into the expert.
TEST_F(LayerCuda, EveryGateRunsEndToEnd) {
  for (int id = 0; id < 10; ++id) {
    MoeConfig config = small_config();
    config.gate = gate_preset(static_cast<GateId>(id));
    if (config.gate.group_score != GroupScore::kNone) {
      config.gate.n_group = 4;
      config.gate.topk_group = 2;
    }
    if (static_cast<GateId>(id) == GateId::kG6) {
      config.top_k = 1;
      config.weight_on_input = true;
    }
    config.has_shared_gate = id % 2 == 0;
    if (static_cast<GateId>(id) == GateId::kG5) config.activation = {ActivationKind::kGptOss, 7.0f, 1.702f};
    if (static_cast<GateId>(id) == GateId::kG9) config.activation = {ActivationKind::kSiluClamped, 10.0f, 0.0f};
    const RandomLayer m = random_layer(config, {.expert_bias = static_cast<GateId>(id) == GateId::kG5});
    const Buffer x = random_x(19, 256, 11);
    Result<Layer> layer = make_gpu_layer(m, gpu_options(Precision::kBF16, 19));
    ASSERT_TRUE(layer.is_ok()) << "G" << id + 1 << ": " << layer.status().message();
    const Outcome got = run_on_gpu(*layer, x.view());
    const Outcome cpu = run(make_layer(m, options_for(Precision::kBF16, 19)), x.view());
    EXPECT_TRUE(same_bits(got.topk_idx.view(), cpu.topk_idx.view())) << "G" << id + 1;
    EXPECT_LE(worst_row(got.out.view(), cpu.out.view()), tensor_core_bound(Precision::kBF16)) << "G" << id + 1;
  }
}

// Uploaded weights keep their bytes, strides and gaps.
TEST_F(LayerCuda, UploadKeepsEveryBit) {
  RandomLayer m = fp8_layer();
  Buffer pitched(DType::kBF16, {16, 256}, {.row_pitch_elems = 300, .offset_elems = 5});
  pitched.fill_random_bits(4);
  m.weights.w_gate = pitched.view();
  std::int64_t last = 0, total = 0;
  UploadOptions options;
  options.progress = [&](std::int64_t done, std::int64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  };
  const Result<LayerWeights> up = upload(m.weights, kGpu, options);
  ASSERT_TRUE(up.is_ok()) << up.status().message();
  EXPECT_EQ(last, total);
  EXPECT_GE(total, num_bytes(m.weights));
  EXPECT_EQ(num_bytes(*up), num_bytes(m.weights));
  const auto same = [](const TensorView& device, const TensorView& host) {
    EXPECT_EQ(device.device, kGpu);
    EXPECT_EQ(device.stride, host.stride);
    std::vector<std::byte> bytes(span_bytes(host));
    EXPECT_TRUE(device::copy_to_host(kGpu, bytes.data(), device.data, std::ssize(bytes)).is_ok());
    EXPECT_EQ(std::memcmp(bytes.data(), host.data, bytes.size()), 0);
  };
  same(up->w_gate, m.weights.w_gate);
  same(up->score_bias, m.weights.score_bias);
  same(up->experts.w13, m.weights.experts.w13);
  same(up->experts.w13_scale, m.weights.experts.w13_scale);
  same(up->experts.w2, m.weights.experts.w2);
  same(up->shared.w2_scale, m.weights.shared.w2_scale);
}

TEST_F(LayerCuda, UploadStopsAndRunsOutWithASentence) {
  const RandomLayer m = fp8_layer();
  UploadOptions options;
  options.stop = [] { return true; };
  EXPECT_EQ(upload(m.weights, kGpu, options).status().code(), StatusCode::kIoError);
  // A tensor no GPU can hold: its address space is reserved and never touched, as the allocation fails first.
  LayerWeights huge = m.weights;
  huge.w_gate.shape[0] = std::int64_t{1} << 40;
  const Status status = upload(huge, kGpu).status();
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_THAT(status.message(), testing::AllOf(testing::HasSubstr("w_gate"), testing::HasSubstr("562949953421312"),
                                               testing::HasSubstr("are free")));
  // The failure left nothing behind: the next upload and launch work.
  Result<Layer> layer = make_gpu_layer(m, gpu_options(Precision::kW8A8, 4));
  ASSERT_TRUE(layer.is_ok()) << layer.status().message();
  run_on_gpu(*layer, random_x(4, 256).view());
}

}  // namespace
}  // namespace sluice::test
