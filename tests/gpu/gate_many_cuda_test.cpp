// The two ways a gate takes on a GPU when there are many tokens (four to a warp) or few (the selection adds up the router
// GEMM's sums itself): the bits of the reference, and of the two stages one after the other.
#include <limits>

#include "gate/cuda.h"
#include "gpu/device_mirror.h"
#include "harness/buffer.h"
#include "sluice/stage/gate.h"

namespace sluice::test {
namespace {

using GateManyCuda = GpuTest;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Enough tokens for four to a warp, and not a multiple of four. Rows that path declines lie among those it takes.
constexpr std::int64_t kMany = 1795;

Buffer many_logits(std::int64_t experts, std::uint64_t seed) {
  Buffer logits(DType::kF32, {kMany, experts}, {.row_pitch_elems = ceil_div(experts, 4) * 4 + 4});
  logits.fill_normal(seed, 2.0);
  Rng rng(seed + 1);
  for (std::int64_t t = 0; t < kMany; ++t) {
    const std::int64_t kind = rng.integer(0, 15);
    for (std::int64_t e = 0; e < experts; ++e) {
      const double rare[] = {kNaN, kInf, -kInf, -0.0, 61.0, -1e8};
      if (kind == 0 && rng.integer(0, 20) == 0) logits.set(t * experts + e, rare[rng.integer(0, 5)]);
      if (kind == 1) logits.set(t * experts + e, 0.25);                                          // all tied
      if (kind == 2) logits.set(t * experts + e, static_cast<double>(rng.integer(-2, 2)));       // many ties
      if (kind == 3) logits.set(t * experts + e, static_cast<double>(rng.integer(0, 30) == 0));  // a few above the rest
      if (kind == 4 && e % 7 == 3) logits.set(t * experts + e, 16.0);                            // saturated
      if (kind == 5) logits.set(t * experts + e, rng.normal() * 70.0);  // some beyond what the fast sigmoid takes
    }
  }
  return logits;
}

TEST_F(GateManyCuda, EveryTokenHasTheReferencesBits) {
  int num_cases = 0;
  for (const std::int64_t experts : {128, 160, 256, 384, 64}) {
    const Buffer logits = many_logits(experts, static_cast<std::uint64_t>(experts));
    for (const GateId id : {GateId::kG3, GateId::kG6, GateId::kG8}) {
      for (const std::int64_t groups : {1, 8}) {
        for (const GroupScore group_score : {GroupScore::kTop2Sum, GroupScore::kMax}) {
          for (const std::int64_t top_k : {1, 7, 8, 9}) {
            if (groups == 1 && group_score == GroupScore::kMax) continue;
            GateConfig config = gate_preset(id);
            config.n_group = groups;
            config.topk_group = groups == 1 ? 1 : groups / 2;
            config.group_score = groups == 1 ? GroupScore::kNone : group_score;
            config.routed_scaling_factor = 2.5f;
            if (!validate(config, experts, top_k).is_ok()) continue;
            // A bias of few values makes ties of choices that are none of scores.
            Buffer bias(DType::kF32, {experts});
            Rng rng(static_cast<std::uint64_t>(top_k));
            for (std::int64_t e = 0; e < experts; ++e) bias.set(e, static_cast<double>(rng.integer(-1, 1)) * 0.5);
            if (top_k == 7) bias.set(experts - 1, kNaN);
            Buffer idx(DType::kI32, {kMany, top_k}, {.row_pitch_elems = top_k + 1});
            Buffer weight(DType::kF32, {kMany, top_k}, {.row_pitch_elems = top_k + 2});
            Buffer counters(DType::kI64, {kNumCounters});
            counters.fill_constant(3);
            gate::SelectArgs args;
            args.gate = config;
            args.logits = logits.view();
            if (config.has_score_bias) args.score_bias = bias.view();
            args.topk_idx = {idx.view()};
            args.topk_weight = weight.view();
            args.counters = counters.view();
            const std::string what = describe(config) + " E=" + std::to_string(experts) + " S=" + std::to_string(top_k);
            DeviceMirror mirror;
            gate::SelectArgs device = args;
            for (TensorView* view :
                 {&device.logits, &device.score_bias, &device.topk_idx.view, &device.topk_weight, &device.counters})
              mirror.add(*view);
            ASSERT_TRUE(gate::select_impls().back().run(args, {}).is_ok()) << what;
            const Status status = gate::select_impls().front().run(device, {});
            ASSERT_TRUE(status.is_ok()) << what << ": " << status.message();
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << what;
            ASSERT_TRUE(mirror.equals_host()) << what;
            ++num_cases;
          }
        }
      }
    }
  }
  EXPECT_GT(num_cases, 90);
}

TEST_F(GateManyCuda, TheSelectionAddsTheSumsOfChunksInTheSameOrder) {
  if (first_gpu().gpu.capability != Version{9, 0}) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  struct Case {
    std::int64_t num_tokens, hidden, num_experts, groups, top_k;
    GateId id;
    bool has_router_bias;
  };
  for (const Case& c : {Case{1, 7168, 256, 8, 8, GateId::kG3, false}, Case{127, 7168, 256, 8, 8, GateId::kG3, false},
                        Case{128, 1536, 384, 1, 8, GateId::kG3, true}, Case{128, 9000, 256, 8, 8, GateId::kG3, true},
                        Case{513, 1536, 256, 8, 8, GateId::kG3, false}, Case{33, 2880, 32, 1, 4, GateId::kG5, true},
                        Case{7, 1032, 6, 1, 2, GateId::kG4, true}, Case{65, 2048, 1024, 1, 32, GateId::kG7, true},
                        Case{70, 640, 160, 8, 6, GateId::kG2, false}, Case{5, 4096, 511, 1, 3, GateId::kG9, true}}) {
    const std::string what =
        "T=" + std::to_string(c.num_tokens) + " H=" + std::to_string(c.hidden) + " E=" + std::to_string(c.num_experts);
    GateConfig config = gate_preset(c.id);
    config.n_group = c.groups;
    config.topk_group = c.groups == 1 ? 1 : c.groups / 2;
    if (c.groups > 1 && config.group_score == GroupScore::kNone) config.group_score = GroupScore::kMax;
    ASSERT_TRUE(validate(config, c.num_experts, c.top_k).is_ok()) << what;
    Buffer x(DType::kBF16, {c.num_tokens, c.hidden}), w(DType::kBF16, {c.num_experts, c.hidden});
    Buffer router_bias(DType::kF32, {c.num_experts}), bias(DType::kF32, {c.num_experts});
    x.fill_normal(1, 1.0);
    w.fill_normal(2, 0.05);
    router_bias.fill_normal(3, 0.5);
    bias.fill_normal(4, 0.5);
    // [0]: one stage after the other; [1]: the selection adds.
    std::vector<Buffer> logits, idx, weight;
    for (int i = 0; i < 2; ++i) {
      logits.emplace_back(DType::kF32, std::vector<std::int64_t>{c.num_tokens, c.num_experts});
      idx.emplace_back(DType::kI32, std::vector<std::int64_t>{c.num_tokens, c.top_k});
      weight.emplace_back(DType::kF32, std::vector<std::int64_t>{c.num_tokens, c.top_k});
      logits.back().poison();
      idx.back().poison();
      weight.back().poison();
    }
    const Impl<gate::LogitsArgs>& gemm = gate::logits_impls().front();
    for (int i = 0; i < 2; ++i) {
      gate::LogitsArgs la{x.view(), w.view(), c.has_router_bias ? router_bias.view() : TensorView{}, logits[i].view()};
      gate::SelectArgs sa{config,          logits[i].view(), config.has_score_bias ? bias.view() : TensorView{},
                          {idx[i].view()}, weight[i].view(), {}};
      ASSERT_TRUE(gemm.can_run(la, first_gpu()).is_ok()) << what;
      const std::int64_t bytes = gemm.scratch_bytes(la, first_gpu());
      std::vector<std::byte> junk(static_cast<std::size_t>(bytes), std::byte{0xA5});
      TensorView scratch = TensorView::dense(junk.data(), DType::kU8, {bytes});
      DeviceMirror mirror;
      for (TensorView* view : {&la.x, &la.w_gate, &la.router_bias, &la.logits, &sa.score_bias, &sa.topk_idx.view,
                               &sa.topk_weight, &scratch})
        mirror.add(*view);
      sa.logits = la.logits;
      const Ctx ctx{nullptr, {static_cast<std::byte*>(scratch.data), static_cast<std::size_t>(bytes)}, 1};
      if (i == 0) {
        ASSERT_TRUE(gemm.run(la, ctx).is_ok()) << what;
        ASSERT_TRUE(gate::select_impls().front().run(sa, ctx).is_ok()) << what;
      } else {
        const gate::BothArgs both{la, sa};
        ASSERT_TRUE(gate::check(both).is_ok()) << what << ": " << gate::check(both).message();
        ASSERT_FALSE(gate::both_impls().empty());
        const Impl<gate::BothArgs>& impl = gate::both_impls().front();
        EXPECT_EQ(impl.can_run(both, first_gpu()).is_ok(), c.num_tokens <= gate::kMostTokensOfBoth) << what;
        ASSERT_EQ(impl.scratch_bytes(both, first_gpu()), bytes) << what;
        ASSERT_TRUE(impl.run(both, ctx).is_ok()) << what;
      }
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << what;
      mirror.copy_back();
      EXPECT_TRUE(mirror.equals_host()) << what;
    }
    EXPECT_EQ(logits[0].bytes(), logits[1].bytes()) << what;
    EXPECT_EQ(idx[0].bytes(), idx[1].bytes()) << what;
    EXPECT_EQ(weight[0].bytes(), weight[1].bytes()) << what;
  }
}

}  // namespace
}  // namespace sluice::test
