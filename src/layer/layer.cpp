// Layer::create: everything is judged, booked and resolved here, so that forward only runs.
#include "sluice/layer.h"

#include <fmt/format.h>

#include <algorithm>

#include "device/device.h"
#include "layer/agree.h"
#include "layer/call.h"
#include "layer/place.h"
#include "layer/resolve.h"
#include "layer/tensors.h"

namespace sluice {
namespace {

template <class Args>
Status resolve(Layer::State& s, std::string_view role, std::string_view stage, std::span<const Impl<Args>> table,
               const Args& args, std::string tensors, Stage<Args>& resolved) {
  Result<const Impl<Args>*> impl = resolve_row(s, role, stage, table, args, std::move(tensors));
  if (!impl) return impl.status();
  resolved.impl = *impl;
  return Status::ok();
}

// One dtype of a stage that touches the caller's tensor, and what stands by for awkward places on a GPU.
template <class Args>
void resolve_choice(Layer::State& s, std::string_view role, std::string_view stage, std::span<const Impl<Args>> table,
                    const Args& args, std::string tensors, typename CallerStage<Args>::Choice& choice) {
  Result<const Impl<Args>*> impl = resolve_row(s, role, stage, table, args, std::move(tensors));
  choice.refusal = impl.status();
  if (!impl) return;
  choice.impl = *impl;
  Selection others = selection_for(s.options.selection, stage);
  if (s.device().kind != DeviceKind::kCuda || !others.forced.empty()) return;
  others.disabled.emplace_back(choice.impl->name);
  const Result<Choice<Args>> next = choose(stage, table, args, s.options.machine, others);
  if (!next) return;
  choice.stand_by = next->impl;
  if (choice.stand_by->scratch_bytes != nullptr)
    s.scratch_bytes = std::max(s.scratch_bytes, choice.stand_by->scratch_bytes(args, s.options.machine));
  std::string& configuration = s.reports.back().configuration;
  configuration += fmt::format("{}{} where it cannot take a tensor's address or stride",
                               configuration.empty() ? "" : "; ", choice.stand_by->name);
}

// For each dtype the caller's tensor (`of` args) may have. The first is the planned one and must be served; another gets a
// line of its own in the report when its implementation differs, and a refusal kept for the call when there is none.
template <class Args>
Status resolve(Layer::State& s, std::string_view role, std::string_view stage, std::span<const Impl<Args>> table,
               Args args, TensorView Args::*of, std::initializer_list<DType> dtypes, std::string tensors,
               CallerStage<Args>& resolved) {
  resolved.machine = &s.options.machine;
  const Impl<Args>* planned = nullptr;
  for (DType dtype : dtypes) {
    (args.*of).dtype = dtype;
    const std::string as = planned == nullptr ? std::string(role) : fmt::format("{} ({})", role, to_string(dtype));
    typename CallerStage<Args>::Choice& choice = resolved.of(dtype);
    resolve_choice(s, as, stage, table, args, planned == nullptr ? tensors : "", choice);
    if (planned == nullptr) SLUICE_TRY(choice.refusal);
    if (choice.impl == nullptr) continue;
    if (choice.impl == planned) s.reports.pop_back();
    if (planned == nullptr) planned = choice.impl;
  }
  return Status::ok();
}

std::string gemm_text(const grouped_gemm::Args& a) {
  return fmt::format("a {}, w {} -> {}", a.a.to_string(), a.w.to_string(), a.out.to_string());
}

std::string scale_text(const TensorView& quantised, ScaleFormat format, bool row_scales) {
  if (!is_quantised(quantised.dtype)) return "";
  return fmt::format(", scales {}{}", to_string(format), row_scales ? ", one a row" : "");
}

// One kernel in place of two stages, where `table` has one that can run; null: the two stages. `displaced` says why it would
// have other bits than what the two resolved to, "" where it has theirs: whoever forces or disables one of them gets what was
// asked for. The report goes before what is reported from `at` on; on a CPU there is no such kernel, and nothing to say.
template <class Args>
Result<const Impl<Args>*> resolve_fused(Layer::State& s, std::string_view role, std::string_view stage,
                                        std::span<const Impl<Args>> table, const Args& args, std::string tensors,
                                        const std::string& displaced, std::size_t at) {
  Selection selection = selection_for(s.options.selection, stage);
  const auto is_forced = [&](const Impl<Args>& impl) { return impl.name == selection.forced; };
  // A name forced for all stages that is none here was meant for the two.
  const bool is_own = s.options.selection.count(std::string(stage)) != 0;
  if (!is_own && !selection.forced.empty() && std::none_of(table.begin(), table.end(), is_forced))
    selection.forced = kComposed;
  if (s.device().kind == DeviceKind::kCpu && selection.forced.empty() && selection.disabled.empty()) return nullptr;
  std::vector<Impl<Args>> rows(table.begin(), table.end());
  const bool is_displaced = selection.forced.empty() && !displaced.empty();
  if (is_displaced) rows.clear();
  Impl<Args> composed;
  composed.name = kComposed;
  composed.device = s.device().kind;
  composed.can_run = [](const Args&, const Machine&) { return Status::ok(); };
  rows.push_back(composed);
  Result<Choice<Args>> choice = choose(stage, std::span<const Impl<Args>>(rows), args, s.options.machine, selection);
  if (!choice) return choice.status();
  StageReport report;
  report.stage = fmt::format("{}: {}", role, stage);
  report.impl = std::string(choice->impl->name);
  report.tensors = std::move(tensors);
  report.declined = std::move(choice->declined);
  if (is_displaced) {
    for (const Impl<Args>& impl : table) report.declined.push_back({std::string(impl.name), displaced});
  }
  const auto chosen =
      std::find_if(table.begin(), table.end(), [&](const Impl<Args>& impl) { return impl.name == report.impl; });
  if (chosen != table.end()) report.configuration = chosen->describe(args, s.options.machine);
  if (s.device().kind != DeviceKind::kCpu)
    s.reports.insert(s.reports.begin() + static_cast<std::ptrdiff_t>(at), std::move(report));
  return chosen == table.end() ? nullptr : &*chosen;
}

std::string displaced_text(bool is_displaced, std::string_view first, std::string_view second) {
  return is_displaced ? fmt::format("it would replace other implementations than {} and {}", first, second) : "";
}

Status resolve_up_act(Layer::State& s, std::string_view prefix, const up_swiglu_quant::Args& args, FfnStages& stages,
                      std::size_t at) {
  namespace fused = up_swiglu_quant;
  const std::string_view up = stages.up.impl->name, act = stages.act.impl->name;
  const Result<const Impl<fused::Args>*> chosen = resolve_fused(
      s, fmt::format("{}up+swiglu_quant", prefix), fused::kStage, fused::impls(), args,
      fmt::format("a {}, w {} -> {}", args.up.a.to_string(), args.up.w.to_string(), args.act.a.to_string()),
      displaced_text(!fused::replaces(up, act), up, act), at);
  if (!chosen) return chosen.status();
  if (*chosen == nullptr) return Status::ok();
  stages.up_act.impl = *chosen;
  stages.most_fused_rows = fused::most_rows(args);
  const auto report = s.reports.begin() + static_cast<std::ptrdiff_t>(at);
  if (args.up.a.shape[0] <= stages.most_fused_rows) {
    s.reports.erase(report + 1, report + 3);  // up and act are never run
  } else {
    report->configuration += fmt::format("; for up to {} rows, the two stages beyond", stages.most_fused_rows);
  }
  return Status::ok();
}

Status resolve_route_pack(Layer::State& s, const route_pack::Args& args, std::size_t at) {
  namespace fused = route_pack;
  const std::string_view route = s.route.impl->name, pack = s.routed.pack.of(DType::kBF16).impl->name;
  const Result<const Impl<fused::Args>*> chosen =
      resolve_fused(s, "route+pack", fused::kStage, fused::impls(), args,
                    fmt::format("{} -> {}", args.pack.x.to_string(), args.pack.rows.to_string()),
                    displaced_text(!fused::replaces(route, pack), route, pack), at);
  if (!chosen) return chosen.status();
  s.route_pack.impl = *chosen;
  return Status::ok();
}

Status resolve_ffn(Layer::State& s, std::string_view prefix, const FfnWeights& weights, const FfnBuffers& b,
                   const RowGroups& groups, const pack::Args& pack, FfnStages& stages) {
  const auto up = up_args(weights, b, groups);
  const auto act = act_args(s, b, groups);
  const auto down = down_args(weights, b, groups);
  const bool row_scales = has_row_scales(weights);
  SLUICE_TRY(resolve(s, fmt::format("{}pack", prefix), "pack", pack::impls(), pack, &pack::Args::x,
                     {DType::kBF16, DType::kF32},
                     fmt::format("x {} -> {}{}", pack.x.to_string(), pack.rows.to_string(),
                                 scale_text(pack.rows, pack.scale_format, row_scales)),
                     stages.pack));
  const std::size_t first_report = s.reports.size();
  SLUICE_TRY(
      resolve(s, fmt::format("{}up", prefix), "grouped_gemm", grouped_gemm::impls(), up, gemm_text(up), stages.up));
  SLUICE_TRY(resolve(s, fmt::format("{}swiglu_quant", prefix), "swiglu_quant", swiglu_quant::impls(), act,
                     fmt::format("h {} -> {}{}; {}", act.h.to_string(), act.a.to_string(),
                                 scale_text(act.a, act.scale_format, row_scales), describe(act.activation)),
                     stages.act));
  SLUICE_TRY(resolve_up_act(s, prefix, {up, act}, stages, first_report));
  return resolve(s, fmt::format("{}down", prefix), "grouped_gemm", grouped_gemm::impls(), down, gemm_text(down),
                 stages.down);
}

// Pack for what callers bring in other forms: tokens quantised already, and rows they have grouped. Reported only where the
// implementation is not the one that packs tokens.
Status resolve_brought_rows(Layer::State& s, const Buffers& b, pack::Args tokens) {
  const std::size_t num_reports = s.reports.size();
  const Rows& rows = b.routed.rows;
  const auto scale_of = [&](const TensorView& x) {
    return TensorView::dense(nullptr, DType::kF32, {rows.scale.shape[0], x.shape[0]}, s.device());
  };
  if (rows.scale.is_present()) {
    tokens.x.dtype = s.path.rows;
    tokens.x_scale = scale_of(tokens.x);
    resolve_choice(s, "pack of quantised x", "pack", pack::impls(), tokens, tokens.x.to_string(),
                   s.routed.pack.of(s.path.rows));
  }
  const RowGroups groups = RowGroups::contiguous(b.plan.expert_offset);
  TensorView x = rows.data;
  x.dtype = DType::kBF16;
  pack::Args grouped = whole_pack_args(s, rows, x, groups);
  SLUICE_TRY(resolve(s, "pack of grouped rows", "pack", pack::impls(), grouped, &pack::Args::x,
                     {DType::kBF16, DType::kF32}, grouped.rows.to_string(), s.group_pack));
  if (rows.scale.is_present()) {
    grouped.x = rows.data;
    grouped.x_scale = scale_of(grouped.x);
    resolve_choice(s, "pack of quantised rows", "pack", pack::impls(), grouped, grouped.x.to_string(),
                   s.group_pack.of(s.path.rows));
  }
  const std::string_view usual = s.routed.pack.of(DType::kBF16).impl->name;
  const auto is_usual = [&](const StageReport& report) { return report.impl == usual; };
  s.reports.erase(
      std::remove_if(s.reports.begin() + static_cast<std::ptrdiff_t>(num_reports), s.reports.end(), is_usual),
      s.reports.end());
  return Status::ok();
}

// One run of kernels for few tokens, where the two stages resolved to those whose bits it has: whoever forces or disables
// one of them gets what was asked for.
void resolve_logits_and_select(Layer::State& s, gate::BothArgs args) {
  if (!gate::both_replaces(s.logits.of(DType::kBF16).impl->name, s.select.impl->name)) return;
  const std::int64_t most = std::min(s.options.max_tokens, gate::kMostTokensOfBoth);
  for (TensorView* view : {&args.logits.x, &args.logits.logits, &args.select.logits, &args.select.topk_idx.view,
                           &args.select.topk_weight}) {
    view->shape[0] = most;
  }
  for (const Impl<gate::BothArgs>& impl : gate::both_impls()) {
    if (!impl.can_run(args, s.options.machine).is_ok()) continue;
    s.logits_and_select.impl = &impl;
    s.scratch_bytes = std::max(s.scratch_bytes, impl.scratch_bytes(args, s.options.machine));
    StageReport& select = s.reports.back();
    select.configuration += fmt::format("{}up to T = {} it adds up the sums of the router GEMM itself",
                                        select.configuration.empty() ? "" : "; ", most);
    return;
  }
}

Status resolve_all(Layer::State& s) {
  const std::int64_t tokens = s.options.max_tokens;
  Arena plan(nullptr, s.options.machine.device);
  // Views to plan with: of a spread layer, whose rounds are smaller, they are larger than what a call lays out.
  const Buffers b = lay_out(s, plan, tokens, std::max(s.max_rows(), tokens * s.config.top_k));
  const TensorView x = TensorView::dense(nullptr, DType::kBF16, {tokens, s.config.hidden}, s.options.machine.device);
  const TensorView out = TensorView::dense(nullptr, DType::kF32, {tokens, s.config.hidden}, s.options.machine.device);

  const auto logits = logits_args(s, b, x);
  SLUICE_TRY(resolve(
      s, "gate.logits", "gate.logits", gate::logits_impls(), logits, &gate::LogitsArgs::x, {DType::kBF16, DType::kF32},
      fmt::format("x {}, w_gate {} -> {}", x.to_string(), logits.w_gate.to_string(), b.logits.to_string()), s.logits));
  SLUICE_TRY(
      resolve(s, "gate.select", "gate.select", gate::select_impls(), select_args(s, b, {}),
              fmt::format("{}; {} -> {}", describe(s.config.gate), b.logits.to_string(), b.topk_idx.view.to_string()),
              s.select));
  resolve_logits_and_select(s, {logits, select_args(s, b, {})});
  const std::size_t route_report = s.reports.size();
  SLUICE_TRY(resolve(s, "route", "route", route::impls(), route_args(s, b, {}),
                     fmt::format("{} -> {}", b.topk_idx.view.to_string(), b.plan.row_token.to_string()), s.route));

  // The pack of a plan covers T*S rows; the buffers may hold more for the entry points that bring rows.
  auto pack = pack_args(s, b, x, {});
  pack.rows = pack.rows.slice(0, tokens * s.config.top_k);
  if (pack.rows_scale.is_present()) pack.rows_scale.shape[1] = tokens * s.config.top_k;
  SLUICE_TRY(
      resolve_ffn(s, "", s.weights.experts, b.routed, RowGroups::contiguous(b.plan.expert_offset), pack, s.routed));
  SLUICE_TRY(resolve_route_pack(s, {route_args(s, b, {}), pack}, route_report));
  SLUICE_TRY(resolve_brought_rows(s, b, pack));

  if (s.has_shared()) {
    SLUICE_TRY(resolve_ffn(s, "shared ", s.weights.shared, b.shared, RowGroups::whole(),
                           whole_pack_args(s, b.shared.rows, x, RowGroups::whole()), s.shared));
    if (s.config.has_shared_gate) {
      const auto args = shared_logits_args(s, b, x);
      SLUICE_TRY(resolve(s, "shared gate", "gate.logits", gate::logits_impls(), args, &gate::LogitsArgs::x,
                         {DType::kBF16, DType::kF32},
                         fmt::format("w {} -> {}", args.w_gate.to_string(), args.logits.to_string()), s.shared_logits));
    }
  }
  return resolve(s, "combine", "combine", combine::impls(), combine_args(s, b, b.routed.y, out), &combine::Args::out,
                 {DType::kF32, DType::kBF16}, fmt::format("y {} -> {}", b.routed.y.to_string(), out.to_string()),
                 s.combine);
}

// A group of ranks far beyond any cluster: its tables would be all that is ever made.
constexpr std::int64_t kMaxRanks = 65536;

Status check_group(std::string_view name, const Transport& group) {
  const std::int64_t ranks = group.num_ranks(), rank = group.rank();
  if (ranks < 1 || ranks > kMaxRanks) {
    return {StatusCode::kInvalidArgument,
            fmt::format("options: {} has {} ranks, expected 1 to {}", name, ranks, kMaxRanks)};
  }
  if (rank >= 0 && rank < ranks) return Status::ok();
  return {StatusCode::kInvalidArgument, fmt::format("options: {} is rank {} of {}", name, rank, ranks)};
}

// What every rank refuses alike, before any of them tells the others anything.
Status check_groups(const LayerOptions& o) {
  const auto refuse = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, "options: " + std::move(text));
  };
  if (o.transport == nullptr) return refuse("transport is null");
  SLUICE_TRY(check_group("transport", *o.transport));
  if (o.tensor_transport == nullptr) return Status::ok();
  SLUICE_TRY(check_group("tensor_transport", *o.tensor_transport));
  if (o.tensor_transport != o.transport || o.transport->num_ranks() == 1) return Status::ok();
  return refuse(
      fmt::format("transport and tensor_transport are one group of {} ranks; experts are spread over one group, "
                  "I is cut over another",
                  o.transport->num_ranks()));
}

