// Times, memory and files of the model of scale, by hand and against the record.
#include "sluice/scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "scale/hardware.h"
#include "scale/scale_fixture.h"
#include "scale/traffic.h"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using scale::predict;
using testing::HasSubstr;

json read(const fs::path& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return json::parse(file);
}
fs::path source(const std::string& name) { return fs::path(SLUICE_SOURCE_DIR) / name; }

scale::Prediction predicted(const scale::Hardware& h, const scale::Request& r) {
  auto p = predict(h, r);
  EXPECT_TRUE(p.is_ok()) << p.status().message();
  return p.is_ok() ? *p : scale::Prediction{};
}

double phase(const scale::Prediction& p, std::string_view name) {
  for (const scale::Phase& one : p.phases) {
    if (one.name == name) return one.us;
  }
  ADD_FAILURE() << "no phase " << name;
  return 0;
}

TEST(Scale, FourExpertsTopOneOnTwoRanks) {
  scale::Hardware h = plain_hardware();
  h.launch_us = 2;
  h.nvlink_flag_us = 0.5;
  const auto p = predicted(h, request_for(4, 1, 2, 6));
  EXPECT_EQ(p.row_bytes, 272);  // 256 + 2 scales of 4 + 1 id of 4 = 268, rounded up to 16
  EXPECT_DOUBLE_EQ(p.ranks_per_token, 1);
  EXPECT_DOUBLE_EQ(p.rows_mean, 6);
  // Half of 6 tokens go to the peer and half stay; the same half comes back as bf16 rows of 512 bytes.
  EXPECT_DOUBLE_EQ(p.dispatch.mean.out.nvlink, 3 * 272);
  EXPECT_DOUBLE_EQ(p.dispatch.mean.out.gpu, 3 * 272);
  EXPECT_DOUBLE_EQ(p.dispatch.mean.out.nic, 0);
  EXPECT_DOUBLE_EQ(p.combine.mean.in.nvlink, 3 * 512);
  // 12 tokens hit a rank with 1/2: 6 +- sqrt(3), the larger of two at most sqrt(2 ln 2) deviations above.
  const double largest = 6 + std::sqrt(3 * 2 * std::log(2.0));
  EXPECT_NEAR(p.rows_max, largest, 1e-9);
  // Two barriers of two flags and a launch; 100 GB/s are 1e5 bytes a microsecond.
  EXPECT_NEAR(p.dispatch.us, 2 + 4 * 0.5 + 3 * 272 * largest / 6 / 1e5, 1e-9);
  EXPECT_NEAR(p.combine.us, 2 + 4 * 0.5 + 3 * 512 * largest / 6 / 1e5, 1e-9);
  EXPECT_EQ(p.dispatch.limit, "latency");
}

TEST(Scale, FourExpertsTopTwoOnTwoRanksOfTwoDomains) {
  scale::Hardware h = plain_hardware(1);
  h.nic_latency_us = 3;
  h.nic_setup_us = 5;
  const auto p = predicted(h, request_for(4, 2, 2, 600));
  // Both slots on one given rank: 1 of C(4,2) = 6, so a rank is hit with 5/6.
  EXPECT_NEAR(p.ranks_per_token, 5.0 / 3, 1e-12);
  EXPECT_NEAR(p.dispatch.mean.out.nic, 500 * 272.0, 1e-6);
  EXPECT_DOUBLE_EQ(p.dispatch.mean.out.nvlink, 0);
  EXPECT_NEAR(p.combine.mean.in.nic, 600 * 512.0, 1e-6);          // 2 slots of 600 tokens, half of them here
  EXPECT_NEAR(p.combine_partial.mean.in.nic, 500 * 512.0, 1e-6);  // one sum for each (token, rank)
  // 1200 tokens with 5/6: 1000 +- sqrt(1000 / 6); 10 GB/s are 1e4 bytes a microsecond.
  const double excess = 1 + std::sqrt(1000.0 / 6 * 2 * std::log(2.0)) / 1000;
  EXPECT_NEAR(p.dispatch.us, 5 + 2 * 3 + 500 * 272 * excess / 1e4, 1e-9);
  // Sent by the fullest rank: a token has 0, 1, 2 rows there with 1/6, 4/6, 1/6, variance 1/3.
  EXPECT_NEAR(p.combine.us, 2 * 3 + 600 * 512 * (1200 + std::sqrt(400 * 2 * std::log(2.0))) / 1200 / 1e4, 1e-9);
  EXPECT_EQ(p.dispatch.limit, "InfiniBand");
}

