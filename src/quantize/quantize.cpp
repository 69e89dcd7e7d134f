// Weights to e4m3 and int8. A strip of rows that share scales is read twice, for its amax and for its bytes; the second
// time it comes from L2 (128 rows of 7168 bf16 are 1.8 MB), so that memory is read once. The conversions themselves are
// those of the activations, cpu/columns-inl.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize/quantize.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include "cpu/columns-inl.h"
#include "cpu/parallel.h"
#include "sluice/quantize.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::quantize {
namespace HWY_NAMESPACE {
namespace simd = sluice::HWY_NAMESPACE;

HWY_INLINE void LoadBlock(DType dtype, const std::byte* row, std::int64_t column, std::size_t n,
                          float* HWY_RESTRICT buffer) {
  if (dtype == DType::kBF16) {
    simd::LoadColumns(reinterpret_cast<const std::uint16_t*>(row) + column, n, buffer);
  } else {
    simd::LoadColumns(reinterpret_cast<const float*>(row) + column, n, buffer);
  }
}

// block_amax[b] = the larger of itself and the finite magnitudes of columns [128 b, 128 (b+1)); false where an element
// of the row is not finite.
bool RaiseAmax(DType dtype, const std::byte* row, std::int64_t cols, float* HWY_RESTRICT block_amax) {
  namespace hn = hwy::HWY_NAMESPACE;
  const simd::ColumnTag d;
  HWY_ALIGN float buffer[simd::kColumns];
  // v - v is 0 for a finite v and NaN for the others, and NaN stays in a sum.
  auto differences = hn::Zero(d);
  for (std::int64_t column = 0, b = 0; column < cols; column += kScaleBlock, ++b) {
    LoadBlock(dtype, row, column, static_cast<std::size_t>(std::min(kScaleBlock, cols - column)), buffer);
    block_amax[b] = std::max(block_amax[b], simd::AmaxColumns(buffer));
    for (std::size_t i = 0; i < simd::kColumns; i += hn::Lanes(d)) {
      const auto v = hn::Load(d, buffer + i);
      differences = hn::Add(differences, hn::Sub(v, v));
    }
  }
  return hn::AllTrue(d, hn::Eq(differences, hn::Zero(d)));
}

// to[k] = q(row[k] / scale[k/128 * scale_step]).
void EncodeRow(DType dtype, const std::byte* row, std::int64_t cols, const float* scale, std::int64_t scale_step,
               DType to_dtype, std::byte* to) {
  HWY_ALIGN float buffer[simd::kColumns];
  for (std::int64_t column = 0; column < cols; column += kScaleBlock, scale += scale_step) {
    const auto n = static_cast<std::size_t>(std::min(kScaleBlock, cols - column));
    LoadBlock(dtype, row, column, n, buffer);
    if (to_dtype == DType::kI8) {
      simd::EncodeColumns(buffer, n, *scale, reinterpret_cast<std::int8_t*>(to) + column);
    } else {
      simd::EncodeColumns(buffer, n, *scale, reinterpret_cast<std::uint8_t*>(to) + column);
    }
  }
}

float Scale(float amax, DType to_dtype) { return simd::ScaleOfAmax(amax, to_dtype == DType::kI8 ? 127.0f : 448.0f); }

}  // namespace HWY_NAMESPACE
}  // namespace sluice::quantize
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {
namespace quantize {
namespace {

HWY_EXPORT(RaiseAmax);
HWY_EXPORT(EncodeRow);
HWY_EXPORT(Scale);

constexpr std::int64_t kElementsPerRange = 65536;  // per hand-out of work where rows are on their own

// Only rows known to hold one are looked through element by element.
void find_nonfinite(const TensorView& w, std::int64_t row, NonFinite& found) {
  for (std::int64_t k = 0; k < w.shape[1]; ++k) {
    float value = 0.0f;
    if (w.dtype == DType::kBF16) {
      std::uint16_t half = 0;
      std::memcpy(&half, w.row(row) + k * 2, sizeof(half));
      value = std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
    } else {
      std::memcpy(&value, w.row(row) + k * 4, sizeof(value));
    }
    if (std::isfinite(value)) continue;
    if (found.count++ == 0) {
      found.row = row;
      found.col = k;
    }
  }
}

void merge(const NonFinite& part, NonFinite& whole) {
  if (part.count == 0) return;
  whole.count += part.count;
  if (whole.row < 0 || part.row < whole.row) {
    whole.row = part.row;
    whole.col = part.col;
  }
}

Status check(WeightFormat format, const TensorView& w, const TensorView& q, const TensorView& scale) {
  AxisBinder binder("quantize_weight");
  SLUICE_TRY(binder.bind({"w", {DType::kBF16, DType::kF32}, {Axis::kN, Axis::kK}}, w, Phase::kRun));
  SLUICE_TRY(binder.bind({"q", weight_dtype(format), {Axis::kN, Axis::kK}}, q, Phase::kRun));
  if (format != WeightFormat::kFp8Block)
    return binder.bind({"scale", DType::kF32, {Axis::kN, Axis::kOne}}, scale, Phase::kRun);
  binder.set(Axis::kNb, ceil_div(w.shape[0], kScaleBlock), "ceil(N/128)");
  binder.set(Axis::kKb, ceil_div(w.shape[1], kScaleBlock), "ceil(K/128)");
  return binder.bind({"scale", DType::kF32, {Axis::kNb, Axis::kKb}}, scale, Phase::kRun);
}

}  // namespace
}  // namespace quantize

std::string_view to_string(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp8Block: return "fp8-block";
    case WeightFormat::kFp8Channel: return "fp8-channel";
    case WeightFormat::kInt8Channel: return "int8-channel";
  }
  return "unknown weight format";
}

