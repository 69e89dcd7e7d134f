// The processes that share one command: started by mpirun, or this one alone.
#pragma once

#include <memory>
#include <string>

#include "options.h"

namespace sluice::cli {

struct RankOptions {
  bool spread = false;  // --ep
  std::string transport = "mpi";
  double timeout_seconds = 30;
  std::int64_t num_tensor = 1;  // --tp
};
void add_ranks(CLI::App& sub, RankOptions& options);
void add_tensor_ranks(CLI::App& sub, RankOptions& options);

class Ranks {
 public:
  // Alone without --ep. With it MPI is started; a transport this build does not have is refused with what it has.
  static Result<Ranks> start(const RankOptions& options);

  std::int64_t num_ranks() const { return transport_->num_ranks(); }
  std::int64_t rank() const { return transport_->rank(); }
  bool is_first() const { return rank() == 0; }
  // All of them; those that the experts are spread over; those that I is cut over, neighbours in the first.
  const std::shared_ptr<Transport>& transport() const { return transport_; }
  const std::shared_ptr<Transport>& spread() const { return spread_; }
  const std::shared_ptr<Transport>& tensor() const { return tensor_; }

  // Every rank says whether it can go on; a failure anywhere is one everywhere. Collective.
  Status agree(const Status& mine) const;
  // Every rank has the same number of `what`, "tokens in its input". Collective.
  Status same(std::int64_t mine, const char* what) const;
  // The smallest, and the sum, of every rank's number. Collective.
  Result<std::int64_t> smallest(std::int64_t mine) const;
  Result<std::int64_t> sum(std::int64_t mine) const;
  // Rows of all ranks, in order of rank, on the first. Collective; `receive` is looked at there alone.
  Status collect(const std::byte* mine, std::int64_t count, std::int64_t row_bytes, std::byte* receive) const;

 private:
  Ranks() : transport_(local_transport()), spread_(transport_), tensor_(transport_) {}
  Result<std::vector<std::int64_t>> all(std::int64_t mine) const;

  std::shared_ptr<Transport> transport_, spread_, tensor_;
};

// Whether this process is not one of several, or the first of them: it speaks for all. The others speak of what went wrong
// on them alone.
bool is_first_process();
std::int64_t rank_of_process();
// Ends MPI after the command has said its last word: in order where every rank still answers, else by ending them all, after
// they had time to say why.
void end_ranks();

}  // namespace sluice::cli
