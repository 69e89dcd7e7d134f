// The layer, in data-flow order: this is the file to read first. Every line is one stage (include/sluice/stage/*.h);
// what each resolved to is in Layer::stages(). Nothing here allocates, synchronises or looks at routed data.
#include <fmt/format.h>

#include <algorithm>

#include "device/device.h"
#include "layer/call.h"
#include "layer/place.h"

namespace sluice {
namespace {

Status begin(const Layer::State& s, std::int64_t num_tokens, std::int64_t num_rows, const Ctx& ctx, Call& call) {
  const std::int64_t given = static_cast<std::int64_t>(ctx.workspace.size());
  if (ctx.workspace.data() == nullptr) {
    return {StatusCode::kWorkspaceTooSmall,
            fmt::format("forward: the workspace is null, the layer needs {} bytes", s.workspace_bytes)};
  }
  if (given < s.workspace_bytes) {
    return {StatusCode::kWorkspaceTooSmall,
            fmt::format("forward: the workspace has {} bytes, the layer needs {}", given, s.workspace_bytes)};
  }
  SLUICE_TRY(check_place("forward", "the workspace", ctx.workspace.data(), s.device()));
  // workspace_bytes includes the slack for aligning what the caller brought.
  const auto address = reinterpret_cast<std::uintptr_t>(ctx.workspace.data());
  const auto align = static_cast<std::uintptr_t>(Arena::align_bytes(s.device().kind));
  Arena arena(ctx.workspace.data() + (-address & (align - 1)), s.device());
  call = lay_out_call(s, arena, num_tokens, num_rows);
  call.ctx = ctx;
  call.ctx.workspace = call.b.scratch;
  const int planned = s.options.machine.num_threads;
  call.ctx.num_threads = ctx.num_threads > 0 ? std::min(ctx.num_threads, planned) : planned;
  return Status::ok();
}

Status check_ready(const Layer::State* s) {
  if (s == nullptr) return {StatusCode::kInvalidArgument, "forward: the layer was moved from"};
  if (!s->options.plan_only) return Status::ok();
  return {StatusCode::kInvalidArgument,
          "forward: the layer was created with plan_only, to be described and not to run"};
}

Status check_tokens(const Layer::State& s, std::int64_t num_tokens) {
  if (num_tokens <= s.options.max_tokens) return Status::ok();
  return {StatusCode::kInvalidArgument,
          fmt::format("forward: x has T = {} tokens, the layer was created for max_tokens = {}", num_tokens,
                      s.options.max_tokens)};
}

// x and out of the first two entry points against the config, and the routing tensors the caller brought.
Status check_call(const Layer::State& s, const TensorSpec& x_spec, const TensorView& x, const TensorView& out,
                  const ExpertIds& topk_idx, const TensorView& topk_weight, const TensorView& counters) {
  AxisBinder binder("forward");
  binder.set(Axis::kH, s.config.hidden, "the layer's config");
  binder.set(Axis::kS, s.config.top_k, "the layer's config");
  SLUICE_TRY(binder.bind(x_spec, x, Phase::kRun));
  SLUICE_TRY(check_tokens(s, x.shape[0]));
  SLUICE_TRY(binder.bind(combine::kOut, out, Phase::kRun));
  if (topk_idx.view.is_present()) SLUICE_TRY(binder.bind(gate::kTopkIdx, topk_idx.view, Phase::kRun));
  if (topk_weight.is_present()) SLUICE_TRY(binder.bind(gate::kTopkWeight, topk_weight, Phase::kRun));
  SLUICE_TRY(binder.bind(gate::kCounters, counters, Phase::kRun));
  for (const auto& [name, view] : {std::pair<std::string_view, const TensorView*>("x", &x),
                                   {"out", &out},
                                   {"topk_idx", &topk_idx.view},
                                   {"topk_weight", &topk_weight},
                                   {"counters", &counters}}) {
    SLUICE_TRY(check_place("forward", name, *view, s.device()));
  }
  SLUICE_TRY(s.routed.pack.serves(x.dtype));
  return s.combine.serves(out.dtype);
}

// Whether the implementation takes these tensors of the caller's as they lie in memory (addresses and strides; the planned
// ones it has accepted). Only kernels of a GPU are particular.
template <class Args>
Status accepts(const Layer::State& s, const Stage<Args>& stage, const Args& args) {
  if (s.device().kind != DeviceKind::kCuda) return Status::ok();
  return stage.impl->can_run(args, s.options.machine);
}

}  // namespace

// up, activation, down on rows that are grouped already.
Status experts(const Layer::State& s, const FfnStages& stages, const FfnWeights& weights, const FfnBuffers& b,
               const RowGroups& groups, const Ctx& ctx) {
  if (weights.w13.shape[0] == 0) return Status::ok();  // a rank without experts has no rows either
  if (b.rows.data.shape[0] <= stages.most_fused_rows) {
    SLUICE_TRY(stages.up_act(up_act_args(s, weights, b, groups), ctx));  // [R,H] -> a [R,I]
  } else {
    SLUICE_TRY(stages.up(up_args(weights, b, groups), ctx));  // [R,H]  -> h [R,2I]
    SLUICE_TRY(stages.act(act_args(s, b, groups), ctx));      // [R,2I] -> a [R,I]
  }
  return stages.down(down_args(weights, b, groups), ctx);  // [R,I]  -> y [R,H]
}

// The shared expert sees every token: one group of T rows, packed like the others where its path wants it.
Status shared_expert(const Layer::State& s, Call& call, const TensorView& x) {
  FfnBuffers b = call.b.shared;
  FfnBuffers in_place = b;
  in_place.rows.data = x;
  const bool is_packed = x.dtype == s.shared_path.rows;
  if (is_packed && accepts(s, s.shared.up, up_args(s.weights.shared, in_place, RowGroups::whole())).is_ok()) {
    b = in_place;
  } else {
    SLUICE_TRY(s.shared.pack(x.dtype, whole_pack_args(s, b.rows, x, RowGroups::whole()), call.ctx));
  }
  if (s.config.has_shared_gate) SLUICE_TRY(s.shared_logits(x.dtype, shared_logits_args(s, call.b, x), call.ctx));
  return experts(s, s.shared, s.weights.shared, b, RowGroups::whole(), call.ctx);
}

namespace {

bool takes_route_pack(const Layer::State& s, const Buffers& b, const TensorView& x) {
  return s.route_pack.impl != nullptr && b.topk_idx.view.num_elements() <= route_pack::most_slots() &&
         !is_quantised(x.dtype);
}

// The gate, in one run of kernels where there is one that takes these tokens.
Status gate_tokens(const Layer::State& s, const Call& call, const TensorView& x, const TensorView& counters) {
  const gate::BothArgs both = {logits_args(s, call.b, x), select_args(s, call.b, counters)};
  if (s.logits_and_select.impl != nullptr && x.dtype == DType::kBF16 && x.shape[0] <= gate::kMostTokensOfBoth &&
      accepts(s, s.logits_and_select, both).is_ok()) {
    return s.logits_and_select(both, call.ctx);
  }
  SLUICE_TRY(s.logits(x.dtype, both.logits, call.ctx));  // x [T,H] -> logits [T,E]
  return s.select(both.select, call.ctx);                // logits  -> topk_idx, topk_weight [T,S]
}

// What a spread call brings, judged as a whole before its first round: as if every token were packed where it is. Never run.
pack::Args judged_pack_args(const Layer::State& s, const Call& call, const TensorView& x, const TensorView& x_scale) {
  const FfnBuffers& b = call.b.routed;
  pack::Args args = whole_pack_args(s, {}, x, RowGroups::whole());
  args.x_scale = x_scale;
  args.rows = TensorView::dense(b.rows.data.data, s.path.rows, {x.shape[0], s.config.hidden});
  if (b.rows.scale.is_present())
    args.rows_scale = TensorView::dense(b.rows.scale.data, DType::kF32, {b.rows.scale.shape[0], x.shape[0]});
  return args;
}

// The first failure of some steps.
template <class First, class... Rest>
Status in_order(const First& first, const Rest&... rest) {
  SLUICE_TRY(first());
  if constexpr (sizeof...(rest) > 0) return in_order(rest...);
  return Status::ok();
}

// From routing to output: what both token entry points share.
Status run_routed(const Layer::State& s, Call& call, const CallTensors& t) {
  const auto& [x, x_scale, counters, out] = t;
  const Buffers& b = call.b;
  FfnBuffers routed = b.routed;
  routed.groups_settled = !takes_route_pack(s, b, x);
  if (!routed.groups_settled) {
    SLUICE_TRY(s.route_pack({route_args(s, b, counters), pack_args(s, b, x, x_scale)}, call.ctx));  // both of these
  } else {
    SLUICE_TRY(s.route(route_args(s, b, counters), call.ctx));                  // topk_idx -> plan
    SLUICE_TRY(s.routed.pack(x.dtype, pack_args(s, b, x, x_scale), call.ctx));  // x [T,H] -> rows [R,H]
  }
  SLUICE_TRY(experts(s, s.routed, s.weights.experts, routed, RowGroups::contiguous(b.plan.expert_offset), call.ctx));
  if (s.has_shared()) SLUICE_TRY(shared_expert(s, call, x));                   // x [T,H] -> shared.y [T,H]
  return s.combine(out.dtype, combine_args(s, b, b.routed.y, out), call.ctx);  // y [R,H] -> out [T,H]
}

// A call that other ranks make too. What this one cannot do it tells them: `ready` goes along.
Status run_together(const Layer::State& s, Call& call, const CallTensors& t, Status ready) {
  CallTensors mine = t;
  if (s.tensor != nullptr) {
    ready = meet(s, ready.is_ok() ? t.x.shape[0] : 0, t.out.dtype, ready);
    if (ready.is_ok()) mine.out = call.tensor.partial.slice(0, t.x.shape[0]);
  }
  if (!ready.is_ok()) return s.spread != nullptr ? decline_spread(s, ready) : ready;
  if (s.spread != nullptr) {
    SLUICE_TRY(forward_spread(s, call, mine));
  } else if (t.x.shape[0] > 0) {
    SLUICE_TRY(run_routed(s, call, mine));
  }
  return s.tensor == nullptr ? Status::ok() : add_partials(s, call.tensor, t.out, call.ctx);
}

// The two entry points for tokens: `check` judges the tensors, `start` finds them their buffers, `gate` routes them.
template <class Check, class Start, class Gate>
Status run_call(const Layer::State& s, Call& call, const CallTensors& t, const Check& check, const Start& start,
                const Gate& gate) {
  const auto gate_any = [&] { return t.x.shape[0] == 0 ? Status::ok() : gate(); };
  if (s.spread != nullptr || s.tensor != nullptr) return run_together(s, call, t, in_order(check, start, gate_any));
  SLUICE_TRY(check());
  if (t.x.shape[0] == 0) return Status::ok();
  SLUICE_TRY(start());
  const device::Current current(s.device());
  SLUICE_TRY(current.status());
  SLUICE_TRY(gate());
  return run_routed(s, call, t);
}

}  // namespace

Status Layer::forward(const TensorView& x, const TensorView& out, const Routing& routing, const Ctx& ctx) const {
  SLUICE_TRY(check_ready(state_.get()));
  const State& s = *state_;
  const auto check = [&]() -> Status {
    SLUICE_TRY(check_call(s, gate::kX, x, out, routing.topk_idx, routing.topk_weight, routing.counters));
    return s.logits.serves(x.dtype);
  };
  Call call;
  const auto start = [&]() -> Status {
    SLUICE_TRY(begin(s, x.shape[0], s.rows_of_tokens(x.shape[0]), ctx, call));
    if (routing.topk_idx.view.is_present()) call.b.topk_idx = routing.topk_idx;
    if (routing.topk_weight.is_present()) call.b.topk_weight = routing.topk_weight;
    return Status::ok();
  };
  // x [T,H] -> logits [T,E] -> topk_idx, topk_weight [T,S]
  const auto gate = [&] { return gate_tokens(s, call, x, routing.counters); };
  return run_call(s, call, {x, {}, routing.counters, out}, check, start, gate);
}

Status Layer::forward_routed(const RoutedInput& input, const TensorView& out, const Ctx& ctx) const {
  SLUICE_TRY(check_ready(state_.get()));
  const State& s = *state_;
  const TensorView& x = input.x;
  const auto check = [&]() -> Status {
    SLUICE_TRY(check_call(s, pack::kX, x, out, input.topk_idx, input.topk_weight, input.counters));
    if (!input.topk_idx.view.is_present()) return {StatusCode::kInvalidArgument, "forward_routed: topk_idx is missing"};
    if (!input.topk_weight.is_present())
      return {StatusCode::kInvalidArgument, "forward_routed: topk_weight is missing"};
    if (is_quantised(x.dtype) && (s.path.rows != x.dtype || s.has_shared())) {
      return {StatusCode::kInvalidArgument,
              fmt::format("forward_routed: {} x needs precision w8a8, {} weights and no shared expert, the layer has "
                          "precision {}{} and {} weights",
                          to_string(x.dtype), to_string(x.dtype), to_string(s.options.precision),
                          s.has_shared() ? ", a shared expert" : "", to_string(s.weights.experts.w13.dtype))};
    }
    return Status::ok();
  };
  Call call;
  const auto start = [&]() -> Status {
    SLUICE_TRY(begin(s, x.shape[0], s.rows_of_tokens(x.shape[0]), ctx, call));
    call.b.topk_idx = input.topk_idx;
    call.b.topk_weight = input.topk_weight;
    SLUICE_TRY(check_place("forward_routed", "x_scale", input.x_scale, s.device()));
    SLUICE_TRY(pack::check(s.spread == nullptr ? pack_args(s, call.b, x, input.x_scale)
                                               : judged_pack_args(s, call, x, input.x_scale)));
    if (!s.has_shared() || !s.config.has_shared_gate) return Status::ok();
    return s.shared_logits.accepts(x.dtype, shared_logits_args(s, call.b, x));
  };
  return run_call(s, call, {x, input.x_scale, input.counters, out}, check, start, [] { return Status::ok(); });
}

namespace {

// The two entry points that skip the gate and the plan: rows in, rows out.
Status check_rows(const Layer::State& s, std::string_view entry, const Rows& rows, const TensorView& out) {
  AxisBinder binder(entry);
  binder.set(Axis::kH, s.config.hidden, "the layer's config");
  SLUICE_TRY(binder.bind(pack::kRows, rows.data, Phase::kRun));
  SLUICE_TRY(binder.bind(combine::kY, out, Phase::kRun));
  if (out.shape[0] != rows.data.shape[0] || out.dtype != s.path.y) {
    return {StatusCode::kInvalidArgument, fmt::format("{}: out must be {}[{},{}], got {}", entry, to_string(s.path.y),
                                                      rows.data.shape[0], s.config.hidden, out.to_string())};
  }
  const bool quantised = is_quantised(rows.data.dtype);
  if (quantised && s.path.rows != rows.data.dtype) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: rows are {}, but precision {} takes {}bf16 or f32", entry, to_string(rows.data.dtype),
                        to_string(s.options.precision),
                        is_quantised(s.path.rows) ? fmt::format("{}, ", to_string(s.path.rows)) : "")};
  }
  if (quantised != rows.scale.is_present()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: rows are {}, and rows_scale[{},R] is {}", entry, rows.data.to_string(),
                        s.path.row_scales ? "1" : "Hb", rows.scale.is_present() ? "given" : "missing")};
  }
  if (quantised) {
    const TensorSpec scale = s.path.row_scales ? pack::kRowsRowScale.repeated() : pack::kRowsScale;
    SLUICE_TRY(binder.bind(scale, rows.scale, Phase::kRun));
  }
  for (const auto& [name, view] : {std::pair<std::string_view, const TensorView*>("rows", &rows.data),
                                   {"rows_scale", &rows.scale},
                                   {"out", &out}}) {
    SLUICE_TRY(check_place(entry, name, *view, s.device()));
  }
  if (rows.data.shape[0] > s.max_rows()) {
    return {StatusCode::kInvalidArgument, fmt::format("{}: R = {} rows, the layer was created for {}, the largest of "
                                                      "max_tokens * S, max_rows and L * max_rows_per_expert",
                                                      entry, rows.data.shape[0], s.max_rows())};
  }
  return Status::ok();
}

