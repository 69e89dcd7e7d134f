// What the stages that quantise or move quantised rows ask of a scale tensor.
#pragma once

#include <fmt/format.h>

#include "sluice/config.h"
#include "sluice/core.h"

namespace sluice {

// Scales are there exactly when `values` is e4m3 or i8. int8 has one a row; e4m3 that or one for 128 columns, told apart by
// shape.
inline Status bind_scale(std::string_view stage, AxisBinder& binder, const TensorSpec& spec, const TensorView& values,
                         const TensorSpec& blocks, const TensorSpec& rows, const TensorView& scale, Phase phase) {
  if (scale.is_present() != is_quantised(values.dtype)) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{0}: {1} is {2} and {3} is {4}; {3} must be present exactly when {1} is e4m3 or i8", stage,
                        spec.name, values.to_string(), blocks.name, scale.to_string())};
  }
  if (values.dtype == DType::kI8) return binder.bind(rows, scale, phase);
  return binder.bind_either(blocks, rows, scale, phase);
}

// Powers of two are for e4m3.
inline Status check_scale_format(std::string_view stage, DType values, ScaleFormat format) {
  if (values != DType::kI8 || format == ScaleFormat::kF32) return Status::ok();
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: scale_format is {}, but i8 rows have f32 scales", stage, to_string(format))};
}

}  // namespace sluice
