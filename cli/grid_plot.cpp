#include "grid_plot.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "gnuplot.h"

namespace sluice::cli {

namespace {

// Told apart by people who see no red or no green, and on paper by their order.
constexpr const char* kColours[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6F4E37"};
constexpr int kLegendPixels = 370;
constexpr const char* kGrey = "#8A8A8A";
constexpr const char* kOursLayer = "#0B4F8A";
constexpr const char* kOursGemms = "#7FB7E6";
constexpr const char* kPeerColours[] = {"#D55E00", "#E69F00", "#009E73", "#CC79A7", "#6F4E37", "#8E6BBF", "#B8B800"};

// The frame of a picture: its title at the left, the legend in a column of its own at the right, where no text of it can
// meet the plot. gnuplot's own layout guesses widths, and leaves the plot too little.
std::string start(int width, int height, int left, const std::string& title) {
  return fmt::format(
      "set terminal svg size {0},{1} dynamic font 'Helvetica,Arial,sans-serif,13' noenhanced background rgb 'white'\n"
      "set encoding utf8\n"
      "set label 1 {2} at screen {3:.5f},0.955 left font ',16'\n"
      "set lmargin at screen {4:.5f}\nset rmargin at screen {5:.5f}\nset tmargin at screen 0.9\n"
      "set key at graph 1, graph 1 left top vertical reverse Left samplen 1.6 spacing 1.3 noautotitle\n"
      "set border 3 lc rgb '#404040'\n"
      "set tics nomirror out\n",
      width, height, gnuplot_string(title), 20.0 / width, static_cast<double>(left) / width,
      1 - static_cast<double>(kLegendPixels) / width);
}

// The results that ran, shape by shape in the order of the grid.
struct Shape {
  std::string name;
  std::vector<const GridResult*> results;
};
std::vector<Shape> shapes_of(const GridReport& report) {
  std::vector<Shape> shapes;
  for (const GridResult& result : report.results) {
    if (!result.not_run.empty()) continue;
    if (shapes.empty() || shapes.back().name != result.what.shape) shapes.push_back({result.what.shape, {}});
    shapes.back().results.push_back(&result);
  }
  return shapes;
}

// ---------------------------------------------------------------------------------------------------------
// Roofline
// ---------------------------------------------------------------------------------------------------------

struct Marker {
  std::string stage;
  int point = 0;  // gnuplot's number
  double size = 1;
};

struct Range {
  double low = HUGE_VAL, high = 0;
  void add(double v) { low = std::min(low, v), high = std::max(high, v); }
};

std::optional<std::pair<double, double>> place_of(const BenchRow& row) {
  if (!(row.cost.flops > 0)) return std::nullopt;  // moves bytes alone: no place on this chart
  return std::pair{row.cost.flops / row.cost.bytes, row.cost.flops / row.median};
}

const BenchRow* find_row(const GridResult& result, const std::string& stage) {
  if (stage == "layer") return &result.layer;
  const auto found =
      std::find_if(result.stages.begin(), result.stages.end(), [&](const BenchRow& row) { return row.name == stage; });
  return found == result.stages.end() ? nullptr : &*found;
}

// 1.49e15, "FLOP/s" -> "1.49 PFLOP/s"
std::string with_prefix(double value, const char* unit) {
  std::size_t i = 0;
  static constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P"};
  for (; value >= 999.5 && i + 1 < std::size(kPrefixes); ++i) value /= 1000;
  return fmt::format("{:.3g} {}{}", value, kPrefixes[i], unit);
}

std::string roofline(const GridReport& report, const std::vector<Shape>& shapes) {
  static const Marker kMarkers[] = {
      {"layer", 7, 0.9}, {"up", 9, 0.7}, {"down", 11, 0.7}, {"gate.logits", 12, 0.8}, {"combine", 4, 0.6}};
  std::string script = start(1210, 700, 155, fmt::format("Roofline of the grid: {}", report.device));
  std::vector<std::string> plots;
  Range x, y;
  bool bf16 = false, e4m3 = false;
  for (std::size_t s = 0; s < shapes.size(); ++s) {
    const char* colour = kColours[s % std::size(kColours)];
    for (const Marker& marker : kMarkers) {
      const bool is_layer = marker.stage == "layer";
      std::string data;
      for (const GridResult* result : shapes[s].results) {
        (result->what.row.bf16 ? bf16 : e4m3) = true;
        const BenchRow* row = find_row(*result, marker.stage);
        const auto place = row == nullptr ? std::nullopt : place_of(*row);
        if (!place) continue;
        x.add(place->first);
        y.add(place->second);
        data += fmt::format("{:.6g} {:.6g}\n", place->first, place->second);
      }
      if (data.empty()) continue;
      const std::string block = fmt::format("$d{}_{}", s, &marker - kMarkers);
      script += fmt::format("{} << EOD\n{}EOD\n", block, data);
      std::vector<std::int64_t> tokens;
      for (const GridResult* result : shapes[s].results) tokens.push_back(result->what.row.tokens);
      const std::string title =
          is_layer ? gnuplot_string(fmt::format("{}: T = {}", shapes[s].name, fmt::join(tokens, ", "))) : "";
      plots.push_back(fmt::format("{} using 1:2 with {} pt {} ps {} lw 0.8 lc rgb '{}' {}", block,
                                  is_layer ? "linespoints" : "points", marker.point, marker.size, colour,
                                  is_layer ? "title " + title : "notitle"));
    }
  }
  const double peak = e4m3 ? report.flops_per_s : report.bf16_flops_per_s;
  x.add(peak / report.bytes_per_s);
  y.add(peak);
  x = {x.low / 2, x.high * 2};
  y = {y.low / 2, y.high * 1.6};
  // Ceilings first, so that points lie on them. The roof of bf16 is lower on a GPU.
  std::vector<std::string> roofs;
  const auto roof = [&](double flops, const char* dash, const std::string& title) {
    roofs.push_back(
        fmt::format("(x * {:.6g} < {:.6g} ? x * {:.6g} : {:.6g}) with lines lw 2 {} lc rgb '#404040' title {}",
                    report.bytes_per_s, flops, report.bytes_per_s, flops, dash, gnuplot_string(title)));
  };
  const std::string stream = with_prefix(report.bytes_per_s, "B/s");
  if (!report.is_gpu) {
    roof(peak, "", fmt::format("{} read, {} of f32 FMA", stream, with_prefix(peak, "FLOP/s")));
  } else {
    if (e4m3)
      roof(report.flops_per_s, "",
           fmt::format("{} read, {} in e4m3", stream, with_prefix(report.flops_per_s, "FLOP/s")));
    if (bf16)
      roof(report.bf16_flops_per_s, "dt 2",
           fmt::format("{} read, {} in bf16", stream, with_prefix(report.bf16_flops_per_s, "FLOP/s")));
  }
  std::vector<std::string> entries;
  for (const Marker& marker : kMarkers) {
    const auto drawn = [&](const Shape& shape) {
      const BenchRow* row = find_row(*shape.results[0], marker.stage);
      return row != nullptr && place_of(*row).has_value();
    };
    if (std::none_of(shapes.begin(), shapes.end(), drawn)) continue;
    entries.push_back(fmt::format(
        "keyentry with points pt {} ps {} lc rgb '#404040' title {}", marker.point, marker.size,
        gnuplot_string(marker.stage == "layer" ? "whole layer, T rising along the line" : marker.stage + " alone")));
  }
  script += fmt::format(
      "set logscale xy\nset xrange [{:.6g}:{:.6g}]\nset yrange [{:.6g}:{:.6g}]\nset samples 600\n"
      "set xlabel 'FLOPs per byte that must be moved'\nset ylabel 'useful work (FLOP/s)'\n"
      "set format x '%g'\nset format y '%.0s %cFLOP/s'\n"
      "set grid xtics ytics lc rgb '#E4E4E4' lw 1 lt 1\n"
      "set bmargin at screen 0.11\n",
      x.low, x.high, y.low, y.high);
  roofs.insert(roofs.end(), entries.begin(), entries.end());
  roofs.insert(roofs.end(), plots.begin(), plots.end());
  return script + fmt::format("plot {}\n", fmt::join(roofs, ", \\\n  "));
}

// ---------------------------------------------------------------------------------------------------------
// Bars
// ---------------------------------------------------------------------------------------------------------

struct Series {
  std::string title;
  std::string colour;
  std::vector<std::optional<double>> us;  // for each T
};

// The colour of a peer is the same in every chart.
struct PeerKey {
  std::string peer;
  std::size_t source;
  Covers covers;
  bool operator==(const PeerKey&) const = default;
};

std::vector<PeerKey> peers_of(const std::vector<Shape>& shapes) {
  std::vector<PeerKey> keys;
  for (const Shape& shape : shapes) {
    for (const GridResult* result : shape.results) {
      for (const GridRival& rival : result->rivals) {
        const PeerKey key{rival.figure.peer, rival.figure.source, rival.figure.covers};
        if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
      }
    }
  }
  return keys;
}

std::vector<Series> series_of(const GridReport& report, const Shape& shape, const std::vector<PeerKey>& peers) {
  std::vector<Series> all;
  const auto add = [&](std::string title, std::string colour, const auto& of) {
    Series series{std::move(title), std::move(colour), {}};
    bool any = false;
    for (const GridResult* result : shape.results) {
      series.us.push_back(of(*result));
      any = any || series.us.back().has_value();
    }
    if (any) all.push_back(std::move(series));
  };
  using Value = std::optional<double>;
  const auto add_peers = [&](Covers covers) {
    for (std::size_t i = 0; i < peers.size(); ++i) {
      if (peers[i].covers != covers) continue;
      add(fmt::format("{}, {}{}", peers[i].peer, covers == Covers::kLayer ? "layer" : "two GEMMs",
                      report.sources[peers[i].source].another_run ? " (another run)" : ""),
          kPeerColours[i % std::size(kPeerColours)], [&](const GridResult& result) -> Value {
            for (const GridRival& rival : result.rivals) {
              if (PeerKey{rival.figure.peer, rival.figure.source, rival.figure.covers} == peers[i])
                return rival.figure.us;
            }
            return std::nullopt;
          });
    }
  };
  add("floor of the layer", kGrey, [](const GridResult& r) -> Value { return 1e6 * r.layer.floor; });
  add("Sluice, layer", kOursLayer, [](const GridResult& r) -> Value { return 1e6 * r.layer.median; });
  add_peers(Covers::kLayer);
  add("Sluice, two GEMMs", kOursGemms, [](const GridResult& r) -> Value { return 1e6 * r.gemms; });
  add_peers(Covers::kGemms);
  return all;
}

// A number at every power of ten; where there are few of those, at their double and fivefold too.
std::string log_tics(double low, double high) {
  constexpr double kFewDecades = 2.5;
  const bool is_short = std::log10(high / low) < kFewDecades;
  std::vector<std::string> tics;
  for (double decade = std::pow(10, std::floor(std::log10(low))); decade <= high; decade *= 10) {
    for (const double digit : {1, 2, 5}) {
      const double at = digit * decade;
      if (at >= low && at <= high && (digit == 1 || is_short)) tics.push_back(fmt::format("'{:.6g}' {:.6g}", at, at));
    }
  }
  return fmt::format("{}", fmt::join(tics, ", "));
}

std::string bars(const GridReport& report, const Shape& shape, const std::vector<PeerKey>& peers) {
  const bench::GridRow& row = shape.results[0]->what.row;
  const std::vector<Series> all = series_of(report, shape, peers);
  const auto count = static_cast<double>(shape.results.size());
  const double width = 0.86 / static_cast<double>(all.size());
  const int pixels =
      kLegendPixels + std::clamp(static_cast<int>(count * 21 * (static_cast<double>(all.size()) + 1)), 460, 1300);
  std::string script = start(
      pixels, 620, 115,
      fmt::format("{}: {}{} experts, H = {}, I = {}, top {}, {}; {}", shape.name,
                  row.local_experts < row.num_experts ? fmt::format("{} of ", row.local_experts) : "", row.num_experts,
                  row.hidden, row.intermediate, row.top_k, row.bf16 ? "bf16" : "e4m3", report.device));
  Range y;
  std::vector<std::string> plots;
  std::string labels;
  for (std::size_t k = 0; k < all.size(); ++k) {
    script += fmt::format("$d{} << EOD\n", k);
    for (std::size_t i = 0; i < all[k].us.size(); ++i) {
      if (!all[k].us[i]) continue;
      const double us = *all[k].us[i];
      const double place =
          static_cast<double>(i) + (static_cast<double>(k) - 0.5 * static_cast<double>(all.size() - 1)) * width;
      y.add(us);
      script += fmt::format("{:.5f} {:.6g}\n", place, us);
      labels += fmt::format("{:.5f} {:.6g} {}\n", place, us * 1.06,
                            us < 99.95 ? fmt::format("{:.1f}", us) : fmt::format("{:.0f}", us));
    }
    script += "EOD\n";
    plots.push_back(fmt::format("$d{} using 1:2:({:.5f}) with boxes fs solid 1 noborder lc rgb '{}' title {}", k,
                                0.92 * width, all[k].colour, gnuplot_string(all[k].title)));
  }
  script += fmt::format("$labels << EOD\n{}EOD\n", labels);
  plots.push_back("$labels using 1:2:3 with labels rotate by 90 left font ',9' tc rgb '#303030' notitle");
  std::vector<std::string> tics;
  for (std::size_t i = 0; i < shape.results.size(); ++i)
    tics.push_back(
        fmt::format("\"T = {}\\n{} rows\" {}", shape.results[i]->what.row.tokens, shape.results[i]->routed_rows, i));
  // Room above the tallest bar for its figure: a fifth of the height in decades.
  const double low = y.low / 2.5, high = y.high * std::max(2.0, std::pow(y.high / low, 0.2));
  script += fmt::format(
      "set logscale y\nset xrange [-0.6:{:.2f}]\nset yrange [{:.6g}:{:.6g}]\n"
      "set xlabel 'tokens T, and the rows they send to the experts held here' offset 0,-1\n"
      "set ylabel 'time (us), logarithmic'\nset ytics ({})\nset xtics ({}) scale 0\n"
      "set grid ytics lc rgb '#E4E4E4' lw 1 lt 1\n"
      "set bmargin at screen 0.17\n",
      count - 0.4, low, high, log_tics(low, high), fmt::join(tics, ", "));
  return script + fmt::format("plot {}\n", fmt::join(plots, ", \\\n  "));
}

}  // namespace

Result<std::vector<std::string>> plot_grid(const GridReport& report, const std::string& folder) {
  const std::vector<Shape> shapes = shapes_of(report);
  std::vector<std::pair<std::string, std::string>> files;
  std::vector<std::string> names;
  const auto draw = [&](std::string name, const std::string& script) -> Status {
    Result<std::string> picture = run_gnuplot(script);
    if (!picture) return picture.status().with_context(name);
    if (picture->find("</svg>") == std::string::npos)
      return {StatusCode::kIoError, name + ": gnuplot ended well, but what it printed is no whole SVG"};
    names.push_back(name);
    files.emplace_back(std::move(name), std::move(*picture));
    return {};
  };
  if (!shapes.empty()) SLUICE_TRY(draw("roofline.svg", roofline(report, shapes)));
  const std::vector<PeerKey> peers = peers_of(shapes);
  for (const Shape& shape : shapes) SLUICE_TRY(draw(shape.name + ".svg", bars(report, shape, peers)));
  SLUICE_TRY(write_files(folder, files));
  return names;
}

}  // namespace sluice::cli
