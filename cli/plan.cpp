// `sluice plan`: what a layer under expert parallelism should take on a machine that need not be here.
#include <fmt/format.h>

#include <algorithm>

#include "commands.h"
#include "io/hf_config.h"
#include "scale/hardware.h"
#include "subject.h"

namespace sluice::cli {

namespace {

constexpr const char* kAbout = R"(Predict time, traffic and memory of a layer under expert parallelism

A model, no measurement: constants of a machine from a hardware file, exact expectations of uniform routing (with the
gate's groups, where it has some), and a time for every phase of one MoE layer. Nothing is run, no weights are read.)";

constexpr const char* kFooter =
    R"(One pair of --ep and --tokens prints phases, links and memory; lists print a line for every pair.
Columns: ROWS, routed rows of the fullest rank; GEMM, the experts' two; SERIAL, all phases one after the other;
2 CHUNKS, two halves of the tokens, the moves of one behind the GEMMs of the other, nothing lost; NVLINK and IB, bytes a GPU sends
in dispatch and combine; MEMORY, weights of the layer, receive buffers and workspace for all T at once ("!": more than
the GPU has); TOK/S/GPU, through this one layer at the shorter time; LIMIT, of the longest phase.
T is per rank; with --tp N a rank is N GPUs that share every expert. EP counts ranks. --slots gives physical expert
slots (E and replicas), taken as equally loaded. What is assumed is written in docs/scaling.md, and the sources of the
constants are in the file and in --json.

Examples:
  sluice plan --hardware data/hardware/h200-nvlink8-ib400.json --like deepseek-v3 --ep 8 --tokens 4096
  sluice plan --hardware data/hardware/h200-nvlink8-ib400.json --like deepseek-v3 --ep 8,16,64,256 --tokens 128,4096
  sluice plan --hardware data/hardware/h100-nvlink8-ib400.json --like deepseek-v3 --ep 320 --slots 320 --tokens 128
)";

struct PlanOptions {
  SubjectOptions subject;
  std::string hardware;
  std::string ep;
  std::string tokens;
  std::string precision;
  std::int64_t tensor_parallel = 1;
  std::int64_t num_slots = 0;
  bool ungrouped = false;
  bool routed_only = false;
};

struct Planned {
  scale::Request request;
  scale::Prediction prediction;
};

std::string time_text(double us) { return format_seconds(us * 1e-6); }
std::string bytes_text(double bytes) { return format_bytes(static_cast<std::int64_t>(bytes + 0.5)); }

Json links_json(const scale::Links& links) {
  return {{"gpu", links.gpu}, {"nvlink", links.nvlink}, {"infiniband", links.nic}};
}

Json move_json(const scale::Move& move) {
  return {{"us", move.us},
          {"limit", move.limit},
          {"sent_bytes", links_json(move.mean.out)},
          {"received_bytes", links_json(move.mean.in)}};
}

Json planned_json(const Planned& planned) {
  const scale::Request& r = planned.request;
  const scale::Prediction& p = planned.prediction;
  Json phases = Json::array();
  for (const scale::Phase& phase : p.phases) {
    phases.push_back({{"phase", phase.name}, {"us", phase.us}, {"limit", phase.limit}});
  }
  return {{"ep", r.num_ranks},
          {"tp", r.tensor_parallel},
          {"gpus", r.num_ranks * r.tensor_parallel},
          {"tokens", r.tokens},
          {"slots", r.num_slots == 0 ? r.config.num_experts : r.num_slots},
          {"row_bytes", p.row_bytes},
          {"ranks_per_token", p.ranks_per_token},
          {"domains_per_token", p.domains_per_token},
          {"rows_mean", p.rows_mean},
          {"rows_max", p.rows_max},
          {"active_experts", p.active_experts},
          {"phases", phases},
          {"dispatch", move_json(p.dispatch)},
          {"dispatch_forwarded", move_json(p.dispatch_forwarded)},
          {"combine", move_json(p.combine)},
          {"combine_partial", move_json(p.combine_partial)},
          {"combine_forwarded", move_json(p.combine_forwarded)},
          {"gemm_us", p.gemm_us},
          {"serial_us", p.serial_us},
          {"overlapped_us", p.overlapped_us},
          {"tokens_per_s_per_gpu", p.tokens_per_s},
          {"memory_bytes",
           {{"weights", p.memory.weights},
            {"receive", p.memory.receive},
            {"returned", p.memory.returned},
            {"workspace", p.memory.workspace},
            {"total", p.memory.total()}}},
          {"fits", p.fits},
          {"largest_round", p.largest_round}};
}

const scale::Phase& longest(const scale::Prediction& p) {
  return *std::max_element(p.phases.begin(), p.phases.end(), [](const auto& a, const auto& b) { return a.us < b.us; });
}

void print_sweep(const std::vector<Planned>& all) {
  Table table({{"EP", true},
               {"T", true},
               {"ROWS", true},
               {"DISPATCH", true},
               {"GEMM", true},
               {"COMBINE", true},
               {"SERIAL", true},
               {"2 CHUNKS", true},
               {"NVLINK", true},
               {"IB", true},
               {"MEMORY", true},
               {"TOK/S/GPU", true},
               {"LIMIT"}});
  for (const auto& [r, p] : all) {
    const double nvlink = p.dispatch.mean.out.nvlink + p.combine.mean.out.nvlink;
    const double nic = p.dispatch.mean.out.nic + p.combine.mean.out.nic;
    table.add({fmt::format("{}", r.num_ranks), fmt::format("{}", r.tokens), fmt::format("{:.0f}", p.rows_max),
               time_text(p.dispatch.us), time_text(p.gemm_us), time_text(p.combine.us), time_text(p.serial_us),
               time_text(p.overlapped_us), bytes_text(nvlink), bytes_text(nic),
               bytes_text(p.memory.total()) + (p.fits ? "" : " !"), format_count(std::int64_t(p.tokens_per_s)),
               std::string(longest(p).limit)});
  }
  table.print();
}

void print_one(const scale::HardwareFile& file, const Planned& planned) {
  const auto& [r, p] = planned;
  fmt::print(
      "a token's row {} B; on {:.2f} ranks in {:.2f} NVLink domains; {:.0f} rows a rank, {:.0f} on the fullest, for "
      "{:.1f} experts\n\n",
      p.row_bytes, p.ranks_per_token, p.domains_per_token, p.rows_mean, p.rows_max, p.active_experts);
  Table phases({{"PHASE"}, {"TIME", true}, {"SHARE", true}, {"LIMIT"}});
  for (const scale::Phase& phase : p.phases) {
    if (phase.us <= 0) continue;
    phases.add({std::string(phase.name), time_text(phase.us), fmt::format("{:.0f} %", 100 * phase.us / p.serial_us),
                std::string(phase.limit)});
  }
  phases.add({"all, one after the other", time_text(p.serial_us), "", ""});
  phases.add({"two chunks, overlapped", time_text(p.overlapped_us), "", ""});
  phases.print();

  fmt::print("\na GPU sends, on average\n");
  Table links({{"MOVE"}, {"TIME", true}, {"ITSELF", true}, {"NVLINK", true}, {"INFINIBAND", true}, {"LIMIT"}});
  const auto add = [&](const char* name, const scale::Move& m) {
    links.add({name, time_text(m.us), bytes_text(m.mean.out.gpu), bytes_text(m.mean.out.nvlink),
               bytes_text(m.mean.out.nic), std::string(m.limit)});
  };
  add("dispatch: a row a (token, rank)", p.dispatch);
  add("combine: a row a (token, slot)", p.combine);
  add("instead: dispatch, a row a (token, domain)", p.dispatch_forwarded);
  add("instead: combine, a sum a (token, rank)", p.combine_partial);
  add("instead: combine, a sum a (token, domain)", p.combine_forwarded);
  links.print();

  fmt::print("\nmemory of a GPU: {} of {}{}\n", bytes_text(p.memory.total()), bytes_text(file.hardware.memory_gb * 1e9),
             p.fits ? "" : ": it does not fit");
  Table memory({{"ITEM"}, {"BYTES", true}});
  memory.add({"weights of the layer", bytes_text(p.memory.weights)});
  memory.add({"rows received: P * T * row", bytes_text(p.memory.receive)});
  memory.add({"results returned: T * S * H", bytes_text(p.memory.returned)});
  memory.add({"workspace: P * T * S rows", bytes_text(p.memory.workspace)});
  memory.print();
  fmt::print("largest round of tokens whose buffers fit beside the weights: {}\n", format_count(p.largest_round));
  fmt::print("\n{} tokens/s a GPU through this layer, {}\n", format_count(std::int64_t(p.tokens_per_s)),
             p.overlapped_us < p.serial_us ? "in two chunks" : "in one chunk");
}

// Sizes of a preset go with either precision; a checkpoint's weights are what they are.
Result<scale::Request> request_of(const Subject& subject, Precision precision) {
  scale::Request request;
  request.config = subject.config;
  request.precision = precision;
  const WeightForm form = subject.experts_for(precision);
  request.weight = form.dtype;
  request.row_scales = form.row_scales;
  if (!subject.model && precision == Precision::kW8A8 && !is_quantised(form.dtype)) request.weight = DType::kE4M3;
  if (const auto path = data_path(precision, request.weight, request.row_scales); !path) return path.status();
  return request;
}

Outcome plan(const PlanOptions& options, bool json) {
  bool usage = false;
  const auto eps = parse_counts("--ep", options.ep, 1, 4096);
  if (!eps) return Outcome::usage(eps.status().message());
  const auto tokens = parse_tokens(options.tokens, 1);
  if (!tokens) return Outcome::usage(tokens.status().message());
  Result<Subject> subject = find_subject(options.subject, usage);
  if (!subject) return usage ? Outcome::usage(subject.status().message()) : Outcome(subject.status());
  Precision precision = subject->default_precision();
  if (!options.precision.empty()) {
    const Result<Precision> asked = parse_one_precision(options.precision);
    if (!asked) return Outcome::usage(asked.status().message());
    precision = *asked;
  }
  const auto root = io::read_json(options.hardware);
  if (!root) return root.status();
  const Result<scale::HardwareFile> file = scale::parse_hardware(*root, options.hardware);
  if (!file) return file.status();
  Result<scale::Request> request = request_of(*subject, precision);
  if (!request) return request.status();
  request->tensor_parallel = options.tensor_parallel;
  request->num_slots = options.num_slots;
  if (options.routed_only) {
    request->config.shared_intermediate = 0;
    request->config.has_shared_gate = false;
  }
  if (options.ungrouped) {
    request->config.gate.n_group = request->config.gate.topk_group = 1;
    request->config.gate.group_score = GroupScore::kNone;
  }

  std::vector<Planned> all;
  for (const std::int64_t ep : *eps) {
    for (const std::int64_t t : *tokens) {
      request->num_ranks = ep;
      request->tokens = t;
      const Result<scale::Prediction> prediction = scale::predict(file->hardware, *request);
      if (!prediction) return prediction.status().with_context(fmt::format("EP {}, T {}", ep, t));
      all.push_back({*request, *prediction});
    }
  }
  const MoeConfig& c = request->config;
  if (json) {
    Json sources = Json::array(), predictions = Json::array();
    for (const scale::Source& s : file->sources) {
      sources.push_back({{"field", s.field}, {"value", Json::parse(s.value)}, {"source", s.source}});
    }
    for (const Planned& planned : all) predictions.push_back(planned_json(planned));
    print_json({{"hardware", file->hardware.name},
                {"constants", sources},
                {"subject", subject->title},
                {"precision", to_string(precision)},
                {"config", config_json(c)},
                {"predictions", predictions}});
    return kExitOk;
  }
  fmt::print("{}: E={} S={} H={} I={} shared I={}, gate {}; {}\non {}; predicted, not measured\n", subject->title,
             c.num_experts, c.top_k, c.hidden, c.intermediate, c.shared_intermediate, describe(c.gate),
             to_string(precision), file->hardware.name);
  const std::string more = (options.tensor_parallel > 1 ? fmt::format(", TP {}", options.tensor_parallel) : "") +
                           (options.num_slots > 0 ? fmt::format(", {} expert slots", options.num_slots) : "");
  if (all.size() == 1) {
    fmt::print("EP {}{}, T = {} a rank: ", all[0].request.num_ranks, more, all[0].request.tokens);
    print_one(*file, all[0]);
  } else {
    if (!more.empty()) fmt::print("{}\n", more.substr(2));
    fmt::print("\n");
    print_sweep(all);
  }
  return kExitOk;
}

}  // namespace

void add_plan(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("plan", kAbout);
  sub->footer(kFooter);
  auto o = std::make_shared<PlanOptions>();
  sub->add_option("--hardware", o->hardware, "Hardware file, as in data/hardware")->required()->type_name("FILE");
  add_subject(*sub, o->subject);
  sub->add_option("--ep", o->ep, "Ranks the experts are spread over, e.g. 8,16,32")->required()->type_name("LIST");
  sub->add_option("--tokens", o->tokens, "T of a rank, e.g. 128,4096")->required()->type_name("LIST");
  sub->add_option("--tp", o->tensor_parallel, "GPUs of a rank, each with I / N of every expert [1]")
      ->check(whole_number(1, 4096))
      ->type_name("N");
  sub->add_option("--slots", o->num_slots, "Physical expert slots, replicas included [E]")
      ->check(whole_number(1, 65536))
      ->type_name("N");
  sub->add_option("--precision", o->precision, "w8a8 or bf16; default: the one `run` would pick")
      ->type_name("PRECISION");
  sub->add_flag("--ungrouped", o->ungrouped, "Route as if the gate had no groups");
  sub->add_flag("--routed-only", o->routed_only, "Leave the shared expert out");
  add_json(*sub, command);
  sub->callback([&command, o] { command.run = [&command, o] { return plan(*o, command.json); }; });
}

}  // namespace sluice::cli
