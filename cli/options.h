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
  std::string device = "auto";    // or cpu, cuda, cuda:N
  Machine host() const { return Machine::detect_cpu(threads); }
};

// Where a command runs the layer.
struct ChosenMachine {
  Machine machine;
  std::string reason;  // with auto on a CPU: why it is no GPU; else ""
  bool is_gpu() const { return machine.device.kind == DeviceKind::kCuda; }
  std::string name() const;  // "cpu" or "cuda:0"
  std::string describe()
      const;  // "GPU 0: NVIDIA H200, compute capability 9.0, ..." or "CPU: 8 threads, AVX2 (auto: ...)"
};
// `usage` is set when the word itself is wrong; a GPU that is asked for and cannot be used is refused with its reason.
Result<ChosenMachine> choose_machine(const MachineOptions& options, bool& usage);
Json device_json(const ChosenMachine& chosen);

// What the value of an option must be; a refusal quotes what was given and says what is wanted.
CLI::Validator whole_number(std::int64_t low, std::int64_t high);
CLI::Validator number(double low, double high);
CLI::Validator one_of(std::vector<std::string> words);

void add_json(CLI::App& sub, Command& command);
void add_threads(CLI::App& sub, MachineOptions& options);
void add_impl(CLI::App& sub, MachineOptions& options);
void add_device(CLI::App& sub, MachineOptions& options);

// NAME forces the implementation wherever a stage has it; STAGE=NAME forces one stage. Unknown names are refused
// with the list of what there is.
Result<std::map<std::string, Selection>> parse_selection(const std::vector<std::string>& impl);

inline constexpr Precision kAllPrecisions[] = {Precision::kW8A8, Precision::kW8A16, Precision::kBF16, Precision::kF32};
// The parts between separators: one more than there are of these.
std::vector<std::string> split(const std::string& text, char separator);
// The value of --precision where one is wanted.
Result<Precision> parse_one_precision(const std::string& text);
// "w8a8,f32" or "all" (empty list). Duplicates are dropped.
Result<std::vector<Precision>> parse_precisions(const std::string& text);
// "1,32,512", each in [low, 2^24]; or in [low, high], for an option of another name.
Result<std::vector<std::int64_t>> parse_tokens(const std::string& text, std::int64_t low);
Result<std::vector<std::int64_t>> parse_counts(std::string_view option, const std::string& text, std::int64_t low,
                                               std::int64_t high);

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
// Loads with a progress bar: all experts, or the part of a rank that `part` says.
Result<LoadedLayer> load_layer(const ModelLayer& model, Precision precision, bool routed_only, LoadOptions part = {});
// The weights where the machine is: as they are on a CPU, uploaded with a progress bar to a GPU.
Result<LayerWeights> place_weights(LayerWeights weights, const ChosenMachine& chosen);

Json config_json(const MoeConfig& config);

}  // namespace sluice::cli