// Packs the rows where they are not what the up GEMM reads, in dtype or in place, and runs the experts into out.
Status run_grouped(const Layer::State& s, std::string_view entry, const Rows& rows, const RowGroups& groups,
                   const TensorView& out, const Ctx& ctx) {
  if (s.tensor != nullptr) {
    return {StatusCode::kUnsupported,
            fmt::format("{}: I is cut over {} ranks, so these rows would be partial sums; forward adds them", entry,
                        s.tensor->num_ranks)};
  }
  Call call;
  SLUICE_TRY(begin(s, 0, rows.data.shape[0], ctx, call));
  FfnBuffers b = call.b.routed;
  b.y = out;
  SLUICE_TRY(accepts(s, s.routed.down, down_args(s.weights.experts, b, groups)).with_context(entry));
  FfnBuffers in_place = b;
  in_place.rows = rows;
  const bool is_packed = rows.data.dtype == s.path.rows;
  if (is_packed && accepts(s, s.routed.up, up_args(s.weights.experts, in_place, groups)).is_ok()) b = in_place;
  const bool needs_pack = b.rows.data.data != rows.data.data;
  if (needs_pack) SLUICE_TRY(s.group_pack.serves(rows.data.dtype));
  const device::Current current(s.device());
  SLUICE_TRY(current.status());
  if (needs_pack) {
    pack::Args args = whole_pack_args(s, b.rows, rows.data, groups);
    args.x_scale = rows.scale;
    SLUICE_TRY(s.group_pack(rows.data.dtype, args, call.ctx));
  }
  return experts(s, s.routed, s.weights.experts, b, groups, call.ctx);
}

}  // namespace

