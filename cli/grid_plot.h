// Pictures of a grid, drawn by gnuplot.
#pragma once

#include <string>
#include <vector>

#include "bench_grid.h"

namespace sluice::cli {

// Into the folder: roofline.svg, FLOP/s of every row and stage against FLOPs per byte under the two ceilings, and
// SHAPE.svg for every shape, a bar for floor, ours and each peer at each T. Returns the files' names; rows that were not
// run are left out, and shapes without any.
Result<std::vector<std::string>> plot_grid(const GridReport& report, const std::string& folder);

}  // namespace sluice::cli
