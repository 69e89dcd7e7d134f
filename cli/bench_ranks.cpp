#include "bench_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "bench_rows.h"
#include "transport/forwarded.h"

namespace sluice::cli {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// How long a forward waited for rows, and how many bytes it moved between ranks.
struct Moved {
  double dispatch = 0, combine = 0;  // seconds: counts and records there, rows back
  std::int64_t bytes_there = 0, bytes_back = 0;
  int rounds = 0;
};

class Timed final : public ForwardedTransport {
 public:
  using ForwardedTransport::ForwardedTransport;
  Status exchange_counts(std::span<const std::int64_t> send, std::span<std::int64_t> received) override {
    return timed(moved.dispatch, [&] { return inner().exchange_counts(send, received); });
  }
  Result<Ticket> scatter(const RowMove& move) override {
    moved.bytes_there += bytes_of(move);
    ++moved.rounds;
    return begin(
        moved.dispatch, [&] { return inner().scatter(move); }, true);
  }
  Result<Ticket> gather(const RowMove& move) override {
    moved.bytes_back += bytes_of(move);
    return begin(
        moved.combine, [&] { return inner().gather(move); }, false);
  }
  Status wait(Ticket ticket) override {
    const bool is_scatter = std::find(scatters_.begin(), scatters_.end(), ticket.value) != scatters_.end();
    if (is_scatter) std::erase(scatters_, ticket.value);
    return timed(is_scatter ? moved.dispatch : moved.combine, [&] { return inner().wait(ticket); });
  }

  Moved moved;

 private:
  template <class Call>
  static Status timed(double& sum, const Call& call) {
    const Clock::time_point start = Clock::now();
    const Status status = call();
    sum += seconds_since(start);
    return status;
  }
  template <class Call>
  Result<Ticket> begin(double& sum, const Call& call, bool is_scatter) {
    const Clock::time_point start = Clock::now();
    Result<Ticket> ticket = call();
    sum += seconds_since(start);
    if (ticket && is_scatter) scatters_.push_back(ticket->value);
    return ticket;
  }
  // To others: what a rank keeps crosses nothing.
  std::int64_t bytes_of(const RowMove& move) const {
    std::int64_t rows = 0;
    for (std::int64_t p = 0; p < num_ranks(); ++p) {
      if (p != rank()) rows += move.send_rows[static_cast<std::size_t>(p)].count;
    }
    return rows * move.row_bytes;
  }

  std::vector<int> scatters_;
};

// What a rank can send to all others at once while they send to it, in bytes a second: the best of a few exchanges of
// 16 MB in all, which no layer beats.
Result<double> link_bandwidth(const Ranks& ranks) {
  constexpr std::int64_t kRow = 4096, kRows = 4096;
  const std::int64_t P = ranks.num_ranks(), each = kRows / std::max<std::int64_t>(P - 1, 1);
  std::vector<std::byte> send(static_cast<std::size_t>(kRow * each * P)), receive(send.size());
  std::vector<RowSpan> spans;
  for (std::int64_t p = 0; p < P; ++p) spans.push_back({p * each, p == ranks.rank() ? 0 : each});
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    SLUICE_TRY(ranks.agree({}));
    const Clock::time_point start = Clock::now();
    Result<Transport::Ticket> ticket = ranks.transport()->scatter({kRow, send.data(), spans, receive.data(), spans});
    if (!ticket) return ticket.status();
    SLUICE_TRY(ranks.transport()->wait(*ticket));
    best = std::max(best, static_cast<double>(kRow * each * (P - 1)) / seconds_since(start));
  }
  return best;
}

struct Row {
  Precision precision{};
  std::int64_t tokens = 0, rounds = 0, bytes_there = 0, bytes_back = 0;
  double layer = 0, dispatch = 0, combine = 0;  // medians, seconds
  double share = 0;                             // of the link while it was waited for
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return quantile(values, 0.5);
}

