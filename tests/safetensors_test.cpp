// The safetensors reader on crafted bytes: every refusal with its sentence, and what must be accepted.
#include "io/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>

namespace sluice::io {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    dir_ = std::filesystem::path(::testing::TempDir()) / fmt::format("sluice_st_{}_{}", ::getpid(), info->name());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::filesystem::path write(const std::string& bytes) {
    const auto path = dir_ / "t.safetensors";
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  // Length field, header, data.
  static std::string file(const std::string& header, const std::string& data = "") {
    std::string bytes(8, '\0');
    for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
    return bytes + header + data;
  }
  static std::string with_length(std::uint64_t length, const std::string& rest) {
    std::string bytes(8, '\0');
    for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i) & 0xFF);
    return bytes + rest;
  }
  // The message of a refusal; it names the file and comes with the code for wrong content.
  std::string refusal(const std::string& bytes, StatusCode code = StatusCode::kBadData) {
    auto opened = SafetensorsFile::open(write(bytes));
    if (opened.is_ok()) return "accepted";
    EXPECT_EQ(opened.status().code(), code) << opened.status().message();
    EXPECT_THAT(opened.status().message(), HasSubstr("t.safetensors: "));
    return opened.status().message();
  }
  std::shared_ptr<const SafetensorsFile> accept(const std::string& bytes) {
    auto opened = SafetensorsFile::open(write(bytes));
    EXPECT_TRUE(opened.is_ok()) << opened.status().message();
    return opened.is_ok() ? *opened : nullptr;
  }
  std::size_t num_files() const {
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(dir_), std::filesystem::directory_iterator{}));
  }
  std::filesystem::path dir_;
};

