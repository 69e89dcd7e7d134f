// What loading a layer is made of: destinations, and jobs that fill each of their bytes from the files exactly once.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "io/layer_files.h"

namespace sluice::io {

struct Done {
  std::int64_t num_nan = 0;
  Status status = Status::ok();
};

// One piece of work: reads parts of source tensors, fills one range of one destination.
struct Job {
  const std::byte* dst = nullptr;
  std::int64_t dst_bytes = 0;  // 0: only looks (views into the file)
  TensorRef source;
  std::int64_t src_begin = 0, src_bytes = 0;
  std::function<Done(const std::byte* src)> run;
};

// A scale is a magnitude. Placeholders that were never overwritten show as negative or infinite ones.
Done convert_scales(const TensorRef& ref, const std::byte* src, std::int64_t count, float* dst);

// The scales of one matrix, of whatever granularity, as f32.
struct MatrixScales {
  bool per_row = false;
  std::int64_t row_blocks = 0;  // scales of a row of blocks
  std::vector<float> values;

  // Of matrix `index` of a tensor of [rows, cols] matrices.
  Done read(StoredFormat format, const TensorRef& scale, std::int64_t index, std::int64_t rows, std::int64_t cols);
  const float* at(std::int64_t row, std::int64_t col) const {
    return values.data() + (per_row ? row : row / kScaleBlock * row_blocks + col / kScaleBlock);
  }
};

class LoadJobs {
 protected:
  LoadJobs(const LoadOptions& options, bool poison) : options_(options), poison_(poison) {}

  // Fresh memory the layer will own, which jobs must fill; of a rank without experts none.
  Status allocate(DType dtype, std::initializer_list<std::int64_t> shape, TensorView& view);
  // Experts [first, first + count) of a stored tensor that is already what is wanted, where it lies: not copied, but
  // looked through for NaN. False where it lies awkwardly.
  bool take_view(const TensorRef& ref, DType dtype, std::initializer_list<std::int64_t> shape, std::int64_t first,
                 std::int64_t count, TensorView& view);
  void add(const TensorRef& ref, std::int64_t src_begin, std::int64_t src_bytes, std::byte* dst, std::int64_t dst_bytes,
           std::function<Done(const std::byte* src)> run) {
    jobs_.push_back({dst, dst_bytes, ref, src_begin, src_bytes, std::move(run)});
  }
  void note_conversion(std::string_view from, DType to, std::string_view how = "converted exactly");

  // The jobs' ranges must tile the destinations: no byte unfilled, none filled twice.
  Status check_ledger() const;
  // All jobs, on several threads; what is reported does not depend on them.
  Status run();

  const LoadOptions& options_;
  LoadedLayer loaded_;

 private:
  struct Range {
    const std::byte* begin;
    std::int64_t bytes;
  };

  bool poison_;
  std::vector<Job> jobs_;
  std::vector<Range> destinations_;
};

}  // namespace sluice::io