Status Layer::forward_grouped(const Rows& rows, const ExpertOffsets& expert_offset, const TensorView& out,
                              const Ctx& ctx) const {
  SLUICE_TRY(check_ready(state_.get()));
  const State& s = *state_;
  SLUICE_TRY(check_rows(s, "forward_grouped", rows, out));
  const std::int64_t num_rows = rows.data.shape[0];
  const RowGroups groups = RowGroups::contiguous(expert_offset);
  SLUICE_TRY(check_row_groups("forward_grouped", groups, num_local(s.config), num_rows, Phase::kRun));
  SLUICE_TRY(check_place("forward_grouped", "expert_offset", expert_offset.view, s.device()));
  if (s.options.checked) SLUICE_TRY(check_row_values("forward_grouped", groups, num_rows));
  if (num_rows == 0) return Status::ok();
  return run_grouped(s, "forward_grouped", rows, groups, out, ctx);
}

Status Layer::forward_masked(const Rows& rows, const TensorView& num_rows, const TensorView& out,
                             const Ctx& ctx) const {
  SLUICE_TRY(check_ready(state_.get()));
  const State& s = *state_;
  SLUICE_TRY(check_rows(s, "forward_masked", rows, out));
  const std::int64_t num_groups = num_local(s.config);
  if (num_groups == 0 ? rows.data.shape[0] != 0 : rows.data.shape[0] % num_groups != 0) {
    return {StatusCode::kInvalidArgument, fmt::format("forward_masked: {} rows are not a multiple of L = {} experts",
                                                      rows.data.shape[0], num_groups)};
  }
  const std::int64_t per_group = num_groups == 0 ? 0 : rows.data.shape[0] / num_groups;
  const RowGroups groups = RowGroups::masked(num_rows, per_group);
  SLUICE_TRY(check_row_groups("forward_masked", groups, num_groups, rows.data.shape[0], Phase::kRun));
  SLUICE_TRY(check_place("forward_masked", "num_rows", num_rows, s.device()));
  if (s.options.checked) SLUICE_TRY(check_row_values("forward_masked", groups, rows.data.shape[0]));
  if (rows.data.shape[0] == 0) return Status::ok();
  return run_grouped(s, "forward_masked", rows, groups, out, ctx);
}

}  // namespace sluice
