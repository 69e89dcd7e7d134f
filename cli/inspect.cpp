// `sluice inspect`: the MoE layers of a checkpoint, from its headers alone.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "commands.h"
#include "options.h"
#include "progress.h"
#include "subject.h"

namespace sluice::cli {

namespace {

constexpr const char* kAbout = R"(List the MoE layers of a checkpoint and what can run them

Lists the MoE layers of a checkpoint: gate, sizes, dtypes, bytes, and what Sluice can run them in. Only headers and
config.json are read, so this is quick for any size. Identical neighbouring layers share a row.)";

constexpr const char* kFooter =
    R"(Columns: E experts, S slots per token, H hidden, I intermediate, SHARED intermediate size of the shared experts
(0: none; +g: with a sigmoid gate), LAYER and EXPERT bytes of one layer's tensors and of one routed expert.
Exit code 3 when a layer's tensors are missing or wrong; the others are still listed.

Examples:
  sluice inspect data/tiny-dsv3
  sluice inspect model.safetensors --json | jq '.groups[0].num_experts'
)";

Json layer_json(const LayerInfo& info) {
  Json document = config_json(info.config);
  document["expert_format"] = info.expert_format;
  document["expert_dtype"] = to_string(info.expert_dtype);
  document["shared_format"] = info.shared_format;
  document["gate_dtype"] = to_string(info.gate_dtype);
  document["layer_bytes"] = info.layer_bytes;
  document["expert_bytes"] = info.expert_bytes;
  Json& runs = document["precisions"] = Json::array();
  Json refusals = Json::object();
  for (Precision precision : kAllPrecisions) {
    const bool can = std::find(info.precisions.begin(), info.precisions.end(), precision) != info.precisions.end();
    if (can) {
      runs.push_back(to_string(precision));
      continue;
    }
    const Status why = data_path(precision, info.expert_dtype).status();
    refusals[std::string(to_string(precision))] = !info.cannot_run.empty() ? info.cannot_run
                                                  : why.is_ok() ? "not offered for " + info.expert_format + " experts"
                                                                : why.message();
  }
  document["cannot_run"] = refusals;
  return document;
}

struct Group {
  std::vector<std::int64_t> layers;
  LayerInfo info;
  Json document;
};

void print_text(const std::string& model, const Checkpoint& checkpoint, const std::vector<Group>& groups,
                std::int64_t num_moe) {
  fmt::print("{}: {}, {} layers, {} of them MoE\n", model, checkpoint.family(), checkpoint.num_layers(), num_moe);
  if (groups.empty()) return;
  fmt::print("\n");
  Table table({{"LAYERS"},
               {"E", true},
               {"S", true},
               {"H", true},
               {"I", true},
               {"SHARED", true},
               {"EXPERTS"},
               {"ROUTER"},
               {"LAYER", true},
               {"EXPERT", true},
               {"RUNS IN"}});
  for (const Group& group : groups) {
    const LayerInfo& info = group.info;
    const MoeConfig& c = info.config;
    const std::string shared = fmt::format(
        "{}{}{}", c.shared_intermediate, c.has_shared_gate ? "+g" : "",
        info.shared_format.empty() || info.shared_format == info.expert_format ? "" : " " + info.shared_format);
    std::vector<std::string_view> runs;
    for (Precision p : info.precisions) runs.push_back(to_string(p));
    table.add({format_ranges(group.layers), fmt::format("{}", c.num_experts), fmt::format("{}", c.top_k),
               fmt::format("{}", c.hidden), fmt::format("{}", c.intermediate), shared, info.expert_format,
               std::string(to_string(info.gate_dtype)), format_bytes(info.layer_bytes), format_bytes(info.expert_bytes),
               runs.empty() ? "nothing" : fmt::format("{}", fmt::join(runs, " "))});
  }
  table.print();
  fmt::print("\n");
  for (const Group& group : groups) {
    const MoeConfig& c = group.info.config;
    const std::string layers = format_ranges(group.layers);
    fmt::print("{}: gate {}; activation {}{}{}\n", layers, group.info.gate, describe(c.activation),
               c.weight_on_input ? "; weight on the expert's input" : "",
               c.activation_scale == ScaleFormat::kUe8m0 ? "; activation scales ue8m0 in w8a8" : "");
    for (const auto& [precision, why] : group.document["cannot_run"].items()) {
      fmt::print("{}: not {}: {}\n", layers, precision, why.get<std::string>());
    }
  }
}

