// `mpirun -n P sluice run --ep`, as users start it.
#include <sstream>

#include "cli/cli_fixture.h"

namespace sluice::test {
namespace {

class CliRanks : public CliTest {
 protected:
  // The command on every rank, or a line of shell for each.
  Ran on_ranks(int num_ranks, const std::vector<std::string>& arguments) {
    return launched(SLUICE_MPIRUN " " + std::to_string(num_ranks) + " " + line_of(arguments));
  }
  Ran on_different_ranks(int num_ranks, int odd_rank, const std::string& odd, const std::vector<std::string>& others) {
    const std::string script = "if [ \"$OMPI_COMM_WORLD_RANK\" = " + std::to_string(odd_rank) + " ]; then exec " + odd +
                               "; else exec " + line_of(others) + "; fi";
    return launched(SLUICE_MPIRUN " " + std::to_string(num_ranks) + " sh -c " + quoted(script));
  }
  std::vector<std::string> spread(std::vector<std::string> more) const {
    std::vector<std::string> arguments = {"run", "--ep", "--threads", "1", "--timeout", "20"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
};

TEST_F(CliRanks, TheOutputIsThatOfOneRank) {
  const std::string x = std::string(kTiny) + "/golden.safetensors:layer1.x";
  const Ran alone = sluice({"run", "--model", kTiny, "--layer", "1", "--input", x, "--output", path("one.safetensors"),
                            "--record-load", path("one.json")});
  ASSERT_EQ(alone.code, 0) << alone.err;
  for (const int num_ranks : {1, 2, 3}) {
    const Ran ran = on_ranks(num_ranks, spread({"--model", kTiny, "--layer", "1", "--input", x, "--output",
                                                path("many.safetensors"), "--record-load", path("many.json")}));
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(read_file(path("many.safetensors")), read_file(path("one.safetensors"))) << num_ranks << " ranks";
    EXPECT_EQ(read_file(path("many.json")), read_file(path("one.json"))) << num_ranks << " ranks";
    if (num_ranks == 3) {
      EXPECT_THAT(ran.out, HasSubstr("3 ranks over mpi, 11 of 32 experts on rank 0"));
    }
    fs::remove(path("many.safetensors"));
  }
}

TEST_F(CliRanks, APlacementWithReplicasChangesNoBit) {
  const std::string x = std::string(kTiny) + "/golden.safetensors:layer1.x";
  const std::vector<std::string> common = {"--model", kTiny, "--layer", "1", "--input", x};
  const auto with = [&](std::vector<std::string> first, const std::vector<std::string>& more) {
    first.insert(first.end(), common.begin(), common.end());
    first.insert(first.end(), more.begin(), more.end());
    return first;
  };
  ASSERT_EQ(sluice(with({"run"}, {"--output", path("one.safetensors")})).code, 0);
  json ranks = json::array({json::array({5, 5, 31}), json::array()});
  for (int expert = 0; expert < 32; ++expert) ranks[expert < 20 ? 1 : 0].push_back(expert);
  const json file = {{"format", "sluice-placement"},
                     {"version", 1},
                     {"num_experts", 32},
                     {"num_ranks", 2},
                     {"num_slots", 35},
                     {"layers", json::array({{{"layer", 1}, {"ranks", ranks}}})}};
  write_file(path("placement.json"), file.dump());
  const std::vector<std::string> placed = {"--placement", path("placement.json"), "--output", path("two.safetensors")};
  const Ran ran = on_ranks(2, with(spread({}), placed));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("15 of 32 experts on rank 0"));
  EXPECT_EQ(read_file(path("two.safetensors")), read_file(path("one.safetensors")));
  const Ran wrong = on_ranks(3, with(spread({}), placed));
  EXPECT_NE(wrong.code, 0);
  EXPECT_THAT(wrong.err, HasSubstr("it is for 2 ranks, the experts are spread over 3"));
}

TEST_F(CliRanks, CutAndSpreadAtOnce) {
  const std::string x = std::string(kTiny) + "/golden.safetensors:layer1.x";
  const auto arguments = [&](const std::string& precision, const std::string& out) {
    return spread({"--tp", "2", "--model", kTiny, "--layer", "1", "--input", x, "--precision", precision, "--output",
                   path(out), "--json"});
  };
  // Two ranks that share all experts, and four that spread them too: the bits of the cut alone.
  const Ran two = on_ranks(2, arguments("bf16", "two.safetensors"));
  ASSERT_EQ(two.code, 0) << two.err;
  const Ran four = on_ranks(4, arguments("bf16", "four.safetensors"));
  ASSERT_EQ(four.code, 0) << four.err;
  EXPECT_EQ(four.document()["ranks"], 4);
  EXPECT_EQ(four.document()["tensor_ranks"], 2);
  EXPECT_EQ(read_file(path("two.safetensors")), read_file(path("four.safetensors")));
  EXPECT_THAT(on_ranks(3, arguments("bf16", "three.safetensors")).err,
              HasSubstr("--tp 2: 3 ranks are no multiple of 2"));
  EXPECT_THAT(on_ranks(2, arguments("w8a8", "w8a8.safetensors")).err,
              HasSubstr("I = 128 has 1 units of 128 columns, fewer than the 2 shards"));
}

TEST_F(CliRanks, TheBenchmarkSaysWhatMoved) {
  const Ran ran = on_ranks(2, {"bench", "--ep", "--like", "qwen3-30b", "--precision", "w8a8", "--tokens", "1",
                               "--threads", "1", "--seconds", "0.01", "--device", "cpu", "--json"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  std::istringstream lines(ran.out);
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_GT(json::parse(line)["link_bytes_per_s"], 0);
  ASSERT_TRUE(std::getline(lines, line));
  const json row = json::parse(line);
  // A token of 2048 bytes, 16 scales and 8 ids goes there at most once; each of up to 8 rows of 4096 bytes comes back.
  const std::int64_t record = (2048 + 16 * 4 + 8 * 4 + 15) / 16 * 16;
  EXPECT_LE(row["bytes_there"], record);
  EXPECT_EQ(row["bytes_there"].get<std::int64_t>() % record, 0);
  EXPECT_LE(row["bytes_back"], 8 * 4096);
  EXPECT_EQ(row["bytes_back"].get<std::int64_t>() % 4096, 0);
  EXPECT_GT(row["layer_seconds"], 0);
  const Ran alone = sluice({"bench", "--ep", "--like", "qwen3-30b", "--device", "cpu"});
  EXPECT_EQ(alone.code, 2);
  EXPECT_THAT(alone.err, HasSubstr("one rank moves nothing"));
}

TEST_F(CliRanks, FewerTokensThanRanksAndNone) {
  Crafted().write(model_);
  for (const int tokens : {0, 2}) {
    const std::string x = input(tokens);
    ASSERT_EQ(sluice(run_args(x, path("one.safetensors"))).code, 0);
    const Ran ran = on_ranks(
        3, spread({"--model", model(), "--layer", "1", "--input", x, "--output", path("many.safetensors"), "--json"}));
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(read_file(path("many.safetensors")), read_file(path("one.safetensors")));
    EXPECT_EQ(ran.document()["ranks"], 3);
    EXPECT_EQ(ran.document()["transport"], "mpi");
    EXPECT_EQ(ran.document()["tokens"], tokens);
  }
}

// One rank has another model, another input, or nothing to write to: an error that names it, and no output.
TEST_F(CliRanks, ARankThatFailsEndsAllOfThem) {
  Crafted().write(model_);
  const auto arguments = [&](const std::string& model, const std::string& x) {
    return spread({"--model", model, "--layer", "1", "--input", x, "--output", path("y.safetensors")});
  };
  const std::vector<std::string> good = arguments(model(), input(3));
  const Ran missing = on_different_ranks(3, 1, line_of(arguments(path("nothing"), input(3))), good);
  EXPECT_NE(missing.code, 0);
  EXPECT_THAT(missing.err, HasSubstr("sluice: error: rank 1 failed; its own message says why"));
  EXPECT_THAT(missing.err, HasSubstr("sluice: error: rank 1: " + path("nothing")));

  const Ran uneven = on_different_ranks(2, 1, line_of(arguments(model(), input(4))), good);
  EXPECT_NE(uneven.code, 0);
  EXPECT_THAT(uneven.err, HasSubstr("rank 1 has 4 tokens in its input, rank 0 has 3"));

  const Ran other = on_different_ranks(2, 1, line_of(arguments(kTiny, input(3, 256))), arguments(model(), input(3)));
  EXPECT_NE(other.code, 0);
  EXPECT_THAT(other.err, HasSubstr("rank 1 was made for another layer"));
  EXPECT_FALSE(fs::exists(path("y.safetensors")));
}

TEST_F(CliRanks, ARankThatNeverComesIsGivenUp) {
  Crafted().write(model_);
  std::vector<std::string> arguments = {"run",     "--ep", "--timeout", "1",      "--model",  model(),
                                        "--layer", "1",    "--input",   input(3), "--output", path("y.safetensors")};
  const Ran ran = on_different_ranks(2, 1, "sleep 100", arguments);
  EXPECT_NE(ran.code, 0);
  EXPECT_THAT(ran.err, HasSubstr("waited 1 s for the other ranks to start"));
  EXPECT_FALSE(fs::exists(path("y.safetensors")));
}

TEST_F(CliRanks, WhatThisBuildCannotDoIsRefused) {
  Crafted().write(model_);
  std::vector<std::string> arguments = run_args(input(2), path("y.safetensors"), {"--ep", "--transport", "nccl"});
  expect_refused(arguments, 3, {"--transport nccl: this build has none of that name"});
  expect_refused(run_args(input(2), path("y.safetensors"), {"--ep", "--transport", "tcp"}), 2,
                 {"'tcp' is none of mpi, nccl, nccl-device"});
  expect_refused(run_args(input(2), path("y.safetensors"), {"--transport", "mpi"}), 2, {"--ep"});
  expect_refused(run_args(input(2), path("y.safetensors"), {"--ep", "--timeout", "0"}), 2, {"'0'"});
}

}  // namespace
}  // namespace sluice::test
