// Inputs, checks and timing shared by the GPU benchmarks and the peers' programs. Values are a hash of their index, so
// every program makes the same tensors in whatever layout it wants, and a check needs no second copy of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "grid.h"

namespace sluice::bench {

// A benchmark has nobody to hand an error to.
inline void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::int64_t bytes) { must(cudaMalloc(&data_, static_cast<std::size_t>(bytes)), "cudaMalloc"); }
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceBuffer() { cudaFree(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

template <class T>
DeviceBuffer upload(const std::vector<T>& host) {
  DeviceBuffer buffer(static_cast<std::int64_t>(host.size() * sizeof(T)) + 16);
  must(cudaMemcpy(buffer.as<T>(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  return buffer;
}

// Which tensor a value belongs to.
enum class Salt : std::uint32_t { kA = 11, kAScale = 12, kW = 13, kWScale = 14 };

// out[i] = value of element i: near normal, standard deviation 37, rounded to nearest even.
void fill_e4m3(std::uint8_t* out, std::int64_t count, Salt salt);
void fill_bf16(std::uint16_t* out, std::int64_t count, Salt salt);
// Rows of a that lie elsewhere: row i of out holds logical row source[i], zeros where that is -1.
void fill_rows_e4m3(std::uint8_t* out, const std::int32_t* source, std::int64_t rows, std::int64_t k);
// scale of (row, block): out[block * block_stride + i * row_stride] for logical row source[i] (null: i), 0 where -1.
void fill_a_scale(float* out, const std::int32_t* source, std::int64_t rows, std::int64_t blocks,
                  std::int64_t row_stride, std::int64_t block_stride);
// [L,Nb,Kb], or with k_major false each expert's block transposed to [Kb,Nb].
void fill_w_scale(float* out, std::int64_t experts, std::int64_t n_blocks, std::int64_t k_blocks, bool k_major);

// Where a program put the result: row r of expert e, column n.
struct Output {
  const std::uint16_t* data = nullptr;     // bf16
  const std::int32_t* position = nullptr;  // physical row of logical row r; null: the same
  std::int64_t row_stride = 0;
};
// Largest |out - reference| / bound over samples of rows and columns, the reference in double. A right result is below
// 1; a row of zeros, a neighbour's row or a wrong scale is far above. The bound: 2^-8 |ref| for bf16 and 2^-12 of
// sum |a| |w| for tensor cores that keep 13 bits of their products.
double worst_error(const GridRow& row, const GemmShape& gemm, const std::vector<std::int32_t>& offset,
                   const Output& output);

struct Timing {
  double median_us = 0;
  double min_us = 0;
  double max_us = 0;
  std::string error;  // what failed; empty when the figures are there
};
// Captures enough calls of run(stream, variant), variants in turn, into a graph; replays it and divides.
Timing time_graph(int num_variants, double expected_us, const std::function<bool(cudaStream_t, int)>& run);

// One line of JSON on stdout: the figure, what it was measured on, and its floor.
void print_figure(const char* impl, const GridRow& row, const GemmShape& gemm, const std::vector<std::int32_t>& offset,
                  const Timing& timing, double worst, const std::string& config);

// FNV-1a over all rows' offsets: equal in every program that measured the same routes.
std::uint64_t route_digest();

}  // namespace sluice::bench
