// What the command says and how it ends: exit codes, text tables, JSON documents, errors.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/core.h"

namespace sluice::cli {

using Json = nlohmann::ordered_json;

inline constexpr int kExitOk = 0;
inline constexpr int kExitCheckFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitBadInput = 3;
inline constexpr int kExitInternal = 4;

// How a command ended. A Status from the library is about what it was given, hence exit code 3; mistakes on the
// command line itself are made with usage_error.
struct Outcome {
  int exit_code = kExitOk;
  Status status;

  Outcome() = default;
  Outcome(int code) : exit_code(code) {}  // NOLINT: implicit by design
  Outcome(Status failure);                // NOLINT: implicit by design
  static Outcome usage(std::string message);
};

// Prints "sluice: error: ..." to stderr and, with `json`, {"error": {...}} to stdout. Returns the exit code.
int report(const Outcome& outcome, bool json);
void warn(const std::string& message);
// To stderr as it is. A closed or full stderr is nobody's error: printing there never throws and never fails a command.
void say(const std::string& text);
// One document, indented; or one line (`line`), for programs that read rows as they come.
void print_json(const Json& document, bool line = false);

// Columns aligned by width; numbers right, words left.
class Table {
 public:
  struct Column {
    std::string title;
    bool right = false;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells);
  bool is_empty() const { return rows_.empty(); }
  void print() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

std::string format_bytes(std::int64_t bytes);  // decimal: "604 MB"
std::string format_seconds(double seconds);    // "1.23 ms"
std::string format_count(std::int64_t count);  // "12,345"
// {3,4,5,7} -> "3-5,7"
std::string format_ranges(const std::vector<std::int64_t>& values);

}  // namespace sluice::cli
