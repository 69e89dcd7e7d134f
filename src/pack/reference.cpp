// Stage 3, pack, row by row: every row is made from its token on its own, however often the token is packed.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/convert.h"
#include "reference/spec_math.h"
#include "pack/impls.h"

namespace sluice::pack {
namespace {

void quantise_row(const std::vector<float>& v, const Args& args, std::int64_t r) {
  auto* const row = args.rows.as<std::uint8_t>() + r * args.rows.stride[0];
  const bool int8 = args.rows.dtype == DType::kI8;
  const std::size_t group = args.rows_scale.shape[0] == 1 ? v.size() : kScaleBlock;
  for (std::size_t begin = 0; begin < v.size(); begin += group) {
    const std::size_t end = std::min<std::size_t>(v.size(), begin + group);
    float amax = 0;
    for (std::size_t h = begin; h < end; ++h) {
      if (std::isfinite(v[h])) amax = std::fmax(amax, std::fabs(v[h]));
    }
    float scale = std::fmax(amax, 1e-10f) / (int8 ? 127.0f : 448.0f);
    if (args.scale_format == ScaleFormat::kUe8m0) scale = reference::power_of_two_from(scale);
    const std::int64_t b = static_cast<std::int64_t>(begin / group);
    args.rows_scale.as<float>()[b * args.rows_scale.stride[0] + r * args.rows_scale.stride[1]] = scale;
    for (std::size_t h = begin; h < end; ++h) {
      const float quotient = v[h] / scale;
      row[h] = int8 ? reference::i8_from_f32(quotient) : reference::e4m3_from_f32(quotient);
    }
  }
}

// Bytes and scales as they are; copied as integers, which keeps every NaN.
void move_row(const Args& args, std::int64_t t, std::int64_t r) {
  const std::int64_t hidden = args.x.shape[1];
  std::copy_n(args.x.as<std::uint8_t>() + t * args.x.stride[0], hidden,
              args.rows.as<std::uint8_t>() + r * args.rows.stride[0]);
  for (std::int64_t b = 0; b < args.x_scale.shape[0]; ++b) {
    args.rows_scale.as<std::uint32_t>()[b * args.rows_scale.stride[0] + r * args.rows_scale.stride[1]] =
        args.x_scale.as<std::uint32_t>()[b * args.x_scale.stride[0] + t * args.x_scale.stride[1]];
  }
}

}  // namespace

Status run_reference(const Args& args, const Ctx&) {
  const std::int64_t num_tokens = args.x.shape[0];
  const std::int64_t hidden = args.x.shape[1];
  std::int64_t num_rows = args.rows.shape[0];
  if (args.num_rows.is_present()) {
    num_rows = std::clamp<std::int64_t>(args.num_rows.as<std::int32_t>()[0], 0, num_rows);
  }
  for (std::int64_t r = 0; r < num_rows; ++r) {
    if (args.row_token.is_present()) {
      const std::int64_t t = args.row_token.as<std::int32_t>()[r];
      if (t < 0 || t >= num_tokens) {
        return {StatusCode::kInvalidArgument,
                fmt::format("pack: row_token of row {} is {}, expected 0 to {}", r, t, num_tokens - 1)};
      }
    }
    if (args.weight.is_present()) {
      const std::int64_t slot = args.row_slot.as<std::int32_t>()[r];
      if (slot < 0 || slot >= args.weight.num_elements()) {
        return {StatusCode::kInvalidArgument, fmt::format("pack: row_slot of row {} is {}, expected 0 to {}", r, slot,
                                                          args.weight.num_elements() - 1)};
      }
    }
  }

  std::vector<bool> owned(static_cast<std::size_t>(num_rows), args.groups.form == RowGroups::Form::kWhole);
  for (std::int64_t g = 0; args.groups.form != RowGroups::Form::kWhole && g < args.groups.num_groups(); ++g) {
    const RowRange range = row_range(args.groups, g, num_rows);
    for (std::int64_t r = range.begin; r < range.end; ++r) owned[static_cast<std::size_t>(r)] = true;
  }

  std::vector<float> v(static_cast<std::size_t>(hidden));
  for (std::int64_t r = 0; r < num_rows; ++r) {
    if (!owned[static_cast<std::size_t>(r)]) continue;
    const std::int64_t t = args.row_token.is_present() ? args.row_token.as<std::int32_t>()[r] : r;
    if (is_quantised(args.x.dtype)) {
      move_row(args, t, r);
      continue;
    }
    for (std::int64_t h = 0; h < hidden; ++h) {
      const std::int64_t at = t * args.x.stride[0] + h;
      float value = args.x.dtype == DType::kBF16 ? reference::f32_from_bf16(args.x.as<std::uint16_t>()[at])
                                                 : args.x.as<float>()[at];
      if (args.weight.is_present()) {
        const std::int64_t slot = args.row_slot.as<std::int32_t>()[r];
        const std::int64_t slots = args.weight.shape[1];
        value *= args.weight.as<float>()[slot / slots * args.weight.stride[0] + slot % slots];
        if (std::isnan(value)) value = reference::spec_nan();
      }
      v[static_cast<std::size_t>(h)] = value;
    }
    if (is_quantised(args.rows.dtype)) quantise_row(v, args, r);
    for (std::int64_t h = 0; h < hidden; ++h) {
      const std::int64_t to = r * args.rows.stride[0] + h;
      const float value = v[static_cast<std::size_t>(h)];
      if (args.rows.dtype == DType::kF32) args.rows.as<float>()[to] = value;
      if (args.rows.dtype == DType::kBF16) {
        // A bf16 that is only moved keeps its bits, a signalling NaN too.
        const bool moved = args.x.dtype == DType::kBF16 && !args.weight.is_present();
        args.rows.as<std::uint16_t>()[to] =
            moved ? args.x.as<std::uint16_t>()[t * args.x.stride[0] + h] : reference::bf16_from_f32(value);
      }
    }
  }
  return Status::ok();
}

}  // namespace sluice::pack
