// Parts of a checkpoint for one rank: lists of experts and shards of I, against the whole layer that was loaded and then
// cut.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "harness/checkpoint_files.h"
#include "harness/compare.h"
#include "harness/layer_run.h"
#include "io/catalog.h"
#include "io/hf_config.h"
#include "io/layer_load.h"
#include "sluice/checkpoint.h"

namespace sluice::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::filesystem::path kTiny = std::filesystem::path(SLUICE_SOURCE_DIR) / "data/tiny-dsv3";

// Every way a family stores experts: split and fused, transposed, interleaved, in every format that can be run.
std::vector<std::filesystem::path> models() {
  std::vector<std::filesystem::path> paths = {kTiny};
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(SLUICE_SOURCE_DIR) / "tests/fixtures/families"))
    if (entry.is_directory()) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

io::LayerFiles files_of(const std::filesystem::path& path, std::vector<io::Catalog>& catalogs,
                        std::int64_t layer = -1) {
  const auto config = io::read_hf_config(path / "config.json");
  catalogs.push_back(io::Catalog::open(path).value());
  if (layer < 0) layer = config->moe_layers.rbegin()->first;
  Result<io::LayerFiles> files = io::find_layer(catalogs.back(), *config, layer);
  EXPECT_TRUE(files.is_ok()) << files.status().message();
  return std::move(files).value();
}

void expect_same(const char* name, const TensorView& got, const TensorView& want) {
  ASSERT_EQ(got.is_present(), want.is_present()) << name;
  if (!got.is_present()) return;
  EXPECT_TRUE(same_bits(got, want)) << name;
}

void expect_same(const FfnWeights& got, const FfnWeights& want) {
  expect_same("w13", got.w13, want.w13);
  expect_same("w13_scale", got.w13_scale, want.w13_scale);
  expect_same("w13_bias", got.w13_bias, want.w13_bias);
  expect_same("w2", got.w2, want.w2);
  expect_same("w2_scale", got.w2_scale, want.w2_scale);
  expect_same("w2_bias", got.w2_bias, want.w2_bias);
}

// `part` into poisoned memory, against the whole layer cut in memory.
void expect_is_part(const io::LayerFiles& files, const LoadedLayer& whole, const LoadOptions& part) {
  const Result<LoadedLayer> got = io::load_layer(files, part, true);
  ASSERT_TRUE(got.is_ok()) << got.status().message();
  const ShardedLayer cut = shard(whole.config, whole.weights, part.tensor_shard).value();
  const MoeConfig& want_config = cut.config;
  const FfnWeights &g = got->weights.experts, &w = cut.weights.experts;
  const std::int64_t L = part.experts.empty() ? num_local(want_config) : std::ssize(part.experts);
  EXPECT_EQ(got->config.intermediate, want_config.intermediate);
  EXPECT_EQ(got->config.shared_intermediate, want_config.shared_intermediate);
  EXPECT_EQ(got->config.has_shared_gate, want_config.has_shared_gate);
  EXPECT_EQ(num_local(got->config), L);
  EXPECT_EQ(got->config.first_expert, 0);
  EXPECT_EQ(got->shared_is_whole, cut.shared_is_whole);
  const std::pair<const TensorView*, const TensorView*> pairs[] = {
      {&g.w13, &w.w13}, {&g.w13_scale, &w.w13_scale}, {&g.w13_bias, &w.w13_bias},
      {&g.w2, &w.w2},   {&g.w2_scale, &w.w2_scale},   {&g.w2_bias, &w.w2_bias}};
  for (const auto& [a, b] : pairs) {
    ASSERT_EQ(a->is_present(), b->is_present());
    for (std::int64_t slot = 0; a->is_present() && slot < L; ++slot) {
      const std::int64_t e = part.experts.empty() ? slot : part.experts[static_cast<std::size_t>(slot)];
      EXPECT_TRUE(same_bits(a->slice(slot, 1), b->slice(e, 1))) << "slot " << slot;
    }
  }
  expect_same(got->weights.shared, cut.weights.shared);
  expect_same("w_gate", got->weights.w_gate, cut.weights.w_gate);
  expect_same("score_bias", got->weights.score_bias, cut.weights.score_bias);
  expect_same("shared_gate", got->weights.shared_gate, cut.weights.shared_gate);
}

// Whether I has too few units for the group; then the load says what shard() says.
bool is_refused(const io::LayerFiles& files, const LoadedLayer& whole, const LoadOptions& part) {
  const Result<ShardedLayer> cut = shard(whole.config, whole.weights, part.tensor_shard);
  if (cut) return false;
  EXPECT_THAT(io::load_layer(files, part).status().message(), HasSubstr(cut.status().message()));
  return true;
}

