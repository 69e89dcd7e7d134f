// Which files of a folder count, and that an index and its shards must agree.
#include "io/catalog.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "harness/checkpoint_files.h"

namespace sluice::io {
namespace {

using test::FileTensors;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class CatalogTest : public ::testing::Test {
 protected:
  // Every other tensor in each of two shards.
  void write_shards() {
    FileTensors shard[2];
    std::size_t i = 0;
    for (const auto& [name, t] : tensors_) {
      weight_map_[name] = i % 2 == 0 ? "a.safetensors" : "b.safetensors";
      shard[i++ % 2][name] = t;
    }
    test::write_file(folder_ / "a.safetensors", shard[0]);
    test::write_file(folder_ / "b.safetensors", shard[1]);
  }
  Status open_status() { return Catalog::open(folder_.path()).status(); }
  // Every tensor, with the bytes of `tensors_`.
  void expect_tensors() {
    auto catalog = Catalog::open(folder_.path());
    ASSERT_TRUE(catalog.is_ok()) << catalog.status().message();
    EXPECT_EQ(catalog->num_tensors(), tensors_.size());
    for (const auto& [name, t] : tensors_) {
      const TensorRef ref = catalog->find(name);
      ASSERT_TRUE(static_cast<bool>(ref)) << name;
      EXPECT_EQ(std::memcmp(ref.data(), t.bytes.data(), t.bytes.size()), 0) << name;
    }
    EXPECT_FALSE(static_cast<bool>(catalog->find("absent")));
    EXPECT_EQ(catalog->with_prefix("model.layers.1.mlp.experts.2.").size(), 6u);
    EXPECT_EQ(catalog->with_prefix("model.layers.1.mlp.experts.").size(), 24u);
    EXPECT_TRUE(catalog->with_prefix("x").empty());
  }
  test::TempFolder folder_;
  FileTensors tensors_ = test::dsv3_tensors();
  std::map<std::string, std::string> weight_map_;
};

TEST_F(CatalogTest, IndexAndShards) {
  write_shards();
  test::write_index(folder_.path(), weight_map_);
  expect_tensors();
}

TEST_F(CatalogTest, Case132IndexNamesWhatIsNotThere) {
  write_shards();
  test::write_index(folder_.path(), weight_map_);
  std::filesystem::remove(folder_ / "b.safetensors");
  EXPECT_THAT(open_status().message(), HasSubstr("1 of its 2 files is not there: b.safetensors"));
  EXPECT_EQ(open_status().code(), StatusCode::kNotFound);
  write_shards();
  auto map = weight_map_;
  map["model.layers.9.mlp.gate.weight"] = "a.safetensors";
  test::write_index(folder_.path(), map);
  EXPECT_THAT(
      open_status().message(),
      HasSubstr("1 tensor(s) are not in the file the index names: model.layers.9.mlp.gate.weight (of a.safetensors)"));
  for (const char* name :
       {"../x.safetensors", "/etc/x.safetensors", "sub/../../x.safetensors", "..", "", "a\\..\\x.safetensors"}) {
    map = weight_map_;
    map["lm_head.weight"] = name;
    test::write_index(folder_.path(), map);
    EXPECT_THAT(open_status().message(),
                HasSubstr(fmt::format("the file name '{}' leads out of the checkpoint's folder", name)));
  }
}

TEST_F(CatalogTest, Case133IndexDecidesOverStrayFiles) {
  write_shards();
  FileTensors stray = tensors_;
  for (auto& [name, t] : stray) std::fill(t.bytes.begin(), t.bytes.end(), std::byte{0x55});
  test::write_file(folder_ / "stray-4bit.safetensors", stray);
  EXPECT_THAT(open_status().message(), AllOf(HasSubstr("is in "), HasSubstr("no index says which counts")));
  test::write_index(folder_.path(), weight_map_);
  expect_tensors();
}

TEST_F(CatalogTest, SeveralFilesWithoutAnIndexOrASingleFile) {
  write_shards();
  EXPECT_TRUE(open_status().is_ok()) << open_status().message();
  // model.safetensors is the model, whatever lies beside it.
  test::write_file(folder_ / "model.safetensors", tensors_);
  EXPECT_TRUE(open_status().is_ok()) << open_status().message();
  expect_tensors();
  auto one = Catalog::open(folder_ / "model.safetensors");
  ASSERT_TRUE(one.is_ok()) << one.status().message();
  EXPECT_EQ(one->num_tensors(), tensors_.size());
  auto half = Catalog::open(folder_ / "a.safetensors");
  ASSERT_TRUE(half.is_ok()) << half.status().message();
  EXPECT_EQ(half->num_tensors(), (tensors_.size() + 1) / 2);
}

TEST_F(CatalogTest, BrokenIndexes) {
  write_shards();
  const auto refusal = [&](const std::string& text) {
    test::write_text(folder_ / "model.safetensors.index.json", text);
    return open_status().message();
  };
  EXPECT_THAT(refusal("{"), HasSubstr("index.json: JSON error at byte"));
  EXPECT_THAT(refusal("[]"), HasSubstr("the index is an array, expected an object"));
  EXPECT_THAT(refusal("{}"), HasSubstr("there is no 'weight_map'"));
  EXPECT_THAT(refusal(R"({"weight_map":[]})"), HasSubstr("'weight_map' is an array, expected an object"));
  EXPECT_THAT(refusal(R"({"weight_map":null})"), HasSubstr("'weight_map' is null"));
  EXPECT_THAT(refusal(R"({"weight_map":{"x":1}})"), HasSubstr("weight_map['x'] is a number, expected a file name"));
  EXPECT_THAT(refusal(R"({"weight_map":{"x":{"y":"a.safetensors"}}})"), HasSubstr("weight_map['x'] is an object"));
  EXPECT_THAT(refusal(R"({"weight_map":{"lm_head.weight":"a.safetensors","lm_head.weight":"a.safetensors"}})"),
              Not(IsEmpty()));
  EXPECT_THAT(refusal(R"({"metadata":{"weight_map":{"x":1}},"weight_map":{}})"), Not(HasSubstr("weight_map['x']")));
}

}  // namespace
}  // namespace sluice::io
