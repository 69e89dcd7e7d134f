// Runs gnuplot as a child process without a shell, and files that appear whole or not at all.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "sluice/core.h"

namespace sluice::cli {

// What a gnuplot of PATH prints to its standard output when it is given `script` on its standard input. Settings of the
// user (~/.gnuplot) are not read. A gnuplot that is missing or fails is refused with its exit status and what it said.
Result<std::string> run_gnuplot(const std::string& script);
// Ok where there is a gnuplot that answers.
Status find_gnuplot();

// `text` as a string of a gnuplot script: quoted, on one line.
std::string gnuplot_string(std::string_view text);

// Writes (name, content) into a folder: all under temporary names first, then each renamed. A failure leaves no partial
// file, and none at all where it comes before the first rename.
Status write_files(const std::filesystem::path& folder, const std::vector<std::pair<std::string, std::string>>& files);

}  // namespace sluice::cli
