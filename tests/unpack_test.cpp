// Conversions on the way from file bytes to weights, against the harness's codec and values worked out by hand.
#include "io/unpack.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "harness/codec.h"
#include "harness/fill.h"

namespace sluice::io {
namespace {

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (int v : values) bytes.push_back(static_cast<std::byte>(v));
  return bytes;
}

bool same_value(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

TEST(Unpack, EveryCodeOfTheNarrowTypes) {
  for (int i = 0; i < 256; ++i) {
    const auto byte = static_cast<std::uint8_t>(i);
    EXPECT_TRUE(same_value(e4m3_value(byte), test::decode(DType::kE4M3, byte))) << i;
    EXPECT_TRUE(same_value(e8m0_value(byte), test::decode(DType::kE8M0, byte))) << i;
  }
  for (int i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    EXPECT_TRUE(same_value(f16_value(bits), test::decode(DType::kF16, bits))) << i;
    EXPECT_TRUE(same_value(bf16_value(bits), test::decode(DType::kBF16, bits))) << i;
  }
}

TEST(Unpack, RoundingIsThatOfTheCodec) {
  test::Rng rng(1);
  for (int i = 0; i < 200'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(rng.bits());
    float value = 0;
    std::memcpy(&value, &bits, 4);
    if (!std::isnan(value)) {
      EXPECT_EQ(to_bf16(value), test::encode(DType::kBF16, value)) << value;
    }
    const auto near =
        static_cast<float>(rng.uniform(-500, 500) * std::ldexp(1.0, -static_cast<int>(rng.integer(0, 20))));
    EXPECT_EQ(to_e4m3(near), test::encode(DType::kE4M3, near)) << near;
  }
  for (float value : {0.0f, -0.0f, 448.0f, 449.0f, 464.0f, 465.0f, 1e30f, 0x1p-9f, 0x1p-10f, 0x1.000002p-10f, 0x1.ep-7f,
                      0x1p-6f, -17.0f}) {
    EXPECT_EQ(to_e4m3(value), test::encode(DType::kE4M3, value)) << value;
  }
  EXPECT_EQ(to_e4m3(std::numeric_limits<float>::quiet_NaN()), 0x7F);
  EXPECT_TRUE(std::isnan(bf16_value(to_bf16(std::numeric_limits<float>::signaling_NaN()))));
}

TEST(Unpack, Case41E8m0Values) {
  EXPECT_EQ(e8m0_value(0), 0x1p-127f);
  EXPECT_EQ(e8m0_value(126), 0.5f);
  EXPECT_EQ(e8m0_value(127), 1.0f);
  EXPECT_EQ(e8m0_value(134), 128.0f);
  EXPECT_EQ(e8m0_value(254), 0x1p127f);
  EXPECT_TRUE(std::isnan(e8m0_value(255)));
  // 0.5 (e4m3 0x30) times the extremes.
  const auto half = bytes_of({0x30});
  std::uint16_t out = 0;
  for (const auto& [scale, want] : {std::pair(0, 0x1p-128), std::pair(1, 0x1p-127), std::pair(254, 0x1p126)}) {
    const Dequantised done = dequantise_mx_row(half.data(), bytes_of({scale}).data(), 1, &out);
    EXPECT_TRUE(done.exact);
    EXPECT_EQ(bf16_value(out), want);
  }
  const Dequantised nan = dequantise_mx_row(half.data(), bytes_of({255}).data(), 1, &out);
  EXPECT_EQ(nan.num_nan, 1);
  EXPECT_TRUE(std::isnan(bf16_value(out)));
}

TEST(Unpack, Case42E4m3IsTheFnVariant) {
  EXPECT_TRUE(std::signbit(e4m3_value(0x80)) && e4m3_value(0x80) == 0.0f);
  EXPECT_EQ(e4m3_value(0x7E), 448.0f);
  EXPECT_EQ(e4m3_value(0x38), 1.0f);
}

TEST(Unpack, MxRowsAreExactOrRefused) {
  std::uint16_t out[64];
  std::vector<std::byte> row(64), scales = bytes_of({127, 121});
  for (int i = 0; i < 64; ++i) row[static_cast<std::size_t>(i)] = static_cast<std::byte>(i * 4);
  EXPECT_TRUE(dequantise_mx_row(row.data(), scales.data(), 64, out).exact);
  for (int i = 0; i < 64; ++i) {
    const double want = test::decode(DType::kE4M3, static_cast<std::uint64_t>(i * 4)) * (i < 32 ? 1.0 : 1.0 / 64);
    EXPECT_TRUE(same_value(bf16_value(out[i]), want)) << i;
  }
  EXPECT_FALSE(dequantise_mx_row(bytes_of({1}).data(), bytes_of({0}).data(), 1, out).exact) << "2^-136 is below bf16";
  EXPECT_FALSE(dequantise_mx_row(bytes_of({0x7E}).data(), bytes_of({254}).data(), 1, out).exact)
      << "448 * 2^127 is above bf16";
}

TEST(Unpack, Mxfp4LowNibbleFirst) {
  // Codes 0..15 in order: bytes 0x10, 0x32, ...; twice, under two scales.
  std::vector<std::byte> blocks;
  for (int repeat = 0; repeat < 4; ++repeat) {
    for (int code = 0; code < 16; code += 2) blocks.push_back(static_cast<std::byte>(code | (code + 1) << 4));
  }
  std::uint16_t out[64];
  const Dequantised done = dequantise_mxfp4_row(blocks.data(), bytes_of({127, 130}).data(), 64, out);
  EXPECT_TRUE(done.exact);
  EXPECT_EQ(done.num_nan, 0);
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int i = 0; i < 64; ++i) {
    const double want = magnitudes[i % 8] * (i % 16 < 8 ? 1 : -1) * (i < 32 ? 1 : 8);
    EXPECT_EQ(bf16_value(out[i]), want) << i;
    EXPECT_EQ(std::signbit(bf16_value(out[i])), i % 16 >= 8) << i;
  }
  // Every scale: exact where bf16 reaches, refused where it does not, NaN for 255.
  for (int scale = 0; scale < 256; ++scale) {
    const std::vector<std::byte> all(32, static_cast<std::byte>(0x71));  // 0.5 and 6
    const Dequantised one = dequantise_mxfp4_row(all.data(), bytes_of({scale}).data(), 32, out);
    EXPECT_EQ(one.exact, scale <= 252 || scale == 255) << scale;
    EXPECT_EQ(one.num_nan, scale == 255 ? 32 : 0);
    if (one.exact && scale != 255) {
      EXPECT_EQ(static_cast<double>(bf16_value(out[0])), std::ldexp(0.5, scale - 127)) << scale;
      EXPECT_EQ(static_cast<double>(bf16_value(out[1])), std::ldexp(6.0, scale - 127)) << scale;
    }
  }
}

TEST(Unpack, BlockScalesOfPartialBlocks) {
  const std::int64_t rows = 130, cols = 129;
  std::vector<std::byte> weight(static_cast<std::size_t>(rows * cols), std::byte{0x38});
  const float scale[4] = {1, 2, 4, 8};
  std::vector<std::uint16_t> out(weight.size());
  weight[5] = std::byte{0x7F};
  EXPECT_EQ(dequantise_blocks(weight.data(), scale, rows, cols, out.data()), 1);
  for (std::int64_t i = 0; i < rows * cols; ++i) {
    if (i == 5) continue;
    ASSERT_EQ(bf16_value(out[static_cast<std::size_t>(i)]), scale[(i / cols >= 128) * 2 + (i % cols >= 128)]) << i;
  }
}

TEST(Unpack, TransposesOfEveryOrderAtOddAddresses) {
  const std::int64_t H = 37, I = 35;
  for (GateUp order : {GateUp::kGateFirst, GateUp::kUpFirst, GateUp::kInterleaved}) {
    // Source [H, 2I]: element (h, n) is its own number.
    std::vector<std::byte> source(static_cast<std::size_t>(H * 2 * I) * 2 + 1);
    for (std::int64_t i = 0; i < H * 2 * I; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      std::memcpy(source.data() + 1 + i * 2, &bits, 2);
    }
    std::vector<std::uint16_t> out(static_cast<std::size_t>(H * 2 * I), 0xFFFF);
    transpose({DType::kBF16, H, 2 * I, order, I}, source.data() + 1, out.data());
    for (std::int64_t i = 0; i < I; ++i) {
      const std::int64_t gate = order == GateUp::kGateFirst ? i : order == GateUp::kUpFirst ? I + i : 2 * i;
      const std::int64_t up = order == GateUp::kGateFirst ? I + i : order == GateUp::kUpFirst ? i : 2 * i + 1;
      for (std::int64_t h = 0; h < H; ++h) {
        ASSERT_EQ(out[static_cast<std::size_t>(i * H + h)], h * 2 * I + gate);
        ASSERT_EQ(out[static_cast<std::size_t>((I + i) * H + h)], h * 2 * I + up);
      }
    }
  }
  // Plain, f32, and f16 that becomes f32.
  std::vector<float> f32 = {1, 2, 3, 4, 5, NAN}, out(6);
  EXPECT_EQ(transpose({DType::kF32, 2, 3, GateUp::kGateFirst, 0}, reinterpret_cast<std::byte*>(f32.data()), out.data()),
            1);
  EXPECT_EQ(std::vector<float>(out.begin(), out.begin() + 5), (std::vector<float>{1, 4, 2, 5, 3}));
  std::vector<std::uint16_t> f16 = {0x3C00, 0x4000, 0x4200, 0x7E00};
  EXPECT_EQ(transpose({DType::kF16, 2, 2, GateUp::kGateFirst, 0}, reinterpret_cast<std::byte*>(f16.data()), out.data()),
            1);
  EXPECT_EQ(std::vector<float>(out.begin(), out.begin() + 3), (std::vector<float>{1, 3, 2}));
}

TEST(Unpack, Case137GateAndUpInEveryOrder) {
  // gate = [1,2], up = [3,4], as the three layouts store them; w13 has gate first.
  const std::vector<std::pair<GateUp, std::vector<int>>> layouts = {
      {GateUp::kGateFirst, {1, 2, 3, 4}}, {GateUp::kInterleaved, {1, 3, 2, 4}}, {GateUp::kUpFirst, {3, 4, 1, 2}}};
  for (const auto& [order, stored] : layouts) {
    int w13[4] = {};
    for (std::int64_t n = 0; n < 4; ++n) w13[w13_row(order, n, 2)] = stored[static_cast<std::size_t>(n)];
    EXPECT_EQ(std::vector<int>(w13, w13 + 4), (std::vector<int>{1, 2, 3, 4}));
  }
}

TEST(Unpack, NanOfEveryTypeAreCounted) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3}) {
    std::vector<std::byte> data(static_cast<std::size_t>(size_bytes(dtype)) * 40'000 + 1);
    test::Rng rng(3);
    std::int64_t want = 0;
    for (std::int64_t i = 0; i < 40'000; ++i) {
      const std::uint64_t bits = rng.bits();
      test::store_bits(dtype, data.data() + 1 + i * size_bytes(dtype), bits);
      want += std::isnan(test::decode(dtype, test::load_bits(dtype, data.data() + 1 + i * size_bytes(dtype)))) ? 1 : 0;
    }
    EXPECT_GT(want, 0);
    std::vector<std::byte> out(data.size());
    EXPECT_EQ(count_nan(dtype, data.data() + 1, 40'000), want) << to_string(dtype);
    EXPECT_EQ(copy_elements(dtype, data.data() + 1, 40'000, out.data()), want);
    EXPECT_EQ(std::memcmp(out.data(), data.data() + 1, data.size() - 1), 0);
  }
}

}  // namespace
}  // namespace sluice::io
