// Grouped GEMM: the specified bits on every target, bounds, independence of rows and threads, and every refusal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "grouped_gemm/problem.h"

namespace sluice::test {
namespace {

using testing::HasSubstr;

std::vector<Spec> all_combinations(Fill fill) {
  std::vector<Spec> specs;
  std::uint64_t seed = 100;
  for (DType a : kInputs) {
    for (DType w : kInputs) {
      for (DType out : kOutputs) {
        for (bool masked : {false, true}) {
          Spec s{
              .counts = {3, 0, 1, 7, 2}, .n = 70, .k = 200, .a = a, .w = w, .out = out, .fill = fill, .seed = ++seed};
          s.part_rows = masked ? 35 : 0;
          s.bias = masked;
          s.rows_per_group = masked ? 8 : 0;
          s.scale_by_row = masked != (out == DType::kF32);
          specs.push_back(s);
        }
      }
    }
  }
  return specs;
}

TEST(GroupedGemm, EveryCombinationGivesTheSpecifiedBitsOnEveryTarget) {
  for (const Spec& spec : all_combinations(Fill::kReal)) expect_specified_bits(Problem(spec));
}

TEST(GroupedGemm, IntegersAndPowersOfTwoAreExactInEveryImplementation) {
  for (const Spec& spec : all_combinations(Fill::kIntegers)) {
    const Problem p(spec);
    EXPECT_TRUE(same_bits(run(p).view(), run(p, "reference").view()))
        << to_string(spec.a) << " x " << to_string(spec.w);
  }
}

TEST(GroupedGemm, RealValuesStayWithinTheBoundInEveryImplementation) {
  for (const Spec& base : all_combinations(Fill::kReal)) {
    Spec spec = base;
    spec.unowned_rows = 0;
    spec.n = 280;  // enough columns for the spread of output roundings
    spec.part_rows = spec.part_rows > 0 ? 140 : 0;
    const Problem p(spec);
    const std::vector<double> av = p.a.to_doubles(), wv = p.w.to_doubles(), sv = p.w_scale.to_doubles(),
                              bv = p.bias.to_doubles();
    const std::vector<double> as = p.a_scale ? to_doubles(p.args.a_scale) : std::vector<double>{};
    const Buffer outs[] = {run(p, "cpu"), run(p, "reference")};
    const std::int64_t kb = ceil128(spec.k), part = spec.part_rows > 0 ? spec.part_rows : spec.n;
    for (std::int64_t e = 0; e < p.experts(); ++e) {
      const auto [first, last] = p.rows_of_expert(e);
      if (first == last) continue;
      std::vector<double> a, w;  // real values of this expert
      for (std::int64_t r = first; r < last; ++r) {
        for (std::int64_t k = 0; k < spec.k; ++k) {
          a.push_back(av[r * spec.k + k] * (as.empty() ? 1.0 : as[k / 128 * p.num_rows + r]));
        }
      }
      for (std::int64_t n = 0; n < spec.n; ++n) {
        const std::int64_t scale_row = n / part * ceil128(part) + n % part / 128;
        for (std::int64_t k = 0; k < spec.k; ++k) {
          w.push_back(wv[(e * spec.n + n) * spec.k + k] *
                      (spec.w == DType::kE4M3 ? sv[(e * p.scale_rows() + scale_row) * kb + k / 128] : 1.0));
        }
      }
      Product exact = exact_product(a, w, last - first, spec.n, spec.k);
      for (std::size_t i = 0; spec.bias && i < exact.value.size(); ++i) {
        const double b = bv[e * spec.n + static_cast<std::int64_t>(i) % spec.n];
        exact.value[i] += b;
        exact.magnitude[i] += std::abs(b);
      }
      const Bounds bounds = gemm_bounds(exact.value, exact.magnitude, spec.n, spec.k, spec.out);
      for (const Buffer& out : outs) {
        EXPECT_TRUE(rows_within(out.view().slice(first, last - first), exact.value, bounds))
            << (&out == outs ? "cpu" : "reference") << ", expert " << e;
      }
    }
  }
}

// Every column and depth tail, for the path that multiplies while decoding and the one that stores a panel.
TEST(GroupedGemm, SweepOfNAndKAroundTheTiles) {
  for (DType w : kInputs) {
    const DType a = w == DType::kF32 ? DType::kBF16 : w;
    for (std::int64_t n : {1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257}) {
      expect_specified_bits(Problem({.counts = {2, 5}, .n = n, .k = 37, .a = a, .w = w, .unowned_rows = 0}));
    }
    for (std::int64_t k : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 385}) {
      expect_specified_bits(Problem({.counts = {1, 6}, .n = 33, .k = k, .a = a, .w = w, .unowned_rows = 0}));
    }
  }
}

// Every register tile height, and more rows than an item takes.
TEST(GroupedGemm, SweepOfRows) {
  for (DType w : {DType::kE4M3, DType::kBF16}) {
    std::vector<std::int64_t> counts;
    for (std::int64_t rows = 0; rows <= 27; ++rows) counts.push_back(rows);
    expect_specified_bits(Problem({.counts = counts, .n = 34, .k = 140, .a = w, .w = w}));
    expect_specified_bits(Problem({.counts = {31, 32, 33, 127, 128, 129, 300}, .n = 20, .k = 131, .a = w, .w = w}), 3);
  }
}

TEST(GroupedGemm, EdgeRoutes) {
  for (DType w : {DType::kE4M3, DType::kF32}) {
    expect_specified_bits(Problem({.counts = {0, 0, 0}, .n = 40, .k = 150, .a = w, .w = w}));
    expect_specified_bits(Problem({.counts = {0, 0, 41, 0}, .n = 40, .k = 150, .a = w, .w = w}));
    expect_specified_bits(Problem({.counts = {0, 0}, .n = 40, .k = 150, .a = w, .w = w, .unowned_rows = 0}));  // R = 0
    expect_specified_bits(Problem({.counts = {1}, .n = 1, .k = 1, .a = w, .w = w, .unowned_rows = 0}));
  }
}

TEST(GroupedGemm, PartsThatAreNotWholeScaleBlocks) {
  for (std::int64_t part : {1, 33, 64, 96, 127, 129, 192, 320, 1408}) {
    const Problem p(
        {.counts = {2, 5}, .n = 2 * part, .k = 140, .a = DType::kE4M3, .w = DType::kE4M3, .part_rows = part});
    expect_specified_bits(p, 3);
  }
}

// All 256 bytes, in every lane, by both paths: against an a of 1 the output is the value itself.
TEST(GroupedGemm, EveryE4M3ByteIsDecodedExactly) {
  for (std::int64_t rows : {1, 6}) {
    Problem p({.counts = {rows}, .n = 256, .k = 129, .a = DType::kF32, .w = DType::kE4M3, .unowned_rows = 0});
    p.w_scale.fill_constant(1.0);
    for (std::int64_t depth : {0, 3, 16, 127, 128}) {
      for (int shift : {0, 1, 5, 77}) {
        p.a.fill_with([&](std::int64_t i) { return i % 129 == depth ? 1.0 : 0.0; });
        p.w.fill_constant(0.5);
        for (std::int64_t n = 0; n < 256; ++n) {
          store_bits(DType::kE4M3, element(p.w.view(), n * 129 + depth), static_cast<std::uint64_t>((n + shift) % 256));
        }
        for (std::int64_t target : simd_targets()) {
          const ForcedTarget forced(target);
          const Buffer out = run(p);
          for (std::int64_t n = 0; n < rows * 256; ++n) {
            const double want = decode(DType::kE4M3, static_cast<std::uint64_t>((n % 256 + shift) % 256));
            const double got = out.at(n);
            ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : got == want)
                << "column " << n << ": " << got << ", not " << want;
          }
        }
      }
    }
  }
}

