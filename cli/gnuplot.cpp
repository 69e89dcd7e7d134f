#include "gnuplot.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

extern char** environ;  // NOLINT: its name is POSIX's

namespace sluice::cli {

namespace {

constexpr const char* kProgram = "gnuplot";
constexpr std::size_t kSaid = 600;  // characters of a failed gnuplot's words that are passed on

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
// Files instead of pipes between the two: neither side can wait for the other.
using TemporaryFile = std::unique_ptr<std::FILE, CloseFile>;

Status failed(std::string_view what, int code) {
  return {StatusCode::kIoError, fmt::format("{}: {}: {}", kProgram, what, std::strerror(code))};
}

Result<std::string> read_all(std::FILE* file) {
  std::rewind(file);
  std::string text;
  char piece[4096];
  while (const std::size_t n = std::fread(piece, 1, sizeof(piece), file)) text.append(piece, n);
  if (std::ferror(file) != 0) return failed("cannot read what it printed", errno);
  return text;
}

// Words of one line, so that they fit a message.
std::string one_line(const std::string& text) {
  std::string line;
  for (const char c : text.substr(0, kSaid)) {
    const bool space = c == ' ' || c == '\n' || c == '\t' || c == '\r';
    if (!space) line += c;
    if (space && !line.empty() && line.back() != ' ') line += ' ';
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

// Exit status 0, or what went wrong. `arguments` without the program's name.
Status spawn(std::vector<std::string> arguments, std::FILE* input, std::FILE* output, std::FILE* errors) {
  arguments.insert(arguments.begin(), kProgram);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  int code = posix_spawn_file_actions_init(&actions);
  if (code != 0) return failed("cannot be started", code);
  for (const auto& [file, fd] : {std::pair{input, 0}, std::pair{output, 1}, std::pair{errors, 2}}) {
    if (code == 0) code = posix_spawn_file_actions_adddup2(&actions, ::fileno(file), fd);
  }
  pid_t child = 0;
  if (code == 0) code = posix_spawnp(&child, kProgram, &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (code != 0) {
    if (code != ENOENT) return failed("cannot be started", code);
    return {StatusCode::kNotFound,
            "gnuplot is not installed (not on PATH); Debian and Ubuntu have it in the package gnuplot-nox"};
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return failed("cannot be waited for", errno);
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  Result<std::string> said = read_all(errors);
  const std::string how = WIFEXITED(status) ? fmt::format("ended with exit status {}", WEXITSTATUS(status))
                                            : fmt::format("was ended by signal {}", WTERMSIG(status));
  return {StatusCode::kIoError, fmt::format("{} {} and said \"{}\"", kProgram, how, said ? one_line(*said) : "")};
}

struct Files {
  TemporaryFile input{std::tmpfile()}, output{std::tmpfile()}, errors{std::tmpfile()};
  Status opened() const {
    const bool all = input != nullptr && output != nullptr && errors != nullptr;
    return all ? Status::ok() : failed("no temporary file for its script", errno);
  }
};

}  // namespace

Result<std::string> run_gnuplot(const std::string& script) {
  const Files files;
  SLUICE_TRY(files.opened());
  if (std::fwrite(script.data(), 1, script.size(), files.input.get()) != script.size() ||
      std::fflush(files.input.get()) != 0 || std::fseek(files.input.get(), 0, SEEK_SET) != 0) {
    return failed("cannot write its script", errno);
  }
  SLUICE_TRY(spawn({"-d"}, files.input.get(), files.output.get(), files.errors.get()));
  return read_all(files.output.get());
}

Status find_gnuplot() {
  const Files files;
  SLUICE_TRY(files.opened());
  return spawn({"--version"}, files.input.get(), files.output.get(), files.errors.get());
}

std::string gnuplot_string(std::string_view text) {
  // Between single quotes nothing is substituted, and a quote is written twice.
  std::string quoted = "'";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    quoted += byte < 0x20 || byte == 0x7F ? std::string("?") : c == '\'' ? std::string("''") : std::string(1, c);
  }
  return quoted + "'";
}

namespace {

// Unlinked unless it got its name.
class Written {
 public:
  explicit Written(const std::filesystem::path& target) : target_(target) {
    constexpr int kMaxTries = 1000;
    for (int i = 0; i < kMaxTries; ++i) {
      temporary_ = target.parent_path() / fmt::format(".sluice-{}-{}.tmp", ::getpid(), i);
      fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
      if (fd_ >= 0 || errno != EEXIST) break;
    }
    is_there_ = fd_ >= 0;
  }
  Written(Written&& other) noexcept
      : target_(std::move(other.target_)),
        temporary_(std::move(other.temporary_)),
        fd_(std::exchange(other.fd_, -1)),
        is_there_(std::exchange(other.is_there_, false)) {}
  Written& operator=(Written&&) = delete;
  ~Written() {
    if (fd_ >= 0) ::close(fd_);
    if (is_there_) ::unlink(temporary_.c_str());
  }

  Status write(std::string_view text) {
    if (fd_ < 0) return failed("cannot create the file");
    while (!text.empty()) {
      const ssize_t n = ::write(fd_, text.data(), text.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failed("write failed");
      text.remove_prefix(static_cast<std::size_t>(n));
    }
    return ::close(std::exchange(fd_, -1)) == 0 ? Status::ok() : failed("close failed");
  }
  Status rename() {
    if (::rename(temporary_.c_str(), target_.c_str()) != 0) return failed("rename failed");
    is_there_ = false;
    return {};
  }

 private:
  Status failed(std::string_view what) const {
    return {StatusCode::kIoError, fmt::format("{}: {}: {}", target_.string(), what, std::strerror(errno))};
  }
  std::filesystem::path target_, temporary_;
  int fd_ = -1;
  bool is_there_ = false;
};

}  // namespace

Status write_files(const std::filesystem::path& folder, const std::vector<std::pair<std::string, std::string>>& files) {
  std::vector<Written> written;
  for (const auto& [name, content] : files) {
    written.emplace_back(folder / name);
    SLUICE_TRY(written.back().write(content));
  }
  for (Written& file : written) SLUICE_TRY(file.rename());
  return {};
}

}  // namespace sluice::cli