TEST_F(SafetensorsTest, Case122LengthBeyondFileOrLimit) {
  EXPECT_THAT(refusal(""), HasSubstr("the file has 0 bytes"));
  EXPECT_THAT(refusal("1234567"), HasSubstr("the file has 7 bytes"));
  EXPECT_THAT(refusal(with_length(10, "")), AllOf(HasSubstr("header length 10"), HasSubstr("0 bytes after")));
  EXPECT_THAT(refusal(with_length(12, "{}  ")),
              AllOf(HasSubstr("header length 12"), HasSubstr("has 4 bytes"), HasSubstr("1073741824")));
  EXPECT_THAT(refusal(with_length(std::uint64_t{1} << 63, "{}")),
              AllOf(HasSubstr("9223372036854775808"), HasSubstr("more than the limit")));
  EXPECT_THAT(refusal(with_length(~std::uint64_t{0}, "{}")), HasSubstr("18446744073709551615"));
  EXPECT_THAT(refusal(with_length(100'000'001, "{}")),
              AllOf(HasSubstr("100000001"), HasSubstr("more than the file holds")));
  EXPECT_THAT(refusal(with_length(0, "")), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(refusal("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"),
              HasSubstr("Git LFS pointer"));
  EXPECT_THAT(refusal(std::string("PK\x03\x04", 4) + "rest of the archive"), HasSubstr("zip archive"));
  EXPECT_THAT(refusal("\x80\x02}q\x01(X\x05\x00"), HasSubstr("pickle"));
  EXPECT_THAT(refusal("<!DOCTYPE html><html>"), HasSubstr("HTML page"));
  EXPECT_THAT(refusal("<html><body>404"), HasSubstr("HTML page"));
}

TEST_F(SafetensorsTest, Case122HeaderAboveTheOldCapIsJudgedByItsContent) {
  // A sparse file: a header of 100,000,001 bytes that is '{' and then NULs. The length is not what is wrong with it.
  const auto path = write(with_length(100'000'001, "{"));
  std::filesystem::resize_file(path, 8 + 100'000'001);
  EXPECT_THAT(SafetensorsFile::open(path).status().message(), HasSubstr("NUL at byte 9"));
}

TEST_F(SafetensorsTest, LengthsThatLookLikeOtherFormatsAreLengths) {
  // 640 is written 0x80 0x02, as a pickle begins.
  std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  header.append(640 - header.size(), ' ');
  EXPECT_NE(accept(file(header, "x")), nullptr);
}

TEST_F(SafetensorsTest, OperatingSystemErrors) {
  EXPECT_EQ(SafetensorsFile::open(dir_ / "absent.safetensors").status().code(), StatusCode::kNotFound);
  EXPECT_THAT(SafetensorsFile::open(dir_ / "absent.safetensors").status().message(),
              HasSubstr("absent.safetensors: No such file"));
  EXPECT_THAT(SafetensorsFile::open(dir_).status().message(), HasSubstr("not a regular file"));
}

TEST_F(SafetensorsTest, JsonErrorsNameTheByte) {
  // '}' is missing: the error is at the end, byte 8 + 9.
  EXPECT_THAT(refusal(file(R"({"a": tru)")), AllOf(HasSubstr("JSON error at byte 1"), HasSubstr("invalid literal")));
  EXPECT_THAT(refusal(file("{\"a\xff\":{}}")), HasSubstr("JSON error at byte 12"));
  EXPECT_THAT(refusal(file("{}{}")), HasSubstr("JSON error at byte"));
  EXPECT_THAT(refusal(file("[]")), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(refusal(file(" {}")), HasSubstr("does not begin with '{'"));
  EXPECT_THAT(refusal(file(std::string("{}\0\0", 4))), HasSubstr("NUL at byte 10"));
  EXPECT_THAT(refusal(file("{" + std::string(100000, '['))), Not(HasSubstr("accepted")));
}

TEST_F(SafetensorsTest, StructureOfTheHeader) {
  const auto one = [](const std::string& inner) { return file("{\"a\":" + inner + "}", "abcd"); };
  EXPECT_THAT(refusal(one("3")), HasSubstr("'a' is a number, expected an object"));
  EXPECT_THAT(refusal(one("[]")), HasSubstr("'a' is an array, expected an object"));
  EXPECT_THAT(refusal(one("null")), HasSubstr("'a' is null"));
  EXPECT_THAT(refusal(one("{}")), HasSubstr("tensor 'a' lacks dtype"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","data_offsets":[0,4]})")), HasSubstr("tensor 'a' lacks shape"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[4]})")), HasSubstr("tensor 'a' lacks data_offsets"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1})")), HasSubstr("unknown key 'x'"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]})")),
              HasSubstr("the key 'dtype' twice"));
  EXPECT_THAT(refusal(one(R"({"dtype":8,"shape":[4],"data_offsets":[0,4]})")), HasSubstr("dtype is a number"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":4,"data_offsets":[0,4]})")), HasSubstr("tensor 'a'"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":["4"],"data_offsets":[0,4]})")), HasSubstr("tensor 'a'"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[[4]],"data_offsets":[0,4]})")), HasSubstr("tensor 'a'"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[4.0],"data_offsets":[0,4]})")), HasSubstr("no 64-bit integer"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[-4],"data_offsets":[0,4]})")), HasSubstr("negative extent -4"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[4],"data_offsets":[-1,4]})")), HasSubstr("negative offset -1"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[4],"data_offsets":[4]})")),
              HasSubstr("1 data_offsets, expected 2"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4,4]})")),
              HasSubstr("3 data_offsets, expected 2"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[99999999999999999999999],"data_offsets":[0,4]})")),
              HasSubstr("no 64-bit integer"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,4]})")),
              HasSubstr("above 2^63-1"));
  EXPECT_THAT(refusal(one(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]})")),
              HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]})")),
              HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[0],"data_offsets":[4,0]})")),
              HasSubstr("begins at 4 after its end 0"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[3],"data_offsets":[0,4]})")),
              HasSubstr("takes 3 bytes, but its offsets [0,4] span 4"));
  EXPECT_THAT(refusal(one(R"({"dtype":"U8","shape":[5],"data_offsets":[0,5]})")),
              HasSubstr("ends at byte 5 of the data, which has 4"));
  const std::string twice =
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})";
  EXPECT_THAT(refusal(file(twice, "abcd")), HasSubstr("tensor 'a' appears twice"));
}

