// Files of expert loads and placements, as the command reads and writes them.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "sluice/sluice.h"

namespace sluice::cli {

// Whether `path`, the value of `option`, can be written as JSON without destroying anything: the folder is there, the name
// ends in .json, and what has the name already is a file that `read` understands.
Status check_json_output(std::string_view option, const std::string& path,
                         const std::function<Status(const std::string&)>& read);
inline Status is_load_file(const std::string& path) { return read_loads(path).status(); }
inline Status is_placement_file(const std::string& path) { return read_placements(path).status(); }

// Writes how many of topk_idx [T,S] name each expert; ids outside of [0,E) are skipped, like everywhere.
Status record_load(const std::string& path, std::int64_t layer, std::int64_t num_experts,
                   std::span<const std::int32_t> topk_idx);

}  // namespace sluice::cli
