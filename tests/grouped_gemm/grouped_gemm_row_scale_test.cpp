// Grouped GEMM with one scale a row of a and of w: e4m3 and int8, per channel and per tensor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "grouped_gemm/problem.h"

namespace sluice::test {
namespace {

using testing::HasSubstr;

struct Pair {
  DType a, w;
};
constexpr Pair kPairs[] = {{DType::kE4M3, DType::kE4M3}, {DType::kE4M3, DType::kBF16}, {DType::kBF16, DType::kE4M3},
                           {DType::kF32, DType::kE4M3},  {DType::kI8, DType::kI8},     {DType::kBF16, DType::kI8},
                           {DType::kF32, DType::kI8}};

std::vector<Spec> all_combinations(Fill fill) {
  std::vector<Spec> specs;
  std::uint64_t seed = 500;
  for (const Pair& pair : kPairs) {
    for (DType out : kOutputs) {
      for (bool masked : {false, true}) {
        for (bool repeat : {false, true}) {
          Spec s{.counts = {3, 0, 1, 7, 2}, .n = 70, .k = 300, .a = pair.a, .w = pair.w, .out = out};
          s.bias = masked;
          s.part_rows = masked ? 35 : 0;
          s.rows_per_group = masked ? 8 : 0;
          s.scale_by_row = masked != (out == DType::kF32);
          s.row_scales = true;
          s.repeat_a_scale = repeat && is_scaled(pair.a);
          s.repeat_w_scale = repeat != masked && is_scaled(pair.w);
          s.fill = fill;
          s.seed = ++seed;
          specs.push_back(s);
        }
      }
    }
  }
  return specs;
}

TEST(GroupedGemmRowScale, EveryCombinationGivesTheSpecifiedBitsOnEveryTarget) {
  for (const Spec& spec : all_combinations(Fill::kReal)) expect_specified_bits(Problem(spec));
}

TEST(GroupedGemmRowScale, IntegersAndPowersOfTwoAreExactInEveryImplementation) {
  for (const Spec& spec : all_combinations(Fill::kIntegers)) {
    const Problem p(spec);
    EXPECT_TRUE(same_bits(run(p).view(), run(p, "reference").view()))
        << to_string(spec.a) << " x " << to_string(spec.w);
  }
}

// Real values against the product in double of what bytes and scales stand for.
TEST(GroupedGemmRowScale, RealValuesStayWithinTheBoundInEveryImplementation) {
  for (const Spec& base : all_combinations(Fill::kReal)) {
    Spec spec = base;
    spec.unowned_rows = 0;
    spec.n = 280;
    spec.part_rows = 0;
    const Problem p(spec);
    const std::vector<double> av = p.a.to_doubles(), wv = p.w.to_doubles(), bv = p.bias.to_doubles();
    const std::vector<double> as = p.a_scale ? to_doubles(p.args.a_scale) : std::vector<double>{};          // [1,R]
    const std::vector<double> ws = is_scaled(spec.w) ? to_doubles(p.args.w_scale) : std::vector<double>{};  // [L,N,1]
    const Buffer outs[] = {run(p, "cpu"), run(p, "reference")};
    for (std::int64_t e = 0; e < p.experts(); ++e) {
      const auto [first, last] = p.rows_of_expert(e);
      if (first == last) continue;
      std::vector<double> a, w;
      for (std::int64_t i = first * spec.k; i < last * spec.k; ++i)
        a.push_back(av[i] * (as.empty() ? 1 : as[i / spec.k]));
      for (std::int64_t i = e * spec.n * spec.k; i < (e + 1) * spec.n * spec.k; ++i)
        w.push_back(wv[i] * (ws.empty() ? 1 : ws[i / spec.k]));
      Product exact = exact_product(a, w, last - first, spec.n, spec.k);
      for (std::size_t i = 0; spec.bias && i < exact.value.size(); ++i) {
        const double b = bv[e * spec.n + static_cast<std::int64_t>(i) % spec.n];
        exact.value[i] += b;
        exact.magnitude[i] += std::abs(b);
      }
      const Bounds bounds = gemm_bounds(exact.value, exact.magnitude, spec.n, spec.k, spec.out);
      for (const Buffer& out : outs) {
        EXPECT_TRUE(rows_within(out.view().slice(first, last - first), exact.value, bounds))
            << (&out == outs ? "cpu" : "reference") << ", expert " << e << ", " << to_string(spec.a) << " x "
            << to_string(spec.w);
      }
    }
  }
}

// int8 has one answer: the reference's bits, on any values, for every tail and both paths of the decoder.
TEST(GroupedGemmRowScale, Int8HasTheReferencesBits) {
  for (std::int64_t n : {1, 7, 16, 31, 33, 128, 257}) {
    for (std::int64_t k : {1, 15, 16, 17, 127, 128, 129, 640}) {
      Spec spec{.counts = {1, 4, 0, 9}, .n = n, .k = k, .a = DType::kI8, .w = DType::kI8};
      spec.bias = k % 2 == 0;
      spec.fill = Fill::kBits;
      spec.seed = static_cast<std::uint64_t>(n * 1000 + k);
      Problem p(spec);
      p.w_scale.fill_uniform(1, 1e-3, 2e-3);
      p.a_scale->fill_uniform(2, -1, 1);
      p.bias.fill_normal(3);
      p.poison_unowned();
      for (std::int64_t target : simd_targets()) {
        const ForcedTarget forced(target);
        EXPECT_TRUE(same_bits(run(p, "cpu", 2).view(), run(p, "reference").view())) << "N " << n << ", K " << k;
      }
    }
  }
}

// Sums beyond 2^24, where f32 has no odd integers any more, and at the limit of int32.
TEST(GroupedGemmRowScale, Int8SumsAreExactToTheLastUnit) {
  for (std::int64_t rows : {2, 14}) {
    for (std::int64_t k : {std::int64_t{2049}, std::int64_t{20001}, grouped_gemm::kMaxInt8K}) {
      Problem p({.counts = {rows}, .n = 3, .k = k, .a = DType::kI8, .w = DType::kI8, .unowned_rows = 0});
      p.a_scale->fill_constant(1.0);
      p.w_scale.fill_constant(1.0);
      p.a.fill_constant(-128.0);
      p.w.fill_constant(-128.0);
      // Column 1 cancels all but one product of 1, column 2 all but one of -1.
      for (std::int64_t r = 0; r < rows; ++r) p.a.set(r * k, 1.0);
      for (std::int64_t n : {1, 2}) {
        for (std::int64_t i = 0; i < k; ++i) p.w.set(n * k + i, i % 2 == 0 ? 127.0 : -127.0);
        p.w.set(n * k, n == 1 ? 1.0 : -1.0);
      }
      for (std::int64_t target : simd_targets()) {
        const ForcedTarget forced(target);
        for (const char* impl : {"cpu", "reference"}) {
          const Buffer out = run(p, impl);
          for (std::int64_t r = 0; r < rows; ++r) {
            // Products after the first: 2^14 each in column 0; -+16256 in turn in the others, the first of them positive.
            const double all = 16384.0 * static_cast<double>(k - 1) - 128.0;
            const double turns = (k - 1) % 2 == 0 ? 0.0 : 16256.0;
            EXPECT_EQ(out.at(r * 3), static_cast<double>(static_cast<float>(all))) << impl << ", K " << k;
            EXPECT_EQ(out.at(r * 3 + 1), turns + 1) << impl << ", K " << k;
            EXPECT_EQ(out.at(r * 3 + 2), turns - 1) << impl << ", K " << k;
          }
        }
      }
    }
  }
}

TEST(GroupedGemmRowScale, EveryInt8ByteIsDecodedExactly) {
  for (std::int64_t rows : {1, 6}) {
    for (DType a : {DType::kI8, DType::kF32}) {
      Problem p({.counts = {rows}, .n = 256, .k = 129, .a = a, .w = DType::kI8, .unowned_rows = 0});
      p.w_scale.fill_constant(1.0);
      if (p.a_scale) p.a_scale->fill_constant(1.0);
      for (std::int64_t depth : {0, 3, 15, 127, 128}) {
        p.a.fill_with([&](std::int64_t i) { return i % 129 == depth ? 1.0 : 0.0; });
        p.w.fill_with(
            [&](std::int64_t i) { return i % 129 == depth ? static_cast<double>(i / 129 % 256 - 128) : 5.0; });
        for (std::int64_t target : simd_targets()) {
          const ForcedTarget forced(target);
          const Buffer out = run(p);
          for (std::int64_t i = 0; i < rows * 256; ++i) ASSERT_EQ(out.at(i), static_cast<double>(i % 256 - 128));
        }
      }
    }
  }
}

// A scale per tensor is the row form whose strides are 0: the same bits as that value written out.
TEST(GroupedGemmRowScale, AScaleOfTheTensorIsARowScaleRepeated) {
  for (const Pair& pair : {Pair{DType::kE4M3, DType::kE4M3}, Pair{DType::kI8, DType::kI8}}) {
    for (std::int64_t k : {100, 260}) {
      Problem p({.counts = {5, 3}, .n = 40, .k = k, .a = pair.a, .w = pair.w, .unowned_rows = 0, .row_scales = true});
      p.a_scale->fill_constant(0.3);
      p.w_scale.fill_constant(0.7);
      const Buffer want = run(p);
      const float a_scale = 0.3F, w_scale = 0.7F;
      p.args.a_scale = TensorView::dense(&a_scale, DType::kF32, {1, 8});
      p.args.w_scale = TensorView::dense(&w_scale, DType::kF32, {2, 40, 1});
      p.args.a_scale.stride = {0, 0};
      p.args.w_scale.stride = {0, 0, 0};
      EXPECT_TRUE(same_bits(run(p).view(), want.view())) << to_string(pair.a) << ", K " << k;
    }
  }
}

TEST(GroupedGemmRowScale, ARowDoesNotDependOnTheOthers) {
  for (DType dtype : {DType::kE4M3, DType::kI8}) {
    const Problem all(
        {.counts = {60}, .n = 100, .k = 200, .a = dtype, .w = dtype, .unowned_rows = 0, .row_scales = true});
    const Buffer together = run(all, "cpu", 3);
    for (std::int64_t row : {0, 17, 59}) {
      Spec spec = all.spec;
      spec.counts = {1};
      Problem alone(spec);
      std::memcpy(alone.a.view().data, all.a.view().row(row), 200);
      alone.w.fill_values(all.w.to_doubles());
      alone.w_scale.fill_values(all.w_scale.to_doubles());
      alone.a_scale->set(0, all.a_scale->at(row));
      EXPECT_TRUE(same_bits(run(alone).view(), together.view().slice(row, 1))) << "row " << row;
    }
  }
}

std::string refusal(const Problem& p, const std::function<void(grouped_gemm::Args&)>& spoil) {
  const Buffer out = p.make_out();
  grouped_gemm::Args args = p.args;
  args.out = out.view();
  EXPECT_TRUE(grouped_gemm::check(args).is_ok()) << grouped_gemm::check(args).message();
  spoil(args);
  const Status s = grouped_gemm::check(args);
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  return s.message();
}

TEST(GroupedGemmRowScale, EverySentenceOfCheck) {
  using grouped_gemm::Args;
  const Spec base{.counts = {2, 3}, .n = 260, .k = 300, .a = DType::kE4M3, .w = DType::kE4M3, .part_rows = 130};
  Spec row_spec = base, int8_spec = base;
  row_spec.row_scales = true;
  int8_spec.a = int8_spec.w = DType::kI8;
  const Problem blocks(base), rows(row_spec), int8(int8_spec);
  EXPECT_THAT(refusal(blocks, [&](Args& a) { a.w_scale = rows.args.w_scale; }),
              HasSubstr("a_scale = f32[3,7] has one scale for 128 columns, w_scale = f32[2,260,1] for a row; both must "
                        "have one for 128 columns, or both one a row"));
  EXPECT_THAT(refusal(rows, [&](Args& a) { a.w_scale = blocks.args.w_scale; }),
              HasSubstr("a_scale = f32[1,7] has one scale for a row, w_scale = f32[2,4,3] for 128x128"));
  EXPECT_THAT(refusal(rows, [](Args& a) { a.a_scale.shape[0] = 2; }),
              HasSubstr("a_scale[Kb,R] f32 axis 0 (Kb) is 2, expected 3"));
  EXPECT_THAT(refusal(rows, [](Args& a) { a.a_scale.shape[0] = 2; }), HasSubstr("nor is it a_scale[1,R] f32"));
  EXPECT_THAT(refusal(rows, [](Args& a) { a.w_scale.shape[1] = 259; }),
              HasSubstr("w_scale[L,Nb,Kb] f32 axis 2 (Kb) is 1, expected 3"));
  EXPECT_THAT(refusal(blocks, [](Args& a) { a.w_scale.shape[1] = 3; }),
              HasSubstr("expected 4: N = 260 in parts of 130 rows, 128 rows a scale (or N, with one scale a row, "
                        "w_scale[L,N,1] f32)"));
  EXPECT_THAT(refusal(int8, [&](Args& a) { a.a_scale = blocks.args.a_scale; }),
              HasSubstr("a_scale[1,R] f32 axis 0 (1) is 3, expected 1"));
  EXPECT_THAT(refusal(int8, [&](Args& a) { a.w_scale = blocks.args.w_scale; }),
              HasSubstr("w_scale[L,N,1] f32 axis 1 (N) is 4, expected 260"));
  EXPECT_THAT(refusal(int8, [](Args& a) { a.a_scale = {}; }), HasSubstr("a is i8, but a_scale[Kb,R] f32 is missing"));
  EXPECT_THAT(refusal(int8,
                      [&](Args& a) {
                        a.w = rows.args.w;
                        a.w_scale = rows.args.w_scale;
                      }),
              HasSubstr("a is i8, but w is e4m3; i8 rows need i8 weights"));
  EXPECT_THAT(refusal(int8,
                      [&](Args& a) {
                        a.a = rows.args.a;
                        a.a_scale = rows.args.a_scale;
                      }),
              HasSubstr("a is e4m3, but w is i8; i8 weights take i8, bf16 or f32 rows"));
  EXPECT_THAT(refusal(int8,
                      [](Args& a) {
                        a.a.shape[1] = a.w.shape[2] = a.a.stride[0] = a.w.stride[1] = 131072;
                        a.w.stride[0] = 131072 * 260;
                      }),
              HasSubstr("K = 131072 is above 131071, where a sum of i8 products can leave int32"));
  EXPECT_THAT(refusal(rows, [](Args& a) { a.w_scale.stride[1] = -1; }),
              HasSubstr("stride -1 elements, expected at least 0"));
}

// Where K is at most 128, [1,R] is both shapes; the weights decide, and without them it does not matter.
TEST(GroupedGemmRowScale, ShapesThatCanBeReadBothWays) {
  for (std::int64_t n : {1, 2, 130}) {
    for (bool row_scales : {false, true}) {
      Problem p({.counts = {3}, .n = n, .k = 100, .a = DType::kE4M3, .w = DType::kE4M3, .row_scales = row_scales});
      const Buffer out = p.make_out();
      grouped_gemm::Args args = p.args;
      args.out = out.view();
      ASSERT_TRUE(grouped_gemm::check(args).is_ok());
      EXPECT_EQ(grouped_gemm::has_row_scales(args), row_scales && n > 1) << n;
      expect_specified_bits(p);
    }
  }
}

}  // namespace
}  // namespace sluice::test
