#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "scale/times.h"
#include "scale/traffic.h"

namespace sluice::scale {

namespace {

constexpr std::int64_t kMaxRanks = 4096, kMaxTokens = std::int64_t{1} << 24, kMaxSlots = 1 << 16;
constexpr int kBarriers = 2;         // of a move: windows free, rows there
constexpr int kFlagsPerBarrier = 2;  // there and back

double as_double(std::int64_t value) { return static_cast<double>(value); }

// What of a request does not depend on T, made once.
class Model {
 public:
  Model(const Hardware& hardware, const Request& request) : hw_(hardware), r_(request), ranks_(hardware, request) {}
  Prediction run() const;

 private:
  // The stages in the order of a forward, for T tokens a rank.
  struct Stages {
    Phase gate, pack, up, activation, down, shared, sum, reduce;
    Move dispatch, combine;
    double experts() const { return pack.us + up.us + activation.us + down.us + shared.us; }
  };
  Stages stages(std::int64_t tokens) const;

  double rows_max(double tokens, std::int64_t rank) const;
  double reach(double mean, double variance) const {
    return mean + std::sqrt(variance * 2 * std::log(as_double(r_.num_ranks)));
  }
  Phase glue(std::string_view name, double bytes, int launches) const;
  template <class PerRank>
  Move move(PerRank rows_of, double bytes, bool setup) const;
  Move dispatch(double tokens, bool forwarded) const;
  Move combine(double tokens, bool partial, bool forwarded) const;
  Memory memory(double tokens) const;
  double overlapped(const Stages& whole) const;

  double width() const { return as_double(r_.config.intermediate / r_.tensor_parallel); }
  double hidden() const { return as_double(r_.config.hidden); }
  // Of a quantised or plain row of `columns`, scales included.
  double row_size(DType dtype, double columns) const {
    const double scales = is_quantised(dtype) ? (path_.row_scales ? 1 : std::ceil(columns / kScaleBlock)) * 4 : 0;
    return columns * as_double(size_bytes(dtype)) + scales;
  }

