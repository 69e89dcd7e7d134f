// The C ABI's words on devices, selections and expert ranges, as far as a CPU can show them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sluice/c_api.h"
#include "sluice/device.h"

namespace sluice::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::string kModel = std::string(SLUICE_SOURCE_DIR) + "/data/tiny-dsv3";

class CApiDevice : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(sluice_context_create(&context_), SLUICE_OK);
    SLUICE_INIT(options_);
    options_.precision = SLUICE_W8A8;
    options_.max_tokens = 2;
  }
  void TearDown() override {
    sluice_layer_destroy(layer_);
    sluice_context_destroy(context_);
  }
  sluice_status create() {
    sluice_layer_destroy(layer_);
    layer_ = nullptr;
    return sluice_layer_create_from_checkpoint(context_, kModel.c_str(), 1, &options_, &layer_);
  }
  std::string description() const {
    std::vector<char> text(sluice_layer_describe(layer_, nullptr, 0));
    EXPECT_EQ(sluice_layer_describe(layer_, text.data(), text.size()), text.size());
    return text.data();
  }
  std::string error() const { return sluice_last_error(context_); }

  sluice_context* context_ = nullptr;
  sluice_layer* layer_ = nullptr;
  sluice_options options_;
};

TEST_F(CApiDevice, DescribeSaysWhatWasChosenAndWhyNot) {
  ASSERT_EQ(create(), SLUICE_OK) << error();
  EXPECT_THAT(description(), AllOf(HasSubstr("up: grouped_gemm: cpu"), HasSubstr("not reference: "),
                                   HasSubstr("workspace: "), HasSubstr("h[R,2I]")));
  char little[8] = "xxxxxxx";
  EXPECT_GT(sluice_layer_describe(layer_, little, 4), 100u);
  EXPECT_EQ(std::string(little), description().substr(0, 3));
  EXPECT_EQ(little[4], 'x');
  EXPECT_EQ(sluice_layer_describe(nullptr, little, 4), 0u);
}

TEST_F(CApiDevice, ForcedAndDisabledByName) {
  options_.force = "grouped_gemm:reference";
  ASSERT_EQ(create(), SLUICE_OK) << error();
  EXPECT_THAT(description(), HasSubstr("up: grouped_gemm: reference"));
  options_.force = nullptr;
  options_.disable = "pack:cpu";
  ASSERT_EQ(create(), SLUICE_OK) << error();
  EXPECT_THAT(description(), HasSubstr("pack: reference"));
  options_.disable = "warp9";
  EXPECT_EQ(create(), SLUICE_INVALID_ARGUMENT);
  EXPECT_THAT(error(), AllOf(HasSubstr("options.disable"), HasSubstr("'warp9'")));
  options_.disable = nullptr;
  options_.force = "warp9";
  EXPECT_EQ(create(), SLUICE_INVALID_ARGUMENT);
  EXPECT_THAT(error(), AllOf(HasSubstr("options.force"), HasSubstr("'warp9'")));
}

TEST_F(CApiDevice, ExpertsOfOneRank) {
  options_.first_expert = 8;
  options_.num_local = 4;
  ASSERT_EQ(create(), SLUICE_OK) << error();
  EXPECT_THAT(description(), HasSubstr("expert_offset[L+1] i32: 20 bytes"));
  options_.num_local = 1000;
  EXPECT_EQ(create(), SLUICE_INVALID_ARGUMENT);
  EXPECT_THAT(error(), HasSubstr("num_local = 1000"));
}

TEST_F(CApiDevice, GpusThatAreNotThereAreRefusedInWords) {
  options_.device_kind = SLUICE_CUDA;
  options_.device_index = 1000;
  EXPECT_EQ(create(), SLUICE_UNSUPPORTED);
  EXPECT_THAT(error(), HasSubstr("options: " + Machine::detect_cuda(1000).status().message()));
  options_.device_kind = 2;
  EXPECT_EQ(create(), SLUICE_INVALID_ARGUMENT);
  EXPECT_THAT(error(), HasSubstr("options.device_kind = 2"));
  const Result<std::vector<Machine>> machines = cuda_machines();
  EXPECT_EQ(sluice_num_gpus(context_), machines ? static_cast<std::int32_t>(machines->size()) : 0);
  if (!machines) {
    EXPECT_EQ(error(), machines.status().message());
  }
  EXPECT_EQ(sluice_num_gpus(nullptr), 0);
  sluice_context_set_stream(nullptr, nullptr);
  EXPECT_STREQ(sluice_status_name(SLUICE_OUT_OF_MEMORY), "out of memory");
  EXPECT_STREQ(sluice_status_name(SLUICE_PEER_FAILURE), "peer failure");
}

}  // namespace
}  // namespace sluice::test
