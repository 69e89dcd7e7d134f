// The transport over MPI: for each move one message to and from each rank that has rows, looked after until all have ended
// or the time is over.
//
// Messages between pairs and not MPI_Ialltoallv: a collective cannot say which rank is late, cannot be given up, and moves
// at most 2^31 - 1 elements of one type in all (docs/decisions.md).
#include "sluice/mpi.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTags[] = {1, 2, 3};
constexpr std::string_view kStages[] = {"exchange_counts", "scatter", "gather"};
enum Stage { kCounts, kScatter, kGather };

// Spinning finds a message of microseconds at once; ranks that share cores need them for the one that computes.
constexpr int kSpins = 200;
constexpr std::chrono::microseconds kPause{50};

std::string error_text(int error) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(error, text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

class MpiTransport final : public Transport {
 public:
  MpiTransport(MPI_Comm communicator, const MpiOptions& options)
      : communicator_(communicator), timeout_(options.timeout_seconds) {
    MPI_Comm_rank(communicator, &rank_);
    MPI_Comm_size(communicator, &size_);
    MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN);
    for (Move& move : moves_) {
      move.requests.assign(2 * static_cast<std::size_t>(size_), MPI_REQUEST_NULL);
      move.expected.resize(static_cast<std::size_t>(size_));
      move.sent.resize(static_cast<std::size_t>(size_));
    }
    finished_.resize(2 * static_cast<std::size_t>(size_));
    statuses_.resize(2 * static_cast<std::size_t>(size_));
    count_spans_.resize(static_cast<std::size_t>(size_));
  }
  ~MpiTransport() override {
    int is_finalized = 0;
    MPI_Finalized(&is_finalized);
    if (is_finalized != 0) return;
    for (RowType& known : row_types_) {
      if (known.type != MPI_DATATYPE_NULL) MPI_Type_free(&known.type);
    }
    // Freeing is collective: with a rank missing it might wait for ever.
    if (dead_.is_ok()) MPI_Comm_free(&communicator_);
  }
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  std::string_view name() const override { return "mpi"; }
  std::int64_t num_ranks() const override { return size_; }
  std::int64_t rank() const override { return rank_; }

  Status exchange_counts(std::span<const std::int64_t> send, std::span<std::int64_t> received) override {
    if (send.size() != received.size() || send.size() % static_cast<std::size_t>(size_) != 0) {
      return {StatusCode::kInvalidArgument,
              fmt::format("mpi: exchange_counts has {} numbers to send and {} to receive, "
                          "expected as many of each for each of {} ranks",
                          send.size(), received.size(), size_)};
    }
    for (int p = 0; p < size_; ++p) count_spans_[static_cast<std::size_t>(p)] = {p, 1};
    const auto row_bytes = static_cast<std::int64_t>(send.size_bytes() / static_cast<std::size_t>(size_));
    Result<Ticket> ticket = begin(
        {row_bytes, std::as_bytes(send).data(), count_spans_, std::as_writable_bytes(received).data(), count_spans_},
        kCounts);
    if (!ticket) return ticket.status();
    return wait(*ticket);
  }
  Result<Ticket> scatter(const RowMove& move) override { return begin(move, kScatter); }
  Result<Ticket> gather(const RowMove& move) override { return begin(move, kGather); }
  Status wait(Ticket ticket) override;
  void abandon(const Status& why) override { [[maybe_unused]] const Status dead = die(why); }

 private:
  struct Move {
    bool is_active = false;
    Stage stage = kCounts;
    std::int64_t row_bytes = 0;
    std::vector<MPI_Request> requests;   // [2P] receives from each rank, then sends to each
    std::vector<std::int64_t> expected;  // [P] rows
    std::vector<std::int64_t> sent;      // [P] rows
  };

  Result<Ticket> begin(const RowMove& rows, Stage stage);
  int find_type(std::int64_t row_bytes, MPI_Datatype& type);  // an MPI error code
  Status check_arrival(const Move& move, int index, const MPI_Status& status);
  Status die(Status why);
  Status late(const Move& move);
  Status failed(const Move& move, int error) {
    return die({StatusCode::kPeerFailure,
                fmt::format("mpi: rank {} in {}: {}", rank_, kStages[move.stage], error_text(error))});
  }

  MPI_Comm communicator_;
  std::chrono::duration<double> timeout_;
  int rank_ = 0;
  int size_ = 1;
  Status dead_;
  // One for counts, which may be exchanged while the moves are on their way.
  std::array<Move, kMaxMoves + 1> moves_;
  std::vector<int> finished_;
  std::vector<MPI_Status> statuses_;
  std::vector<RowSpan> count_spans_;
  // A layer moves rows of three sizes; the oldest makes room for a ninth. A type may be freed while it is in use.
  struct RowType {
    std::int64_t bytes = 0;
    MPI_Datatype type = MPI_DATATYPE_NULL;
  };
  std::array<RowType, 8> row_types_{};
  std::size_t oldest_type_ = 0;
};

