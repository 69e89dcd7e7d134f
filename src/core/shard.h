// What the loader and shard() refuse alike.
#pragma once

#include <string_view>

#include "sluice/shard.h"

namespace sluice {

// shard_of, or the refusal of an empty range with I, the size of the group and the unit.
Result<ShardRange> needed_columns(std::string_view where, std::int64_t intermediate, const TensorShard& part,
                                  std::int64_t unit);

}  // namespace sluice