TEST(GroupedGemm, EveryE4M3ActivationByteIsDecodedExactly) {
  for (std::int64_t rows : {1, 256}) {  // by the path that folds a factor into A, and the other
    Problem p({.counts = {rows}, .n = 3, .k = 256, .a = DType::kE4M3, .w = DType::kE4M3, .unowned_rows = 0});
    p.w_scale.fill_constant(1.0);
    p.a_scale->fill_constant(1.0);
    p.a.fill_constant(0.0);
    p.w.fill_constant(1.0);
    for (std::uint64_t byte = 0; byte < 256; ++byte) {
      const std::int64_t row = static_cast<std::int64_t>(byte) % rows;
      store_bits(DType::kE4M3, element(p.a.view(), row * 256 + static_cast<std::int64_t>(byte)), byte);
      if (rows == 1 || byte == 255) {
        for (std::int64_t target : simd_targets()) {
          const ForcedTarget forced(target);
          const Buffer out = run(p);
          for (std::int64_t r = 0; r < rows; ++r) {
            const double want = decode(DType::kE4M3, rows == 1 ? byte : static_cast<std::uint64_t>(r));
            ASSERT_TRUE(std::isnan(want) ? std::isnan(out.at(r * 3)) : out.at(r * 3) == want) << want;
          }
        }
      }
      if (rows == 1) p.a.set(static_cast<std::int64_t>(byte), 0.0);
    }
  }
}

