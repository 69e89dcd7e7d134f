// `sluice convert`: a checkpoint with its experts quantised, checked against its source.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "commands.h"
#include "interrupt.h"
#include "io/convert.h"
#include "options.h"
#include "progress.h"

namespace sluice::cli {

namespace {

constexpr const char* kAbout = R"(Quantise the experts of a bf16, f16 or f32 checkpoint, and check the result

Reads a checkpoint and writes another, which sluice and other software that knows the format can load: the
projections of routed and shared experts are quantised, every other tensor and file is copied bit for bit, and
config.json gets the quantization_config. Experts that are fused into one tensor become one tensor per expert.)";

constexpr const char* kFooter = R"(Formats:
  fp8-block     e4m3, a scale per 128x128: weight + weight_scale_inv, quant_method fp8 (as DeepSeek-V3 is published)
  fp8-channel   e4m3, a scale per output row: weight + weight_scale, quant_method compressed-tensors
  int8-channel  int8, a scale per output row: weight + weight_scale, quant_method compressed-tensors
Scales are max(amax, 1e-10) / 448 or / 127 (docs/numerics.md); activations are named as dynamic ones.

The result is read back before it gets its name: every scale must be its group's amax / top, every element within
half a step of the format, every copy equal. The errors printed are |q * scale - w| / |w| per matrix, and the largest
share of its bound that an element uses. A violation is exit code 1.

The source is only read. The output is written beside its name and renamed at the end: on failure, on a full disk and
on Ctrl-C nothing stays behind (a killed process leaves a folder .sluice-*.tmp). An output that exists is refused;
--force replaces a checkpoint, when the new one is complete. Weights that are NaN or infinite are refused by name.
Memory: about 100 MB and the names of the tensors, whatever the size of the checkpoint, beside file pages that the
system takes back at will.

Examples:
  sluice synth --like qwen3-30b --layers 1 --experts 16 --out small
  sluice convert --model small --out small-fp8 --to fp8-block
  sluice convert --model small --out small-int8 --to int8-channel --layers 0-3,7
)";

struct ConvertOptions {
  std::string model, out, to;
  std::optional<std::string> layers;  // given and empty is a mistake, not all of them
  std::string shards_bytes = "5GiB";
  bool force = false;
  MachineOptions machine;
};

// "3-5,7"
Result<std::vector<std::int64_t>> parse_layers(const std::string& text) {
  constexpr std::int64_t kMax = 99999;
  std::vector<std::int64_t> layers;
  const auto fail = [&](const std::string& why) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("--layers '{}': {}; give layer numbers and ranges, as in 3-5,7", text, why));
  };
  const auto number = [](std::string_view digits, std::int64_t& value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return error == std::errc() && end == digits.data() + digits.size() && value >= 0 && value <= kMax;
  };
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, comma - begin);
    if (part.empty()) return fail(text.empty() ? "it is empty" : "nothing stands before or after a comma");
    // A leading minus belongs to the number, which is then refused.
    const std::size_t dash = part.find('-', 1);
    const std::string first = part.substr(0, dash), last = dash == std::string::npos ? first : part.substr(dash + 1);
    std::int64_t low = 0, high = 0;
    for (const auto& [digits, value] : {std::pair(&first, &low), std::pair(&last, &high)}) {
      if (!number(*digits, *value)) return fail(fmt::format("'{}' is no layer number from 0 to {}", *digits, kMax));
    }
    if (high < low) return fail(fmt::format("the range {} runs backwards", part));
    for (std::int64_t layer = low; layer <= high; ++layer) layers.push_back(layer);
    begin = comma + 1;
  }
  return layers;
}

// "5368709120", "5GB", "1.5 GiB": k, M, G, T are powers of 1000, with an i of 1024; B and the case of letters are free.
Result<std::int64_t> parse_bytes(const std::string& text) {
  const auto fail = [&](const std::string& why) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("--shards-bytes '{}': {}; give a count of bytes such as 5368709120, 500MB or 5GiB", text, why));
  };
  double count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count, std::chars_format::fixed);
  if (error != std::errc()) return fail(text.empty() ? "it is empty" : "it does not begin with a number");
  std::string unit(end, text.data() + text.size());
  unit.erase(0, unit.find_first_not_of(' '));
  std::transform(unit.begin(), unit.end(), unit.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
  std::string_view rest = unit;
  if (rest.ends_with('b')) rest.remove_suffix(1);
  const bool binary = rest.ends_with('i');
  if (binary) rest.remove_suffix(1);
  const std::size_t power = rest.empty() ? 0 : std::string_view("kmgt").find(rest) + 1;  // npos + 1 is 0
  if (rest.empty() ? binary : rest.size() > 1 || power == 0)
    return fail(fmt::format("'{}' is no unit; there are kB, MB, GB, TB and KiB, MiB, GiB, TiB", unit));
  count *= std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(power));
  if (!(count >= 1)) return fail("a file holds at least 1 byte");
  if (count > 0x1p62) return fail("that is more than 2^62 bytes");
  return static_cast<std::int64_t>(count);
}