TEST(Scale, MemoryOfTwoRanks) {
  const auto p = predicted(plain_hardware(), request_for(4, 2, 2, 10));
  // 2 experts of 3 * 256 * 128 bytes with 3 * 2 * 1 scales of 4; a router of 4 rows of 256 in bf16.
  EXPECT_DOUBLE_EQ(p.memory.weights, 2 * (3 * 256 * 128 + 24) + 4 * 256 * 2);
  EXPECT_DOUBLE_EQ(p.memory.receive, 2 * 10 * 272);
  EXPECT_DOUBLE_EQ(p.memory.returned, 10 * 2 * 512);
  // 40 rows at most: packed 256 + 8, h 2 * 128 in bf16, a 128 + 4, y 256 in bf16.
  EXPECT_DOUBLE_EQ(p.memory.workspace, 40 * (264 + 512 + 132 + 512));
  EXPECT_TRUE(p.fits);
  scale::Hardware small = plain_hardware();
  small.memory_gb = (p.memory.total() - 1) * 1e-9;
  const auto q = predicted(small, request_for(4, 2, 2, 10));
  EXPECT_FALSE(q.fits);
  EXPECT_EQ(q.largest_round, 9);
}

TEST(Scale, OneRankMovesNothing) {
  for (const std::int64_t domain : {1, 8}) {
    const auto p = predicted(plain_hardware(domain), request_for(8, 2, 1, 64));
    for (const scale::Move* m :
         {&p.dispatch, &p.combine, &p.dispatch_forwarded, &p.combine_partial, &p.combine_forwarded}) {
      EXPECT_EQ(m->us, 0);
      for (const scale::Links& l : {m->mean.out, m->mean.in}) EXPECT_EQ(l.nvlink + l.nic, 0);
    }
    EXPECT_EQ(p.rows_max, 64 * 2);
    EXPECT_EQ(p.overlapped_us, p.serial_us);
    EXPECT_EQ(p.memory.receive + p.memory.returned, 0);
  }
}

TEST(Scale, AsMuchIsSentAsIsReceived) {
  for (const auto& [experts, ranks, domain, tp] :
       {std::tuple{256, 8, 8, 1}, {256, 20, 8, 1}, {30, 8, 4, 1}, {10, 16, 8, 1}, {64, 12, 8, 2}}) {
    scale::Request r = request_for(experts, 4, ranks, 100);
    r.tensor_parallel = tp;
    const scale::Hardware h = plain_hardware(domain);
    for (const auto traffic : {scale::dispatch_traffic, scale::combine_traffic}) {
      scale::Links out, in;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const scale::Traffic t = traffic(h, r, rank);
        for (double scale::Links::*link : {&scale::Links::gpu, &scale::Links::nvlink, &scale::Links::nic}) {
          out.*link += t.out.*link;
          in.*link += t.in.*link;
        }
      }
      EXPECT_GT(out.gpu + out.nvlink + out.nic, 0);
      EXPECT_NEAR(out.gpu, in.gpu, 1e-9 * out.gpu);
      EXPECT_NEAR(out.nvlink, in.nvlink, 1e-9 * out.nvlink);
      EXPECT_NEAR(out.nic, in.nic, 1e-9 * out.nic);
      if (traffic == &scale::combine_traffic) {  // every slot comes back from somewhere
        EXPECT_NEAR(in.gpu + in.nvlink + in.nic, 100.0 * ranks * 4 * 512, 1e-3);
      }
    }
  }
}

