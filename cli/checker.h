// Holds every implementation of every step of a pipeline against the reference, row by row.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "output.h"
#include "pipeline.h"

namespace sluice::cli {

// One line of the verdict. Errors are relative L2 of a row, |got - want| / |want|; `of_bound` is the largest
// share of its bound that any element (or row) uses, and the line passes while it stays within 1.
struct Finding {
  std::string step;       // "up: grouped_gemm"
  std::string impl;       // who was checked
  std::string against;    // the reference it was held to
  std::string rule;       // "bitwise", "derived bound" or "budget"
  std::int64_t rows = 0;  // compared
  std::int64_t of_rows = 0;
  double error = 0;     // worst row
  double bound = 0;     // of that row; 0: bitwise
  double of_bound = 0;  // worst
  bool passed = true;
  std::string detail;   // where and what, when it failed
  std::string skipped;  // why it was not run; then nothing else counts
};

Json to_json(const Finding& finding);

// Multiplications spent on the double-precision reference of one GEMM; rows are sampled to stay within it.
inline constexpr double kReferenceProducts = 6e7;

enum class Scope { kAll, kChosenOnly };

// Runs the steps in order, each with every implementation (or the chosen one) on the same inputs; leaves the chosen
// one's outputs in place. `progress` is called with steps done and in all.
Result<std::vector<Finding>> check_steps(Pipeline& pipeline, Scope scope, double reference_products,
                                         const std::function<void(std::int64_t, std::int64_t)>& progress);

// Bytes of two views of the same shape, with the place of the first difference.
Finding compare_bytes(const std::string& name, const TensorView& got, const TensorView& want);

// Distinct ascending indices below `count`, evenly spread, the first and the last among them.
std::vector<std::int64_t> sample(std::int64_t count, std::int64_t wanted);

}  // namespace sluice::cli
