// One rank holds every expert: rows are where they are needed already. And ranks that are only planned.
#include <algorithm>
#include <cstring>

#include "sluice/transport.h"

namespace sluice {
namespace {

class LocalTransport final : public Transport {
 public:
  std::string_view name() const override { return "local"; }
  std::int64_t num_ranks() const override { return 1; }
  std::int64_t rank() const override { return 0; }
  Status exchange_counts(std::span<const std::int64_t> send, std::span<std::int64_t> received) override {
    std::copy(send.begin(), send.end(), received.begin());
    return dead_;
  }
  Result<Ticket> scatter(const RowMove& move) override { return copy(move); }
  Result<Ticket> gather(const RowMove& move) override { return copy(move); }
  Status wait(Ticket) override { return dead_; }
  void abandon(const Status& why) override { dead_ = why; }

 private:
  Result<Ticket> copy(const RowMove& move) const {
    if (!dead_.is_ok()) return dead_;
    const auto bytes = static_cast<std::size_t>(move.send_rows[0].count * move.row_bytes);
    if (bytes > 0) {
      std::memmove(move.receive + move.receive_rows[0].begin * move.row_bytes,
                   move.send + move.send_rows[0].begin * move.row_bytes, bytes);
    }
    return Ticket{0};
  }
  Status dead_;
};

class PlannedTransport final : public Transport {
 public:
  PlannedTransport(std::int64_t num_ranks, std::int64_t rank) : num_ranks_(num_ranks), rank_(rank) {}
  std::string_view name() const override { return "planned"; }
  std::int64_t num_ranks() const override { return num_ranks_; }
  std::int64_t rank() const override { return rank_; }
  Status exchange_counts(std::span<const std::int64_t>, std::span<std::int64_t>) override { return refuse(); }
  Result<Ticket> scatter(const RowMove&) override { return refuse(); }
  Result<Ticket> gather(const RowMove&) override { return refuse(); }
  Status wait(Ticket) override { return refuse(); }
  void abandon(const Status&) override {}

 private:
  static Status refuse() { return {StatusCode::kUnsupported, "planned: the ranks are planned, there are none"}; }
  std::int64_t num_ranks_, rank_;
};

}  // namespace

std::shared_ptr<Transport> local_transport() { return std::make_shared<LocalTransport>(); }
std::shared_ptr<Transport> planned_transport(std::int64_t num_ranks, std::int64_t rank) {
  return std::make_shared<PlannedTransport>(num_ranks, rank);
}

}  // namespace sluice
