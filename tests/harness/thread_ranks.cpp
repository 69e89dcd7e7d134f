#include "harness/thread_ranks.h"

#include <fmt/format.h>

#include <array>
#include <thread>

namespace sluice::test {

struct ThreadRanks::State {
  using Message = std::vector<std::byte>;
  std::int64_t num_ranks = 0;
  std::chrono::milliseconds timeout{};
  std::mutex mutex;
  std::condition_variable arrived;
  std::array<std::vector<std::deque<Message>>, 3> boxes;  // of each kind, [from,to]
  std::vector<std::int64_t> moved;                        // [from,to]

  std::size_t pair(std::int64_t from, std::int64_t to) const { return static_cast<std::size_t>(from * num_ranks + to); }
};

namespace {

// Messages of a kind are waited for in the order they began.
enum Kind { kCounts, kScatter, kGather };
constexpr const char* kNames[] = {"counts", "scatter", "gather"};

}  // namespace

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadRanks::State> state, std::int64_t rank)
      : state_(std::move(state)), rank_(rank) {}
  std::string_view name() const override { return "threads"; }
  std::int64_t num_ranks() const override { return state_->num_ranks; }
  std::int64_t rank() const override { return rank_; }

  Status exchange_counts(std::span<const std::int64_t> send, std::span<std::int64_t> received) override {
    const std::size_t width = send.size() / static_cast<std::size_t>(num_ranks());
    std::vector<RowSpan> spans;
    for (std::int64_t p = 0; p < num_ranks(); ++p) spans.push_back({p, 1});
    RowMove move{static_cast<std::int64_t>(width * sizeof(std::int64_t)), std::as_bytes(send).data(), spans,
                 std::as_writable_bytes(received).data(), spans};
    return begin(move, kCounts).is_ok() ? wait(Ticket{kCounts}) : dead_;
  }
  Result<Ticket> scatter(const RowMove& move) override { return begin(move, kScatter); }
  Result<Ticket> gather(const RowMove& move) override { return begin(move, kGather); }

  Status wait(Ticket ticket) override;
  void abandon(const Status& why) override { dead_ = why; }

 private:
  struct Pending {
    RowMove move;
    std::vector<RowSpan> receive_rows;
  };
  Result<Ticket> begin(const RowMove& move, Kind kind);

  std::shared_ptr<ThreadRanks::State> state_;
  std::int64_t rank_;
  std::array<std::deque<Pending>, 3> pending_;
  Status dead_;
};

Result<Transport::Ticket> ThreadTransport::begin(const RowMove& move, Kind kind) {
  if (!dead_.is_ok()) return dead_;
  const std::lock_guard lock(state_->mutex);
  for (std::int64_t to = 0; to < num_ranks(); ++to) {
    const RowSpan& rows = move.send_rows[static_cast<std::size_t>(to)];
    const std::byte* const first = move.send + rows.begin * move.row_bytes;
    ThreadRanks::State::Message message;
    if (rows.count > 0) message.assign(first, first + rows.count * move.row_bytes);
    if (kind != kCounts) state_->moved[state_->pair(rank_, to)] += static_cast<std::int64_t>(message.size());
    state_->boxes[kind][state_->pair(rank_, to)].push_back(std::move(message));
  }
  state_->arrived.notify_all();
  pending_[kind].push_back({move, {move.receive_rows.begin(), move.receive_rows.end()}});
  return Ticket{kind};
}

Status ThreadTransport::wait(Ticket ticket) {
  if (!dead_.is_ok()) return dead_;
  const char* const stage = kNames[ticket.value];
  auto& waiting = pending_[static_cast<std::size_t>(ticket.value)];
  const Pending pending = std::move(waiting.front());
  waiting.pop_front();
  std::unique_lock lock(state_->mutex);
  for (std::int64_t from = 0; from < num_ranks(); ++from) {
    auto& box = state_->boxes[static_cast<std::size_t>(ticket.value)][state_->pair(from, rank_)];
    const RowSpan& rows = pending.receive_rows[static_cast<std::size_t>(from)];
    const std::int64_t bytes = rows.count * pending.move.row_bytes;
    if (!state_->arrived.wait_for(lock, state_->timeout, [&] { return !box.empty(); })) {
      dead_ = {StatusCode::kPeerFailure, fmt::format("threads: rank {} waited {} ms in {} for {} bytes of rank {}",
                                                     rank_, state_->timeout.count(), stage, bytes, from)};
      return dead_;
    }
    if (static_cast<std::int64_t>(box.front().size()) != bytes) {
      dead_ = {StatusCode::kPeerFailure, fmt::format("threads: rank {} expected {} bytes of rank {} in {}, got {}",
                                                     rank_, bytes, from, stage, box.front().size())};
      return dead_;
    }
    std::copy(box.front().begin(), box.front().end(), pending.move.receive + rows.begin * pending.move.row_bytes);
    box.pop_front();
  }
  return Status::ok();
}

ThreadRanks::ThreadRanks(std::int64_t num_ranks, std::chrono::milliseconds timeout)
    : state_(std::make_shared<State>()) {
  state_->num_ranks = num_ranks;
  state_->timeout = timeout;
  for (auto& boxes : state_->boxes) boxes.resize(static_cast<std::size_t>(num_ranks * num_ranks));
  state_->moved.resize(static_cast<std::size_t>(num_ranks * num_ranks));
}

ThreadRanks::~ThreadRanks() = default;

std::shared_ptr<Transport> ThreadRanks::rank(std::int64_t r) const {
  return std::make_shared<ThreadTransport>(state_, r);
}

void ThreadRanks::run(const std::function<void(std::int64_t, std::shared_ptr<Transport>)>& body) const {
  std::vector<std::thread> threads;
  for (std::int64_t r = 0; r < state_->num_ranks; ++r) threads.emplace_back([&, r] { body(r, rank(r)); });
  for (std::thread& thread : threads) thread.join();
}

std::int64_t ThreadRanks::bytes_moved(std::int64_t from, std::int64_t to) const {
  const std::lock_guard lock(state_->mutex);
  return state_->moved[state_->pair(from, to)];
}

}  // namespace sluice::test
