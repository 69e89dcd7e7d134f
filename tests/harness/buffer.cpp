// Guarded buffers.
#include "harness/buffer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "harness/codec.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, size) static_cast<void>(0)
#endif

namespace sluice::test {
namespace {

constexpr std::int64_t kGuardBytes = 256;  // before and after; more than a row of vectors of any SIMD target overruns
constexpr std::int64_t kAlignBytes = 128;

// All ones is a NaN in every floating-point dtype. -1 would be a legal expert id, so integers get something else.
std::byte poison_byte(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kF64:
    case DType::kBF16:
    case DType::kF16:
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kE8M0: return std::byte{0xFF};
    default: return std::byte{0x5A};
  }
}

// Guards differ from the poison, so that poison copied one element too far shows, and from their neighbours by a
// period that is no power of two, so that a shifted copy of the guards shows too. `byte` counts from a multiple of
// the element size.
std::byte guard_byte(DType dtype, std::int64_t byte) {
  const auto salt = static_cast<unsigned>((byte / size_bytes(dtype)) % 7);
  const bool is_top = byte % size_bytes(dtype) == size_bytes(dtype) - 1;
  const bool is_next = byte % size_bytes(dtype) == size_bytes(dtype) - 2;
  switch (dtype) {
    case DType::kF32:
    case DType::kF64:
    case DType::kBF16:
    case DType::kF16:
      if (is_top) return std::byte{0x7F};
      return static_cast<std::byte>((is_next ? 0xF0u : 0xA0u) + salt + 1);
    case DType::kE4M3:
    case DType::kE5M2: return static_cast<std::byte>(salt % 2 == 0 ? 0x7Fu : 0xFFu);
    case DType::kE8M0: return static_cast<std::byte>(salt % 2 == 0 ? 0xA7u : 0xFFu);
    default: return static_cast<std::byte>(0x61u + salt);
  }
}

}  // namespace

void Buffer::Free::operator()(std::byte* p) const { std::free(p); }

// Opens the sanitizer's locks for as long as the harness itself looks at the guards.
class Buffer::Unlocked {
 public:
  explicit Unlocked(const Buffer& buffer) : buffer_(buffer) {
    ASAN_UNPOISON_MEMORY_REGION(buffer.storage_.get(), static_cast<std::size_t>(buffer.storage_bytes_));
  }
  ~Unlocked() { buffer_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  const Buffer& buffer_;
};

void Buffer::lock() const {
  const std::int64_t span_bytes = num_rows_ > 0 ? (num_rows_ - 1) * pitch_bytes_ + row_bytes_ : 0;
  [[maybe_unused]] std::byte* const end = first() + span_bytes;
  ASAN_POISON_MEMORY_REGION(storage_.get(), static_cast<std::size_t>(first() - storage_.get()));
  ASAN_POISON_MEMORY_REGION(end, static_cast<std::size_t>(storage_.get() + storage_bytes_ - end));
}

Buffer::Buffer(DType dtype, std::vector<std::int64_t> shape, BufferOptions options) {
  if (shape.empty() || shape.size() > static_cast<std::size_t>(kMaxRank)) {
    throw std::invalid_argument(fmt::format("Buffer: {} axes, expected 1 to {}", shape.size(), kMaxRank));
  }
  const std::int64_t cols = shape.back();
  const std::int64_t pitch = options.row_pitch_elems == 0 ? cols : options.row_pitch_elems;
  if (pitch < cols) throw std::invalid_argument(fmt::format("Buffer: a pitch of {} for rows of {}", pitch, cols));
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  num_rows_ = 1;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    view_.shape[i] = shape[i];
    if (i + 1 < shape.size()) num_rows_ *= shape[i];
  }
  std::int64_t stride = std::max<std::int64_t>(pitch, 1);
  for (std::size_t i = shape.size(); i-- > 0;) {
    view_.stride[i] = i + 1 == shape.size() ? 1 : stride;
    if (i + 1 < shape.size()) stride *= std::max<std::int64_t>(shape[i], 1);
  }
  row_bytes_ = cols * size_bytes(dtype);
  pitch_bytes_ = pitch * size_bytes(dtype);
  const std::int64_t span_bytes = num_rows_ > 0 ? (num_rows_ - 1) * pitch_bytes_ + row_bytes_ : 0;
  const std::int64_t front_bytes = kGuardBytes + options.offset_elems * size_bytes(dtype);
  storage_bytes_ = ceil_div(front_bytes + span_bytes + kGuardBytes, kAlignBytes) * kAlignBytes;
  storage_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignBytes, static_cast<std::size_t>(storage_bytes_))));
  if (storage_ == nullptr) throw std::bad_alloc();
  view_.data = storage_.get() + front_bytes;
  for (std::int64_t i = 0; i < storage_bytes_; ++i) storage_[static_cast<std::size_t>(i)] = guard_byte(dtype, i);
  poison();
  lock();
}

