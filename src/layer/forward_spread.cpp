// A layer whose experts are spread over ranks: the lines of forward.cpp, with the exchange between them, in rounds.
//
//   prepare  topk_idx -> aim -> records of this rank's tokens, on their way to the ranks of their experts
//   work     records of all ranks -> experts -> rows, on their way back
//   finish   rows of this rank's tokens -> out
//
// Round i is prepared before round i-1 is worked on, and round i-2 is finished after: its rows travel meanwhile. Every rank
// goes through the same rounds, as many as the rank with the most tokens needs.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "layer/call.h"
#include "layer/spread.h"
#include "transport/tell_all.h"

namespace sluice {

namespace {

// Rows [begin, begin + count) of the T axis of scales [Hb,T].
TensorView slice_scale(TensorView scale, std::int64_t begin, std::int64_t count) {
  if (!scale.is_present()) return scale;
  scale.data = scale.as<float>() + begin * scale.stride[1];
  scale.shape[1] = count;
  return scale;
}

class Rounds {
 public:
  Rounds(const Layer::State& s, Call& call, const CallTensors& input)
      : s_(s), spread_(*s.spread), call_(call), b_(call.spread), input_(input), transport_(*s.options.transport) {}

  Status run() {
    for (std::int64_t round = 0; round < num_rounds_ + 2; ++round) {
      if (round < num_rounds_) SLUICE_TRY(prepare(round));
      if (round == 0 && s_.has_shared() && num_tokens() > 0) SLUICE_TRY(or_abandon(shared_expert(s_, call_, input_.x)));
      if (round >= 1 && round - 1 < num_rounds_) SLUICE_TRY(work(round - 1));
      if (round >= 2) SLUICE_TRY(finish(round - 2));
    }
    return Status::ok();
  }

 private:
  struct Part {
    std::int64_t begin, count;
  };
  std::int64_t num_tokens() const { return declined_.is_ok() ? input_.x.shape[0] : 0; }
  Part part(std::int64_t round) const {
    const std::int64_t begin = std::min(round * spread_.chunk, num_tokens());
    return {begin, std::min(spread_.chunk, num_tokens() - begin)};
  }
  SpreadBuffers::Half& half(std::int64_t round) { return b_.half[static_cast<std::size_t>(round % 2)]; }

  // The peers count on this rank by now: what fails here leaves them to their time-out.
  Status or_abandon(const Status& status) {
    if (!status.is_ok()) transport_.abandon(status);
    return status;
  }

  Status prepare(std::int64_t round);
  Status make_records(std::int64_t round);
  Status tell(std::int64_t round);
  Status work(std::int64_t round);
  Status finish(std::int64_t round);
  Status drain(const Status& status);

