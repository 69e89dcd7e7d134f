#include "ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#ifdef SLUICE_WITH_MPI
#include "sluice/mpi.h"
#endif

namespace sluice::cli {

namespace {

// Between this rank's error and the end of all ranks: those that notice later than this one have something to say too.
[[maybe_unused]] constexpr std::chrono::seconds kLastWords{2};

// Of this process, where it is one of several.
std::shared_ptr<Transport>& started() {
  static std::shared_ptr<Transport> transport;
  return transport;
}

#ifdef SLUICE_WITH_MPI
// MPI waits for ever for a rank that never starts; the others must not.
void start_mpi(double timeout_seconds) {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_started = false;
  std::thread watch([&] {
    std::unique_lock lock(mutex);
    if (changed.wait_for(lock, std::chrono::duration<double>(timeout_seconds), [&] { return is_started; })) return;
    say(fmt::format("sluice: error: --ep: waited {} s for the other ranks to start\n", timeout_seconds));
    std::_Exit(kExitBadInput);
  });
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  {
    const std::lock_guard lock(mutex);
    is_started = true;
  }
  changed.notify_one();
  watch.join();
}
#endif

}  // namespace

void add_ranks(CLI::App& sub, RankOptions& options) {
  CLI::Option* const spread =
      sub.add_flag("--ep", options.spread,
                   "Spread the experts over the ranks that mpirun starts: each reads and keeps its own experts alone");
  sub.add_option("--transport", options.transport, "How rows go between ranks: mpi")
      ->check(one_of({"mpi", "nccl", "nccl-device"}))
      ->needs(spread)
      ->type_name("NAME");
  sub.add_option("--timeout", options.timeout_seconds,
                 "Seconds a rank waits for the others before it gives up and says whom it waited for")
      ->check(number(0.01, 86400))
      ->needs(spread)
      ->type_name("S");
}

void add_tensor_ranks(CLI::App& sub, RankOptions& options) {
  sub.add_option("--tp", options.num_tensor,
                 "With --ep: N neighbouring ranks share their experts, each with a part of I [1]")
      ->check(whole_number(1, 64))
      ->needs(sub.get_option("--ep"))
      ->type_name("N");
}

Result<Ranks> Ranks::start(const RankOptions& options) {
  if (!options.spread) return Ranks();
  if (options.transport != "mpi") {
    return Status(StatusCode::kUnsupported,
                  fmt::format("--transport {}: this build has none of that name; it has mpi", options.transport));
  }
#ifdef SLUICE_WITH_MPI
  start_mpi(options.timeout_seconds);
  const MpiOptions mpi{options.timeout_seconds};
  const auto give_up = [](const Status& status) {
    say(fmt::format("sluice: error: {}\n", status.message()));
    std::this_thread::sleep_for(kLastWords);
    MPI_Abort(MPI_COMM_WORLD, kExitBadInput);
    return status;
  };
  Result<std::shared_ptr<Transport>> world = mpi_transport(MPI_COMM_WORLD, mpi);
  if (!world) return give_up(world.status());
  started() = *world;
  Ranks ranks;
  ranks.transport_ = *world;
  ranks.spread_ = *world;
  const std::int64_t size = ranks.num_ranks(), tensor = options.num_tensor;
  SLUICE_TRY(ranks.same(tensor, "tensor ranks"));
  if (size % tensor != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("--tp {}: {} ranks are no multiple of {}", tensor, size, tensor));
  }
  if (tensor == 1) return ranks;
  for (const bool is_tensor : {false, true}) {
    MPI_Comm group = MPI_COMM_NULL;
    const std::int64_t color = is_tensor ? ranks.rank() / tensor : ranks.rank() % tensor;
    MPI_Comm_split(MPI_COMM_WORLD, static_cast<int>(color), static_cast<int>(ranks.rank()), &group);
    Result<std::shared_ptr<Transport>> transport = mpi_transport(group, mpi);
    MPI_Comm_free(&group);
    if (!transport) return give_up(transport.status());
    (is_tensor ? ranks.tensor_ : ranks.spread_) = *transport;
  }
  return ranks;
#else
  return Status(StatusCode::kUnsupported, "--ep: this build has no MPI to start ranks with (SLUICE_MPI)");
#endif
}

