// Resolving a stage of a layer: which implementation, its scratch, its line in the report.
#pragma once

#include <fmt/format.h>

#include <algorithm>

#include "layer/selection.h"
#include "layer/state.h"

namespace sluice {

// Judges the planned arguments, picks the implementation, books its scratch and writes the report.
template <class Args>
Result<const Impl<Args>*> resolve_row(Layer::State& s, std::string_view role, std::string_view stage,
                                      std::span<const Impl<Args>> table, const Args& args, std::string tensors) {
  SLUICE_TRY(check(args, Phase::kPlan));
  Result<Choice<Args>> choice =
      choose(stage, table, args, s.options.machine, selection_for(s.options.selection, stage));
  if (!choice) return choice.status();
  const Impl<Args>& impl = *choice->impl;
  StageReport report;
  report.stage = role == stage ? std::string(stage) : fmt::format("{}: {}", role, stage);
  report.impl = std::string(impl.name);
  report.tensors = std::move(tensors);
  report.declined = std::move(choice->declined);
  if (impl.describe != nullptr) report.configuration = impl.describe(args, s.options.machine);
  if (impl.scratch_bytes != nullptr) report.scratch_bytes = impl.scratch_bytes(args, s.options.machine);
  s.scratch_bytes = std::max(s.scratch_bytes, report.scratch_bytes);
  s.reports.push_back(std::move(report));
  return &impl;
}

}  // namespace sluice
