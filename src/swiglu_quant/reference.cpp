// Stage 6, swiglu_quant, element by element.
#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/convert.h"
#include "reference/spec_math.h"
#include "swiglu_quant/impls.h"

namespace sluice::swiglu_quant {
namespace {

float activate(const Activation& activation, float g, float u) {
  if (activation.kind != ActivationKind::kSilu) {
    if (g > activation.limit) g = activation.limit;
    if (u > activation.limit) u = activation.limit;
    if (u < -activation.limit) u = -activation.limit;
  }
  float v = 0;
  if (activation.kind == ActivationKind::kGptOss) {
    const float z = g * reference::spec_sigmoid(activation.alpha * g);
    v = (u + 1.0f) * z;
  } else {
    v = reference::spec_silu(g) * u;
  }
  return std::isnan(v) ? reference::spec_nan() : v;
}

float load(const TensorView& view, std::int64_t r, std::int64_t i) {
  const std::int64_t at = r * view.stride[0] + i;
  return view.dtype == DType::kBF16 ? reference::f32_from_bf16(view.as<std::uint16_t>()[at]) : view.as<float>()[at];
}

void row(const Args& args, std::int64_t r) {
  const std::int64_t width = args.a.shape[1];
  std::vector<float> v(static_cast<std::size_t>(width));
  for (std::int64_t i = 0; i < width; ++i) {
    v[static_cast<std::size_t>(i)] = activate(args.activation, load(args.h, r, i), load(args.h, r, width + i));
  }
  for (std::int64_t i = 0; i < width; ++i) {
    const std::int64_t to = r * args.a.stride[0] + i;
    const float value = v[static_cast<std::size_t>(i)];
    if (args.a.dtype == DType::kF32) args.a.as<float>()[to] = value;
    if (args.a.dtype == DType::kBF16) args.a.as<std::uint16_t>()[to] = reference::bf16_from_f32(value);
  }
  if (!is_quantised(args.a.dtype)) return;
  const bool int8 = args.a.dtype == DType::kI8;
  const std::int64_t group = args.a_scale.shape[0] == 1 ? width : kScaleBlock;
  for (std::int64_t b = 0; b * group < width; ++b) {
    const std::int64_t end = std::min(width, (b + 1) * group);
    float amax = 0;
    for (std::int64_t i = b * group; i < end; ++i) {
      const float value = v[static_cast<std::size_t>(i)];
      if (std::isfinite(value)) amax = std::fmax(amax, std::fabs(value));
    }
    float scale = std::fmax(amax, 1e-10f) / (int8 ? 127.0f : 448.0f);
    if (args.scale_format == ScaleFormat::kUe8m0) scale = reference::power_of_two_from(scale);
    args.a_scale.as<float>()[b * args.a_scale.stride[0] + r * args.a_scale.stride[1]] = scale;
    for (std::int64_t i = b * group; i < end; ++i) {
      const float quotient = v[static_cast<std::size_t>(i)] / scale;
      args.a.as<std::uint8_t>()[r * args.a.stride[0] + i] =
          int8 ? reference::i8_from_f32(quotient) : reference::e4m3_from_f32(quotient);
    }
  }
}

}  // namespace

Status run_reference(const Args& args, const Ctx&) {
  const std::int64_t num_rows = args.h.shape[0];
  for (std::int64_t e = 0; e < args.groups.num_groups(); ++e) {
    const RowRange range = row_range(args.groups, e, num_rows);
    for (std::int64_t r = range.begin; r < range.end; ++r) row(args, r);
  }
  return Status::ok();
}

}  // namespace sluice::swiglu_quant
