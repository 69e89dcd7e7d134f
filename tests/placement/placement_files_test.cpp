// Files of loads and placements: what is written is read back, and nothing else is believed.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <fstream>

#include "harness/checkpoint_files.h"
#include "sluice/placement_plan.h"

namespace sluice::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string bytes_of(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

std::string little_endian(std::uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFF);
  return bytes;
}

std::string npy(const std::string& descr, bool fortran, const std::string& shape, const std::string& data) {
  const std::string header =
      fmt::format("{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}\n", descr, fortran ? "True" : "False", shape);
  return std::string("\x93NUMPY\x01\x00", 8) + little_endian(header.size()).substr(0, 2) + header + data;
}

class PlacementFiles : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  // The message of a refusal; the file is named in it.
  template <class T>
  std::string refusal(Result<T> (*read)(const std::filesystem::path&), const std::string& text,
                      const std::string& name = "f.json") {
    write_text(path(name), text);
    const Result<T> result = read(path(name));
    if (result.is_ok()) return "accepted";
    EXPECT_EQ(result.status().code(), StatusCode::kBadData);
    EXPECT_THAT(result.status().message(), HasSubstr(path(name)));
    return result.status().message();
  }
  std::string loads_refusal(const std::string& text) { return refusal(&read_loads, text); }
  std::string placements_refusal(const std::string& text) { return refusal(&read_placements, text); }
  TempFolder folder_;
};

constexpr const char* kLoads =
    R"({"format": "sluice-expert-load", "version": 1, "num_experts": 2, "layers": [{"layer": 3, "tokens": [5, 0.5]}]})";
constexpr const char* kPlacement = R"({"format": "sluice-placement", "version": 1, "num_experts": 3, "num_ranks": 2,
  "num_slots": 4, "layers": [{"layer": 3, "ranks": [[0, 2], [1, 2]]}, {"layer": 5, "ranks": [[0, 1, 2], [0]]}]})";

std::string changed(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST_F(PlacementFiles, LoadsAreReadBackExactly) {
  const ExpertLoads loads{3, {0, 4, 1000}, {0, 1, 9007199254740992.0, 0.1, 1e-300, 2.5, 7, 3, 1.0 / 3}};
  ASSERT_TRUE(write_loads(path("l.json"), loads).is_ok());
  EXPECT_EQ(folder_.num_files(), 1u);  // no temporary file is left
  const Result<ExpertLoads> back = read_loads(path("l.json"));
  ASSERT_TRUE(back.is_ok()) << back.status().message();
  EXPECT_EQ(back->num_experts, 3);
  EXPECT_EQ(back->layers, loads.layers);
  EXPECT_EQ(back->tokens, loads.tokens);
  // Counts are written as counts.
  EXPECT_THAT(bytes_of(path("l.json")), HasSubstr("[0,1,9007199254740992]"));
}

TEST_F(PlacementFiles, LoadsByHandInAnyOrderOfLayers) {
  write_text(path("l.json"), kLoads);
  const Result<ExpertLoads> loads = read_loads(path("l.json"));
  ASSERT_TRUE(loads.is_ok()) << loads.status().message();
  EXPECT_THAT(loads->tokens, ElementsAre(5, 0.5));
  write_text(path("l.json"), R"({"layers": [{"tokens": [1, 2], "layer": 9}, {"layer": 2, "tokens": [3, 4]}],
    "num_experts": 2, "version": 1, "format": "sluice-expert-load"})");
  const Result<ExpertLoads> two = read_loads(path("l.json"));
  ASSERT_TRUE(two.is_ok()) << two.status().message();
  EXPECT_THAT(two->layers, ElementsAre(2, 9));
  EXPECT_THAT(two->tokens, ElementsAre(3, 4, 1, 2));
}

TEST_F(PlacementFiles, PlacementsAreReadBackExactly) {
  const std::vector<LayerPlacement> written = {{7, {3, {2, 0, 1, 2}, {0, 1, 4}}}, {2, {3, {0, 1, 2, 2}, {0, 4, 4}}}};
  ASSERT_TRUE(write_placements(path("p.json"), written).is_ok());
  EXPECT_EQ(folder_.num_files(), 1u);
  const auto back = read_placements(path("p.json"));
  ASSERT_TRUE(back.is_ok()) << back.status().message();
  ASSERT_EQ(back->size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ((*back)[i].layer, written[i].layer);
    EXPECT_EQ((*back)[i].placement.num_experts, 3);
    EXPECT_EQ((*back)[i].placement.slot_expert, written[i].placement.slot_expert);
    EXPECT_EQ((*back)[i].placement.rank_begin, written[i].placement.rank_begin);
  }
}