// The threading library ends the process when it cannot start a thread, so absurd counts must not reach it.
constexpr int kMaxThreads = 4096;

Status check_options(const LayerOptions& o) {
  const auto refuse = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, "options: " + std::move(text));
  };
  for (const auto& [value, name] :
       {std::pair(o.max_tokens, "max_tokens"), std::pair(o.max_rows, "max_rows"),
        std::pair(o.max_rows_per_expert, "max_rows_per_expert"), std::pair(o.max_round_tokens, "max_round_tokens")}) {
    if (value < 0) return refuse(fmt::format("{} = {} is negative", name, value));
    // Before they are multiplied by S or L; row numbers are i32 in any case.
    if (value > INT32_MAX) return refuse(fmt::format("{} = {} is more than 2^31-1", name, value));
  }
  if (o.round_bytes < 0) return refuse(fmt::format("round_bytes = {} is negative", o.round_bytes));
  if (o.machine.num_threads < 1 || o.machine.num_threads > kMaxThreads) {
    return refuse(fmt::format("machine.num_threads = {} is not between 1 and {}", o.machine.num_threads, kMaxThreads));
  }
  SLUICE_TRY(check_groups(o));
  if (o.machine.device.kind == DeviceKind::kCuda) {
    if (o.checked) {
      return refuse(fmt::format(
          "checked needs the host to read ids and offsets, which would synchronise every forward on GPU {}; "
          "without it invalid ids are counted (Counter::kInvalidIds) and offsets clamped",
          o.machine.device.index));
    }
    if (!o.plan_only) {
      if (Result<Machine> found = Machine::detect_cuda(o.machine.device.index); !found)
        return found.status().with_context("options.machine");
    }
  }
  return check_selection_keys(o.selection);
}

