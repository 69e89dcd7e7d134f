// Moves rows between the ranks that hold different experts, and never looks inside them. Rows are bytes of one size, one
// after another; where they go and where they land is computed by the caller before anything moves, so that a result does
// not depend on which message was first.
//
// Every call is collective: each rank of the group makes the same calls in the same order, with rows for everybody, for
// somebody or for nobody. A rank that waits for longer than the transport's time-out gives up with kPeerFailure, naming
// what it waited for and from whom; from then on the transport is dead and every call repeats that error. Memory given to a
// move that did not end must outlive the transport: a late peer may still write there.
#pragma once

#include "sluice/config.h"
#include "sluice/plan.h"

namespace sluice {

// Experts [begin, end) of one rank.
struct ExpertRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  // As MoeConfig and LoadOptions take it, where 0 would mean all.
  std::int64_t num_local() const { return end > begin ? end - begin : kNoExperts; }
};

// The balanced split: base = E / P, rem = E % P, rank r starts at r*base + min(r, rem). 30 over 8 ranks:
// 4,4,4,4,4,4,3,3.
ExpertRange experts_of_rank(std::int64_t num_experts, std::int64_t num_ranks, std::int64_t rank);
// Its inverse.
std::int64_t owner(std::int64_t num_experts, std::int64_t num_ranks, std::int64_t expert);

// Rows on their way through a layer: [R,H] and, for e4m3, scales [Hb,R].
struct Rows {
  TensorView data;
  TensorView scale;
};

// Rows [begin, begin + count) of a buffer.
struct RowSpan {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

// What one rank gives and gets. Spans of `send` may overlap (the same rows to several ranks), those of `receive` may not;
// what a rank gives itself may stay where it is.
// What a rank sends to another must be what that one expects of it: counts are exchanged first.
struct RowMove {
  std::int64_t row_bytes = 0;
  const std::byte* send = nullptr;
  std::span<const RowSpan> send_rows;  // [P] to each rank
  std::byte* receive = nullptr;
  std::span<const RowSpan> receive_rows;  // [P] from each rank
};

class Transport {
 public:
  // A move on its way.
  struct Ticket {
    int value = -1;
  };
  static constexpr int kMaxMoves = 4;  // on their way at once

  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual std::int64_t num_ranks() const = 0;
  virtual std::int64_t rank() const = 0;

  // W numbers to each rank and W from each: send and received are [P,W], W the same everywhere. Ends when all are here.
  virtual Status exchange_counts(std::span<const std::int64_t> send, std::span<std::int64_t> received) = 0;
  // Tokens to the ranks of their experts, and expert outputs back. The memory of a move is the transport's until wait()
  // returns; the spans are read before the call does.
  virtual Result<Ticket> scatter(const RowMove& move) = 0;
  virtual Result<Ticket> gather(const RowMove& move) = 0;
  virtual Status wait(Ticket ticket) = 0;
  // This rank cannot go on: the transport is dead with `why`, and the peers run into their time-out.
  virtual void abandon(const Status& why) = 0;
};

// One rank, which keeps what it has. A layer over one rank never calls its transport.
std::shared_ptr<Transport> local_transport();
// `rank` of num_ranks that are not there: for layers with plan_only, to size and explain what a layer over so many ranks
// would be. Whatever would move is kUnsupported.
std::shared_ptr<Transport> planned_transport(std::int64_t num_ranks, std::int64_t rank = 0);

}  // namespace sluice
