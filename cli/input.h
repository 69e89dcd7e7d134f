// Token activations from a file: [T,H] bf16 or f32 out of .safetensors or .npy, read piece by piece.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sluice/core.h"

namespace sluice::cli {

class TokenInput {
 public:
  virtual ~TokenInput() = default;

  // FILE, or FILE:TENSOR for a safetensors file that holds several. `hidden` >= 0 is the width wanted.
  static Result<std::unique_ptr<TokenInput>> open(const std::string& spec, std::int64_t hidden);

  const std::string& path() const { return path_; }
  const std::string& name() const { return name_; }  // "FILE:TENSOR", for messages
  DType dtype() const { return dtype_; }
  std::int64_t num_tokens() const { return num_tokens_; }
  std::int64_t hidden() const { return hidden_; }

  // Copies tokens [begin, begin+count) to `rows`, dense. The file's pages are let go again.
  virtual Status read(std::int64_t begin, std::int64_t count, std::byte* rows) = 0;

 protected:
  // Takes dtype and shape when they are [T,H] bf16 or f32.
  Status set(DType dtype, const std::vector<std::int64_t>& shape);

  std::string path_, name_;
  DType dtype_ = DType::kF32;
  std::int64_t num_tokens_ = 0;
  std::int64_t hidden_ = 0;
};

}  // namespace sluice::cli
