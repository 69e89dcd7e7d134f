// Weights to e4m3 and int8, against plain loops over the harness's own codec: every byte and every scale, on every SIMD
// target, and the derived bound on what the quantised weights stand for.
#include "sluice/quantize.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "harness/buffer.h"
#include "harness/codec.h"
#include "harness/targets.h"

namespace sluice {
namespace {

using test::Buffer;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Problem {
  Buffer w, q, scale;
  Problem(WeightFormat format, DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t gap = 0)
      : w(dtype, {rows, cols}, {.row_pitch_elems = cols + gap}),
        q(weight_dtype(format), {rows, cols}, {.row_pitch_elems = cols + gap}),
        scale(DType::kF32, {scale_shape(format, rows, cols)[0], scale_shape(format, rows, cols)[1]}) {}
};

// Index of the scale of element (n, k).
std::int64_t scale_index(WeightFormat format, std::int64_t n, std::int64_t k, std::int64_t cols) {
  return format == WeightFormat::kFp8Block ? n / 128 * ((cols + 127) / 128) + k / 128 : n;
}

void expect_exact(WeightFormat format, const Problem& p, const NonFinite& found) {
  const std::int64_t rows = p.w.view().shape[0], cols = p.w.view().shape[1];
  const std::vector<double> w = p.w.to_doubles(), q = p.q.to_doubles(), scale = p.scale.to_doubles();
  const double top = format == WeightFormat::kInt8Channel ? 127 : 448;
  std::vector<float> amax(scale.size(), 0.0f);
  NonFinite want_found;
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t k = 0; k < cols; ++k) {
      const double v = w[static_cast<std::size_t>(n * cols + k)];
      float& a = amax[static_cast<std::size_t>(scale_index(format, n, k, cols))];
      if (std::isfinite(v)) {
        a = std::max(a, static_cast<float>(std::fabs(v)));
      } else if (want_found.count++ == 0) {
        want_found.row = n;
        want_found.col = k;
      }
    }
  }
  EXPECT_EQ(found.count, want_found.count);
  EXPECT_EQ(found.row, want_found.row);
  EXPECT_EQ(found.col, want_found.col);
  std::int64_t wrong_scales = 0, wrong = 0, out_of_bound = 0;
  for (std::size_t i = 0; i < scale.size(); ++i) {
    const float want = std::max(amax[i], 1e-10f) / static_cast<float>(top);
    wrong_scales += static_cast<float>(scale[i]) == want ? 0 : 1;
  }
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    const float v = static_cast<float>(w[static_cast<std::size_t>(i)]);
    const float s = static_cast<float>(scale[static_cast<std::size_t>(scale_index(format, i / cols, i % cols, cols))]);
    const double got = q[static_cast<std::size_t>(i)];
    const float quotient = v / s;
    double want = 0;
    if (format == WeightFormat::kInt8Channel) {
      want = std::isnan(v) ? 0.0 : std::fmin(std::fmax(std::nearbyint(quotient), -127.0), 127.0);
    } else {
      want = test::decode(DType::kE4M3, test::encode(DType::kE4M3, static_cast<double>(quotient)));
    }
    const bool same = got == want || (std::isnan(got) && std::isnan(want));
    if (!same && wrong++ == 0)
      ADD_FAILURE() << "element " << i << ": " << v << " / " << s << " gave " << got << ", expected " << want;
    if (!std::isfinite(v)) continue;
    // docs/numerics.md: half a step of the format, and the rounding of the quotient.
    const double step = format == WeightFormat::kInt8Channel
                            ? 0.5 * static_cast<double>(s)
                            : std::max(std::fabs(static_cast<double>(v)) / 16, static_cast<double>(s) / 1024);
    out_of_bound += std::fabs(got * static_cast<double>(s) - static_cast<double>(v)) <=
                            step + std::fabs(static_cast<double>(v)) * 0x1p-22
                        ? 0
                        : 1;
  }
  EXPECT_EQ(wrong_scales, 0);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(out_of_bound, 0);
  EXPECT_TRUE(p.w.guards_intact());
  EXPECT_TRUE(p.q.guards_intact());
  EXPECT_TRUE(p.scale.guards_intact());
}

// Magnitudes over 60 binades, exact ties of the formats, zeros of both signs.
void fill_awkward(Buffer& w, std::uint64_t seed) {
  test::Rng rng(seed);
  w.fill_with([&](std::int64_t i) {
    switch (i % 7) {
      case 0: return rng.normal();
      case 1: return rng.normal() * std::ldexp(1.0, static_cast<int>(rng.integer(-40, 4)));
      case 2: return std::copysign(static_cast<double>(rng.integer(0, 254)) / 127.0 * 2.0, rng.uniform(-1, 1));
      case 3: return (static_cast<double>(rng.integer(8, 15)) + 0.5) * std::ldexp(1.0, -4);
      case 4: return std::copysign(0.0, rng.uniform(-1, 1));
      case 5: return std::copysign(4.0, rng.uniform(-1, 1));
      default: return rng.uniform(-1, 1);
    }
  });
}

