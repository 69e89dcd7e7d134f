#include <algorithm>
#include <cmath>

#include "scale/times.h"

namespace sluice::scale {

double us_of_bytes(double bytes, double gb_per_s) { return bytes / (gb_per_s * 1e3); }

namespace {

double share_at(const GemmRates& rates, double rows_per_expert) {
  const std::vector<double>& x = rates.rows_per_expert;
  const std::vector<double>& y = rates.share_of_peak;
  const auto above = std::upper_bound(x.begin(), x.end(), rows_per_expert);
  if (above == x.begin()) return y.front();
  if (above == x.end()) return y.back();
  const auto i = static_cast<std::size_t>(above - x.begin());
  const double t = std::log(rows_per_expert / x[i - 1]) / std::log(x[i] / x[i - 1]);
  return y[i - 1] + t * (y[i] - y[i - 1]);
}

}  // namespace

GemmTime gemm_time(const Hardware& hardware, const GemmWork& work) {
  if (work.rows <= 0 || work.active <= 0) return {0, "-"};
  const bool one_byte = work.precision == Precision::kW8A8;
  const GemmRates& rates = one_byte ? hardware.fp8 : hardware.bf16;
  const double element = one_byte ? 1 : 2, out = work.rows * work.n * 2;
  double bytes = work.active * work.n * work.k * element + work.rows * work.k * element + out;
  if (one_byte) {
    const double blocks = std::ceil(work.k / kScaleBlock);
    bytes += work.row_scales ? (work.active * work.n + work.rows) * 4
                             : (work.active * std::ceil(work.n / kScaleBlock) * blocks + work.rows * blocks) * 4;
  }
  const double memory = us_of_bytes(bytes, hardware.hbm_gb_per_s * rates.stream_share);
  const double flops = 2 * work.rows * work.n * work.k * (1 + rates.depth_k / work.k);
  const double compute = flops / (rates.peak_tflops * 1e6 * share_at(rates, work.rows / work.active)) +
                         rates.output_share * us_of_bytes(out, hardware.hbm_gb_per_s);
  const double both = std::pow(std::pow(memory, 4) + std::pow(compute, 4), 0.25);
  const std::string_view limit = rates.fixed_us > both ? "latency" : memory > compute ? "HBM" : "tensor cores";
  return {rates.fixed_us + both, limit};
}

double grouped_gemm_us(const Hardware& hardware, Precision precision, bool row_scales, double rows, double active,
                       double n, double k) {
  return gemm_time(hardware, {precision, row_scales, rows, active, n, k}).us;
}

}  // namespace sluice::scale
