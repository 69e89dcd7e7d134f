#include "io/text_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace sluice::io {
namespace {

Status failed(const std::filesystem::path& path, int code) {
  return {code == ENOENT ? StatusCode::kNotFound : StatusCode::kIoError,
          fmt::format("{}: {}", path.string(), std::strerror(code))};
}

}  // namespace

Result<RegularFile> RegularFile::open(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return failed(path, errno);
  RegularFile file(fd, 0);
  struct stat info {};
  if (::fstat(fd, &info) != 0) return failed(path, errno);
  if (!S_ISREG(info.st_mode)) {
    return Status(StatusCode::kIoError,
                  fmt::format("{}: {}", path.string(),
                              S_ISDIR(info.st_mode) ? "a folder, not a regular file" : "not a regular file"));
  }
  file.size_bytes_ = static_cast<std::uint64_t>(info.st_size);
  return file;
}

RegularFile::~RegularFile() {
  if (fd_ >= 0) ::close(fd_);
}

Result<std::string> read_text(const std::filesystem::path& path, std::uint64_t max_bytes) {
  Result<RegularFile> file = RegularFile::open(path);
  if (!file) return file.status();
  if (file->size_bytes() > max_bytes) {
    return Status(StatusCode::kBadData, fmt::format("{}: the file has {} bytes, the limit is {}", path.string(),
                                                    file->size_bytes(), max_bytes));
  }
  std::string text(file->size_bytes(), '\0');
  std::size_t got = 0;
  while (got < text.size()) {
    const ssize_t n = ::read(file->fd(), text.data() + got, text.size() - got);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed(path, errno);
    if (n == 0) {
      return Status(StatusCode::kIoError,
                    fmt::format("{}: ended at byte {} of {} while it was read", path.string(), got, text.size()));
    }
    got += static_cast<std::size_t>(n);
  }
  if (const std::size_t nul = text.find('\0'); nul != std::string::npos)
    return Status(StatusCode::kBadData, fmt::format("{}: there is a NUL at byte {}", path.string(), nul));
  return text;
}

}  // namespace sluice::io
