// Layers over several ranks: sizes of rounds, buffers, stage arguments, and that every rank made the same layer.
#include "layer/spread.h"

#include <fmt/format.h>

#include <algorithm>

#include "layer/resolve.h"

namespace sluice {

namespace {

// The worst case: every token of every rank here, with all of its slots.
std::int64_t max_rows_of_round(const Layer::State& state) { return state.rows_of_tokens(state.options.max_tokens); }

// What grows with the tokens of a round: the exchange, and the rows the experts may have to work on.
std::int64_t bytes_of_round(const Layer::State& state) {
  Arena arena(nullptr, state.device());
  lay_out_spread(state, arena);
  lay_out_experts(state, arena, max_rows_of_round(state));
  return arena.used_bytes();
}

struct PlanNames {
  std::string_view offset, row_token, row_slot, num_rows;
};
constexpr PlanNames kSendNames{"exchange.sends.offset[P+1]", "exchange.sends.row_token[C*W]",
                               "exchange.sends.row_slot[C*W]", "exchange.sends.num_rows[1]"};
constexpr PlanNames kReturnNames{"exchange.returns.offset[P+1]", "exchange.returns.row_token[C*S]",
                                 "exchange.returns.row_slot[C*S]", "exchange.returns.num_rows[1]"};
constexpr PlanNames kArrivedNames{"exchange.plan.offset[L+1]", "exchange.plan.row_token[P*C*S]",
                                  "exchange.plan.row_slot[P*C*S]", "exchange.plan.num_rows[1]"};

}  // namespace

Status plan_spread(Layer::State& state) {
  const LayerOptions& o = state.options;
  const std::int64_t num_ranks = o.transport->num_ranks();
  const auto refuse = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, "options: " + std::move(text));
  };
  const std::int64_t rank = o.transport->rank();
  const bool is_placed = !o.placement.slot_expert.empty();
  if (is_placed && (o.placement.num_ranks() != num_ranks || o.placement.num_experts != state.config.num_experts)) {
    return refuse(fmt::format("placement is of {} experts over {} ranks, the layer has {} over {}",
                              o.placement.num_experts, o.placement.num_ranks(), state.config.num_experts, num_ranks));
  }
  if (is_placed) SLUICE_TRY(validate(o.placement).with_context("options"));
  if (num_ranks == 1) {
    // Nothing is exchanged, and nobody looks a slot up.
    for (std::size_t slot = 0; slot < o.placement.slot_expert.size(); ++slot) {
      if (o.placement.slot_expert[slot] == static_cast<std::int64_t>(slot)) continue;
      return refuse(fmt::format("placement: slot {} holds expert {}, of one rank it holds expert {}", slot,
                                o.placement.slot_expert[slot], slot));
    }
    return Status::ok();
  }
  if (o.machine.device.kind != DeviceKind::kCpu) {
    return {StatusCode::kUnsupported,
            fmt::format("options: transport {} over {} ranks moves host memory, the layer is on GPU {}",
                        o.transport->name(), num_ranks, o.machine.device.index)};
  }
  const Placement placement = is_placed ? o.placement : balanced_placement(state.config.num_experts, num_ranks);
  if (placement.num_local(rank) != num_local(state.config)) {
    return refuse(fmt::format("rank {} of {} has {} experts by the placement, the weights hold {}", rank, num_ranks,
                              placement.num_local(rank), num_local(state.config)));
  }
  // 0 says nothing: a placement's slots need not be a range of experts.
  const std::span<const std::int32_t> experts = placement.experts_of(rank);
  if (const std::int64_t first = state.config.first_expert; first != 0 && !experts.empty() && experts[0] != first) {
    return refuse(fmt::format("config.first_expert = {}, by the placement the experts of rank {} of {} begin with {}",
                              first, rank, num_ranks, experts[0]));
  }
  state.spread = std::make_unique<Spread>();
  Spread& spread = *state.spread;
  spread.placement = PlacementIndex::of(placement);
  spread.num_ranks = num_ranks;
  spread.rank = rank;
  spread.num_ways = exchange::num_ways(state.config.top_k, num_ranks);
  spread.record = exchange::Record::of(state.path, state.config.hidden, state.config.top_k);

  // The largest round within the budget, or of one token.
  std::int64_t low = 1, high = std::max<std::int64_t>(o.max_tokens, 1);
  if (o.max_round_tokens > 0) high = std::min(high, o.max_round_tokens);
  while (low < high) {
    spread.chunk = (low + high + 1) / 2;
    if (max_rows_of_round(state) <= INT32_MAX && bytes_of_round(state) <= o.round_bytes) {
      low = spread.chunk;
    } else {
      high = spread.chunk - 1;
    }
  }
  spread.chunk = low;
  if (max_rows_of_round(state) > INT32_MAX) {
    return refuse(fmt::format("{} rows of a round (P = {}, {} tokens, S = {}) do not fit the i32 row numbers of a plan",
                              max_rows_of_round(state), num_ranks, low, state.config.top_k));
  }
  return Status::ok();
}