int MpiTransport::find_type(std::int64_t row_bytes, MPI_Datatype& type) {
  for (const RowType& known : row_types_) {
    type = known.type;
    if (known.bytes == row_bytes) return MPI_SUCCESS;
  }
  RowType& place = row_types_[oldest_type_];
  oldest_type_ = (oldest_type_ + 1) % row_types_.size();
  if (place.type != MPI_DATATYPE_NULL) MPI_Type_free(&place.type);
  place = {};
  int error = MPI_Type_contiguous(static_cast<int>(row_bytes), MPI_BYTE, &type);
  if (error == MPI_SUCCESS) error = MPI_Type_commit(&type);
  if (error == MPI_SUCCESS) place = {row_bytes, type};
  return error;
}

// Rows are counted, not bytes: an int holds the rows of a plan, but not the bytes of many.
Result<Transport::Ticket> MpiTransport::begin(const RowMove& rows, Stage stage) {
  if (!dead_.is_ok()) return dead_;
  const auto free = std::find_if(moves_.begin(), moves_.end() - (stage == kCounts ? 0 : 1),
                                 [](const Move& move) { return !move.is_active; });
  if (free == moves_.end() - (stage == kCounts ? 0 : 1)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("mpi: {} moves are on their way, at most {} can be", kMaxMoves, kMaxMoves));
  }
  Move& move = *free;
  move.stage = stage;
  move.row_bytes = rows.row_bytes;
  if (rows.row_bytes < 1 || rows.row_bytes > std::numeric_limits<int>::max()) {
    return Status(StatusCode::kInvalidArgument, fmt::format("mpi: rows of {} bytes, expected 1 to {}", rows.row_bytes,
                                                            std::numeric_limits<int>::max()));
  }
  MPI_Datatype row_type = MPI_DATATYPE_NULL;
  if (const int error = find_type(rows.row_bytes, row_type); error != MPI_SUCCESS) return failed(move, error);
  for (int p = 0; p < size_; ++p) {
    const auto i = static_cast<std::size_t>(p);
    move.expected[i] = rows.receive_rows[i].count;
    move.sent[i] = rows.send_rows[i].count;
    for (const std::int64_t count : {move.expected[i], move.sent[i]}) {
      if (count < 0 || count > std::numeric_limits<int>::max()) {
        return die(
            {StatusCode::kInvalidArgument, fmt::format("mpi: {} rows between ranks {} and {}", count, rank_, p)});
      }
    }
  }
  move.is_active = true;
  int error = MPI_SUCCESS;
  for (int p = 0; p < size_ && error == MPI_SUCCESS; ++p) {
    const auto i = static_cast<std::size_t>(p);
    if (p == rank_ || move.expected[i] == 0) continue;
    error = MPI_Irecv(rows.receive + rows.receive_rows[i].begin * rows.row_bytes, static_cast<int>(move.expected[i]),
                      row_type, p, kTags[stage], communicator_, &move.requests[i]);
  }
  for (int p = 0; p < size_ && error == MPI_SUCCESS; ++p) {
    const auto i = static_cast<std::size_t>(p);
    if (p == rank_ || move.sent[i] == 0) continue;
    error = MPI_Isend(rows.send + rows.send_rows[i].begin * rows.row_bytes, static_cast<int>(move.sent[i]), row_type, p,
                      kTags[stage], communicator_, &move.requests[static_cast<std::size_t>(size_) + i]);
  }
  if (error != MPI_SUCCESS) return failed(move, error);
  const auto self = static_cast<std::size_t>(rank_);
  if (move.sent[self] != move.expected[self]) {
    return die({StatusCode::kInvalidArgument, fmt::format("mpi: rank {} sends {} rows to itself and expects {}", rank_,
                                                          move.sent[self], move.expected[self])});
  }
  if (move.sent[self] > 0) {
    std::memmove(rows.receive + rows.receive_rows[self].begin * rows.row_bytes,
                 rows.send + rows.send_rows[self].begin * rows.row_bytes,
                 static_cast<std::size_t>(move.sent[self] * rows.row_bytes));
  }
  return Ticket{static_cast<int>(free - moves_.begin())};
}

Status MpiTransport::check_arrival(const Move& move, int index, const MPI_Status& status) {
  if (index >= size_) return Status::ok();
  MPI_Count bytes = 0;
  MPI_Get_elements_x(&status, MPI_BYTE, &bytes);
  const std::int64_t expected = move.expected[static_cast<std::size_t>(index)];
  if (bytes == expected * move.row_bytes) return Status::ok();
  return die({StatusCode::kPeerFailure,
              fmt::format("mpi: rank {} in {}: {} rows of {} bytes were expected of rank {}, {} bytes came", rank_,
                          kStages[move.stage], expected, move.row_bytes, index, static_cast<std::int64_t>(bytes))});
}