Json to_json(const ConvertOptions& options, const io::ConvertReport& r) {
  return {{"model", options.model},
          {"out", options.out},
          {"to", options.to},
          {"family", r.family},
          {"layers", r.layers},
          {"quantised", r.num_quantised},
          {"copied", r.num_copied},
          {"shards", r.num_shards},
          {"source_bytes", r.source_bytes},
          {"written_bytes", r.written_bytes},
          {"copied_files", r.copied_files},
          {"left_out_files", r.left_out_files},
          {"error",
           {{"worst", r.worst_error},
            {"worst_tensor", r.worst_tensor},
            {"mean", r.mean_error},
            {"worst_share_of_bound", r.worst_share},
            {"worst_share_at", r.worst_share_at}}},
          {"num_violations", r.num_violations},
          {"violations", r.violations}};
}

void print_text(const ConvertOptions& options, const io::ConvertReport& r) {
  fmt::print("{}: {}, {} {} to {}, {} in {} {} (source: {})\n", options.out, r.family,
             r.layers.size() == 1 ? "layer" : "layers", format_ranges(r.layers), options.to,
             format_bytes(r.written_bytes), r.num_shards, r.num_shards == 1 ? "file" : "files",
             format_bytes(r.source_bytes));
  fmt::print("{} matrices quantised; {} {} and {} other {} copied and equal\n", format_count(r.num_quantised),
             format_count(r.num_copied), r.num_copied == 1 ? "tensor" : "tensors", r.copied_files.size(),
             r.copied_files.size() == 1 ? "file" : "files");
  if (!r.left_out_files.empty()) fmt::print("left out: {}\n", fmt::join(r.left_out_files, ", "));
  fmt::print("relative L2 error: worst {:.3e} ({}), mean {:.3e}\n", r.worst_error, r.worst_tensor, r.mean_error);
  fmt::print("largest share of its bound: {:.4f} ({})\n", r.worst_share, r.worst_share_at);
}

Outcome convert(const ConvertOptions& options, bool json) {
  io::ConvertRequest request;
  request.model = options.model;
  request.out = options.out;
  request.replace = options.force;
  request.num_threads = options.machine.threads;
  const Result<std::int64_t> shard_bytes = parse_bytes(options.shards_bytes);
  if (!shard_bytes) return Outcome::usage(shard_bytes.status().message());
  request.max_shard_bytes = *shard_bytes;
  const Result<WeightFormat> format = parse_weight_format(options.to);
  if (!format) return Outcome::usage("--to: " + format.status().message());
  request.format = *format;
  if (options.layers) {
    Result<std::vector<std::int64_t>> layers = parse_layers(*options.layers);
    if (!layers) return Outcome::usage(layers.status().message());
    request.layers = std::move(*layers);
  }
  Result<io::ConvertReport> report = [&] {
    Progress progress("writing", Progress::Unit::kBytes);
    request.progress = [&](std::string_view phase, std::int64_t done, std::int64_t total) {
      progress.label(std::string(phase));
      progress.update(done, total);
    };
    catch_interrupts();
    request.stop = is_interrupted;
    return io::convert(request);
  }();
  if (!report) {
    const Status& s = report.status();
    if (is_interrupted()) return interrupted(Status(s.code(), "interrupted; nothing was left behind"));
    return s.code() == StatusCode::kInvalidArgument ? Outcome::usage(s.message()) : Outcome(s);
  }
  if (json) {
    print_json(to_json(options, *report));
  } else if (report->num_violations == 0) {
    print_text(options, *report);
  }
  if (report->num_violations == 0) return kExitOk;
  for (const std::string& text : report->violations) warn(text);
  Outcome outcome(Status(
      StatusCode::kBadData,
      fmt::format("convert: {} violations in what was written; {} was not made", report->num_violations, options.out)));
  outcome.exit_code = kExitCheckFailed;
  cli::report(outcome, false);
  return kExitCheckFailed;
}

}  // namespace

void add_convert(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("convert", kAbout);
  sub->footer(kFooter);
  auto o = std::make_shared<ConvertOptions>();
  sub->add_option("--model", o->model, "Checkpoint folder to read")->required()->type_name("DIR");
  sub->add_option("--out", o->out, "Folder to write; new, or empty")->required()->type_name("DIR");
  sub->add_option("--to", o->to, "fp8-block, fp8-channel or int8-channel")->required()->type_name("FORMAT");
  sub->add_option("--layers", o->layers, "Layers to convert, as in 3-5,7; default: all with experts")
      ->type_name("LIST");
  sub->add_option("--shards-bytes", o->shards_bytes,
                  "Largest file: a count of bytes, or with kB, MB, GB (1000) or KiB, MiB, GiB (1024) [5GiB]")
      ->type_name("BYTES");
  sub->add_flag("--force", o->force, "Replace a checkpoint at --out");
  add_threads(*sub, o->machine);
  add_json(*sub, command);
  sub->callback([&command, o] { command.run = [&command, o] { return convert(*o, command.json); }; });
}

}  // namespace sluice::cli
