// `sluice explain`: what a layer resolves to on this machine, and why.
#include <fmt/format.h>

#include <algorithm>

#include "commands.h"
#include "device/device.h"
#include "subject.h"

namespace sluice::cli {

namespace {

constexpr const char* kAbout = R"(Show what a layer resolves to: implementations, configuration, workspace

Creates the layer for up to T tokens without reading weights and prints, per stage, the chosen implementation, its
configuration and tensors, why the others declined, and every item of the workspace with its shape in letters.)";

constexpr const char* kFooter =
    R"(There is no silent fallback: --impl forces an implementation, and one that cannot run is an error with its reason.

Examples:
  sluice explain --model data/tiny-dsv3 --layer 1 --tokens 512
  sluice explain --like deepseek-v3 --tokens 1 --precision w8a8
  sluice explain --like deepseek-v3 --precision all
  sluice explain --like deepseek-v3 --impl grouped_gemm=reference
  sluice explain --like deepseek-v3 --tokens 4096 --ep 8 --device cpu
  SLUICE_DISABLE=cuda-wgmma sluice explain --like deepseek-v3 --device cuda
)";

struct ExplainOptions {
  SubjectOptions subject;
  std::int64_t tokens = 512;
  std::string precision;  // empty: the one `run` would pick
  bool routed_only = false;
  std::int64_t num_ranks = 1;
  MachineOptions machine;
};

Json explain_json(const Layer& layer, Precision precision) {
  Json stages = Json::array();
  for (const StageReport& stage : layer.stages()) {
    Json declined = Json::array();
    for (const Declined& d : stage.declined) declined.push_back({{"name", d.name}, {"reason", d.reason}});
    stages.push_back({{"stage", stage.stage},
                      {"implementation", stage.impl},
                      {"configuration", stage.configuration},
                      {"tensors", stage.tensors},
                      {"scratch_bytes", stage.scratch_bytes},
                      {"declined", declined}});
  }
  Json items = Json::array();
  for (const WorkspaceItem& item : layer.workspace_items()) {
    items.push_back({{"name", item.name}, {"offset_bytes", item.offset_bytes}, {"bytes", item.bytes}});
  }
  return {{"precision", to_string(precision)},
          {"stages", stages},
          {"workspace_bytes", layer.workspace_bytes()},
          {"workspace", items}};
}

// What a GPU needs to run the layer, beside what each has.
std::string gpu_verdict(const Machine& gpu) {
  const Status plain = device::runs_plain_kernels(gpu);
  const Status hopper = device::runs_hopper_kernels(gpu);
  if (hopper.is_ok()) return "every stage";
  return plain.is_ok() ? "all but the GEMMs, which need compute capability 9.0 (Hopper)"
                       : "nothing: " + plain.message();
}

Json gpus_json() {
  const Result<std::vector<Machine>> gpus = cuda_machines();
  if (!gpus) return {{"none", gpus.status().message()}};
  Json list = Json::array();
  for (const Machine& gpu : *gpus) {
    list.push_back({{"index", gpu.device.index},
                    {"name", gpu.gpu.name},
                    {"capability", to_string(gpu.gpu.capability)},
                    {"can_run", gpu_verdict(gpu)}});
  }
  return list;
}

void print_devices(const ChosenMachine& chosen, const Machine& host) {
  fmt::print("CPU: {} threads, {}\n", host.num_threads, host.simd);
  if (const Result<std::vector<Machine>> gpus = cuda_machines(); !gpus) {
    fmt::print("GPU: none: {}\n", gpus.status().message());
  } else {
    for (const Machine& gpu : *gpus) {
      ChosenMachine one;
      one.machine = gpu;
      fmt::print("{}; runs {}\n", one.describe(), gpu_verdict(gpu));
    }
  }
  fmt::print("device: {}\n", chosen.name());
}

// Stages that gave the same reason share a line, in the order of the stages.
std::vector<std::pair<std::string, Declined>> group_declined(const std::vector<StageReport>& stages) {
  std::vector<std::pair<std::string, Declined>> groups;
  std::vector<std::size_t> sizes;
  for (const StageReport& stage : stages) {
    for (const Declined& d : stage.declined) {
      const auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& g) {
        return g.second.name == d.name && g.second.reason == d.reason;
      });
      if (same == groups.end()) {
        groups.emplace_back(stage.stage, d);
        sizes.push_back(1);
        continue;
      }
      same->first += ", " + stage.stage;
      ++sizes[static_cast<std::size_t>(same - groups.begin())];
    }
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (sizes[i] > 1 && sizes[i] == stages.size()) groups[i].first = "every stage";
  }
  return groups;
}

