// Layers of real models' sizes with random weights made on the GPU, a few tokens, sampled rows against plain loops; and the
// trained checkpoint of data/ against the values of its public implementation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "gpu/gpu_layer.h"
#include "harness/source_dir.h"
#include "harness/codec.h"
#include "io/safetensors.h"
#include "sluice/checkpoint.h"

namespace sluice::test {
namespace {

struct Shape {
  const char* name;
  std::int64_t experts, hidden, intermediate, top_k, shared;
  GateId gate;
  std::int64_t n_group, topk_group;
  Precision precision;
  bool by_plain_loops = true;  // seconds each: not where another shape has the same sizes
};
constexpr Shape kShapes[] = {
    {"deepseek_v3", 256, 7168, 2048, 8, 2048, GateId::kG3, 8, 4, Precision::kW8A8},
    {"kimi_k2", 384, 7168, 2048, 8, 2048, GateId::kG3, 1, 1, Precision::kW8A8, false},
    {"qwen3_30b", 128, 2048, 768, 8, 0, GateId::kG4, 1, 1, Precision::kW8A8},
    {"qwen3_30b_bf16", 128, 2048, 768, 8, 0, GateId::kG4, 1, 1, Precision::kBF16},
    {"qwen3_235b", 128, 4096, 1536, 8, 0, GateId::kG4, 1, 1, Precision::kW8A8},
    {"glm_4_5", 160, 5120, 1536, 8, 1536, GateId::kG3, 1, 1, Precision::kW8A8},
    {"deepseek_v2_lite_bf16", 64, 2048, 1408, 6, 2816, GateId::kG1, 1, 1, Precision::kBF16},
    {"mixtral_bf16", 8, 4096, 14336, 2, 0, GateId::kG4, 1, 1, Precision::kBF16},
    {"mixtral_w8a16", 8, 4096, 14336, 2, 0, GateId::kG4, 1, 1, Precision::kW8A16, false},
};
void PrintTo(const Shape& s, std::ostream* os) { *os << s.name; }

// A tensor on the GPU whose bytes repeat with a prime period, so that no two rows or experts are alike.
class Repeated {
 public:
  Repeated(DType dtype, std::initializer_list<std::int64_t> shape, double sigma, std::uint64_t seed)
      : view_(TensorView::dense(nullptr, dtype, shape, kGpu)) {
    const std::int64_t elements = std::min<std::int64_t>(view_.num_elements(), 1'048'583);
    Buffer pattern(dtype, {elements});
    if (sigma > 0) {
      pattern.fill_normal(seed, sigma);
    } else {
      pattern.fill_uniform(seed, 2e-4, 2e-3);  // scales
    }
    Result<device::Buffer> memory = device::Buffer::allocate(kGpu, view_.num_bytes(), "weights of the test");
    EXPECT_TRUE(memory.is_ok()) << memory.status().message();
    if (!memory) return;
    memory_ = std::move(*memory);
    view_.data = memory_.data();
    std::int64_t done = elements * size_bytes(dtype);
    EXPECT_TRUE(device::copy_to_device(kGpu, memory_.data(), pattern.view().data, done).is_ok());
    const std::int64_t period = done;
    while (done < memory_.bytes()) {
      // Whole periods only, so that the pattern goes on where it stopped.
      const std::int64_t count = std::min(memory_.bytes() - done, done / period * period);
      EXPECT_EQ(
          cudaMemcpy(memory_.data() + done, memory_.data(), static_cast<std::size_t>(count), cudaMemcpyDeviceToDevice),
          cudaSuccess);
      done += count;
    }
  }
  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  device::Buffer memory_;
};

// Groups `chosen` of a device tensor [L,...], on the host. Plain memory: these are hundreds of megabytes.
struct HostCopy {
  std::unique_ptr<std::byte[]> memory;
  TensorView view;
};
HostCopy some_experts(const TensorView& device, const std::vector<std::int64_t>& chosen) {
  HostCopy host;
  host.view = device;
  host.view.device = {};
  host.view.shape[0] = std::ssize(chosen);
  host.memory = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(host.view.num_bytes()));
  host.view.data = host.memory.get();
  for (std::int64_t i = 0; i < std::ssize(chosen); ++i) {
    const TensorView one = device.slice(chosen[static_cast<std::size_t>(i)], 1);
    EXPECT_TRUE(device::copy_to_host(kGpu, host.view.row(i), one.data, one.num_bytes()).is_ok());
  }
  return host;
}

class ShapesCuda : public GpuTest, public testing::WithParamInterface<Shape> {};
INSTANTIATE_TEST_SUITE_P(RealModels, ShapesCuda, testing::ValuesIn(kShapes),
                         [](const auto& p) { return std::string(p.param.name); });

TEST_P(ShapesCuda, SampledRowsAreTheReferences) {
  const Shape& s = GetParam();
  MoeConfig config;
  config.hidden = s.hidden;
  config.intermediate = s.intermediate;
  config.num_experts = s.experts;
  config.top_k = s.top_k;
  config.gate = gate_preset(s.gate);
  config.gate.n_group = s.n_group;
  config.gate.topk_group = s.topk_group;
  config.gate.routed_scaling_factor = 2.5f;
  config.shared_intermediate = s.shared;
  const bool is_fp8 = s.precision == Precision::kW8A8 || s.precision == Precision::kW8A16;
  const DType dtype = is_fp8 ? DType::kE4M3 : DType::kBF16;
  std::vector<std::unique_ptr<Repeated>> memory;
  const auto make = [&](DType type, std::initializer_list<std::int64_t> shape, double sigma) {
    memory.push_back(std::make_unique<Repeated>(type, shape, sigma, memory.size() + 1));
    return memory.back()->view();
  };
  const auto ffn = [&](std::int64_t L, std::int64_t I) {
    FfnWeights w;
    const double sigma = is_fp8 ? 60.0 : 1.0 / std::sqrt(static_cast<double>(s.hidden));
    w.w13 = make(dtype, {L, 2 * I, s.hidden}, sigma);
    w.w2 = make(dtype, {L, s.hidden, I}, sigma);
    if (is_fp8) {
      w.w13_scale = make(DType::kF32, {L, 2 * ceil_div(I, 128), ceil_div(s.hidden, 128)}, 0);
      w.w2_scale = make(DType::kF32, {L, ceil_div(s.hidden, 128), ceil_div(I, 128)}, 0);
    }
    return w;
  };
  LayerWeights weights;
  weights.w_gate = make(DType::kBF16, {s.experts, s.hidden}, 1.0 / std::sqrt(static_cast<double>(s.hidden)));
  if (config.gate.has_score_bias) weights.score_bias = make(DType::kF32, {s.experts}, 0.2);
  weights.experts = ffn(s.experts, s.intermediate);
  if (s.shared > 0) weights.shared = ffn(1, s.shared);
  if (HasFailure()) return;

  const std::int64_t tokens = 16;
  Result<Layer> layer = Layer::create(config, weights, gpu_options(s.precision, tokens));
  ASSERT_TRUE(layer.is_ok()) << layer.status().message();
  const Buffer x = random_x(tokens, s.hidden);
  const Outcome got = run_on_gpu(*layer, x.view());
  const Outcome again = run_on_gpu(*layer, x.view());
  EXPECT_TRUE(same_bits(again.out.view(), got.out.view()));

  // One against plain loops, which take seconds; one against the CPU's stages, which are held to them elsewhere.
  for (std::int64_t t : {std::int64_t{0}, tokens - 1}) {
    // The token's experts as a layer of their own: what the reference reads is what the GPU read.
    std::vector<std::int64_t> chosen;
    for (std::int64_t i = 0; i < s.top_k; ++i)
      chosen.push_back(static_cast<std::int64_t>(got.topk_idx.at(t * s.top_k + i)));
    std::vector<std::int64_t> distinct = chosen;
    std::sort(distinct.begin(), distinct.end());
    ASSERT_EQ(std::unique(distinct.begin(), distinct.end()), distinct.end());
    RandomLayer own;
    own.config = config;
    own.config.num_experts = s.top_k;
    own.config.gate = gate_preset(GateId::kG1);
    std::vector<HostCopy> copies;
    const auto keep = [&](HostCopy copy) {
      copies.push_back(std::move(copy));
      return copies.back().view;
    };
    own.weights.w_gate = keep(some_experts(weights.w_gate, chosen));
    const auto copy_ffn = [&](const FfnWeights& from, const std::vector<std::int64_t>& groups) {
      FfnWeights to;
      to.w13 = keep(some_experts(from.w13, groups));
      to.w2 = keep(some_experts(from.w2, groups));
      if (is_fp8) {
        to.w13_scale = keep(some_experts(from.w13_scale, groups));
        to.w2_scale = keep(some_experts(from.w2_scale, groups));
      }
      return to;
    };
    own.weights.experts = copy_ffn(weights.experts, chosen);
    if (s.shared > 0) own.weights.shared = copy_ffn(weights.shared, {0});
    Buffer ids(DType::kI32, {1, s.top_k});
    ids.fill_with([](std::int64_t i) { return static_cast<double>(i); });
    const Buffer want = routed_on_cpu(own, s.precision, x.view().slice(t, 1), ids.view(),
                                      got.topk_weight.view().slice(t, 1), DType::kF32, s.by_plain_loops && t == 0);
    EXPECT_LE(worst_row(got.out.view().slice(t, 1), want.view()), tensor_core_bound(s.precision)) << "token " << t;
  }

  // The gate on its own: the same ids as the CPU's, from weights of the same bytes.
  std::vector<std::int64_t> all(static_cast<std::size_t>(s.experts));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  const HostCopy w_gate = some_experts(weights.w_gate, all);
  Buffer logits(DType::kF32, {tokens, s.experts}), ids(DType::kI32, {tokens, s.top_k});
  Buffer weight(DType::kF32, {tokens, s.top_k}), bias(DType::kF32, {s.experts});
  ASSERT_TRUE(gate::logits_impls().back().run({x.view(), w_gate.view, {}, logits.view()}, {}).is_ok());
  gate::SelectArgs select{config.gate, logits.view(), {}, {ids.view()}, weight.view(), {}};
  if (config.gate.has_score_bias) {
    ASSERT_TRUE(device::copy_to_host(kGpu, bias.view().data, weights.score_bias.data, bias.view().num_bytes()).is_ok());
    select.score_bias = bias.view();
  }
  ASSERT_TRUE(gate::select_impls().back().run(select, {}).is_ok());
  EXPECT_TRUE(same_bits(got.topk_idx.view(), ids.view()));
  for (std::int64_t i = 0; i < tokens * s.top_k; ++i) EXPECT_NEAR(got.topk_weight.at(i), weight.at(i), 1e-5);
}

// ---------------------------------------------------------------------------------------------------------

const std::filesystem::path kModel = source_dir() / "data" / "tiny-dsv3";

TensorView view_of(const io::SafetensorsFile& file, const std::string& name) {
  const io::TensorEntry* entry = file.find(name);
  EXPECT_NE(entry, nullptr) << name;
  return TensorView::dense(file.data(*entry), entry->dtype, {entry->shape[0], entry->shape[1]});
}

struct GoldenCase {
  const char* name;
  Precision precision;
  double worst;  // as in golden_test: bounds on the relative L2 error of a row
  double mean;
};

class GoldenCuda : public GpuTest, public testing::WithParamInterface<GoldenCase> {};
INSTANTIATE_TEST_SUITE_P(TinyDsv3, GoldenCuda,
                         testing::Values(GoldenCase{"f32", Precision::kF32, 2e-6, 2e-6},
                                         GoldenCase{"w8a16", Precision::kW8A16, 1e-2, 1e-2},
                                         GoldenCase{"bf16", Precision::kBF16, 1e-2, 1e-2},
                                         GoldenCase{"w8a8", Precision::kW8A8, 7e-2, 3.5e-2}),
                         [](const auto& p) { return std::string(p.param.name); });

TEST_P(GoldenCuda, LayerOutputsEqualThePublicImplementation) {
  const GoldenCase& c = GetParam();
  auto golden = io::SafetensorsFile::open(kModel / "golden.safetensors");
  ASSERT_TRUE(golden.is_ok()) << golden.status().message();
  Result<Checkpoint> checkpoint = Checkpoint::open(kModel);
  ASSERT_TRUE(checkpoint.is_ok()) << checkpoint.status().message();
  for (std::int64_t index : {1, 2, 3}) {
    const std::string prefix = "layer" + std::to_string(index) + ".";
    const TensorView x = view_of(**golden, prefix + "x");
    LoadOptions load;
    load.precision = c.precision;
    Result<LoadedLayer> loaded = checkpoint->load(index, load);
    ASSERT_TRUE(loaded.is_ok()) << loaded.status().message();
    Result<LayerWeights> weights = upload(loaded->weights, kGpu);
    ASSERT_TRUE(weights.is_ok()) << weights.status().message();
    Result<Layer> layer = Layer::create(loaded->config, std::move(*weights), gpu_options(c.precision, x.shape[0]));
    ASSERT_TRUE(layer.is_ok()) << layer.status().message();
    const Outcome got = run_on_gpu(*layer, x);
    const TensorView want = view_of(**golden, prefix + "y_fp32");
    EXPECT_LE(worst_row(got.out.view(), want), c.worst) << "layer " << index;
    double mean = 0;
    for (std::int64_t t = 0; t < x.shape[0]; ++t) {
      mean += worst_row(got.out.view().slice(t, 1), want.slice(t, 1)) / static_cast<double>(x.shape[0]);
    }
    EXPECT_LE(mean, c.mean) << "layer " << index;
    const TensorView ids = view_of(**golden, prefix + "topk_idx_sorted");
    const TensorView values = view_of(**golden, prefix + "topk_weight");
    for (std::int64_t t = 0; t < x.shape[0]; ++t) {
      std::map<std::int32_t, float> chosen;  // ascending ids, as the file has them
      for (std::int64_t s = 0; s < 4; ++s)
        chosen[got.topk_idx.as<std::int32_t>()[t * 4 + s]] = got.topk_weight.as<float>()[t * 4 + s];
      std::int64_t s = 0;
      for (const auto& [id, weight] : chosen) {
        ASSERT_EQ(id, ids.as<std::int32_t>()[t * 4 + s]) << "layer " << index << " token " << t;
        ASSERT_NEAR(weight, values.as<float>()[t * 4 + s], 1e-6) << "layer " << index << " token " << t;
        ++s;
      }
    }
  }
}

}  // namespace
}  // namespace sluice::test
