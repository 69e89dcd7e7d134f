// Conversions that are refused or stopped, what they say, and what they leave behind (nothing); and that the check of
// the result finds what is wrong with it.
#include "convert/fixture.h"

namespace sluice::io {
namespace {

// ---- what is refused -------------------------------------------------------------------------------------------

TEST_F(Convert, WeightsThatAreNotFiniteAreNamed) {
  const std::string module = "model.layers.2.mlp.experts.3.up_proj.weight";
  for (WeightFormat format : kAllWeightFormats) {
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const auto& [value, word] : {std::pair(std::numeric_limits<double>::quiet_NaN(), "NaN"),
                                        std::pair(HUGE_VAL, "+Inf"), std::pair(-HUGE_VAL, "-Inf")}) {
        FileTensors tensors = plain_tensors(dtype);
        tensors[module].set(130 * 160 + 7, value);
        tensors[module].set(131 * 160, value);
        write(tensors);
        expect_refused(request(format), StatusCode::kBadData, {module + "[130,7] is " + word, "2 of them"});
      }
    }
  }
  // In the fused tensor's own indices, where it lies.
  FileTensors tensors = plain_tensors(DType::kBF16);
  tensors[module].set(130 * 160 + 7, HUGE_VAL);
  write(fuse(tensors, false));
  expect_refused(request(), StatusCode::kBadData, {"model.layers.2.mlp.experts.gate_up_proj[3,266,7] is +Inf"});
  // What is copied is not judged.
  tensors = plain_tensors(DType::kBF16);
  tensors["model.layers.1.mlp.gate.weight"].set(3, HUGE_VAL);
  write(tensors);
  must(request());
}

TEST_F(Convert, QuantisedSourcesAreRefusedByName) {
  write(plain_tensors(DType::kBF16));
  const nlohmann::json plain = config_;
  for (const char* text : {R"({"quant_method":"fp8","fmt":"e4m3","weight_block_size":[128,128]})",
                           R"({"quant_method":"compressed-tensors"})", R"({"quant_method":"mxfp4"})"}) {
    config_["quantization_config"] = nlohmann::json::parse(text);
    write(plain_tensors(DType::kBF16));
    const std::string method = config_["quantization_config"]["quant_method"];
    expect_refused(request(), StatusCode::kUnsupported,
                   {"config.json", "quantised already (quant_method " + method + ")"});
  }
  config_ = plain;
  config_["compression_config"] = {{"format", "int-quantized"}};
  write(plain_tensors(DType::kBF16));
  expect_refused(request(), StatusCode::kUnsupported, {"quantised already (compression_config)"});
  config_ = plain;
  // No word of it in the config, but in the file.
  for (DType dtype : {DType::kE4M3, DType::kI8, DType::kU8}) {
    FileTensors tensors = plain_tensors(DType::kBF16);
    for (auto& [name, t] : tensors) {
      if (name.find("layers.1.mlp.experts") != std::string::npos) t = test::make_tensor(dtype, t.shape, 1);
    }
    write(tensors);
    expect_refused(request(), StatusCode::kUnsupported, {"layer 1 (model.layers.1.mlp.*): the experts are"});
  }
  // What was converted once is not converted again.
  write(plain_tensors(DType::kBF16));
  must(request());
  ConvertRequest again = request(WeightFormat::kInt8Channel);
  again.model = out();
  again.out = folder_ / "again";
  expect_refused(again, StatusCode::kUnsupported, {"quantised already (quant_method fp8)"});
}

