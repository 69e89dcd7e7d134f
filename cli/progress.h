// A progress bar on stderr; silent when stderr is not a terminal, so that logs and pipes stay clean.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace sluice::cli {

class Progress {
 public:
  enum class Unit { kBytes, kItems };
  Progress(std::string label, Unit unit);
  ~Progress();  // wipes the bar
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(std::int64_t done, std::int64_t total);
  void label(std::string text) { label_ = std::move(text); }

 private:
  std::string label_;
  Unit unit_;
  bool is_shown_;
  bool is_drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

// Columns of the terminal behind `fd`, or `otherwise`.
int terminal_columns(int fd, int otherwise);

}  // namespace sluice::cli
