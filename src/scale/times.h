// Times of single steps of the model.
#pragma once

#include "sluice/scale.h"

namespace sluice::scale {

double us_of_bytes(double bytes, double gb_per_s);

struct GemmWork {
  Precision precision = Precision::kW8A8;
  bool row_scales = false;
  double rows = 0, active = 0;  // R, and the experts they belong to
  double n = 0, k = 0;
};
struct GemmTime {
  double us = 0;
  std::string_view limit;
};
GemmTime gemm_time(const Hardware& hardware, const GemmWork& work);

}  // namespace sluice::scale
