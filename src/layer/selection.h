// Names of implementations, and which of them a caller turned on or off.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/layer.h"

namespace sluice {

// What applies to one stage: "*" first, then the stage's own entry, whose word wins.
Selection selection_for(const std::map<std::string, Selection>& selection, std::string_view stage);
// Every key is a stage or "*".
Status check_selection_keys(const std::map<std::string, Selection>& selection);

}  // namespace sluice