Status MpiTransport::wait(Ticket ticket) {
  if (!dead_.is_ok()) return dead_;
  if (ticket.value < 0 || ticket.value >= static_cast<int>(moves_.size()) ||
      !moves_[static_cast<std::size_t>(ticket.value)].is_active) {
    return {StatusCode::kInvalidArgument, fmt::format("mpi: there is no move {} on its way", ticket.value)};
  }
  Move& move = moves_[static_cast<std::size_t>(ticket.value)];
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout_);
  for (int spins = 0;;) {
    int num_finished = 0;
    const int error = MPI_Testsome(2 * size_, move.requests.data(), &num_finished, finished_.data(), statuses_.data());
    if (error != MPI_SUCCESS) {
      const int of_message = error == MPI_ERR_IN_STATUS && num_finished > 0 ? statuses_[0].MPI_ERROR : error;
      return failed(move, of_message);
    }
    if (num_finished == MPI_UNDEFINED) break;  // nothing is left
    for (int i = 0; i < num_finished; ++i) {
      const auto at = static_cast<std::size_t>(i);
      SLUICE_TRY(check_arrival(move, finished_[at], statuses_[at]));
    }
    if (num_finished > 0) {
      spins = 0;
      continue;
    }
    if (++spins < kSpins) {
      std::this_thread::yield();
      continue;
    }
    if (Clock::now() >= end) return late(move);
    std::this_thread::sleep_for(kPause);
  }
  move.is_active = false;
  return Status::ok();
}

Status MpiTransport::late(const Move& move) {
  std::string missing;
  const auto add = [&](const std::string& text) { missing += (missing.empty() ? "" : "; ") + text; };
  for (int p = 0; p < size_; ++p) {
    const auto i = static_cast<std::size_t>(p);
    if (move.requests[i] != MPI_REQUEST_NULL)
      add(fmt::format("{} rows of {} bytes from rank {} have not come", move.expected[i], move.row_bytes, p));
  }
  for (int p = 0; p < size_; ++p) {
    const auto i = static_cast<std::size_t>(p);
    if (move.requests[static_cast<std::size_t>(size_) + i] != MPI_REQUEST_NULL)
      add(fmt::format("{} rows for rank {} were not taken", move.sent[i], p));
  }
  return die({StatusCode::kPeerFailure, fmt::format("mpi: rank {} waited {} s in {}: {}", rank_, timeout_.count(),
                                                    kStages[move.stage], missing)});
}

Status MpiTransport::die(Status why) {
  if (!dead_.is_ok()) return dead_;
  dead_ = std::move(why);
  for (Move& move : moves_) {
    if (!move.is_active) continue;
    for (int p = 0; p < size_; ++p) {
      MPI_Request& receive = move.requests[static_cast<std::size_t>(p)];
      if (receive == MPI_REQUEST_NULL) continue;
      MPI_Cancel(&receive);
      MPI_Request_free(&receive);
    }
  }
  return dead_;
}

// A duplicate, or the time is over: a rank that never comes must not hold up the others even here.
Result<MPI_Comm> duplicate(MPI_Comm communicator, double timeout_seconds) {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  if (const int error = MPI_Comm_idup(communicator, &copy, &request); error != MPI_SUCCESS)
    return Status(StatusCode::kPeerFailure, fmt::format("mpi: {}", error_text(error)));
  const Clock::time_point end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds));
  for (int is_done = 0;;) {
    const int error = MPI_Test(&request, &is_done, MPI_STATUS_IGNORE);
    if (error != MPI_SUCCESS) return Status(StatusCode::kPeerFailure, fmt::format("mpi: {}", error_text(error)));
    if (is_done != 0) return copy;
    if (Clock::now() >= end) {
      int rank = 0, size = 0;
      MPI_Comm_rank(communicator, &rank);
      MPI_Comm_size(communicator, &size);
      return Status(
          StatusCode::kPeerFailure,
          fmt::format("mpi: rank {} waited {} s for the {} ranks to make a transport", rank, timeout_seconds, size));
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

Result<std::shared_ptr<Transport>> mpi_transport(MPI_Comm communicator, const MpiOptions& options) {
  int is_initialized = 0, is_finalized = 0;
  MPI_Initialized(&is_initialized);
  MPI_Finalized(&is_finalized);
  if (is_initialized == 0 || is_finalized != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("mpi: MPI {}", is_initialized == 0 ? "is not initialised" : "was finalised"));
  }
  if (!(options.timeout_seconds >= 0.001 && options.timeout_seconds <= 86400)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("mpi: timeout_seconds = {} is not between 0.001 and 86400", options.timeout_seconds));
  }
  Result<MPI_Comm> copy = duplicate(communicator, options.timeout_seconds);
  if (!copy) return copy.status();
  return std::shared_ptr<Transport>(std::make_shared<MpiTransport>(*copy, options));
}

}  // namespace sluice
