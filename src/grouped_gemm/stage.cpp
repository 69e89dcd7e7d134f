// Grouped GEMM: what is legal, and the table of implementations.
#include "sluice/stage/grouped_gemm.h"

#include <fmt/format.h>

#include <array>

#include "grouped_gemm/impls.h"

namespace sluice::grouped_gemm {

namespace {
Status fail(std::string text) { return {StatusCode::kInvalidArgument, "grouped_gemm: " + std::move(text)}; }

// A scale tensor is there exactly when the values it scales are e4m3.
Status check_presence(const TensorSpec& spec, const TensorView& scale, const TensorSpec& of, const TensorView& values) {
  const bool wanted = values.dtype == DType::kE4M3;
  if (scale.is_present() == wanted) return Status::ok();
  if (wanted) return fail(fmt::format("{} is e4m3, but {} is missing", of.name, spec.to_string()));
  return fail(fmt::format("{} is {}, but {} = {} is given; only e4m3 is scaled", of.name, to_string(values.dtype),
                          spec.name, scale.to_string()));
}
}  // namespace

Status check(const Args& args, Phase phase) {
  AxisBinder binder("grouped_gemm");
  SLUICE_TRY(binder.bind(kA, args.a, phase));
  SLUICE_TRY(binder.bind(kW, args.w, phase));
  const std::int64_t num_rows = args.a.shape[0];
  const std::int64_t num_groups = args.w.shape[0];
  const std::int64_t n = args.w.shape[1];
  const std::int64_t k = args.w.shape[2];
  if (n < 1 || k < 1)
    return fail(fmt::format("N = {} and K = {} must be at least 1 (w = {})", n, k, args.w.to_string()));
  const std::int64_t part_rows = args.part_rows == 0 ? n : args.part_rows;
  if (part_rows < 1 || n % part_rows != 0) {
    return fail(fmt::format("part_rows = {} does not divide N = {} into whole matrices", args.part_rows, n));
  }
  SLUICE_TRY(check_presence(kAScale, args.a_scale, kA, args.a));
  SLUICE_TRY(check_presence(kWScale, args.w_scale, kW, args.w));
  SLUICE_TRY(binder.bind(kAScale, args.a_scale, phase));
  SLUICE_TRY(binder.bind(kWScale, args.w_scale, phase));
  const std::int64_t scale_rows = n / part_rows * ceil_div(part_rows, kScaleBlock);
  if (args.w_scale.is_present() && args.w_scale.shape[1] != scale_rows) {
    return fail(fmt::format("{} axis 1 (Nb) is {}, expected {}: N = {} in parts of {} rows, {} rows a scale",
                            kWScale.to_string(), args.w_scale.shape[1], scale_rows, n, part_rows, kScaleBlock));
  }
  SLUICE_TRY(binder.bind(kBias, args.bias, phase));
  SLUICE_TRY(binder.bind(kOut, args.out, phase));
  SLUICE_TRY(check_row_groups("grouped_gemm", args.groups, num_groups, num_rows, phase));
  for (const TensorView* view : {&args.a_scale, &args.w, &args.w_scale, &args.bias, &args.out, &args.groups.counts,
                                 &args.groups.expert_offset.view}) {
    if (view->is_present() && view->device != args.a.device) {
      return fail(fmt::format("a is on {} {}, but {} is on {} {}", to_string(args.a.device.kind), args.a.device.index,
                              view->to_string(), to_string(view->device.kind), view->device.index));
    }
  }
  return Status::ok();
}

std::span<const Impl<Args>> impls() {
  static constexpr std::array<Impl<Args>, 2> kTable = {{
      {"cpu", DeviceKind::kCpu, cpu_impl::can_run, cpu_impl::scratch_bytes, cpu_impl::describe, cpu_impl::run},
      {"reference", DeviceKind::kCpu, reference::can_run, nullptr, nullptr, reference::run},
  }};
  return kTable;
}

}  // namespace sluice::grouped_gemm