Buffer::~Buffer() {
  if (storage_ != nullptr) ASAN_UNPOISON_MEMORY_REGION(storage_.get(), static_cast<std::size_t>(storage_bytes_));
}

Buffer Buffer::clone() const {
  const std::int64_t offset_bytes = first() - storage_.get() - kGuardBytes;
  Buffer copy(view_.dtype, std::vector<std::int64_t>(view_.shape.begin(), view_.shape.begin() + view_.rank),
              {.row_pitch_elems = pitch_bytes_ / size_bytes(view_.dtype),
               .offset_elems = offset_bytes / size_bytes(view_.dtype)});
  const Unlocked from(*this);
  const Unlocked to(copy);
  std::copy_n(storage_.get(), storage_bytes_, copy.storage_.get());
  return copy;
}

TensorView Buffer::transposed() const {
  if (view_.rank != 2)
    throw std::invalid_argument("Buffer::transposed: " + view_.to_string() + " does not have two axes");
  TensorView view = view_;
  std::swap(view.shape[0], view.shape[1]);
  std::swap(view.stride[0], view.stride[1]);
  return view;
}

double Buffer::at(std::int64_t index) const {
  return decode(view_.dtype, load_bits(view_.dtype, element(view_, index)));
}
void Buffer::set(std::int64_t index, double value) const {
  store_bits(view_.dtype, element(view_, index), encode(view_.dtype, value));
}

Buffer& Buffer::fill_with(const std::function<double(std::int64_t)>& value) {
  return test::fill_with(view_, value), *this;
}
Buffer& Buffer::fill_values(const std::vector<double>& values) { return test::fill_values(view_, values), *this; }
Buffer& Buffer::fill_constant(double value) { return test::fill_constant(view_, value), *this; }
Buffer& Buffer::fill_normal(std::uint64_t seed, double sigma) { return test::fill_normal(view_, seed, sigma), *this; }
Buffer& Buffer::fill_uniform(std::uint64_t seed, double low, double high) {
  return test::fill_uniform(view_, seed, low, high), *this;
}
Buffer& Buffer::fill_integers(std::uint64_t seed, std::int64_t low, std::int64_t high) {
  return test::fill_integers(view_, seed, low, high), *this;
}
Buffer& Buffer::fill_powers_of_two(std::uint64_t seed, int low_exponent, int high_exponent) {
  return test::fill_powers_of_two(view_, seed, low_exponent, high_exponent), *this;
}
Buffer& Buffer::fill_random_bits(std::uint64_t seed) { return test::fill_random_bits(view_, seed), *this; }

Buffer& Buffer::poison(std::int64_t first_row) {
  const TensorView rows = view_.slice(first_row, std::max<std::int64_t>(view_.shape[0] - first_row, 0));
  const std::int64_t count = rows.num_elements();
  const auto bytes = static_cast<std::size_t>(size_bytes(view_.dtype));
  for (std::int64_t i = 0; i < count; ++i) std::fill_n(element(rows, i), bytes, poison_byte(view_.dtype));
  return *this;
}

