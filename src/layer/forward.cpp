// The layer, in data-flow order: this is the file to read first. Every line is one stage (include/sluice/stage/*.h);
// what each resolved to is in Layer::stages(). Nothing here allocates, synchronises or looks at routed data.
#include <fmt/format.h>

#include <algorithm>

#include "layer/state.h"

namespace sluice {
namespace {

// One call: its buffers inside the caller's workspace, and the context the stages get.
struct Call {
  Buffers b;
  Ctx ctx;
};

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
  // workspace_bytes includes the slack for aligning what the caller brought.
  const auto address = reinterpret_cast<std::uintptr_t>(ctx.workspace.data());
  Arena arena(ctx.workspace.data() + (-address & (Arena::kAlignBytes - 1)), s.options.machine.device);
  call.b = lay_out(s, arena, num_tokens, num_rows);
  call.ctx = ctx;
  call.ctx.workspace = call.b.scratch;
  const int planned = s.options.machine.num_threads;
  call.ctx.num_threads = ctx.num_threads > 0 ? std::min(ctx.num_threads, planned) : planned;
  return Status::ok();
}

Status moved_from() { return {StatusCode::kInvalidArgument, "forward: the layer was moved from"}; }

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
  return binder.bind(gate::kCounters, counters, Phase::kRun);
}

// up, activation, down on rows that are grouped already.
Status experts(const Layer::State& s, const FfnStages& stages, const FfnWeights& weights, const FfnBuffers& b,
               const RowGroups& groups, const Ctx& ctx) {
  SLUICE_TRY(stages.up(up_args(weights, b, groups), ctx));  // [R,H]  -> h [R,2I]
  SLUICE_TRY(stages.act(act_args(s, b, groups), ctx));      // [R,2I] -> a [R,I]
  return stages.down(down_args(weights, b, groups), ctx);   // [R,I]  -> y [R,H]
}

// The shared expert sees every token: one group of T rows, packed like the others where its path wants it.
Status shared_expert(const Layer::State& s, Call& call, const TensorView& x) {
  FfnBuffers b = call.b.shared;
  if (x.dtype == s.shared_path.rows) {
    b.rows.data = x;
  } else {
    SLUICE_TRY(s.shared.pack(whole_pack_args(s, b.rows, x, RowGroups::whole()), call.ctx));
  }
  if (s.config.has_shared_gate) SLUICE_TRY(s.shared_logits(shared_logits_args(s, call.b, x), call.ctx));
  return experts(s, s.shared, s.weights.shared, b, RowGroups::whole(), call.ctx);
}

// From routing to output: what both token entry points share.
Status run_routed(const Layer::State& s, Call& call, const TensorView& x, const TensorView& x_scale,
                  const TensorView& counters, const TensorView& out) {
  Rows arrived;
  Rows returned;
  const Buffers& b = call.b;
  SLUICE_TRY(s.route(route_args(s, b, counters), call.ctx));                            // topk_idx -> plan
  SLUICE_TRY(s.routed.pack(pack_args(s, b, x, x_scale), call.ctx));                     // x [T,H] -> rows [R,H]
  SLUICE_TRY(s.options.transport->dispatch(b.plan, b.routed.rows, arrived, call.ctx));  // rows to their experts' ranks
  FfnBuffers local = b.routed;
  local.rows = arrived;
  SLUICE_TRY(experts(s, s.routed, s.weights.experts, local, RowGroups::contiguous(b.plan.expert_offset), call.ctx));
  SLUICE_TRY(s.options.transport->combine(b.plan, {local.y, {}}, returned, call.ctx));  // y back to the tokens' ranks
  if (s.has_shared()) SLUICE_TRY(shared_expert(s, call, x));                            // x [T,H] -> shared.y [T,H]
  return s.combine(combine_args(s, b, returned.data, out), call.ctx);                   // y [R,H] -> out [T,H]
}

}  // namespace

Status Layer::forward(const TensorView& x, const TensorView& out, const Routing& routing, const Ctx& ctx) const {
  if (state_ == nullptr) return moved_from();
  const State& s = *state_;
  SLUICE_TRY(check_call(s, gate::kX, x, out, routing.topk_idx, routing.topk_weight, routing.counters));
  if (x.shape[0] == 0) return Status::ok();
  Call call;
  SLUICE_TRY(begin(s, x.shape[0], x.shape[0] * s.config.top_k, ctx, call));
  if (routing.topk_idx.view.is_present()) call.b.topk_idx = routing.topk_idx;
  if (routing.topk_weight.is_present()) call.b.topk_weight = routing.topk_weight;
  SLUICE_TRY(s.logits(logits_args(s, call.b, x), call.ctx));                 // x [T,H] -> logits [T,E]
  SLUICE_TRY(s.select(select_args(s, call.b, routing.counters), call.ctx));  // logits  -> topk_idx, topk_weight [T,S]
  return run_routed(s, call, x, {}, routing.counters, out);
}

