// Times the router GEMM, the selection and the route plan on a GPU, each through its stage's table, checked first.
//   gpu_gate [--json] [part of a case's name]     JSON lines either way
// Inputs rotate through twice the L2: what the GEMM reads is a layer's, and the layer before has pushed it out.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "device_data.h"
#include "sluice/stage/gate.h"
#include "sluice/stage/route.h"

namespace sluice::bench {
namespace {

struct Model {
  const char* name;
  std::int64_t hidden, num_experts, top_k;
  GateConfig gate;
};

std::vector<Model> models() {
  GateConfig dsv3 = gate_preset(GateId::kG3);
  dsv3.n_group = 8;
  dsv3.topk_group = 4;
  dsv3.routed_scaling_factor = 2.5f;
  return {{"dsv3", 7168, 256, 8, dsv3},
          {"kimi-k2", 7168, 384, 8, gate_preset(GateId::kG3)},
          {"qwen3-30b", 2048, 128, 8, gate_preset(GateId::kG4)},
          {"mixtral", 4096, 8, 2, gate_preset(GateId::kG4)}};
}

constexpr Device kGpu{DeviceKind::kCuda, 0};
constexpr double kRotatedBytes = 130e6;

float f32_of(std::uint16_t bf16) {
  const std::uint32_t bits = static_cast<std::uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class T>
std::vector<T> download(const DeviceBuffer& from, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  must(cudaMemcpy(host.data(), from.as<T>(), host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return host;
}

// What one call reads and writes.
struct Input {
  DeviceBuffer x, w, bias, logits, idx, weight, offset, row_token, row_slot, slot_row, num_rows;
  gate::LogitsArgs logits_args;
  gate::SelectArgs select_args;
  route::Args route_args;
};

Input make_input(const Model& m, std::int64_t num_tokens) {
  const std::int64_t e = m.num_experts;
  const std::int64_t items = num_tokens * m.top_k;
  Input in;
  in.x = DeviceBuffer(num_tokens * m.hidden * 2);
  in.w = DeviceBuffer(e * m.hidden * 2);
  fill_bf16(in.x.as<std::uint16_t>(), num_tokens * m.hidden, Salt::kA);
  fill_bf16(in.w.as<std::uint16_t>(), e * m.hidden, Salt::kW);
  in.logits = DeviceBuffer(num_tokens * e * 4);
  in.idx = DeviceBuffer(items * 4);
  in.weight = DeviceBuffer(items * 4);
  in.offset = DeviceBuffer((e + 1) * 4);
  in.row_token = DeviceBuffer(items * 4);
  in.row_slot = DeviceBuffer(items * 4);
  in.slot_row = DeviceBuffer(items * 4);
  in.num_rows = DeviceBuffer(4);
  // Logits of a router: the selection is timed on them wherever no GEMM made them.
  std::vector<float> logits(static_cast<std::size_t>(num_tokens * e));
  std::uint64_t state = 99;
  for (float& v : logits) {
    v = 0;
    const std::uint64_t bits = next_random(state);
    for (int i = 0; i < 4; ++i) v += static_cast<float>((bits >> (16 * i)) & 0xFFFF) / 32768.0f - 1.0f;
  }
  must(cudaMemcpy(in.logits.as<float>(), logits.data(), logits.size() * 4, cudaMemcpyHostToDevice), "logits");
  std::vector<float> bias(static_cast<std::size_t>(e));
  for (float& v : bias) v = static_cast<float>(next_random(state) >> 40) / 16777216.0f;
  in.bias = upload(bias);

  const auto f32 = [](const DeviceBuffer& b, std::initializer_list<std::int64_t> shape) {
    return TensorView::dense(b.as<void>(), DType::kF32, shape, kGpu);
  };
  const auto i32 = [](const DeviceBuffer& b, std::initializer_list<std::int64_t> shape) {
    return TensorView::dense(b.as<void>(), DType::kI32, shape, kGpu);
  };
  in.logits_args.x = TensorView::dense(in.x.as<void>(), DType::kBF16, {num_tokens, m.hidden}, kGpu);
  in.logits_args.w_gate = TensorView::dense(in.w.as<void>(), DType::kBF16, {e, m.hidden}, kGpu);
  in.logits_args.logits = f32(in.logits, {num_tokens, e});
  in.select_args.gate = m.gate;
  in.select_args.logits = in.logits_args.logits;
  if (m.gate.has_score_bias) in.select_args.score_bias = f32(in.bias, {e});
  in.select_args.topk_idx = {i32(in.idx, {num_tokens, m.top_k})};
  in.select_args.topk_weight = f32(in.weight, {num_tokens, m.top_k});
  in.route_args.topk_idx = in.select_args.topk_idx;
  in.route_args.num_experts = e;
  in.route_args.plan = {{i32(in.offset, {e + 1})},
                        i32(in.row_token, {items}),
                        i32(in.row_slot, {items}),
                        i32(in.slot_row, {num_tokens, m.top_k}),
                        i32(in.num_rows, {1})};
  return in;
}

// Largest |logit - reference| over its bound (docs/numerics.md) on a few rows.
double logits_error(const Model& m, const Input& in, std::int64_t num_tokens) {
  const auto x = download<std::uint16_t>(in.x, num_tokens * m.hidden);
  const auto w = download<std::uint16_t>(in.w, m.num_experts * m.hidden);
  const auto logits = download<float>(in.logits, num_tokens * m.num_experts);
  double worst = 0;
  for (std::int64_t t : {std::int64_t{0}, num_tokens / 2, num_tokens - 1}) {
    for (std::int64_t e = 0; e < m.num_experts; ++e) {
      double sum = 0, magnitude = 0;
      for (std::int64_t h = 0; h < m.hidden; ++h) {
        const double product = static_cast<double>(f32_of(x[static_cast<std::size_t>(t * m.hidden + h)])) *
                               f32_of(w[static_cast<std::size_t>(e * m.hidden + h)]);
        sum += product;
        magnitude += std::fabs(product);
      }
      const double error = std::fabs(logits[static_cast<std::size_t>(t * m.num_experts + e)] - sum);
      worst = std::max(worst, error / (std::ldexp(1.0, -15) * magnitude));
    }
  }
  return worst;
}

// Whether the tokens' ids and weights have the reference's bits, on at most 64 of them.
bool select_is_right(const Model& m, const Input& in, std::int64_t num_tokens) {
  const std::int64_t checked = std::min<std::int64_t>(num_tokens, 64);
  auto logits = download<float>(in.logits, checked * m.num_experts);
  auto bias = download<float>(in.bias, m.num_experts);
  std::vector<std::int32_t> idx(static_cast<std::size_t>(checked * m.top_k));
  std::vector<float> weight(idx.size());
  gate::SelectArgs args;
  args.gate = m.gate;
  args.logits = TensorView::dense(logits.data(), DType::kF32, {checked, m.num_experts});
  if (m.gate.has_score_bias) args.score_bias = TensorView::dense(bias.data(), DType::kF32, {m.num_experts});
  args.topk_idx = {TensorView::dense(idx.data(), DType::kI32, {checked, m.top_k})};
  args.topk_weight = TensorView::dense(weight.data(), DType::kF32, {checked, m.top_k});
  if (!gate::select_impls().back().run(args, {})) return false;
  const auto got_weight = download<float>(in.weight, checked * m.top_k);
  return download<std::int32_t>(in.idx, checked * m.top_k) == idx &&
         std::memcmp(got_weight.data(), weight.data(), weight.size() * 4) == 0;
}

bool route_is_right(const Model& m, const Input& in, std::int64_t num_tokens) {
  const auto ids = download<std::int32_t>(in.idx, num_tokens * m.top_k);
  std::vector<std::int32_t> order(ids.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)];
  });
  return download<std::int32_t>(in.row_slot, num_tokens * m.top_k) == order;
}

class Case {
 public:
  Case(const Model& model, std::int64_t num_tokens) : model_(model), num_tokens_(num_tokens) {
    const double bytes = static_cast<double>(num_tokens) *
                             static_cast<double>(model.hidden * 2 + model.num_experts * 4 + model.top_k * 20) +
                         static_cast<double>(model.num_experts * model.hidden * 2);
    num_variants_ = std::clamp(static_cast<int>(kRotatedBytes / bytes) + 1, 1, 24);
    for (int v = 0; v < num_variants_; ++v) inputs_.push_back(make_input(model, num_tokens));
    scratch_ = DeviceBuffer(kScratchBytes);
  }

