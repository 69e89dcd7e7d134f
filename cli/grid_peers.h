// Figures of public alternatives, read from files: their programs (bench/peers) run outside of this command.
//
// A peers file, written by bench/peers/peers_file.py:
//   {"form": "sluice-peers", "version": 1, "date": "2026-12-01T05:52:00Z", "device": "NVIDIA H200",
//    "figures": [{"row": "dsv3:128", "peer": "deepgemm", "covers": "gemms", "us": 2848.8, "checked": true}, ...]}
// date: of the run, UTC; device: the GPU's name, or "cpu"; row: SHAPE:T; covers: "layer", from x to out, or "gemms", the
// experts' two GEMMs alone; checked: whether the peer's result was held against a reference before it was timed. A record
// of scripts/gpu-check is read too: its peers timed one GEMM at a time, and the two fastest right ones of a peer become its
// "gemms".
#pragma once

#include <ctime>
#include <map>
#include <string>
#include <vector>

#include "sluice/core.h"

namespace sluice::cli {

enum class Covers { kLayer, kGemms };

struct PeerSource {
  std::string file, date, device;
  std::string commit;        // of a record; else ""
  bool another_run = false;  // a record, a file that is not of the hour before, or one of another device
  bool another_device = false;
};

struct PeerFigure {
  std::string row, peer;
  Covers covers = Covers::kGemms;
  double us = 0;
  bool checked = false;
  std::size_t source = 0;  // index into Peers::sources
};

struct Peers {
  std::vector<PeerSource> sources;
  std::vector<PeerFigure> figures;
};

// `rows`: what a file may speak of, and whether the row is in bf16. A peer in bf16 answers another question than one in e4m3,
// so of a record it counts beside rows in bf16 only. `now` and `device` are those of this run. Whatever is missing, of
// another type, unknown or no positive number is refused with the file, the place and the value.
Result<Peers> read_peers(const std::vector<std::string>& files, const std::map<std::string, bool>& rows,
                         std::time_t now, const std::string& device);

}  // namespace sluice::cli