TEST_F(SafetensorsTest, Case124Overlap) {
  const auto two = [](int b0, int e0, int b1, int e1, const std::string& data) {
    return file(fmt::format(R"({{"k_proj":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}},)"
                            R"("v_proj":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}}})",
                            e0 - b0, b0, e0, e1 - b1, b1, e1),
                data);
  };
  EXPECT_THAT(refusal(two(0, 4, 0, 4, "abcd")),
              AllOf(HasSubstr("'k_proj'"), HasSubstr("'v_proj'"), HasSubstr("overlap")));
  EXPECT_THAT(refusal(two(0, 4, 2, 6, "abcdef")), HasSubstr("overlap"));
  EXPECT_THAT(refusal(two(0, 6, 2, 4, "abcdef")), HasSubstr("overlap"));
  // Disjoint, listed against the order of the data.
  const auto ok = accept(two(4, 8, 0, 4, "abcdefgh"));
  ASSERT_NE(ok, nullptr);
  EXPECT_EQ(std::memcmp(ok->data(*ok->find("k_proj")), "efgh", 4), 0);
  EXPECT_EQ(std::memcmp(ok->data(*ok->find("v_proj")), "abcd", 4), 0);
}

TEST_F(SafetensorsTest, Case125GapsTrailingBytesUnaligned) {
  // bf16 1.0, then an f32 1.0 at byte 2: legal, and misaligned for a float load.
  const auto ok = accept(file(
      R"({"b":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"f":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
      std::string("\x80\x3f\x00\x00\x80\x3f", 6)));
  ASSERT_NE(ok, nullptr);
  EXPECT_EQ(decode_bf16(ok->data(*ok->find("b"))), 1.0f);
  EXPECT_EQ(decode_f32(ok->data(*ok->find("f"))), 1.0f);
  const std::string gap =
      R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}})";
  EXPECT_THAT(refusal(file(gap, "aaaa....bbbb")), HasSubstr("data bytes [4,8] before tensor 'b' belong to no tensor"));
  const std::string one = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  EXPECT_THAT(refusal(file(one, "aaaa" + std::string(16, '.'))), HasSubstr("16 bytes after the last tensor"));
  EXPECT_THAT(refusal(file(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", ".aaaa")),
              HasSubstr("data bytes [0,1] before"));
}

TEST_F(SafetensorsTest, Case126UnknownDTypeNeverSkipsTheChecks) {
  EXPECT_THAT(
      refusal(file(R"({"a":{"dtype":"X99","shape":[1],"data_offsets":[9223372036854775808,9223372036854775812]}})",
                   "abcd")),
      HasSubstr("unknown dtype 'X99'"));
  EXPECT_THAT(
      refusal(file(R"({"a":{"shape":[1],"data_offsets":[9223372036854775808,9223372036854775812],"dtype":"X99"}})",
                   "abcd")),
      HasSubstr("above 2^63-1"));
  EXPECT_THAT(refusal(file(R"({"a":{"dtype":"","shape":[1],"data_offsets":[0,4]}})", "abcd")),
              HasSubstr("unknown dtype ''"));
}

TEST_F(SafetensorsTest, Case42FnuzAndOtherKnownTypesAreRefusedByName) {
  for (const char* name : {"F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2", "C64"}) {
    EXPECT_THAT(refusal(file(fmt::format(R"({{"a":{{"dtype":"{}","shape":[1],"data_offsets":[0,1]}}}})", name), "x")),
                HasSubstr(fmt::format("tensor 'a' has the unsupported dtype '{}'", name)));
  }
}

TEST_F(SafetensorsTest, Case128ReservedNameAndMetadata) {
  const auto target = dir_ / "out.safetensors";
  const float value = 1.0f;
  const Status refused = write_safetensors(target, {{"__metadata__", DType::kF32, {1}, {}, &value}});
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("reserved"));
  EXPECT_EQ(num_files(), 0u);

  ASSERT_TRUE(write_safetensors(target, {}, {{"format", "pt"}, {"k\"ey", "v\\al"}}).is_ok());
  auto opened = SafetensorsFile::open(target);
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  EXPECT_TRUE((*opened)->tensors().empty());
  EXPECT_EQ((*opened)->metadata().at("k\"ey"), "v\\al");

  EXPECT_NE(accept(file("{}")), nullptr);
  EXPECT_NE(accept(file(R"({"__metadata__":{}})")), nullptr);
  EXPECT_THAT(refusal(file(R"({"__metadata__":{"a":1}})")),
              HasSubstr("__metadata__['a'] is a number, expected a string"));
  EXPECT_THAT(refusal(file(R"({"__metadata__":{"a":{}}})")), HasSubstr("expected a string"));
  EXPECT_THAT(refusal(file(R"({"__metadata__":{"a":["b"]}})")), HasSubstr("expected a string"));
  EXPECT_THAT(refusal(file(R"({"__metadata__":"a"})")), HasSubstr("expected an object"));
  EXPECT_THAT(refusal(file(R"({"__metadata__":{"a":"1","a":"2"}})")), HasSubstr("the key 'a' twice"));
  EXPECT_THAT(refusal(file(R"({"__metadata__":{},"__metadata__":{}})")), HasSubstr("appears twice"));
}

