#include "io/npy.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/checkpoint_files.h"

namespace sluice::io {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class NpyTest : public ::testing::Test {
 protected:
  static std::string file(int version, const std::string& header, const std::string& data) {
    std::string text = "\x93NUMPY" + std::string(1, static_cast<char>(version)) + std::string(1, '\0');
    for (int i = 0; i < (version == 1 ? 2 : 4); ++i) text += static_cast<char>(header.size() >> (8 * i) & 0xFF);
    return text + header + data;
  }
  static std::string dict(const std::string& descr, const std::string& shape, const char* fortran = "False") {
    return fmt::format("{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}   \n", descr, fortran, shape);
  }
  Result<NpyArray> read(const std::string& bytes) {
    test::write_text(folder_ / "x.npy", bytes);
    return read_npy(folder_ / "x.npy");
  }
  std::string refusal(const std::string& bytes) {
    auto array = read(bytes);
    return array.is_ok() ? "accepted" : array.status().message();
  }
  test::TempFolder folder_;
};

TEST_F(NpyTest, EveryVersionAndDtype) {
  for (int version : {1, 2, 3}) {
    for (const auto& [descr, dtype, bytes] :
         {std::tuple("'<f4'", DType::kF32, 4), std::tuple("'<f2'", DType::kF16, 2),
          std::tuple("'<V2'", DType::kBF16, 2), std::tuple("'|V2'", DType::kBF16, 2),
          std::tuple("'bfloat16'", DType::kBF16, 2), std::tuple("'<i4'", DType::kI32, 4),
          std::tuple("'<i8'", DType::kI64, 8), std::tuple("'|u1'", DType::kU8, 1),
          std::tuple("\"<f8\"", DType::kF64, 8)}) {
      const std::string data(static_cast<std::size_t>(6 * bytes), 'x');
      auto array = read(file(version, dict(descr, "(2, 3)"), data));
      ASSERT_TRUE(array.is_ok()) << array.status().message();
      EXPECT_EQ(array->dtype, dtype);
      EXPECT_EQ(array->shape, (std::vector<std::int64_t>{2, 3}));
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(array->data.data()), array->data.size()), data);
    }
  }
}

TEST_F(NpyTest, Shapes) {
  const auto shape_of = [&](const std::string& shape, std::size_t elements) {
    auto array = read(file(1, dict("'<f4'", shape), std::string(elements * 4, '\0')));
    EXPECT_TRUE(array.is_ok()) << array.status().message();
    return array.is_ok() ? array->shape : std::vector<std::int64_t>{-1};
  };
  EXPECT_EQ(shape_of("()", 1), std::vector<std::int64_t>{});
  EXPECT_EQ(shape_of("(5,)", 5), std::vector<std::int64_t>{5});
  EXPECT_EQ(shape_of("(2,3,1)", 6), (std::vector<std::int64_t>{2, 3, 1}));
  EXPECT_EQ(shape_of("(0, 7)", 0), (std::vector<std::int64_t>{0, 7}));
  EXPECT_EQ(shape_of("(2L, 3L)", 6), (std::vector<std::int64_t>{2, 3}));
}

TEST_F(NpyTest, Refusals) {
  EXPECT_EQ(read_npy(folder_ / "absent.npy").status().code(), StatusCode::kNotFound);
  EXPECT_THAT(refusal(""), HasSubstr("no .npy file (0 bytes"));
  EXPECT_THAT(refusal("PK\x03\x04 an npz archive"), HasSubstr("no NumPy magic"));
  EXPECT_THAT(refusal(file(4, dict("'<f4'", "(1,)"), "xxxx")), HasSubstr("version 4.0 is not known"));
  EXPECT_THAT(refusal("\x93NUMPY" + std::string("\x01\x00\xFF\xFF{", 5)),
              HasSubstr("header length 65535 does not fit"));
  EXPECT_THAT(refusal("\x93NUMPY" + std::string("\x02\x00\xFF\xFF\xFF\xFF", 6)), HasSubstr("header length 4294967295"));
  EXPECT_THAT(refusal("\x93NUMPY" + std::string("\x01\x00\x05", 3)), HasSubstr("does not fit"));
  EXPECT_THAT(refusal(file(1, dict("'<f4'", "(2, 3)", "True"), std::string(24, 'x'))), HasSubstr("Fortran order"));
  EXPECT_THAT(refusal(file(1, dict("'>f4'", "(1,)"), "xxxx")),
              AllOf(HasSubstr("dtype '>f4' is not supported"), HasSubstr("big-endian")));
  EXPECT_THAT(refusal(file(1, dict("'|O'", "(1,)"), "xxxx")), HasSubstr("dtype '|O' is not supported"));
  EXPECT_THAT(refusal(file(1, dict("[('a', '<f4')]", "(1,)"), "xxxx")), HasSubstr("records are not supported"));
  EXPECT_THAT(refusal(file(1, dict("'<f4'", "(2, 3)"), std::string(23, 'x'))),
              HasSubstr("f32[2,3] takes 24 bytes, but the file holds 23"));
  EXPECT_THAT(refusal(file(1, dict("'<f4'", "(2, 3)"), std::string(25, 'x'))), HasSubstr("but the file holds 25"));
  EXPECT_THAT(refusal(file(1, dict("'<f4'", "(-1,)"), "")), HasSubstr("expected a tuple of sizes"));
  EXPECT_THAT(refusal(file(1, dict("'<f4'", "(99999999999999999999,)"), "")), HasSubstr("expected a tuple of sizes"));
  EXPECT_THAT(refusal(file(1, dict("'<f4'", "(4611686018427387904, 4)"), "")), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(refusal(file(1, "{'descr': '<f4', 'fortran_order': False}", "")), HasSubstr("expected all of"));
  EXPECT_THAT(refusal(file(1, "{'descr': '<f4', 'descr': '<f4'}", "")), HasSubstr("expected one each of"));
  EXPECT_THAT(refusal(file(1, "{'descr': '<f4', 'x': 1}", "")), HasSubstr("expected one each of"));
  EXPECT_THAT(refusal(file(1, dict("'<f4'", "(1,)") + "z", "xxxx")), HasSubstr("expected the end"));
  EXPECT_THAT(refusal(file(1, "", "")), HasSubstr("expected a '{'"));
}

}  // namespace
}  // namespace sluice::io
