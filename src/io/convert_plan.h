// What a conversion will write, decided from headers alone before a byte is written.
#pragma once

#include <string>
#include <vector>

#include "io/catalog.h"
#include "io/convert.h"
#include "io/hf_config.h"

namespace sluice::io {

// A matrix inside a stored tensor: element (r, c) is element first + r * row_stride + c * col_stride of it.
struct StoredMatrix {
  TensorRef ref;
  std::int64_t rows = 0, cols = 0;
  std::int64_t first = 0, row_stride = 0, col_stride = 1;

  bool is_dense() const { return col_stride == 1 && row_stride == cols; }
  std::string element(std::int64_t row, std::int64_t col) const;  // "name[3,17,2]", in the tensor's own indices
};

// Rows [begin, begin + count) as bf16 or f32: where they lie when that is possible, else gathered into `buffer`. f16
// becomes f32.
TensorView rows_of(const StoredMatrix& matrix, std::int64_t begin, std::int64_t count, std::vector<std::byte>& buffer);
// Rows to take at a time: a multiple of 128, some MB of them.
std::int64_t rows_per_strip(const StoredMatrix& matrix);

// Tells the kernel that the pages of these rows are not needed again. Where rows are strided, all of the tensor's.
void drop_rows(const StoredMatrix& matrix, std::int64_t begin, std::int64_t count);

struct PlannedTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::int64_t num_bytes = 0;
  std::size_t shard = 0, slot = 0;  // its file, and its number in it
};

// One thing to do: a tensor to copy, or a matrix to quantise into a weight and its scale.
struct ConvertStep {
  TensorRef copy;       // set for a copy
  StoredMatrix matrix;  // set for a matrix
  std::size_t out = 0;  // of ConvertPlan::tensors; the scale of a matrix follows its weight

  bool is_copy() const { return static_cast<bool>(copy); }
  std::int64_t source_bytes() const;
};

struct ConvertPlan {
  WeightFormat format = WeightFormat::kFp8Block;
  std::filesystem::path folder;  // of the source
  HfConfig config;
  Catalog catalog;
  std::vector<std::int64_t> layers;
  std::vector<PlannedTensor> tensors;
  std::vector<ConvertStep> steps;  // in the order of the shards they write
  std::size_t num_shards = 0;
  std::string config_json;                   // to write
  std::vector<std::filesystem::path> files;  // to copy, relative to the folder
  std::vector<std::string> left_out_files;
  std::int64_t source_bytes = 0, total_bytes = 0;

  std::string shard_name(std::size_t shard) const;
};

Result<ConvertPlan> plan_convert(const ConvertRequest& request);

// Holds the converted checkpoint in `folder` against its source, with plain loops and the loader's decoding; fills the
// report's errors and violations. An error status means that it could not be read at all.
Status verify_converted(const ConvertPlan& plan, const std::filesystem::path& folder, const ConvertRequest& request,
                        ConvertReport& report);

}  // namespace sluice::io