std::vector<std::byte> Buffer::bytes() const {
  std::vector<std::byte> copy;
  copy.reserve(static_cast<std::size_t>(num_rows_ * row_bytes_));
  for (std::int64_t r = 0; r < num_rows_; ++r) {
    const std::byte* row = first() + r * pitch_bytes_;
    copy.insert(copy.end(), row, row + row_bytes_);
  }
  return copy;
}

bool Buffer::is_element(std::int64_t byte) const {
  const std::int64_t at = byte - (first() - storage_.get());
  if (at < 0 || num_rows_ == 0 || row_bytes_ == 0) return false;
  return at / pitch_bytes_ < num_rows_ && at % pitch_bytes_ < row_bytes_;
}

testing::AssertionResult Buffer::guards_intact() const {
  const Unlocked unlocked(*this);
  for (std::int64_t i = 0; i < storage_bytes_; ++i) {
    const std::byte got = storage_[static_cast<std::size_t>(i)];
    if (got == guard_byte(view_.dtype, i) || is_element(i)) continue;
    const std::int64_t at = i - (first() - storage_.get());
    const std::int64_t span_bytes = (num_rows_ - 1) * pitch_bytes_ + row_bytes_;
    std::string where;
    if (at < 0) {
      where = fmt::format("{} bytes before the first element", -at);
    } else if (num_rows_ == 0 || row_bytes_ == 0 || at >= span_bytes) {
      where = fmt::format("{} bytes after the last element", at - std::max<std::int64_t>(span_bytes, 0));
    } else {
      where = fmt::format("{} bytes into the gap after row {}", at % pitch_bytes_ - row_bytes_, at / pitch_bytes_);
    }
    return testing::AssertionFailure() << view_.to_string() << ": the guard byte " << where << " was overwritten with "
                                       << fmt::format("0x{:02x}", static_cast<unsigned>(got));
  }
  return testing::AssertionSuccess() << view_.to_string() << ": guards intact";
}

testing::AssertionResult Buffer::unchanged_since(const std::vector<std::byte>& snapshot, std::int64_t first_row) const {
  const std::vector<std::byte> now = bytes();
  if (snapshot.size() != now.size()) {
    return testing::AssertionFailure() << view_.to_string() << ": a snapshot of " << snapshot.size() << " bytes for "
                                       << now.size();
  }
  const std::int64_t rows_per_slice = view_.shape[0] > 0 ? num_rows_ / view_.shape[0] : 0;
  for (auto i = static_cast<std::size_t>(first_row * rows_per_slice * row_bytes_); i < now.size(); ++i) {
    if (now[i] == snapshot[i]) continue;
    const std::int64_t index = static_cast<std::int64_t>(i) / size_bytes(view_.dtype);
    const std::int64_t cols = row_bytes_ / size_bytes(view_.dtype);
    return testing::AssertionFailure() << view_.to_string()
                                       << fmt::format(": row {}, column {} changed, now {}", index / cols, index % cols,
                                                      at(index));
  }
  return testing::AssertionSuccess() << view_.to_string() << ": unchanged";
}

testing::AssertionResult Buffer::rows_untouched(std::int64_t first_row) const {
  return is_poison(view_.slice(first_row, std::max<std::int64_t>(view_.shape[0] - first_row, 0)));
}

testing::AssertionResult is_poison(const TensorView& view) {
  const std::int64_t count = view.num_elements();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::byte* bytes = element(view, i);
    for (std::int64_t b = 0; b < size_bytes(view.dtype); ++b) {
      if (bytes[b] == poison_byte(view.dtype)) continue;
      const std::int64_t cols = view.shape[static_cast<std::size_t>(view.rank - 1)];
      return testing::AssertionFailure() << view.to_string()
                                         << fmt::format(": row {}, column {} was written, now {}", i / cols, i % cols,
                                                        decode(view.dtype, load_bits(view.dtype, bytes)));
    }
  }
  return testing::AssertionSuccess() << view.to_string() << ": untouched";
}

}  // namespace sluice::test
