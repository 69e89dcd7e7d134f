// NumPy .npy files as command line input: versions 1 to 3, C order, plain numeric dtypes and bf16.
#pragma once

#include <filesystem>
#include <vector>

#include "sluice/core.h"

namespace sluice::io {

struct NpyArray {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;  // any rank; [] is one element
  std::vector<std::byte> data;
};

struct NpyHeader {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::int64_t data_offset = 0;  // of the first element in the file
};

// Reads and judges the header; the file holds exactly the elements it names. For reading large arrays in pieces.
Result<NpyHeader> read_npy_header(const std::filesystem::path& path);

// bf16 is what numpy writes for it: descr '<V2' (also '|V2', 'bfloat16'). Big-endian, Fortran order, objects, strings
// and records are refused by name.
Result<NpyArray> read_npy(const std::filesystem::path& path);

}  // namespace sluice::io
