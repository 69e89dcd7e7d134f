// Grouped GEMM: what is legal, and the table of implementations.
#include "sluice/stage/grouped_gemm.h"

#include <fmt/format.h>

#include <array>

#include "grouped_gemm/cuda.h"
#include "grouped_gemm/impls.h"

namespace sluice::grouped_gemm {

namespace {
Status fail(std::string text) { return {StatusCode::kInvalidArgument, "grouped_gemm: " + std::move(text)}; }

// A scale tensor is there exactly when the values it scales are e4m3 or i8.
Status check_presence(const TensorSpec& spec, const TensorView& scale, const TensorSpec& of, const TensorView& values) {
  const bool wanted = is_quantised(values.dtype);
  if (scale.is_present() == wanted) return Status::ok();
  if (wanted) {
    return fail(fmt::format("{} is {}, but {} is missing", of.name, to_string(values.dtype), spec.to_string()));
  }
  return fail(fmt::format("{} is {}, but {} = {} is given; only e4m3 and i8 are scaled", of.name,
                          to_string(values.dtype), spec.name, scale.to_string()));
}

// What the shapes say on their own: each of the two may be readable as blocks of 128, as one a row, as both or as none.
struct ScaleShapes {
  bool a_blocks, a_rows, w_blocks, w_rows;
};
ScaleShapes scale_shapes(const Args& args) {
  const std::int64_t n = args.w.shape[1];
  const std::int64_t part_rows = args.part_rows == 0 ? n : args.part_rows;
  const std::int64_t k_blocks = ceil_div(args.w.shape[2], kScaleBlock);
  const std::int64_t n_blocks = n / part_rows * ceil_div(part_rows, kScaleBlock);
  const auto& a = args.a_scale.shape;
  const auto& w = args.w_scale.shape;
  return {a[0] == k_blocks, a[0] == 1, w[1] == n_blocks && w[2] == k_blocks, w[1] == n && w[2] == 1};
}

// int8 rows are for the integer dot products with int8 weights; int8 weights also take bf16 and f32 rows.
Status check_int8(const Args& args) {
  const bool a_int8 = args.a.dtype == DType::kI8;
  const bool w_int8 = args.w.dtype == DType::kI8;
  if (a_int8 && !w_int8) {
    return fail(fmt::format("a is i8, but w is {}; i8 rows need i8 weights", to_string(args.w.dtype)));
  }
  if (w_int8 && args.a.dtype == DType::kE4M3)
    return fail("a is e4m3, but w is i8; i8 weights take i8, bf16 or f32 rows");
  if (a_int8 && args.a.shape[1] > kMaxInt8K) {
    return fail(
        fmt::format("K = {} is above {}, where a sum of i8 products can leave int32", args.a.shape[1], kMaxInt8K));
  }
  return Status::ok();
}

// Both scales, in the one granularity they share.
Status check_scales(const Args& args, std::int64_t n, std::int64_t part_rows, AxisBinder& binder, Phase phase) {
  SLUICE_TRY(check_presence(kAScale, args.a_scale, kA, args.a));
  SLUICE_TRY(check_presence(kWScale, args.w_scale, kW, args.w));
  if (args.w.dtype == DType::kI8) {
    SLUICE_TRY(binder.bind(kARowScale, args.a_scale, phase));
    return binder.bind(kWRowScale, args.w_scale, phase);
  }
  const bool both = args.a_scale.is_present() && args.w_scale.is_present();
  if (both && args.a_scale.rank == kAScale.rank && args.w_scale.rank == kWScale.rank) {
    const ScaleShapes is = scale_shapes(args);
    if ((is.a_rows && !is.a_blocks && is.w_blocks && !is.w_rows) ||
        (is.a_blocks && !is.a_rows && is.w_rows && !is.w_blocks)) {
      return fail(
          fmt::format("a_scale = {} has one scale for {}, w_scale = {} for {}; both must have one for 128 "
                      "columns, or both one a row",
                      args.a_scale.to_string(), is.a_rows ? "a row" : "128 columns", args.w_scale.to_string(),
                      is.w_rows ? "a row" : "128x128"));
    }
  }
  SLUICE_TRY(binder.bind_either(kAScale, kARowScale, args.a_scale, phase));
  if (!args.w_scale.is_present()) return Status::ok();
  if (binder.fits(kWRowScale, args.w_scale)) return binder.bind(kWRowScale, args.w_scale, phase);
  SLUICE_TRY(binder.bind(kWScale, args.w_scale, phase));
  const std::int64_t scale_rows = n / part_rows * ceil_div(part_rows, kScaleBlock);
  if (args.w_scale.shape[1] == scale_rows) return Status::ok();
  return fail(fmt::format(
      "{} axis 1 (Nb) is {}, expected {}: N = {} in parts of {} rows, {} rows a scale (or N, with "
      "one scale a row, {})",
      kWScale.to_string(), args.w_scale.shape[1], scale_rows, n, part_rows, kScaleBlock, kWRowScale.to_string()));
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
  SLUICE_TRY(check_int8(args));
  SLUICE_TRY(check_scales(args, n, part_rows, binder, phase));
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

bool has_row_scales(const Args& args) {
  if (args.w.dtype == DType::kI8) return true;
  const ScaleShapes is = scale_shapes(args);
  if (args.w_scale.is_present()) return is.w_rows && !is.w_blocks;
  return args.a_scale.is_present() && is.a_rows && !is.a_blocks;
}

std::span<const Impl<Args>> impls() {
  static constexpr auto kTable = std::to_array<Impl<Args>>({
#ifdef SLUICE_WITH_CUDA
      {"cuda-wgmma", DeviceKind::kCuda, can_run_wgmma, nullptr, describe_wgmma, run_wgmma},
      {"cuda-simt", DeviceKind::kCuda, can_run_simt, nullptr, nullptr, run_simt},
#endif
      {"cpu", DeviceKind::kCpu, cpu_impl::can_run, cpu_impl::scratch_bytes, cpu_impl::describe, cpu_impl::run},
      {"reference", DeviceKind::kCpu, reference::can_run, nullptr, nullptr, reference::run},
  });
  return kTable;
}

}  // namespace sluice::grouped_gemm
