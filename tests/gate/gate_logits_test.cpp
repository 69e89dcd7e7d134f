// The router GEMM: exact on integers, the specified bits on real values, a row the same in every batch.
#include <algorithm>
#include <cmath>
#include <limits>

#include "gate/config.h"
#include "gate/runs.h"
#include "harness/codec.h"
#include "harness/targets.h"

namespace sluice::test {
namespace {

class GateLogits : public GateTest {};

struct Problem {
  std::int64_t num_tokens;
  std::int64_t hidden;
  std::int64_t num_experts;
  DType x_dtype = DType::kBF16;
  DType w_dtype = DType::kBF16;
  bool has_bias = false;
};

std::string to_string(const Problem& p) {
  return "T=" + std::to_string(p.num_tokens) + " H=" + std::to_string(p.hidden) +
         " E=" + std::to_string(p.num_experts) + " x " + std::string(sluice::to_string(p.x_dtype)) + " w " +
         std::string(sluice::to_string(p.w_dtype)) + (p.has_bias ? " biased" : "");
}

// Every tensor starts off its alignment and has its own pitch.
struct Tensors {
  explicit Tensors(const Problem& p)
      : x(p.x_dtype, {p.num_tokens, p.hidden}, {.row_pitch_elems = p.hidden + 3, .offset_elems = 1}),
        w(p.w_dtype, {p.num_experts, p.hidden}, {.row_pitch_elems = p.hidden + 1, .offset_elems = 3}),
        bias(DType::kF32, {p.num_experts}, {.offset_elems = 1}),
        has_bias(p.has_bias) {}
  Buffer x;     // [T,H]
  Buffer w;     // [E,H]
  Buffer bias;  // [E]
  bool has_bias;
};

// Guarded and poisoned like run_select.
Buffer run_logits(const Impl<gate::LogitsArgs>& impl, const Tensors& in, int num_threads = 1) {
  const std::int64_t num_tokens = in.x.view().shape[0];
  const std::int64_t num_experts = in.w.view().shape[0];
  Buffer out(DType::kF32, {num_tokens, num_experts}, {.row_pitch_elems = num_experts + 5, .offset_elems = 1});
  const auto x_before = in.x.bytes();
  const auto w_before = in.w.bytes();
  const gate::LogitsArgs args{in.x.view(), in.w.view(), in.has_bias ? in.bias.view() : TensorView{}, out.view()};
  const Status checked = gate::check(args);
  EXPECT_TRUE(checked.is_ok()) << checked.message();
  const Status ran = run_row(impl, args, num_threads);
  EXPECT_TRUE(ran.is_ok()) << ran.message();
  EXPECT_TRUE(out.guards_intact());
  EXPECT_TRUE(in.x.guards_intact());
  EXPECT_TRUE(in.w.guards_intact());
  EXPECT_TRUE(in.x.unchanged_since(x_before));
  EXPECT_TRUE(in.w.unchanged_since(w_before));
  return out;
}

// docs/numerics.md "Gate", word for word.
Buffer specified(const Tensors& in) {
  const std::int64_t num_tokens = in.x.view().shape[0];
  const std::int64_t hidden = in.x.view().shape[1];
  const std::int64_t num_experts = in.w.view().shape[0];
  const std::vector<double> x = in.x.to_doubles();
  const std::vector<double> w = in.w.to_doubles();
  Buffer out(DType::kF32, {num_tokens, num_experts});
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t e = 0; e < num_experts; ++e) {
      float acc = 0.0f;
      for (std::int64_t block = 0; block < hidden; block += 128) {
        float p = 0.0f;
        for (std::int64_t h = block; h < std::min(hidden, block + 128); ++h) {
          p = std::fma(static_cast<float>(x[static_cast<std::size_t>(t * hidden + h)]),
                       static_cast<float>(w[static_cast<std::size_t>(e * hidden + h)]), p);
        }
        acc = acc + p;
      }
      out.as<float>()[t * num_experts + e] = in.has_bias ? acc + in.bias.as<float>()[e] : acc;
    }
  }
  return out;
}

struct Exact {
  std::vector<double> value;      // [T,E]
  std::vector<double> magnitude;  // [T,E]
};

Exact exact(const Tensors& in) {
  const std::int64_t num_tokens = in.x.view().shape[0];
  const std::int64_t num_experts = in.w.view().shape[0];
  Product product = exact_product(in.x.to_doubles(), in.w.to_doubles(), num_tokens, num_experts, in.x.view().shape[1]);
  Exact out{std::move(product.value), std::move(product.magnitude)};
  for (std::size_t i = 0; in.has_bias && i < out.value.size(); ++i) {
    const double bias = in.bias.at(static_cast<std::int64_t>(i) % num_experts);
    out.value[i] += bias;
    out.magnitude[i] += std::fabs(bias);
  }
  return out;
}