TEST_F(PlacementFiles, ThePlanOfAServedModelSurvivesItsFile) {
  ExpertLoads loads;
  loads.num_experts = 256;
  for (std::int64_t layer = 3; layer < 6; ++layer) {
    loads.layers.push_back(layer);
    for (int e = 0; e < 256; ++e) loads.tokens.push_back(std::floor(1e5 / (1 + (e * 37 + layer * 11) % 256)));
  }
  PlacementRequest request;
  request.num_ranks = 32;
  request.num_redundant = 32;
  request.num_nodes = 4;
  request.num_groups = 8;
  const auto plans = plan_placements(loads, request);
  ASSERT_TRUE(plans.is_ok()) << plans.status().message();
  ASSERT_TRUE(write_placements(path("p.json"), *plans).is_ok());
  const auto back = read_placements(path("p.json"));
  ASSERT_TRUE(back.is_ok()) << back.status().message();
  for (std::size_t i = 0; i < plans->size(); ++i) {
    EXPECT_EQ((*back)[i].placement.slot_expert, (*plans)[i].placement.slot_expert);
    EXPECT_EQ((*back)[i].placement.rank_begin, (*plans)[i].placement.rank_begin);
  }
}

TEST_F(PlacementFiles, WhatIsNoPlacementIsNotWritten) {
  const std::vector<LayerPlacement> good = {{1, {2, {0, 1}, {0, 1, 2}}}};
  const auto refused = [&](std::vector<LayerPlacement> placements, const std::string& why) {
    EXPECT_THAT(write_placements(path("p.json"), placements).message(), AllOf(HasSubstr("p.json"), HasSubstr(why)));
  };
  refused({}, "no placement");
  refused({{1, {2, {0, 0}, {0, 1, 2}}}}, "layer 1: placement: expert 1 is in no slot");
  refused({good[0], good[0]}, "layer 1 is there twice");
  refused({{-1, good[0].placement}}, "number -1");
  refused({good[0], {2, {2, {0, 1, 1}, {0, 1, 3}}}},
          "layer 2 has 2 experts, 2 ranks and 3 slots, layer 1 has 2, 2 and 2");
  EXPECT_EQ(folder_.num_files(), 0u);
  EXPECT_EQ(write_placements(path("none/p.json"), good).code(), StatusCode::kIoError);
  EXPECT_THAT(write_loads(path("l.json"), {2, {1}, {1, -1}}).message(), HasSubstr("l.json: expert loads: layer 1"));
  EXPECT_EQ(folder_.num_files(), 0u);
}

TEST_F(PlacementFiles, NpyLoadsOfEveryNumberType) {
  const auto expect = [&](const std::string& descr, const std::string& shape, const std::string& data,
                          std::vector<double> tokens, std::vector<std::int64_t> layers) {
    write_text(path("l.npy"), npy(descr, false, shape, data));
    const Result<ExpertLoads> loads = read_loads(path("l.npy"));
    ASSERT_TRUE(loads.is_ok()) << loads.status().message();
    EXPECT_EQ(loads->tokens, tokens) << descr;
    EXPECT_EQ(loads->layers, layers);
  };
  expect("<i8", "(2, 2)", little_endian(1) + little_endian(2) + little_endian(3) + little_endian(1ull << 40),
         {1, 2, 3, std::ldexp(1.0, 40)}, {0, 1});
  expect("<i4", "(2,)", std::string("\x05\0\0\0\x06\0\0\0", 8), {5, 6}, {0});
  expect("<u2", "(1, 2)", std::string("\xFF\xFF\x01\0", 4), {65535, 1}, {0});
  expect("<f4", "(1, 2)", std::string("\0\0\x80\x3F\0\0\0\x3F", 8), {1, 0.5}, {0});
  expect("<f8", "(1, 1)", std::string("\0\0\0\0\0\0\xF8\x3F", 8), {1.5}, {0});
}

