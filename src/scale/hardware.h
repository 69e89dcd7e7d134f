// Hardware files: JSON in which every constant has its source.
//   {"schema": 1, "name": TEXT, "constants": {FIELD: {"value": NUMBER, "source": TEXT}, ...}}
// with the fields of Hardware, and those of GemmRates behind "fp8." and "bf16."; the points of a table are lists. A
// source begins with "measured: ", "published: " or "assumed: ".
#pragma once

#include <nlohmann/json.hpp>

#include "sluice/scale.h"

namespace sluice::scale {

struct Source {
  std::string field, value, source;
};
struct HardwareFile {
  Hardware hardware;
  std::vector<Source> sources;  // in the order of Hardware
};
// `where` is what refusals call the file: kBadData with file, field, value and what is wanted. Unknown fields are
// refused.
Result<HardwareFile> parse_hardware(const nlohmann::json& root, const std::string& where);

}  // namespace sluice::scale
