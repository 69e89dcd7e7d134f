// Times CUTLASS's grouped GEMM with 1x128 and 128x128 scales on the grid: its own collectives, built from the headers the
// library's kernels use, in three tile shapes; the fastest counts. Groups without rows are left out, as its caller would
// have to read the counts on the host anyway. Prints JSON lines.
//   peer_cutlass [part of a shape's name]
#include <cstring>
#include <memory>

#include <cutlass/cutlass.h>
#include <cutlass/version.h>

#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "../device_data.h"

namespace sluice::bench {
namespace {

using cute::Int;
using cute::Shape;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Strides (leading, 1, 0) of a K-major operand or a row-major result.
template <class Stride>
Stride leading(std::int64_t elems) {
  Stride stride{};
  cute::get<0>(stride) = elems;
  return stride;
}

template <class Tile, class Cluster, bool pingpong>
struct Config {
  using Problem = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;
  using Element = cutlass::float_e4m3_t;
  using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, 128, 128>;
  using ScaleLayoutA = decltype(Scales::deduce_layoutSFA());
  using ScaleLayoutB = decltype(Scales::deduce_layoutSFB());
  using Arch = cutlass::arch::Sm90;
  using Op = cutlass::arch::OpClassTensorOp;
  using Schedule = std::conditional_t<pingpong, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpongFP8Blockwise,
                                      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise>;
  using StoreSchedule = std::conditional_t<pingpong, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong,
                                           cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, Op, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor*, 8,
      cutlass::bfloat16_t, RowMajor*, 8, StoreSchedule>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, Op, Element, cute::tuple<RowMajor*, ScaleLayoutA*>, 16, Element, cute::tuple<ColumnMajor*, ScaleLayoutB*>,
      16, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Gemm =
      cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>>;
};

// One draw of rows: tensors, and the arrays of pointers and strides the kernel wants of every group.
struct Input {
  std::vector<std::int32_t> offset;
  DeviceBuffer a, a_scale, out;
};

template <class C>
class Problem {
 public:
  using Gemm = typename C::Gemm;
  using Kernel = typename Gemm::GemmKernel;

  bool prepare(const GemmShape& gemm, const Input& input, const DeviceBuffer& w, const DeviceBuffer& w_scale) {
    const std::int64_t k_blocks = ceil_div(gemm.k, 128), n_blocks = ceil_div(gemm.n, 128);
    std::vector<const typename C::Element*> a, b;
    std::vector<cutlass::bfloat16_t*> d;
    std::vector<const float*> sfa, sfb;
    std::vector<typename Kernel::InternalStrideA> stride_a;
    std::vector<typename Kernel::InternalStrideB> stride_b;
    std::vector<typename Kernel::InternalStrideD> stride_d;
    std::vector<typename C::ScaleLayoutA> layout_sfa;
    std::vector<typename C::ScaleLayoutB> layout_sfb;
    const int n = static_cast<int>(gemm.n), k = static_cast<int>(gemm.k);
    for (std::size_t e = 0; e + 1 < input.offset.size(); ++e) {
      const std::int64_t first = input.offset[e];
      const int m = input.offset[e + 1] - input.offset[e];
      const auto expert = static_cast<std::int64_t>(e);
      if (m == 0) continue;
      shapes_.push_back({m, n, k});
      a.push_back(input.a.as<const typename C::Element>() + first * gemm.k);
      b.push_back(w.as<const typename C::Element>() + expert * gemm.n * gemm.k);
      d.push_back(input.out.as<cutlass::bfloat16_t>() + first * gemm.n);
      sfa.push_back(input.a_scale.as<float>() + first * k_blocks);
      sfb.push_back(w_scale.as<float>() + expert * n_blocks * k_blocks);
      stride_a.push_back(leading<typename Kernel::InternalStrideA>(k));
      stride_b.push_back(leading<typename Kernel::InternalStrideB>(k));
      stride_d.push_back(leading<typename Kernel::InternalStrideD>(n));
      layout_sfa.push_back(C::Scales::tile_atom_to_shape_SFA(cute::make_shape(m, n, k, 1)));
      layout_sfb.push_back(C::Scales::tile_atom_to_shape_SFB(cute::make_shape(m, n, k, 1)));
    }
    const auto keep = [&](auto& host) -> const DeviceBuffer& { return held_.emplace_back(upload(host)); };
    held_.reserve(16);
    using ShapeT = typename C::Problem::UnderlyingProblemShape;
    const auto hardware = cutlass::KernelHardwareInfo::make_kernel_hardware_info<Kernel>(0);
    typename Gemm::Arguments args{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {static_cast<int>(shapes_.size()), keep(shapes_).template as<ShapeT>(), shapes_.data()},
        {keep(a).template as<const typename C::Element*>(),
         keep(stride_a).template as<typename Kernel::InternalStrideA>(),
         keep(b).template as<const typename C::Element*>(),
         keep(stride_b).template as<typename Kernel::InternalStrideB>(), keep(sfa).template as<const float*>(),
         keep(layout_sfa).template as<typename C::ScaleLayoutA>(), keep(sfb).template as<const float*>(),
         keep(layout_sfb).template as<typename C::ScaleLayoutB>()},
        {{},
         nullptr,
         keep(stride_d).template as<typename Kernel::InternalStrideD>(),
         keep(d).template as<cutlass::bfloat16_t*>(),
         keep(stride_d).template as<typename Kernel::InternalStrideD>()},
        hardware};
    args.epilogue.thread.alpha = 1.0f;
    args.epilogue.thread.beta = 0.0f;
    workspace_ = DeviceBuffer(static_cast<std::int64_t>(Gemm::get_workspace_size(args)) + 256);
    return Gemm::can_implement(args) == cutlass::Status::kSuccess &&
           gemm_.initialize(args, workspace_.template as<void>()) == cutlass::Status::kSuccess;
  }
  bool run(cudaStream_t stream) { return gemm_.run(stream) == cutlass::Status::kSuccess; }

