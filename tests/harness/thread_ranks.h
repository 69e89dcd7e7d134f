// Ranks that are threads of one process: a transport over shared memory for tests, with faults on demand. Messages wait in
// mailboxes, in the order they were sent; receivers check that sizes are what they expect.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "sluice/transport.h"

namespace sluice::test {

class ThreadRanks {
 public:
  struct State;  // what the ranks share
  explicit ThreadRanks(std::int64_t num_ranks, std::chrono::milliseconds timeout = std::chrono::seconds(60));
  ~ThreadRanks();
  std::shared_ptr<Transport> rank(std::int64_t r) const;
  // Runs `body` as every rank at once, each with its transport.
  void run(const std::function<void(std::int64_t rank, std::shared_ptr<Transport>)>& body) const;
  // Bytes rank `from` has sent to rank `to` in moves.
  std::int64_t bytes_moved(std::int64_t from, std::int64_t to) const;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace sluice::test