  const Hardware& hw_;
  const Request& r_;
  const DataPath path_ = path_of(r_);
  const Ranks ranks_;
};

// Tokens are independent of each other, so the count of a rank is near normal; the largest of P such counts is expected
// at most at mean + deviation * sqrt(2 ln P). Never more than every token can bring.
double Model::rows_max(double tokens, std::int64_t rank) const {
  const RangeShare& share = ranks_.share(rank);
  const double all = tokens * as_double(r_.num_ranks);
  return std::min(reach(all * share.rows, all * share.variance),
                  all * as_double(std::min(r_.config.top_k, ranks_.slots(rank))));
}

Phase Model::glue(std::string_view name, double bytes, int launches) const {
  const double launch = launches * hw_.launch_us;
  const double stream = us_of_bytes(bytes, hw_.hbm_gb_per_s * hw_.glue_share);
  return {name, launch + stream, launch > stream ? "latency" : "HBM"};
}

// `rows_of` gives a rank's traffic in rows, and by how much the busiest receiver exceeds its mean.
template <class PerRank>
Move Model::move(PerRank rows_of, double bytes, bool setup) const {
  Move m{0, "-", {}};
  if (r_.num_ranks == 1) {
    m.mean.out.gpu = m.mean.in.gpu = rows_of(0).traffic.out.gpu * bytes;
    return m;
  }
  double nvlink = 0, nic = 0;
  const auto each = [&](const Links& from, Links& to, double excess) {
    to.gpu += from.gpu * bytes / as_double(r_.num_ranks);
    to.nvlink += from.nvlink * bytes / as_double(r_.num_ranks);
    to.nic += from.nic * bytes / as_double(r_.num_ranks);
    nvlink = std::max(nvlink, us_of_bytes(from.nvlink * bytes * excess, hw_.nvlink_gb_per_s));
    nic = std::max(nic, us_of_bytes(from.nic * bytes * excess, hw_.nic_gb_per_s));
  };
  for (std::int64_t rank = 0; rank < r_.num_ranks; ++rank) {
    const auto [traffic, out_excess, in_excess] = rows_of(rank);
    each(traffic.out, m.mean.out, out_excess);
    each(traffic.in, m.mean.in, in_excess);
  }
  const bool crosses = ranks_.num_domains() > 1;
  double latency =
      hw_.launch_us + (crosses ? kBarriers * hw_.nic_latency_us : kBarriers * kFlagsPerBarrier * hw_.nvlink_flag_us);
  if (crosses && setup) latency += hw_.nic_setup_us;
  const double link = std::max(nvlink, nic);
  m.us = latency + link;
  m.limit = latency > link ? "latency" : nic > nvlink ? "InfiniBand" : "NVLink";
  return m;
}

struct RankRows {
  Traffic traffic;
  double out_excess = 1, in_excess = 1;
};

// Whoever has the fullest rank receives most rows and sends most results.
Move Model::dispatch(double tokens, bool forwarded) const {
  return move(
      [&](std::int64_t rank) {
        const double hit = ranks_.share(rank).hit, all = tokens * as_double(r_.num_ranks);
        const double mean = all * hit;
        const double excess = mean > 0 ? std::min(reach(mean, mean * (1 - hit)), all) / mean : 1;
        return RankRows{forwarded ? ranks_.per_domain(rank) : ranks_.per_rank(rank), 1, excess};
      },
      tokens * as_double(row_bytes(r_)), true);
}

Move Model::combine(double tokens, bool partial, bool forwarded) const {
  return move(
      [&](std::int64_t rank) {
        const Traffic there = forwarded ? ranks_.per_domain(rank)
                              : partial ? ranks_.per_rank(rank)
                                        : ranks_.per_slot(rank);
        const double mean = tokens * as_double(r_.num_ranks) * ranks_.share(rank).rows;
        const double excess = partial || mean <= 0 ? 1 : rows_max(tokens, rank) / mean;
        return RankRows{{there.in, there.out}, excess, 1};
      },
      tokens * hidden() * as_double(size_bytes(path_.y)), false);
}

Model::Stages Model::stages(std::int64_t num_tokens) const {
  const double tokens = as_double(num_tokens), experts = as_double(r_.config.num_experts);
  const double slots = as_double(r_.config.top_k);
  // Rank 0 has as many slots as any.
  const double rows = rows_max(tokens, 0);
  const double used = 1 - std::pow(1 - slots / as_double(num_slots(r_)), tokens * as_double(r_.num_ranks));
  const double active = std::min(as_double(ranks_.slots(0)) * used, std::max(rows, 0.0));
  const double x = tokens * hidden() * 2, packed = row_size(path_.rows, hidden());

  Stages s;
  s.gate = glue("gate, route", experts * hidden() * 2 + x + tokens * experts * 8, 3);
  s.dispatch = dispatch(tokens, false);
  s.combine = combine(tokens, false, false);
  double pack_bytes = x + rows * packed;
  if (r_.num_ranks > 1) {  // quantised before they leave, read again where they arrive
    const double arrived = tokens * as_double(r_.num_ranks) * ranks_.share(0).hit;
    pack_bytes += (tokens + arrived) * as_double(row_bytes(r_));
  }
  s.pack = glue("pack", pack_bytes, r_.num_ranks > 1 ? 2 : 1);
  const auto gemm = [&](std::string_view name, double gemm_rows, double gemm_experts, double n, double k) {
    const GemmTime time = gemm_time(hw_, {r_.precision, path_.row_scales, gemm_rows, gemm_experts, n, k});
    return Phase{name, time.us, time.limit};
  };
  const auto activation_bytes = [&](double count, double columns) {
    return count * (2 * columns * as_double(size_bytes(path_.h)) + row_size(path_.a, columns));
  };
  s.up = gemm("up", rows, active, 2 * width(), hidden());
  s.activation = glue("swiglu_quant", activation_bytes(rows, width()), 1);
  s.down = gemm("down", rows, active, hidden(), width());
  s.shared = {"shared expert", 0, "-"};
  const double shared = as_double(r_.config.shared_intermediate) / as_double(r_.tensor_parallel);
  if (shared > 0 && tokens > 0) {
    const Phase up = gemm("", tokens, 1, 2 * shared, hidden()), down = gemm("", tokens, 1, hidden(), shared);
    s.shared.us = up.us + down.us + glue("", activation_bytes(tokens, shared), 1).us;
    s.shared.limit = up.us > down.us ? up.limit : down.limit;
  }
  s.sum =
      glue("weighted sum", tokens * slots * hidden() * as_double(size_bytes(path_.y)) + x * (shared > 0 ? 2 : 1), 1);
  s.reduce = {"tensor-parallel reduction", 0, "-"};
  if (r_.tensor_parallel > 1) {
    // Inside the NVLink domain: f32 sums to the GPU that adds them, the rounded ones back.
    const double away = 1 - 1 / as_double(r_.tensor_parallel);
    const double latency = hw_.launch_us + 2 * kFlagsPerBarrier * hw_.nvlink_flag_us;
    const double link = us_of_bytes(away * tokens * hidden() * (4 + 2), hw_.nvlink_gb_per_s);
    s.reduce = {s.reduce.name, latency + link, latency > link ? "latency" : "NVLink"};
  }
  return s;
}

// Two chunks on two queues: moves D1 D2 C1 C2 on one, experts E1 E2 on the other; each starts when its queue is free
// and its input is there. Gate, weighted sum and reduction stay outside.
double Model::overlapped(const Stages& whole) const {
  const std::int64_t half = r_.tokens / 2;
  const Stages first = stages(r_.tokens - half), second = stages(half);
  const double d1 = first.dispatch.us, d2 = d1 + second.dispatch.us;
  const double e1 = d1 + first.experts(), e2 = std::max(e1, d2) + second.experts();
  const double c1 = std::max(e1, d2) + first.combine.us, c2 = std::max(c1, e2) + second.combine.us;
  return whole.gate.us + c2 + whole.sum.us + whole.reduce.us;
}

Memory Model::memory(double tokens) const {
  const MoeConfig& c = r_.config;
  const double element = as_double(size_bytes(r_.weight));
  // Three matrices of H x columns.
  const auto ffn = [&](double columns) {
    double bytes = 3 * hidden() * columns * element;
    if (is_quantised(r_.weight)) {
      bytes += path_.row_scales ? (2 * columns + hidden()) * 4
                                : 3 * std::ceil(hidden() / kScaleBlock) * std::ceil(columns / kScaleBlock) * 4;
    }
    return bytes;
  };
  const double slots = as_double(ranks_.slots(0));
  Memory m;
  m.weights = slots * ffn(width()) + as_double(c.num_experts) * hidden() * 2;
  if (c.shared_intermediate > 0) m.weights += ffn(as_double(c.shared_intermediate) / as_double(r_.tensor_parallel));
  const double all = tokens * as_double(r_.num_ranks), y = hidden() * as_double(size_bytes(path_.y));
  if (r_.num_ranks > 1) {
    m.receive = all * as_double(row_bytes(r_));
    m.returned = tokens * as_double(c.top_k) * y;
  }
  const double bound = all * as_double(c.top_k);
  m.workspace = bound * (row_size(path_.rows, hidden()) + 2 * width() * as_double(size_bytes(path_.h)) +
                         row_size(path_.a, width()) + y);
  return m;
}

Prediction Model::run() const {
  Prediction p;
  const double tokens = as_double(r_.tokens);
  p.row_bytes = row_bytes(r_);
  for (std::int64_t rank = 0; rank < ranks_.count(); ++rank) p.ranks_per_token += ranks_.share(rank).hit;
  for (std::int64_t d = 0; d < ranks_.num_domains(); ++d) p.domains_per_token += ranks_.domain_share(d).hit;
  p.rows_mean = tokens * as_double(r_.config.top_k);  // over all ranks
  p.rows_max = rows_max(tokens, 0);
  p.active_experts =
      as_double(ranks_.slots(0)) *
      (1 - std::pow(1 - as_double(r_.config.top_k) / as_double(num_slots(r_)), tokens * as_double(r_.num_ranks)));
  const Stages s = stages(r_.tokens);
  p.dispatch = s.dispatch;
  p.dispatch_forwarded = dispatch(tokens, true);
  p.combine = s.combine;
  p.combine_partial = combine(tokens, true, false);
  p.combine_forwarded = combine(tokens, true, true);
  p.phases = {s.gate,   {"dispatch", s.dispatch.us, s.dispatch.limit}, s.pack, s.up,    s.activation, s.down,
              s.shared, {"combine", s.combine.us, s.combine.limit},    s.sum,  s.reduce};
  for (const Phase& phase : p.phases) p.serial_us += phase.us;
  p.gemm_us = s.up.us + s.down.us;
  p.overlapped_us = r_.tokens > 1 && r_.num_ranks > 1 ? overlapped(s) : p.serial_us;
  p.tokens_per_s = tokens / as_double(r_.tensor_parallel) / (std::min(p.serial_us, p.overlapped_us) * 1e-6);
  p.memory = memory(tokens);
  const double capacity = hw_.memory_gb * 1e9, one = memory(1).total() - p.memory.weights;
  p.fits = p.memory.total() <= capacity;
  p.largest_round = static_cast<std::int64_t>(std::max(0.0, std::floor((capacity - p.memory.weights) / one)));
  return p;
}

Status refuse(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }

}  // namespace

Status validate(const Request& r) {
  SLUICE_TRY(validate(r.config));
  const auto in_range = [](std::string_view name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value >= low && value <= high) return Status::ok();
    return refuse(fmt::format("{} = {} is not between {} and {}", name, value, low, high));
  };
  SLUICE_TRY(in_range("tokens", r.tokens, 1, kMaxTokens));
  SLUICE_TRY(in_range("num_ranks", r.num_ranks, 1, kMaxRanks));
  SLUICE_TRY(in_range("tensor_parallel", r.tensor_parallel, 1, r.config.intermediate));
  if (r.num_slots != 0) SLUICE_TRY(in_range("num_slots", r.num_slots, r.config.num_experts, kMaxSlots));
  if (r.config.first_expert != 0 || num_local(r.config) != r.config.num_experts) {
    return refuse(fmt::format("config: local experts [{}, {}), wanted all {}: the plan splits them itself",
                              r.config.first_expert, r.config.first_expert + num_local(r.config),
                              r.config.num_experts));
  }
  if (r.precision != Precision::kW8A8 && r.precision != Precision::kBF16) {
    return refuse(fmt::format("precision = {}: a hardware file has rates for w8a8 and bf16", to_string(r.precision)));
  }
  if (const Result<DataPath> path = data_path(r.precision, r.weight, r.row_scales); !path) return path.status();
  if (r.config.intermediate % r.tensor_parallel != 0) {
    return refuse(fmt::format("tensor_parallel = {} does not divide intermediate = {}", r.tensor_parallel,
                              r.config.intermediate));
  }
  const std::int64_t groups = r.config.gate.n_group;
  if (groups > 1 && num_slots(r) % groups != 0) {
    return refuse(fmt::format("num_slots = {} is not a multiple of the gate's n_group = {}", num_slots(r), groups));
  }
  return Status::ok();
}

Result<Prediction> predict(const Hardware& hardware, const Request& request) {
  SLUICE_TRY(validate(hardware));
  SLUICE_TRY(validate(request));
  if (hardware.nvlink_domain % request.tensor_parallel != 0) {
    return refuse(fmt::format("tensor_parallel = {} does not divide nvlink_domain = {} of {}", request.tensor_parallel,
                              hardware.nvlink_domain, hardware.name));
  }
  return Model(hardware, request).run();
}

}  // namespace sluice::scale