TEST(Quantize, EveryFormatShapeAndTargetIsExact) {
  const std::pair<std::int64_t, std::int64_t> shapes[] = {{1, 1},     {3, 127},   {127, 128}, {128, 129},
                                                          {129, 640}, {257, 300}, {1, 1000},  {300, 7}};
  for (std::int64_t target : test::simd_targets()) {
    const test::ForcedTarget forced(target);
    std::uint64_t seed = 1;
    for (WeightFormat format : kAllWeightFormats) {
      for (DType dtype : {DType::kBF16, DType::kF32}) {
        for (const auto& [rows, cols] : shapes) {
          SCOPED_TRACE(fmt::format("{} of {} [{},{}]", to_string(format), to_string(dtype), rows, cols));
          Problem p(format, dtype, rows, cols, static_cast<std::int64_t>(++seed % 4));
          fill_awkward(p.w, seed);
          const auto found = quantize_weight(format, p.w.view(), p.q.view(), p.scale.view(), 1 + seed % 3);
          ASSERT_TRUE(found.is_ok()) << found.status().message();
          expect_exact(format, p, *found);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(Quantize, ZeroTinyAndLargestGroups) {
  for (WeightFormat format : kAllWeightFormats) {
    for (double size : {0.0, 1e-42, 1e-11, 1e-10, 3.3e38}) {
      SCOPED_TRACE(fmt::format("{} of magnitude {}", to_string(format), size));
      Problem p(format, DType::kF32, 130, 200);
      p.w.fill_uniform(3, -size, size);
      const auto found = quantize_weight(format, p.w.view(), p.q.view(), p.scale.view());
      ASSERT_TRUE(found.is_ok());
      expect_exact(format, p, *found);
    }
  }
}

TEST(Quantize, NonFiniteElementsAreFoundAndSpoilNoScale) {
  for (WeightFormat format : kAllWeightFormats) {
    for (DType dtype : {DType::kBF16, DType::kF32}) {
      for (float value : {kNan, kInf, -kInf}) {
        for (std::int64_t at : {0, 199, 129 * 200 + 130, 260 * 200 - 1}) {
          SCOPED_TRACE(fmt::format("{} of {}, {} at {}", to_string(format), to_string(dtype), value, at));
          Problem p(format, dtype, 260, 200);
          p.w.fill_normal(5).set(at, static_cast<double>(value));
          const auto found = quantize_weight(format, p.w.view(), p.q.view(), p.scale.view(), 3);
          ASSERT_TRUE(found.is_ok());
          EXPECT_EQ(found->count, 1);
          expect_exact(format, p, *found);
        }
      }
    }
    // All of a row, and one in a later row: the first is named.
    Problem p(format, DType::kBF16, 4, 300);
    p.w.fill_normal(6);
    for (std::int64_t k = 0; k < 300; ++k) p.w.set(300 + k, static_cast<double>(kNan));
    p.w.set(3 * 300, static_cast<double>(kInf));
    const auto found = quantize_weight(format, p.w.view(), p.q.view(), p.scale.view(), 2);
    ASSERT_TRUE(found.is_ok());
    EXPECT_EQ(found->count, 301);
    expect_exact(format, p, *found);
  }
}

// What stands in one block or row reaches no other.
TEST(Quantize, OneElementMovesItsOwnGroupOnly) {
  for (WeightFormat format : kAllWeightFormats) {
    Problem before(format, DType::kBF16, 300, 300), after(format, DType::kBF16, 300, 300);
    for (Problem* p : {&before, &after}) {
      p->w.fill_normal(7);
      if (p == &after) p->w.set(129 * 300 + 129, 1000.0);
      ASSERT_TRUE(quantize_weight(format, p->w.view(), p->q.view(), p->scale.view()).is_ok());
    }
    const auto a = before.scale.to_doubles(), b = after.scale.to_doubles();
    std::int64_t changed = 0;
    for (std::size_t i = 0; i < a.size(); ++i) changed += a[i] == b[i] ? 0 : 1;
    EXPECT_EQ(changed, 1);
    const std::size_t own = format == WeightFormat::kFp8Block ? 1 * 3 + 1 : 129;
    EXPECT_NE(a[own], b[own]) << to_string(format);
    const auto qa = before.q.to_doubles(), qb = after.q.to_doubles();
    for (std::int64_t i = 0; i < 300 * 300; ++i) {
      if (scale_index(format, i / 300, i % 300, 300) == static_cast<std::int64_t>(own)) continue;
      ASSERT_EQ(qa[static_cast<std::size_t>(i)], qb[static_cast<std::size_t>(i)]) << i;
    }
  }
}

TEST(Quantize, ThreadsDoNotShow) {
  for (WeightFormat format : kAllWeightFormats) {
    Problem one(format, DType::kBF16, 513, 300);
    fill_awkward(one.w, 11);
    ASSERT_TRUE(quantize_weight(format, one.w.view(), one.q.view(), one.scale.view(), 1).is_ok());
    for (int threads : {2, 7, 0}) {
      Problem many(format, DType::kBF16, 513, 300);
      fill_awkward(many.w, 11);
      ASSERT_TRUE(quantize_weight(format, many.w.view(), many.q.view(), many.scale.view(), threads).is_ok());
      EXPECT_EQ(many.q.bytes(), one.q.bytes());
      EXPECT_EQ(many.scale.bytes(), one.scale.bytes());
    }
  }
}

TEST(Quantize, TheNamedFunctionsAreTheFormats) {
  const auto run = [](WeightFormat format, const auto& function) {
    Problem p(format, DType::kF32, 130, 130), named(format, DType::kF32, 130, 130);
    p.w.fill_normal(2);
    named.w.fill_normal(2);
    EXPECT_TRUE(quantize_weight(format, p.w.view(), p.q.view(), p.scale.view()).is_ok());
    EXPECT_TRUE(function(named.w.view(), named.q.view(), named.scale.view(), 1).is_ok());
    EXPECT_EQ(p.q.bytes(), named.q.bytes());
    EXPECT_EQ(p.scale.bytes(), named.scale.bytes());
  };
  run(WeightFormat::kFp8Block, quantize_fp8_block);
  run(WeightFormat::kFp8Channel, quantize_fp8_channel);
  run(WeightFormat::kInt8Channel, quantize_int8_channel);
  for (WeightFormat format : kAllWeightFormats) {
    const auto parsed = parse_weight_format(to_string(format));
    ASSERT_TRUE(parsed.is_ok());
    EXPECT_EQ(*parsed, format);
  }
  EXPECT_THAT(parse_weight_format("fp8").status().message(), HasSubstr("'fp8' is none of fp8-block, fp8-channel"));
}

TEST(Quantize, WrongTensorsAreNamed) {
  const WeightFormat format = WeightFormat::kFp8Block;
  Problem p(format, DType::kBF16, 256, 200);
  p.w.fill_normal(1);
  const auto message = [&](const TensorView& w, const TensorView& q, const TensorView& scale,
                           WeightFormat f = WeightFormat::kFp8Block) {
    const auto result = quantize_weight(f, w, q, scale);
    EXPECT_FALSE(result.is_ok());
    return result.status().message();
  };
  const Buffer f16(DType::kF16, {256, 200}), narrow(DType::kE4M3, {256, 199}), i8(DType::kI8, {256, 200}),
      transposed(DType::kF32, {2, 3}), column(DType::kF32, {256, 2}), vector(DType::kF32, {256});
  EXPECT_THAT(message(f16.view(), p.q.view(), p.scale.view()), HasSubstr("w must be f32 or bf16, got f16"));
  EXPECT_THAT(message(p.w.view(), narrow.view(), p.scale.view()), HasSubstr("(K) is 199"));
  EXPECT_THAT(message(p.w.view(), i8.view(), p.scale.view()), HasSubstr("q must be e4m3"));
  EXPECT_THAT(message(p.w.view(), p.q.view(), transposed.view()), HasSubstr("(Kb) is 3, expected 2"));
  EXPECT_THAT(message(p.w.view(), p.q.view(), column.view(), WeightFormat::kFp8Channel), HasSubstr("scale"));
  EXPECT_THAT(message(p.w.view(), p.q.view(), vector.view(), WeightFormat::kFp8Channel), HasSubstr("2 axes"));
  EXPECT_THAT(message({}, p.q.view(), p.scale.view()), HasSubstr("w[N,K]"));
  EXPECT_TRUE(p.q.rows_untouched(0));
  EXPECT_TRUE(p.scale.rows_untouched(0));
}

TEST(Quantize, NothingOfNothing) {
  for (WeightFormat format : kAllWeightFormats) {
    for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>(0, 5), {5, 0}, {0, 0}}) {
      const auto [sr, sc] = scale_shape(format, rows, cols);
      const Buffer scale(DType::kF32, {std::max<std::int64_t>(sr, 1), std::max<std::int64_t>(sc, 1)});
      TensorView s = scale.view();
      s.shape = {sr, sc};
      const auto found = quantize_weight(format, TensorView::dense(nullptr, DType::kF32, {rows, cols}),
                                         TensorView::dense(nullptr, weight_dtype(format), {rows, cols}), s);
      EXPECT_TRUE(found.is_ok()) << found.status().message();
    }
  }
}

}  // namespace
}  // namespace sluice