TEST(Scale, FasterPartsNeverMakeItSlower) {
  const scale::Hardware base = plain_hardware(4);
  const scale::Request r = request_for(64, 4, 16, 512);
  const double before = predicted(base, r).serial_us;
  double scale::Hardware::*const rates[] = {&scale::Hardware::hbm_gb_per_s, &scale::Hardware::nic_gb_per_s};
  for (double scale::Hardware::*rate : rates) {
    double last = before;
    for (int i = 0; i < 3; ++i) {
      scale::Hardware h = base;
      h.*rate *= std::pow(2, i + 1);
      const double now = predicted(h, r).serial_us;
      EXPECT_LT(now, last);
      last = now;
    }
  }
  scale::Hardware h = base;
  h.nvlink_gb_per_s = 200;
  EXPECT_LT(predicted(h, request_for(64, 4, 4, 512)).dispatch.us,
            predicted(base, request_for(64, 4, 4, 512)).dispatch.us);
  h = base;
  h.fp8.peak_tflops = 2000;
  EXPECT_LT(predicted(h, r).gemm_us, predicted(base, r).gemm_us);
}

TEST(Scale, ForwardingSendsLessOverTheNetwork) {
  const auto p = predicted(plain_hardware(8), request_for(64, 8, 32, 512));
  EXPECT_LT(p.dispatch_forwarded.mean.out.nic, p.dispatch.mean.out.nic);
  EXPECT_GT(p.dispatch_forwarded.mean.out.nvlink, p.dispatch.mean.out.nvlink);
  // The sums come back the same way, as 512 bytes of bf16 each.
  EXPECT_NEAR(p.combine_forwarded.mean.in.nic / 512,
              p.dispatch_forwarded.mean.out.nic / static_cast<double>(p.row_bytes), 1e-6);
  EXPECT_NEAR(p.combine_forwarded.mean.in.nvlink / 512,
              p.dispatch_forwarded.mean.out.nvlink / static_cast<double>(p.row_bytes), 1e-6);
  // Every other domain that a token is on, once.
  EXPECT_NEAR(p.dispatch_forwarded.mean.out.nic, 512 * 0.75 * p.domains_per_token * static_cast<double>(p.row_bytes),
              1);
}

TEST(Scale, TwoChunksAreScheduledAsDescribed) {
  scale::Hardware h = plain_hardware(4);
  h.launch_us = 1;
  for (const double nic : {0.1, 10.0, 1000.0}) {
    h.nic_gb_per_s = nic;
    const auto whole = predicted(h, request_for(64, 4, 16, 1024)), half = predicted(h, request_for(64, 4, 16, 512));
    const double d = half.dispatch.us, c = half.combine.us;
    const double e = phase(half, "pack") + phase(half, "up") + phase(half, "swiglu_quant") + phase(half, "down") +
                     phase(half, "shared expert");
    // D1, then D2 beside E1, then C1 beside E2, then C2.
    const double middle = d + std::max(d, e);
    const double end = std::max(middle + c, middle + e) + c;
    EXPECT_NEAR(whole.overlapped_us, phase(whole, "gate, route") + end + phase(whole, "weighted sum"), 1e-6);
  }
}

TEST(Scale, PhasesAddUp) {
  scale::Request r = request_for(64, 4, 8, 128);
  r.config.shared_intermediate = 256;
  r.tensor_parallel = 2;
  const auto p = predicted(plain_hardware(8), r);
  double sum = 0;
  for (const scale::Phase& one : p.phases) sum += one.us;
  EXPECT_NEAR(p.serial_us, sum, 1e-9);
  EXPECT_NEAR(p.gemm_us, phase(p, "up") + phase(p, "down"), 1e-9);
  EXPECT_GT(phase(p, "shared expert"), 0);
  // Two GPUs each send half of 128 rows of 256 f32 sums, and get half back in bf16, over 1e5 bytes a microsecond.
  EXPECT_NEAR(phase(p, "tensor-parallel reduction"), 64 * 256 * (4 + 2) / 1e5, 1e-9);
  EXPECT_NEAR(p.tokens_per_s, 128 / 2 / (std::min(p.serial_us, p.overlapped_us) * 1e-6), 1e-3);
}

