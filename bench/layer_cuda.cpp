// Times whole layers on a GPU, from x to out, gate and sort included, on the rows of bench/grid.h. JSON lines.
//   gpu_layer [part of a shape's name]
// The routes are the gate's own choice on random x, near uniform; bytes count the experts it chose. First the outputs of
// up to 16 tokens are held against the same layer with its grouped GEMMs forced to the plain implementation.
#include <cmath>
#include <cstring>
#include <set>

#include "device_data.h"
#include "grid_config.h"
#include "sluice/layer.h"

namespace sluice::bench {
namespace {

constexpr Device kGpu{DeviceKind::kCuda, 0};
constexpr const char* kPlainGemm = "cuda-simt";
constexpr std::int64_t kCheckedTokens = 16;

// Device memory of one layer, and the views on it.
struct Weights {
  DeviceBuffer w_gate, score_bias, w13, w13_scale, w2, w2_scale;
  LayerWeights views;
};

TensorView view(const DeviceBuffer& buffer, DType dtype, std::initializer_list<std::int64_t> shape) {
  return TensorView::dense(buffer.as<void>(), dtype, shape, kGpu);
}

// One of the two stacked weights, with its scales.
void make_ffn(const GridRow& row, const GemmShape& gemm, DeviceBuffer& w, DeviceBuffer& scale, TensorView& w_view,
              TensorView& scale_view) {
  const std::int64_t count = row.local_experts * gemm.n * gemm.k;
  w = DeviceBuffer(count * (row.bf16 ? 2 : 1));
  w_view = view(w, row.bf16 ? DType::kBF16 : DType::kE4M3, {row.local_experts, gemm.n, gemm.k});
  if (row.bf16) {
    fill_bf16(w.as<std::uint16_t>(), count, Salt::kW);
    return;
  }
  fill_e4m3(w.as<std::uint8_t>(), count, Salt::kW);
  const std::int64_t n_blocks = ceil_div(gemm.n, kScaleBlock), k_blocks = ceil_div(gemm.k, kScaleBlock);
  scale = DeviceBuffer(row.local_experts * n_blocks * k_blocks * 4);
  fill_w_scale(scale.as<float>(), row.local_experts, n_blocks, k_blocks, true);
  scale_view = view(scale, DType::kF32, {row.local_experts, n_blocks, k_blocks});
}

Weights make_weights(const GridRow& row, const MoeConfig& config) {
  Weights weights;
  // Logits of a standard deviation near 1.5 for x of 37: the choice is neither all ties nor always the same.
  std::vector<float> gate(static_cast<std::size_t>(row.num_experts * row.hidden));
  std::uint64_t state = 7;
  const double span = 0.07 / std::sqrt(static_cast<double>(row.hidden));
  for (float& v : gate)
    v = static_cast<float>((static_cast<double>(next_random(state) >> 40) / (1 << 23) - 1.0) * span * 2);
  std::vector<std::uint16_t> gate_bf16(gate.size());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &gate[i], 4);
    gate_bf16[i] = static_cast<std::uint16_t>(bits >> 16);
  }
  weights.w_gate = upload(gate_bf16);
  weights.views.w_gate = view(weights.w_gate, DType::kBF16, {row.num_experts, row.hidden});
  if (config.gate.has_score_bias) {
    weights.score_bias = upload(std::vector<float>(static_cast<std::size_t>(row.num_experts), 0.0f));
    weights.views.score_bias = view(weights.score_bias, DType::kF32, {row.num_experts});
  }
  const auto [up, down] = gemms(row);
  FfnWeights& ffn = weights.views.experts;
  make_ffn(row, up, weights.w13, weights.w13_scale, ffn.w13, ffn.w13_scale);
  make_ffn(row, down, weights.w2, weights.w2_scale, ffn.w2, ffn.w2_scale);
  must(cudaDeviceSynchronize(), "fill");
  return weights;
}