TEST_F(PlacementFiles, NpyLoadsThatAreNoneAreRefused) {
  const auto refused = [&](const std::string& bytes) { return refusal(&read_loads, bytes, "l.npy"); };
  EXPECT_THAT(refused(npy("<f4", false, "(1, 1, 1)", std::string(4, '\0'))), HasSubstr("found 3 axes"));
  EXPECT_THAT(refused(npy("<f4", false, "()", std::string(4, '\0'))), HasSubstr("found 0 axes"));
  EXPECT_THAT(refused(npy("<f4", false, "(0, 4)", "")), HasSubstr("0 layers of 4 experts"));
  EXPECT_THAT(refused(npy("<i8", false, "(1,)", std::string(8, '\xFF'))), HasSubstr("expert 0 has a load of -1"));
  EXPECT_THAT(refused(npy("<f4", false, "(1,)", std::string("\0\0\xC0\x7F", 4))), HasSubstr("a load of nan"));
  EXPECT_THAT(refused(npy("<f2", false, "(1,)", std::string(2, '\0'))), HasSubstr("integers, f32 or f64, found f16"));
  EXPECT_THAT(refused(npy("<f4", true, "(1,)", std::string(4, '\0'))), HasSubstr("Fortran order"));
  EXPECT_THAT(refused(npy("|u1", false, "(5000, 1)", std::string(5000, '\1'))), HasSubstr("5000 layers"));
  EXPECT_THAT(refused("nothing"), HasSubstr("no .npy file"));
}

TEST_F(PlacementFiles, LoadsThatAreNoneAreRefusedByFileAndField) {
  const auto with = [&](const std::string& from, const std::string& to) {
    return loads_refusal(changed(kLoads, from, to));
  };
  EXPECT_EQ(with("5, 0.5", "5, 1"), "accepted");
  EXPECT_THAT(with("sluice-expert-load", "sluice-placement"),
              HasSubstr("f.json: this is no JSON object with \"format\": \"sluice-expert-load\""));
  EXPECT_THAT(with("\"version\": 1", "\"version\": 2"),
              HasSubstr("version: expected a whole number from 1 to 1, found 2"));
  EXPECT_THAT(with("\"version\": 1", "\"version\": true"), HasSubstr("version: expected a whole number"));
  EXPECT_THAT(with("\"version\": 1, ", ""), HasSubstr("the field 'version' is missing"));
  EXPECT_THAT(with("\"layer\": 3, ", ""), HasSubstr("layers[0]: the field 'layer' is missing"));
  EXPECT_THAT(with("\"layer\": 3", "\"layer\": -3"), HasSubstr("layers[0].layer: expected a whole number from 0"));
  EXPECT_THAT(with("\"layer\": 3", "\"layer\": 3.5"), HasSubstr("layers[0].layer: expected a whole number"));
  EXPECT_THAT(with("\"layer\": 3", "\"layer\": 18446744073709551615"), HasSubstr("found 18446744073709551615"));
  EXPECT_THAT(with("\"layer\": 3", "\"layr\": 3"), HasSubstr("layers[0]: the field 'layr' is not known"));
  EXPECT_THAT(with("\"num_experts\": 2", "\"num_experts\": 3"),
              HasSubstr("layers[0].tokens: expected 3 values, found 2"));
  EXPECT_THAT(with("\"num_experts\": 2", "\"num_experts\": 0"),
              HasSubstr("num_experts: expected a whole number from 1 to 16384"));
  EXPECT_THAT(with("\"num_experts\": 2", "\"num_experts\": 1e9"), HasSubstr("num_experts: expected"));
  EXPECT_THAT(with("5, 0.5", "5, \"6\""), HasSubstr("layers[0].tokens[1]: expected a number, found string"));
  EXPECT_THAT(with("5, 0.5", "5, null"), HasSubstr("layers[0].tokens[1]: expected a number, found null"));
  EXPECT_THAT(with("5, 0.5", "5, -1"), HasSubstr("layer 3, expert 1 has a load of -1"));
  EXPECT_THAT(with("5, 0.5", "5, 1e300"), HasSubstr("layer 3, expert 1 has a load of 1e+300"));
  EXPECT_THAT(with("5, 0.5", "5, 1e999"), HasSubstr("f.json"));
  EXPECT_THAT(with("5, 0.5", "5, NaN"), HasSubstr("JSON error"));
  EXPECT_THAT(with("[{\"layer\": 3, \"tokens\": [5, 0.5]}]", "[]"),
              HasSubstr("layers: expected 1 to 4096 values, found 0"));
  EXPECT_THAT(with("[{\"layer\": 3, \"tokens\": [5, 0.5]}]", "7"), HasSubstr("layers: expected a list, found number"));
  EXPECT_THAT(with("{\"layer\"", "{\"layer\": 3, \"tokens\": [1, 2]}, {\"layer\""),
              HasSubstr("layers[1]: layer 3 is there twice"));
  EXPECT_THAT(with("\"version\": 1", "\"version\": 1, \"version\": 1"), HasSubstr("'version' appears twice"));
  EXPECT_THAT(loads_refusal("[]"), HasSubstr("f.json: this is no JSON object with"));
  EXPECT_THAT(loads_refusal(""), HasSubstr("JSON error"));
  EXPECT_THAT(loads_refusal(std::string(kLoads).substr(0, 60)), HasSubstr("JSON error"));
  EXPECT_THAT(loads_refusal(std::string(100000, '[') + std::string(100000, ']')),
              HasSubstr("nested more than 64 deep"));
}

