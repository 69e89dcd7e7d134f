// A layer on a GPU through the C ABI: from a checkpoint and from host weights, on a stream, with the C++ layer's bits.
#include "sluice/c_api.h"

#include "harness/source_dir.h"
#include "gpu/gpu_layer.h"

namespace sluice::test {
namespace {

sluice_tensor to_c(const TensorView& view) {
  sluice_tensor t;
  std::memset(&t, 0, sizeof(t));
  if (!view.is_present()) return t;
  t.data = view.data;
  t.dtype = static_cast<std::int32_t>(view.dtype);
  t.rank = view.rank;
  for (int i = 0; i < view.rank; ++i) {
    t.shape[i] = view.shape[static_cast<std::size_t>(i)];
    t.stride[i] = view.stride[static_cast<std::size_t>(i)];
  }
  return t;
}

using CApiCuda = GpuTest;

TEST_F(CApiCuda, UploadedWeightsGiveTheBitsOfTheCppLayer) {
  MoeConfig config = small_config();
  config.shared_intermediate = 0;
  const RandomLayer m = random_layer(config, {.expert_dtype = DType::kE4M3});
  Result<Layer> cpp = make_gpu_layer(m, gpu_options(Precision::kW8A8, 9));
  ASSERT_TRUE(cpp.is_ok()) << cpp.status().message();
  const Buffer x = random_x(9, 256);
  const Outcome want = run_on_gpu(*cpp, x.view());

  sluice_context* context = nullptr;
  ASSERT_EQ(sluice_context_create(&context), SLUICE_OK);
  sluice_moe_config c;
  SLUICE_INIT(c);
  c.hidden = 256, c.intermediate = 128, c.num_experts = 16, c.top_k = 4;
  c.score = 1, c.group_score = 2, c.renorm = 1, c.has_score_bias = 1, c.n_group = 4, c.topk_group = 2;
  c.routed_scaling_factor = 2.5f;
  sluice_layer_weights w;
  SLUICE_INIT(w);
  w.w_gate = to_c(m.weights.w_gate);
  w.score_bias = to_c(m.weights.score_bias);
  w.experts.w13 = to_c(m.weights.experts.w13);
  w.experts.w13_scale = to_c(m.weights.experts.w13_scale);
  w.experts.w2 = to_c(m.weights.experts.w2);
  w.experts.w2_scale = to_c(m.weights.experts.w2_scale);
  sluice_options options;
  SLUICE_INIT(options);
  options.precision = SLUICE_W8A8;
  options.max_tokens = 9;
  options.device_kind = SLUICE_CUDA;
  sluice_layer* layer = nullptr;
  // Host memory that is not to be uploaded is refused, not read.
  EXPECT_EQ(sluice_layer_create(context, &c, &w, &options, &layer), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error(context)).find("host memory"), std::string::npos);
  options.upload = 1;
  ASSERT_EQ(sluice_layer_create(context, &c, &w, &options, &layer), SLUICE_OK) << sluice_last_error(context);

  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  sluice_context_set_stream(context, stream);
  Buffer out(DType::kF32, {9, 256});
  const Twin x_twin(x), out_twin(out);
  Result<device::Buffer> workspace = device::Buffer::allocate(kGpu, sluice_layer_workspace_bytes(layer), "workspace");
  ASSERT_TRUE(workspace.is_ok());
  const sluice_tensor cx = to_c(x_twin.view()), cout = to_c(out_twin.view());
  EXPECT_EQ(sluice_layer_forward(context, layer, &cx, &cout, nullptr, nullptr, nullptr, workspace->data(),
                                 static_cast<std::size_t>(workspace->bytes())),
            SLUICE_OK)
      << sluice_last_error(context);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  out_twin.fetch();
  EXPECT_TRUE(same_bits(out.view(), want.out.view()));
  // A host tensor is refused by name.
  const sluice_tensor on_host = to_c(x.view());
  EXPECT_EQ(sluice_layer_forward(context, layer, &on_host, &cout, nullptr, nullptr, nullptr, workspace->data(),
                                 static_cast<std::size_t>(workspace->bytes())),
            SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error(context)).find("x is said to be on GPU 0"), std::string::npos);
  sluice_layer_destroy(layer);
  cudaStreamDestroy(stream);
  sluice_context_destroy(context);
}

TEST_F(CApiCuda, CheckpointsAreUploaded) {
  sluice_context* context = nullptr;
  ASSERT_EQ(sluice_context_create(&context), SLUICE_OK);
  sluice_options options;
  SLUICE_INIT(options);
  options.precision = SLUICE_W8A8;
  options.max_tokens = 4;
  options.device_kind = SLUICE_CUDA;
  options.first_expert = 4;
  options.num_local = 8;
  sluice_layer* layer = nullptr;
  const std::string model = (source_dir() / "data" / "tiny-dsv3").string();
  EXPECT_EQ(sluice_layer_create_from_checkpoint(context, model.c_str(), 1, &options, &layer), SLUICE_OK)
      << sluice_last_error(context);
  std::vector<char> text(sluice_layer_describe(layer, nullptr, 0) + 1);
  sluice_layer_describe(layer, text.data(), text.size());
  EXPECT_NE(std::string(text.data()).find("grouped_gemm: cuda"), std::string::npos) << text.data();
  sluice_layer_destroy(layer);
  sluice_context_destroy(context);
}

}  // namespace
}  // namespace sluice::test