TEST(ShardLoad, ShardsOfEveryFamilyAreThoseOfTheWhole) {
  int num_parts = 0;
  for (const auto& path : models()) {
    std::vector<io::Catalog> catalogs;
    const io::LayerFiles files = files_of(path, catalogs);
    for (const Precision precision : files.precisions()) {
      LoadOptions options;
      options.precision = precision;
      const LoadedLayer whole = io::load_layer(files, options).value();
      for (const std::int64_t size : {1, 2, 3, 4}) {
        for (std::int64_t rank = 0; rank < size; ++rank) {
          SCOPED_TRACE(fmt::format("{} {} rank {} of {}", path.string(), to_string(precision), rank, size));
          options.tensor_shard = {rank, size};
          if (is_refused(files, whole, options)) continue;
          for (const bool list : {false, true}) {
            options.experts = list ? std::vector<std::int32_t>{3, 0, 3} : std::vector<std::int32_t>{};
            expect_is_part(files, whole, options);
            if (HasFailure()) return;
            ++num_parts;
          }
        }
      }
      options.experts.clear();
    }
  }
  EXPECT_GT(num_parts, 200);
}

// ---- formats the fixtures do not have, at widths that cut their blocks and groups ----

// The harness's model in another width, its experts stored as asked.
struct Crafted {
  TempFolder folder;
  nlohmann::json config = dsv3_config();
  FileTensors tensors;
  std::vector<io::Catalog> catalogs;

  Crafted(std::int64_t I, DType dtype, const char* strategy) {
    config["moe_intermediate_size"] = I;
    std::uint64_t seed = 77;
    const std::string mlp = "model.layers.1.mlp.";
    for (const auto& [name, t] : dsv3_tensors()) {
      const bool is_expert = name.starts_with(mlp + "experts."), is_shared = name.starts_with(mlp + "shared_experts.");
      if (!is_expert && !is_shared) tensors[name] = t;
      if ((!is_expert && !is_shared) || name.ends_with("_scale_inv")) continue;
      const bool down = name.find("down_proj") != std::string::npos;
      std::vector<std::int64_t> shape = t.shape;
      shape[down ? 1 : 0] = I;
      if (is_shared) {
        tensors[name] = make_tensor(t.dtype, shape, seed++);
        continue;
      }
      const double top = dtype == DType::kI8 ? 127 : dtype == DType::kE4M3 ? 448 : 1;
      tensors[name] = make_tensor(dtype, shape, seed++, -top, top);
      if (std::string(strategy) == "block") {
        tensors[name + "_scale_inv"] =
            make_tensor(DType::kF32, {ceil_div(shape[0], 128), ceil_div(shape[1], 128)}, seed++, 1e-4, 1e-3);
      } else if (std::string(strategy) == "mx") {
        tensors[name + "_scale_inv"] = make_tensor(DType::kE8M0, {shape[0], ceil_div(shape[1], 32)}, seed++, 0.25, 4);
      } else if (std::string(strategy) == "channel") {
        tensors[name + "_scale"] = make_tensor(DType::kBF16, {shape[0], 1}, seed++, 1e-4, 1e-3);
      } else if (std::string(strategy) == "tensor") {
        tensors[name + "_scale"] = make_tensor(DType::kF32, {1}, seed++, 1e-4, 1e-3);
      }
    }
    if (std::string(strategy) == "mx") config["quantization_config"]["weight_block_size"] = {1, 32};
    if (std::string(strategy) == "none") config.erase("quantization_config");
    if (std::string(strategy) == "channel" || std::string(strategy) == "tensor") {
      const char* type = dtype == DType::kI8 ? "int" : "float";
      config["quantization_config"] = nlohmann::json::parse(fmt::format(
          R"({{"quant_method":"compressed-tensors","format":"{0}-quantized","quantization_status":"compressed",
          "ignore":["lm_head"],"config_groups":{{"group_0":{{"targets":["Linear"],
          "weights":{{"num_bits":8,"type":"{0}","strategy":"{1}","symmetric":true,"dynamic":false}},
          "input_activations":{{"num_bits":8,"type":"{0}","strategy":"token","symmetric":true,"dynamic":true}}}}}}}})",
          type, strategy));
    }
    write_text(folder / "config.json", config.dump());
    write_file(folder / "model.safetensors", tensors);
  }
  io::LayerFiles files() { return files_of(folder.path(), catalogs, 1); }
};

