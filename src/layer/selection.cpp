#include "layer/selection.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "sluice/stage/combine.h"
#include "sluice/stage/gate.h"
#include "sluice/stage/grouped_gemm.h"
#include "sluice/stage/pack.h"
#include "sluice/stage/route.h"
#include "sluice/stage/route_pack.h"
#include "sluice/stage/swiglu_quant.h"
#include "sluice/stage/up_swiglu_quant.h"

namespace sluice {
namespace {

template <class Args>
StageNames names_of(std::string stage, std::span<const Impl<Args>> table) {
  StageNames names{std::move(stage), {}};
  for (const Impl<Args>& impl : table) names.impls.emplace_back(impl.name);
  return names;
}

// A fused stage's last resort is the stages it stands for.
template <class Args>
StageNames fused_names(std::string_view stage, std::span<const Impl<Args>> table) {
  StageNames names = names_of(std::string(stage), table);
  names.impls.emplace_back(kComposed);
  return names;
}

std::string known_names(const std::vector<StageNames>& tables) {
  std::string text;
  for (const StageNames& table : tables) {
    text += (text.empty() ? "" : "; ") + table.stage + ": ";
    for (std::size_t i = 0; i < table.impls.size(); ++i) text += (i > 0 ? ", " : "") + table.impls[i];
  }
  return text;
}

// Calls found(stage, name) for each stage the word ("NAME" or "STAGE:NAME") speaks of.
template <class Found>
Status resolve_name(std::string_view option, std::string_view word, const Found& found) {
  const std::size_t colon = word.find(':');
  const std::string_view stage = colon == std::string_view::npos ? "" : word.substr(0, colon);
  const std::string_view name = colon == std::string_view::npos ? word : word.substr(colon + 1);
  const std::vector<StageNames> tables = stage_names();
  bool is_known = false;
  for (const StageNames& table : tables) {
    if (!stage.empty() && table.stage != stage) continue;
    if (std::find(table.impls.begin(), table.impls.end(), name) == table.impls.end()) continue;
    is_known = true;
    found(table.stage, std::string(name));
  }
  if (is_known) return Status::ok();
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: there is no implementation '{}'; there are {}", option, word, known_names(tables))};
}

std::string_view without_blanks(std::string_view word) {
  while (!word.empty() && word.front() == ' ') word.remove_prefix(1);
  while (!word.empty() && word.back() == ' ') word.remove_suffix(1);
  return word;
}

template <class Found>
Status resolve_list(std::string_view option, std::string_view list, const Found& found) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    const std::string_view word = without_blanks(list.substr(0, comma));
    list.remove_prefix(std::min(comma + 1, list.size()));
    if (word.empty()) continue;
    SLUICE_TRY(resolve_name(option, word, found));
  }
  return Status::ok();
}

}  // namespace

std::vector<StageNames> stage_names() {
  return {names_of("gate.logits", gate::logits_impls()),
          names_of("gate.select", gate::select_impls()),
          names_of("route", route::impls()),
          names_of("pack", pack::impls()),
          names_of("grouped_gemm", grouped_gemm::impls()),
          names_of("swiglu_quant", swiglu_quant::impls()),
          names_of("combine", combine::impls()),
          fused_names(route_pack::kStage, route_pack::impls()),
          fused_names(up_swiglu_quant::kStage, up_swiglu_quant::impls())};
}

Status disable(std::string_view list, std::map<std::string, Selection>& selection, std::string_view option) {
  return resolve_list(option, list, [&](const std::string& stage, const std::string& name) {
    std::vector<std::string>& disabled = selection[stage].disabled;
    if (std::find(disabled.begin(), disabled.end(), name) == disabled.end()) disabled.push_back(name);
  });
}

Status force(std::string_view list, std::map<std::string, Selection>& selection, std::string_view option) {
  // A word with a stage wins over one without, whatever their order.
  std::map<std::string, std::string> plain;
  std::map<std::string, std::string> own;
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    const std::string_view word = list.substr(0, comma);
    list.remove_prefix(std::min(comma + 1, list.size()));
    auto& kind = word.find(':') == std::string_view::npos ? plain : own;
    SLUICE_TRY(
        resolve_list(option, word, [&](const std::string& stage, const std::string& name) { kind[stage] = name; }));
  }
  own.merge(plain);
  for (const auto& [stage, name] : own) selection[stage].forced = name;
  return Status::ok();
}

Status disable_from_environment(std::map<std::string, Selection>& selection) {
  const char* const list = std::getenv("SLUICE_DISABLE");
  return list == nullptr ? Status::ok() : disable(list, selection, "SLUICE_DISABLE");
}

Selection selection_for(const std::map<std::string, Selection>& selection, std::string_view stage) {
  Selection merged;
  for (std::string_view key : {std::string_view("*"), stage}) {
    const auto it = selection.find(std::string(key));
    if (it == selection.end()) continue;
    if (!it->second.forced.empty()) merged.forced = it->second.forced;
    merged.disabled.insert(merged.disabled.end(), it->second.disabled.begin(), it->second.disabled.end());
  }
  return merged;
}

Status check_selection_keys(const std::map<std::string, Selection>& selection) {
  const std::vector<StageNames> tables = stage_names();
  for (const auto& [key, unused] : selection) {
    if (key == "*") continue;
    if (std::any_of(tables.begin(), tables.end(), [&](const StageNames& t) { return t.stage == key; })) continue;
    std::string stages;
    for (const StageNames& table : tables) stages += (stages.empty() ? "" : ", ") + table.stage;
    return {StatusCode::kInvalidArgument, fmt::format("selection: there is no stage '{}'; there are {}", key, stages)};
  }
  return Status::ok();
}

}  // namespace sluice