// What to say when no layer is whole. One shard of several, or a file of activations, lies beside the rest of the
// model.
Status no_layer(const std::string& model, const Status& first_error) {
  namespace fs = std::filesystem;
  std::error_code ec;
  std::string hint;
  if (!fs::is_directory(model, ec)) {
    const fs::path folder = fs::path(model).has_parent_path() ? fs::path(model).parent_path() : fs::path(".");
    for (const char* name : {"model.safetensors.index.json", "model.safetensors"}) {
      if (!fs::exists(folder / name, ec) || fs::equivalent(folder / name, model, ec)) continue;
      hint = fmt::format("; {} lies beside it: give the folder, {}", name, folder.string());
      break;
    }
  }
  return Status(first_error.code(),
                fmt::format("{}: holds no whole layer with experts: {}{}", model, first_error.message(), hint));
}

Outcome inspect(const std::string& model, bool json) {
  Result<Checkpoint> checkpoint = Checkpoint::open(model);
  if (!checkpoint) return checkpoint.status();
  const std::vector<std::int64_t> moe_layers = checkpoint->moe_layers();
  std::vector<Group> groups;
  Json errors = Json::array();
  Status first_error;
  Progress progress("reading headers", Progress::Unit::kItems);
  for (std::size_t i = 0; i < moe_layers.size(); ++i) {
    progress.update(static_cast<std::int64_t>(i), static_cast<std::int64_t>(moe_layers.size()));
    const std::int64_t layer = moe_layers[i];
    Result<LayerInfo> info = checkpoint->layer_info(layer);
    if (!info) {
      errors.push_back({{"layer", layer}, {"message", info.status().message()}});
      if (first_error.is_ok()) first_error = info.status();
      continue;
    }
    Json document = layer_json(*info);
    const bool same = !groups.empty() && groups.back().layers.back() == layer - 1 && groups.back().document == document;
    if (!same) groups.push_back({{}, std::move(*info), std::move(document)});
    groups.back().layers.push_back(layer);
  }
  if (groups.empty() && !first_error.is_ok()) first_error = no_layer(model, first_error);
  if (!json) {
    if (groups.empty() && !first_error.is_ok()) return first_error;
    print_text(model, *checkpoint, groups, static_cast<std::int64_t>(moe_layers.size()));
    return first_error;
  }
  Json document = {{"model", model},
                   {"family", checkpoint->family()},
                   {"num_layers", checkpoint->num_layers()},
                   {"moe_layers", moe_layers}};
  Json& rows = document["groups"] = Json::array();
  for (const Group& group : groups) {
    Json row = {{"layers", group.layers}};
    row.update(group.document);
    rows.push_back(std::move(row));
  }
  document["errors"] = errors;
  if (!first_error.is_ok()) {
    document["error"] = {
        {"code", to_string(first_error.code())}, {"message", first_error.message()}, {"exit_code", kExitBadInput}};
  }
  print_json(document);
  // The document already tells of the error; only stderr and the exit code are left.
  if (!first_error.is_ok()) report(first_error, false);
  return first_error.is_ok() ? kExitOk : kExitBadInput;
}

}  // namespace

void add_inspect(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("inspect", kAbout);
  sub->footer(kFooter);
  auto model = std::make_shared<std::string>();
  sub->add_option("model", *model, "Checkpoint folder, or one .safetensors file beside a config.json")
      ->required()
      ->type_name("MODEL");
  add_json(*sub, command);
  sub->callback([&command, model] { command.run = [&command, model] { return inspect(*model, command.json); }; });
}

}  // namespace sluice::cli
