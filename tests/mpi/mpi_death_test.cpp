// A rank that is killed in the middle of a layer's rounds: the others get an error within the time-out, and nothing hangs.
// Run by mpirun with --enable-recovery, which lets ranks outlive each other. A rank ends by itself, as MPI_Finalize would
// wait for the dead; what mpirun reports of the killed one is not looked at, so each survivor leaves a line in a file.
#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "expert_parallel/ranks.h"
#include "sluice/mpi.h"
#include "transport/forwarded.h"

namespace sluice::test {
namespace {

// Dies when the third round begins, with rows of the first two on their way.
class Mortal final : public ForwardedTransport {
 public:
  Mortal(std::shared_ptr<Transport> inner, bool is_doomed)
      : ForwardedTransport(std::move(inner)), is_doomed_(is_doomed) {}
  Result<Ticket> scatter(const RowMove& move) override {
    if (is_doomed_ && ++num_scatters_ == 3) std::raise(SIGKILL);
    return ForwardedTransport::scatter(move);
  }

 private:
  bool is_doomed_;
  int num_scatters_ = 0;
};

// "" where the call ended as it should, else what was wrong.
std::string fault_of(const std::shared_ptr<Transport>& transport) {
  const std::int64_t P = transport->num_ranks(), rank = transport->rank();
  const RandomLayer whole = random_layer(small_config(), {.expert_dtype = DType::kBF16, .seed = 3});
  const RankLayer part = part_of(whole, balanced_placement(16, P), rank);
  LayerOptions options = options_for(Precision::kBF16, 20, 1);
  options.max_round_tokens = 2;
  options.transport = std::make_shared<Mortal>(transport, rank == P - 1);
  Result<Layer> layer = Layer::create(part.config, part.weights, options);
  if (!layer) return "create: " + layer.status().message();
  const Status status = forward_once(*layer, call_of(20, 5)).status;
  if (status.code() != StatusCode::kPeerFailure) return "forward: " + status.message();
  const std::string late = fmt::format("rank {}", P - 1);
  if (status.message().find(late) == std::string::npos) return "the dead rank is not named: " + status.message();
  return "";
}

}  // namespace
}  // namespace sluice::test

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  sluice::Result<std::shared_ptr<sluice::Transport>> transport = sluice::mpi_transport(MPI_COMM_WORLD, {2.0});
  if (!transport || argc != 2) std::_Exit(1);
  const std::string fault = sluice::test::fault_of(*transport);
  std::ofstream(fmt::format("{}.{}", argv[1], (*transport)->rank())) << (fault.empty() ? "ok" : fault) << "\n";
  std::_Exit(0);
}
