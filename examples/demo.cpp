// All MoE layers of a checkpoint on real activations, against the values a public PyTorch implementation gave for
// them (golden.safetensors beside the model), in f32, w8a16 and w8a8. Fails when a bound is broken.
//   demo data/tiny-dsv3
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "sluice/sluice.h"

namespace {

using namespace sluice;

struct Bound {
  Precision precision;
  double worst_row;  // relative L2 of y against y_fp32
  double mean_row;
};
// An exact-arithmetic simulation of these paths gives worst rows of 9e-7, 6.6e-3 and 5.9e-2 on tiny-dsv3.
constexpr Bound kBounds[] = {
    {Precision::kF32, 2e-6, 2e-6}, {Precision::kW8A16, 1e-2, 1e-2}, {Precision::kW8A8, 7e-2, 3.5e-2}};
constexpr double kWeightBound = 1e-6;  // of topk_weight, absolute
constexpr int kTimedRuns = 5;

struct Golden {
  std::shared_ptr<const io::SafetensorsFile> file;

  // A tensor of one layer, checked for dtype and shape, copied to aligned memory.
  Result<std::vector<std::byte>> read(const std::string& name, DType dtype, std::vector<std::int64_t> shape) const {
    const io::TensorEntry* entry = file->find(name);
    if (entry == nullptr)
      return Status(StatusCode::kNotFound, fmt::format("{} has no tensor {}", file->path().string(), name));
    const bool same_rank = entry->shape.size() == shape.size();
    for (std::size_t i = 0; same_rank && i < shape.size(); ++i) {
      if (shape[i] < 0) shape[i] = entry->shape[i];
    }
    if (entry->dtype != dtype || entry->shape != shape) {
      return Status(StatusCode::kBadData, fmt::format("{}: {} has another dtype or shape than the model asks for",
                                                      file->path().string(), name));
    }
    const std::byte* data = file->data(*entry);
    return std::vector<std::byte>(data, data + (entry->end - entry->begin));
  }
};

struct Verdict {
  Precision precision = Precision::kF32;
  double worst = 0, mean = 0;
  std::int64_t wrong_ids = 0;
  double weight_error = 0;
  double tokens_per_s = 0;
  std::vector<std::int64_t> load;  // [E] tokens per expert

