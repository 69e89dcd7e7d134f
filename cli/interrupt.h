// Ctrl-C and kill stop work between two chunks, so that temporary files are removed on the way out.
#pragma once

namespace sluice::cli {

inline constexpr int kExitInterrupted = 130;

void catch_interrupts();
bool is_interrupted();

}  // namespace sluice::cli