SpreadBuffers lay_out_spread(const Layer::State& state, Arena& arena) {
  const Spread& spread = *state.spread;
  const std::int64_t C = spread.chunk, S = state.config.top_k, W = spread.num_ways, P = spread.num_ranks;
  const std::int64_t N = spread.max_arriving(), H = state.config.hidden;
  SpreadBuffers b;
  b.slot_rank = arena.take("exchange.slot_rank[C,S]", DType::kI32, {C, S});
  b.slot_local = arena.take("exchange.slot_local[C,S]", DType::kI32, {C, S});
  b.way_rank = arena.take("exchange.way_rank[C,W]", DType::kI32, {C, W});
  // Names are literals: this runs in every forward, which allocates nothing.
  const auto plan = [&](RoutePlan& p, const PlanNames& names, std::int64_t groups, std::int64_t rows) {
    p.expert_offset.view = arena.take(names.offset, DType::kI32, {groups + 1});
    p.row_token = arena.take(names.row_token, DType::kI32, {rows});
    p.row_slot = arena.take(names.row_slot, DType::kI32, {rows});
    p.num_rows = arena.take(names.num_rows, DType::kI32, {1});
  };
  plan(b.sends, kSendNames, P, C * W);
  b.sends.slot_row = arena.take("exchange.sends.slot_row[C,W]", DType::kI32, {C, W});
  plan(b.returns, kReturnNames, P, C * S);
  b.home_row = arena.take("exchange.home_row[T,S]", DType::kI32, {state.options.max_tokens, S});
  plan(b.plan, kArrivedNames, num_local(state.config), N * S);
  b.plan.slot_row = arena.take("exchange.plan.slot_row[P*C,S]", DType::kI32, {N, S});
  b.back_row = arena.take("exchange.back_row[P*C*S]", DType::kI32, {N * S});
  for (std::int64_t i = 0; i < spread.num_halves(state.options.max_tokens); ++i) {
    SpreadBuffers::Half& half = b.half[static_cast<std::size_t>(i)];
    half.sent = arena.take_bytes("exchange.sent[C*W] records", C * W * spread.record.bytes).data();
    half.arrived = arena.take_bytes("exchange.arrived[P*C] records", N * spread.record.bytes).data();
    half.back = arena.take("exchange.back[P*C*S,H]", state.path.y, {N * S, H});
    half.returned = arena.take("exchange.returned[C*S,H]", state.path.y, {C * S, H});
    half.send_rows = arena.take_array<RowSpan>("exchange.send_rows[P]", P);
    half.arrive_rows = arena.take_array<RowSpan>("exchange.arrive_rows[P]", P);
    half.back_rows = arena.take_array<RowSpan>("exchange.back_rows[P]", P);
    half.return_rows = arena.take_array<RowSpan>("exchange.return_rows[P]", P);
  }
  if (spread.num_halves(state.options.max_tokens) == 1) b.half[1] = b.half[0];
  b.told = arena.take_array<std::int64_t>("exchange.told[P,4]", P * Telling::kWidth);
  b.heard = arena.take_array<std::int64_t>("exchange.heard[P,4]", P * Telling::kWidth);
  return b;
}

exchange::AimArgs aim_args(const Layer::State& state, const SpreadBuffers& b, const ExpertIds& topk_idx,
                           std::int64_t first_token, const TensorView& counters) {
  const std::int64_t count = topk_idx.view.shape[0];
  return {.topk_idx = topk_idx,
          .placement = &state.spread->placement,
          .first_token = first_token,
          .rank = state.spread->rank,
          .slot_rank = b.slot_rank.slice(0, count),
          .slot_local = b.slot_local.slice(0, count),
          .way_rank = b.way_rank.slice(0, count),
          .counters = counters,
          .checked = state.options.checked};
}

route::Args sends_args(const Layer::State& state, const SpreadBuffers& b, std::int64_t count) {
  route::Args args{.topk_idx = {b.way_rank.slice(0, count)}, .num_experts = state.spread->num_ranks, .plan = b.sends};
  args.plan.slot_row = b.sends.slot_row.slice(0, count);
  return args;
}

route::Args returns_args(const Layer::State& state, const SpreadBuffers& b, std::int64_t begin, std::int64_t count) {
  route::Args args{
      .topk_idx = {b.slot_rank.slice(0, count)}, .num_experts = state.spread->num_ranks, .plan = b.returns};
  args.plan.slot_row = b.home_row.slice(begin, count);
  return args;
}

