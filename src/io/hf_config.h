// config.json read through the family table: sizes, gate rule, layers with experts, quantisation.
#pragma once

#include <filesystem>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "io/families.h"

namespace sluice::io {

// quantization_config, as far as it matters here.
struct QuantConfig {
  std::string method;           // "fp8", "mxfp4", "compressed-tensors", ...; "" without one
  std::string format;           // fp8's "fmt", compressed-tensors' "format"
  std::int64_t block_rows = 0;  // weight_block_size; 0: not given
  std::int64_t block_cols = 0;
  std::int64_t num_bits = 0, group_size = 0;     // of packed integers; 0: not given
  std::string strategy;                          // what shares a weight scale, in compressed-tensors' words: "channel"
  bool symmetric = true;                         // integer weights without zero points
  ScaleFormat scale_format = ScaleFormat::kF32;  // fp8's "scale_fmt": how activations are to be quantised
  std::vector<std::string> ignored;              // modules_to_not_convert, ignore, ignored_layers
};

struct HfConfig {
  std::string where;  // the file, for messages
  const Family* family = nullptr;
  std::string model_type;  // as the file says
  std::int64_t num_layers = 0;
  QuantConfig quant;
  std::map<std::int64_t, MoeConfig> moe_layers;    // every layer with experts
  std::map<std::int64_t, std::string> cannot_run;  // layers of those that Sluice has no rule for, and why
};

// `where` is quoted in messages. All layers are judged: a contradiction anywhere is an error here.
Result<HfConfig> parse_hf_config(const nlohmann::json& root, const std::string& where);
Result<HfConfig> read_hf_config(const std::filesystem::path& path);

// The whole file as JSON, with duplicate keys refused.
Result<nlohmann::json> read_json(const std::filesystem::path& path);

// The modules a quantised checkpoint left alone. A pattern matches whole dotted components, anywhere in a module's
// path, and then covers everything below; "re:" begins a regular expression over the path. A fused module
// ("gate_up_proj") is ignored when both its parts are; one part alone is an error.
class IgnoreList {
 public:
  static Result<IgnoreList> compile(const std::vector<std::string>& patterns);
  Result<bool> covers(std::string_view module) const;
  bool empty() const { return words_.empty() && regexes_.empty(); }

 private:
  bool matches(std::string_view module) const;
  std::vector<std::vector<std::string>> words_;  // components of each plain pattern
  std::vector<std::regex> regexes_;
};

}  // namespace sluice::io
