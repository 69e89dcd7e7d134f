// The buffers of a call, and the stage arguments that point into them.
#include <fmt/format.h>

#include <algorithm>

#include "layer/call.h"

namespace sluice {

std::byte* Arena::advance(std::string_view what, std::int64_t bytes) {
  std::byte* const place = base_ == nullptr ? nullptr : base_ + used_;
  if (items_ != nullptr && bytes > 0) items_->push_back({std::string(what), used_, bytes});
  const std::int64_t align = align_bytes(device_.kind);
  used_ = std::min(used_ + ceil_div(std::min(bytes, kMaxBytes), align) * align, kMaxBytes);
  return place;
}

TensorView Arena::take(std::string_view what, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view = TensorView::dense(nullptr, dtype, shape, device_);
  if (items_ != nullptr) {
    const std::string text = fmt::format("{} {}", what, to_string(dtype));
    view.data = advance(text, view.num_bytes());
  } else {
    view.data = advance(what, view.num_bytes());
  }
  return view;
}

TensorView Arena::take_scale(std::string_view what, std::int64_t blocks, std::int64_t rows) {
  const std::int64_t pitch = device_.kind == DeviceKind::kCuda ? ceil_div(rows, 4) * 4 : rows;
  TensorView view = take(what, DType::kF32, {blocks, pitch});
  view.shape[1] = rows;
  return view;
}

std::span<std::byte> Arena::take_bytes(std::string_view what, std::int64_t bytes) {
  std::byte* const place = advance(what, bytes);
  return {place, place == nullptr ? 0 : static_cast<std::size_t>(bytes)};
}

bool Layer::State::has_shared() const {
  if (config.shared_intermediate == 0 || options.routed_only) return false;
  return !options.shared_is_whole || options.tensor_transport == nullptr || options.tensor_transport->rank() == 0;
}

std::int64_t Layer::State::rows_of_tokens(std::int64_t num_tokens) const {
  return (spread == nullptr ? num_tokens : spread->max_arriving()) * config.top_k;
}

std::int64_t Layer::State::max_rows() const {
  return std::max(
      {rows_of_tokens(options.max_tokens), options.max_rows, num_local(config) * options.max_rows_per_expert});
}

namespace {

struct FfnNames {
  std::string_view rows, rows_scale, rows_row_scale, h, a, a_scale, a_row_scale, y;
};
constexpr FfnNames kRoutedNames{"rows[R,H]", "rows_scale[Hb,R]", "rows_scale[1,R]", "h[R,2I]",
                                "a[R,I]",    "a_scale[Ib,R]",    "a_scale[1,R]",    "y[R,H]"};
constexpr FfnNames kSharedNames{
    "shared.rows[T,H]", "shared.rows_scale[Hb,T]", "shared.rows_scale[1,T]", "shared.h[T,2I]",
    "shared.a[T,I]",    "shared.a_scale[Ib,T]",    "shared.a_scale[1,T]",    "shared.y[T,H]"};

FfnBuffers lay_out_ffn(Arena& arena, const FfnNames& names, const FfnStages& stages, const DataPath& path,
                       std::int64_t rows, std::int64_t hidden, std::int64_t intermediate) {
  FfnBuffers b;
  b.rows.data = arena.take(names.rows, path.rows, {rows, hidden});
  if (is_quantised(path.rows)) {
    b.rows.scale =
        arena.take_scale(path.row_scales ? names.rows_row_scale : names.rows_scale, path.scale_blocks(hidden), rows);
  }
  // More rows take more memory all the same: h begins where the fused form ends.
  b.h = rows <= stages.most_fused_rows ? TensorView::dense(nullptr, path.h, {rows, 2 * intermediate}, arena.device())
                                       : arena.take(names.h, path.h, {rows, 2 * intermediate});
  b.a.data = arena.take(names.a, path.a, {rows, intermediate});
  if (is_quantised(path.a)) {
    b.a.scale =
        arena.take_scale(path.row_scales ? names.a_row_scale : names.a_scale, path.scale_blocks(intermediate), rows);
  }
  b.y = arena.take(names.y, path.y, {rows, hidden});
  return b;
}

}  // namespace

FfnBuffers lay_out_experts(const Layer::State& state, Arena& arena, std::int64_t num_rows) {
  const MoeConfig& c = state.config;
  return lay_out_ffn(arena, kRoutedNames, state.routed, state.path, num_rows, c.hidden, c.intermediate);
}

Buffers lay_out(const Layer::State& state, Arena& arena, std::int64_t num_tokens, std::int64_t num_rows) {
  const MoeConfig& c = state.config;
  Buffers b;
  b.logits = arena.take("logits[T,E]", DType::kF32, {num_tokens, c.num_experts});
  b.topk_idx.view = arena.take("topk_idx[T,S]", DType::kI32, {num_tokens, c.top_k});
  b.topk_weight = arena.take("topk_weight[T,S]", DType::kF32, {num_tokens, c.top_k});
  b.plan.expert_offset.view = arena.take("expert_offset[L+1]", DType::kI32, {num_local(c) + 1});
  b.plan.row_token = arena.take("row_token[T*S]", DType::kI32, {num_tokens * c.top_k});
  b.plan.row_slot = arena.take("row_slot[T*S]", DType::kI32, {num_tokens * c.top_k});
  b.plan.slot_row = arena.take("slot_row[T,S]", DType::kI32, {num_tokens, c.top_k});
  b.plan.num_rows = arena.take("num_rows[1]", DType::kI32, {1});
  b.routed = lay_out_experts(state, arena, num_rows);
  if (state.has_shared()) {
    b.shared =
        lay_out_ffn(arena, kSharedNames, state.shared, state.shared_path, num_tokens, c.hidden, c.shared_intermediate);
    if (c.has_shared_gate) b.shared_gate = arena.take("shared_gate[T,1]", DType::kF32, {num_tokens, 1});
  }
  b.scratch = arena.take_bytes("scratch of the stages, the largest", state.scratch_bytes);
  return b;
}

Call lay_out_call(const Layer::State& state, Arena& arena, std::int64_t num_tokens, std::int64_t num_rows) {
  Call call;
  call.b = lay_out(state, arena, num_tokens, num_rows);
  if (state.spread != nullptr) call.spread = lay_out_spread(state, arena);
  if (state.tensor != nullptr) call.tensor = lay_out_tensor(state, arena);
  return call;
}

gate::LogitsArgs logits_args(const Layer::State& state, const Buffers& b, const TensorView& x) {
  return {.x = x, .w_gate = state.weights.w_gate, .router_bias = state.weights.router_bias, .logits = b.logits};
}

gate::SelectArgs select_args(const Layer::State& state, const Buffers& b, const TensorView& counters) {
  return {.gate = state.config.gate,
          .logits = b.logits,
          .score_bias = state.weights.score_bias,
          .topk_idx = b.topk_idx,
          .topk_weight = b.topk_weight,
          .counters = counters};
}

route::Args route_args(const Layer::State& state, const Buffers& b, const TensorView& counters) {
  return {.topk_idx = b.topk_idx,
          .num_experts = state.config.num_experts,
          .first_expert = state.config.first_expert,
          .plan = b.plan,
          .counters = counters,
          .checked = state.options.checked};
}

pack::Args pack_args(const Layer::State& state, const Buffers& b, const TensorView& x, const TensorView& x_scale) {
  return {.x = x,
          .x_scale = x_scale,
          .row_token = b.plan.row_token,
          .row_slot = b.plan.row_slot,
          .slot_row = b.plan.slot_row,
          .num_rows = b.plan.num_rows,
          .weight = state.config.weight_on_input ? b.topk_weight : TensorView{},
          .rows = b.routed.rows.data,
          .rows_scale = b.routed.rows.scale,
          .scale_format = state.config.activation_scale};
}

grouped_gemm::Args up_args(const FfnWeights& weights, const FfnBuffers& b, const RowGroups& groups) {
  return {.a = b.rows.data,
          .a_scale = b.rows.scale,
          .groups = groups,
          .w = weights.w13,
          .w_scale = weights.w13_scale,
          .bias = weights.w13_bias,
          .part_rows = weights.w13.shape[1] / 2,
          .out = b.h,
          .groups_settled = b.groups_settled};
}

pack::Args whole_pack_args(const Layer::State& state, const Rows& rows, const TensorView& x, const RowGroups& groups) {
  return {.x = x,
          .groups = groups,
          .rows = rows.data,
          .rows_scale = rows.scale,
          .scale_format = state.config.activation_scale};
}

swiglu_quant::Args act_args(const Layer::State& state, const FfnBuffers& b, const RowGroups& groups) {
  return {.h = b.h,
          .groups = groups,
          .activation = state.config.activation,
          .a = b.a.data,
          .a_scale = b.a.scale,
          .scale_format = state.config.activation_scale};
}

up_swiglu_quant::Args up_act_args(const Layer::State& state, const FfnWeights& weights, const FfnBuffers& b,
                                  const RowGroups& groups) {
  return {.up = up_args(weights, b, groups), .act = act_args(state, b, groups)};
}

grouped_gemm::Args down_args(const FfnWeights& weights, const FfnBuffers& b, const RowGroups& groups) {
  return {.a = b.a.data,
          .a_scale = b.a.scale,
          .groups = groups,
          .w = weights.w2,
          .w_scale = weights.w2_scale,
          .bias = weights.w2_bias,
          .part_rows = 0,
          .out = b.y,
          .groups_settled = true};  // the up GEMM read them too
}

gate::LogitsArgs shared_logits_args(const Layer::State& state, const Buffers& b, const TensorView& x) {
  return {.x = x, .w_gate = state.weights.shared_gate, .router_bias = {}, .logits = b.shared_gate};
}

combine::Args combine_args(const Layer::State& state, const Buffers& b, const TensorView& y, const TensorView& out) {
  return {.y = y,
          .slot_row = b.plan.slot_row,
          .topk_weight = state.config.weight_on_input ? TensorView{} : b.topk_weight,
          .unweighted = state.config.weight_on_input,
          .shared = state.has_shared() ? b.shared.y : TensorView{},
          .shared_gate = b.shared_gate,
          .accumulate = false,
          .out = out};
}

}  // namespace sluice