// A layer with everything one forward needs.
class Run {
 public:
  Run(const GridRow& row, const MoeConfig& config, const LayerWeights& weights, std::int64_t tokens,
      const std::string& gemm) {
    LayerOptions options;
    options.precision = row.bf16 ? Precision::kBF16 : Precision::kW8A8;
    options.max_tokens = tokens;
    Result<Machine> machine = Machine::detect_cuda(0);
    if (!machine) {
      error_ = machine.status().message();
      return;
    }
    options.machine = *machine;
    if (!gemm.empty()) options.selection["grouped_gemm"].forced = gemm;
    Result<Layer> layer = Layer::create(config, weights, options);
    if (!layer) {
      error_ = layer.status().message();
      return;
    }
    layer_ = std::make_unique<Layer>(std::move(*layer));
    workspace_ = DeviceBuffer(layer_->workspace_bytes() + 256);
    out_ = DeviceBuffer(tokens * row.hidden * 2);
    ids_ = DeviceBuffer(tokens * row.top_k * 4);
    weight_ = DeviceBuffer(tokens * row.top_k * 4);
    out_view_ = view(out_, DType::kBF16, {tokens, row.hidden});
    routing_.topk_idx = {view(ids_, DType::kI32, {tokens, row.top_k})};
    routing_.topk_weight = view(weight_, DType::kF32, {tokens, row.top_k});
  }

  bool forward(const TensorView& x, cudaStream_t stream) {
    if (layer_ == nullptr) return false;
    Ctx ctx;
    ctx.stream = stream;
    ctx.workspace = {workspace_.as<std::byte>(), static_cast<std::size_t>(layer_->workspace_bytes())};
    const Status status = layer_->forward(x, out_view_, routing_, ctx);
    if (!status) error_ = status.message();
    return status.is_ok();
  }
  // After a forward: [rows, H] of the output; which expert every slot took.
  std::vector<std::uint16_t> out(std::int64_t rows) const {
    return download<std::uint16_t>(out_view_.data, rows * out_view_.shape[1]);
  }
  std::vector<std::int32_t> ids() const {
    return download<std::int32_t>(routing_.topk_idx.view.data, routing_.topk_idx.view.num_elements());
  }
  const std::string& error() const { return error_; }
  std::string gemm_name() const {
    for (const StageReport& report : layer_->stages()) {
      if (report.stage.find("grouped_gemm") != std::string::npos) return report.impl;
    }
    return "";
  }

