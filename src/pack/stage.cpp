// Stage 3, pack: what is legal, and which implementations there are.
#include "pack/impls.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/can_run.h"
#include "core/scales.h"

namespace sluice::pack {

namespace {

constexpr Impl<Args> kImpls[] = {
#ifdef SLUICE_WITH_CUDA
    {"cuda", DeviceKind::kCuda, on_gpu<Args>, scratch_bytes_cuda, describe_cuda, run_cuda},
#endif
    {"cpu", DeviceKind::kCpu, always<Args>, scratch_bytes_cpu, describe_cpu, run_cpu},
    {"reference", DeviceKind::kCpu, always<Args>, nullptr, nullptr, run_reference},
};

}  // namespace

Status check(const Args& args, Phase phase) {
  const auto fail = [](std::string text) { return Status(StatusCode::kInvalidArgument, "pack: " + std::move(text)); };
  AxisBinder binder("pack");
  SLUICE_TRY(binder.bind(kX, args.x, phase));
  const bool x_quantised = is_quantised(args.x.dtype);
  SLUICE_TRY(bind_scale("pack", binder, kX, args.x, kXScale, kXRowScale, args.x_scale, phase));
  if (args.row_token.is_present()) {
    SLUICE_TRY(binder.bind(kRowToken, args.row_token, phase));
  } else {
    binder.set(Axis::kR, args.x.shape[0], "the T of x, as row_token is absent");
  }
  SLUICE_TRY(binder.bind(kSlotRow, args.slot_row, phase));
  SLUICE_TRY(binder.bind(kRows, args.rows, phase));
  if (args.rows.shape[0] > std::numeric_limits<std::int32_t>::max()) {
    return fail(fmt::format("rows = {} has more rows than an i32 can number", args.rows.to_string()));
  }
  SLUICE_TRY(bind_scale("pack", binder, kRows, args.rows, kRowsScale, kRowsRowScale, args.rows_scale, phase));
  if (x_quantised && args.rows.dtype != args.x.dtype) {
    return fail(fmt::format("x is {0}, so rows must be {0}, got {1}", to_string(args.x.dtype), args.rows.to_string()));
  }
  if (x_quantised && args.rows_scale.shape[0] != args.x_scale.shape[0]) {
    return fail(
        fmt::format("x_scale is {} and rows_scale is {}; scales are moved, so both have one for 128 columns or "
                    "both one a row",
                    args.x_scale.to_string(), args.rows_scale.to_string()));
  }
  if (!x_quantised) SLUICE_TRY(check_scale_format("pack", args.rows.dtype, args.scale_format));
  if (args.num_rows.is_present()) SLUICE_TRY(binder.bind(kNumRows, args.num_rows, phase));
  if (args.groups.form != RowGroups::Form::kWhole) {
    if (args.row_token.is_present() || args.num_rows.is_present())
      return fail("row groups are for rows that are the tokens, without row_token and num_rows");
    const std::int64_t num_groups = std::max<std::int64_t>(args.groups.num_groups(), 0);
    SLUICE_TRY(check_row_groups("pack", args.groups, num_groups, args.rows.shape[0], phase));
  }
  if (args.weight.is_present()) {
    if (x_quantised) {
      return fail(fmt::format("weight cannot be applied to an x that is {} already", to_string(args.x.dtype)));
    }
    if (!args.row_slot.is_present()) return fail("weight[T,S] needs row_slot[R], which is missing");
    SLUICE_TRY(binder.bind(kWeight, args.weight, phase));
  }
  if (args.row_slot.is_present()) SLUICE_TRY(binder.bind(kRowSlot, args.row_slot, phase));
  return Status::ok();
}

std::span<const Impl<Args>> impls() { return kImpls; }

}  // namespace sluice::pack
