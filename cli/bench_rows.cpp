#include "bench_rows.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace sluice::cli {

double quantile(const std::vector<double>& sorted, double q) {
  const double place = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(place);
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (place - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

void add_run(BenchRow& row, double seconds, const Cost& cost) {
  const double n = static_cast<double>(row.seconds.size());
  row.seconds.push_back(seconds);
  const double bytes = (row.cost.bytes * n + cost.bytes) / (n + 1), flops = (row.cost.flops * n + cost.flops) / (n + 1);
  row.cost = cost;
  row.cost.bytes = bytes;
  row.cost.flops = flops;
}

void finish(BenchRow& row, const Ceilings& ceilings) {
  std::vector<double> sorted = row.seconds;
  std::sort(sorted.begin(), sorted.end());
  row.median = quantile(sorted, 0.5);
  row.p10 = quantile(sorted, 0.1);
  row.p90 = quantile(sorted, 0.9);
  const double stream = row.cost.bytes / ceilings.bytes_per_s, fma = row.cost.flops / ceilings.flops_per_s;
  row.floor = std::max(stream, fma);
  row.ceiling = stream >= fma ? "stream" : "fma";
  row.share = row.floor / row.median;
  row.stream_share = stream / row.median;
  row.fma_share = fma / row.median;
}

Json to_json(const BenchRow& row) {
  Json json = {{"row", row.kind},
               {"name", row.name},
               {"impl", row.impl},
               {"precision", row.precision},
               {"tokens", row.tokens},
               {"route", row.route},
               {"routed_rows", row.routed_rows},
               {"active_experts", row.active_experts},
               {"local_experts", row.local_experts},
               {"weight_bytes", row.weight_bytes},
               {"touched_bytes", row.touched_bytes},
               {"in_cache", row.in_cache},
               {"runs", row.seconds.size()},
               {"median_us", row.median * 1e6},
               {"p10_us", row.p10 * 1e6},
               {"p90_us", row.p90 * 1e6},
               {"bytes", row.cost.bytes},
               {"bytes_formula", row.cost.bytes_formula},
               {"flops", row.cost.flops},
               {"flops_formula", row.cost.flops_formula},
               {"bytes_per_s", row.cost.bytes / row.median},
               {"flops_per_s", row.cost.flops / row.median},
               {"floor_us", row.floor * 1e6},
               {"ceiling", row.ceiling},
               {"share", row.share},
               {"stream_share", row.stream_share},
               {"fma_share", row.fma_share}};
  if (row.kind == "layer") json["tokens_per_s"] = static_cast<double>(row.tokens) / row.median;
  return json;
}

namespace {

// 33.6 MFLOP: the unit follows the size, the digits do not.
std::string format_flops(double flops) {
  std::string text = format_bytes(static_cast<std::int64_t>(flops));
  text.pop_back();
  return text + "FLOP";
}

void print_line(const std::vector<std::string>& cells) {
  // Right-aligned where positive. Widths are fixed, as later rows are not known yet; a longer cell pushes its line.
  static constexpr int kWidth[] = {5, 6, 4, -16, -12, 9, 9, 9, 4, 8, 7, 11, 8, 6, -6};
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const int width = i < std::size(kWidth) ? kWidth[i] : -1;
    line += (i == 0 ? "" : "  ") +
            (width > 0 ? fmt::format("{:>{}}", cells[i], width) : fmt::format("{:<{}}", cells[i], -width));
  }
  line.erase(line.find_last_not_of(' ') + 1);
  fmt::print("{}\n", line);
}

}  // namespace

void print_header() {
  print_line({"T", "R", "A", "ROW", "IMPL", "MEDIAN", "P10", "P90", "RUNS", "BYTES", "GB/S", "WORK", "GFLOP/S", "SHARE",
              "OF"});
  std::fflush(stdout);
}

void print_rows(const std::vector<BenchRow>& rows, bool stages) {
  for (const BenchRow& row : rows) {
    if (row.kind == "stage" && !stages) continue;
    print_line({fmt::format("{}", row.tokens), fmt::format("{}", row.routed_rows),
                fmt::format("{}", row.active_experts), row.kind == "expert GEMMs" ? row.kind : row.name, row.impl,
                format_seconds(row.median), format_seconds(row.p10), format_seconds(row.p90),
                fmt::format("{}", row.seconds.size()), format_bytes(static_cast<std::int64_t>(row.cost.bytes)),
                fmt::format("{:.1f}", row.cost.bytes / row.median / 1e9), format_flops(row.cost.flops),
                fmt::format("{:.1f}", row.cost.flops / row.median / 1e9), fmt::format("{:.0f} %", 100 * row.share),
                row.ceiling, row.in_cache ? "in cache" : ""});
  }
  std::fflush(stdout);
}

void print_formulas(const std::vector<BenchRow>& rows, std::string_view precision, bool stages) {
  // The formulas are the same for every T of a precision.
  std::vector<std::string> said;
  for (const BenchRow& row : rows) {
    if (row.precision != precision || (row.kind == "stage" && !stages)) continue;
    const std::string name = row.kind == "expert GEMMs" ? row.kind : row.name;
    if (std::find(said.begin(), said.end(), name) != said.end()) continue;
    said.push_back(name);
    fmt::print("  {}: bytes {}{}\n", name, row.cost.bytes_formula,
               row.cost.flops_formula.empty() ? "" : "; FLOPs " + row.cost.flops_formula);
  }
}

std::vector<Goal> judge(const std::vector<BenchRow>& rows) {
  std::vector<Goal> goals;
  const auto add = [&](std::string text, double value, double at_least, bool in_cache) {
    goals.push_back({std::move(text), value, at_least, value >= at_least, in_cache});
  };
  for (const BenchRow& row : rows) {
    if (row.kind != "expert GEMMs") continue;
    if (row.tokens == 1 && (row.precision == "w8a8" || row.precision == "w8a16")) {
      add(fmt::format("{} T=1: expert GEMMs, share of the stream bandwidth", row.precision), row.stream_share, 0.5,
          row.in_cache);
    }
    if (row.tokens == 512 && (row.precision == "bf16" || row.precision == "f32")) {
      add(fmt::format("{} T=512: expert GEMMs, share of the FMA peak", row.precision), row.fma_share, 0.5,
          row.in_cache);
    }
  }
  for (const BenchRow& a : rows) {
    for (const BenchRow& b : rows) {
      if (a.kind == "layer" && b.kind == "layer" && a.tokens == b.tokens && a.tokens >= 512 && a.precision == "w8a8" &&
          b.precision == "bf16") {
        add(fmt::format("T={}: layer in w8a8 against bf16, speed ratio", a.tokens), b.median / a.median, 1.0,
            a.in_cache || b.in_cache);
      }
    }
  }
  return goals;
}

DType bench_dtype(Precision precision) {
  return precision == Precision::kW8A8 || precision == Precision::kW8A16 ? DType::kE4M3 : DType::kBF16;
}

std::int64_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  std::int64_t kib = 0;
  while (meminfo >> key >> kib) {
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE) / 2;
}

std::int64_t cache_bytes() {
  std::int64_t bytes = 0;
  for (int name : {_SC_LEVEL4_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE, _SC_LEVEL2_CACHE_SIZE}) {
    bytes = std::max<std::int64_t>(bytes, sysconf(name));
  }
  return bytes;
}

}  // namespace sluice::cli