  bool passed(const Bound& bound) const {
    return worst <= bound.worst_row && mean <= bound.mean_row && wrong_ids == 0 && weight_error <= kWeightBound;
  }
};

Result<Verdict> run(const Checkpoint& checkpoint, const Golden& golden, std::int64_t number, Precision precision) {
  LoadOptions load;
  load.precision = precision;
  Result<LoadedLayer> loaded = checkpoint.load(number, load);
  if (!loaded) return loaded.status();
  const std::int64_t H = loaded->config.hidden, S = loaded->config.top_k, E = loaded->config.num_experts;

  const std::string prefix = fmt::format("layer{}.", number);
  auto x = golden.read(prefix + "x", DType::kBF16, {-1, H});  // [T,H]
  if (!x) return x.status();
  const std::int64_t T = static_cast<std::int64_t>(x->size()) / (2 * H);
  auto want_idx = golden.read(prefix + "topk_idx_sorted", DType::kI32, {T, S});  // [T,S]
  auto want_weight = golden.read(prefix + "topk_weight", DType::kF32, {T, S});   // [T,S]
  auto want_y = golden.read(prefix + "y_fp32", DType::kF32, {T, H});             // [T,H]
  if (!want_idx) return want_idx.status();
  if (!want_weight) return want_weight.status();
  if (!want_y) return want_y.status();

  LayerOptions options;
  options.precision = precision;
  options.max_tokens = T;
  Result<Layer> layer = Layer::create(loaded->config, loaded->weights, options);
  if (!layer) return layer.status();
  std::vector<float> y(static_cast<std::size_t>(T * H));                // [T,H]
  std::vector<std::int32_t> topk_idx(static_cast<std::size_t>(T * S));  // [T,S]
  std::vector<float> topk_weight(topk_idx.size());                      // [T,S]
  std::vector<std::byte> workspace(static_cast<std::size_t>(layer->workspace_bytes()));
  Ctx ctx;
  ctx.workspace = workspace;
  ctx.num_threads = options.machine.num_threads;
  Layer::Routing routing;
  routing.topk_idx = {TensorView::dense(topk_idx.data(), DType::kI32, {T, S})};
  routing.topk_weight = TensorView::dense(topk_weight.data(), DType::kF32, {T, S});
  std::vector<double> seconds;
  for (int i = 0; i < kTimedRuns; ++i) {
    const auto start = std::chrono::steady_clock::now();
    SLUICE_TRY(layer->forward(TensorView::dense(x->data(), DType::kBF16, {T, H}),
                              TensorView::dense(y.data(), DType::kF32, {T, H}), routing, ctx));
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());

  Verdict verdict;
  verdict.precision = precision;
  verdict.tokens_per_s = static_cast<double>(T) / seconds[seconds.size() / 2];
  verdict.load.resize(static_cast<std::size_t>(E));
  const auto golden_f32 = [](const std::vector<std::byte>& bytes, std::int64_t i) {
    return io::decode_f32(bytes.data() + 4 * i);
  };
  for (std::int64_t t = 0; t < T; ++t) {
    double error2 = 0, want2 = 0;
    for (std::int64_t h = t * H; h < (t + 1) * H; ++h) {
      const double want = golden_f32(*want_y, h), error = y[static_cast<std::size_t>(h)] - want;
      error2 += error * error;
      want2 += want * want;
    }
    // A NaN anywhere must lose: comparisons with it are false, so it is turned into infinity.
    double row = std::sqrt(error2 / std::max(want2, 1e-300));
    if (std::isnan(row)) row = HUGE_VAL;
    verdict.worst = std::max(verdict.worst, row);
    verdict.mean += row / static_cast<double>(T);

    // The golden ids are ascending; ours are in order of choice.
    std::vector<std::pair<std::int32_t, float>> chosen;
    for (std::int64_t s = t * S; s < (t + 1) * S; ++s) {
      chosen.emplace_back(topk_idx[static_cast<std::size_t>(s)], topk_weight[static_cast<std::size_t>(s)]);
    }
    std::sort(chosen.begin(), chosen.end());
    for (std::int64_t s = 0; s < S; ++s) {
      const auto [id, weight] = chosen[static_cast<std::size_t>(s)];
      std::int32_t want_id;
      std::memcpy(&want_id, want_idx->data() + 4 * (t * S + s), 4);
      verdict.wrong_ids += id != want_id ? 1 : 0;
      const double error = std::fabs(static_cast<double>(weight) - golden_f32(*want_weight, t * S + s));
      verdict.weight_error = std::max(verdict.weight_error, std::isnan(error) ? HUGE_VAL : error);
      if (id >= 0 && id < E) ++verdict.load[static_cast<std::size_t>(id)];
    }
  }
  return verdict;
}

int terminal_columns() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

bool is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == 0) continue;
    return std::strstr(value, "UTF-8") != nullptr || std::strstr(value, "utf8") != nullptr;
  }
  return false;
}

// One column of blocks per expert; neighbours share a column where the terminal is too narrow.
void print_load(std::int64_t layer, const std::vector<std::int64_t>& load) {
  constexpr int kHeight = 5, kLabel = 7;
  static constexpr const char* kBlocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const bool utf8 = is_utf8();
  const int room = std::max(terminal_columns() - kLabel - 1, 8);
  const int experts = static_cast<int>(load.size());
  const int share = (experts + room - 1) / room;  // experts per column
  const int columns = (experts + share - 1) / share;
  const int width = std::clamp(room / columns, 1, 3);
  std::vector<double> height(static_cast<std::size_t>(columns));
  for (int e = 0; e < experts; ++e)
    height[static_cast<std::size_t>(e / share)] += static_cast<double>(load[static_cast<std::size_t>(e)]) / share;
  const double top = std::max(*std::max_element(height.begin(), height.end()), 1.0);
  const auto [low, high] = std::minmax_element(load.begin(), load.end());
  std::int64_t total = 0;
  for (std::int64_t n : load) total += n;
  fmt::print("\nlayer {}: tokens per expert, mean {:.1f}, least {} (expert {}), most {} (expert {})\n", layer,
             static_cast<double>(total) / experts, *low, low - load.begin(), *high, high - load.begin());
  for (int line = kHeight - 1; line >= 0; --line) {
    std::string text =
        line == kHeight - 1 ? fmt::format("{:>{}} ", std::lround(top), kLabel - 1) : std::string(kLabel, ' ');
    for (double h : height) {
      const int eighths = std::clamp(static_cast<int>(std::lround(h / top * kHeight * 8)) - 8 * line, 0, 8);
      const std::string cell = utf8 ? kBlocks[eighths] : eighths >= 4 ? "#" : eighths > 0 ? "." : " ";
      for (int i = 0; i < std::max(width - 1, 1); ++i) text += cell;
      if (width > 1) text += ' ';
    }
    fmt::print("{}\n", text.substr(0, text.find_last_not_of(' ') + 1));
  }
  const std::string last = fmt::format("{}", experts - 1);
  const int span = std::max(columns * width - (width > 1 ? 1 : 0) - 1 - static_cast<int>(last.size()), 1);
  fmt::print("{:>{}}0{}{}\n", "", kLabel, std::string(static_cast<std::size_t>(span), ' '), last);
}

