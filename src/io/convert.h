// A checkpoint with its experts quantised: reads a bf16, f16 or f32 one, writes one that the loader and other software
// read. Every tensor that is not an expert's projection, and every other file, is copied bit for bit.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "sluice/quantize.h"

namespace sluice::io {

struct ConvertRequest {
  std::filesystem::path model;  // a checkpoint's folder; only read
  std::filesystem::path out;    // a folder that does not exist yet, or an empty one
  WeightFormat format = WeightFormat::kFp8Block;
  std::vector<std::int64_t> layers;  // to convert; empty: all with experts
  std::int64_t max_shard_bytes = std::int64_t{5} << 30;
  bool replace = false;  // `out` may be a checkpoint, which is replaced when the new one is complete
  int num_threads = 0;   // 0: every usable core
  // "writing" and "checking", each from 0 to its total of source bytes; may be empty.
  std::function<void(std::string_view phase, std::int64_t done_bytes, std::int64_t total_bytes)> progress;
  // Asked before each piece of at most some MB; true ends the work with kIoError. May be empty.
  std::function<bool()> stop;
};

struct ConvertReport {
  std::string family;
  std::vector<std::int64_t> layers;  // converted
  std::int64_t num_quantised = 0;    // matrices
  std::int64_t num_copied = 0;       // tensors
  std::int64_t num_shards = 0;
  std::vector<std::string> copied_files;             // besides config.json, which gets a quantization_config
  std::vector<std::string> left_out_files;           // weights in other formats and what is no regular file
  std::int64_t source_bytes = 0, written_bytes = 0;  // of all tensors
  // Of the check: relative L2 distances of quantised matrices from their sources, |q * scale - w| / |w|, and the largest
  // share of its bound (docs/numerics.md) that an element uses.
  std::string worst_tensor;
  double worst_error = 0, mean_error = 0, worst_share = 0;
  std::string worst_share_at;
  // What the check found wrong: the first few, and how many. Where there is any, nothing is left under `out`.
  std::vector<std::string> violations;
  std::int64_t num_violations = 0;
};

// Holds no more in memory than a strip of some MB of one tensor and its quantised form, beside the pages of the file that
// is read. The result is read back and held against the source before it appears under its name. On failure, and
// when stopped, nothing stays behind.
Result<ConvertReport> convert(const ConvertRequest& request);

}  // namespace sluice::io
