// The same numbers to every rank.
#pragma once

#include <algorithm>

#include "sluice/transport.h"

namespace sluice {

// mine [W] to each rank, and heard [P,W] of each; told [P,W] is scratch. Collective.
inline Status tell_all(Transport& transport, std::span<const std::int64_t> mine, std::span<std::int64_t> told,
                       std::span<std::int64_t> heard) {
  for (std::size_t at = 0; at < told.size(); at += mine.size())
    std::copy(mine.begin(), mine.end(), told.begin() + static_cast<std::ptrdiff_t>(at));
  return transport.exchange_counts(told, heard);
}

}  // namespace sluice