// The rates were fitted to the record, so this holds the formula, the file and the code together. The fit leaves
// 3.2 % rms; 10 % is above its worst row of e4m3 with more than one token (9.4 %), 15 % above that of bf16 here (8.2 %). For
// one token one constant stands for the start of every kernel, and 32 tiles leave most multiprocessors idle: 28.6 %.
TEST(Scale, GemmsOfTheRecordAreMet) {
  const auto file = scale::parse_hardware(read(source("data/hardware/h200-nvlink8-ib400.json")), "h200");
  ASSERT_TRUE(file.is_ok()) << file.status().message();
  std::string record;
  for (const scale::Source& s : file->sources) {
    const std::size_t at = s.source.find("bench/results/");
    if (s.field == "fp8.share_of_peak" && at != std::string::npos) record = s.source.substr(at);
  }
  ASSERT_FALSE(record.empty()) << "the file does not say which record its rates are fitted to";
  int compared = 0;
  const json figures = read(source(record))["bench"]["figures"];
  for (const json& f : figures) {
    if (f.value("bench", "") != "grouped_gemm") continue;
    const std::string shape = f["shape"];
    const bool bf16 = shape.ends_with("-bf16");
    if (!shape.starts_with("dsv3-ep8") && shape != "dsv3-tp8") continue;
    const double width = shape == "dsv3-tp8" ? 256 : 2048, hidden = 7168;
    const bool up = f["gemm"] == "up";
    const double us =
        scale::grouped_gemm_us(file->hardware, bf16 ? Precision::kBF16 : Precision::kW8A8, false, f["rows"],
                               f["active_experts"], up ? 2 * width : hidden, up ? hidden : width);
    const double measured = f["us"], tolerance = f["tokens"] == 1 ? 0.30 : bf16 ? 0.15 : 0.10;
    EXPECT_NEAR(us / measured, 1, tolerance) << shape << " T=" << f["tokens"] << " " << f["gemm"];
    ++compared;
  }
  EXPECT_GE(compared, 24);
}

TEST(Scale, EveryCommittedFileLoadsAndPlans) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(source("data/hardware"))) {
    if (entry.path().extension() != ".json") continue;
    ++files;
    const auto file = scale::parse_hardware(read(entry.path()), entry.path().filename().string());
    ASSERT_TRUE(file.is_ok()) << file.status().message();
    EXPECT_EQ(file->sources.size(), 24u);
    for (const scale::Source& s : file->sources) {
      const std::size_t at = s.source.find("bench/results/");
      if (at == std::string::npos) continue;
      EXPECT_TRUE(fs::exists(source(s.source.substr(at, s.source.find(".json", at) + 5 - at)))) << s.source;
    }
    for (const std::int64_t ranks : {1, 2, 8, 64, 256})
      EXPECT_TRUE(predict(file->hardware, request_for(256, 8, ranks, 128)).is_ok());
  }
  EXPECT_GE(files, 3);
}

TEST(Scale, HardwareFilesAreRefusedByFieldAndValue) {
  const json good = read(source("data/hardware/h200-nvlink8-ib400.json"));
  const auto refused = [&](const std::function<void(json&)>& spoil, const std::vector<std::string>& words) {
    json bad = good;
    spoil(bad);
    const auto file = scale::parse_hardware(bad, "x.json");
    ASSERT_FALSE(file.is_ok()) << words[0];
    EXPECT_EQ(file.status().code(), StatusCode::kBadData);
    EXPECT_THAT(file.status().message(), HasSubstr("x.json: "));
    for (const std::string& word : words) EXPECT_THAT(file.status().message(), HasSubstr(word));
  };
  const auto value = [](const char* field, json v) {
    return [field, v](json& j) { j["constants"][field]["value"] = v; };
  };
  refused([](json& j) { j = json::array(); }, {"the file = []", "an object"});
  refused([](json& j) { j["schema"] = 2; }, {"schema = 2", "wanted 1"});
  refused([](json& j) { j.erase("name"); }, {"name = null", "a text"});
  refused([](json& j) { j["extra"] = 7; }, {"extra = 7", "no field"});
  refused([](json& j) { j["constants"]["hbm_tb_per_s"] = 4.5; }, {"hbm_tb_per_s = 4.5", "no field", "hbm_gb_per_s"});
  refused([](json& j) { j["constants"]["launch_us"]["unit"] = "us"; }, {"launch_us.unit", "no field"});
  refused([](json& j) { j["constants"].erase("nic_gb_per_s"); }, {"nic_gb_per_s = null", "value and source"});
  refused([](json& j) { j["constants"]["nic_gb_per_s"] = 50; }, {"nic_gb_per_s = 50", "value and source"});
  refused(value("hbm_gb_per_s", 0), {"hbm_gb_per_s = 0", "a number above 0"});
  refused(value("hbm_gb_per_s", "4500"), {"hbm_gb_per_s = \"4500\"", "a number"});
  refused(value("glue_share", 1.5), {"glue_share = 1.5", "at most 1"});
  refused(value("launch_us", -1), {"launch_us = -1", "from 0"});
  refused(value("nvlink_domain", 8.5), {"nvlink_domain = 8.5", "a whole number"});
  refused(value("fp8.rows_per_expert", {64, 16}), {"fp8.rows_per_expert = [64,16]", "ascending"});
  refused(value("fp8.rows_per_expert", json::array()), {"fp8.rows_per_expert = []", "a list"});
  refused(value("bf16.share_of_peak", {0.5}), {"bf16.share_of_peak = 1 values", "3 rows_per_expert"});
  refused([](json& j) { j["constants"]["launch_us"]["source"] = "somewhere"; },
          {"launch_us.source = \"somewhere\"", "measured: "});
}