Result<bool> demo(const std::string& directory) {
  Result<Checkpoint> checkpoint = Checkpoint::open(directory);
  if (!checkpoint) return checkpoint.status();
  Result<std::shared_ptr<const io::SafetensorsFile>> file =
      io::SafetensorsFile::open(directory + "/golden.safetensors");
  if (!file) return file.status();
  const Golden golden{*file};
  const Machine machine = Machine::detect_cpu();
  fmt::print("{}: {}, MoE layers against golden.safetensors (public PyTorch implementation, fp32)\n", directory,
             checkpoint->family());
  fmt::print("CPU: {} threads, {}\n\n", machine.num_threads, machine.simd);
  fmt::print("{:<6} {:<9} {:>11} {:>11} {:>9} {:>10} {:>14} {:>10}\n", "layer", "precision", "worst row", "mean row",
             "bound", "top-k ids", "weights diff", "tokens/s");

  bool passed = true;
  std::size_t num_layers = 0;
  std::vector<Verdict> worst(std::size(kBounds));
  std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>> loads;
  for (std::int64_t layer : checkpoint->moe_layers()) {
    ++num_layers;
    for (std::size_t i = 0; i < std::size(kBounds); ++i) {
      const Bound& bound = kBounds[i];
      Result<Verdict> verdict = run(*checkpoint, golden, layer, bound.precision);
      if (!verdict)
        return verdict.status().with_context(fmt::format("layer {} in {}", layer, to_string(bound.precision)));
      const bool ok = verdict->passed(bound);
      passed = passed && ok;
      fmt::print("{:<6} {:<9} {:>11.2e} {:>11.2e} {:>9.0e} {:>10} {:>14.1e} {:>10.0f}  {}\n", layer,
                 to_string(bound.precision), verdict->worst, verdict->mean, bound.worst_row,
                 verdict->wrong_ids == 0 ? std::string("equal") : fmt::format("{} wrong", verdict->wrong_ids),
                 verdict->weight_error, verdict->tokens_per_s, ok ? "ok" : "BROKEN");
      worst[i].worst = std::max(worst[i].worst, verdict->worst);
      worst[i].mean = std::max(worst[i].mean, verdict->mean);
      worst[i].wrong_ids += verdict->wrong_ids;
      worst[i].weight_error = std::max(worst[i].weight_error, verdict->weight_error);
      if (i == 0) loads.emplace_back(layer, verdict->load);
    }
  }
  for (const auto& [layer, load] : loads) print_load(layer, load);
  if (num_layers == 0) return Status(StatusCode::kBadData, directory + " has no MoE layer");

  std::string summary;
  std::int64_t wrong_ids = 0;
  double weight_error = 0;
  for (std::size_t i = 0; i < std::size(kBounds); ++i) {
    summary +=
        fmt::format("{} {:.2e} (<= {:.0e}{}), ", to_string(kBounds[i].precision), worst[i].worst, kBounds[i].worst_row,
                    kBounds[i].mean_row < kBounds[i].worst_row
                        ? fmt::format("; mean {:.2e} <= {:.1e}", worst[i].mean, kBounds[i].mean_row)
                        : "");
    wrong_ids += worst[i].wrong_ids;
    weight_error = std::max(weight_error, worst[i].weight_error);
  }
  fmt::print("\n{} {} layers, worst rows {}{}, top-k weights {:.1e} (<= {:.0e})\n",
             passed ? "verified:" : "FAILED:", num_layers, summary,
             wrong_ids == 0 ? std::string("top-k ids equal") : fmt::format("{} top-k ids wrong", wrong_ids),
             weight_error, kWeightBound);
  return passed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    fmt::print(stderr, "usage: demo DIR   (a checkpoint with golden.safetensors, e.g. data/tiny-dsv3)\n");
    return 2;
  }
  const Result<bool> passed = demo(argv[1]);
  if (!passed) {
    fmt::print("FAILED: {}\n", passed.status().message());
    return 3;
  }
  return *passed ? 0 : 1;
}