 private:
  template <class T>
  static std::vector<T> download(const void* from, std::int64_t count) {
    std::vector<T> host(static_cast<std::size_t>(count));
    must(cudaMemcpy(host.data(), from, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return host;
  }

  std::unique_ptr<Layer> layer_;
  DeviceBuffer workspace_, out_, ids_, weight_;
  TensorView out_view_;
  Layer::Routing routing_;
  std::string error_;
};

double f32_of(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float v = 0;
  std::memcpy(&v, &wide, 4);
  return static_cast<double>(v);
}

// Largest |got - want|_2 / |want|_2 of a row; infinite where a value is no number or a whole row of `want` is zero.
double worst_row(const std::vector<std::uint16_t>& got, const std::vector<std::uint16_t>& want, std::int64_t hidden) {
  double worst = 0;
  for (std::size_t begin = 0; begin < want.size(); begin += static_cast<std::size_t>(hidden)) {
    double error = 0, norm = 0;
    for (std::size_t i = begin; i < begin + static_cast<std::size_t>(hidden); ++i) {
      error += std::pow(f32_of(got[i]) - f32_of(want[i]), 2);
      norm += std::pow(f32_of(want[i]), 2);
    }
    const double ratio = std::sqrt(error / norm);
    worst = ratio == ratio ? std::max(worst, ratio) : INFINITY;
  }
  return worst;
}

bool time_layer(const GridRow& row, const MoeConfig& config, const LayerWeights& weights) {
  // Two honest orders of summation differ by a rounding of h and of y, bf16 both; a wrong expert, row or scale by far more.
  constexpr double kBound = 1.5e-2;
  const double elem_bytes = row.bf16 ? 2 : 1;
  const double expert_bytes = 3.0 * static_cast<double>(row.hidden * row.intermediate) * elem_bytes;
  const double chosen =
      std::min<double>(static_cast<double>(row.tokens * row.top_k), static_cast<double>(row.num_experts));
  const int variants =
      std::max(1, static_cast<int>(240e6 / (chosen * expert_bytes)) + (chosen * expert_bytes < 120e6 ? 1 : 0));
  const std::int64_t count = row.tokens * row.hidden;
  const DeviceBuffer x(count * variants * 2);
  fill_bf16(x.as<std::uint16_t>(), count * variants, Salt::kA);
  std::vector<TensorView> inputs;
  for (int v = 0; v < variants; ++v)
    inputs.push_back(
        TensorView::dense(x.as<std::uint16_t>() + v * count, DType::kBF16, {row.tokens, row.hidden}, kGpu));
  Run run(row, config, weights, row.tokens, "");
  double worst = -1;
  Timing timing;
  double bytes = 0, flops = 0;
  std::string gemm;
  if (!run.forward(inputs[0], nullptr)) {
    timing.error = run.error();
  } else {
    must(cudaDeviceSynchronize(), "forward");
    gemm = run.gemm_name();
    const std::int64_t few = std::min(row.tokens, kCheckedTokens);
    Run plain(row, config, weights, few, kPlainGemm);
    if (!plain.forward(inputs[0].slice(0, few), nullptr)) {
      timing.error = plain.error();
    } else {
      must(cudaDeviceSynchronize(), "plain forward");
      worst = worst_row(run.out(few), plain.out(few), row.hidden);
      if (!(worst < kBound)) timing.error = "wrong result";
    }
    const std::vector<std::int32_t> ids = run.ids();
    const auto active = static_cast<double>(std::set<std::int32_t>(ids.begin(), ids.end()).size());
    bytes =
        active * expert_bytes + static_cast<double>(row.num_experts * row.hidden) * 2 + static_cast<double>(count) * 4;
    if (!row.bf16) bytes += active * expert_bytes / (kScaleBlock * kScaleBlock) * 4;
    flops = 6.0 * static_cast<double>(row.tokens * row.top_k) * static_cast<double>(row.hidden * row.intermediate);
  }
  const double floor_us = std::max(bytes / kStreamBytesPerUs, flops / (row.bf16 ? kBf16FlopsPerUs : kFp8FlopsPerUs));
  if (timing.error.empty()) {
    timing = time_graph(variants, floor_us, [&](cudaStream_t stream, int variant) {
      return run.forward(inputs[static_cast<std::size_t>(variant)], stream);
    });
    if (!timing.error.empty() && !run.error().empty()) timing.error = run.error();
  }
  std::printf("{\"bench\":\"layer\",\"what\":\"layer\",\"impl\":\"%s\",\"shape\":\"%s\",\"tokens\":%lld,\"rows\":%lld",
              gemm.c_str(), row.shape, static_cast<long long>(row.tokens),
              static_cast<long long>(row.tokens * row.top_k));
  if (timing.error.empty()) {
    std::printf(",\"us\":%.2f,\"min_us\":%.2f,\"max_us\":%.2f,\"floor_us\":%.2f,\"share_of_floor\":%.3f,\"flops\":%.0f",
                timing.median_us, timing.min_us, timing.max_us, floor_us, floor_us / timing.median_us, flops);
  } else {
    std::replace(timing.error.begin(), timing.error.end(), '"', '\'');
    std::printf(",\"error\":\"%s\"", timing.error.c_str());
  }
  std::printf(",\"worst_error\":%.3g}\n", worst);
  std::fflush(stdout);
  return timing.error.empty();
}

int main_program(const char* only) {
  if (const Result<Machine> machine = Machine::detect_cuda(0); !machine) {
    std::fprintf(stderr, "gpu_layer: %s\n", machine.status().message().c_str());
    return 1;
  }
  bool all_right = true;
  std::string held;
  Weights weights;
  for (const GridRow& row : grid()) {
    // A share of the experts takes part in a layer of several ranks: not this benchmark's business.
    if (row.local_experts != row.num_experts || std::strstr(row.shape, only) == nullptr) continue;
    const MoeConfig config = grid_config(row);
    if (held != row.shape) {
      weights = Weights();
      weights = make_weights(row, config);
      held = row.shape;
    }
    all_right = time_layer(row, config, weights.views) && all_right;
  }
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::main_program(argc > 1 ? argv[1] : ""); }
