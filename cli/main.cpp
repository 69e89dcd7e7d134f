// The `sluice` command: registers the commands, runs the one that was asked for, maps its end to an exit code.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string_view>

#include "commands.h"
#include "ranks.h"

namespace {

constexpr const char* kAbout =
    R"(Sluice runs the Mixture-of-Experts layer of large language models. A checkpoint is a folder with config.json and
model.safetensors (or model.safetensors.index.json and its shards), as published on the Hugging Face Hub.)";

constexpr const char* kFooter =
    R"(Letters: T tokens, S slots (top-k per token), E experts, H hidden, I intermediate. Sizes are decimal (1 MB = 10^6 B).
Results never depend on --threads or on how tokens are batched, to the bit.

Exit codes: 0 success, 1 a check failed, 2 wrong usage, 3 bad input (file, model or value), 4 internal error.
Errors go to stderr as "sluice: error: ..."; with --json also to stdout as {"error": {...}}.
Every command takes --json, and --help explains each with examples.

First steps:
  sluice inspect data/tiny-dsv3
  sluice check --model data/tiny-dsv3 --layer 1
  sluice run --model data/tiny-dsv3 --layer 1 --input data/tiny-dsv3/golden.safetensors:layer1.x --output y.safetensors
  sluice synth --like qwen3-30b --layers 1 --out qwen3-layer
)";

// Commands describe themselves in a summary line and a paragraph; the list of commands shows the line only.
class Formatter : public CLI::Formatter {
 public:
  std::string make_subcommand(const CLI::App* sub) const override {
    const std::string text = sub->get_description();
    return "  " + fmt::format("{:10}", sub->get_name()) + text.substr(0, text.find('\n')) + "\n";
  }
};

// The parser stops at a fault, so whether --json was given is read from the arguments themselves.
bool asks_json(int argc, char** argv) {
  return std::any_of(argv + std::min(argc, 1), argv + argc,
                     [](const char* a) { return std::string_view(a) == "--json"; });
}

// The word in the place of the command, when it is none. The parser itself only says that a command is missing.
std::string unknown_command(const CLI::App& app, int argc, char** argv) {
  int i = 1;
  while (i < argc && std::string_view(argv[i]) == "--json") ++i;
  if (i >= argc || argv[i][0] == '-') return "";
  const std::vector<const CLI::App*> commands = app.get_subcommands([](const CLI::App*) { return true; });
  const bool known =
      std::any_of(commands.begin(), commands.end(), [&](const CLI::App* c) { return c->get_name() == argv[i]; });
  return known ? "" : argv[i];
}

int run(int argc, char** argv) {
  using namespace sluice::cli;
  CLI::App app{kAbout, "sluice"};
  app.footer(kFooter);
  app.set_version_flag("--version", "sluice " SLUICE_VERSION);
  auto formatter = std::make_shared<Formatter>();
  formatter->column_width(34);
  app.formatter(formatter);
  app.require_subcommand(1);
  Command command;
  add_inspect(app, command);
  add_run(app, command);
  add_check(app, command);
  add_explain(app, command);
  add_synth(app, command);
  add_convert(app, command);
  add_bench(app, command);
  add_eplb(app, command);
  add_plan(app, command);
  if (const std::string wrong = unknown_command(app, argc, argv); !wrong.empty()) {
    std::vector<std::string> names;
    for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
      names.push_back(sub->get_name());
    return report(Outcome::usage(fmt::format("there is no command '{}'; there are {}", wrong, fmt::join(names, ", "))),
                  asks_json(argc, argv));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help, --version
  } catch (const CLI::ParseError& error) {
    std::string hint = "sluice";
    for (const CLI::App* sub : app.get_subcommands()) hint += " " + sub->get_name();
    return report(Outcome::usage(fmt::format("{} (see {} --help)", error.what(), hint)), asks_json(argc, argv));
  }
  return report(command.run(), command.json);
}

}  // namespace

// A closed standard stream would hand its number to the next file that is opened, and messages would go into that file.
// Reading-only for the outputs: what is written there must still fail, and be noticed.
void occupy_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) == -1 && errno == EBADF) {
      [[maybe_unused]] const int taken = ::open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
    }
  }
}

// A full disk or a closed stream shows only when the buffer is written: a result that did not arrive is no success.
int finish(int exit_code) {
  sluice::cli::end_ranks();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
  sluice::cli::say(fmt::format("sluice: error: cannot write to the standard output: {}\n", std::strerror(errno)));
  return exit_code == sluice::cli::kExitOk ? sluice::cli::kExitInternal : exit_code;
}

int main(int argc, char** argv) {
  occupy_standard_streams();
  try {
    return finish(run(argc, argv));
  } catch (const std::exception& error) {
    if (std::ferror(stdout) != 0) return finish(sluice::cli::kExitOk);
    sluice::cli::say(fmt::format("sluice: error: internal: {}\n", error.what()));
    return sluice::cli::kExitInternal;
  }
}