std::int64_t rank_of_process() { return started() == nullptr ? 0 : started()->rank(); }
bool is_first_process() { return rank_of_process() == 0; }

void end_ranks() {
#ifdef SLUICE_WITH_MPI
  if (started() == nullptr) return;
  std::fflush(stdout);
  const std::vector<std::int64_t> told(static_cast<std::size_t>(started()->num_ranks()));
  std::vector<std::int64_t> heard(told.size());
  const bool everyone_answers = started()->exchange_counts(told, heard).is_ok();
  started().reset();
  if (everyone_answers) {
    MPI_Finalize();
    return;
  }
  std::this_thread::sleep_for(kLastWords);
  MPI_Abort(MPI_COMM_WORLD, kExitBadInput);
#endif
}

Result<std::vector<std::int64_t>> Ranks::all(std::int64_t mine) const {
  const std::vector<std::int64_t> told(static_cast<std::size_t>(num_ranks()), mine);
  std::vector<std::int64_t> heard(told.size());
  if (Status status = transport_->exchange_counts(told, heard); !status.is_ok()) return status;
  return heard;
}

Status Ranks::agree(const Status& mine) const {
  if (num_ranks() == 1) return mine;
  const Result<std::vector<std::int64_t>> failed = all(mine.is_ok() ? 0 : 1);
  SLUICE_TRY(mine);
  if (!failed) return failed.status();
  for (std::int64_t p = 0; p < num_ranks(); ++p) {
    if ((*failed)[static_cast<std::size_t>(p)] == 0) continue;
    return {StatusCode::kPeerFailure, fmt::format("rank {} failed; its own message says why", p)};
  }
  return Status::ok();
}

Status Ranks::same(std::int64_t mine, const char* what) const {
  const Result<std::vector<std::int64_t>> numbers = all(mine);
  if (!numbers) return numbers.status();
  for (std::int64_t p = 0; p < num_ranks(); ++p) {
    const std::int64_t theirs = (*numbers)[static_cast<std::size_t>(p)];
    if (theirs == mine) continue;
    return {StatusCode::kPeerFailure, fmt::format("rank {} has {} {}, rank {} has {}", p, theirs, what, rank(), mine)};
  }
  return Status::ok();
}

Result<std::int64_t> Ranks::smallest(std::int64_t mine) const {
  const Result<std::vector<std::int64_t>> numbers = all(mine);
  if (!numbers) return numbers.status();
  return *std::min_element(numbers->begin(), numbers->end());
}

Result<std::int64_t> Ranks::sum(std::int64_t mine) const {
  const Result<std::vector<std::int64_t>> numbers = all(mine);
  if (!numbers) return numbers.status();
  std::int64_t total = 0;
  for (const std::int64_t number : *numbers) total += number;
  return total;
}

Status Ranks::collect(const std::byte* mine, std::int64_t count, std::int64_t row_bytes, std::byte* receive) const {
  const Result<std::vector<std::int64_t>> counts = all(count);
  if (!counts) return counts.status();
  std::vector<RowSpan> send(static_cast<std::size_t>(num_ranks())), arrive(send.size());
  send[0] = {0, count};
  std::int64_t begin = 0;
  for (std::size_t p = 0; p < arrive.size() && is_first(); ++p) {
    arrive[p] = {begin, (*counts)[p]};
    begin += (*counts)[p];
  }
  Result<Transport::Ticket> ticket = transport_->gather({row_bytes, mine, send, receive, arrive});
  if (!ticket) return ticket.status();
  return transport_->wait(*ticket);
}

}  // namespace sluice::cli