// Case 116 in a file: the number of slots said, and the slots there are.
TEST_F(PlacementFiles, PlacementsThatAreNoneAreRefusedByFileAndField) {
  const auto with = [&](const std::string& from, const std::string& to) {
    return placements_refusal(changed(kPlacement, from, to));
  };
  EXPECT_EQ(with("[0, 1, 2], [0]", "[0, 1, 2], [1]"), "accepted");
  EXPECT_EQ(with("[0, 1, 2], [0]", "[0, 1, 2, 2], []"), "accepted");
  EXPECT_THAT(with("\"num_slots\": 4", "\"num_slots\": 5"),
              HasSubstr("layers[0].ranks: the ranks hold 4 slots, but num_slots is 5"));
  EXPECT_THAT(with("[0, 1, 2], [0]", "[0, 1, 2], [0, 1]"),
              HasSubstr("layers[1].ranks: the ranks hold 5 slots, but num_slots is 4"));
  EXPECT_THAT(with("\"num_slots\": 4", "\"num_slots\": 2"),
              HasSubstr("num_slots: expected a whole number from 3 to 16384, found 2"));
  EXPECT_THAT(with("\"num_ranks\": 2", "\"num_ranks\": 3"), HasSubstr("layers[0].ranks: expected 3 values, found 2"));
  EXPECT_THAT(with("[1, 2]]", "[1, 3]]"),
              HasSubstr("layers[0].ranks[1][1]: expected a whole number from 0 to 2, found 3"));
  EXPECT_THAT(with("[1, 2]]", "[1, -1]]"),
              HasSubstr("layers[0].ranks[1][1]: expected a whole number from 0 to 2, found -1"));
  EXPECT_THAT(with("[1, 2]]", "[1, [2]]]"),
              HasSubstr("layers[0].ranks[1][1]: expected a whole number from 0 to 2, found array"));
  EXPECT_THAT(with("[1, 2]]", "7]"), HasSubstr("layers[0].ranks[1]: expected a list, found number"));
  EXPECT_THAT(with("[1, 2]]", "[2, 2]]"), HasSubstr("layers[0]: placement: expert 1 is in no slot"));
  EXPECT_THAT(with("\"layer\": 5", "\"layer\": 3"), HasSubstr("layers[1]: layer 3 is there twice"));
  EXPECT_THAT(with("sluice-placement", "sluice-expert-load"),
              HasSubstr("no JSON object with \"format\": \"sluice-placement\""));
  EXPECT_THAT(with("\"num_slots\": 4", "\"num_slots\": 4, \"num_redundant\": 1"),
              HasSubstr("'num_redundant' is not known"));
  EXPECT_THAT(placements_refusal(kLoads), HasSubstr("\"format\": \"sluice-placement\""));
  EXPECT_THAT(placements_refusal("{\"format\": 7}"), HasSubstr("\"format\": \"sluice-placement\""));
  EXPECT_THAT(with("\"num_ranks\": 2,", ""), HasSubstr("'num_ranks' is missing"));
}

// A pipe nobody writes to would block an open for ever.
TEST_F(PlacementFiles, WhatIsNoRegularFileIsRefused) {
  for (const char* name : {"f.json", "f.npy"}) {
    ASSERT_EQ(::mkfifo(path(name).c_str(), 0600), 0);
    EXPECT_THAT(read_loads(path(name)).status().message(), AllOf(HasSubstr(path(name)), HasSubstr("regular file")));
    EXPECT_THAT(read_loads(path("none") + name).status().message(), HasSubstr("none"));
  }
  EXPECT_FALSE(read_placements(path("f.json")).is_ok());
  EXPECT_FALSE(read_placements(folder_.path()).is_ok());
}

}  // namespace
}  // namespace sluice::test
