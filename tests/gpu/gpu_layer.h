// A random layer on a GPU: weights uploaded, calls made from host tensors through guarded device copies.
#pragma once

#include <functional>
#include <memory>

#include "device/device.h"
#include "gpu/device_mirror.h"
#include "harness/layer_run.h"
#include "sluice/sluice.h"

namespace sluice::test {

inline constexpr Device kGpu{DeviceKind::kCuda, 0};

// A host Buffer's twin on the device, between guard bytes; at the same distance from a 256-byte boundary.
class Twin {
 public:
  explicit Twin(const Buffer& host, Device device = kGpu) : Twin(host.view(), device) {}
  explicit Twin(const TensorView& host, Device device = kGpu) : host_(host), view_(host), device_(device) {
    bytes_ = span_bytes(host);
    lead_ = kGuardBytes + reinterpret_cast<std::uintptr_t>(host.data) % 256;
    Result<device::Buffer> memory = device::Buffer::allocate(
        device, static_cast<std::int64_t>(lead_ + bytes_ + kGuardBytes), "a tensor of the test");
    EXPECT_TRUE(memory.is_ok()) << memory.status().message();
    if (memory) memory_ = std::move(*memory);
    view_.data = memory_.data() + lead_;
    view_.device = device;
    std::vector<std::byte> image(lead_ + bytes_ + kGuardBytes, kGuard);
    if (bytes_ > 0) std::memcpy(image.data() + lead_, host.data, bytes_);
    EXPECT_TRUE(device::copy_to_device(device, memory_.data(), image.data(), std::ssize(image)).is_ok());
  }

  const TensorView& view() const { return view_; }
  void send(const TensorView& host) const {
    EXPECT_EQ(span_bytes(host), bytes_);
    EXPECT_TRUE(device::copy_to_device(device_, view_.data, host.data, static_cast<std::int64_t>(bytes_)).is_ok());
  }
  void fill(int byte) const {
    EXPECT_TRUE(device::fill_bytes(device_, view_.data, byte, static_cast<std::int64_t>(bytes_)).is_ok());
  }
  // Back into the host tensor, after everything on the device is done; guards are looked at.
  void fetch() const {
    std::vector<std::byte> image(lead_ + bytes_ + kGuardBytes);
    const Status done = device::synchronise(device_);
    ASSERT_TRUE(done.is_ok()) << done.message();
    ASSERT_TRUE(device::copy_to_host(device_, image.data(), memory_.data(), std::ssize(image)).is_ok());
    for (std::size_t i = 0; i < image.size(); ++i) {
      if (i >= lead_ && i < lead_ + bytes_) continue;
      ASSERT_EQ(image[i], kGuard) << "guard byte " << static_cast<std::int64_t>(i) - static_cast<std::int64_t>(lead_);
    }
    if (bytes_ > 0) std::memcpy(host_.data, image.data() + lead_, bytes_);
  }

 private:
  static constexpr std::size_t kGuardBytes = 512;
  static constexpr std::byte kGuard{0xC3};
  TensorView host_;
  TensorView view_;
  Device device_;
  device::Buffer memory_;
  std::size_t lead_ = 0;
  std::size_t bytes_ = 0;
};

// Workspace of exactly the asked size, full of NaN, between guards, at an odd address.
class GpuWorkspace {
 public:
  explicit GpuWorkspace(const Layer& layer)
      : host_(static_cast<std::size_t>(layer.workspace_bytes()) + 1, std::byte{0xFF}),
        twin_(TensorView::dense(host_.data(), DType::kU8, {std::ssize(host_)}), layer.options().machine.device),
        bytes_(static_cast<std::size_t>(layer.workspace_bytes())) {}
  std::span<std::byte> span() const { return {twin_.view().as<std::byte>() + 1, bytes_}; }
  Ctx ctx(void* stream = nullptr) const {
    Ctx c;
    c.stream = stream;
    c.workspace = span();
    return c;
  }
  void poison() const { twin_.fill(0xFF); }
  void expect_guards() const { twin_.fetch(); }