  template <class Args>
  const Impl<Args>* pick(const char* stage, std::span<const Impl<Args>> table, const Args& args) {
    const auto choice = choose<Args>(stage, table, args, machine(), {});
    if (choice) return choice->impl;
    error_ = choice.status().message();
    return nullptr;
  }
  // In place of the two for few tokens.
  static const Impl<gate::BothArgs>* pick_both(const gate::BothArgs& args) {
    for (const auto& impl : gate::both_impls()) {
      if (impl.can_run(args, machine()).is_ok()) return &impl;
    }
    return nullptr;
  }
  template <class Args>
  bool call(const Impl<Args>* impl, const Args& args, cudaStream_t stream) {
    if (impl == nullptr) return false;
    const std::int64_t bytes = impl->scratch_bytes == nullptr ? 0 : impl->scratch_bytes(args, machine());
    if (bytes > kScratchBytes) {
      error_ = "scratch of " + std::to_string(bytes) + " bytes";
      return false;
    }
    const Status status = impl->run(args, {stream, {scratch_.as<std::byte>(), static_cast<std::size_t>(bytes)}, 1});
    if (!status) error_ = status.message();
    return status.is_ok();
  }

  void measure() {
    const Input& first = inputs_.front();
    const auto* select = pick<gate::SelectArgs>("gate.select", gate::select_impls(), first.select_args);
    const auto* plan = pick<route::Args>("route", route::impls(), first.route_args);
    time(
        "select", select == nullptr ? "none" : select->name,
        [&](cudaStream_t s, const Input& in) { return call(select, in.select_args, s); },
        [&] { return select_is_right(model_, first, num_tokens_) ? 0.0 : 1e9; });
    time(
        "route", plan == nullptr ? "none" : plan->name,
        [&](cudaStream_t s, const Input& in) { return call(plan, in.route_args, s); },
        [&] { return route_is_right(model_, first, num_tokens_) ? 0.0 : 1e9; });
    const auto* logits = pick<gate::LogitsArgs>("gate.logits", gate::logits_impls(), first.logits_args);
    const auto name = logits == nullptr ? "none" : logits->name;
    time(
        "logits", name, [&](cudaStream_t s, const Input& in) { return call(logits, in.logits_args, s); },
        [&] { return logits_error(model_, first, num_tokens_); });
    time(
        "logits+select", name,
        [&](cudaStream_t s, const Input& in) {
          return call(logits, in.logits_args, s) && call(select, in.select_args, s);
        },
        [&] { return select_is_right(model_, first, num_tokens_) ? 0.0 : 1e9; });
    const gate::BothArgs first_both = {first.logits_args, first.select_args};
    if (const auto* both = pick_both(first_both); both != nullptr) {
      time(
          "logits and select", both->name,
          [&](cudaStream_t s, const Input& in) {
            return call(both, gate::BothArgs{in.logits_args, in.select_args}, s);
          },
          [&] { return select_is_right(model_, first, num_tokens_) ? logits_error(model_, first, num_tokens_) : 1e9; });
    }
    time(
        "logits+select+route", name,
        [&](cudaStream_t s, const Input& in) {
          return call(logits, in.logits_args, s) && call(select, in.select_args, s) && call(plan, in.route_args, s);
        },
        [&] { return route_is_right(model_, first, num_tokens_) ? 0.0 : 1e9; });
  }