  const Layer::State& s_;
  const Spread& spread_;
  Call& call_;
  SpreadBuffers& b_;
  const CallTensors& input_;
  Transport& transport_;
  Status declined_;
  std::int64_t num_rounds_ = 1;  // known once every rank has told its T
  std::optional<Transport::Ticket> scatter_[2], gather_[2];
};

// aim, sends, returns, pack, address.
Status Rounds::make_records(std::int64_t round) {
  const auto [begin, count] = part(round);
  SpreadBuffers::Half& h = half(round);
  const ExpertIds ids = {call_.b.topk_idx.view.slice(begin, count)};
  SLUICE_TRY(exchange::aim(aim_args(s_, b_, ids, begin, input_.counters)));
  SLUICE_TRY(s_.route(sends_args(s_, b_, count), call_.ctx));
  SLUICE_TRY(s_.route(returns_args(s_, b_, begin, count), call_.ctx));
  const TensorView x = input_.x.slice(begin, count);
  const pack::Args pack =
      send_pack_args(s_, b_, h, x, slice_scale(input_.x_scale, begin, count), call_.b.topk_weight.slice(begin, count));
  SLUICE_TRY(s_.routed.pack(x.dtype, pack, call_.ctx));
  exchange::address(b_.sends, b_.slot_rank, b_.slot_local, spread_.record.ids(h.sent, pack.rows.shape[0]));
  exchange::spans_of(b_.sends.expert_offset, h.send_rows);
  exchange::spans_of(b_.returns.expert_offset, h.return_rows);
  return Status::ok();
}

// What arrives of whom, once everyone has told; and whether everyone is still there.
Status Rounds::tell(std::int64_t round) {
  SpreadBuffers::Half& h = half(round);
  const std::int64_t tokens = num_tokens();
  for (std::int64_t p = 0; p < spread_.num_ranks; ++p) {
    std::int64_t* const told = &b_.told[static_cast<std::size_t>(p * Telling::kWidth)];
    const auto i = static_cast<std::size_t>(p);
    told[Telling::kTokens] = tokens;
    told[Telling::kRecords] = h.send_rows[i].count;
    told[Telling::kRows] = h.return_rows[i].count;
    told[Telling::kDeclined] = declined_.is_ok() ? 0 : 1;
  }
  SLUICE_TRY(transport_.exchange_counts(b_.told, b_.heard).with_context("forward"));
  SLUICE_TRY(drain(declined_));
  std::int64_t record = 0, row = 0;
  for (std::int64_t p = 0; p < spread_.num_ranks; ++p) {
    const std::int64_t* const heard = &b_.heard[static_cast<std::size_t>(p * Telling::kWidth)];
    const auto i = static_cast<std::size_t>(p);
    if (heard[Telling::kDeclined] != 0) {
      return drain(
          {StatusCode::kPeerFailure, fmt::format("forward: rank {} declined this call; its own error says why", p)});
    }
    const std::int64_t most_rows = heard[Telling::kRecords] * s_.config.top_k;
    if (heard[Telling::kTokens] < 0 || heard[Telling::kTokens] > s_.options.max_tokens ||
        heard[Telling::kRecords] < 0 || heard[Telling::kRecords] > spread_.chunk || heard[Telling::kRows] < 0 ||
        heard[Telling::kRows] > most_rows) {
      const Status wrong(
          StatusCode::kPeerFailure,
          fmt::format("forward: rank {} announces {} tokens, {} records and {} rows for round {}; a round has up to {} "
                      "records of {} slots, a call up to {} tokens",
                      p, heard[Telling::kTokens], heard[Telling::kRecords], heard[Telling::kRows], round, spread_.chunk,
                      s_.config.top_k, s_.options.max_tokens));
      transport_.abandon(wrong);
      return wrong;
    }
    h.arrive_rows[i] = {record, heard[Telling::kRecords]};
    h.back_rows[i] = {row, heard[Telling::kRows]};
    record += heard[Telling::kRecords];
    row += heard[Telling::kRows];
    num_rounds_ = std::max(num_rounds_, ceil_div(heard[Telling::kTokens], spread_.chunk));
  }
  return Status::ok();
}

// Every rank has heard the same and stops here: what is on its way still ends, so that the transport can be used again.
Status Rounds::drain(const Status& status) {
  if (status.is_ok()) return status;
  for (int i = 0; i < 2; ++i) {
    for (std::optional<Transport::Ticket>* ticket : {&scatter_[i], &gather_[i]}) {
      if (!ticket->has_value()) continue;
      if (Status ended = transport_.wait(**ticket); !ended.is_ok()) return ended;
      ticket->reset();
    }
  }
  return status;
}

Status Rounds::prepare(std::int64_t round) {
  SpreadBuffers::Half& h = half(round);
  if (part(round).count > 0) {
    if (Status made = make_records(round); !made.is_ok()) declined_ = made;
  }
  if (part(round).count == 0) {
    std::fill(h.send_rows.begin(), h.send_rows.end(), RowSpan{});
    std::fill(h.return_rows.begin(), h.return_rows.end(), RowSpan{});
  }
  SLUICE_TRY(tell(round));
  Result<Transport::Ticket> ticket =
      transport_.scatter({spread_.record.bytes, h.sent, h.send_rows, h.arrived, h.arrive_rows});
  if (!ticket) return ticket.status().with_context("forward");
  scatter_[round % 2] = *ticket;
  return Status::ok();
}

Status Rounds::work(std::int64_t round) {
  SpreadBuffers::Half& h = half(round);
  SLUICE_TRY(transport_.wait(*scatter_[round % 2]).with_context("forward"));
  scatter_[round % 2].reset();
  const std::int64_t num_records = h.arrive_rows.back().begin + h.arrive_rows.back().count;
  const std::int64_t num_back = h.back_rows.back().begin + h.back_rows.back().count;
  if (num_records > 0) {
    const FfnBuffers& routed = call_.b.routed;
    const route::Args arrived = arrived_args(s_, b_, h, num_records);
    SLUICE_TRY(or_abandon(s_.route(arrived, call_.ctx)));
    if (const std::int64_t rows = b_.plan.num_rows.as<std::int32_t>()[0]; rows != num_back) {
      return or_abandon({StatusCode::kPeerFailure,
                         fmt::format("forward: the {} records of round {} name {} local slots, {} were announced",
                                     num_records, round, rows, num_back)});
    }
    SLUICE_TRY(or_abandon(spread_.arrived_pack(arrived_pack_args(s_, b_, h, routed, num_records), call_.ctx)));
    SLUICE_TRY(or_abandon(
        experts(s_, s_.routed, s_.weights.experts, routed, RowGroups::contiguous(b_.plan.expert_offset), call_.ctx)));
    exchange::line_up(routed.y, arrived.plan.slot_row, call_.ctx.num_threads, b_.back_row, h.back);
  }
  const std::int64_t row_bytes = s_.config.hidden * size_bytes(s_.path.y);
  Result<Transport::Ticket> ticket =
      transport_.gather({row_bytes, h.back.row(0), h.back_rows, h.returned.row(0), h.return_rows});
  if (!ticket) return ticket.status().with_context("forward");
  gather_[round % 2] = *ticket;
  return Status::ok();
}

Status Rounds::finish(std::int64_t round) {
  SLUICE_TRY(transport_.wait(*gather_[round % 2]).with_context("forward"));
  gather_[round % 2].reset();
  const auto [begin, count] = part(round);
  if (count == 0) return Status::ok();
  combine::Args args = combine_args(s_, call_.b, half(round).returned, input_.out.slice(begin, count));
  args.slot_row = b_.home_row.slice(begin, count);
  for (TensorView* view : {&args.topk_weight, &args.shared, &args.shared_gate}) {
    if (view->is_present()) *view = view->slice(begin, count);
  }
  return or_abandon(s_.combine(args.out.dtype, args, call_.ctx));
}

}  // namespace

Status forward_spread(const Layer::State& s, Call& call, const CallTensors& input) {
  return Rounds(s, call, input).run();
}

// The call may have no buffers to tell it with: numbers of its own do.
Status decline_spread(const Layer::State& s, const Status& why) {
  std::array<std::int64_t, Telling::kWidth> mine{};
  mine[Telling::kDeclined] = 1;
  std::vector<std::int64_t> told(mine.size() * static_cast<std::size_t>(s.spread->num_ranks)), heard(told.size());
  SLUICE_TRY(tell_all(*s.options.transport, mine, told, heard));
  return why;
}

}  // namespace sluice