 private:
  std::vector<std::byte> host_;
  Twin twin_;
  std::size_t bytes_;
};

inline LayerOptions gpu_options(Precision precision, std::int64_t max_tokens, std::string_view gemm = {}) {
  LayerOptions options;
  options.precision = precision;
  options.max_tokens = max_tokens;
  options.machine = Machine::detect_cuda(0).value();
  options.selection["grouped_gemm"].forced = gemm;
  return options;
}

inline Result<Layer> make_gpu_layer(const RandomLayer& model, const LayerOptions& options) {
  Result<LayerWeights> weights = upload(model.weights, options.machine.device);
  if (!weights) return weights.status();
  return Layer::create(model.config, std::move(*weights), options);
}

// The GEMMs of the table that run on a GPU, and whether theirs are the CPU's bits.
struct GpuGemm {
  std::string name;
  bool is_exact;
};
inline std::vector<GpuGemm> gpu_gemms() {
  std::vector<GpuGemm> gemms;
  for (const auto& impl : grouped_gemm::impls()) {
    if (impl.device == DeviceKind::kCuda) gemms.push_back({std::string(impl.name), impl.name == "cuda-simt"});
  }
  return gemms;
}

// One forward through device copies of everything, from a poisoned workspace.
inline Outcome run_on_gpu(const Layer& layer, const TensorView& x, DType out_dtype = DType::kF32) {
  const std::int64_t tokens = x.shape[0];
  Outcome o{Buffer(out_dtype, {tokens, layer.config().hidden}), Buffer(DType::kI32, {tokens, layer.config().top_k}),
            Buffer(DType::kF32, {tokens, layer.config().top_k}), Buffer(DType::kI64, {kNumCounters})};
  o.counters.fill_constant(0);
  const Twin x_twin(x);
  const Twin out(o.out), idx(o.topk_idx), weight(o.topk_weight), counters(o.counters);
  const GpuWorkspace workspace(layer);
  const Status status =
      layer.forward(x_twin.view(), out.view(), {{idx.view()}, weight.view(), counters.view()}, workspace.ctx());
  EXPECT_TRUE(status.is_ok()) << status.message();
  for (const Twin* twin : {&out, &idx, &weight, &counters}) twin->fetch();
  workspace.expect_guards();
  return o;
}

// The same layer on the CPU, on routing that is given: the oracle, as it is tested against plain loops in layer_test.
inline Buffer routed_on_cpu(const RandomLayer& model, Precision precision, const TensorView& x,
                            const TensorView& topk_idx, const TensorView& topk_weight, DType out_dtype = DType::kF32,
                            bool reference = false) {
  LayerOptions options = options_for(precision, x.shape[0]);
  if (reference) options.selection["*"].forced = "reference";
  const Layer layer = make_layer(model, options);
  Buffer out(out_dtype, {x.shape[0], model.config.hidden});
  GuardedWorkspace workspace(layer.workspace_bytes());
  Ctx ctx;
  ctx.workspace = workspace.span();
  const Status status = layer.forward_routed({x, {}, {topk_idx}, topk_weight, {}}, out.view(), ctx);
  EXPECT_TRUE(status.is_ok()) << status.message();
  return out;
}

// Relative L2 a row may differ by from the CPU where a GEMM adds in the tensor cores' order and precision: in bf16 a rounding
// of h or y flips now and then (2^-8 of one element); e4m3 products keep about 13 bits below the largest of an instruction
// (docs/numerics.md), which moves h by 1e-3 of its row and flips roundings of a to e4m3 (2^-4 of one element each).
inline double tensor_core_bound(Precision precision) {
  return precision == Precision::kF32 ? 1e-6 : precision == Precision::kW8A8 ? 4e-2 : 2e-3;
}

struct Variant {
  const char* name;
  Precision precision;
  DType expert_dtype;
  DType shared_dtype;
  ScaleFormat activation_scale = ScaleFormat::kF32;
  bool row_scales = false;
};
inline void PrintTo(const Variant& v, std::ostream* os) { *os << v.name; }
inline constexpr Variant kVariants[] = {
    {"w8a8", Precision::kW8A8, DType::kE4M3, DType::kE4M3},
    {"w8a8_ue8m0", Precision::kW8A8, DType::kE4M3, DType::kE4M3, ScaleFormat::kUe8m0},
    {"w8a8_bf16_shared", Precision::kW8A8, DType::kE4M3, DType::kBF16},
    {"w8a8_rows", Precision::kW8A8, DType::kE4M3, DType::kE4M3, ScaleFormat::kF32, true},
    {"w8a8_i8", Precision::kW8A8, DType::kI8, DType::kI8},
    {"w8a8_i8_bf16_shared", Precision::kW8A8, DType::kI8, DType::kBF16},
    {"w8a16", Precision::kW8A16, DType::kE4M3, DType::kE4M3},
    {"w8a16_i8", Precision::kW8A16, DType::kI8, DType::kI8},
    {"bf16", Precision::kBF16, DType::kBF16, DType::kBF16},
    {"f32_of_e4m3", Precision::kF32, DType::kE4M3, DType::kBF16},
    {"f32_of_bf16", Precision::kF32, DType::kBF16, DType::kBF16},
    {"f32", Precision::kF32, DType::kF32, DType::kF32},
};

inline const Variant& variant(std::string_view name) {
  return *std::find_if(std::begin(kVariants), std::end(kVariants), [&](const Variant& v) { return v.name == name; });
}
inline RandomLayer model_of(const Variant& v, MoeConfig config = small_config(), bool exact = false) {
  config.activation_scale = v.activation_scale;
  // acc * s of a row scale that is no power of two is rounded to fp32 and then to bf16; the reference rounds once.
  if (exact && v.row_scales) config.activation_scale = ScaleFormat::kUe8m0;
  return random_layer(
      config,
      {.expert_dtype = v.expert_dtype, .shared_dtype = v.shared_dtype, .exact = exact, .row_scales = v.row_scales});
}
inline DataPath path_of(const Variant& v) { return *data_path(v.precision, model_of(v).weights.experts); }

class GpuVariants : public GpuTest, public testing::WithParamInterface<Variant> {
 protected:
  Precision precision() const { return GetParam().precision; }
  RandomLayer model(const MoeConfig& config, bool exact = false) const { return model_of(GetParam(), config, exact); }
  // Every GEMM implementation of a GPU that can run this layer; at least one must.
  void for_each_gemm(const RandomLayer& m, LayerOptions options,
                     const std::function<void(const Layer&, const GpuGemm&)>& body) const {
    int num_run = 0;
    for (const GpuGemm& gemm : gpu_gemms()) {
      options.selection["grouped_gemm"].forced = gemm.name;
      Result<Layer> layer = make_gpu_layer(m, options);
      if (!layer) {
        EXPECT_EQ(layer.status().code(), StatusCode::kUnsupported) << layer.status().message();
        continue;
      }
      ++num_run;
      SCOPED_TRACE(gemm.name);
      body(*layer, gemm);
    }
    EXPECT_GE(num_run, 1) << "no GEMM of the table runs this layer on a GPU";
  }
};

inline std::string variant_name(const testing::TestParamInfo<Variant>& p) { return p.param.name; }

}  // namespace sluice::test
