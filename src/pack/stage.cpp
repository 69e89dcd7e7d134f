// Stage 3, pack: what is legal, and which implementations there are.
#include "sluice/stage/pack.h"

#include <fmt/format.h>

#ifdef SLUICE_WITH_CUDA
#include "device/device.h"
#include "pack/cuda.h"
#endif

#include <algorithm>
#include <limits>

namespace sluice::pack {

Status run_reference(const Args& args, const Ctx& ctx);
Status run_cpu(const Args& args, const Ctx& ctx);
std::int64_t scratch_bytes_cpu(const Args& args, const Machine& machine);
std::string describe_cpu(const Args& args, const Machine& machine);

namespace {

Status always(const Args&, const Machine&) { return Status::ok(); }
#ifdef SLUICE_WITH_CUDA
Status on_gpu(const Args&, const Machine& machine) { return device::runs_plain_kernels(machine); }
#endif

constexpr Impl<Args> kImpls[] = {
#ifdef SLUICE_WITH_CUDA
    {"cuda", DeviceKind::kCuda, on_gpu, nullptr, nullptr, run_cuda},
#endif
    {"cpu", DeviceKind::kCpu, always, scratch_bytes_cpu, describe_cpu, run_cpu},
    {"reference", DeviceKind::kCpu, always, nullptr, nullptr, run_reference},
};

}  // namespace

Status check(const Args& args, Phase phase) {
  const auto fail = [](std::string text) { return Status(StatusCode::kInvalidArgument, "pack: " + std::move(text)); };
  AxisBinder binder("pack");
  SLUICE_TRY(binder.bind(kX, args.x, phase));
  const bool x_quantised = args.x.dtype == DType::kE4M3;
  if (args.x_scale.is_present() != x_quantised) {
    return fail(fmt::format("x is {} and x_scale is {}; x_scale must be present exactly when x is e4m3",
                            args.x.to_string(), args.x_scale.to_string()));
  }
  SLUICE_TRY(binder.bind(kXScale, args.x_scale, phase));
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
  const bool rows_quantised = args.rows.dtype == DType::kE4M3;
  if (args.rows_scale.is_present() != rows_quantised) {
    return fail(fmt::format("rows is {} and rows_scale is {}; rows_scale must be present exactly when rows is e4m3",
                            args.rows.to_string(), args.rows_scale.to_string()));
  }
  SLUICE_TRY(binder.bind(kRowsScale, args.rows_scale, phase));
  if (x_quantised && !rows_quantised) {
    return fail(fmt::format("x is e4m3, so rows must be e4m3, got {}", args.rows.to_string()));
  }
  if (args.num_rows.is_present()) SLUICE_TRY(binder.bind(kNumRows, args.num_rows, phase));
  if (args.groups.form != RowGroups::Form::kWhole) {
    if (args.row_token.is_present() || args.num_rows.is_present())
      return fail("row groups are for rows that are the tokens, without row_token and num_rows");
    const std::int64_t num_groups = std::max<std::int64_t>(args.groups.num_groups(), 0);
    SLUICE_TRY(check_row_groups("pack", args.groups, num_groups, args.rows.shape[0], phase));
  }
  if (args.weight.is_present()) {
    if (x_quantised) return fail("weight cannot be applied to an x that is e4m3 already");
    if (!args.row_slot.is_present()) return fail("weight[T,S] needs row_slot[R], which is missing");
    SLUICE_TRY(binder.bind(kWeight, args.weight, phase));
  }
  if (args.row_slot.is_present()) SLUICE_TRY(binder.bind(kRowSlot, args.row_slot, phase));
  return Status::ok();
}

std::span<const Impl<Args>> impls() { return kImpls; }

}  // namespace sluice::pack
