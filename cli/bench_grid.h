// `sluice bench --grid`: the rows of bench/grid.h run live, beside the figures of peers.
#pragma once

#include <string>
#include <vector>

#include "bench/grid.h"
#include "bench_rows.h"
#include "grid_peers.h"
#include "options.h"

namespace sluice::cli {

struct GridOptions {
  std::string rows;    // SHAPE or SHAPE:T, comma-separated; "": all
  std::string tokens;  // instead of the grid's batch sizes; "": those
  std::int64_t experts = 0;
  std::vector<std::string> peers;  // files
  std::string plot;                // folder; "": no pictures
  double seconds = 1;
  double memory_gb = 0;
  std::uint64_t seed = 1;
  MachineOptions machine;
};

// One row of the grid as it is to be run.
struct GridCase {
  std::string shape;  // with --experts 16 "qwen3-30b-e16"
  bench::GridRow row;
  std::string name() const;  // "qwen3-30b:32"
};

// A figure of a peer beside ours, and whether a ratio may be made of the two.
struct GridRival {
  PeerFigure figure;
  bool comparable = false;  // checked, and of this device
};

struct GridResult {
  GridCase what;
  std::int64_t routed_rows = 0;
  std::string not_run;  // why; "": it ran
  bool failed = false;  // not for lack of memory
  double needed_bytes = 0, had_bytes = 0;
  std::vector<BenchRow> stages;
  BenchRow layer;
  double gemms = 0, gemms_floor = 0;  // seconds of up and down, each against its own floor
  std::vector<GridRival> rivals;

  // The fastest of the comparable figures; null where there is none.
  const PeerFigure* best(Covers covers) const;
};

// Everything a table, a line of JSON or a picture is made of.
struct GridReport {
  std::string device;  // "NVIDIA H200" or "CPU, 2 threads, AVX3"
  bool is_gpu = false;
  double bytes_per_s = 0, flops_per_s = 0, bf16_flops_per_s = 0;  // on a CPU the last two are the same
  std::vector<PeerSource> sources;
  std::vector<GridResult> results;
};

Outcome bench_grid(const GridOptions& options, bool json);

void print_grid(const GridReport& report);
// One line a figure, in the form of the records of scripts/gpu-check.
void print_grid_json(const GridReport& report, const GridResult& result);
// The device, the ceilings and the files of peers.
void print_grid_json(const GridReport& report);

}  // namespace sluice::cli
