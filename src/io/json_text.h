// JSON values in messages.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace sluice::io {

// Long enough to be recognised and short enough for a message; ASCII, whatever the file holds.
inline std::string shorten(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

}  // namespace sluice::io