TEST_F(Convert, BrokenSourcesAreRefused) {
  const FileTensors whole = plain_tensors(DType::kBF16);
  FileTensors tensors = whole;
  tensors.erase("model.layers.2.mlp.experts.1.down_proj.weight");
  write(tensors);
  expect_refused(request(), StatusCode::kBadData, {"missing: model.layers.2.mlp.experts.1.down_proj.weight"});
  tensors = whole;
  tensors["model.layers.2.mlp.experts.1.down_proj.weight"].shape = {136, 160};
  write(tensors);
  expect_refused(request(), StatusCode::kBadData, {"experts.1.down_proj.weight is bf16[136,160]"});
  tensors = whole;
  tensors["model.layers.2.mlp.experts.1.down_proj.weight_scale_inv"] = test::make_tensor(DType::kF32, {2, 2}, 1);
  write(tensors);
  expect_refused(request(), StatusCode::kBadData, {"experts.1.down_proj.weight_scale_inv"});
  write(whole);
  ConvertRequest r = request();
  r.layers = {0};
  expect_refused(r, StatusCode::kNotFound, {"layer 0 of 3 has no experts"});
  r.layers = {1, 7};
  expect_refused(r, StatusCode::kNotFound, {"there is no layer 7"});
  test::write_text(in() / "config.json", "{");
  expect_refused(request(), StatusCode::kBadData, {"config.json", "JSON error"});
  fs::remove(in() / "config.json");
  expect_refused(request(), StatusCode::kNotFound, {"config.json"});
  config_["first_k_dense_replace"] = 3;
  write(whole);
  expect_refused(request(), StatusCode::kUnsupported, {"has no layers with experts"});
  config_["model_type"] = "unheard_of";
  write(whole);
  expect_refused(request(), StatusCode::kUnsupported, {"model_type 'unheard_of' is not known"});
  r = request();
  r.model = in() / "model.safetensors";
  expect_refused(r, StatusCode::kInvalidArgument, {"is no folder"});
  r.model = folder_ / "absent";
  expect_refused(r, StatusCode::kNotFound, {"absent"});
  config_ = plain_config();
  write(whole);
  test::write_index(in(), {{"a", "model-00001-of-00002.safetensors"}});
  expect_refused(request(), StatusCode::kNotFound, {"model-00001-of-00002.safetensors"});
}

TEST_F(Convert, OutputsThatWouldTouchTheSourceAreRefused) {
  write(plain_tensors(DType::kBF16));
  ConvertRequest r = request();
  fs::create_directory_symlink(in(), folder_ / "alias");
  for (const bool force : {false, true}) {
    r.replace = force;
    for (const fs::path& path : {in(), in() / "", folder_ / "alias", in() / ".." / "in"}) {
      r.out = path;
      expect_refused(r, StatusCode::kInvalidArgument, {"is the model itself"});
    }
    r.out = in() / "converted";
    expect_refused(r, StatusCode::kInvalidArgument, {"lies in the model's folder"});
    r.out = folder_.path();
    expect_refused(r, StatusCode::kInvalidArgument, {"the model lies in the output's folder"});
  }
  // A model of links, as download caches keep them: what they point to is the source too.
  fs::create_directories(folder_ / "blobs");
  fs::rename(in() / "model.safetensors", folder_ / "blobs/weights");
  test::write_text(folder_ / "blobs/config.json", "{}");
  fs::create_symlink(folder_ / "blobs/weights", in() / "model.safetensors");
  r = request();
  must(r);
  r.replace = true;
  r.out = folder_ / "blobs";
  expect_refused(r, StatusCode::kInvalidArgument, {"model.safetensors' of the model lies in the output's folder"});
}

TEST_F(Convert, OutputsThatExist) {
  write(plain_tensors(DType::kBF16));
  fs::create_directory(out());
  must(request());  // an empty folder is as good as none
  expect_refused(request(), StatusCode::kInvalidArgument, {"exists and is not empty", "--force"});
  ConvertRequest r = request(WeightFormat::kInt8Channel);
  r.replace = true;
  test::write_text(out() / "old", "x");
  must(r);
  EXPECT_FALSE(fs::exists(out() / "old"));
  EXPECT_EQ(Checkpoint::open(out())->layer_info(1)->expert_format, "int8 per channel");
  // Only a checkpoint is replaced.
  r.out = folder_ / "precious";
  fs::create_directory(r.out);
  test::write_text(r.out / "thesis.txt", "x");
  expect_refused(r, StatusCode::kInvalidArgument, {"no config.json in it"});
  r.out = folder_ / "file";
  test::write_text(r.out, "x");
  expect_refused(r, StatusCode::kInvalidArgument, {"exists and is not a folder"});
  r.out = folder_ / "file" / "below";
  expect_refused(r, StatusCode::kIoError, {"file"});
  r.out = "";
  expect_refused(r, StatusCode::kInvalidArgument, {"is no path to write to"});
  r.out = "/proc/sluice-test/out";
  expect_refused(r, StatusCode::kIoError, {"/proc/sluice-test"});
  // A failure leaves the one that was to be replaced.
  FileTensors tensors = plain_tensors(DType::kBF16);
  tensors["model.layers.2.mlp.experts.3.up_proj.weight"].set(0, HUGE_VAL);
  write(tensors);
  r.out = out();
  expect_refused(r, StatusCode::kBadData, {"is +Inf"});
  // Missing parents are made, and unmade.
  r.out = folder_ / "a/b/c";
  expect_refused(r, StatusCode::kBadData, {"is +Inf"});
  write(plain_tensors(DType::kBF16));
  must(r);
  EXPECT_TRUE(fs::exists(folder_ / "a/b/c/config.json"));
}