TEST(ShardLoad, ShardsOfEveryFormatAreThoseOfTheWhole) {
  int num_parts = 0;
  for (const std::int64_t I : {136, 300}) {
    for (const auto& [dtype, strategy] :
         {std::pair(DType::kE4M3, "block"), std::pair(DType::kE4M3, "mx"), std::pair(DType::kE4M3, "channel"),
          std::pair(DType::kE4M3, "tensor"), std::pair(DType::kI8, "channel"), std::pair(DType::kBF16, "none"),
          std::pair(DType::kF16, "none"), std::pair(DType::kF32, "none")}) {
      Crafted crafted(I, dtype, strategy);
      const io::LayerFiles files = crafted.files();
      ASSERT_FALSE(files.precisions().empty()) << strategy << ": " << files.cannot_run;
      for (const Precision precision : files.precisions()) {
        LoadOptions options;
        options.precision = precision;
        const Result<LoadedLayer> whole = io::load_layer(files, options);
        ASSERT_TRUE(whole.is_ok()) << whole.status().message();
        for (const std::int64_t size : {3, 8}) {
          for (std::int64_t rank = 0; rank < size; ++rank) {
            SCOPED_TRACE(fmt::format("I = {}, {} {}, {}, rank {} of {}", I, to_string(dtype), strategy,
                                     to_string(precision), rank, size));
            options.tensor_shard = {rank, size};
            if (is_refused(files, *whole, options)) continue;
            expect_is_part(files, *whole, options);
            if (HasFailure()) return;
            ++num_parts;
          }
        }
      }
    }
  }
  EXPECT_GT(num_parts, 200);
}

// ---- lists of experts ----

TEST(ShardLoad, Case116_EverySlotIsItsExpertsBytes) {
  std::vector<io::Catalog> catalogs;
  const io::LayerFiles files = files_of(kTiny, catalogs, 1);
  for (const Precision precision : files.precisions()) {
    LoadOptions options;
    options.precision = precision;
    const LoadedLayer whole = io::load_layer(files, options).value();
    // Two redundant slots; a rank of replicas alone; one slot; out of order.
    for (const std::vector<std::int32_t>& list :
         {std::vector<std::int32_t>{0, 1, 2, 3, 1, 3}, {31, 31, 31}, {17}, {5, 4, 30, 0}, {8, 9, 10}}) {
      options.experts = list;
      const Result<LoadedLayer> got = io::load_layer(files, options, true);
      ASSERT_TRUE(got.is_ok()) << got.status().message();
      EXPECT_EQ(got->config.num_local, std::ssize(list));
      EXPECT_EQ(got->config.first_expert, 0);
      EXPECT_EQ(got->config.num_experts, 32);
      const FfnWeights &p = got->weights.experts, &w = whole.weights.experts;
      for (const auto& [name, part, all] :
           {std::tuple("w13", &p.w13, &w.w13), std::tuple("w13_scale", &p.w13_scale, &w.w13_scale),
            std::tuple("w2", &p.w2, &w.w2), std::tuple("w2_scale", &p.w2_scale, &w.w2_scale)}) {
        ASSERT_EQ(part->is_present(), all->is_present());
        if (!part->is_present()) continue;
        ASSERT_EQ(part->shape[0], std::ssize(list));
        for (std::size_t slot = 0; slot < list.size(); ++slot) {
          const TensorView a = part->slice(static_cast<std::int64_t>(slot), 1), b = all->slice(list[slot], 1);
          EXPECT_EQ(std::memcmp(a.data, b.data, static_cast<std::size_t>(b.num_bytes())), 0)
              << name << " of slot " << slot << " in " << to_string(precision);
        }
      }
      expect_same(got->weights.shared, whole.weights.shared);
    }
  }
}