TEST_F(SafetensorsTest, Case129EmptyTensorsAndScalars) {
  const std::string first = R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)";
  const auto empty = accept(file(first + R"("e":{"dtype":"F8_E4M3","shape":[0],"data_offsets":[8,8]}})", "aaaaaaaa"));
  ASSERT_NE(empty, nullptr);
  EXPECT_EQ(empty->find("e")->shape, std::vector<std::int64_t>{0});
  EXPECT_NE(accept(file(first + R"("e":{"dtype":"F32","shape":[0,9223372036854775807,9],"data_offsets":[0,0]}})",
                        "aaaaaaaa")),
            nullptr);
  EXPECT_THAT(refusal(file(first + R"("e":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}})", "aaaaaaaa")),
              HasSubstr("overlap"));
  EXPECT_THAT(refusal(file(first + R"("e":{"dtype":"U8","shape":[1],"data_offsets":[8,8]}})", "aaaaaaaa")),
              HasSubstr("takes 1 bytes"));
  const auto scalar =
      accept(file(R"({"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", std::string("\x00\x00\x80\x3f", 4)));
  ASSERT_NE(scalar, nullptr);
  EXPECT_EQ(decode_f32(scalar->data(*scalar->find("s"))), 1.0f);
}

TEST_F(SafetensorsTest, Case130DecodeIsByShifts) {
  const std::array<std::byte, 5> f32 = {std::byte{9}, std::byte{0}, std::byte{0}, std::byte{0x80}, std::byte{0x3F}};
  EXPECT_EQ(decode_f32(f32.data() + 1), 1.0f);
  const std::array<std::byte, 3> bf16 = {std::byte{9}, std::byte{0x80}, std::byte{0x3F}};
  EXPECT_EQ(decode_bf16(bf16.data() + 1), 1.0f);
}

TEST_F(SafetensorsTest, EveryDTypeRoundTrips) {
  std::vector<TensorToWrite> tensors;
  std::vector<std::string> data(kNumDTypes);
  for (int i = 0; i < kNumDTypes; ++i) {
    const DType dtype = static_cast<DType>(i);
    ASSERT_EQ(parse_dtype(dtype_name(dtype)), dtype);
    data[static_cast<std::size_t>(i)] =
        std::string(static_cast<std::size_t>(3 * size_bytes(dtype)), static_cast<char>('a' + i));
    tensors.push_back({fmt::format("t{}", i), dtype, {3, 1}, {}, data[static_cast<std::size_t>(i)].data()});
  }
  const auto path = dir_ / "all.safetensors";
  ASSERT_TRUE(write_safetensors(path, tensors).is_ok());
  auto opened = SafetensorsFile::open(path);
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  for (int i = 0; i < kNumDTypes; ++i) {
    const TensorEntry* entry = (*opened)->find(fmt::format("t{}", i));
    ASSERT_NE(entry, nullptr);
    EXPECT_EQ(entry->dtype, static_cast<DType>(i));
    EXPECT_EQ(entry->shape, (std::vector<std::int64_t>{3, 1}));
    const auto& expected = data[static_cast<std::size_t>(i)];
    EXPECT_EQ(std::memcmp((*opened)->data(*entry), expected.data(), expected.size()), 0);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>((*opened)->data(*entry)) %
                  static_cast<std::uintptr_t>(size_bytes(entry->dtype)),
              0u);
    (*opened)->drop(*entry);
    EXPECT_EQ(std::memcmp((*opened)->data(*entry), expected.data(), expected.size()), 0)
        << "dropped pages are read anew";
  }
  EXPECT_EQ((*opened)->find("t"), nullptr);
  EXPECT_EQ((*opened)->find("t99"), nullptr);
}

