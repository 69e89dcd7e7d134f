// Stage 2, route, as the sentence that defines it: for each local expert, its slots in ascending order.
#include <fmt/format.h>

#include "sluice/stage/route.h"

namespace sluice::route {

Status run_reference(const Args& args, const Ctx&) {
  const TensorView& ids = args.topk_idx.view;  // [T,S]
  const RoutePlan& plan = args.plan;
  const std::int64_t num_tokens = ids.shape[0];
  const std::int64_t num_slots = ids.shape[1];
  const std::int64_t num_local = plan.expert_offset.view.shape[0] - 1;
  const auto id_at = [&](std::int64_t t, std::int64_t s) { return ids.as<std::int32_t>()[t * ids.stride[0] + s]; };

  std::int64_t num_invalid = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t s = 0; s < num_slots; ++s) {
      const std::int64_t id = id_at(t, s);
      if (id >= -1 && id < args.num_experts) continue;
      if (args.checked) {
        return {StatusCode::kInvalidArgument,
                fmt::format("route: topk_idx of token {}, slot {} is {}, expected -1 or 0 to {}", t, s, id,
                            args.num_experts - 1)};
      }
      ++num_invalid;
    }
  }

  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t s = 0; s < num_slots; ++s) {
      plan.slot_row.as<std::int32_t>()[t * plan.slot_row.stride[0] + s] = -1;
    }
  }
  std::int32_t row = 0;
  for (std::int64_t e = 0; e < num_local; ++e) {
    plan.expert_offset.view.as<std::int32_t>()[e] = row;
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      for (std::int64_t s = 0; s < num_slots; ++s) {
        if (id_at(t, s) != args.first_expert + e) continue;
        plan.row_token.as<std::int32_t>()[row] = static_cast<std::int32_t>(t);
        plan.row_slot.as<std::int32_t>()[row] = static_cast<std::int32_t>(t * num_slots + s);
        plan.slot_row.as<std::int32_t>()[t * plan.slot_row.stride[0] + s] = row;
        ++row;
      }
    }
  }
  plan.expert_offset.view.as<std::int32_t>()[num_local] = row;
  plan.num_rows.as<std::int32_t>()[0] = row;
  if (args.counters.is_present()) {
    args.counters.as<std::int64_t>()[static_cast<int>(Counter::kInvalidIds)] += num_invalid;
  }
  return Status::ok();
}

}  // namespace sluice::route
