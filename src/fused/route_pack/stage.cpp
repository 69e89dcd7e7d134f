// What is legal, what the kernel refuses, and the table.
#include <fmt/format.h>

#include "core/can_run.h"
#include "fused/route_pack/impls.h"

namespace sluice::route_pack {

namespace {
Status fail(std::string text) { return {StatusCode::kInvalidArgument, fmt::format("{}: {}", kStage, text)}; }
#ifdef SLUICE_WITH_CUDA
Status decline(std::string text) { return {StatusCode::kUnsupported, std::move(text)}; }
#endif
}  // namespace

Status check(const Args& args, Phase phase) {
  SLUICE_TRY(route::check(args.route, phase));
  SLUICE_TRY(pack::check(args.pack, phase));
  const RoutePlan& plan = args.route.plan;
  for (const auto& [name, ours, theirs] : {std::tuple<const char*, const TensorView*, const TensorView*>(
                                               "row_token", &plan.row_token, &args.pack.row_token),
                                           {"slot_row", &plan.slot_row, &args.pack.slot_row},
                                           {"num_rows", &plan.num_rows, &args.pack.num_rows}}) {
    if (theirs->is_present() && ours->data == theirs->data) continue;
    return fail(fmt::format("pack.{} is not the plan's", name));
  }
  const TensorView& ids = args.route.topk_idx.view;
  if (args.pack.x.shape[0] != ids.shape[0])
    return fail(fmt::format("x has {} tokens, topk_idx {}", args.pack.x.shape[0], ids.shape[0]));
  return Status::ok();
}

#ifdef SLUICE_WITH_CUDA
Status can_run_cuda(const Args& args, const Machine& machine) {
  SLUICE_TRY(on_gpu(args, machine));
  const pack::Args& pack = args.pack;
  if (args.route.checked) return decline("does not look for invalid ids first");
  if (pack.x.dtype != DType::kBF16 && pack.x.dtype != DType::kF32)
    return decline(fmt::format("quantises x, which is {}", to_string(pack.x.dtype)));
  if (pack.slot_row.is_present() && pack.slot_row.shape[1] > kMostSlotsOfToken)
    return decline(
        fmt::format("has {} lanes for the slots of a token, S is {}", kMostSlotsOfToken, pack.slot_row.shape[1]));
  if (pack.weight.is_present()) return decline("has no weighted rows");
  if (pack.rows.dtype != DType::kE4M3 || (pack.rows_scale.shape[0] == 1 && pack.rows.shape[1] > kScaleBlock)) {
    return decline(fmt::format("makes e4m3 rows with a scale for 128 columns, they are {}{}",
                               to_string(pack.rows.dtype),
                               pack.rows_scale.is_present() ? " with one scale a row" : ""));
  }
  return Status::ok();
}

std::string describe_cuda(const Args&, const Machine&) {
  return fmt::format("for up to {} slots; every block sorts them", kMostSlotsWorthIt);
}
#endif

bool replaces(std::string_view route, std::string_view pack) { return route == "cuda" && pack == "cuda"; }

std::int64_t most_slots() { return kMostSlotsWorthIt; }

std::span<const Impl<Args>> impls() {
#ifdef SLUICE_WITH_CUDA
  static constexpr Impl<Args> kTable[] = {
      {"cuda-fused", DeviceKind::kCuda, can_run_cuda, nullptr, describe_cuda, run_cuda},
  };
  return kTable;
#else
  return {};
#endif
}

}  // namespace sluice::route_pack