const Problem kProblems[] = {
    {1, 1, 1},
    {1, 127, 2, DType::kBF16, DType::kF32},
    {2, 128, 3, DType::kF32, DType::kBF16, true},
    {5, 129, 8, DType::kF32, DType::kF32, true},
    {6, 256, 31, DType::kBF16, DType::kBF16, true},
    {7, 300, 32},
    {13, 384, 33, DType::kF32, DType::kF32},
    {23, 131, 64, DType::kBF16, DType::kF32, true},
    {24, 65, 72},
    {25, 200, 160, DType::kF32, DType::kBF16},
    {127, 129, 17, DType::kBF16, DType::kBF16, true},
    {130, 140, 65},
    {2, 7168, 33, DType::kBF16, DType::kF32},
};

TEST_F(GateLogits, IntegersAreExact) {
  for (std::int64_t target : targets_under_test()) {
    const ForcedTarget forced(target);
    for (const Problem& p : kProblems) {
      Tensors in(p);
      in.x.fill_integers(1, -8, 8);
      in.w.fill_integers(2, -8, 8);
      in.bias.fill_integers(3, -100, 100);
      Buffer want(DType::kF32, {p.num_tokens, p.num_experts});
      want.fill_values(exact(in).value);
      for (const auto& impl : logits_rows()) {
        EXPECT_TRUE(same_bits(run_logits(impl, in, 2).view(), want.view()))
            << impl.name << " on " << hwy::TargetName(target) << " " << to_string(p);
      }
    }
  }
}

TEST_F(GateLogits, RealValuesHaveTheSpecifiedBits) {
  for (const Problem& p : kProblems) {
    Tensors in(p);
    in.x.fill_normal(11, 1.0);
    in.w.fill_normal(12, 0.1);
    in.bias.fill_normal(13, 1.0);
    const Buffer want = specified(in);
    for (std::int64_t target : targets_under_test()) {
      // bf16 products are exact in fp32, so that a separate multiply and add is the fused one there.
      if (!has_native_fma(target) && (p.x_dtype != DType::kBF16 || p.w_dtype != DType::kBF16)) continue;
      const ForcedTarget forced(target);
      EXPECT_TRUE(same_bits(run_logits(logits_rows()[0], in, 2).view(), want.view()))
          << "on " << hwy::TargetName(target) << " " << to_string(p);
    }
  }
}

TEST_F(GateLogits, RealValuesAreWithinTheBound) {
  for (const Problem& p : kProblems) {
    Tensors in(p);
    in.x.fill_normal(21, 1.0);
    in.w.fill_normal(22, 0.1);
    in.bias.fill_normal(23, 1.0);
    const Exact want = exact(in);
    // A block's roundings, one per block, the bias; one more per product where the target has no fma.
    const Bounds bounds =
        rounding_bounds(want.value, want.magnitude, p.num_experts, 128 + 1 + ceil_div(p.hidden, 128) + 1, DType::kF32);
    for (std::int64_t target : targets_under_test()) {
      const ForcedTarget forced(target);
      for (const auto& impl : logits_rows()) {
        EXPECT_TRUE(rows_within(run_logits(impl, in).view(), want.value, bounds))
            << impl.name << " on " << hwy::TargetName(target) << " " << to_string(p);
      }
    }
  }
}

#ifndef SLUICE_TEST_ON_GPU
TEST_F(GateLogits, TheReferenceRoundsOnce) {
  Tensors in({9, 1000, 20, DType::kF32, DType::kF32, true});
  in.x.fill_normal(31);
  in.w.fill_normal(32);
  in.bias.fill_normal(33);
  const Exact want = exact(in);
  std::vector<double> size(want.value.size());
  std::transform(want.value.begin(), want.value.end(), size.begin(), [](double v) { return std::fabs(v); });
  EXPECT_TRUE(rows_within(run_logits(logits_rows().back(), in).view(), want.value,
                          rounding_bounds(want.value, size, 20, 2, DType::kF32)));
}
#endif

