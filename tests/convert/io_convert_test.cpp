// Conversions of whole checkpoints, byte by byte: every format, source type and family, fused layouts, shards, layers,
// copies.
#include "convert/fixture.h"

namespace sluice::io {
namespace {

// ---- what is written -------------------------------------------------------------------------------------------

TEST_F(Convert, EveryFormatAndSourceTypeIsExact) {
  for (DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
    const FileTensors source = plain_tensors(dtype);
    write(source);
    for (WeightFormat format : kAllWeightFormats) {
      SCOPED_TRACE(fmt::format("{} to {}", to_string(dtype), to_string(format)));
      ConvertRequest r = request(format);
      r.replace = true;
      const ConvertReport report = must(r);
      // The fourth layer's experts are none of the model's.
      FileTensors want = expected(source, format);
      const std::string extra = "model.layers.3.mlp.experts.0.gate_proj.weight";
      want.erase(extra + (format == WeightFormat::kFp8Block ? "_scale_inv" : "_scale"));
      want[extra] = source.at(extra);
      expect_equal(read_all(out()), want);
      EXPECT_EQ(report.num_quantised, 30);
      EXPECT_EQ(report.num_copied, static_cast<std::int64_t>(source.size()) - 30);
      EXPECT_THAT(report.layers, ElementsAre(1, 2));
      EXPECT_LE(report.worst_share, 1.0);
      EXPECT_GT(report.worst_share, 0.9);  // half a step is nearly reached among so many
      EXPECT_LE(report.mean_error, report.worst_error);
      EXPECT_GT(report.mean_error, format == WeightFormat::kInt8Channel ? 1e-3 : 1e-2);
      EXPECT_LT(report.worst_error, format == WeightFormat::kInt8Channel ? 1e-2 : 4e-2);
    }
  }
}

TEST_F(Convert, ConfigKeepsItsKeysAndSaysWhatWasDone) {
  config_["zebra"] = {{"b", 0.1}, {"a", 1e-6}};
  config_["quantization_config"] = nullptr;  // as configuration classes write "none"
  write(plain_tensors(DType::kBF16));
  for (WeightFormat format : kAllWeightFormats) {
    ConvertRequest r = request(format);
    r.replace = true;
    must(r);
    nlohmann::json got = nlohmann::json::parse(text_of(out() / "config.json"));
    const nlohmann::json q = got["quantization_config"];
    got["quantization_config"] = nullptr;
    EXPECT_EQ(got, config_);
    const bool block = format == WeightFormat::kFp8Block, int8 = format == WeightFormat::kInt8Channel;
    const nlohmann::json ignored = q[block ? "modules_to_not_convert" : "ignore"];
    EXPECT_THAT(ignored.get<std::vector<std::string>>(),
                AllOf(Contains("lm_head"), Contains("model.layers.1.mlp.gate"), Contains("model.embed_tokens"),
                      Contains("model.layers.2.self_attn.q_proj"), Contains("model.layers.0.mlp.gate_proj"),
                      Not(Contains("model.layers.1.input_layernorm")), Not(Contains(HasSubstr("shared_experts")))));
    EXPECT_THAT(ignored.get<std::vector<std::string>>(),
                Contains(block ? "model.layers.3.mlp.experts" : "re:model\\.layers\\.3\\.mlp\\.experts\\..*"));
    if (block) {
      EXPECT_EQ(q["quant_method"], "fp8");
      EXPECT_EQ(q["fmt"], "e4m3");
      EXPECT_EQ(q["activation_scheme"], "dynamic");
      EXPECT_EQ(q["weight_block_size"], nlohmann::json({128, 128}));
      continue;
    }
    EXPECT_EQ(q["quant_method"], "compressed-tensors");
    EXPECT_EQ(q["format"], int8 ? "int-quantized" : "float-quantized");
    const nlohmann::json group = q["config_groups"]["group_0"];
    for (const auto& [key, strategy, dynamic] :
         {std::tuple("weights", "channel", false), std::tuple("input_activations", "token", true)}) {
      EXPECT_EQ(group[key]["num_bits"], 8);
      EXPECT_EQ(group[key]["type"], int8 ? "int" : "float");
      EXPECT_EQ(group[key]["strategy"], strategy);
      EXPECT_EQ(group[key]["dynamic"], dynamic);
      EXPECT_EQ(group[key]["symmetric"], true);
    }
  }
}

TEST_F(Convert, TheLoaderReadsWhatIsWritten) {
  const FileTensors source = plain_tensors(DType::kBF16);
  write(source);
  for (WeightFormat format : kAllWeightFormats) {
    ConvertRequest r = request(format);
    r.replace = true;
    must(r);
    auto opened = Checkpoint::open(out());
    ASSERT_TRUE(opened.is_ok()) << opened.status().message();
    const auto info = opened->layer_info(2);
    ASSERT_TRUE(info.is_ok()) << info.status().message();
    EXPECT_EQ(info->expert_format, format == WeightFormat::kFp8Block     ? "e4m3 128x128"
                                   : format == WeightFormat::kFp8Channel ? "e4m3 per channel"
                                                                         : "int8 per channel");
    EXPECT_EQ(info->shared_format, info->expert_format);
    LoadOptions options;
    options.precision = Precision::kBF16;
    const auto loaded = opened->load(2, options);
    ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
    // Dequantised by the loader: within the step of the format and a bf16 rounding of the source.
    const double step = format == WeightFormat::kInt8Channel ? 0.5 / 127 : 1.0 / 16;
    for (std::int64_t j = 0; j < 4; ++j) {
      const FileTensor& up = source.at(fmt::format("model.layers.2.mlp.experts.{}.up_proj.weight", j));
      for (std::int64_t i = 0; i < 136 * 160; ++i) {
        const double got =
            test::decode(DType::kBF16, loaded->weights.experts.w13.as<std::uint16_t>()[(j * 2 + 1) * 136 * 160 + i]);
        ASSERT_NEAR(got, up.at(i), step + 0x1p-8) << i;
      }
    }
  }
}

TEST_F(Convert, FusedSourcesGiveTheBytesOfSplitOnes) {
  const FileTensors split = plain_tensors(DType::kBF16);
  for (WeightFormat format : kAllWeightFormats) {
    write(split);
    ConvertRequest r = request(format);
    must(r);
    const FileTensors want = read_all(out());
    write(fuse(split, false));
    r.out = folder_ / "out2";
    const ConvertReport report = must(r);
    EXPECT_EQ(report.num_quantised, 30);
    expect_equal(read_all(r.out), want);
    fs::remove_all(out());
    fs::remove_all(r.out);
  }
}

TEST_F(Convert, ShardsHoldTheSameTensorsUnderAnIndex) {
  write(plain_tensors(DType::kBF16));
  must(request());
  const FileTensors one = read_all(out());
  EXPECT_FALSE(fs::exists(out() / "model.safetensors.index.json"));
  for (std::int64_t bytes : {std::int64_t{1}, std::int64_t{30000}, std::int64_t{200000}}) {
    ConvertRequest r = request();
    r.out = folder_ / fmt::format("sharded{}", bytes);
    r.max_shard_bytes = bytes;
    const ConvertReport report = must(r);
    EXPECT_GT(report.num_shards, 1);
    EXPECT_TRUE(fs::exists(r.out / fmt::format("model-00001-of-{:05}.safetensors", report.num_shards)));
    expect_equal(read_all(r.out), one);
    const auto index = nlohmann::json::parse(text_of(r.out / "model.safetensors.index.json"));
    EXPECT_EQ(index["metadata"]["total_size"], report.written_bytes);
    EXPECT_EQ(index["weight_map"].size(), one.size());
    // A weight lies beside its scale, and no file is larger than asked for unless one pair is.
    for (const auto& [name, file] : index["weight_map"].items()) {
      if (index["weight_map"].contains(name + "_scale_inv")) {
        EXPECT_EQ(index["weight_map"][name + "_scale_inv"], file) << name;
      }
      if (bytes == 200000) {
        EXPECT_LE(fs::file_size(r.out / file.get<std::string>()), 200000u + 8192u);
      }
    }
    auto opened = Checkpoint::open(r.out);
    ASSERT_TRUE(opened.is_ok()) << opened.status().message();
    EXPECT_TRUE(opened->layer_info(1).is_ok());
  }
}

TEST_F(Convert, LayersThatAreNotAskedForStayAsTheyAre) {
  const FileTensors source = plain_tensors(DType::kBF16);
  write(source);
  for (WeightFormat format : kAllWeightFormats) {
    ConvertRequest r = request(format);
    r.layers = {2, 2};
    r.replace = true;
    const ConvertReport report = must(r);
    EXPECT_THAT(report.layers, ElementsAre(2));
    EXPECT_EQ(report.num_quantised, 15);
    for (const auto& [name, t] : read_all(out())) {
      if (!name.starts_with("model.layers.1.")) continue;
      EXPECT_TRUE(t.bytes == source.at(name).bytes) << name;
    }
    // Both kinds are read, and the list of what is not quantised says which.
    auto opened = Checkpoint::open(out());
    ASSERT_TRUE(opened.is_ok());
    for (const auto& [layer, text] : {std::pair(1, "bf16"), std::pair(2, "per channel")}) {
      const auto info = opened->layer_info(layer);
      ASSERT_TRUE(info.is_ok()) << info.status().message();
      EXPECT_THAT(info->expert_format, HasSubstr(layer == 2 && format == WeightFormat::kFp8Block ? "128x128" : text));
    }
    const auto config = read_hf_config(out() / "config.json");
    ASSERT_TRUE(config.is_ok());
    const auto ignored = IgnoreList::compile(config->quant.ignored);
    ASSERT_TRUE(ignored.is_ok());
    for (const char* module : {"experts.0.gate_proj", "experts.3.down_proj", "shared_experts.up_proj"}) {
      EXPECT_TRUE(*ignored->covers(std::string("model.layers.1.mlp.") + module)) << module;
      EXPECT_FALSE(*ignored->covers(std::string("model.layers.2.mlp.") + module)) << module;
    }
    EXPECT_TRUE(*ignored->covers("model.layers.2.mlp.gate"));
  }
}

TEST_F(Convert, OtherFilesAreCopiedAndOtherWeightsAreNot) {
  write(plain_tensors(DType::kBF16));
  std::string bytes(100000, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 >> 3);
  fs::create_directories(in() / "templates/deep");
  fs::create_directories(in() / ".cache/x");
  for (const char* name :
       {"tokenizer.json", "generation_config.json", "empty", "templates/deep/a.jinja", "config.json.bak"})
    test::write_text(in() / name, name == std::string("empty") ? "" : bytes + name);
  for (const char* name : {"pytorch_model.bin", "stray.safetensors", "model.gguf", ".cache/x/y"})
    test::write_text(in() / name, bytes);
  fs::create_symlink(in() / "tokenizer.json", in() / "link.json");
  fs::create_symlink("/dev/null", in() / "null.json");
  fs::create_directory_symlink(in() / "templates", in() / "again");
  const ConvertReport report = must(request());
  EXPECT_THAT(report.copied_files, ElementsAre("config.json.bak", "empty", "generation_config.json", "link.json",
                                               "templates/deep/a.jinja", "tokenizer.json"));
  EXPECT_THAT(report.left_out_files,
              ElementsAre(".cache/", "again/", "model.gguf", "null.json", "pytorch_model.bin", "stray.safetensors"));
  for (const std::string& name : report.copied_files) {
    EXPECT_TRUE(text_of(out() / name) == text_of(in() / name)) << name;
    EXPECT_FALSE(fs::is_symlink(out() / name));
  }
  EXPECT_EQ(snapshot(out()).size(), report.copied_files.size() + 2 + 2);  // config, weights, two folders
}

TEST_F(Convert, ThreadsDoNotShow) {
  write(plain_tensors(DType::kBF16));
  ConvertRequest r = request();
  r.num_threads = 1;
  const ConvertReport one = must(r);
  const auto bytes = text_of(out() / "model.safetensors");
  r.num_threads = 5;
  r.replace = true;
  const ConvertReport five = must(r);
  EXPECT_TRUE(text_of(out() / "model.safetensors") == bytes);
  EXPECT_EQ(one.worst_error, five.worst_error);
  EXPECT_EQ(one.mean_error, five.mean_error);
  EXPECT_EQ(one.worst_share_at, five.worst_share_at);
}

TEST_F(Convert, ProgressRunsToTheEndTwice) {
  write(plain_tensors(DType::kBF16));
  ConvertRequest r = request();
  std::map<std::string, std::vector<std::int64_t>> seen;
  std::int64_t total = 0;
  r.progress = [&](std::string_view phase, std::int64_t done, std::int64_t all) {
    seen[std::string(phase)].push_back(done);
    total = all;
  };
  must(r);
  ASSERT_EQ(seen.size(), 2u);
  for (const char* phase : {"writing", "checking"}) {
    ASSERT_FALSE(seen[phase].empty()) << phase;
    EXPECT_TRUE(std::is_sorted(seen[phase].begin(), seen[phase].end()));
    EXPECT_EQ(seen[phase].back(), total);
  }
}

// ---- every family ----------------------------------------------------------------------------------------------

std::vector<std::string> fixture_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(fs::path(SLUICE_SOURCE_DIR) / "tests/fixtures/families"))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

class ConvertFamily : public ::testing::TestWithParam<std::string> {};

TEST_P(ConvertFamily, IsConvertedExactlyOrRefusedByName) {
  test::TempFolder folder;
  ConvertRequest r;
  r.model = fs::path(SLUICE_SOURCE_DIR) / "tests/fixtures/families" / GetParam();
  auto opened = Checkpoint::open(r.model);
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  r.layers = {opened->moe_layers().back()};  // the one the fixture holds
  const auto before = opened->layer_info(r.layers[0]);
  ASSERT_TRUE(before.is_ok());
  const FileTensors source = test::read_file(r.model / "model.safetensors");
  for (WeightFormat format : kAllWeightFormats) {
    r.format = format;
    r.out = folder / std::string(to_string(format));
    const auto report = convert(r);
    if (GetParam() == "gpt_oss") {
      EXPECT_EQ(report.status().code(), StatusCode::kUnsupported);
      EXPECT_THAT(report.status().message(), HasSubstr("the experts are fused, and the gpt_oss family has no names"));
      EXPECT_EQ(folder.num_files(), 0u);
      continue;
    }
    ASSERT_TRUE(report.is_ok()) << report.status().message();
    EXPECT_THAT(report->violations, IsEmpty());
    expect_equal(read_all(r.out), expected(source, format, GetParam() == "llama4_text"));
    EXPECT_EQ(report->num_quantised,
              3 * (before->config.num_experts + (before->config.shared_intermediate > 0 ? 1 : 0)));
    auto converted = Checkpoint::open(r.out);
    ASSERT_TRUE(converted.is_ok()) << converted.status().message();
    const auto after = converted->layer_info(r.layers[0]);
    ASSERT_TRUE(after.is_ok()) << after.status().message();
    EXPECT_EQ(after->gate, before->gate);
    EXPECT_EQ(after->expert_dtype, weight_dtype(format));
    EXPECT_EQ(after->cannot_run, before->cannot_run);
    EXPECT_THAT(report->left_out_files, ElementsAre("golden.safetensors"));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ConvertFamily, ::testing::ValuesIn(fixture_names()),
                         [](const auto& param_info) { return param_info.param; });

// The language model of a multimodal one, whose config nests it: transposed fused experts, names of their own.
TEST(ConvertNested, TheConfigOfTheWholeModelGetsTheKey) {
  test::TempFolder folder;
  SynthRequest synth;
  synth.out = folder / "in";
  synth.like = "llama4-scout";
  synth.num_experts = 3;
  synth.hidden = 192;
  synth.intermediate = 136;
  ASSERT_TRUE(synthesize(synth).is_ok());
  ConvertRequest r;
  r.model = folder / "in";
  r.format = WeightFormat::kFp8Channel;
  r.out = folder / "out";
  const auto report = convert(r);
  ASSERT_TRUE(report.is_ok()) << report.status().message();
  const auto config = nlohmann::json::parse(text_of(r.out / "config.json"));
  EXPECT_TRUE(config.contains("quantization_config"));
  EXPECT_FALSE(config["text_config"].contains("quantization_config"));
  expect_equal(read_all(r.out), expected(read_all(r.model), r.format, true));
  const auto info = Checkpoint::open(r.out)->layer_info(0);
  ASSERT_TRUE(info.is_ok()) << info.status().message();
  EXPECT_EQ(info->expert_format, "e4m3 per channel");
}

}  // namespace
}  // namespace sluice::io
