#include "io/temporary_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace sluice::io {

TemporaryFile::TemporaryFile(const std::filesystem::path& target) : target_(target.string()) {
  // The name does not grow with the target's, which may be as long as names can be. What a killed run left behind
  // (in a container every run may have the same process id) is stepped over, not an error.
  constexpr int kMaxTries = 1000;
  for (int i = 0; i < kMaxTries; ++i) {
    path_ = target.parent_path() / fmt::format(".sluice-{}-{}.tmp", ::getpid(), i);
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    open_error_ = fd_ < 0 ? errno : 0;
    if (open_error_ != EEXIST) break;
  }
}

TemporaryFile::~TemporaryFile() {
  if (fd_ >= 0) ::close(fd_);
  if (created() && !committed_) ::unlink(path_.c_str());
}

Status TemporaryFile::opened() const {
  return created() ? Status::ok() : failed("cannot create the file", open_error_);
}

Status TemporaryFile::reserve(std::int64_t bytes) const {
  if (bytes == 0 || ::fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) == 0) return Status::ok();
  const bool full = errno == ENOSPC || errno == EFBIG || errno == EDQUOT;
  return full ? failed(fmt::format("no room for its {} bytes", bytes), errno) : Status::ok();
}

Status TemporaryFile::write(std::int64_t at, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("write failed", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    at += n;
  }
  return Status::ok();
}

Status TemporaryFile::flush() const {
  if (::fsync(fd_) != 0) return failed("fsync failed", errno);
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
  return Status::ok();
}

Status TemporaryFile::commit() {
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) return failed("close failed", errno);
  if (::rename(path_.c_str(), target_.c_str()) != 0) return failed("rename failed", errno);
  committed_ = true;
  return Status::ok();
}

Status TemporaryFile::failed(std::string_view what, int code) const {
  return {StatusCode::kIoError, fmt::format("{}: {}: {}", target_, what, std::strerror(code))};
}

Status write_text(const std::filesystem::path& path, std::string_view text) {
  TemporaryFile file(path);
  SLUICE_TRY(file.opened());
  SLUICE_TRY(file.write(0, std::as_bytes(std::span(text))));
  return file.commit();
}

}  // namespace sluice::io
