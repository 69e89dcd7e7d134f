#include "io/output_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace sluice::io {
namespace {

namespace fs = std::filesystem;

Status io_error(const fs::path& path, std::string_view what, int code) {
  return {StatusCode::kIoError, fmt::format("{}: {}: {}", path.string(), what, std::strerror(code))};
}

}  // namespace

Result<OutputFolder> OutputFolder::create(const fs::path& target, bool replace) {
  const auto invalid = [&](std::string_view text) {
    return Status(StatusCode::kInvalidArgument, fmt::format("'{}' {}", target.string(), text));
  };
  std::error_code error;
  OutputFolder folder;
  // The folder itself where the name is a link; without it a trailing slash would leave an empty file name.
  folder.target_ = fs::weakly_canonical(fs::absolute(target, error), error);
  if (target.empty() || error) return invalid("is no path to write to");
  if (!folder.target_.has_filename()) folder.target_ = folder.target_.parent_path();
  if (!folder.target_.has_filename()) return invalid("is the root of the file system");
  if (fs::exists(fs::symlink_status(folder.target_, error))) {
    if (!fs::is_directory(folder.target_, error)) return invalid("exists and is not a folder");
    const bool is_empty = fs::is_empty(folder.target_, error);
    if (error) return io_error(folder.target_, "cannot be read", error.value());
    if (!is_empty && !replace) return invalid("exists and is not empty; --force replaces it");
    if (!is_empty && !fs::exists(folder.target_ / "config.json", error))
      return invalid("exists, and --force replaces checkpoints only: there is no config.json in it");
    folder.replace_ = !is_empty;
  }
  const fs::path parent = folder.target_.parent_path();
  for (fs::path p = parent; !p.empty() && !fs::exists(p, error); p = p.parent_path()) {
    folder.new_parents_.push_back(p);
    if (p == p.parent_path()) break;
  }
  fs::create_directories(parent, error);
  if (error) return io_error(parent, "cannot create the folder", error.value());
  // What a killed run left behind is stepped over.
  constexpr int kMaxTries = 1000;
  for (int i = 0; i < kMaxTries; ++i) {
    fs::path path = parent / fmt::format(".sluice-{}-{}.tmp", ::getpid(), i);
    if (::mkdir(path.c_str(), 0755) == 0) {
      folder.temporary_ = std::move(path);
      return folder;
    }
    if (errno != EEXIST) return io_error(parent, "cannot create a folder there", errno);
  }
  return Status(StatusCode::kIoError,
                fmt::format("{}: {} temporary folders are left there", parent.string(), kMaxTries));
}

OutputFolder::OutputFolder(OutputFolder&& other) noexcept
    : temporary_(std::exchange(other.temporary_, {})),
      target_(std::move(other.target_)),
      new_parents_(std::exchange(other.new_parents_, {})),
      replace_(other.replace_) {}

OutputFolder::~OutputFolder() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
  for (const fs::path& folder : new_parents_) fs::remove(folder, ignored);  // empty ones only
}

Status OutputFolder::commit() {
  if (replace_) {
    // One step where the file system has it; else two, with the old folder put back when the second fails.
    if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) != 0) {
      const fs::path old = temporary_.string() + ".old";
      if (::rename(target_.c_str(), old.c_str()) != 0) return io_error(target_, "cannot be replaced", errno);
      if (::rename(temporary_.c_str(), target_.c_str()) != 0) {
        const int code = errno;
        [[maybe_unused]] const int back = ::rename(old.c_str(), target_.c_str());
        return io_error(target_, "rename failed", code);
      }
      temporary_ = old;
    }
    std::error_code error;
    const fs::path old = std::exchange(temporary_, {});
    fs::remove_all(old, error);
    new_parents_.clear();
    if (error) return io_error(old, "the folder that was replaced cannot be removed", error.value());
    return Status::ok();
  }
  // Over an empty folder, or nothing; what appeared there meanwhile is refused.
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) return io_error(target_, "rename failed", errno);
  temporary_.clear();
  new_parents_.clear();
  return Status::ok();
}

}  // namespace sluice::io
