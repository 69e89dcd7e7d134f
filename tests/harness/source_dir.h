// Where the project's files are: the environment's SLUICE_SOURCE_DIR for programs that run elsewhere than they were built,
// else where they were built.
#pragma once

#include <cstdlib>
#include <filesystem>

namespace sluice::test {

inline std::filesystem::path source_dir() {
  const char* const named = std::getenv("SLUICE_SOURCE_DIR");
  return named != nullptr ? named : SLUICE_SOURCE_DIR;
}

}  // namespace sluice::test
