#include "output.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "ranks.h"

namespace sluice::cli {

namespace {

// Messages quote names from files; a terminal would obey the control characters in them.
std::string printable(const std::string& message) {
  std::string text;
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    text +=
        (byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7F ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return text;
}

}  // namespace

Outcome::Outcome(Status failure)
    : exit_code(failure.is_ok()                           ? kExitOk
                : failure.code() == StatusCode::kInternal ? kExitInternal
                                                          : kExitBadInput),
      status(std::move(failure)) {}

Outcome Outcome::usage(std::string message) {
  Outcome outcome(Status(StatusCode::kInvalidArgument, std::move(message)));
  outcome.exit_code = kExitUsage;
  return outcome;
}

int report(const Outcome& outcome, bool json) {
  if (outcome.status.is_ok()) return outcome.exit_code;
  if (is_first_process()) {
    say(fmt::format("sluice: error: {}\n", printable(outcome.status.message())));
  } else if (outcome.status.code() != StatusCode::kPeerFailure) {
    say(fmt::format("sluice: error: rank {}: {}\n", rank_of_process(), printable(outcome.status.message())));
  }
  if (json && is_first_process()) {
    print_json({{"error",
                 {{"code", to_string(outcome.status.code())},
                  {"message", outcome.status.message()},
                  {"exit_code", outcome.exit_code}}}});
  }
  return outcome.exit_code;
}

void warn(const std::string& message) { say(fmt::format("sluice: warning: {}\n", printable(message))); }

void say(const std::string& text) { std::fputs(text.c_str(), stderr); }

void print_json(const Json& document, bool line) {
  // Names come from files: bytes that are no UTF-8 are replaced, never thrown on.
  fmt::print("{}\n", document.dump(line ? -1 : 2, ' ', false, Json::error_handler_t::replace));
  std::fflush(stdout);
}

void Table::add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

void Table::print() const {
  std::vector<std::size_t> width(columns_.size());
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    width[c] = columns_[c].title.size();
    for (const auto& row : rows_) width[c] = std::max(width[c], row[c].size());
  }
  const auto line = [&](const auto& cell_of) {
    std::string text;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const std::string& cell = cell_of(c);
      const std::string pad(width[c] - cell.size(), ' ');
      text += (c == 0 ? "" : "  ") + (columns_[c].right ? pad + cell : cell + pad);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    fmt::print("{}\n", text);
  };
  line([&](std::size_t c) -> const std::string& { return columns_[c].title; });
  for (const auto& row : rows_) line([&](std::size_t c) -> const std::string& { return row[c]; });
}

std::string format_bytes(std::int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return value < 9.995   ? fmt::format("{:.2f} {}", value, kUnits[unit])
         : value < 99.95 ? fmt::format("{:.1f} {}", value, kUnits[unit])
                         : fmt::format("{:.0f} {}", value, kUnits[unit]);
}

std::string format_seconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string format_count(std::int64_t count) {
  std::string text = fmt::format("{}", count);
  for (std::ptrdiff_t i = static_cast<std::ptrdiff_t>(text.size()) - 3; i > (count < 0 ? 1 : 0); i -= 3) {
    text.insert(static_cast<std::size_t>(i), ",");
  }
  return text;
}

std::string format_ranges(const std::vector<std::int64_t>& values) {
  std::string text;
  for (std::size_t i = 0; i < values.size();) {
    std::size_t end = i + 1;
    while (end < values.size() && values[end] == values[end - 1] + 1) ++end;
    text += text.empty() ? "" : ",";
    text += end - i == 1 ? fmt::format("{}", values[i]) : fmt::format("{}-{}", values[i], values[end - 1]);
    i = end;
  }
  return text;
}

}  // namespace sluice::cli
