#include "interrupt.h"

#include <csignal>

namespace sluice::cli {

namespace {
volatile std::sig_atomic_t g_interrupted = 0;  // the one global a signal handler needs
void on_signal(int number) {
  g_interrupted = 1;
  // A second signal ends the program at once.
  std::signal(number, SIG_DFL);
}
}  // namespace

void catch_interrupts() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  std::signal(SIGHUP, on_signal);  // a closed terminal
  std::signal(SIGXFSZ, SIG_IGN);   // a file size limit then is an error of write, with its clean-up
}

bool is_interrupted() { return g_interrupted != 0; }

Outcome interrupted(Status status) {
  Outcome outcome(std::move(status));
  outcome.exit_code = kExitInterrupted;
  return outcome;
}

}  // namespace sluice::cli