 private:
  static constexpr std::int64_t kScratchBytes = 64 << 20;
  static const Machine& machine() {
    static const Machine found = Machine::detect_cuda(0).value();
    return found;
  }

  // `worst` judges what the first input's call wrote: below 1 is right.
  template <class Run, class Worst>
  void time(const char* what, std::string_view impl, const Run& run, const Worst& worst) {
    Timing timing;
    double error = -1;
    if (run(nullptr, inputs_.front())) {
      must(cudaDeviceSynchronize(), what);
      error = worst();
      if (error < 1) {
        timing = time_graph(num_variants_, 5.0, [&](cudaStream_t stream, int variant) {
          return run(stream, inputs_[static_cast<std::size_t>(variant)]);
        });
      } else {
        timing.error = "wrong result";
      }
    } else {
      timing.error = error_;
    }
    std::printf("{\"bench\":\"gate\",\"what\":\"%s\",\"impl\":\"%.*s\",\"shape\":\"%s\",\"tokens\":%lld", what,
                static_cast<int>(impl.size()), impl.data(), model_.name, static_cast<long long>(num_tokens_));
    if (timing.error.empty()) {
      std::printf(",\"us\":%.2f,\"min_us\":%.2f,\"max_us\":%.2f", timing.median_us, timing.min_us, timing.max_us);
    } else {
      std::replace(timing.error.begin(), timing.error.end(), '"', '\'');
      std::printf(",\"error\":\"%s\"", timing.error.c_str());
    }
    std::printf(",\"worst_error\":%.3g}\n", error);
    std::fflush(stdout);
  }

  const Model& model_;
  std::int64_t num_tokens_;
  int num_variants_ = 1;
  std::vector<Input> inputs_;
  DeviceBuffer scratch_;
  std::string error_;
};

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  using namespace sluice::bench;
  if (!sluice::Machine::detect_cuda(0)) {
    std::fprintf(stderr, "gpu_gate: %s\n", sluice::Machine::detect_cuda(0).status().message().c_str());
    return 1;
  }
  const char* only = "";
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") != 0) only = argv[i];
  }
  const std::vector<Model> all = models();
  for (const Model& model : all) {
    if (std::strstr(model.name, only) == nullptr) continue;
    for (std::int64_t num_tokens : {1, 8, 32, 128, 512, 2048, 8192}) Case(model, num_tokens).measure();
  }
  return 0;
}