Result<Row> measure(const RanksBench& bench, const Ranks& ranks, const MoeConfig& config, const LayerWeights& weights,
                    Precision precision, std::int64_t tokens, double link) {
  const auto timed = std::make_shared<Timed>(ranks.transport());
  LayerOptions options;
  options.precision = precision;
  options.max_tokens = tokens;
  options.routed_only = bench.routed_only;
  options.machine = bench.machine;
  options.selection = bench.selection;
  options.transport = timed;
  Result<Layer> layer = Layer::create(config, weights, options);
  if (!layer) return layer.status();
  const std::vector<std::byte> x =
      random_normal_bf16(tokens * config.hidden, 1.0, bench.seed + 1000 + static_cast<std::uint64_t>(ranks.rank()));
  std::vector<float> out(static_cast<std::size_t>(tokens * config.hidden));
  std::vector<std::byte> workspace(static_cast<std::size_t>(layer->workspace_bytes()));
  Ctx ctx;
  ctx.workspace = workspace;
  const auto forward = [&](double& seconds) {
    timed->moved = {};
    const Clock::time_point start = Clock::now();
    const Status status = layer->forward(TensorView::dense(x.data(), DType::kBF16, {tokens, config.hidden}),
                                         TensorView::dense(out.data(), DType::kF32, {tokens, config.hidden}), ctx);
    seconds = seconds_since(start);
    return status;
  };
  double seconds = 0;
  SLUICE_TRY(forward(seconds));  // touches the memory
  SLUICE_TRY(forward(seconds));
  // Every rank makes as many runs as the slowest has time for.
  const Result<std::int64_t> runs = ranks.smallest(
      std::clamp<std::int64_t>(static_cast<std::int64_t>(bench.seconds / std::max(seconds, 1e-6)), 5, 10'000));
  if (!runs) return runs.status();
  std::vector<double> layers, dispatches, combines;
  for (std::int64_t i = 0; i < *runs; ++i) {
    SLUICE_TRY(forward(seconds));
    layers.push_back(seconds);
    dispatches.push_back(timed->moved.dispatch);
    combines.push_back(timed->moved.combine);
  }
  Row row{precision,
          tokens,
          timed->moved.rounds,
          timed->moved.bytes_there,
          timed->moved.bytes_back,
          median(layers),
          median(dispatches),
          median(combines)};
  row.share = static_cast<double>(row.bytes_there + row.bytes_back) / (row.dispatch + row.combine) / link;
  return row;
}

Json to_json(const Row& row) {
  return {{"row", "ranks"},
          {"precision", to_string(row.precision)},
          {"tokens_per_rank", row.tokens},
          {"rounds", row.rounds},
          {"layer_seconds", row.layer},
          {"dispatch_seconds", row.dispatch},
          {"experts_seconds", row.layer - row.dispatch - row.combine},
          {"combine_seconds", row.combine},
          {"bytes_there", row.bytes_there},
          {"bytes_back", row.bytes_back},
          {"link_share", row.share}};
}

}  // namespace

Outcome bench_ranks(const RanksBench& bench, const Ranks& ranks, bool json) {
  if (ranks.num_ranks() == 1)
    return Outcome::usage("--ep: one rank moves nothing; start several, as in mpirun -n 2 sluice bench --ep");
  MoeConfig config = bench.subject.config;
  const ExpertRange mine = experts_of_rank(config.num_experts, ranks.num_ranks(), ranks.rank());
  config.first_expert = mine.begin;
  config.num_local = mine.num_local();
  const Result<double> link = link_bandwidth(ranks);
  if (!link) return link.status();
  if (ranks.is_first() && json) {
    print_json({{"row", "device"},
                {"subject", bench.subject.title},
                {"ranks", ranks.num_ranks()},
                {"transport", ranks.transport()->name()},
                {"threads", bench.machine.num_threads},
                {"link_bytes_per_s", *link}},
               true);
  } else if (ranks.is_first()) {
    fmt::print("{} ranks over {}, {} threads each; a rank sends and receives {}/s at once\n", ranks.num_ranks(),
               ranks.transport()->name(), bench.machine.num_threads, format_bytes(static_cast<std::int64_t>(*link)));
  }
  Table table({{"PRECISION"},
               {"T A RANK", true},
               {"ROUNDS", true},
               {"LAYER", true},
               {"DISPATCH", true},
               {"EXPERTS", true},
               {"COMBINE", true},
               {"BYTES THERE", true},
               {"BYTES BACK", true},
               {"LINK", true}});
  for (const Precision precision : bench.precisions) {
    const bool from_file = bench.subject.model.has_value();
    const WeightForm experts = from_file ? bench.subject.experts_for(precision) : bench_dtype(precision);
    const WeightForm shared = from_file ? bench.subject.shared_for(precision) : bench_dtype(precision);
    Result<LayerWeights> weights =
        make_weights(config, experts, shared, Fill::kRandom, bench.seed, bench.machine.num_threads);
    SLUICE_TRY(ranks.agree(weights.status()));
    for (const std::int64_t tokens : bench.tokens) {
      const Result<Row> row = measure(bench, ranks, config, *weights, precision, tokens, *link);
      if (!row) return row.status();
      if (!ranks.is_first()) continue;
      if (json) print_json(to_json(*row), true);
      table.add({std::string(to_string(precision)), format_count(tokens), format_count(row->rounds),
                 format_seconds(row->layer), format_seconds(row->dispatch),
                 format_seconds(row->layer - row->dispatch - row->combine), format_seconds(row->combine),
                 format_bytes(row->bytes_there), format_bytes(row->bytes_back),
                 fmt::format("{:.0f} %", row->share * 100)});
    }
  }
  if (!json && ranks.is_first()) table.print();
  return kExitOk;
}

}  // namespace sluice::cli
