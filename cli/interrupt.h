// Ctrl-C and kill stop work between two chunks, so that temporary files are removed on the way out.
#pragma once

#include "output.h"

namespace sluice::cli {

inline constexpr int kExitInterrupted = 130;

void catch_interrupts();
bool is_interrupted();
// How a command ends that a signal stopped: `status` says what it left.
Outcome interrupted(Status status);

}  // namespace sluice::cli
