#include "expert_load.h"

#include <fmt/format.h>

#include <filesystem>

namespace sluice::cli {

namespace fs = std::filesystem;

Status check_json_output(std::string_view option, const std::string& path,
                         const std::function<Status(const std::string&)>& read) {
  const auto refuse = [&](std::string why) {
    return Status(StatusCode::kInvalidArgument, fmt::format("{} {}: {}", option, path, why));
  };
  std::error_code ec;
  if (fs::is_directory(path, ec)) return refuse("is a folder");
  if (fs::path(path).extension() != ".json")
    return refuse("the file is written as JSON, so its name must end in .json");
  const fs::path parent = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  if (!fs::is_directory(parent, ec)) return refuse(fmt::format("the folder {} does not exist", parent.string()));
  if (!fs::exists(path, ec)) return {};
  // A model's folder is full of .json files that must not go.
  if (const Status known = read(path); !known.is_ok()) {
    return refuse(fmt::format("exists and holds something else, so it is not replaced ({})", known.message()));
  }
  return {};
}

Status record_load(const std::string& path, std::int64_t layer, std::int64_t num_experts,
                   std::span<const std::int32_t> topk_idx) {
  ExpertLoads loads;
  loads.num_experts = num_experts;
  loads.layers = {layer};
  loads.tokens.resize(static_cast<std::size_t>(num_experts));
  for (const std::int32_t expert : topk_idx) {
    if (expert >= 0 && expert < num_experts) loads.tokens[static_cast<std::size_t>(expert)] += 1;
  }
  return write_loads(path, loads);
}

}  // namespace sluice::cli
