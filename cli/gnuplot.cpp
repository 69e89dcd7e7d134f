#include "gnuplot.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <span>

#include "io/temporary_file.h"

extern char** environ;  // NOLINT: its name is POSIX's

namespace sluice::cli {

namespace {

constexpr const char* kProgram = "gnuplot";
constexpr std::size_t kSaid = 600;  // characters of a failed gnuplot's words that are passed on

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
// Files instead of pipes between the two: neither side can wait for the other.
using ScratchFile = std::unique_ptr<std::FILE, CloseFile>;

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
  ScratchFile input{std::tmpfile()}, output{std::tmpfile()}, errors{std::tmpfile()};
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

Status write_files(const std::filesystem::path& folder, const std::vector<std::pair<std::string, std::string>>& files) {
  std::deque<io::TemporaryFile> written;  // none of them moves
  for (const auto& [name, content] : files) {
    io::TemporaryFile& file = written.emplace_back(folder / name);
    SLUICE_TRY(file.opened());
    SLUICE_TRY(file.write(0, std::as_bytes(std::span(content))));
    SLUICE_TRY(file.flush());
  }
  for (io::TemporaryFile& file : written) SLUICE_TRY(file.commit());
  return {};
}

}  // namespace sluice::cli
