// Times the fused up GEMM and activation on a GPU, layout by layout, beside the two stages it replaces, over the rows of
// bench/grid.h; a layout whose bits are not those of the two stages gets no time.
//   gpu_fused [part of a shape's name]
#include <cstring>
#include <memory>
#include <vector>

#include "device_data.h"
#include "fused/up_swiglu_quant/cuda.h"
#include "grouped_gemm/cuda.h"

namespace sluice::bench {
namespace {

using up_swiglu_quant::Args;
using up_swiglu_quant::Config;

constexpr Device kGpu{DeviceKind::kCuda, 0};

struct Input {
  std::vector<std::int32_t> offset;
  DeviceBuffer device_offset;
  Args args;
};

TensorView view(const DeviceBuffer& buffer, DType dtype, std::initializer_list<std::int64_t> shape) {
  return TensorView::dense(buffer.as<void>(), dtype, shape, kGpu);
}

template <class T>
std::vector<T> download(const TensorView& from) {
  std::vector<T> host(static_cast<std::size_t>(from.num_elements()));
  must(cudaMemcpy(host.data(), from.data, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return host;
}

bool time_row(const GridRow& row) {
  const auto [up, down] = gemms(row);
  const std::int64_t n_blocks = ceil_div(up.n, kScaleBlock), k_blocks = ceil_div(up.k, kScaleBlock);
  const std::int64_t num_weights = row.local_experts * up.n * up.k;
  const DeviceBuffer w(num_weights), w_scale(row.local_experts * n_blocks * k_blocks * 4);
  fill_e4m3(w.as<std::uint8_t>(), num_weights, Salt::kW);
  fill_w_scale(w_scale.as<float>(), row.local_experts, n_blocks, k_blocks, true);
  const int variants = num_variants(gemm_floor(row, up, expert_offsets(row, 0)));
  std::int64_t most_rows = 0;
  std::vector<Input> inputs(static_cast<std::size_t>(variants));
  for (int v = 0; v < variants; ++v) {
    inputs[static_cast<std::size_t>(v)].offset = expert_offsets(row, v);
    most_rows = std::max<std::int64_t>(most_rows, inputs[static_cast<std::size_t>(v)].offset.back());
  }
  const std::int64_t pitch = ceil_div(most_rows, 4) * 4;
  const DeviceBuffer a(most_rows * up.k), a_scale(k_blocks * pitch * 4), h(most_rows * up.n * 2), q(most_rows * down.k),
      q_scale(ceil_div(down.k, kScaleBlock) * pitch * 4);
  fill_e4m3(a.as<std::uint8_t>(), most_rows * up.k, Salt::kA);
  fill_a_scale(a_scale.as<float>(), nullptr, pitch, k_blocks, 1, pitch);
  must(cudaDeviceSynchronize(), "fill");
  for (Input& input : inputs) {
    const std::int64_t rows = input.offset.back();
    input.device_offset = upload(input.offset);
    Args& args = input.args;
    args.up.a = view(a, DType::kE4M3, {rows, up.k});
    args.up.a_scale = view(a_scale, DType::kF32, {k_blocks, rows});
    args.up.a_scale.stride[0] = pitch;
    args.up.groups = RowGroups::contiguous({view(input.device_offset, DType::kI32, {row.local_experts + 1})});
    args.up.w = view(w, DType::kE4M3, {row.local_experts, up.n, up.k});
    args.up.w_scale = view(w_scale, DType::kF32, {row.local_experts, n_blocks, k_blocks});
    args.up.part_rows = up.n / 2;
    args.up.out = view(h, DType::kBF16, {rows, up.n});
    args.act.h = args.up.out;
    args.act.groups = args.up.groups;
    args.act.a = view(q, DType::kE4M3, {rows, down.k});
    args.act.a_scale = view(q_scale, DType::kF32, {ceil_div(down.k, kScaleBlock), rows});
    args.act.a_scale.stride[0] = pitch;
  }
  const Args& first = inputs.front().args;
  const Floor floor = gemm_floor(row, up, inputs.front().offset);
  const auto gemm = [&](cudaStream_t stream, int v) {
    return grouped_gemm::run_wgmma(inputs[static_cast<std::size_t>(v)].args.up, {stream, {}, 1}).is_ok();
  };
  const auto composed = [&](cudaStream_t stream, int v) {
    return gemm(stream, v) &&
           swiglu_quant::impls().front().run(inputs[static_cast<std::size_t>(v)].args.act, {stream, {}, 1}).is_ok();
  };
  const auto line = [&](const char* what, const std::string& config, const Timing& timing) {
    std::printf("{\"bench\":\"fused\",\"what\":\"%s\",\"impl\":\"%s\",\"shape\":\"%s\",\"tokens\":%lld,\"rows\":%lld",
                what, config.c_str(), row.shape, static_cast<long long>(row.tokens),
                static_cast<long long>(first.up.a.shape[0]));
    if (timing.error.empty()) {
      std::printf(",\"us\":%.2f,\"min_us\":%.2f,\"max_us\":%.2f,\"floor_us\":%.2f,\"share_of_floor\":%.3f}\n",
                  timing.median_us, timing.min_us, timing.max_us, floor.us, floor.us / timing.median_us);
    } else {
      std::printf(",\"error\":\"%s\"}\n", timing.error.c_str());
    }
    std::fflush(stdout);
  };
  bool all_right = composed(nullptr, 0);
  must(cudaDeviceSynchronize(), "composed");
  const std::vector<std::uint8_t> want = download<std::uint8_t>(first.act.a);
  std::vector<float> want_scale(static_cast<std::size_t>(ceil_div(down.k, kScaleBlock) * pitch));
  const auto scales = [&](std::vector<float>& to) {
    must(cudaMemcpy(to.data(), q_scale.as<void>(), to.size() * 4, cudaMemcpyDeviceToHost), "scales");
  };
  scales(want_scale);
  line("up", "cuda-wgmma", time_graph(variants, floor.us, gemm));
  line("up+swiglu_quant", "composed", time_graph(variants, floor.us, composed));
  const auto problem = grouped_gemm::problem_of(first.up);
  const double mean = static_cast<double>(most_rows) /
                      static_cast<double>(std::max<std::int64_t>(1, active_experts(inputs.front().offset)));
  std::vector<Config> configs;
  for (std::int64_t tokens : {8, 16, 32, 64, 96}) {
    Config config;
    config.tile.tokens = tokens;
    if (static_cast<double>(tokens) > 6 * mean && tokens > 8) continue;
    if (static_cast<double>(tokens) * 8 < mean) continue;
    configs.push_back(up_swiglu_quant::with_stages(config, problem));
  }
  for (int split : {2, 4}) {
    Config config;
    config.split = split;
    config = up_swiglu_quant::with_stages(config, problem);
    if (most_rows <= 64 && config.tile.stages > 4) configs.push_back(config);
  }
  for (const Config& config : configs) {
    must(cudaMemset(q.as<void>(), 0xFF, static_cast<std::size_t>(most_rows * down.k)), "poison");
    must(cudaMemset(q_scale.as<void>(), 0xFF, want_scale.size() * 4), "poison");
    Timing timing;
    const auto run = [&](cudaStream_t stream, int v) {
      const Status status =
          up_swiglu_quant::run_cuda_config(inputs[static_cast<std::size_t>(v)].args, {stream, {}, 1}, config);
      if (!status) timing.error = status.message();
      return status.is_ok();
    };
    if (run(nullptr, 0)) {
      must(cudaDeviceSynchronize(), "fused");
      std::vector<float> got_scale(want_scale.size());
      scales(got_scale);
      bool same = download<std::uint8_t>(first.act.a) == want;
      for (std::int64_t b = 0; b < ceil_div(down.k, kScaleBlock); ++b) {
        same = same && std::memcmp(got_scale.data() + b * pitch, want_scale.data() + b * pitch,
                                   static_cast<std::size_t>(first.up.a.shape[0]) * 4) == 0;
      }
      if (same) {
        timing = time_graph(variants, floor.us, run);
      } else {
        timing.error = "other bits than the composed stages";
      }
    }
    all_right = all_right && timing.error.empty();
    line("up+swiglu_quant fused", config.to_string(), timing);
  }
  return all_right;
}

int main_program(const char* only) {
  bool all_right = true;
  for (const GridRow& row : grid()) {
    const bool many = row.tokens * row.top_k > 128 * row.num_experts;
    if (row.bf16 || many || std::strstr(row.shape, only) == nullptr) continue;
    all_right = time_row(row) && all_right;
  }
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::main_program(argc > 1 ? argv[1] : ""); }
