#include "layer/tensor_parallel.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "layer/resolve.h"
#include "transport/tell_all.h"

namespace sluice {

Status plan_tensor(Layer::State& state) {
  const LayerOptions& o = state.options;
  if (o.tensor_transport == nullptr || o.tensor_transport->num_ranks() == 1) return Status::ok();
  if (o.machine.device.kind != DeviceKind::kCpu) {
    return {StatusCode::kUnsupported,
            fmt::format("options: tensor_transport {} over {} ranks moves host memory, the layer is on GPU {}",
                        o.tensor_transport->name(), o.tensor_transport->num_ranks(), o.machine.device.index)};
  }
  if (o.tensor_transport->num_ranks() > kMaxTensorRanks) {
    return {StatusCode::kInvalidArgument, fmt::format("options: tensor_transport has {} ranks, at most {} can share I",
                                                      o.tensor_transport->num_ranks(), kMaxTensorRanks)};
  }
  if (state.weights.experts.w2_bias.is_present() && o.tensor_transport->rank() != 0) {
    return {
        StatusCode::kInvalidArgument,
        fmt::format("weights: experts.w2_bias is present on rank {} of the tensor group; every rank's would be added, "
                    "so only rank 0 brings it",
                    o.tensor_transport->rank())};
  }
  state.tensor = std::make_unique<TensorGroup>();
  state.tensor->num_ranks = o.tensor_transport->num_ranks();
  state.tensor->rank = o.tensor_transport->rank();
  return Status::ok();
}

TensorBuffers lay_out_tensor(const Layer::State& state, Arena& arena) {
  const std::int64_t T = state.options.max_tokens, H = state.config.hidden, Q = state.tensor->num_ranks;
  const std::int64_t share = ceil_div(T, Q);
  TensorBuffers b;
  b.partial = arena.take("tensor.partial[T,H]", DType::kF32, {T, H});
  b.parts = arena.take("tensor.parts[Q*T/Q,H]", DType::kF32, {Q * share, H});
  b.part_row = arena.take("tensor.part_row[T/Q,Q]", DType::kI32, {share, Q});
  b.share = arena.take_array<RowSpan>("tensor.share[Q]", Q);
  b.gathered = arena.take_array<RowSpan>("tensor.gathered[Q]", Q);
  b.mine = arena.take_array<RowSpan>("tensor.mine[Q]", Q);
  return b;
}

Status book_tensor(Layer::State& state) {
  Arena arena(nullptr, state.device());
  const TensorBuffers b = lay_out_tensor(state, arena);
  const combine::Args args{
      .y = b.parts, .slot_row = b.part_row, .unweighted = true, .out = b.partial.slice(0, b.part_row.shape[0])};
  const Result<const Impl<combine::Args>*> impl = resolve_row(state, "tensor sum", "combine", combine::impls(), args,
                                                              fmt::format("partial {} -> out", b.partial.to_string()));
  if (!impl) return impl.status();
  state.tensor->add.impl = *impl;
  state.reports.back().configuration = fmt::format("rank {} of {} over {}", state.tensor->rank, state.tensor->num_ranks,
                                                   state.options.tensor_transport->name());
  return Status::ok();
}

Status meet(const Layer::State& state, std::int64_t num_tokens, DType out, const Status& ready) {
  Transport& transport = *state.options.tensor_transport;
  const std::int64_t num_ranks = transport.num_ranks();
  constexpr std::size_t kWidth = 3;
  const std::array<std::int64_t, kWidth> mine{num_tokens, ready.is_ok() ? 0 : 1, static_cast<std::int64_t>(out)};
  std::array<std::int64_t, kWidth * kMaxTensorRanks> told{}, heard{};
  const std::size_t count = kWidth * static_cast<std::size_t>(num_ranks);
  SLUICE_TRY(
      tell_all(transport, mine, std::span(told).first(count), std::span(heard).first(count)).with_context("forward"));
  SLUICE_TRY(ready);
  for (std::int64_t q = 0; q < num_ranks; ++q) {
    if (heard[static_cast<std::size_t>(q) * kWidth + 1] != 0) {
      return {StatusCode::kPeerFailure,
              fmt::format("forward: rank {} of the tensor group declined this call; its own error says why", q)};
    }
    if (const std::int64_t theirs = heard[static_cast<std::size_t>(q) * kWidth]; theirs != num_tokens) {
      return {StatusCode::kPeerFailure,
              fmt::format("forward: rank {} of the tensor group brings T = {} tokens, rank {} brings {}; all bring the "
                          "same",
                          q, theirs, transport.rank(), num_tokens)};
    }
    if (const auto theirs = static_cast<DType>(heard[static_cast<std::size_t>(q) * kWidth + 2]); theirs != out) {
      return {StatusCode::kPeerFailure,
              fmt::format("forward: rank {} of the tensor group wants out in {}, rank {} in {}; all want the same", q,
                          to_string(theirs), transport.rank(), to_string(out))};
    }
  }
  return Status::ok();
}

Status add_partials(const Layer::State& state, const TensorBuffers& b, const TensorView& out, const Ctx& ctx) {
  Transport& transport = *state.options.tensor_transport;
  const TensorGroup& group = *state.tensor;
  const std::int64_t T = out.shape[0], H = out.shape[1];
  const ExpertRange own = experts_of_rank(T, group.num_ranks, group.rank);  // the balanced split of anything
  const std::int64_t num_own = own.end - own.begin;
  for (std::int64_t q = 0; q < group.num_ranks; ++q) {
    const ExpertRange theirs = experts_of_rank(T, group.num_ranks, q);
    const auto i = static_cast<std::size_t>(q);
    b.share[i] = {theirs.begin, theirs.end - theirs.begin};
    b.gathered[i] = {q * num_own, num_own};
    b.mine[i] = {own.begin, num_own};
    for (std::int64_t t = 0; t < num_own; ++t)
      b.part_row.as<std::int32_t>()[t * b.part_row.stride[0] + q] = static_cast<std::int32_t>(q * num_own + t);
  }
  Result<Transport::Ticket> scatter = transport.scatter({H * 4, b.partial.row(0), b.share, b.parts.row(0), b.gathered});
  if (!scatter) return scatter.status().with_context("forward");
  SLUICE_TRY(transport.wait(*scatter).with_context("forward"));

  // The partial sums have left: their memory takes the sums, dense and in the dtype of out.
  const TensorView sums = TensorView::dense(b.partial.data, out.dtype, {T, H});
  const combine::Args args{.y = b.parts.slice(0, group.num_ranks * num_own),
                           .slot_row = b.part_row.slice(0, num_own),
                           .unweighted = true,
                           .out = sums.slice(own.begin, num_own)};
  if (num_own > 0) SLUICE_TRY(group.add(args, ctx));
  Result<Transport::Ticket> gather =
      transport.gather({H * size_bytes(out.dtype), sums.row(0), b.mine, sums.row(0), b.share});
  if (!gather) return gather.status().with_context("forward");
  SLUICE_TRY(transport.wait(*gather).with_context("forward"));
  for (std::int64_t t = 0; t < T; ++t)
    std::memcpy(out.row(t), sums.row(t), static_cast<std::size_t>(H * size_bytes(out.dtype)));
  return Status::ok();
}

}  // namespace sluice
