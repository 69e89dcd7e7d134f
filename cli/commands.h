// One function per command: each adds its subcommand, its options and what to run.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "output.h"

namespace sluice::cli {

// The command that was asked for, filled while the command line is parsed.
struct Command {
  bool json = false;
  std::function<Outcome()> run;
};

void add_inspect(CLI::App& app, Command& command);
void add_run(CLI::App& app, Command& command);
void add_check(CLI::App& app, Command& command);
void add_explain(CLI::App& app, Command& command);
void add_synth(CLI::App& app, Command& command);
void add_convert(CLI::App& app, Command& command);
void add_bench(CLI::App& app, Command& command);
void add_eplb(CLI::App& app, Command& command);
void add_plan(CLI::App& app, Command& command);

}  // namespace sluice::cli