TEST_F(Convert, StoppedAnywhereLeavesNothing) {
  write(plain_tensors(DType::kBF16));
  test::write_text(in() / "tokenizer.json", "{}");
  const auto before = snapshot(folder_.path());
  int calls = 0, stop_at = -1;
  ConvertRequest r = request();
  r.stop = [&] { return ++calls == stop_at; };
  must(r);
  const int all = calls;
  EXPECT_GT(all, 80);  // each of some forty tensors twice
  fs::remove_all(out());
  for (stop_at = 1; stop_at <= all; stop_at += 1 + all / 23) {
    calls = 0;
    expect_refused(r, StatusCode::kIoError, {"stopped when asked to"});
  }
  stop_at = all;
  calls = 0;
  expect_refused(r, StatusCode::kIoError, {"stopped when asked to"});
  EXPECT_TRUE(snapshot(folder_.path()) == before);
}

// ---- the check itself ------------------------------------------------------------------------------------------

TEST_F(Convert, TheCheckFindsWhatIsWrong) {
  write(plain_tensors(DType::kBF16));
  test::write_text(in() / "tokenizer.json", "{\"a\": 1}");
  for (WeightFormat format : kAllWeightFormats) {
    SCOPED_TRACE(to_string(format));
    ConvertRequest r = request(format);
    r.replace = true;
    must(r);
    auto plan = plan_convert(r);
    ASSERT_TRUE(plan.is_ok()) << plan.status().message();
    const FileTensors sound = test::read_file(out() / "model.safetensors");
    const auto verify = [&](const FileTensors& tensors) {
      test::write_file(out() / "model.safetensors", tensors);
      ConvertReport report;
      const Status status = verify_converted(*plan, out(), r, report);
      EXPECT_TRUE(status.is_ok()) << status.message();
      EXPECT_EQ(report.num_violations == 0, report.violations.empty());
      return report;
    };
    EXPECT_EQ(verify(sound).num_violations, 0);
    const std::string module = "model.layers.2.mlp.experts.1.down_proj.weight";
    const std::string scale = module + (format == WeightFormat::kFp8Block ? "_scale_inv" : "_scale");
    {  // one step of one element
      FileTensors tensors = sound;
      std::byte& byte = tensors[module].bytes[129 * 136 + 5];
      byte = static_cast<std::byte>(std::to_integer<int>(byte) ^ 4);
      const ConvertReport report = verify(tensors);
      EXPECT_EQ(report.num_violations, 1);
      ASSERT_EQ(report.violations.size(), 1u);
      EXPECT_THAT(report.violations[0], AllOf(HasSubstr(module + "[129,5] stands for"), HasSubstr("the bound is")));
      EXPECT_GT(report.worst_share, 1.0);
      EXPECT_EQ(report.worst_share_at, module + "[129,5]");
    }
    {  // a scale one bit off, which no element's bound would show
      FileTensors tensors = sound;
      tensors[scale].bytes[0] = static_cast<std::byte>(std::to_integer<int>(tensors[scale].bytes[0]) ^ 1);
      EXPECT_THAT(verify(tensors).violations, Contains(HasSubstr(scale + "[0,0] is")));
      tensors[scale].set(0, std::numeric_limits<double>::quiet_NaN());
      EXPECT_GT(verify(tensors).num_violations, 100);
      EXPECT_EQ(verify(tensors).violations.size(), 8u);
    }
    {  // two experts exchanged
      FileTensors tensors = sound;
      std::swap(tensors["model.layers.1.mlp.experts.0.up_proj.weight"].bytes,
                tensors["model.layers.1.mlp.experts.1.up_proj.weight"].bytes);
      EXPECT_GT(verify(tensors).num_violations, 1000);
    }
    {  // a zeroed row
      FileTensors tensors = sound;
      std::fill_n(tensors[module].bytes.begin() + 7 * 136, 136, std::byte{0});
      const ConvertReport report = verify(tensors);
      EXPECT_GT(report.num_violations, 100);
      EXPECT_EQ(report.worst_tensor, module);
    }
    {  // copies, shapes, names
      FileTensors tensors = sound;
      tensors["model.embed_tokens.weight"].bytes[9] ^= std::byte{1};
      EXPECT_THAT(verify(tensors).violations,
                  ElementsAre(HasSubstr("byte 9 of the copied tensor model.embed_tokens.weight differs")));
      tensors = sound;
      tensors["model.embed_tokens.weight"].shape = {160, 8};
      EXPECT_THAT(verify(tensors).violations,
                  ElementsAre(HasSubstr("model.embed_tokens.weight is bf16[160,8], expected")));
      tensors = sound;
      tensors.erase("model.embed_tokens.weight");
      EXPECT_THAT(verify(tensors).violations, Contains(HasSubstr("model.embed_tokens.weight is not there")));
      tensors = sound;
      tensors["surplus"] = test::make_tensor(DType::kF32, {1}, 1);
      EXPECT_THAT(verify(tensors).violations, Contains(HasSubstr("tensors are there, expected")));
    }
    test::write_text(out() / "tokenizer.json", "{\"a\": 2}");
    EXPECT_THAT(verify(sound).violations, ElementsAre(HasSubstr("the copied file tokenizer.json differs")));
    test::write_text(out() / "tokenizer.json", "{\"a\": 1}");
    auto config = nlohmann::json::parse(text_of(out() / "config.json"));
    config["quantization_config"][format == WeightFormat::kFp8Block ? "modules_to_not_convert" : "ignore"].push_back(
        "model.layers.1.mlp.experts.2.gate_proj");
    test::write_text(out() / "config.json", config.dump());
    EXPECT_THAT(verify(sound).violations, Contains(HasSubstr("experts.2.gate_proj is quantised in the file")));
    config.erase("quantization_config");
    test::write_text(out() / "config.json", config.dump());
    EXPECT_THAT(verify(sound).violations, Contains(HasSubstr("layer 1")));
  }
}

TEST(OutputFolder, WhatAppearsMeanwhileIsNotOverwritten) {
  test::TempFolder folder;
  auto output = OutputFolder::create(folder / "out", false);
  ASSERT_TRUE(output.is_ok());
  test::write_text(output->path() / "config.json", "{}");
  fs::create_directory(folder / "out");
  test::write_text(folder / "out" / "other", "x");
  EXPECT_EQ(output->commit().code(), StatusCode::kIoError);
  EXPECT_EQ(text_of(folder / "out" / "other"), "x");
  EXPECT_FALSE(fs::exists(folder / "out" / "config.json"));
}

TEST(OutputFolder, LeftoversOfKilledRunsAreSteppedOver) {
  test::TempFolder folder;
  auto first = OutputFolder::create(folder / "out", false);
  ASSERT_TRUE(first.is_ok());
  auto second = OutputFolder::create(folder / "out", false);
  ASSERT_TRUE(second.is_ok());
  EXPECT_NE(first->path(), second->path());
  test::write_text(second->path() / "mine", "x");
  EXPECT_TRUE(second->commit().is_ok());
  EXPECT_EQ(text_of(folder / "out" / "mine"), "x");
}

}  // namespace
}  // namespace sluice::io
