// `sluice eplb`: plans which rank holds which experts, from recorded loads.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "commands.h"
#include "expert_load.h"
#include "options.h"

namespace sluice::cli {

namespace {

constexpr const char* kAbout = R"(Plan which rank holds which experts, from recorded loads

Reads how many tokens each expert got, gives replicas to the experts with the most work, spreads all of them over the
ranks, and prints how even the work is before (the balanced split, one slot an expert) and after. The replicas of an
expert share its tokens. Nothing is run; what a token gets does not depend on the placement.)";

constexpr const char* kFooter =
    R"(Loads come from `sluice run --record-load`, or from any program as JSON of that form or as a .npy array
[layers, experts] of counts (layers numbered from 0). Several --load are put together; a layer that is in more than one
gets the sum.

With --nodes K and --groups G, where K divides G, the experts of a group (neighbours, as in the gate's groups) stay on
one node, and replicas inside it; otherwise nodes and groups have no part in the plan. Ranks of a node are neighbours.

Columns: TOKENS of the layer, counted once an expert; BEFORE and AFTER tokens of the hottest rank over the mean of all
ranks (1.00 is even), each with that RANK; REPLICAS slots of the five hottest experts, as expert:slots.

The file of --out appears whole or not at all; an existing one is replaced only when it is a placement.

Examples:
  sluice run --model data/tiny-dsv3 --layer 1 --input data/tiny-dsv3/golden.safetensors:layer1.x --output y.safetensors \
             --record-load load.json
  sluice eplb --load load.json --ranks 4 --slots 40
  sluice eplb --load load.json --ranks 4 --redundant 8 --nodes 2 --groups 4 --out placement.json
)";

struct EplbOptions {
  std::vector<std::string> loads;
  PlacementRequest request;
  std::optional<std::int64_t> layer;
  std::string out;
};

struct PlannedLayer {
  std::int64_t layer = 0;
  std::span<const double> load;
  Placement placement;
  RankBalance before, after;
};

struct HotExpert {
  std::int64_t expert = 0;
  double tokens = 0;
  std::int64_t replicas = 0;
};

std::vector<HotExpert> hottest_experts(const PlannedLayer& layer) {
  constexpr std::int64_t kShown = 5;
  std::vector<HotExpert> experts;
  for (const double tokens : layer.load) experts.push_back({std::ssize(experts), tokens, 0});
  for (const std::int32_t expert : layer.placement.slot_expert) ++experts[static_cast<std::size_t>(expert)].replicas;
  std::stable_sort(experts.begin(), experts.end(),
                   [](const HotExpert& a, const HotExpert& b) { return a.tokens > b.tokens; });
  experts.resize(static_cast<std::size_t>(std::min(kShown, std::ssize(experts))));
  return experts;
}

double sum_of(std::span<const double> load) { return std::accumulate(load.begin(), load.end(), 0.0); }

Result<ExpertLoads> read_all(const std::vector<std::string>& files) {
  ExpertLoads loads;
  for (const std::string& file : files) {
    const Result<ExpertLoads> more = read_loads(file);
    if (!more) return more.status();
    if (!loads.layers.empty() && more->num_experts != loads.num_experts) {
      return Status(StatusCode::kBadData, fmt::format("{}: {} experts, but {} has {}", file, more->num_experts,
                                                      files.front(), loads.num_experts));
    }
    SLUICE_TRY(merge(loads, *more).with_context(file));
  }
  return loads;
}

Json balance_json(const RankBalance& balance) {
  return {{"max_rank_tokens", balance.max},
          {"max_over_mean", balance.max_over_mean()},
          {"hottest_rank", balance.hottest_rank}};
}

Json layer_json(const PlannedLayer& layer) {
  Json hot = Json::array();
  for (const HotExpert& expert : hottest_experts(layer))
    hot.push_back({{"expert", expert.expert}, {"tokens", expert.tokens}, {"replicas", expert.replicas}});
  Json ranks = Json::array();
  const Placement& p = layer.placement;
  for (std::int64_t rank = 0; rank < p.num_ranks(); ++rank) ranks.push_back(p.experts_of(rank));
  return {{"layer", layer.layer},
          {"tokens", sum_of(layer.load)},
          {"mean_rank_tokens", layer.after.mean},
          {"before", balance_json(layer.before)},
          {"after", balance_json(layer.after)},
          {"hottest_experts", hot},
          {"ranks", ranks}};
}

void print_text(const EplbOptions& options, std::int64_t num_experts, const std::vector<PlannedLayer>& layers) {
  const PlacementRequest& request = options.request;
  const std::int64_t num_slots = layers.front().placement.num_slots();
  fmt::print("{} {} of {} experts from {}\n", layers.size(), layers.size() == 1 ? "layer" : "layers", num_experts,
             fmt::join(options.loads, ", "));
  fmt::print("{} slots, {} of them redundant, on {} ranks{}\n", num_slots, num_slots - num_experts, request.num_ranks,
             is_hierarchical(request)
                 ? fmt::format(" of {} nodes; {} groups, whole on their node", request.num_nodes, request.num_groups)
             : request.num_nodes > 1
                 ? fmt::format("; {} nodes do not divide {} groups, so neither has a part in the plan",
                               request.num_nodes, request.num_groups)
                 : "");
  fmt::print(
      "BEFORE, AFTER: tokens of the hottest rank over the mean of all ranks, and that RANK; REPLICAS: "
      "expert:slots\n\n");
  Table table({{"LAYER", true},
               {"TOKENS", true},
               {"BEFORE", true},
               {"RANK", true},
               {"AFTER", true},
               {"RANK", true},
               {"REPLICAS OF THE HOTTEST EXPERTS"}});
  for (const PlannedLayer& layer : layers) {
    std::vector<std::string> hot;
    for (const HotExpert& expert : hottest_experts(layer))
      hot.push_back(fmt::format("{}:{}", expert.expert, expert.replicas));
    table.add({fmt::format("{}", layer.layer), format_count(static_cast<std::int64_t>(sum_of(layer.load))),
               fmt::format("{:.2f}", layer.before.max_over_mean()), fmt::format("{}", layer.before.hottest_rank),
               fmt::format("{:.2f}", layer.after.max_over_mean()), fmt::format("{}", layer.after.hottest_rank),
               fmt::format("{}", fmt::join(hot, " "))});
  }
  table.print();
  if (!options.out.empty()) fmt::print("\n{}: the placement of {} layers\n", options.out, layers.size());
}

Outcome eplb(const EplbOptions& options, bool json) {
  if (!options.out.empty()) {
    if (const Status s = check_json_output("--out", options.out, is_placement_file); !s.is_ok())
      return Outcome::usage(s.message());
  }
  const Result<ExpertLoads> loads = read_all(options.loads);
  if (!loads) return loads.status();
  std::vector<PlannedLayer> layers;
  std::vector<LayerPlacement> placements;
  for (std::size_t i = 0; i < loads->layers.size(); ++i) {
    if (options.layer && loads->layers[i] != *options.layer) continue;
    PlannedLayer& layer = layers.emplace_back();
    layer.layer = loads->layers[i];
    layer.load = loads->of(i);
    Result<Placement> placement = plan_placement(layer.load, options.request);
    if (!placement) return Outcome::usage(placement.status().message());  // the loads were judged when they were read
    layer.placement = std::move(*placement);
    Result<RankBalance> before =
        balance_of(balanced_placement(loads->num_experts, options.request.num_ranks), layer.load);
    Result<RankBalance> after = balance_of(layer.placement, layer.load);
    if (!before || !after) return before ? after.status() : before.status();
    layer.before = std::move(*before);
    layer.after = std::move(*after);
    placements.push_back({layer.layer, layer.placement});
  }
  if (layers.empty()) {
    return Status(StatusCode::kNotFound, fmt::format("--layer {}: no load of that layer; there are {}", *options.layer,
                                                     format_ranges(loads->layers)));
  }
  if (!options.out.empty()) SLUICE_TRY(write_placements(options.out, placements));
  if (!json) {
    print_text(options, loads->num_experts, layers);
    return kExitOk;
  }
  const std::int64_t num_slots = layers.front().placement.num_slots();
  Json document = {{"loads", options.loads},
                   {"num_experts", loads->num_experts},
                   {"num_ranks", options.request.num_ranks},
                   {"num_slots", num_slots},
                   {"num_redundant", num_slots - loads->num_experts},
                   {"num_nodes", options.request.num_nodes},
                   {"num_groups", options.request.num_groups},
                   {"hierarchical", is_hierarchical(options.request)}};
  if (!options.out.empty()) document["out"] = options.out;
  Json& rows = document["layers"] = Json::array();
  for (const PlannedLayer& layer : layers) rows.push_back(layer_json(layer));
  print_json(document);
  return kExitOk;
}

}  // namespace

