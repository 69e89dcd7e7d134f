// Crafted checkpoints for the loader's tests: a folder in the test's temporary directory, tensors by name with their
// bytes at hand, so that a test can take one away, change one, and say what must be loaded.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "harness/codec.h"
#include "sluice/core.h"

namespace sluice::test {

// A folder of its own for each test, removed when it ends.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::size_t num_files() const;

 private:
  std::filesystem::path path_;
};

struct FileTensor {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;

  double at(std::int64_t index) const {
    return decode(dtype, load_bits(dtype, bytes.data() + index * size_bytes(dtype)));
  }
  void set(std::int64_t index, double value) {
    store_bits(dtype, bytes.data() + index * size_bytes(dtype), encode(dtype, value));
  }
  void set_bits(std::int64_t index, std::uint64_t bits) {
    store_bits(dtype, bytes.data() + index * size_bytes(dtype), bits);
  }
};
using FileTensors = std::map<std::string, FileTensor>;

// Seeded values in [-1, 1); scales (e8m0 or names with "scale") are positive.
FileTensor make_tensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed, double low = -1.0,
                       double high = 1.0);

// Written byte by byte, without the library's writer.
void write_file(const std::filesystem::path& path, const FileTensors& tensors);
FileTensors read_file(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, const std::string& text);
void write_index(const std::filesystem::path& folder, const std::map<std::string, std::string>& weight_map);

// DeepSeek-V3's layer 1 of 2, H = 160, I = 136 (both with a partial block), E = 4, two groups, one shared expert;
// experts e4m3 with f32 scales, the rest bf16, the score bias f32.
nlohmann::json dsv3_config();
FileTensors dsv3_tensors();

}  // namespace sluice::test