Status check_places(const LayerWeights& weights, const LayerOptions& options) {
  if (options.plan_only) return Status::ok();
  Status status;
  for_each_tensor(weights, [&](std::string_view name, const TensorView& view) {
    if (status.is_ok()) status = check_place("weights", name, view, options.machine.device);
    if (status.is_ok() && options.machine.device.kind == DeviceKind::kCpu && device::is_gpu_address(view.data)) {
      status = {StatusCode::kInvalidArgument,
                fmt::format("weights: {} is said to be on the CPU, but its address is memory of a GPU", name)};
    }
  });
  return status;
}

}  // namespace

Layer::State::State() = default;
Layer::State::~State() = default;

Result<Layer> Layer::create(const MoeConfig& config, LayerWeights weights, const LayerOptions& options) {
  Result<Layer> made = make(config, std::move(weights), options);
  if (options.plan_only || !check_groups(options).is_ok()) return made;
  // Over several ranks creation is collective, also where it failed. Who fails in the first group tells the second; in a grid,
  // who fails in the second tells the first.
  Status agreed = made.status();
  const State* const state = made.is_ok() ? made->state_.get() : nullptr;
  const bool is_cut = options.tensor_transport != nullptr && options.tensor_transport->num_ranks() > 1;
  const bool is_spread = options.transport->num_ranks() > 1;
  if (is_cut) agreed = agree_tensor(options, state, agreed);
  if (is_spread) agreed = agree_spread(options, state, agreed);
  if (is_cut && is_spread) agreed = agree_tensor(options, state, agreed);
  if (!agreed.is_ok()) return agreed;
  return made;
}