// The weight goes onto the token before it is quantised where the model says so; then S = 1, and a way is a slot.
pack::Args send_pack_args(const Layer::State& state, const SpreadBuffers& b, const SpreadBuffers::Half& half,
                          const TensorView& x, const TensorView& x_scale, const TensorView& topk_weight) {
  const exchange::Record& record = state.spread->record;
  const std::int64_t capacity = b.sends.row_token.shape[0];
  return {.x = x,
          .x_scale = x_scale,
          .row_token = b.sends.row_token,
          .row_slot = b.sends.row_slot,
          .slot_row = b.sends.slot_row.slice(0, x.shape[0]),
          .num_rows = b.sends.num_rows,
          .weight = state.config.weight_on_input ? topk_weight : TensorView{},
          .rows = record.rows(half.sent, capacity),
          .rows_scale = record.scales(half.sent, capacity),
          .scale_format = state.config.activation_scale};
}

route::Args arrived_args(const Layer::State& state, const SpreadBuffers& b, const SpreadBuffers::Half& half,
                         std::int64_t count) {
  route::Args args{.topk_idx = {state.spread->record.ids(half.arrived, count)},
                   .num_experts = std::max<std::int64_t>(num_local(state.config), 1),
                   .plan = b.plan};
  args.plan.slot_row = b.plan.slot_row.slice(0, count);
  return args;
}

pack::Args arrived_pack_args(const Layer::State& state, const SpreadBuffers& b, const SpreadBuffers::Half& half,
                             const FfnBuffers& routed, std::int64_t count) {
  const exchange::Record& record = state.spread->record;
  return {.x = record.rows(half.arrived, count),
          .x_scale = record.scales(half.arrived, count),
          .row_token = b.plan.row_token,
          .row_slot = b.plan.row_slot,
          .slot_row = b.plan.slot_row.slice(0, count),
          .num_rows = b.plan.num_rows,
          .weight = {},
          .rows = routed.rows.data,
          .rows_scale = routed.rows.scale,
          .scale_format = state.config.activation_scale};
}

namespace {

template <class Args>
void book(Layer::State& state, const Impl<Args>* impl, const Args& args) {
  if (impl == nullptr || impl->scratch_bytes == nullptr) return;
  state.scratch_bytes = std::max(state.scratch_bytes, impl->scratch_bytes(args, state.options.machine));
}

}  // namespace

Status book_spread(Layer::State& state) {
  Arena arena(nullptr, state.device());
  const SpreadBuffers b = lay_out_spread(state, arena);
  const FfnBuffers routed = lay_out_experts(state, arena, max_rows_of_round(state));
  const std::int64_t C = state.spread->chunk, N = state.spread->max_arriving();
  book(state, state.route.impl, sends_args(state, b, C));
  book(state, state.route.impl, returns_args(state, b, 0, C));
  book(state, state.route.impl, arrived_args(state, b, b.half[0], N));
  const TensorView weight = TensorView::dense(nullptr, DType::kF32, {C, state.config.top_k});
  for (DType dtype : {DType::kBF16, DType::kF32, state.path.rows}) {
    const TensorView x = TensorView::dense(nullptr, dtype, {C, state.config.hidden});
    book(state, state.routed.pack.of(dtype).impl, send_pack_args(state, b, b.half[0], x, {}, weight));
  }
  const pack::Args arrived = arrived_pack_args(state, b, b.half[0], routed, N);
  const Result<const Impl<pack::Args>*> impl =
      resolve_row(state, "pack of records", "pack", pack::impls(), arrived, arrived.x.to_string());
  if (!impl) return impl.status();
  state.spread->arrived_pack.impl = *impl;
  // As with other rows that are brought: reported only where it is not the one that packs tokens.
  if ((*impl)->name == state.routed.pack.of(DType::kBF16).impl->name) state.reports.pop_back();

  const Spread& spread = *state.spread;
  StageReport report;
  report.stage = "exchange";
  report.impl = std::string(state.options.transport->name());
  report.configuration = fmt::format(
      "rank {} of {}, rounds of up to {} tokens a rank; a token goes to up to {} ranks as {} B, a slot returns as {} B",
      spread.rank, spread.num_ranks, spread.chunk, spread.num_ways, spread.record.bytes,
      state.config.hidden * size_bytes(state.path.y));
  report.tensors = fmt::format("up to {} records, {} rows a round", N, max_rows_of_round(state));
  state.reports.push_back(std::move(report));
  return Status::ok();
}

}  // namespace sluice
