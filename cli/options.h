// Options that several commands share, and their meaning.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "output.h"
#include "sluice/sluice.h"

namespace sluice::cli {

struct Command;

struct MachineOptions {
  std::vector<std::string> impl;  // NAME or STAGE=NAME
  int threads = 0;                // 0: all usable
  Machine machine() const { return Machine::detect_cpu(threads); }
};

void add_json(CLI::App& sub, Command& command);
void add_threads(CLI::App& sub, MachineOptions& options);
void add_impl(CLI::App& sub, MachineOptions& options);

// The names in every stage's table, fastest first, reference last; keys as in LayerOptions::selection.
struct StageTable {
  std::string stage;
  std::vector<std::string> names;
};
std::vector<StageTable> stage_tables();

// NAME forces the implementation wherever a stage has it; STAGE=NAME forces one stage. Unknown names are refused
// with the list of what there is.
Result<std::map<std::string, Selection>> parse_selection(const std::vector<std::string>& impl);

inline constexpr Precision kAllPrecisions[] = {Precision::kW8A8, Precision::kW8A16, Precision::kBF16, Precision::kF32};
// The value of --precision where one is wanted.
Result<Precision> parse_one_precision(const std::string& text);
// "w8a8,f32" or "all" (empty list). Duplicates are dropped.
Result<std::vector<Precision>> parse_precisions(const std::string& text);
// "1,32,512", each in [low, 2^24].
Result<std::vector<std::int64_t>> parse_tokens(const std::string& text, std::int64_t low);

// The precision a layer runs in when none is asked for: the one its weights were made for.
Precision default_precision(const LayerInfo& info);
// Ok when `precision` is one of info.precisions; otherwise why not, and what there is.
Status check_precision(const LayerInfo& info, Precision precision);

// Opens the model and finds the layer; a layer without experts is refused with the list of those that have them.
struct ModelLayer {
  Checkpoint checkpoint;
  LayerInfo info;
};
Result<ModelLayer> open_layer(const std::string& model, std::int64_t layer);
// Loads with a progress bar; prints a warning for NaN weights.
Result<LoadedLayer> load_layer(const ModelLayer& model, Precision precision, bool routed_only);

Json config_json(const MoeConfig& config);

}  // namespace sluice::cli
