// Weights to the formats the layer computes with: one matrix [N,K] (N outputs, K inputs) at a time, on all cores.
// The rule and its rounding are docs/numerics.md's: scale = max(amax, 1e-10) / top over the finite magnitudes of what
// shares it, q = round(w / scale), both divisions IEEE; real = q * scale.
#pragma once

#include "sluice/core.h"

namespace sluice {

//   kFp8Block    e4m3, top 448, a scale per 128 x 128:  q[N,K], scale[ceil(N/128),ceil(K/128)]
//   kFp8Channel  e4m3, top 448, a scale per output row: q[N,K], scale[N,1]
//   kInt8Channel int8 in [-127,127], nearest even:      q[N,K], scale[N,1]
enum class WeightFormat : std::uint8_t { kFp8Block, kFp8Channel, kInt8Channel };
inline constexpr WeightFormat kAllWeightFormats[] = {WeightFormat::kFp8Block, WeightFormat::kFp8Channel,
                                                     WeightFormat::kInt8Channel};
std::string_view to_string(WeightFormat format);  // "fp8-block", "fp8-channel", "int8-channel"
Result<WeightFormat> parse_weight_format(std::string_view text);
DType weight_dtype(WeightFormat format);  // of q
std::array<std::int64_t, 2> scale_shape(WeightFormat format, std::int64_t rows, std::int64_t cols);

// Elements that are NaN or infinite, which no scale can stand for: infinities become the largest magnitude of the
// format, NaN stays NaN in e4m3 and becomes 0 in int8. Callers that cannot have that refuse on count > 0.
struct NonFinite {
  std::int64_t count = 0;
  std::int64_t row = -1, col = -1;  // the first of them, row by row
};

// Fills q and scale from w [N,K] bf16 or f32 (rows may be strided). The result does not depend on num_threads; 0 means
// every usable core.
Result<NonFinite> quantize_weight(WeightFormat format, const TensorView& w, const TensorView& q,
                                  const TensorView& scale, int num_threads = 0);

inline Result<NonFinite> quantize_fp8_block(const TensorView& w, const TensorView& q, const TensorView& scale,
                                            int num_threads = 0) {
  return quantize_weight(WeightFormat::kFp8Block, w, q, scale, num_threads);
}
inline Result<NonFinite> quantize_fp8_channel(const TensorView& w, const TensorView& q, const TensorView& scale,
                                              int num_threads = 0) {
  return quantize_weight(WeightFormat::kFp8Channel, w, q, scale, num_threads);
}
inline Result<NonFinite> quantize_int8_channel(const TensorView& w, const TensorView& q, const TensorView& scale,
                                               int num_threads = 0) {
  return quantize_weight(WeightFormat::kInt8Channel, w, q, scale, num_threads);
}

}  // namespace sluice
