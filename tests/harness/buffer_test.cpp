// The alarm works: guards notice a single byte on every side, poison notices a single write, inputs a single change.
#include "harness/buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "harness/codec.h"

namespace sluice::test {
namespace {

using testing::HasSubstr;

// A store the sanitizer does not see, as guards under AddressSanitizer trap.
__attribute__((noinline, no_sanitize("address"))) std::byte poke(std::byte* address, std::byte value) {
  volatile std::byte* const p = address;
  const std::byte old = *p;
  *p = value;
  return old;
}

constexpr DType kAllDTypes[] = {DType::kF32,  DType::kBF16, DType::kF16, DType::kF64, DType::kE4M3, DType::kE5M2,
                                DType::kE8M0, DType::kI8,   DType::kU8,  DType::kI16, DType::kU16,  DType::kI32,
                                DType::kU32,  DType::kI64,  DType::kU64, DType::kBool};
static_assert(std::size(kAllDTypes) == kNumDTypes);

class BufferOf : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Buffer, BufferOf, testing::ValuesIn(kAllDTypes),
                         [](const auto& test) { return std::string(to_string(test.param)); });

TEST_P(BufferOf, GuardsNoticeOneByteOnEverySide) {
  const std::int64_t size = size_bytes(GetParam());
  for (const std::int64_t offset : {0, 1, 3}) {
    Buffer buffer(GetParam(), {3, 5}, {.row_pitch_elems = 7, .offset_elems = offset});
    buffer.fill_integers(1, 0, 1);
    ASSERT_TRUE(buffer.guards_intact());
    std::byte* const first = buffer.view().as<std::byte>();
    const std::int64_t end = (2 * 7 + 5) * size;
    for (const std::int64_t at : {std::int64_t{-1}, std::int64_t{-64}, std::int64_t{-256}, end, end + 63, end + 255,
                                  5 * size, 7 * size - 1, (7 + 5) * size, 2 * 7 * size - 1}) {
      const std::byte old = poke(first + at, std::byte{0});
      EXPECT_FALSE(buffer.guards_intact()) << "byte " << at;
      poke(first + at, old ^ std::byte{1});
      EXPECT_FALSE(buffer.guards_intact()) << "byte " << at;
      poke(first + at, old);
      EXPECT_TRUE(buffer.guards_intact()) << "byte " << at;
    }
  }
}

// A copy that runs one element too far carries poison or the neighbouring element, not a foreign value.
TEST_P(BufferOf, GuardsNoticePoisonAndShiftedGuards) {
  const std::int64_t size = size_bytes(GetParam());
  Buffer buffer(GetParam(), {4, 4});
  std::byte* const first = buffer.view().as<std::byte>();
  const std::int64_t end = 16 * size;
  for (const std::int64_t start : {end, -2 * size}) {
    std::vector<std::byte> old;
    for (std::int64_t b = 0; b < 2 * size; ++b) old.push_back(poke(first + start + b, first[b]));
    EXPECT_FALSE(buffer.guards_intact());
    for (std::int64_t b = 0; b < 2 * size; ++b) poke(first + start + b, old[static_cast<std::size_t>(b)]);
    ASSERT_TRUE(buffer.guards_intact());
  }
}

TEST_P(BufferOf, StartsPoisonedAndNoticesOneWrite) {
  const Buffer buffer(GetParam(), {6, 3}, {.row_pitch_elems = 4, .offset_elems = 1});
  EXPECT_TRUE(buffer.rows_untouched(0));
  if (DTypeSet{DType::kF32, DType::kBF16, DType::kF16, DType::kF64, DType::kE4M3, DType::kE5M2, DType::kE8M0}.has(
          GetParam())) {
    for (double v : buffer.to_doubles()) EXPECT_TRUE(std::isnan(v));
  }
  buffer.set(4 * 3 + 2, 1.0);
  EXPECT_FALSE(buffer.rows_untouched(0));
  EXPECT_FALSE(buffer.rows_untouched(4));
  EXPECT_TRUE(buffer.rows_untouched(5));
  EXPECT_TRUE(buffer.rows_untouched(6));
  EXPECT_THAT(buffer.rows_untouched(4).message(), HasSubstr("row 0, column 2 was written, now 1"));
}

TEST_P(BufferOf, NoticesAChangedInput) {
  Buffer buffer(GetParam(), {2, 3, 5}, {.row_pitch_elems = 6});
  buffer.fill_integers(2, 0, 1);
  const std::vector<std::byte> before = buffer.bytes();
  const auto flip = [&](std::int64_t index) {
    std::byte* const at = element(buffer.view(), index);
    at[size_bytes(GetParam()) - 1] ^= std::byte{1};
  };
  EXPECT_TRUE(buffer.unchanged_since(before));
  flip(17);
  EXPECT_THAT(buffer.unchanged_since(before).message(), HasSubstr("row 3, column 2 changed"));
  EXPECT_FALSE(buffer.unchanged_since(before, 1));
  flip(17);
  flip(3);
  EXPECT_FALSE(buffer.unchanged_since(before));
  EXPECT_TRUE(buffer.unchanged_since(before, 1)) << "slice 0 alone changed";
}

TEST(Buffer, SaysWhereTheGuardBroke) {
  Buffer buffer(DType::kBF16, {3, 5}, {.row_pitch_elems = 8});
  std::byte* const first = buffer.view().as<std::byte>();
  std::byte old = poke(first - 3, std::byte{0});
  EXPECT_THAT(buffer.guards_intact().message(), HasSubstr("3 bytes before the first element"));
  poke(first - 3, old);
  old = poke(first + 8 * 2 + 11, std::byte{0});
  EXPECT_THAT(buffer.guards_intact().message(), HasSubstr("1 bytes into the gap after row 1"));
  poke(first + 8 * 2 + 11, old);
  poke(first + (2 * 8 + 5) * 2 + 4, std::byte{0});
  EXPECT_THAT(buffer.guards_intact().message(), HasSubstr("4 bytes after the last element"));
}

TEST(Buffer, GeometryIsAsAsked) {
  Buffer dense(DType::kE4M3, {4, 6});
  EXPECT_TRUE(dense.view().is_dense());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(dense.view().data) % 128, 0U);
  Buffer odd(DType::kBF16, {2, 3, 5}, {.row_pitch_elems = 9, .offset_elems = 3});
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(odd.view().data) % 128, 6U);
  EXPECT_EQ(odd.view().stride, (std::array<std::int64_t, 3>{27, 9, 1}));
  odd.fill_with([](std::int64_t i) { return static_cast<double>(i); });
  EXPECT_EQ(odd.at(14), 14.0);
  EXPECT_EQ(odd.to_doubles()[29], 29.0);
  EXPECT_EQ(bf16_to_float(odd.as<std::uint16_t>()[27 + 2 * 9 + 4]), 29.0F);
  EXPECT_TRUE(odd.guards_intact());
  EXPECT_THROW(Buffer(DType::kF32, {2, 5}, {.row_pitch_elems = 4}), std::invalid_argument);

  Buffer scales(DType::kF32, {3, 2});
  scales.fill_with([](std::int64_t i) { return static_cast<double>(i); });
  EXPECT_EQ(to_doubles(scales.transposed()), (std::vector<double>{0, 2, 4, 1, 3, 5}));

  Buffer copy = odd.clone();
  EXPECT_NE(copy.view().data, odd.view().data);
  EXPECT_TRUE(copy.unchanged_since(odd.bytes()));
  EXPECT_TRUE(copy.guards_intact());
  copy.set(0, 5);
  EXPECT_EQ(odd.at(0), 0.0);
}

TEST(Buffer, AnEmptyTensorIsAllGuard) {
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{0}, {0, 7}, {7, 0}, {2, 0, 4}}) {
    Buffer buffer(DType::kF32, shape);
    buffer.fill_normal(1);
    EXPECT_NE(buffer.view().data, nullptr);
    EXPECT_TRUE(buffer.guards_intact());
    EXPECT_TRUE(buffer.rows_untouched(0));
    poke(buffer.view().as<std::byte>(), std::byte{0});
    EXPECT_FALSE(buffer.guards_intact());
  }
}

#if defined(__SANITIZE_ADDRESS__)
// What guards cannot see, the sanitizer does: a read past the end.
TEST(BufferDeathTest, AReadOfAGuardTraps) {
  Buffer buffer(DType::kE4M3, {3, 5});
  const volatile std::uint8_t* const data = buffer.as<std::uint8_t>();
  EXPECT_EQ(data[14], 0xFF);
  EXPECT_DEATH(static_cast<void>(data[15]), "AddressSanitizer");
  EXPECT_DEATH(static_cast<void>(data[-8]), "AddressSanitizer");
}
#endif

}  // namespace
}  // namespace sluice::test
