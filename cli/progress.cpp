#include "progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "output.h"

namespace sluice::cli {

namespace {
constexpr std::chrono::milliseconds kRedraw{80};
}  // namespace

int terminal_columns(int fd, int otherwise) {
  winsize size{};
  if (isatty(fd) != 1 || ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return otherwise;
  return size.ws_col;
}

Progress::Progress(std::string label, Unit unit) : label_(std::move(label)), unit_(unit) {
  const char* term = std::getenv("TERM");
  is_shown_ = isatty(STDERR_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb";
}

Progress::~Progress() {
  if (is_drawn_) say("\r\x1b[K");
}

void Progress::update(std::int64_t done, std::int64_t total) {
  if (!is_shown_ || total <= 0) return;
  const auto now = std::chrono::steady_clock::now();
  if (is_drawn_ && done < total && now - last_ < kRedraw) return;
  last_ = now;
  is_drawn_ = true;
  const double share = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
  const std::string amount = unit_ == Unit::kBytes ? format_bytes(done) + " of " + format_bytes(total)
                                                   : format_count(done) + " of " + format_count(total);
  const int room = terminal_columns(STDERR_FILENO, 80) - static_cast<int>(label_.size() + amount.size()) - 12;
  const int width = std::clamp(room, 0, 40);
  const int filled = static_cast<int>(share * width);
  say(fmt::format("\r{} [{}{}] {:3.0f} % {}\x1b[K", label_, std::string(static_cast<std::size_t>(filled), '#'),
                  std::string(static_cast<std::size_t>(width - filled), '.'), share * 100, amount));
  std::fflush(stderr);
}

}  // namespace sluice::cli
