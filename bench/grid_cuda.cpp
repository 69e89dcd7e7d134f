// Times the library's grouped GEMMs on a GPU over the grid of bench/grid.h, checked on sampled rows first. JSON lines.
//   gpu_grid [--impl NAME] [--scales-by-row] [--list] [part of a shape's name]
// Each GEMM goes through the stage's table as a layer would take it: the first implementation that can run, or NAME.
#include <cstring>
#include <vector>

#include "device_data.h"
#include "sluice/stage/grouped_gemm.h"

namespace sluice::bench {
namespace {

namespace gg = sluice::grouped_gemm;

struct Options {
  std::string impl;
  bool scales_by_row = false;
  std::string shape;
};

// One draw of rows.
struct Input {
  std::vector<std::int32_t> offset;
  DeviceBuffer device_offset, a, a_scale, out;
  gg::Args args;
};

Input make_input(const GridRow& row, const GemmShape& gemm, int variant, const Options& options, const DeviceBuffer& w,
                 const DeviceBuffer& w_scale) {
  const Device gpu{DeviceKind::kCuda, 0};
  Input input;
  input.offset = expert_offsets(row, variant);
  const std::int64_t rows = input.offset.back(), blocks = ceil_div(gemm.k, kScaleBlock);
  const DType dtype = row.bf16 ? DType::kBF16 : DType::kE4M3;
  input.device_offset = upload(input.offset);
  input.a = DeviceBuffer(rows * gemm.k * size_bytes(dtype) + 16);
  input.out = DeviceBuffer(rows * gemm.n * 2 + 16);
  must(cudaMemset(input.out.as<void>(), 0xFF, static_cast<std::size_t>(rows * gemm.n * 2)), "poison");
  gg::Args& args = input.args;
  args.a = TensorView::dense(input.a.as<void>(), dtype, {rows, gemm.k}, gpu);
  args.groups = RowGroups::contiguous(
      {TensorView::dense(input.device_offset.as<void>(), DType::kI32, {row.local_experts + 1}, gpu)});
  args.w = TensorView::dense(w.as<void>(), dtype, {row.local_experts, gemm.n, gemm.k}, gpu);
  args.part_rows = std::strcmp(gemm.name, "up") == 0 ? gemm.n / 2 : 0;
  args.out = TensorView::dense(input.out.as<void>(), DType::kBF16, {rows, gemm.n}, gpu);
  if (row.bf16) {
    fill_bf16(input.a.as<std::uint16_t>(), rows * gemm.k, Salt::kA);
  } else {
    fill_e4m3(input.a.as<std::uint8_t>(), rows * gemm.k, Salt::kA);
    input.a_scale = DeviceBuffer(rows * blocks * 4 + 16);
    args.a_scale = TensorView::dense(input.a_scale.as<void>(), DType::kF32, {blocks, rows}, gpu);
    if (options.scales_by_row) args.a_scale.stride = {1, blocks};
    fill_a_scale(input.a_scale.as<float>(), nullptr, rows, blocks, args.a_scale.stride[1], args.a_scale.stride[0]);
    args.w_scale = TensorView::dense(w_scale.as<void>(), DType::kF32,
                                     {row.local_experts, ceil_div(gemm.n, kScaleBlock), blocks}, gpu);
  }
  must(cudaDeviceSynchronize(), "fill");
  return input;
}

// The first row of the table that can run, as grouped_gemm::impls() orders them.
const Impl<gg::Args>* pick(const gg::Args& args, const Machine& machine, const Options& options, std::string& why) {
  auto choice = choose<gg::Args>("grouped_gemm", gg::impls(), args, machine, {options.impl, {}});
  if (choice) return choice->impl;
  why = choice.status().message();
  return nullptr;
}

bool time_gemm(const GridRow& row, const GemmShape& gemm, const Machine& machine, const Options& options) {
  const std::int64_t num_weights = row.local_experts * gemm.n * gemm.k;
  const std::int64_t n_blocks = ceil_div(gemm.n, kScaleBlock), k_blocks = ceil_div(gemm.k, kScaleBlock);
  const DeviceBuffer w(num_weights * (row.bf16 ? 2 : 1));
  const DeviceBuffer w_scale(row.local_experts * n_blocks * k_blocks * 4);
  if (row.bf16) {
    fill_bf16(w.as<std::uint16_t>(), num_weights, Salt::kW);
  } else {
    fill_e4m3(w.as<std::uint8_t>(), num_weights, Salt::kW);
    fill_w_scale(w_scale.as<float>(), row.local_experts, n_blocks, k_blocks, true);
  }
  const int variants = num_variants(gemm_floor(row, gemm, expert_offsets(row, 0)));
  std::vector<Input> inputs;
  for (int v = 0; v < variants; ++v) inputs.push_back(make_input(row, gemm, v, options, w, w_scale));
  const Input& first = inputs.front();
  Timing timing;
  const Impl<gg::Args>* impl = nullptr;
  if (Status legal = gg::check(first.args); !legal) {
    timing.error = legal.message();
  } else {
    impl = pick(first.args, machine, options, timing.error);
  }
  double worst = -1;
  std::string config;
  if (impl != nullptr) {
    const std::int64_t scratch_bytes = impl->scratch_bytes == nullptr ? 0 : impl->scratch_bytes(first.args, machine);
    const DeviceBuffer scratch(scratch_bytes + 256);
    const auto run = [&](cudaStream_t stream, int variant) {
      const Ctx ctx{stream, {scratch.as<std::byte>(), static_cast<std::size_t>(scratch_bytes)}, 1};
      const Status status = impl->run(inputs[static_cast<std::size_t>(variant)].args, ctx);
      if (!status) timing.error = status.message();
      return status.is_ok();
    };
    if (impl->describe != nullptr) config = impl->describe(first.args, machine);
    if (run(nullptr, 0)) {
      must(cudaDeviceSynchronize(), "grouped_gemm");
      worst = worst_error(row, gemm, first.offset, {first.out.as<std::uint16_t>(), nullptr, gemm.n});
      if (worst < 1) {
        timing = time_graph(variants, gemm_floor(row, gemm, first.offset).us, run);
      } else {
        timing.error = "wrong result";
      }
    }
  }
  const std::string name = impl == nullptr ? "none" : std::string(impl->name);
  print_figure(name.c_str(), row, gemm, first.offset, timing, worst, config);
  return timing.error.empty();
}

int main_program(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--impl") == 0 && i + 1 < argc) {
      options.impl = argv[++i];
    } else if (std::strcmp(argv[i], "--scales-by-row") == 0) {
      options.scales_by_row = true;
    } else if (std::strcmp(argv[i], "--list") == 0) {
      for (const GridRow& row : grid()) std::printf("%s %lld\n", row.shape, static_cast<long long>(row.tokens));
      return 0;
    } else if (argv[i][0] == '-') {
      std::fprintf(stderr, "gpu_grid: unknown argument %s\n", argv[i]);
      return 2;
    } else {
      options.shape = argv[i];
    }
  }
  const Result<Machine> machine = Machine::detect_cuda(0);
  if (!machine) {
    std::fprintf(stderr, "gpu_grid: %s\n", machine.status().message().c_str());
    return 1;
  }
  std::printf("{\"bench\":\"routes\",\"impl\":\"sluice\",\"digest\":\"%016llx\"}\n",
              static_cast<unsigned long long>(route_digest()));
  bool all_right = true;
  for (const GridRow& row : grid()) {
    if (std::strstr(row.shape, options.shape.c_str()) == nullptr) continue;
    for (const GemmShape& gemm : gemms(row)) all_right = time_gemm(row, gemm, *machine, options) && all_right;
  }
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::main_program(argc, argv); }
