// A tensor with an alarm: guard bytes before it, after it and between its pitched rows, poison inside it.
//
//   Buffer out(DType::kBF16, {rows, cols}, {.row_pitch_elems = cols + 3, .offset_elems = 1});
//   ... run with out.view() ...
//   EXPECT_TRUE(out.guards_intact());
//   EXPECT_TRUE(out.rows_untouched(num_rows));
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "harness/fill.h"
#include "sluice/core.h"

namespace sluice::test {

struct BufferOptions {
  std::int64_t row_pitch_elems = 0;  // elements from one row (of the last axis) to the next; 0: dense
  std::int64_t offset_elems = 0;     // elements between a 128-byte boundary and the first element
};

// Elements start out as poison: NaN in the floating-point dtypes, large nonsense in the integer ones. Guards are
// another NaN, so that both a stray read (a NaN in the result) and a stray write (a changed guard) show. Under
// AddressSanitizer the guards before and after the tensor also trap when they are touched.
class Buffer {
 public:
  Buffer(DType dtype, std::vector<std::int64_t> shape, BufferOptions options = {});
  ~Buffer();
  Buffer(Buffer&&) noexcept = default;
  Buffer& operator=(Buffer&&) = delete;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer clone() const;  // same bytes, same geometry, memory of its own

  const TensorView& view() const { return view_; }
  // The [cols, rows] view of a [rows, cols] buffer: the other stride order of scales.
  TensorView transposed() const;
  DType dtype() const { return view_.dtype; }
  std::int64_t num_elements() const { return view_.num_elements(); }
  // Pointer to the first element; T must have the element's size.
  template <class T>
  T* as() const {
    EXPECT_EQ(static_cast<std::int64_t>(sizeof(T)), size_bytes(view_.dtype));
    return view_.as<T>();
  }
  double at(std::int64_t index) const;               // by row-major position
  void set(std::int64_t index, double value) const;  // rounded to the dtype

  // Fills, as in fill.h; each returns the buffer, so that a declaration can fill at once.
  Buffer& fill_with(const std::function<double(std::int64_t)>& value);
  Buffer& fill_values(const std::vector<double>& values);
  Buffer& fill_constant(double value);
  Buffer& fill_normal(std::uint64_t seed, double sigma = 1.0);
  Buffer& fill_uniform(std::uint64_t seed, double low = -1.0, double high = 1.0);
  Buffer& fill_integers(std::uint64_t seed, std::int64_t low, std::int64_t high);
  Buffer& fill_powers_of_two(std::uint64_t seed, int low_exponent = -3, int high_exponent = 3);
  Buffer& fill_random_bits(std::uint64_t seed);
  Buffer& poison(std::int64_t first_row = 0);  // rows of axis 0 from first_row on
  std::vector<double> to_doubles() const { return test::to_doubles(view_); }

  // The elements' bytes without guards and gaps: a snapshot to hold an input against later.
  std::vector<std::byte> bytes() const;

  // Each says where the first offending byte or element is.
  testing::AssertionResult guards_intact() const;
  testing::AssertionResult unchanged_since(const std::vector<std::byte>& snapshot, std::int64_t first_row = 0) const;
  testing::AssertionResult rows_untouched(std::int64_t first_row) const;  // still poison from that row of axis 0 on

 private:
  class Unlocked;
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::byte* first() const { return static_cast<std::byte*>(view_.data); }
  bool is_element(std::int64_t byte) const;  // whether storage_[byte] belongs to an element
  void lock() const;

  TensorView view_;
  std::int64_t row_bytes_ = 0;    // of the elements of one row
  std::int64_t pitch_bytes_ = 0;  // from row to row
  std::int64_t num_rows_ = 0;     // of the last axis
  std::int64_t storage_bytes_ = 0;
  std::unique_ptr<std::byte[], Free> storage_;
};

// Whether every element of the view still is the poison a Buffer starts out with.
testing::AssertionResult is_poison(const TensorView& view);

}  // namespace sluice::test