Result<Layer> Layer::make(const MoeConfig& config, LayerWeights weights, const LayerOptions& options) {
  SLUICE_TRY(validate(config));
  SLUICE_TRY(check_options(options));
  SLUICE_TRY(check_weights(config, weights));
  SLUICE_TRY(check_places(weights, options));

  auto state = std::make_unique<State>();
  state->config = config;
  state->weights = std::move(weights);
  state->options = options;
  SLUICE_TRY(disable_from_environment(state->options.selection));
  Result<DataPath> path = data_path(options.precision, state->weights.experts);
  if (!path) return path.status().with_context("experts");
  state->path = *path;
  SLUICE_TRY(plan_tensor(*state));
  SLUICE_TRY(plan_spread(*state));
  if (state->max_rows() > INT32_MAX) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("options: {} rows do not fit the i32 row numbers of a plan (max_tokens = {}, S = {})",
                              state->max_rows(), options.max_tokens, config.top_k));
  }
  if (state->has_shared()) {
    // Checkpoints keep shared experts in bf16 beside eight-bit experts: then they run with bf16 activations.
    const bool quantised = is_quantised(state->weights.shared.w13.dtype);
    const bool eight_bit = options.precision == Precision::kW8A8 || options.precision == Precision::kW8A16;
    Result<DataPath> shared =
        data_path(eight_bit && !quantised ? Precision::kBF16 : options.precision, state->weights.shared);
    if (!shared) return shared.status().with_context("shared expert");
    state->shared_path = *shared;
  }
  SLUICE_TRY(resolve_all(*state));
  if (state->spread != nullptr) SLUICE_TRY(book_spread(*state));
  if (state->tensor != nullptr) SLUICE_TRY(book_tensor(*state));

  // The two kinds of entry points use the same memory in different shapes.
  Arena tokens(nullptr, options.machine.device, &state->items);
  const std::int64_t rows_of_tokens = state->rows_of_tokens(options.max_tokens);
  lay_out_call(*state, tokens, options.max_tokens, rows_of_tokens);
  std::int64_t bytes = tokens.used_bytes();
  if (state->max_rows() > rows_of_tokens) {
    std::vector<WorkspaceItem> items;
    Arena rows(nullptr, options.machine.device, &items);
    lay_out_call(*state, rows, 0, state->max_rows());
    if (rows.used_bytes() > bytes) {
      bytes = rows.used_bytes();
      state->items = std::move(items);
    }
  }
  if (bytes >= Arena::kMaxBytes) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("options: the workspace would take more than 2^60 bytes (max_tokens = {}, {} rows, H = {}, "
                    "I = {})",
                    options.max_tokens, state->max_rows(), config.hidden, config.intermediate));
  }
  state->workspace_bytes = bytes + Arena::align_bytes(options.machine.device.kind);
  return Layer(std::move(state));
}

Layer::Layer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Layer::Layer(Layer&&) noexcept = default;
Layer& Layer::operator=(Layer&&) noexcept = default;
Layer::~Layer() = default;

const MoeConfig& Layer::config() const { return state_->config; }
const LayerOptions& Layer::options() const { return state_->options; }
std::int64_t Layer::workspace_bytes() const { return state_->workspace_bytes; }
const std::vector<WorkspaceItem>& Layer::workspace_items() const { return state_->items; }
const std::vector<StageReport>& Layer::stages() const { return state_->reports; }

}  // namespace sluice