TEST(Scale, RequestsAreRefusedByFieldAndValue) {
  const auto refused = [&](const std::function<void(scale::Request&)>& spoil, const std::vector<std::string>& words) {
    scale::Request r = request_for(8, 2, 2, 4);
    spoil(r);
    const auto p = predict(plain_hardware(), r);
    ASSERT_FALSE(p.is_ok()) << words[0];
    for (const std::string& word : words) EXPECT_THAT(p.status().message(), HasSubstr(word));
  };
  refused([](auto& r) { r.tokens = 0; }, {"tokens = 0"});
  refused([](auto& r) { r.num_ranks = 0; }, {"num_ranks = 0"});
  refused([](auto& r) { r.num_ranks = 5000; }, {"num_ranks = 5000", "4096"});
  refused([](auto& r) { r.tensor_parallel = 3; }, {"tensor_parallel = 3", "intermediate = 128"});
  refused([](auto& r) { r.tensor_parallel = 16; }, {"tensor_parallel = 16", "nvlink_domain = 8"});
  refused([](auto& r) { r.num_slots = 7; }, {"num_slots = 7", "8"});
  refused([](auto& r) { r.precision = Precision::kF32; }, {"precision = f32", "w8a8 and bf16"});
  refused([](auto& r) { r.precision = Precision::kBF16; }, {"bf16", "e4m3"});
  refused([](auto& r) { r.config.num_local = 4; }, {"local experts [0, 4)"});
  refused([](auto& r) { r.config.top_k = 9; }, {"9"});
  scale::Request grouped = request_for(8, 2, 2, 4);
  grouped.config.gate = gate_preset(GateId::kG3);
  grouped.config.gate.n_group = 4;
  grouped.config.gate.topk_group = 2;
  grouped.num_slots = 10;
  EXPECT_THAT(predict(plain_hardware(), grouped).status().message(), HasSubstr("num_slots = 10 is not a multiple"));
  EXPECT_THAT(predict(scale::Hardware{}, request_for(8, 2, 2, 4)).status().message(), HasSubstr("memory_gb = 0"));
}

TEST(Scale, ReplicasSpreadRowsAndWeights) {
  scale::Request r = request_for(64, 4, 64, 128);
  const auto once = predicted(plain_hardware(), r);
  r.num_slots = 128;
  const auto twice = predicted(plain_hardware(), r);
  EXPECT_DOUBLE_EQ(twice.rows_mean, once.rows_mean);
  EXPECT_GT(twice.memory.weights, once.memory.weights);
  EXPECT_GT(twice.ranks_per_token, 3.9);
  // More ranks than experts: the rest hold none, and the model still plans.
  const auto sparse = predicted(plain_hardware(), request_for(4, 2, 16, 128));
  EXPECT_NEAR(sparse.rows_mean, 256, 1e-9);
  EXPECT_GE(sparse.rows_max, 16 * 128 * 2 / 4);
}

}  // namespace
}  // namespace sluice::test