// Activations at both ends of fp32: where a factor of 256 would overflow, and subnormals.
TEST(GroupedGemm, ExtremeActivationsKeepTheSpecifiedBits) {
  for (DType a : {DType::kF32, DType::kBF16}) {
    for (DType w : kInputs) {
      for (std::int64_t rows : {1, 4, 6}) {
        for (int exponent : {-140, 118, 119, 120, 127}) {
          Problem p({.counts = {rows}, .n = 35, .k = 132, .a = a, .w = w, .unowned_rows = 0});
          Rng rng(7);
          p.a.fill_with([&](std::int64_t) { return std::ldexp(rng.uniform(-1.9, 1.9), exponent); });
          p.w.fill_with([&](std::int64_t) { return rng.uniform(-0.02, 0.02); });
          expect_specified_bits(p);
        }
      }
    }
  }
}

TEST(GroupedGemm, RunTwiceAndWithAnyNumberOfThreadsGivesTheSameBits) {
  for (DType w : kInputs) {
    const Problem p({.counts = {1, 70, 0, 3, 9}, .n = 300, .k = 260, .a = w, .w = w, .part_rows = 150});
    const Buffer once = run(p, "cpu", 1);
    for (int threads : {1, 2, 3, 7, 40}) {
      EXPECT_TRUE(same_bits(run(p, "cpu", threads).view(), once.view())) << threads << " threads";
    }
  }
}

TEST(GroupedGemm, ARowDoesNotDependOnTheOthers) {
  for (DType w : kInputs) {
    const Problem all({.counts = {60, 2, 9}, .n = 100, .k = 200, .a = w, .w = w, .unowned_rows = 0});
    const Buffer together = run(all);
    for (std::int64_t row : {0, 17, 59, 60, 61, 62, 70}) {
      const std::int64_t expert = row < 60 ? 0 : row < 62 ? 1 : 2;
      Spec spec = all.spec;
      spec.counts = {0, 0, 0};
      spec.counts[static_cast<std::size_t>(expert)] = 1;
      Problem alone(spec);
      std::memcpy(alone.a.view().data, all.a.view().row(row), static_cast<std::size_t>(200 * size_bytes(w)));
      alone.w.fill_values(all.w.to_doubles());
      alone.w_scale.fill_values(all.w_scale.to_doubles());
      for (std::int64_t b = 0; alone.a_scale && b < 2; ++b) alone.a_scale->set(b, all.a_scale->at(b * 71 + row));
      EXPECT_TRUE(same_bits(run(alone).view(), together.view().slice(row, 1))) << "row " << row;
    }
  }
}

TEST(GroupedGemm, PermutedExpertsPermuteTheResult) {
  const std::vector<std::int64_t> counts{5, 0, 33, 2}, order{2, 3, 0, 1};
  for (DType w : kInputs) {
    const Problem p({.counts = counts, .n = 50, .k = 140, .a = w, .w = w, .unowned_rows = 0});
    Spec spec = p.spec;
    for (std::size_t i = 0; i < 4; ++i) spec.counts[i] = counts[static_cast<std::size_t>(order[i])];
    Problem q(spec);
    for (std::int64_t e = 0; e < 4; ++e) {
      const std::int64_t from = order[static_cast<std::size_t>(e)];
      fill_values(q.w.view().slice(e, 1), to_doubles(p.w.view().slice(from, 1)));
      fill_values(q.w_scale.view().slice(e, 1), to_doubles(p.w_scale.view().slice(from, 1)));
      for (std::int64_t i = 0; i < spec.counts[static_cast<std::size_t>(e)]; ++i) {
        const std::int64_t to_row = q.rows_of_expert(e).first + i, from_row = p.rows_of_expert(from).first + i;
        fill_values(q.a.view().slice(to_row, 1), to_doubles(p.a.view().slice(from_row, 1)));
        for (std::int64_t b = 0; q.a_scale && b < 2; ++b)
          q.a_scale->set(b * 40 + to_row, p.a_scale->at(b * 40 + from_row));
      }
    }
    const Buffer out_p = run(p), out_q = run(q);
    for (std::int64_t e = 0; e < 4; ++e) {
      const std::int64_t rows = spec.counts[static_cast<std::size_t>(e)];
      EXPECT_TRUE(same_bits(out_q.view().slice(q.rows_of_expert(e).first, rows),
                            out_p.view().slice(p.rows_of_expert(order[static_cast<std::size_t>(e)]).first, rows)));
    }
  }
}

