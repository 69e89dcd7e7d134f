// `sluice bench --ep`: a layer over the ranks that mpirun started, and what of its time goes into moving rows.
#pragma once

#include "ranks.h"
#include "subject.h"

namespace sluice::cli {

struct RanksBench {
  const Subject& subject;
  std::vector<Precision> precisions;
  std::vector<std::int64_t> tokens;  // of each rank
  std::map<std::string, Selection> selection;
  Machine machine;
  bool routed_only = false;
  double seconds = 1.0;
  std::uint64_t seed = 1;
};
// Random weights of each rank's experts; every rank measures, the first prints. Collective.
Outcome bench_ranks(const RanksBench& bench, const Ranks& ranks, bool json);

}  // namespace sluice::cli