void add_eplb(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("eplb", kAbout);
  sub->footer(kFooter);
  auto o = std::make_shared<EplbOptions>();
  const auto count = [&](const char* name, auto& value, const char* what, const char* type, std::int64_t low) {
    return sub->add_option(name, value, what)->check(whole_number(low, kMaxPlacementSlots))->type_name(type);
  };
  sub->add_option("--load", o->loads, "Recorded loads, .json or .npy; may be repeated")
      ->required()
      ->allow_extra_args(false)
      ->type_name("FILE");
  count("--ranks", o->request.num_ranks, "Ranks that share the experts", "P", 1)->required();
  count("--slots", o->request.num_slots, "Slots for experts on all ranks together; default: one an expert", "N", 1);
  count("--redundant", o->request.num_redundant, "The same, said as slots beyond one an expert", "R", 0);
  count("--nodes", o->request.num_nodes, "Nodes the ranks are on [1]", "K", 1);
  count("--groups", o->request.num_groups, "Groups of experts that stay on one node [1]", "G", 1);
  sub->add_option("--layer", o->layer, "Plan this layer alone")->check(whole_number(0, INT64_MAX))->type_name("L");
  sub->add_option("--out", o->out, "File for the placement, named *.json")->type_name("FILE");
  add_json(*sub, command);
  sub->callback([&command, o] { command.run = [&command, o] { return eplb(*o, command.json); }; });
}

}  // namespace sluice::cli