 private:
  std::vector<typename C::Problem::UnderlyingProblemShape> shapes_;
  std::vector<DeviceBuffer> held_;
  DeviceBuffer workspace_;
  Gemm gemm_;
};

template <class C>
void time_config(const char* name, const GridRow& row, const GemmShape& gemm, std::vector<Input>& inputs,
                 const DeviceBuffer& w, const DeviceBuffer& w_scale) {
  std::vector<std::unique_ptr<Problem<C>>> problems;
  Timing timing;
  for (const Input& input : inputs) {
    problems.push_back(std::make_unique<Problem<C>>());
    if (!problems.back()->prepare(gemm, input, w, w_scale)) timing.error = "refused";
  }
  double worst = -1;
  if (timing.error.empty()) {
    must(cudaMemset(inputs[0].out.as<void>(), 0xFF, static_cast<std::size_t>(inputs[0].offset.back() * gemm.n * 2)),
         "poison");
    if (!problems[0]->run(nullptr) || cudaDeviceSynchronize() != cudaSuccess) {
      std::fprintf(stderr, "%s %s %s: %s\n", row.shape, gemm.name, name, cudaGetErrorString(cudaGetLastError()));
      std::exit(1);
    }
    worst = worst_error(row, gemm, inputs[0].offset, {inputs[0].out.as<std::uint16_t>(), nullptr, gemm.n});
    if (worst < 1) {
      timing = time_graph(
          static_cast<int>(inputs.size()), gemm_floor(row, gemm, inputs[0].offset).us,
          [&](cudaStream_t stream, int variant) { return problems[static_cast<std::size_t>(variant)]->run(stream); });
    } else {
      timing.error = "wrong result";
    }
  }
  print_figure("cutlass", row, gemm, inputs[0].offset, timing, worst, name);
}

int main_program(const char* only) {
  std::printf("{\"bench\":\"routes\",\"impl\":\"cutlass\",\"digest\":\"%016llx\",\"version\":\"%d.%d.%d\"}\n",
              static_cast<unsigned long long>(route_digest()), CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH);
  for (const GridRow& row : grid()) {
    if (row.bf16 || std::strstr(row.shape, only) == nullptr) continue;
    for (const GemmShape& gemm : gemms(row)) {
      const std::int64_t k_blocks = ceil_div(gemm.k, 128), n_blocks = ceil_div(gemm.n, 128);
      const DeviceBuffer w(row.local_experts * gemm.n * gemm.k);
      fill_e4m3(w.as<std::uint8_t>(), row.local_experts * gemm.n * gemm.k, Salt::kW);
      const DeviceBuffer w_scale(row.local_experts * n_blocks * k_blocks * 4);
      fill_w_scale(w_scale.as<float>(), row.local_experts, n_blocks, k_blocks, false);
      const int variants = num_variants(gemm_floor(row, gemm, expert_offsets(row, 0)));
      std::vector<Input> inputs;
      for (int v = 0; v < variants; ++v) {
        Input input{expert_offsets(row, v), {}, {}, {}};
        const std::int64_t rows = input.offset.back();
        input.a = DeviceBuffer(rows * gemm.k);
        fill_e4m3(input.a.as<std::uint8_t>(), rows * gemm.k, Salt::kA);
        std::vector<std::int32_t> source(static_cast<std::size_t>(rows));
        for (std::int64_t r = 0; r < rows; ++r) source[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(r);
        const DeviceBuffer device_source = upload(source);
        input.a_scale = DeviceBuffer(rows * k_blocks * 4);
        for (std::size_t e = 0; e + 1 < input.offset.size(); ++e) {  // [Kb, rows of the expert]
          const std::int64_t first = input.offset[e], count = input.offset[e + 1] - input.offset[e];
          fill_a_scale(input.a_scale.as<float>() + first * k_blocks, device_source.as<std::int32_t>() + first, count,
                       k_blocks, 1, count);
        }
        input.out = DeviceBuffer(rows * gemm.n * 2);
        must(cudaDeviceSynchronize(), "fill");
        inputs.push_back(std::move(input));
      }
      using T128 = Shape<Int<128>, Int<128>, Int<128>>;
      using T64 = Shape<Int<64>, Int<128>, Int<128>>;
      time_config<Config<T128, Shape<Int<1>, Int<2>, Int<1>>, false>>("cooperative 128x128 cluster 1x2", row, gemm,
                                                                      inputs, w, w_scale);
      time_config<Config<T128, Shape<Int<2>, Int<1>, Int<1>>, false>>("cooperative 128x128 cluster 2x1", row, gemm,
                                                                      inputs, w, w_scale);
      time_config<Config<T64, Shape<Int<1>, Int<1>, Int<1>>, true>>("pingpong 64x128", row, gemm, inputs, w, w_scale);
    }
  }
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::main_program(argc > 1 ? argv[1] : ""); }