void print_text(const Layer& layer, Precision precision) {
  fmt::print("\n{}\n", to_string(precision));
  Table stages({{"STAGE"}, {"IMPLEMENTATION"}, {"CONFIGURATION"}, {"SCRATCH", true}});
  for (const StageReport& stage : layer.stages()) {
    stages.add({stage.stage, stage.impl, stage.configuration,
                stage.scratch_bytes > 0 ? format_bytes(stage.scratch_bytes) : "-"});
  }
  stages.print();
  fmt::print("\ntensors\n");
  Table tensors({{"STAGE"}, {"TENSORS"}});
  for (const StageReport& stage : layer.stages()) tensors.add({stage.stage, stage.tensors});
  tensors.print();
  fmt::print("\ndeclined\n");
  Table declined({{"STAGE"}, {"IMPLEMENTATION"}, {"WHY NOT"}});
  for (const auto& [stages_text, d] : group_declined(layer.stages())) declined.add({stages_text, d.name, d.reason});
  if (declined.is_empty()) declined.add({"-", "-", "-"});
  declined.print();
  fmt::print("\nworkspace: {} ({} B)\n", format_bytes(layer.workspace_bytes()), format_count(layer.workspace_bytes()));
  Table items({{"OFFSET", true}, {"BYTES", true}, {"ITEM"}});
  for (const WorkspaceItem& item : layer.workspace_items()) {
    items.add({format_count(item.offset_bytes), format_count(item.bytes), item.name});
  }
  items.print();
}

Outcome explain(const ExplainOptions& options, bool json) {
  Result<std::map<std::string, Selection>> selection = parse_selection(options.machine.impl);
  if (!selection) return Outcome::usage(selection.status().message());
  Result<std::vector<Precision>> asked = parse_precisions(options.precision);
  if (!asked) return Outcome::usage(asked.status().message());
  bool usage = false;
  Result<Subject> subject = find_subject(options.subject, usage);
  if (!subject) return usage ? Outcome::usage(subject.status().message()) : Outcome(subject.status());

  Result<ChosenMachine> chosen = choose_machine(options.machine, usage);
  if (!chosen) return usage ? Outcome::usage(chosen.status().message()) : Outcome(chosen.status());
  const Machine machine = options.machine.host();
  MoeConfig c = subject->config;
  // The first of the ranks has as many experts as any.
  if (options.num_ranks > 1) c.num_local = experts_of_rank(c.num_experts, options.num_ranks, 0).end;
  const std::string legend =
      fmt::format("T={} R=T*S={} E={} S={} H={} I={} shared I={}", options.tokens, options.tokens * c.top_k,
                  c.num_experts, c.top_k, c.hidden, c.intermediate, c.shared_intermediate);
  Json document = {{"subject", subject->title},      {"tokens", options.tokens},       {"simd", machine.simd},
                   {"threads", machine.num_threads}, {"device", device_json(*chosen)}, {"gpus", gpus_json()},
                   {"config", config_json(c)}};
  if (options.num_ranks > 1) {
    document["ranks"] = options.num_ranks;
    document["experts_of_rank_0"] = c.num_local;
  }
  if (!json) {
    if (options.num_ranks > 1) fmt::print("rank 0 of {}: L={} experts\n", options.num_ranks, c.num_local);
    fmt::print("{}: {}\ngate {}; activation {}\n", subject->title, legend, describe(c.gate), describe(c.activation));
    print_devices(*chosen, machine);
  }
  Json& results = document["precisions"] = Json::array();
  const bool all = options.precision == "all";
  const std::vector<Precision> precisions =
      all              ? std::vector<Precision>(std::begin(kAllPrecisions), std::end(kAllPrecisions))
      : asked->empty() ? std::vector<Precision>{subject->default_precision()}
                       : *asked;
  std::size_t num_run = 0;
  for (Precision precision : precisions) {
    if (const Status can = subject->can_run(precision); !can.is_ok()) {
      if (!all) return can;
      results.push_back({{"precision", to_string(precision)}, {"cannot_run", can.message()}});
      if (!json) fmt::print("\n{}: not possible: {}\n", to_string(precision), can.message());
      continue;
    }
    LayerOptions layer_options;
    layer_options.precision = precision;
    layer_options.max_tokens = options.tokens;
    layer_options.routed_only = options.routed_only;
    layer_options.machine = chosen->machine;
    layer_options.selection = *selection;
    layer_options.transport = planned_transport(options.num_ranks);
    Result<Layer> layer = plan_layer(c, subject->experts_for(precision), subject->shared_for(precision), layer_options);
    if (!layer) return layer.status().with_context(std::string(to_string(precision)));
    ++num_run;
    results.push_back(explain_json(*layer, precision));
    if (!json) print_text(*layer, precision);
  }
  if (json) print_json(document);
  return num_run > 0 ? kExitOk : kExitBadInput;
}

}  // namespace

void add_explain(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("explain", kAbout);
  sub->footer(kFooter);
  auto o = std::make_shared<ExplainOptions>();
  add_subject(*sub, o->subject);
  sub->add_option("--tokens", o->tokens, "Largest T the layer is planned for [512]")
      ->check(whole_number(0, 1 << 24))
      ->type_name("T");
  sub->add_option("--precision", o->precision,
                  "all, or a list of w8a8, w8a16, bf16, f32; default: the one `run` would pick")
      ->type_name("LIST");
  sub->add_flag("--routed-only", o->routed_only, "Leave the shared expert out");
  sub->add_option("--ep", o->num_ranks,
                  "Experts spread over P ranks, each with up to T tokens: what the first of them would take [1]")
      ->check(whole_number(1, 4096))
      ->type_name("P");
  add_impl(*sub, o->machine);
  add_device(*sub, o->machine);
  add_threads(*sub, o->machine);
  add_json(*sub, command);
  sub->callback([&command, o] { command.run = [&command, o] { return explain(*o, command.json); }; });
}

}  // namespace sluice::cli