// [[0,0,1],[2,3,1]]: expert 0 twice on a rank, expert 1 on both. Every slot's rows come out as its expert's do.
TEST(ShardLoad, Case117_ReplicasOnOneRankComputeWhatTheirExpertComputes) {
  const Checkpoint checkpoint = Checkpoint::open(kTiny).value();
  LoadOptions load;
  load.precision = Precision::kW8A8;
  const LoadedLayer whole = checkpoint.load(1, load).value();
  const std::int64_t H = whole.config.hidden;
  const Buffer rows = random_x(3, H);
  const auto run_grouped = [&](const LoadedLayer& loaded, std::span<const std::int32_t> of_slot) {
    LayerOptions options = options_for(Precision::kW8A8, 3);
    const Layer layer = Layer::create(loaded.config, loaded.weights, options).value();
    Buffer offset(DType::kI32, {num_local(loaded.config) + 1}), out(DType::kBF16, {3, H});
    offset.fill_with([&](std::int64_t i) {  // one row each for three slots
      return static_cast<double>(std::count_if(of_slot.begin(), of_slot.end(), [&](auto slot) { return slot < i; }));
    });
    GuardedWorkspace workspace(layer.workspace_bytes());
    Ctx ctx;
    ctx.workspace = workspace.span();
    const Status status = layer.forward_grouped({rows.view(), {}}, {offset.view()}, out.view(), ctx);
    EXPECT_TRUE(status.is_ok()) << status.message();
    return out;
  };
  for (const std::vector<std::int32_t>& list : {std::vector<std::int32_t>{0, 0, 1}, {2, 3, 1}}) {
    load.experts = list;
    const Buffer got = run_grouped(checkpoint.load(1, load).value(), std::vector<std::int32_t>{0, 1, 2});
    for (std::int64_t slot = 0; slot < 3; ++slot) {
      const std::vector<std::int32_t> all_to(3, list[static_cast<std::size_t>(slot)]);
      const Buffer want = run_grouped(whole, all_to);
      EXPECT_TRUE(same_bits(got.view().slice(slot, 1), want.view().slice(slot, 1))) << "slot " << slot;
    }
  }
}

TEST(ShardLoad, Case114_ARankWithoutExpertsLoadsNone) {
  for (const auto& path : models()) {
    const Checkpoint checkpoint = Checkpoint::open(path).value();
    const std::int64_t layer = checkpoint.moe_layers().back();
    const LayerInfo info = checkpoint.layer_info(layer).value();
    for (const Precision precision : info.precisions) {
      LoadOptions options;
      options.precision = precision;
      options.first_expert = info.config.num_experts;
      options.num_local = kNoExperts;
      const Result<LoadedLayer> none = checkpoint.load(layer, options);
      ASSERT_TRUE(none.is_ok()) << path << ": " << none.status().message();
      EXPECT_EQ(num_local(none->config), 0);
      EXPECT_EQ(none->weights.experts.w13.shape[0], 0);
      EXPECT_EQ(num_bytes(none->weights.experts), 0);
      EXPECT_TRUE(Layer::create(none->config, none->weights, options_for(precision, 2)).is_ok()) << path;
    }
  }
}

// What is read is the part: a NaN in another rank's rows or columns, or in another expert, is not met.
TEST(ShardLoad, OnlyThePartIsRead) {
  Crafted crafted(320, DType::kBF16, "none");
  const std::string prefix = "model.layers.1.mlp.experts.";
  const auto nan = 0x7FC0;
  crafted.tensors[prefix + "0.gate_proj.weight"].set_bits(319 * 160, nan);  // column 319 of I
  crafted.tensors[prefix + "0.up_proj.weight"].set_bits(0, nan);            // column 0
  crafted.tensors[prefix + "0.down_proj.weight"].set_bits(200, nan);        // row 0, column 200
  crafted.tensors[prefix + "2.down_proj.weight"].set_bits(0, nan);
  write_file(crafted.folder / "model.safetensors", crafted.tensors);
  const Checkpoint checkpoint = Checkpoint::open(crafted.folder.path()).value();
  LoadOptions options;
  options.precision = Precision::kBF16;
  std::int64_t bytes = 0;
  options.progress = [&](std::int64_t, std::int64_t total) { bytes = total; };
  const auto num_nan = [&](std::vector<std::int32_t> experts, TensorShard part) {
    options.experts = std::move(experts);
    options.tensor_shard = part;
    return checkpoint.load(1, options)->num_nan;
  };
  EXPECT_EQ(num_nan({}, {}), 4);
  const std::int64_t all = bytes;
  EXPECT_EQ(num_nan({0, 1}, {}), 3);
  EXPECT_EQ(num_nan({0, 1}, {0, 3}), 1);  // [0,112)
  EXPECT_EQ(num_nan({0, 1}, {1, 3}), 1);  // [112,224)
  EXPECT_EQ(num_nan({0, 1}, {2, 3}), 1);  // [224,320)
  EXPECT_LT(bytes, all / 2);
  EXPECT_EQ(num_nan({1, 3}, {0, 3}), 0);
  EXPECT_EQ(num_nan({0, 0}, {2, 3}), 2) << "of both slots";
}

}  // namespace
}  // namespace sluice::test
