// What `sluice bench --grid` prints: tables for people, lines in the form of scripts/gpu-check's records for programs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench_grid.h"

namespace sluice::cli {

namespace {

constexpr const char* kAnotherRun = "*";
constexpr const char* kUnchecked = "?";

std::string microseconds(double us) { return us < 99.95 ? fmt::format("{:.1f}", us) : fmt::format("{:.0f}", us); }
std::string percent(double share) { return fmt::format("{:.0f} %", 100 * share); }

// A column of peers' figures: one peer of one file.
struct PeerColumn {
  std::string peer;
  std::size_t source = 0;
};

std::vector<PeerColumn> columns_of(const GridReport& report, Covers covers) {
  std::vector<PeerColumn> columns;
  for (const GridResult& result : report.results) {
    for (const GridRival& rival : result.rivals) {
      const PeerFigure& f = rival.figure;
      const auto same = [&](const PeerColumn& c) { return c.peer == f.peer && c.source == f.source; };
      if (f.covers == covers && std::none_of(columns.begin(), columns.end(), same))
        columns.push_back({f.peer, f.source});
    }
  }
  return columns;
}

std::string cell_of(const GridReport& report, const GridResult& result, const PeerColumn& column, Covers covers) {
  for (const GridRival& rival : result.rivals) {
    const PeerFigure& f = rival.figure;
    if (f.covers != covers || f.peer != column.peer || f.source != column.source) continue;
    return microseconds(f.us) + (f.checked ? "" : kUnchecked) +
           (report.sources[f.source].another_run ? kAnotherRun : "");
  }
  return "";
}

std::string note_of(const GridResult& result) {
  if (result.failed) return "FAILED: " + result.not_run;
  if (!result.not_run.empty()) return "not run: " + result.not_run;
  return result.layer.in_cache ? "in cache" : "";
}

double ours(const GridResult& result, Covers covers) {
  return 1e6 * (covers == Covers::kLayer ? result.layer.median : result.gemms);
}
double floor_of(const GridResult& result, Covers covers) {
  return 1e6 * (covers == Covers::kLayer ? result.layer.floor : result.gemms_floor);
}

std::vector<std::string> row_start(const GridResult& result) {
  return {result.what.shape, fmt::format("{}", result.what.row.tokens), fmt::format("{}", result.routed_rows)};
}

// Ours and the peers' for the whole layer, or for the two GEMMs.
void print_comparison(const GridReport& report, Covers covers) {
  const std::vector<PeerColumn> peers = columns_of(report, covers);
  const auto best_of = [&](const GridResult& result) { return result.not_run.empty() ? result.best(covers) : nullptr; };
  const bool has_ratios = std::any_of(report.results.begin(), report.results.end(),
                                      [&](const GridResult& result) { return best_of(result) != nullptr; });
  const bool is_layer = covers == Covers::kLayer;
  std::vector<Table::Column> titles = {{"SHAPE"},       {"T", true},    {"ROWS", true},
                                       {"FLOOR", true}, {"OURS", true}, {"SHARE", true}};
  if (is_layer) titles.push_back({"OF"});
  for (const PeerColumn& peer : peers) titles.push_back({fmt::format("{} [{}]", peer.peer, peer.source + 1), true});
  if (has_ratios) titles.push_back({"AGAINST BEST"});
  titles.push_back({"NOTE"});
  Table table(titles);
  double log_ratios = 0;
  int num_ratios = 0;
  for (const GridResult& result : report.results) {
    std::vector<std::string> cells = row_start(result);
    if (result.not_run.empty()) {
      const double us = ours(result, covers), floor = floor_of(result, covers);
      cells.insert(cells.end(), {microseconds(floor), microseconds(us), percent(floor / us)});
    } else {
      cells.insert(cells.end(), 3, "");
    }
    if (is_layer) cells.push_back(result.layer.ceiling);
    for (const PeerColumn& peer : peers) cells.push_back(cell_of(report, result, peer, covers));
    if (has_ratios) {
      const PeerFigure* best = best_of(result);
      const double ratio = best == nullptr ? 0 : best->us / ours(result, covers);
      cells.push_back(best == nullptr ? "" : fmt::format("{:.2f}x {}", ratio, best->peer));
      if (best != nullptr) log_ratios += std::log(ratio), ++num_ratios;
    }
    cells.push_back(note_of(result));
    table.add(std::move(cells));
  }
  table.print();
  if (num_ratios > 0)
    fmt::print("geometric mean against the best peer of each row, {} rows: {:.2f}x\n", num_ratios,
               std::exp(log_ratios / num_ratios));
}

void print_stages(const GridReport& report) {
  std::vector<Table::Column> titles = {{"SHAPE"}, {"T", true}, {"ROWS", true}};
  std::vector<std::string> names;
  for (const GridResult& result : report.results) {
    for (const BenchRow& stage : result.stages) {
      if (std::find(names.begin(), names.end(), stage.name) == names.end()) names.push_back(stage.name);
    }
  }
  for (const std::string& name : names) titles.push_back({name, true});
  Table table(titles);
  for (const GridResult& result : report.results) {
    if (!result.not_run.empty()) continue;
    std::vector<std::string> cells = row_start(result);
    for (const std::string& name : names) {
      const auto stage = std::find_if(result.stages.begin(), result.stages.end(),
                                      [&](const BenchRow& row) { return row.name == name; });
      cells.push_back(stage == result.stages.end()
                          ? ""
                          : fmt::format("{} {:>5}", microseconds(1e6 * stage->median), percent(stage->share)));
    }
    table.add(std::move(cells));
  }
  if (!table.is_empty()) table.print();
}

std::string origin(const PeerSource& source) {
  return fmt::format("{}{}, {}{}{}",
                     source.commit.empty() ? "" : fmt::format("commit {}, ", source.commit.substr(0, 12)), source.date,
                     source.device, source.another_run ? ", another run" : "",
                     source.another_device ? " on another device: no ratios" : "");
}

// What gpu_check.py collects: "bench", "what", "impl", the row, and the figure.
Json line_of(const GridResult& result, const char* bench, std::string_view what) {
  return {{"bench", bench},
          {"what", what},
          {"impl", "sluice"},
          {"shape", result.what.shape},
          {"tokens", result.what.row.tokens},
          {"rows", result.routed_rows}};
}

Json line_of(const GridResult& result, const char* bench, const BenchRow& row) {
  Json line = line_of(result, bench, row.name);
  line["impl"] = row.impl;
  const auto [least, most] = std::minmax_element(row.seconds.begin(), row.seconds.end());
  line.update({{"us", 1e6 * row.median},
               {"min_us", 1e6 * *least},
               {"max_us", 1e6 * *most},
               {"runs", row.seconds.size()},
               {"floor_us", 1e6 * row.floor},
               {"share_of_floor", row.share},
               {"ceiling", row.ceiling},
               {"bytes", row.cost.bytes},
               {"flops", row.cost.flops},
               {"active_experts", row.active_experts},
               {"in_cache", row.in_cache}});
  return line;
}

void print_peers_line(const GridReport& report, const GridResult& result, Covers covers) {
  Json figures = Json::array();
  for (const GridRival& rival : result.rivals) {
    const PeerFigure& f = rival.figure;
    if (f.covers != covers) continue;
    figures.push_back({{"peer", f.peer},
                       {"us", f.us},
                       {"checked", f.checked},
                       {"another_run", report.sources[f.source].another_run},
                       {"file", report.sources[f.source].file}});
  }
  if (figures.empty()) return;
  Json line = line_of(result, "peers", covers == Covers::kLayer ? "layer" : "gemms");
  line["figures"] = std::move(figures);
  if (const PeerFigure* best = result.best(covers); best != nullptr && result.not_run.empty()) {
    line["best_peer"] = best->peer;
    line["ratio"] = best->us / ours(result, covers);
  }
  print_json(line, true);
}

}  // namespace

void print_grid(const GridReport& report) {
  if (report.is_gpu) {
    fmt::print("floors are of {:.1f} TB/s, {:.2f} PFLOP/s in e4m3 and {:.2f} in bf16, as measured on an H200\n",
               report.bytes_per_s / 1e12, report.flops_per_s / 1e15, report.bf16_flops_per_s / 1e15);
  } else if (report.bytes_per_s > 0) {
    fmt::print("floors are of this run's stream {:.1f} GB/s and f32 FMA {:.1f} GFLOP/s; last-level cache {}\n",
               report.bytes_per_s / 1e9, report.flops_per_s / 1e9,
               cache_bytes() > 0 ? format_bytes(cache_bytes()) : "unknown");
  }
  fmt::print("\nwhole layer, from x to out, gate and sort included; microseconds\n");
  print_comparison(report, Covers::kLayer);
  fmt::print("\nthe experts' two GEMMs alone, up + down; microseconds\n");
  print_comparison(report, Covers::kGemms);
  const auto ran = [](const GridResult& result) { return result.not_run.empty(); };
  if (std::any_of(report.results.begin(), report.results.end(), ran)) {
    fmt::print("\nstages alone; microseconds, share of the floor\n");
    print_stages(report);
  }
  if (!report.sources.empty()) fmt::print("\n");
  bool starred = false, unchecked = false;
  for (std::size_t i = 0; i < report.sources.size(); ++i) {
    fmt::print("[{}] {}: {}\n", i + 1, report.sources[i].file, origin(report.sources[i]));
    starred = starred || report.sources[i].another_run;
  }
  for (const GridResult& result : report.results) {
    for (const GridRival& rival : result.rivals) unchecked = unchecked || !rival.figure.checked;
  }
  if (starred) fmt::print("{} measured in another run than ours\n", kAnotherRun);
  if (unchecked) fmt::print("{} not checked against a reference, never the best\n", kUnchecked);
}

void print_grid_json(const GridReport& report) {
  Json line = {{"bench", "grid"},
               {"what", "device"},
               {"impl", "sluice"},
               {"device", report.device},
               {"stream_bytes_per_s", report.bytes_per_s},
               {"flops_per_s", report.flops_per_s},
               {"bf16_flops_per_s", report.bf16_flops_per_s}};
  line["peers"] = Json::array();
  for (const PeerSource& source : report.sources) {
    line["peers"].push_back({{"file", source.file},
                             {"date", source.date},
                             {"device", source.device},
                             {"commit", source.commit.empty() ? Json() : Json(source.commit)},
                             {"another_run", source.another_run},
                             {"another_device", source.another_device}});
  }
  print_json(line, true);
}

void print_grid_json(const GridReport& report, const GridResult& result) {
  if (!result.not_run.empty()) {
    Json line = line_of(result, "layer", "layer");
    line["error"] = (result.failed ? "failed: " : "not run: ") + result.not_run;
    line["needed_bytes"] = result.needed_bytes;
    line["had_bytes"] = result.had_bytes;
    print_json(line, true);
  } else {
    for (const BenchRow& stage : result.stages) print_json(line_of(result, "stage", stage), true);
    Json gemms = line_of(result, "gemms", "up + down");
    gemms.update({{"us", 1e6 * result.gemms},
                  {"floor_us", 1e6 * result.gemms_floor},
                  {"share_of_floor", result.gemms_floor / result.gemms}});
    print_json(gemms, true);
    print_json(line_of(result, "layer", result.layer), true);
  }
  print_peers_line(report, result, Covers::kLayer);
  print_peers_line(report, result, Covers::kGemms);
}

}  // namespace sluice::cli