TEST(GroupedGemm, NaNAndInfinityStayInTheirRowOrColumn) {
  for (DType a : kInputs) {
    for (DType w : kInputs) {
      for (std::int64_t rows : {3, 14}) {
        Problem p({.counts = {rows}, .n = 45, .k = 200, .a = a, .w = w, .unowned_rows = 0});
        const Buffer clean = run(p);
        p.a.set(1 * 200 + 150, NAN);
        if (a != DType::kE4M3) p.a.set(2 * 200 + 3, INFINITY);
        p.w.set(40 * 200 + 199, NAN);
        const Buffer out = run(p);
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t n = 0; n < 45; ++n) {
            const double got = out.at(r * 45 + n);
            if (r == 1 || n == 40) {
              EXPECT_TRUE(std::isnan(got)) << r << "," << n;
            } else if (r == 2 && a != DType::kE4M3) {
              EXPECT_FALSE(std::isfinite(got)) << r << "," << n;
            } else {
              EXPECT_EQ(got, clean.at(r * 45 + n)) << r << "," << n;
            }
          }
        }
        EXPECT_TRUE(same_bits(out.view(), p.oracle().view()));
        // One NaN for every implementation, whatever its operands were.
        const Buffer reference = run(p, "reference");
        for (std::int64_t i = 0; i < out.num_elements(); ++i) {
          if (!std::isnan(out.at(i))) continue;
          EXPECT_EQ(load_bits(p.spec.out, element(out.view(), i)), load_bits(p.spec.out, element(reference.view(), i)));
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------

class GroupedGemmCheck : public testing::Test {
 protected:
  GroupedGemmCheck()
      : p_({.counts = {2, 3},
            .n = 260,
            .k = 300,
            .a = DType::kE4M3,
            .w = DType::kE4M3,
            .bias = true,
            .part_rows = 130}),
        out_(p_.make_out()) {
    args_ = p_.args;
    args_.out = out_.view();
  }
  std::string refusal() const {
    const Status s = grouped_gemm::check(args_);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    return s.message();
  }
  Problem p_;
  Buffer out_;
  grouped_gemm::Args args_;
};

TEST_F(GroupedGemmCheck, TheFixtureItselfIsLegal) {
  EXPECT_TRUE(grouped_gemm::check(args_).is_ok());
  args_.a.data = nullptr;
  EXPECT_TRUE(grouped_gemm::check(args_, Phase::kPlan).is_ok());
  EXPECT_THAT(refusal(), HasSubstr("a is a null pointer"));
}

TEST_F(GroupedGemmCheck, Extents) {
  args_.w.shape[2] = 299;
  EXPECT_THAT(refusal(), HasSubstr("w[L,N,K] f32 or bf16 or e4m3 or i8 axis 2 (K) is 299, expected 300"));
  args_ = p_.args;
  args_.out = out_.view().slice(0, 6);
  EXPECT_THAT(refusal(), HasSubstr("out[R,N] f32 or bf16 axis 0 (R) is 6, expected 7"));
  args_.out = {};
  EXPECT_THAT(refusal(), HasSubstr("out[R,N] f32 or bf16 is missing"));
}

TEST_F(GroupedGemmCheck, EmptyExtents) {
  args_.w.shape[1] = 0;
  EXPECT_THAT(refusal(), HasSubstr("N = 0 and K = 300 must be at least 1"));
}

TEST_F(GroupedGemmCheck, Parts) {
  args_.part_rows = 100;
  EXPECT_THAT(refusal(), HasSubstr("part_rows = 100 does not divide N = 260"));
  args_.part_rows = -130;
  EXPECT_THAT(refusal(), HasSubstr("part_rows = -130 does not divide N = 260"));
  args_.part_rows = 0;  // one matrix of 260 rows has 3 scale rows, two of 130 have 4
  EXPECT_THAT(refusal(), HasSubstr("w_scale[L,Nb,Kb] f32 axis 1 (Nb) is 4, expected 3: N = 260 in parts of 260 rows"));
}

TEST_F(GroupedGemmCheck, Presence) {
  args_.a_scale = {};
  EXPECT_THAT(refusal(), HasSubstr("a is e4m3, but a_scale[Kb,R] f32 is missing"));
  args_.a_scale = p_.args.a_scale;
  args_.w_scale = {};
  EXPECT_THAT(refusal(), HasSubstr("w is e4m3, but w_scale[L,Nb,Kb] f32 is missing"));
  args_.w_scale = p_.args.w_scale;
  Buffer bf16(DType::kBF16, {2, 260, 300});
  args_.w = bf16.view();
  EXPECT_THAT(refusal(), HasSubstr("w is bf16, but w_scale = f32[2,4,3] is given; only e4m3 and i8 are scaled"));
}

TEST_F(GroupedGemmCheck, DTypes) {
  args_.out.dtype = DType::kF16;
  EXPECT_THAT(refusal(), HasSubstr("out must be f32 or bf16, got f16"));
  args_ = p_.args;
  args_.out = out_.view();
  args_.a.dtype = DType::kE5M2;
  EXPECT_THAT(refusal(), HasSubstr("a must be f32 or bf16 or e4m3 or i8, got e5m2"));
}

TEST_F(GroupedGemmCheck, Groups) {
  args_.groups = {};
  EXPECT_THAT(refusal(), HasSubstr("contiguous row groups take expert_offset alone; expert_offset[L+1] is missing"));
  Buffer counts(DType::kI32, {2});
  args_.groups = RowGroups::masked(counts.view(), 4);
  EXPECT_THAT(refusal(), HasSubstr("2 groups of rows_per_group = 4 do not make R = 7 rows"));
}

TEST_F(GroupedGemmCheck, Strides) {
  args_.w.stride[2] = 2;
  EXPECT_THAT(refusal(), HasSubstr("w[L,N,K] f32 or bf16 or e4m3 or i8 axis 2 has stride 2"));
  args_.w = p_.args.w;
  args_.out.stride[0] = 259;
  EXPECT_THAT(refusal(), HasSubstr("out[R,N] f32 or bf16 axis 0 has stride 259 elements, expected at least 260"));
}

TEST_F(GroupedGemmCheck, Devices) {
  args_.bias.device = {DeviceKind::kCuda, 1};
  EXPECT_THAT(refusal(), HasSubstr("a is on cpu 0, but f32[2,260] is on cuda 1"));
}

TEST_F(GroupedGemmCheck, WorkspaceTooSmall) {
  const auto& impl = on_cpu(grouped_gemm::impls()).front();
  const Machine machine = Machine::detect_cpu(2);
  std::vector<std::byte> scratch(static_cast<std::size_t>(impl.scratch_bytes(args_, machine)));
  const Ctx enough{.workspace = scratch, .num_threads = 2};
  EXPECT_TRUE(impl.run(args_, enough).is_ok());
  const Ctx more_threads{.workspace = scratch, .num_threads = 3};
  const Status s = impl.run(args_, more_threads);
  EXPECT_EQ(s.code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_THAT(s.message(), HasSubstr(std::to_string(scratch.size())));
  EXPECT_TRUE(impl.run(args_, Ctx{.workspace = scratch, .num_threads = 1}).is_ok());
}

TEST(GroupedGemmTable, FastestFirstReferenceLastAndTheChoiceIsExplained) {
  const auto table = grouped_gemm::impls();
  ASSERT_GE(table.size(), 2U);
  EXPECT_EQ(table.back().name, "reference");
  const Problem p({.counts = {2}, .n = 64, .k = 64});
  const Machine machine = Machine::detect_cpu(2);
  const auto choice = choose<grouped_gemm::Args>("grouped_gemm", table, p.args, machine, {});
  ASSERT_TRUE(choice.is_ok());
  EXPECT_EQ(choice->impl->name, "cpu");
  EXPECT_THAT(choice->impl->describe(p.args, machine), HasSubstr("columns"));
}

}  // namespace
}  // namespace sluice::test
