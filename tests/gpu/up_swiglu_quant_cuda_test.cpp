// The up GEMM with the activation for an epilogue: bit for bit what "cuda-wgmma" and then swiglu_quant "cuda" make, in every
// layout of the kernel, at ragged rows, and nothing touched that is not its own.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "fused/up_swiglu_quant/cuda.h"
#include "gpu/device_mirror.h"
#include "grouped_gemm/cuda.h"
#include "grouped_gemm/problem.h"

namespace sluice::test {
namespace {

using up_swiglu_quant::Args;
using up_swiglu_quant::Config;

class UpSwigluQuantCuda : public GpuTest {};

struct Result2 {
  Buffer a, a_scale;
};

class OnDevice {
 public:
  OnDevice(const Problem& p, const Activation& activation, ScaleFormat format)
      : problem_(p),
        width_(p.spec.n / 2),
        a_(aligned_copy(p.args.a)),
        w_(aligned_copy(p.args.w)),
        h_(DType::kBF16, {p.num_rows, p.spec.n}, {.row_pitch_elems = ceil_div(p.spec.n, 8) * 8}) {
    args_.up = p.args;
    args_.up.a = a_.view();
    args_.up.w = w_.view();
    for (TensorView* view : {&args_.up.a, &args_.up.w, &args_.up.a_scale, &args_.up.w_scale, &args_.up.bias,
                             &args_.up.groups.counts, &args_.up.groups.expert_offset.view}) {
      inputs_.add(*view);
    }
    args_.up.out = h_.view();
    args_.act.groups = args_.up.groups;
    args_.act.h = h_.view();
    args_.act.activation = activation;
    args_.act.scale_format = format;
  }

  // Outputs start as poison; what comes back has kept its guards, the gaps between rows and the rows of nobody.
  template <class Call>
  Result2 run(const Call& call) {
    Result2 result{
        Buffer(DType::kE4M3, {problem_.num_rows, width_}, {.row_pitch_elems = ceil_div(width_, 16) * 16 + 32}),
        Buffer(DType::kF32, {ceil_div(width_, 128), problem_.num_rows}, {.row_pitch_elems = problem_.num_rows + 3})};
    DeviceMirror mirror;
    Args args = args_;
    args.act.a = result.a.view();
    args.act.a_scale = result.a_scale.view();
    mirror.add(args.act.a);
    mirror.add(args.act.a_scale);
    const Status ran = call(args);
    EXPECT_TRUE(ran.is_ok()) << ran.message();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    mirror.copy_back();
    EXPECT_TRUE(mirror.equals_host()) << "outside the tensors";
    EXPECT_TRUE(result.a.guards_intact());
    EXPECT_TRUE(result.a_scale.guards_intact());
    EXPECT_TRUE(inputs_.equals_host()) << "an input changed";
    for (std::int64_t r = 0; r < problem_.num_rows; ++r) {
      if (problem_.is_owned(r)) continue;
      EXPECT_TRUE(is_poison(result.a.view().slice(r, 1))) << "row " << r << " belongs to nobody";
    }
    return result;
  }
  Result2 run_config(const Config& config) {
    return run([&](const Args& args) {
      Args legal = args;
      legal.up.out.device = legal.act.h.device = args.up.a.device;
      legal.up.groups.expert_offset.view.device = legal.up.groups.counts.device = args.up.a.device;
      legal.act.groups = legal.up.groups;
      const Status checked = up_swiglu_quant::check(legal);
      EXPECT_TRUE(checked.is_ok()) << checked.message();
      return up_swiglu_quant::run_cuda_config(args, {}, config);
    });
  }
  Result2 composed() {
    return run([&](const Args& args) {
      Args both = args;
      TensorView h = h_.view();
      DeviceMirror mirror;
      mirror.add(h);
      both.up.out = both.act.h = h;
      SLUICE_TRY(grouped_gemm::run_wgmma(both.up, {}));
      const Status status = swiglu_quant::impls().front().run(both.act, {});
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      return status;
    });
  }
  grouped_gemm::GpuProblem problem() const { return grouped_gemm::problem_of(args_.up); }

