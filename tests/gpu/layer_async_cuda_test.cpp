// What an engine does with a layer on a GPU beside calling it once: CUDA graphs, streams, threads, several devices. And
// what it may do wrong: every refusal comes before anything is launched.
#include <gmock/gmock.h>

#include <thread>

#include "gpu/gpu_layer.h"

namespace sluice::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class Stream {
 public:
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Captured in the global mode, in which CUDA itself refuses calls that allocate or synchronise.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<Status()>& body) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    status = body();
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    if (graph == nullptr) return;
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &num_nodes), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&exec_, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
  }
  ~Graph() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay(cudaStream_t stream) const {
    ASSERT_EQ(cudaGraphLaunch(exec_, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  Status status;
  std::size_t num_nodes = 0;

 private:
  cudaGraphExec_t exec_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(Graphs, GpuVariants, testing::ValuesIn(kVariants), variant_name);

// One graph, replayed with other routing from larger to smaller to empty and back: each time the bits of an eager call.
TEST_P(GpuVariants, AReplayedGraphFollowsTheRouting) {
  const std::int64_t tokens = 48;
  const RandomLayer m = model_of(GetParam());
  for_each_gemm(m, gpu_options(precision(), tokens), [&](const Layer& layer, const GpuGemm&) {
    const Stream stream;
    const Buffer x = random_x(tokens, 256);
    Buffer ids(DType::kI32, {tokens, 4}), weights(DType::kF32, {tokens, 4}), out(DType::kF32, {tokens, 256});
    ids.fill_constant(-1);
    weights.fill_uniform(4, 0.1, 1.0);
    const Twin x_twin(x), ids_twin(ids), weights_twin(weights), out_twin(out);
    const GpuWorkspace workspace(layer);
    const Layer::RoutedInput input{x_twin.view(), {}, {ids_twin.view()}, weights_twin.view(), {}};
    const Graph graph(stream, [&] { return layer.forward_routed(input, out_twin.view(), workspace.ctx(stream)); });
    ASSERT_TRUE(graph.status.is_ok()) << graph.status.message();
    EXPECT_GE(graph.num_nodes, 5u);
    Rng rng(5);
    for (int round = 0; round < 9; ++round) {
      ids.fill_with([&](std::int64_t i) -> double {
        switch (round % 6) {
          case 0: return static_cast<double>(rng.integer(0, 15));                  // all slots
          case 1: return i < 30 ? static_cast<double>(rng.integer(0, 15)) : -1.0;  // a few tokens
          case 2: return 3.0;                                                      // one expert takes all
          case 3: return -1.0;                                                     // none
          case 4: return i == 100 ? 15.0 : -1.0;                                   // one row
          default: return rng.integer(0, 1) == 0 ? -1.0 : static_cast<double>(rng.integer(0, 3));
        }
      });
      ids_twin.send(ids.view());
      workspace.poison();
      out_twin.fill(0xFF);
      graph.replay(stream);
      out_twin.fetch();
      const Buffer replayed = out.clone();
      workspace.poison();
      out_twin.fill(0xFF);
      ASSERT_TRUE(layer.forward_routed(input, out_twin.view(), workspace.ctx()).is_ok());
      out_twin.fetch();
      EXPECT_TRUE(same_bits(replayed.view(), out.view())) << "round " << round;
      workspace.expect_guards();
    }
  });
}

TEST_P(GpuVariants, TheOtherEntryPointsCanBeCapturedToo) {
  const RandomLayer m = model_of(GetParam());
  LayerOptions options = gpu_options(precision(), 16);
  options.max_rows_per_expert = 8;
  options.routed_only = true;
  const DataPath path = path_of(GetParam());
  for_each_gemm(m, options, [&](const Layer& layer, const GpuGemm&) {
    const Stream stream;
    Buffer x = random_x(16, 256), rows = random_x(128, 256, 9);
    Buffer out(DType::kF32, {16, 256}), y(path.y, {128, 256}), y2(path.y, {128, 256});
    Buffer offset(DType::kI32, {17}), count(DType::kI32, {16});
    offset.fill_with([](std::int64_t i) { return static_cast<double>(8 * i); });
    count.fill_constant(8);
    const Twin x_twin(x), rows_twin(rows), out_twin(out), y_twin(y), y2_twin(y2), offset_twin(offset),
        count_twin(count);
    const GpuWorkspace workspace(layer);
    const Ctx ctx = workspace.ctx(stream);
    const Graph forward(stream, [&] { return layer.forward(x_twin.view(), out_twin.view(), ctx); });
    ASSERT_TRUE(forward.status.is_ok()) << forward.status.message();
    const Graph grouped(stream, [&] {
      return layer.forward_grouped({rows_twin.view(), {}}, {offset_twin.view()}, y_twin.view(), ctx);
    });
    ASSERT_TRUE(grouped.status.is_ok()) << grouped.status.message();
    const Graph masked(stream, [&] {
      return layer.forward_masked({rows_twin.view(), {}}, count_twin.view(), y2_twin.view(), ctx);
    });
    ASSERT_TRUE(masked.status.is_ok()) << masked.status.message();
    for (std::uint64_t seed : {1, 2, 3}) {
      x.fill_normal(seed);
      x_twin.send(x.view());
      workspace.poison();
      forward.replay(stream);
      out_twin.fetch();
      EXPECT_TRUE(same_bits(out.view(), run_on_gpu(layer, x.view()).out.view())) << seed;
    }
    // Full, fewer, one, none: the padded and the contiguous layout agree where both have rows, and leave the rest alone.
    for (std::int64_t n : {8, 5, 1, 0}) {
      count.fill_constant(static_cast<double>(n));
      offset.fill_with([&](std::int64_t i) { return static_cast<double>(n * i); });
      count_twin.send(count.view());
      offset_twin.send(offset.view());
      for (const Twin* twin : {&y_twin, &y2_twin}) twin->send(Buffer(path.y, {128, 256}).view());
      Buffer packed(DType::kBF16, {128, 256});
      for (std::int64_t e = 0; e < 16; ++e) {
        for (std::int64_t i = 0; i < n * 256; ++i) packed.set(e * n * 256 + i, rows.at(e * 8 * 256 + i));
      }
      workspace.poison();
      masked.replay(stream);
      rows_twin.send(packed.view());
      workspace.poison();
      grouped.replay(stream);
      rows_twin.send(rows.view());
      y_twin.fetch();
      y2_twin.fetch();
      for (std::int64_t e = 0; e < 16; ++e) {
        EXPECT_TRUE(same_bits(y.view().slice(e * n, n), y2.view().slice(e * 8, n))) << n << " rows, expert " << e;
        EXPECT_TRUE(is_poison(y2.view().slice(e * 8 + n, 8 - n))) << n << " rows, expert " << e;
      }
      EXPECT_TRUE(is_poison(y.view().slice(16 * n, 128 - 16 * n))) << n << " rows";
      workspace.expect_guards();
    }
  });
}

// ---------------------------------------------------------------------------------------------------------

using LayerAsyncCuda = GpuTest;

// One layer, eight threads, each with a stream and a workspace of its own.
TEST_F(LayerAsyncCuda, OneLayerManyThreadsAndStreams) {
  const RandomLayer m = model_of(variant("w8a8"));
  Result<Layer> layer = make_gpu_layer(m, gpu_options(Precision::kW8A8, 64));
  ASSERT_TRUE(layer.is_ok()) << layer.status().message();
  std::vector<Outcome> want;
  std::vector<Buffer> xs;
  for (std::uint64_t i = 0; i < 8; ++i) {
    xs.push_back(random_x(8 * static_cast<std::int64_t>(i) + 1, 256, i));
    want.push_back(run_on_gpu(*layer, xs.back().view()));
  }
  std::vector<std::thread> threads;
  std::vector<int> num_different(8, 0);
  for (std::size_t i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      const Stream stream;
      const std::int64_t tokens = xs[i].view().shape[0];
      Buffer out(DType::kF32, {tokens, 256});
      const Twin x_twin(xs[i]), out_twin(out);
      const GpuWorkspace workspace(*layer);
      for (int round = 0; round < 20; ++round) {
        EXPECT_TRUE(layer->forward(x_twin.view(), out_twin.view(), workspace.ctx(stream)).is_ok());
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        out_twin.fetch();
        num_different[i] += same_bits(out.view(), want[i].out.view()) ? 0 : 1;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_THAT(num_different, testing::Each(0));
}

TEST_F(LayerAsyncCuda, SeveralDevicesAndTheCurrentOneIsPutBack) {
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  if (count < 2) GTEST_SKIP() << "two GPUs are needed, there is one";
  const RandomLayer m = model_of(variant("w8a8"));
  const Buffer x = random_x(20, 256);
  std::vector<Layer> layers;
  for (int d : {0, 1}) {
    LayerOptions options = gpu_options(Precision::kW8A8, 20);
    options.machine = Machine::detect_cuda(d).value();
    Result<Layer> layer = make_gpu_layer(m, options);
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    layers.push_back(std::move(*layer));
  }
  const Outcome want = run_on_gpu(layers[0], x.view());
  for (int current : {1, 0}) {
    ASSERT_EQ(cudaSetDevice(current), cudaSuccess);
    for (int d : {0, 1}) {
      const Device device{DeviceKind::kCuda, d};
      Buffer out(DType::kF32, {20, 256});
      const Twin x_twin(x.view(), device), out_twin(out.view(), device);
      const GpuWorkspace workspace(layers[static_cast<std::size_t>(d)]);
      ASSERT_TRUE(layers[static_cast<std::size_t>(d)].forward(x_twin.view(), out_twin.view(), workspace.ctx()).is_ok());
      out_twin.fetch();
      EXPECT_TRUE(same_bits(out.view(), want.out.view())) << "GPU " << d;
      int now = -1;
      ASSERT_EQ(cudaGetDevice(&now), cudaSuccess);
      EXPECT_EQ(now, current);
      // Memory of the one device given to the layer of the other.
      TensorView mislabelled = x_twin.view();
      mislabelled.device.index = 1 - d;
      const Status status =
          layers[static_cast<std::size_t>(1 - d)].forward(mislabelled, out_twin.view(), workspace.ctx());
      EXPECT_THAT(status.message(), AllOf(HasSubstr("x is said to be on GPU " + std::to_string(1 - d)),
                                          HasSubstr("memory of GPU " + std::to_string(d))));
    }
  }
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

// Every wrong call is made while a stream is captured: the graph stays empty, so nothing was launched, and the outputs
// keep their poison.
TEST_F(LayerAsyncCuda, WrongCallsAreRefusedBeforeAnyLaunch) {
  const RandomLayer m = model_of(variant("w8a8"));
  LayerOptions options = gpu_options(Precision::kW8A8, 8);
  options.max_rows_per_expert = 4;
  options.routed_only = true;
  Result<Layer> made = make_gpu_layer(m, options);
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  const Layer& layer = *made;
  const Stream stream;
  const Buffer x = random_x(8, 256);
  Buffer out(DType::kF32, {8, 256}), ids(DType::kI32, {8, 4}), weights(DType::kF32, {8, 4}), y(DType::kBF16, {64, 256});
  Buffer offset(DType::kI32, {17}), count(DType::kI32, {16}), rows(DType::kBF16, {64, 256});
  ids.fill_constant(1);
  weights.fill_constant(1);
  const Twin xd(x), outd(out), idsd(ids), weightsd(weights), yd(y), offsetd(offset), countd(count), rowsd(rows);
  const GpuWorkspace workspace(layer);
  const Ctx ctx = workspace.ctx(stream);
  void* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, 1 << 16), cudaSuccess);

  const auto at = [](TensorView view, const void* data) {
    view.data = const_cast<void*>(data);
    return view;
  };
  const auto on_cpu = [](TensorView view) {
    view.device = {};
    return view;
  };
  const auto routed = [&](TensorView a, TensorView b, TensorView c, TensorView d) {
    return [&layer, &ctx, a, b, c, d] { return layer.forward_routed({a, {}, {b}, c, {}}, d, ctx); };
  };
  Ctx small = ctx;
  small.workspace = ctx.workspace.first(ctx.workspace.size() - 1);
  Ctx on_host = ctx;
  std::vector<std::byte> host(ctx.workspace.size());
  on_host.workspace = host;
  Ctx null = ctx;
  null.workspace = {};
  TensorView wide = xd.view();
  wide.shape[0] = 9;
  struct Wrong {
    const char* what;
    std::function<Status()> call;
    std::vector<std::string> words;
  };
  const Wrong wrong[] = {
      {"x is host memory",
       routed(at(xd.view(), x.view().data), idsd.view(), weightsd.view(), outd.view()),
       {"x is said to be on GPU 0", "host memory"}},
      {"x is pinned host memory",
       routed(at(xd.view(), pinned), idsd.view(), weightsd.view(), outd.view()),
       {"x is said to be on GPU 0", "pinned host memory"}},
      {"x is labelled cpu",
       routed(on_cpu(xd.view()), idsd.view(), weightsd.view(), outd.view()),
       {"x = bf16[8,256] is on the CPU", "the layer is on GPU 0"}},
      {"ids are host memory",
       routed(xd.view(), at(idsd.view(), ids.view().data), weightsd.view(), outd.view()),
       {"topk_idx", "host memory"}},
      {"weights are host memory",
       routed(xd.view(), idsd.view(), at(weightsd.view(), weights.view().data), outd.view()),
       {"topk_weight", "host memory"}},
      {"out is host memory",
       routed(xd.view(), idsd.view(), weightsd.view(), at(outd.view(), out.view().data)),
       {"out", "host memory"}},
      {"x is null", routed(at(xd.view(), nullptr), idsd.view(), weightsd.view(), outd.view()), {"x is a null pointer"}},
      {"x is off by a byte",
       routed(at(xd.view(), xd.view().as<std::byte>() + 1), idsd.view(), weightsd.view(), outd.view()),
       {"x", "1 bytes off the 2 bytes"}},
      {"out is off by two bytes",
       routed(xd.view(), idsd.view(), weightsd.view(), at(outd.view(), outd.view().as<std::byte>() + 2)),
       {"out", "2 bytes off the 4 bytes"}},
      {"T above the plan", routed(wide, idsd.view(), weightsd.view(), outd.view()), {"T = 9", "max_tokens = 8"}},
      {"counters on the host",
       [&] {
         return layer.forward_routed({xd.view(),
                                      {},
                                      {idsd.view()},
                                      weightsd.view(),
                                      TensorView::dense(pinned, DType::kI64, {kNumCounters}, kGpu)},
                                     outd.view(), ctx);
       },
       {"counters", "pinned host memory"}},
      {"small workspace",
       [&] { return layer.forward(xd.view(), outd.view(), small); },
       {std::to_string(layer.workspace_bytes() - 1), std::to_string(layer.workspace_bytes())}},
      {"host workspace",
       [&] { return layer.forward(xd.view(), outd.view(), on_host); },
       {"the workspace", "host memory"}},
      {"no workspace", [&] { return layer.forward(xd.view(), outd.view(), null); }, {"workspace is null"}},
      {"offsets on the host",
       [&] {
         return layer.forward_grouped({rowsd.view(), {}}, {at(offsetd.view(), offset.view().data)}, yd.view(), ctx);
       },
       {"forward_grouped", "expert_offset", "host memory"}},
      {"counts on the host",
       [&] {
         return layer.forward_masked({rowsd.view(), {}}, at(countd.view(), count.view().data), yd.view(), ctx);
       },
       {"forward_masked", "num_rows", "host memory"}},
      {"rows on the host",
       [&] {
         return layer.forward_masked({at(rowsd.view(), rows.view().data), {}}, countd.view(), yd.view(), ctx);
       },
       {"forward_masked", "rows is said", "host memory"}},
      {"y on the host",
       [&] {
         return layer.forward_masked({rowsd.view(), {}}, countd.view(), at(yd.view(), y.view().data), ctx);
       },
       {"forward_masked", "out is said", "host memory"}},
      {"counts where offsets go",
       [&] {
         return layer.forward_grouped({rowsd.view(), {}}, {countd.view()}, yd.view(), ctx);
       },
       {"expert_offset", "16", "17"}},
  };
  for (const Wrong& w : wrong) {
    const Graph graph(stream, w.call);
    EXPECT_FALSE(graph.status.is_ok()) << w.what;
    EXPECT_EQ(graph.num_nodes, 0u) << w.what << ": " << graph.status.message();
    for (const std::string& word : w.words) EXPECT_THAT(graph.status.message(), HasSubstr(word)) << w.what;
  }
  for (const Twin* twin : {&outd, &yd}) twin->fetch();
  EXPECT_TRUE(is_poison(out.view()));
  EXPECT_TRUE(is_poison(y.view()));
  // And none of it left an error behind.
  EXPECT_TRUE(layer.forward(xd.view(), outd.view(), ctx).is_ok());
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  cudaFreeHost(pinned);
}

TEST_F(LayerAsyncCuda, CreateRefusesWeightsOfTheWrongPlace) {
  const RandomLayer m = model_of(variant("w8a8"));
  const LayerOptions options = gpu_options(Precision::kW8A8, 4);
  const Result<LayerWeights> up = upload(m.weights, kGpu);
  ASSERT_TRUE(up.is_ok());
  const auto refusal = [&](const auto& change) {
    LayerWeights weights = *up;
    change(weights);
    return Layer::create(m.config, weights, options).status().message();
  };
  EXPECT_THAT(refusal([&](LayerWeights& w) { w.experts.w2 = m.weights.experts.w2; }),
              AllOf(HasSubstr("experts.w2"), HasSubstr("on the CPU"), HasSubstr("GPU 0")));
  EXPECT_THAT(refusal([&](LayerWeights& w) { w.experts.w2.data = m.weights.experts.w2.data; }),
              AllOf(HasSubstr("experts.w2 is said to be on GPU 0"), HasSubstr("host memory")));
  EXPECT_THAT(refusal([&](LayerWeights& w) { w.score_bias.data = m.weights.score_bias.data; }),
              HasSubstr("score_bias"));
  // Uploaded weights in a layer of the CPU: by the label.
  LayerOptions cpu = options;
  cpu.machine = Machine::detect_cpu(1);
  EXPECT_THAT(Layer::create(m.config, *up, cpu).status().message(), AllOf(HasSubstr("GPU 0"), HasSubstr("the CPU")));
  // And by the address, where the label lies.
  LayerWeights relabelled = m.weights;
  relabelled.experts.w2.data = up->experts.w2.data;
  EXPECT_THAT(Layer::create(m.config, relabelled, cpu).status().message(),
              AllOf(HasSubstr("experts.w2 is said to be on the CPU"), HasSubstr("memory of a GPU")));
  EXPECT_TRUE(Layer::create(m.config, m.weights, cpu).is_ok());
  LayerOptions checked = options;
  checked.checked = true;
  EXPECT_THAT(Layer::create(m.config, *up, checked).status().message(), HasSubstr("checked needs the host"));
}

}  // namespace
}  // namespace sluice::test