TEST_F(SafetensorsTest, WriterLeavesNothingBehindOnFailure) {
  const auto path = dir_ / "w.safetensors";
  const auto produce = [](std::size_t bytes) {
    return [bytes](const std::function<Status(std::span<const std::byte>)>& sink) {
      const std::vector<std::byte> piece(bytes);
      return sink(piece);
    };
  };
  std::ofstream(path) << "old";
  EXPECT_THAT(write_safetensors(path, {{"a", DType::kU8, {4}, produce(3)}}).message(),
              HasSubstr("produced 3 of its 4 bytes"));
  EXPECT_THAT(write_safetensors(path, {{"a", DType::kU8, {4}, produce(5)}}).message(),
              HasSubstr("more than its 4 bytes"));
  EXPECT_THAT(write_safetensors(
                  path, {{"a", DType::kU8, {4}, [](const auto&) { return Status(StatusCode::kInternal, "stop"); }}})
                  .message(),
              HasSubstr("stop"));
  EXPECT_THAT(write_safetensors(path, {{"a", DType::kU8, {4}}}).message(), HasSubstr("neither data nor a producer"));
  EXPECT_THAT(write_safetensors(path, {{"a", DType::kU8, {-4}, produce(4)}}).message(), HasSubstr("negative extent"));
  EXPECT_THAT(
      write_safetensors(path, {{"a", DType::kU8, {4}, produce(4)}, {"a", DType::kU8, {4}, produce(4)}}).message(),
      HasSubstr("'a' is given twice"));
  EXPECT_THAT(write_safetensors(path, {{"a\xff", DType::kU8, {4}, produce(4)}}).message(), HasSubstr("UTF-8"));
  EXPECT_THAT(write_safetensors(dir_ / "no" / "w.safetensors", {}).message(), HasSubstr("cannot create the file"));
  EXPECT_EQ(num_files(), 1u);
  EXPECT_EQ(std::filesystem::file_size(path), 3u) << "the old file is untouched";
  ASSERT_TRUE(write_safetensors(path, {{"a", DType::kU8, {4}, produce(4)}}).is_ok());
  EXPECT_EQ(num_files(), 1u);
  EXPECT_TRUE(SafetensorsFile::open(path).is_ok());
}

TEST_F(SafetensorsTest, Case122ManyTensorsCostTheirEntriesOnly) {
  // The shape of a header of a large checkpoint; 100,000 here, 1.3 million in the field.
  std::string header = "{";
  const int count = 100'000;
  for (int i = 0; i < count; ++i) {
    header += fmt::format(
        R"({}"model.layers.{}.mlp.experts.{}.gate_proj.weight":{{"dtype":"BF16","shape":[2,2],"data_offsets":[{},{}]}})",
        i > 0 ? "," : "", i / 256, i % 256, 8 * i, 8 * i + 8);
  }
  header += "}";
  const auto path = write(file(header));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) + 8 * static_cast<std::size_t>(count));
  auto opened = SafetensorsFile::open(path);
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  EXPECT_EQ((*opened)->tensors().size(), static_cast<std::size_t>(count));
  EXPECT_NE((*opened)->find("model.layers.300.mlp.experts.17.gate_proj.weight"), nullptr);
}

TEST_F(SafetensorsTest, TruncationsAndFlippedBytesNeverCrash) {
  const std::string good = file(
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}})",
      "123456789");
  for (std::size_t n = 0; n < good.size(); ++n)
    EXPECT_FALSE(SafetensorsFile::open(write(good.substr(0, n))).is_ok()) << n;
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (int bit : {0, 2, 5, 7}) {
      std::string bytes = good;
      bytes[i] = static_cast<char>(bytes[i] ^ (1 << bit));
      auto opened = SafetensorsFile::open(write(bytes));
      if (!opened.is_ok()) continue;
      for (const TensorEntry& t : (*opened)->tensors()) {  // what was accepted can be read
        for (std::int64_t k = t.begin; k < t.end; ++k) (void)std::to_integer<int>((*opened)->data(t)[k - t.begin]);
      }
    }
  }
}

}  // namespace
}  // namespace sluice::io