 private:
  const Problem& problem_;
  std::int64_t width_;
  Buffer a_, w_, h_;
  Args args_;
  DeviceMirror inputs_;
};

std::vector<Config> configs(const grouped_gemm::GpuProblem& problem) {
  std::vector<Config> all;
  for (std::int64_t tokens : {8, 16, 32, 64, 96}) {
    Config config;
    config.tile.tokens = tokens;
    all.push_back(up_swiglu_quant::with_stages(config, problem));
  }
  for (int split : {2, 4}) {
    Config config;
    config.split = split;
    config = up_swiglu_quant::with_stages(config, problem);
    if (config.tile.stages > 4) all.push_back(config);
  }
  all.push_back(up_swiglu_quant::choose_config(problem));
  return all;
}

void expect_same(const Result2& got, const Result2& want, const std::string& what) {
  EXPECT_TRUE(same_bits(got.a.view(), want.a.view())) << what << ": a";
  EXPECT_TRUE(same_bits(got.a_scale.view(), want.a_scale.view())) << what << ": a_scale";
}

Spec spec_of(std::vector<std::int64_t> counts, std::int64_t width, std::int64_t k) {
  Spec s;
  s.counts = std::move(counts);
  s.n = 2 * width;
  s.part_rows = width;
  s.k = k;
  s.a = s.w = DType::kE4M3;
  s.out = DType::kBF16;
  return s;
}

constexpr Activation kSilu{};
constexpr Activation kClamped{ActivationKind::kSiluClamped, 0.75f, 0.0f};
constexpr Activation kGptOss{ActivationKind::kGptOss, 7.0f, 1.702f};

TEST_F(UpSwigluQuantCuda, EveryLayoutHasTheBitsOfTheComposedStages) {
  for (int variant = 0; variant < 8; ++variant) {
    Spec s = spec_of({1, 0, 7, 8, 9, 127, 128, 129, 300, 0, 2},
                     variant < 2   ? 256
                     : variant < 5 ? 144
                                   : 77,
                     variant % 2 == 0 ? 384 : 1168);
    if (variant >= 4) s.counts = {3, 0, 33, 1};
    s.bias = variant == 1 || variant == 4;
    s.rows_per_group = variant == 3 ? 301 : variant == 6 ? 40 : 0;
    s.scale_by_row = variant == 2;
    s.fill = variant == 7 ? Fill::kBits : Fill::kReal;
    s.seed = static_cast<std::uint64_t>(variant) + 3;
    Problem p(s);
    // Gates beyond what the fast sigmoid takes, and saturated ones.
    if (variant == 2 || variant == 5) {
      p.a_scale->fill_uniform(s.seed, 0.5, 3.0);
      p.poison_unowned();
    }
    const Activation activation = variant % 3 == 0 ? kSilu : variant % 3 == 1 ? kClamped : kGptOss;
    OnDevice device(p, activation, variant % 4 == 1 ? ScaleFormat::kUe8m0 : ScaleFormat::kF32);
    const Result2 want = device.composed();
    for (const Config& config : configs(device.problem())) {
      const std::string what = "variant " + std::to_string(variant) + ", " + config.to_string();
      expect_same(device.run_config(config), want, what);
      expect_same(device.run_config(config), want, what + ", again");
    }
  }
}

// A row that is NaN, or an infinite value, stays alone in its row and out of the scale.
TEST_F(UpSwigluQuantCuda, WhatIsNotFiniteStaysAlone) {
  Spec s = spec_of({20, 5, 8}, 200, 256);
  Problem p(s);
  p.a.set(3 * s.k + 70, NAN);
  p.w.set((1 * s.n + 9) * s.k + 5, NAN);
  p.w_scale.set(2 * p.w_scale.num_elements() / 3, 3e38);
  OnDevice device(p, kSilu, ScaleFormat::kF32);
  const Result2 want = device.composed();
  for (const Config& config : configs(device.problem()))
    expect_same(device.run_config(config), want, config.to_string());
}

TEST_F(UpSwigluQuantCuda, ReplaysFollowTheOffsetsOfTheMoment) {
  Spec s = spec_of({4, 4, 0, 4}, 256, 512);
  s.unowned_rows = 0;
  const Problem p(s);
  OnDevice device(p, kSilu, ScaleFormat::kF32);
  for (const Config& config : configs(device.problem())) {
    device.run([&](const Args& args) {
      cudaStream_t stream = nullptr;
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(up_swiglu_quant::run_cuda_config(args, {stream, {}, 1}, config).is_ok());
      EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
      EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
      void* const offsets = args.up.groups.expert_offset.view.data;
      const std::size_t bytes = span_bytes(args.act.a);
      const std::vector<std::vector<std::int32_t>> routes = {
          {0, 12, 12, 12, 12}, {0, 0, 1, 3, 12}, {0, 0, 0, 0, 0}, {0, 4, 8, 8, 12}};
      for (const std::vector<std::int32_t>& route : routes) {
        std::vector<char> want(bytes), got(bytes);
        EXPECT_EQ(cudaMemcpy(offsets, route.data(), route.size() * 4, cudaMemcpyHostToDevice), cudaSuccess);
        const auto poison = [&] {
          EXPECT_EQ(cudaMemset2D(args.act.a.data, static_cast<std::size_t>(args.act.a.stride[0]), 0x55,
                                 static_cast<std::size_t>(args.act.a.shape[1]),
                                 static_cast<std::size_t>(args.act.a.shape[0])),
                    cudaSuccess);
          // The graph runs in a stream of its own, which waits neither for this nor for a copy from pageable memory.
          EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        };
        poison();
        Config plain;
        EXPECT_TRUE(
            up_swiglu_quant::run_cuda_config(args, {}, up_swiglu_quant::with_stages(plain, device.problem())).is_ok());
        EXPECT_EQ(cudaMemcpy(want.data(), args.act.a.data, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
        poison();
        EXPECT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(got.data(), args.act.a.data, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
        EXPECT_TRUE(want == got) << config.to_string() << ", route ending in " << route[3];
      }
      cudaGraphExecDestroy(exec);
      cudaGraphDestroy(graph);
      cudaStreamDestroy(stream);
      return Status::ok();
    });
  }
}

// Hundreds of experts, few rows, short K: where kernels are caught racing.
TEST_F(UpSwigluQuantCuda, ManyRunsHaveTheSameBits) {
  for (int shape = 0; shape < 2; ++shape) {
    std::vector<std::int64_t> counts(384);
    for (int i = 0; i < 8; ++i) ++counts[static_cast<std::size_t>(shape == 1 ? 5 : i * 97 % 384)];
    Spec s = spec_of(counts, 128, shape == 0 ? 128 : 1024);
    s.unowned_rows = 0;
    const Problem p(s);
    OnDevice device(p, kSilu, ScaleFormat::kF32);
    const Result2 want = device.composed();
    for (const Config& config : configs(device.problem())) {
      const Result2 got = device.run([&](const Args& args) {
        const std::size_t bytes = span_bytes(args.act.a);
        std::vector<char> first(bytes), now(bytes);
        for (int i = 0; i < 200; ++i) {
          EXPECT_TRUE(up_swiglu_quant::run_cuda_config(args, {}, config).is_ok());
          if (i > 0 && i % 40 != 39) continue;
          EXPECT_EQ(cudaMemcpy(now.data(), args.act.a.data, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
          if (i == 0) first = now;
          EXPECT_TRUE(first == now) << config.to_string() << ", run " << i;
        }
        return Status::ok();
      });
      expect_same(got, want, config.to_string());
    }
  }
}

}  // namespace
}  // namespace sluice::test