Result<WeightFormat> parse_weight_format(std::string_view text) {
  for (WeightFormat format : kAllWeightFormats) {
    if (text == to_string(format)) return format;
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("weight format '{}' is none of fp8-block, fp8-channel, int8-channel", text));
}

DType weight_dtype(WeightFormat format) { return format == WeightFormat::kInt8Channel ? DType::kI8 : DType::kE4M3; }

std::array<std::int64_t, 2> scale_shape(WeightFormat format, std::int64_t rows, std::int64_t cols) {
  if (format == WeightFormat::kFp8Block) return {ceil_div(rows, kScaleBlock), ceil_div(cols, kScaleBlock)};
  return {rows, 1};
}

Result<NonFinite> quantize_weight(WeightFormat format, const TensorView& w, const TensorView& q,
                                  const TensorView& scale, int num_threads) {
  using namespace quantize;  // NOLINT: the function's own helpers
  SLUICE_TRY(check(format, w, q, scale));
  const std::int64_t rows = w.shape[0], cols = w.shape[1], blocks = ceil_div(cols, kScaleBlock);
  const DType to = weight_dtype(format);
  const bool per_block = format == WeightFormat::kFp8Block;
  const auto raise_amax = HWY_DYNAMIC_DISPATCH(RaiseAmax);
  const auto encode_row = HWY_DYNAMIC_DISPATCH(EncodeRow);
  const auto scale_of = HWY_DYNAMIC_DISPATCH(Scale);
  const std::int64_t grain =
      per_block ? kScaleBlock : std::max<std::int64_t>(kElementsPerRange / std::max<std::int64_t>(cols, 1), 1);
  const int threads = num_threads > 0 ? num_threads : Machine::detect_cpu().num_threads;

  NonFinite found;
  std::mutex mutex;
  cpu::parallel_ranges(rows, grain, threads, [&](std::int64_t begin, std::int64_t end, int) {
    std::vector<float> amax(static_cast<std::size_t>(blocks));
    NonFinite part;
    if (per_block) {
      for (std::int64_t n = begin; n < end; ++n) {
        if (!raise_amax(w.dtype, w.row(n), cols, amax.data())) find_nonfinite(w, n, part);
      }
      auto* const block_scale = reinterpret_cast<float*>(scale.row(begin / kScaleBlock));
      for (std::int64_t b = 0; b < blocks; ++b) block_scale[b] = scale_of(amax[static_cast<std::size_t>(b)], to);
      for (std::int64_t n = begin; n < end; ++n) encode_row(w.dtype, w.row(n), cols, block_scale, 1, to, q.row(n));
    } else {
      for (std::int64_t n = begin; n < end; ++n) {
        std::fill(amax.begin(), amax.end(), 0.0f);
        if (!raise_amax(w.dtype, w.row(n), cols, amax.data())) find_nonfinite(w, n, part);
        auto* const row_scale = reinterpret_cast<float*>(scale.row(n));
        *row_scale = scale_of(amax.empty() ? 0.0f : *std::max_element(amax.begin(), amax.end()), to);
        encode_row(w.dtype, w.row(n), cols, row_scale, 0, to, q.row(n));
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    merge(part, found);
  });
  return found;
}

}  // namespace sluice
#endif  // HWY_ONCE