TEST_F(GateLogits, BatchAndThreadsAreInvisible) {
  Tensors in({140, 200, 70, DType::kF32, DType::kBF16, true});
  in.x.fill_normal(41);
  in.w.fill_normal(42);
  in.bias.fill_normal(43);
  for (const auto& impl : logits_rows()) {
    const Buffer all = run_logits(impl, in);
    for (int threads : {2, 3, 16, 64})
      EXPECT_TRUE(same_bits(run_logits(impl, in, threads).view(), all.view())) << impl.name;
    for (std::int64_t first : {0, 1, 77, 139}) {
      for (std::int64_t count : {1, 2, 6, 27}) {
        if (first + count > 140) continue;
        Tensors part({count, 200, 70, DType::kF32, DType::kBF16, true});
        part.x.fill_with([&](std::int64_t i) { return in.x.at(first * 200 + i); });
        part.w.fill_values(in.w.to_doubles());
        part.bias.fill_values(in.bias.to_doubles());
        EXPECT_TRUE(same_bits(run_logits(impl, part, 2).view(), all.view().slice(first, count)))
            << impl.name << " tokens " << first << "+" << count;
      }
    }
  }
}

TEST_F(GateLogits, NonFiniteValuesStayInTheirRowAndColumn) {
  for (std::int64_t target : targets_under_test()) {
    const ForcedTarget forced(target);
    for (const auto& impl : logits_rows()) {
      Tensors in({8, 150, 40});
      in.x.fill_integers(1, 1, 3);
      in.w.fill_integers(2, 1, 3);
      in.x.set(2 * 150 + 149, std::nan(""));
      in.x.set(5 * 150 + 3, std::numeric_limits<double>::infinity());
      in.w.set(33 * 150 + 130, -std::numeric_limits<double>::infinity());
      const Buffer out = run_logits(impl, in);
      for (std::int64_t t = 0; t < 8; ++t) {
        for (std::int64_t e = 0; e < 40; ++e) {
          const double got = out.at(t * 40 + e);
          if (t == 2 || (t == 5 && e == 33)) {
            EXPECT_TRUE(std::isnan(got)) << impl.name << " " << t << "," << e;
          } else if (t == 5 || e == 33) {
            EXPECT_EQ(got, (t == 5 ? 1 : -1) * std::numeric_limits<double>::infinity())
                << impl.name << " " << t << "," << e;
          } else {
            EXPECT_TRUE(std::isfinite(got)) << impl.name << " " << t << "," << e;
          }
        }
      }
    }
  }
}

TEST_F(GateLogits, EmptyExtents) {
  for (const auto& impl : logits_rows()) {
    run_logits(impl, Tensors({0, 128, 8}));
    // No columns: the sum is 0, and the bias is all there is.
    Tensors in({2, 0, 3, DType::kBF16, DType::kBF16, true});
    in.bias.fill_values({1, -2, 3});
    EXPECT_EQ(run_logits(impl, in).to_doubles(), (std::vector<double>{1, -2, 3, 1, -2, 3})) << impl.name;
  }
}

#ifndef SLUICE_TEST_ON_GPU
TEST_F(GateLogits, TasksCoverTheProblemOnce) {
  for (std::int64_t lanes : {1, 4, 8, 16}) {
    for (std::int64_t num_tokens : {0, 1, 5, 6, 7, 126, 127, 512, 4097}) {
      for (std::int64_t num_experts : {1, 2, 31, 33, 256, 1024}) {
        for (int threads : {0, 1, 2, 16, 192}) {
          const gate::LogitsConfig c = gate::logits_config(num_tokens, num_experts, lanes, threads);
          EXPECT_EQ(c.panel_experts, 2 * lanes);
          EXPECT_GE(c.num_panels * c.panel_experts, num_experts);
          EXPECT_LT((c.num_panels - 1) * c.panel_experts, num_experts);
          EXPECT_EQ(c.chunk_tokens % gate::kTileTokens, 0);
          EXPECT_LE(c.chunk_tokens, gate::kMaxChunkTokens);
          EXPECT_GE(c.num_chunks * c.chunk_tokens, num_tokens);
          EXPECT_LT((c.num_chunks - 1) * c.chunk_tokens, std::max<std::int64_t>(num_tokens, 1));
          EXPECT_EQ(c.num_tasks(), c.num_panels * c.num_chunks);
        }
      }
    }
  }
  const Impl<gate::LogitsArgs> cpu = logits_rows()[0];
  Tensors in({4, 128, 8});
  Buffer out(DType::kF32, {4, 8});
  EXPECT_NE(
      cpu.describe({in.x.view(), in.w.view(), {}, out.view()}, Machine::detect_cpu(1)).find("chunks of 24 tokens"),
      std::string::npos);
}
#endif

}  // namespace
}  // namespace sluice::test
