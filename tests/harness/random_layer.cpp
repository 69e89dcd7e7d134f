// Random layers and guarded workspaces.
#include "harness/random_layer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

namespace sluice::test {
namespace {

class Builder {
 public:
  Builder(RandomLayer& layer, const RandomLayerOptions& options) : layer_(layer), options_(options) {}

  Buffer& add(DType dtype, std::vector<std::int64_t> shape) {
    layer_.buffers.push_back(std::make_unique<Buffer>(dtype, std::move(shape)));
    return *layer_.buffers.back();
  }
  std::uint64_t seed() { return options_.seed * 1000 + ++counter_; }

  FfnWeights ffn(std::int64_t groups, std::int64_t hidden, std::int64_t intermediate, DType dtype, bool bias) {
    FfnWeights w;
    const std::int64_t hb = ceil_div(hidden, kScaleBlock);
    const std::int64_t ib = ceil_div(intermediate, kScaleBlock);
    w.w13 = matrix(groups, 2 * intermediate, hidden, dtype, 3);
    w.w2 = matrix(groups, hidden, intermediate, dtype, 1);
    if (dtype == DType::kI8 || (dtype == DType::kE4M3 && options_.row_scales)) {
      w.w13_scale = scale(groups, 2 * intermediate, 1);
      w.w2_scale = scale(groups, hidden, 1);
    } else if (dtype == DType::kE4M3) {
      w.w13_scale = scale(groups, 2 * ib, hb);
      w.w2_scale = scale(groups, hb, ib);
    }
    if (bias) {
      w.w13_bias = vector_of({groups, 2 * intermediate});
      w.w2_bias = vector_of({groups, hidden});
    }
    return w;
  }

  TensorView matrix(std::int64_t groups, std::int64_t rows, std::int64_t cols, DType dtype, int ones) {
    Buffer& b = add(dtype, {groups, rows, cols});
    if (!options_.exact) {
      // Unscaled e4m3 and i8 want their values spread over the format's range; the scales bring them down.
      const double sigma = dtype == DType::kE4M3 ? 60.0
                           : dtype == DType::kI8 ? 36.0
                                                 : 1.0 / std::sqrt(static_cast<double>(cols));
      return b.fill_normal(seed(), sigma).view();
    }
    b.fill_constant(0.0);
    Rng rng(seed());
    for (std::int64_t r = 0; r < groups * rows; ++r) {
      for (int i = 0; i < ones; ++i)
        b.set(r * cols + rng.integer(0, cols - 1), rng.integer(0, 1) == 0 ? -1.0 : (ones == 1 ? 2.0 : 1.0));
    }
    return b.view();
  }

  TensorView scale(std::int64_t groups, std::int64_t rows, std::int64_t cols) {
    Buffer& b = add(DType::kF32, {groups, rows, cols});
    return (options_.exact ? b.fill_powers_of_two(seed(), -1, 1) : b.fill_uniform(seed(), 2e-4, 2e-3)).view();
  }

  TensorView vector_of(std::vector<std::int64_t> shape) {
    Buffer& b = add(DType::kF32, std::move(shape));
    return (options_.exact ? b.fill_integers(seed(), -2, 2) : b.fill_normal(seed(), 0.1)).view();
  }

 private:
  RandomLayer& layer_;
  RandomLayerOptions options_;
  std::uint64_t counter_ = 0;
};

}  // namespace

testing::AssertionResult RandomLayer::guards_intact() const {
  for (const auto& buffer : buffers) {
    if (testing::AssertionResult r = buffer->guards_intact(); !r) return r;
  }
  return testing::AssertionSuccess();
}

RandomLayer random_layer(const MoeConfig& config, const RandomLayerOptions& options) {
  RandomLayer layer;
  layer.config = config;
  Builder build(layer, options);
  const double sigma = 1.0 / std::sqrt(static_cast<double>(config.hidden));
  layer.weights.w_gate =
      build.add(DType::kBF16, {config.num_experts, config.hidden}).fill_normal(build.seed(), sigma).view();
  if (config.gate.has_router_bias)
    layer.weights.router_bias = build.add(DType::kF32, {config.num_experts}).fill_normal(build.seed()).view();
  if (config.gate.has_score_bias)
    layer.weights.score_bias = build.add(DType::kF32, {config.num_experts}).fill_normal(build.seed(), 0.2).view();
  layer.weights.experts =
      build.ffn(num_local(config), config.hidden, config.intermediate, options.expert_dtype, options.expert_bias);
  if (config.shared_intermediate > 0) {
    layer.weights.shared = build.ffn(1, config.hidden, config.shared_intermediate, options.shared_dtype, false);
  }
  if (config.has_shared_gate)
    layer.weights.shared_gate = build.add(DType::kBF16, {1, config.hidden}).fill_normal(build.seed(), sigma).view();
  return layer;
}

MoeConfig small_config() {
  MoeConfig config;
  config.hidden = 256;
  config.intermediate = 128;
  config.num_experts = 16;
  config.top_k = 4;
  config.gate = gate_preset(GateId::kG3);
  config.gate.n_group = 4;
  config.gate.topk_group = 2;
  config.gate.routed_scaling_factor = 2.5f;
  config.shared_intermediate = 128;
  return config;
}

GuardedWorkspace::GuardedWorkspace(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t inner = (bytes_ + page - 1) / page * page;
  map_bytes_ = inner + 2 * page;
  void* const map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  map_ = static_cast<std::byte*>(map);
  if (inner > 0 && mprotect(map_ + page, inner, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  data_ = map_ + page + inner - bytes_;
}

GuardedWorkspace::~GuardedWorkspace() { munmap(map_, map_bytes_); }

void GuardedWorkspace::fill(int byte) const { std::memset(data_, byte, bytes_); }

}  // namespace sluice::test
