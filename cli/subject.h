// What explain and bench work on: a layer of a checkpoint, or of a preset that needs no files.
#pragma once

#include <optional>
#include <string>

#include "options.h"
#include "random.h"

namespace sluice::cli {

struct SubjectOptions {
  std::string model;
  std::int64_t layer = -1;
  std::string like;
};
// --model and --layer, or --like; which of them were given is judged by find_subject.
void add_subject(CLI::App& sub, SubjectOptions& options);

// The names of the presets, wrapped for --help.
std::string preset_list();

struct Subject {
  std::string title;  // "deepseek-v3" or "data/tiny-dsv3 layer 1"
  MoeConfig config;
  DType experts = DType::kBF16;  // as loaded for the precision the weights were made for
  DType shared = DType::kBF16;
  std::optional<ModelLayer> model;  // absent for a preset

  bool experts_by_row = false;  // one scale a row instead of 128x128 blocks
  bool shared_by_row = false;

  // The weights as loaded for `precision`: bf16 dequantises those of one byte.
  WeightForm experts_for(Precision precision) const;
  WeightForm shared_for(Precision precision) const;
  // The precision `run` would pick, where any can run.
  Precision default_precision() const;
  // Ok when the weights fit, or why not.
  Status can_run(Precision precision) const;
};
Subject subject_of(ModelLayer model, std::string title);
// The layer as it would be created, without weights and in milliseconds: what refuses it here would refuse it after they
// were read.
Result<Layer> plan_layer(const MoeConfig& config, WeightForm experts, WeightForm shared, LayerOptions options);

// `usage` is set when the options themselves are wrong.
Result<Subject> find_subject(const SubjectOptions& options, bool& usage);

}  // namespace sluice::cli
