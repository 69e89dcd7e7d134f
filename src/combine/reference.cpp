// Stage 9, combine, element by element.
#include <fmt/format.h>

#include <cmath>

#include "reference/convert.h"
#include "reference/spec_math.h"
#include "combine/impls.h"

namespace sluice::combine {
namespace {

float load(const TensorView& view, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * view.stride[0] + column;
  return view.dtype == DType::kBF16 ? reference::f32_from_bf16(view.as<std::uint16_t>()[at]) : view.as<float>()[at];
}

}  // namespace

Status run_reference(const Args& args, const Ctx&) {
  const std::int64_t num_rows = args.y.shape[0];
  const std::int64_t num_tokens = args.slot_row.shape[0];
  const std::int64_t num_slots = args.slot_row.shape[1];
  const auto row_at = [&](std::int64_t t, std::int64_t s) {
    return args.slot_row.as<std::int32_t>()[t * args.slot_row.stride[0] + s];
  };
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t s = 0; s < num_slots; ++s) {
      if (row_at(t, s) >= -1 && row_at(t, s) < num_rows) continue;
      return {StatusCode::kInvalidArgument,
              fmt::format("combine: slot_row of token {}, slot {} is {}, expected -1 or 0 to {}", t, s, row_at(t, s),
                          num_rows - 1)};
    }
  }

  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t h = 0; h < args.out.shape[1]; ++h) {
      float acc = 0;
      bool any = false;
      for (std::int64_t s = 0; s < num_slots; ++s) {
        if (row_at(t, s) < 0) continue;
        const float weight = args.unweighted ? 1.0f : load(args.topk_weight, t, s);
        acc = std::fma(weight, load(args.y, row_at(t, s), h), acc);
        any = true;
      }
      if (args.shared.is_present()) {
        const float shared = load(args.shared, t, h);
        acc = args.shared_gate.is_present()
                  ? std::fma(reference::spec_sigmoid(load(args.shared_gate, t, 0)), shared, acc)
                  : acc + shared;
        any = true;
      }
      if (args.accumulate && !any) continue;  // not even -0 + 0 or a rewritten NaN
      if (args.accumulate) acc = load(args.out, t, h) + acc;
      if (std::isnan(acc)) acc = reference::spec_nan();
      const std::int64_t to = t * args.out.stride[0] + h;
      if (args.out.dtype == DType::kBF16) {
        args.out.as<std::uint16_t>()[to] = reference::bf16_from_f32(acc);
      } else {
        args.out.as<float>()[to] = acc;
      }
    }
  }
  return Status::ok();
}

}  // namespace sluice::combine