Status Layer::forward_routed(const RoutedInput& input, const TensorView& out, const Ctx& ctx) const {
  if (state_ == nullptr) return moved_from();
  const State& s = *state_;
  const TensorView& x = input.x;
  SLUICE_TRY(check_call(s, pack::kX, x, out, input.topk_idx, input.topk_weight, input.counters));
  if (!input.topk_idx.view.is_present()) return {StatusCode::kInvalidArgument, "forward_routed: topk_idx is missing"};
  if (!input.topk_weight.is_present()) return {StatusCode::kInvalidArgument, "forward_routed: topk_weight is missing"};
  if (x.dtype == DType::kE4M3 && (s.path.rows != DType::kE4M3 || s.has_shared())) {
    return {
        StatusCode::kInvalidArgument,
        fmt::format("forward_routed: e4m3 x needs precision w8a8 and no shared expert, the layer has precision {}{}",
                    to_string(s.options.precision), s.has_shared() ? " and a shared expert" : "")};
  }
  if (x.shape[0] == 0) return Status::ok();
  Call call;
  SLUICE_TRY(begin(s, x.shape[0], x.shape[0] * s.config.top_k, ctx, call));
  call.b.topk_idx = input.topk_idx;
  call.b.topk_weight = input.topk_weight;
  SLUICE_TRY(pack::check(pack_args(s, call.b, x, input.x_scale)));
  return run_routed(s, call, x, input.x_scale, input.counters, out);
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
  const bool quantised = rows.data.dtype == DType::kE4M3;
  if (quantised && s.path.rows != DType::kE4M3) {
    return {StatusCode::kInvalidArgument, fmt::format("{}: rows are e4m3, but precision {} takes bf16 or f32", entry,
                                                      to_string(s.options.precision))};
  }
  if (quantised != rows.scale.is_present()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: rows are {}, and rows_scale[Hb,R] is {}", entry, rows.data.to_string(),
                        rows.scale.is_present() ? "given" : "missing")};
  }
  if (quantised) SLUICE_TRY(binder.bind(pack::kRowsScale, rows.scale, Phase::kRun));
  if (rows.data.shape[0] > s.max_rows()) {
    return {StatusCode::kInvalidArgument, fmt::format("{}: R = {} rows, the layer was created for {}, the largest of "
                                                      "max_tokens * S, max_rows and L * max_rows_per_expert",
                                                      entry, rows.data.shape[0], s.max_rows())};
  }
  return Status::ok();
}

}  // namespace

Status Layer::forward_grouped(const Rows& rows, const ExpertOffsets& expert_offset, const TensorView& out,
                              const Ctx& ctx) const {
  if (state_ == nullptr) return moved_from();
  const State& s = *state_;
  SLUICE_TRY(check_rows(s, "forward_grouped", rows, out));
  const std::int64_t num_rows = rows.data.shape[0];
  const RowGroups groups = RowGroups::contiguous(expert_offset);
  SLUICE_TRY(check_row_groups("forward_grouped", groups, num_local(s.config), num_rows, Phase::kRun));
  if (s.options.checked) SLUICE_TRY(check_row_values("forward_grouped", groups, num_rows));
  if (num_rows == 0) return Status::ok();
  Call call;
  SLUICE_TRY(begin(s, 0, num_rows, ctx, call));
  FfnBuffers b = call.b.routed;
  b.y = out;
  if (rows.data.dtype == s.path.rows) {
    b.rows = rows;
  } else {
    SLUICE_TRY(s.routed.pack(whole_pack_args(s, b.rows, rows.data, groups), call.ctx));
  }
  return experts(s, s.routed, s.weights.experts, b, groups, call.ctx);
}

Status Layer::forward_masked(const Rows& rows, const TensorView& num_rows, const TensorView& out,
                             const Ctx& ctx) const {
  if (state_ == nullptr) return moved_from();
  const State& s = *state_;
  SLUICE_TRY(check_rows(s, "forward_masked", rows, out));
  const std::int64_t num_groups = num_local(s.config);
  if (rows.data.shape[0] % num_groups != 0) {
    return {StatusCode::kInvalidArgument, fmt::format("forward_masked: {} rows are not a multiple of L = {} experts",
                                                      rows.data.shape[0], num_groups)};
  }
  const std::int64_t per_group = rows.data.shape[0] / num_groups;
  const RowGroups groups = RowGroups::masked(num_rows, per_group);
  SLUICE_TRY(check_row_groups("forward_masked", groups, num_groups, rows.data.shape[0], Phase::kRun));
  if (s.options.checked) SLUICE_TRY(check_row_values("forward_masked", groups, rows.data.shape[0]));
  if (rows.data.shape[0] == 0) return Status::ok();
  Call call;
  SLUICE_TRY(begin(s, 0, rows.data.shape[0], ctx, call));
  FfnBuffers b = call.b.routed;
  b.y = out;
  if (rows.data.dtype == s.path.rows) {
    b.rows = rows;
  } else {
    SLUICE_TRY(s.routed.pack(whole_pack_args(s, b.rows, rows.data, groups), call.ctx));
  }
  return experts(s, s.routed, s.weights.experts, b, groups, call.ctx);
}

}  // namespace sluice
