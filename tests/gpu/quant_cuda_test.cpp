// pack and swiglu_quant on the GPU where tests/gpu/stages_cuda_test.cpp does not reach: one scale a row, int8, sizes that
// take the kernels for many rows, and offsets past 2^31 elements. Bit by bit against the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "gpu/device_mirror.h"
#include "harness/buffer.h"
#include "sluice/stage/combine.h"
#include "sluice/stage/pack.h"
#include "sluice/stage/swiglu_quant.h"

namespace sluice::test {
namespace {

class QuantCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = no_gpu_reason(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

template <class Args>
using Views = std::vector<std::function<TensorView&(Args&)>>;

template <class Args>
const Impl<Args>& gpu_impl(std::span<const Impl<Args>> table) {
  EXPECT_EQ(table.front().device, DeviceKind::kCuda);
  return table.front();
}

// Device scratch full of junk.
class Scratch {
 public:
  explicit Scratch(std::int64_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&data_, static_cast<std::size_t>(bytes) + 256), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xA5, static_cast<std::size_t>(bytes) + 256), cudaSuccess);
  }
  ~Scratch() { cudaFree(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::span<std::byte> span() const { return {static_cast<std::byte*>(data_), static_cast<std::size_t>(bytes_)}; }
  testing::AssertionResult guard_intact() const {
    std::vector<unsigned char> tail(256);
    if (cudaMemcpy(tail.data(), static_cast<char*>(data_) + bytes_, 256, cudaMemcpyDeviceToHost) != cudaSuccess)
      return testing::AssertionFailure() << "no copy of the guard";
    for (unsigned char c : tail) {
      if (c != 0xA5) return testing::AssertionFailure() << "wrote past the scratch that was booked";
    }
    return testing::AssertionSuccess();
  }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Runs on mirrors of `views`, twice over; everything must then be what the reference made of the originals, guards and
// rows of nobody included.
template <class Args>
void expect_reference_bits(std::span<const Impl<Args>> table, const Args& args, const Views<Args>& views,
                           const std::string& what) {
  SCOPED_TRACE(what);
  const Impl<Args>& impl = gpu_impl(table);
  const Status legal = check(args);
  ASSERT_TRUE(legal.is_ok()) << legal.message();
  DeviceMirror mirror;
  Args device = args;
  for (const auto& view : views) mirror.add(view(device));
  Machine machine;
  machine.device = {DeviceKind::kCuda, 0};
  const Scratch scratch(impl.scratch_bytes == nullptr ? 0 : impl.scratch_bytes(args, machine));
  ASSERT_TRUE(table.back().run(args, {}).is_ok());
  for (int round = 0; round < 2; ++round) {
    const Status status = impl.run(device, {nullptr, scratch.span(), 1});
    ASSERT_TRUE(status.is_ok()) << status.message();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_TRUE(mirror.equals_host()) << "run " << round;
    ASSERT_TRUE(scratch.guard_intact());
  }
}

const Views<pack::Args> kPackViews = {[](pack::Args& a) -> TensorView& { return a.x; },
                                      [](pack::Args& a) -> TensorView& { return a.x_scale; },
                                      [](pack::Args& a) -> TensorView& { return a.row_token; },
                                      [](pack::Args& a) -> TensorView& { return a.row_slot; },
                                      [](pack::Args& a) -> TensorView& { return a.slot_row; },
                                      [](pack::Args& a) -> TensorView& { return a.num_rows; },
                                      [](pack::Args& a) -> TensorView& { return a.groups.counts; },
                                      [](pack::Args& a) -> TensorView& { return a.groups.expert_offset.view; },
                                      [](pack::Args& a) -> TensorView& { return a.weight; },
                                      [](pack::Args& a) -> TensorView& { return a.rows; },
                                      [](pack::Args& a) -> TensorView& { return a.rows_scale; }};
const Views<swiglu_quant::Args> kSwigluViews = {
    [](swiglu_quant::Args& a) -> TensorView& { return a.h; },
    [](swiglu_quant::Args& a) -> TensorView& { return a.groups.expert_offset.view; },
    [](swiglu_quant::Args& a) -> TensorView& { return a.groups.counts; },
    [](swiglu_quant::Args& a) -> TensorView& { return a.a; },
    [](swiglu_quant::Args& a) -> TensorView& { return a.a_scale; }};

// Rows of zeros, of tiny and of huge values, with infinities or NaN of both signs, and of any bits.
void fill_hard(Buffer& b, std::uint64_t seed) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  b.fill_normal(seed, 2.0);
  const std::int64_t cols = b.view().shape[1];
  Rng rng(seed + 1);
  for (std::int64_t r = 0; r < b.view().shape[0]; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const std::int64_t i = r * cols + c;
      if (r % 7 == 1) b.set(i, c % 2 == 0 ? 0.0 : -0.0);
      if (r % 7 == 2) b.set(i, rng.normal() * 1e-38);
      if (r % 7 == 3 && rng.integer(0, 15) == 0) b.set(i, rng.integer(0, 1) == 0 ? kInf : -kInf);
      if (r % 7 == 4 && rng.integer(0, 15) == 0) b.set(i, rng.integer(0, 1) == 0 ? kNaN : -kNaN);
      if (r % 7 == 5) b.set(i, rng.normal() * 3e36);
      if (r % 7 == 6) b.set(i, std::ldexp(rng.uniform(-1, 1), static_cast<int>(rng.integer(-40, 8))));
    }
  }
}

// A plan of tokens x slots in which every third slot is nowhere.
struct Plan {
  Buffer slot_row, row_token, row_slot, num_rows;
  Plan(std::int64_t tokens, std::int64_t slots)
      : slot_row(DType::kI32, {tokens, slots}, {.row_pitch_elems = slots + 1}),
        row_token(DType::kI32, {tokens * slots}),
        row_slot(DType::kI32, {tokens * slots}),
        num_rows(DType::kI32, {1}) {
    // Rows in an order that is not the tokens', as experts make it.
    std::int64_t used = 0;
    for (std::int64_t i = 0; i < tokens * slots; ++i) slot_row.set(i, -1.0);
    for (std::int64_t s = 0; s < slots; ++s) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t i = t * slots + s;
        if (i % 3 == 1) continue;
        slot_row.set(i, static_cast<double>(used));
        row_token.set(used, static_cast<double>(t));
        row_slot.set(used, static_cast<double>(i));
        ++used;
      }
    }
    num_rows.fill_constant(static_cast<double>(used));
  }
};

TEST_F(QuantCuda, PackWithOneScaleARow) {
  constexpr std::int64_t kTokens = 29, kSlots = 3;
  int num_cases = 0;
  for (std::int64_t hidden : {1, 16, 96, 128, 130, 1000, 7168, 16384, 16400, 33000}) {
    for (DType rows_dtype : {DType::kE4M3, DType::kI8}) {
      for (DType x_dtype : {DType::kBF16, DType::kF32, rows_dtype}) {
        for (int form = 0; form < 5; ++form) {  // 0 by token, 1 by row, 2 weighted rows, 3 rows are tokens, 4 masked
          if ((form == 2 && x_dtype == rows_dtype) || (hidden > 10000 && form > 1)) continue;
          const std::int64_t pitch = hidden % 16 == 0 && form % 2 == 0 ? 0 : hidden + 5;
          Buffer x(x_dtype, {kTokens, hidden}, {.row_pitch_elems = pitch});
          x_dtype == rows_dtype ? (void)x.fill_random_bits(3) : fill_hard(x, static_cast<std::uint64_t>(hidden));
          Buffer x_scale(DType::kF32, {1, kTokens});
          x_scale.fill_uniform(4, 0.5, 2.0);
          const Plan plan(kTokens, kSlots);
          const bool planned = form < 3;
          const std::int64_t capacity = planned ? kTokens * kSlots : kTokens;
          Buffer weight(DType::kF32, {kTokens, kSlots});
          weight.fill_normal(9);
          Buffer counts(DType::kI32, {1});
          counts.fill_constant(static_cast<double>(kTokens - 3));
          Buffer rows(rows_dtype, {capacity, hidden}, {.row_pitch_elems = pitch});
          Buffer rows_scale(DType::kF32, {capacity, 1}, {.row_pitch_elems = 1 + form % 3});
          pack::Args args;
          args.x = x.view();
          if (x_dtype == rows_dtype) args.x_scale = x_scale.view();
          if (planned) {
            args.row_token = plan.row_token.view();
            args.row_slot = plan.row_slot.view();
            args.num_rows = plan.num_rows.view();
          }
          if (form == 0) args.slot_row = plan.slot_row.view();
          if (form == 2) args.weight = weight.view();
          if (form == 4) args.groups = RowGroups::masked(counts.view(), kTokens);
          args.rows = rows.view();
          args.rows_scale = rows_scale.transposed();
          if (rows_dtype == DType::kE4M3 && form % 2 == 1) args.scale_format = ScaleFormat::kUe8m0;
          expect_reference_bits(pack::impls(), args, kPackViews,
                                std::string(to_string(x_dtype)) + " -> " + std::string(to_string(rows_dtype)) +
                                    " H=" + std::to_string(hidden) + " form " + std::to_string(form));
          if (HasFatalFailure() || HasFailure()) return;
          ++num_cases;
        }
      }
    }
  }
  EXPECT_GT(num_cases, 150);
}

// So many rows that scales go by way of scratch, and numbers of rows around what a block takes.
TEST_F(QuantCuda, PackOfManyRowsBringsEveryScaleHome) {
  for (std::int64_t tokens : {1024, 1059}) {
    for (std::int64_t hidden : {128, 640}) {
      Buffer x(DType::kBF16, {tokens, hidden});
      fill_hard(x, static_cast<std::uint64_t>(hidden));
      const Plan plan(tokens, 8);
      for (bool swapped : {false, true}) {
        const std::int64_t blocks = hidden / 128;
        Buffer rows(DType::kE4M3, {tokens * 8, hidden});
        Buffer rows_scale(DType::kF32, swapped ? std::vector{tokens * 8, blocks} : std::vector{blocks, tokens * 8});
        pack::Args args;
        args.x = x.view();
        args.row_token = plan.row_token.view();
        args.slot_row = plan.slot_row.view();
        args.num_rows = plan.num_rows.view();
        args.rows = rows.view();
        args.rows_scale = swapped ? rows_scale.transposed() : rows_scale.view();
        expect_reference_bits(pack::impls(), args, kPackViews,
                              "T=" + std::to_string(tokens) + " H=" + std::to_string(hidden));
        if (HasFatalFailure() || HasFailure()) return;
      }
    }
  }
}

TEST_F(QuantCuda, SwigluWithOneScaleARow) {
  constexpr std::int64_t kRows = 36;
  for (std::int64_t width : {1, 7, 96, 128, 192, 768, 2048, 16384, 16400, 20000}) {
    for (DType h_dtype : {DType::kBF16, DType::kF32}) {
      for (DType a_dtype : {DType::kE4M3, DType::kI8}) {
        for (int kind = 0; kind < 3; ++kind) {
          const int form = width > 10000 ? kind : static_cast<int>((width + kind) % 3);
          Buffer h(h_dtype, {kRows, 2 * width});
          fill_hard(h, static_cast<std::uint64_t>(width + kind));
          Buffer offset(DType::kI32, {4});
          offset.fill_values({2, 9, 9, 31});
          Buffer counts(DType::kI32, {3});
          counts.fill_values({12, 0, 5});
          Buffer a(a_dtype, {kRows, width});
          Buffer a_scale(DType::kF32, {1, kRows});
          swiglu_quant::Args args;
          args.h = h.view();
          args.groups = form == 0   ? RowGroups::contiguous({offset.view()})
                        : form == 1 ? RowGroups::masked(counts.view(), 12)
                                    : RowGroups::whole();
          if (kind == 1) args.activation = {ActivationKind::kSiluClamped, 3.0f, 0.0f};
          if (kind == 2) args.activation = {ActivationKind::kGptOss, 7.0f, 1.702f};
          args.a = a.view();
          args.a_scale = a_scale.view();
          if (a_dtype == DType::kE4M3 && kind == 1) args.scale_format = ScaleFormat::kUe8m0;
          expect_reference_bits(swiglu_quant::impls(), args, kSwigluViews,
                                std::string(to_string(h_dtype)) + " -> " + std::string(to_string(a_dtype)) +
                                    " I=" + std::to_string(width) + " kind " + std::to_string(kind));
          if (HasFatalFailure() || HasFailure()) return;
        }
      }
    }
  }
}

// Enough elements for the table of gates. Every bf16 is a gate somewhere, whatever its neighbours are: one row holds
// 2048 neighbouring patterns, another the same ones a stride apart, so that one outside the table sits alone in a thread.
TEST_F(QuantCuda, EveryGateThereIsThroughTheTable) {
  constexpr std::int64_t kWidth = 2048, kRows = 4100;
  Buffer h(DType::kBF16, {kRows, 2 * kWidth});
  h.fill_normal(3, 1.5);
  auto* const bits = h.as<std::uint16_t>();
  for (std::int64_t r = 0; r < 64; ++r) {
    for (std::int64_t i = 0; i < kWidth; ++i) {
      const std::int64_t near = r * kWidth + i;
      bits[r * 2 * kWidth + i] = static_cast<std::uint16_t>(r < 32 ? near : i * 32 + r - 32);
    }
  }
  Rng rng(11);
  for (std::int64_t r = 64; r < 200; ++r) {
    // A few from outside among ordinary ones, and up columns of any bits.
    for (std::int64_t i = 0; i < kWidth; ++i) {
      if (rng.integer(0, 40) == 0) bits[r * 2 * kWidth + i] = static_cast<std::uint16_t>(rng.bits());
      if (rng.integer(0, 40) == 0) bits[r * 2 * kWidth + kWidth + i] = static_cast<std::uint16_t>(rng.bits());
    }
  }
  Buffer offset(DType::kI32, {3});
  offset.fill_values({0, 1025, 4099});
  Buffer counts(DType::kI32, {4});
  counts.fill_values({1025, 7, 0, 1000});
  for (int kind = 0; kind < 3; ++kind) {
    for (const auto& [a_dtype, row_scale] :
         {std::pair{DType::kE4M3, false}, std::pair{DType::kE4M3, true}, std::pair{DType::kI8, true},
          std::pair{DType::kBF16, false}, std::pair{DType::kF32, false}}) {
      if (kind > 0 && a_dtype != DType::kE4M3) continue;
      Buffer a(a_dtype, {kRows, kWidth});
      Buffer a_scale(DType::kF32, {row_scale ? 1 : kWidth / 128, kRows});
      swiglu_quant::Args args;
      args.h = h.view();
      args.groups = kind == 1   ? RowGroups::masked(counts.view(), 1025)
                    : kind == 0 ? RowGroups::contiguous({offset.view()})
                                : RowGroups::whole();
      if (kind == 1) args.activation = {ActivationKind::kSiluClamped, 3.0f, 0.0f};
      if (kind == 2) args.activation = {ActivationKind::kGptOss, 7.0f, 1.702f};
      args.a = a.view();
      if (size_bytes(a_dtype) == 1) args.a_scale = a_scale.view();
      expect_reference_bits(
          swiglu_quant::impls(), args, kSwigluViews,
          std::string(to_string(a_dtype)) + (row_scale ? " a scale a row" : "") + " kind " + std::to_string(kind));
      if (HasFatalFailure() || HasFailure()) return;
    }
  }
}

// Many rows of widths that end inside a block and inside what a warp takes; teams of two warps to a whole block.
TEST_F(QuantCuda, ManyRowsOfEveryWidth) {
  Buffer some(DType::kBF16, {1, 1 << 20});
  some.fill_normal(21, 1.5);
  const auto* const values = some.as<std::uint16_t>();
  for (std::int64_t width : {768, 1424, 2304, 16384}) {
    for (const bool row_scale : {false, true}) {
      const std::int64_t rows = (std::int64_t{1} << 23) / width + 5;
      Buffer h(DType::kBF16, {rows, 2 * width});
      auto* const bits = h.as<std::uint16_t>();
      for (std::int64_t i = 0; i < rows * 2 * width; ++i) bits[i] = values[(i * 7 + i / 4099) % (1 << 20)];
      // What is not there must not be seen: here a whole row is small, and so is its scale.
      for (std::int64_t i = 0; i < 2 * width; ++i) h.set(8 * 2 * width + i, 1e-3);
      Buffer a(DType::kE4M3, {rows, width});
      Buffer a_scale(DType::kF32, {row_scale ? 1 : ceil_div(width, kScaleBlock), rows});
      Buffer offset(DType::kI32, {3});
      offset.fill_values({1, 7, static_cast<double>(rows - 2)});
      swiglu_quant::Args args;
      args.h = h.view();
      args.groups = RowGroups::contiguous({offset.view()});
      if (row_scale) args.activation = {ActivationKind::kGptOss, 7.0f, 1.702f};
      args.a = a.view();
      args.a_scale = a_scale.view();
      expect_reference_bits(swiglu_quant::impls(), args, kSwigluViews,
                            "I=" + std::to_string(width) + (row_scale ? ", a scale a row" : ""));
      if (HasFatalFailure() || HasFailure()) return;
    }
  }
}

// More than 2^31 elements on either side: the last rows of both equal those of a problem that holds nothing else.
TEST_F(QuantCuda, Case58_OffsetsBeyond32Bits) {
  constexpr std::int64_t kWidth = 2048, kRows = (std::int64_t{1} << 20) + 5;  // h 4.3e9 elements, a 2.1e9
  std::size_t free_bytes = 0, total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  const std::size_t h_bytes = kRows * kWidth * 4, a_bytes = kRows * kWidth, scale_bytes = kRows * kWidth / 128 * 4;
  if (free_bytes < h_bytes + a_bytes + scale_bytes + (std::size_t{1} << 28)) {
    GTEST_SKIP() << "needs 11 GB of device memory, " << free_bytes / 1000000 << " MB are free";
  }
  void *h = nullptr, *a = nullptr, *scale = nullptr;
  ASSERT_EQ(cudaMalloc(&h, h_bytes), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&a, a_bytes), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&scale, scale_bytes), cudaSuccess);
  ASSERT_EQ(cudaMemset(h, 0x3F, h_bytes), cudaSuccess);
  constexpr std::int64_t kFirst = kRows - 64;
  Buffer tail(DType::kBF16, {64, 2 * kWidth});
  tail.fill_normal(5, 1.5);
  ASSERT_EQ(cudaMemcpy(static_cast<std::uint16_t*>(h) + kFirst * 2 * kWidth, tail.view().data, 64 * kWidth * 4,
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  const Device gpu{DeviceKind::kCuda, 0};
  for (DType dtype : {DType::kE4M3, DType::kI8}) {
    const std::int64_t blocks = dtype == DType::kI8 ? 1 : kWidth / 128;
    swiglu_quant::Args args;
    args.h = TensorView::dense(h, DType::kBF16, {kRows, 2 * kWidth}, gpu);
    args.groups = RowGroups::whole();
    args.a = TensorView::dense(a, dtype, {kRows, kWidth}, gpu);
    args.a_scale = TensorView::dense(scale, DType::kF32, {blocks, kRows}, gpu);
    ASSERT_TRUE(check(args).is_ok());
    ASSERT_TRUE(gpu_impl(swiglu_quant::impls()).run(args, {}).is_ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Buffer want(dtype, {64, kWidth}), want_scale(DType::kF32, {blocks, 64}), got(dtype, {64, kWidth});
    swiglu_quant::Args small = args;
    small.h = tail.view();
    small.a = want.view();
    small.a_scale = want_scale.view();
    ASSERT_TRUE(swiglu_quant::impls().back().run(small, {}).is_ok());
    ASSERT_EQ(
        cudaMemcpy(got.view().data, static_cast<std::byte*>(a) + kFirst * kWidth, 64 * kWidth, cudaMemcpyDeviceToHost),
        cudaSuccess);
    EXPECT_EQ(got.bytes(), want.bytes()) << to_string(dtype);
    for (std::int64_t b = 0; b < blocks; ++b) {
      std::vector<float> row(64);
      ASSERT_EQ(cudaMemcpy(row.data(), static_cast<float*>(scale) + b * kRows + kFirst, 256, cudaMemcpyDeviceToHost),
                cudaSuccess);
      for (std::int64_t r = 0; r < 64; ++r)
        ASSERT_EQ(static_cast<double>(row[static_cast<std::size_t>(r)]), want_scale.at(b * 64 + r));
    }
  }
  cudaFree(h);
  cudaFree(a);
  cudaFree(scale);
}

// Device memory of one test; null where there is not enough.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::int64_t bytes) {
    if (cudaMalloc(&data_, static_cast<std::size_t>(bytes)) != cudaSuccess) data_ = nullptr;
    cudaGetLastError();
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

void copy(void* to, const void* from, std::int64_t bytes) {
  ASSERT_EQ(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault), cudaSuccess);
}

// Rows before and past the offset of 2^31 elements, packed and combined.
TEST_F(QuantCuda, Case106_RowsOnBothSidesOf2To31Elements) {
  constexpr std::int64_t kHidden = 7168, kSlots = 8, kTokens = 37504, kRows = kTokens * kSlots;
  constexpr std::int64_t kBlocks = kHidden / 128;
  static_assert(kRows * kHidden > std::int64_t{1} << 31);
  constexpr std::int64_t kBorderToken = (std::int64_t{1} << 31) / kHidden / kSlots;  // its rows hold element 2^31
  const DeviceBytes x(kTokens * kHidden * 2), rows(kRows * kHidden), scale(kRows * kBlocks * 4), y(kRows * kHidden * 2),
      out(kTokens * kHidden * 2), slot_row(kRows * 4), row_token(kRows * 4), scratch(kTokens * kBlocks * 4);
  for (const DeviceBytes* b : {&x, &rows, &scale, &y, &out, &slot_row, &row_token, &scratch}) {
    if (b->data() == nullptr) GTEST_SKIP() << "needs 8 GB of device memory";
  }
  ASSERT_EQ(cudaMemset(x.data(), 0x3F, kTokens * kHidden * 2), cudaSuccess);
  ASSERT_EQ(cudaMemset(y.data(), 0x3F, kRows * kHidden * 2), cudaSuccess);
  std::vector<std::int32_t> of_slot(kRows), of_row(kRows);
  for (std::int32_t r = 0; r < kRows; ++r) {
    of_slot[static_cast<std::size_t>(r)] = r;
    of_row[static_cast<std::size_t>(r)] = r / static_cast<std::int32_t>(kSlots);
  }
  copy(slot_row.data(), of_slot.data(), kRows * 4);
  copy(row_token.data(), of_row.data(), kRows * 4);
  const Device gpu{DeviceKind::kCuda, 0};
  pack::Args pack;
  pack.x = TensorView::dense(x.data(), DType::kBF16, {kTokens, kHidden}, gpu);
  pack.row_token = TensorView::dense(row_token.data(), DType::kI32, {kRows}, gpu);
  pack.slot_row = TensorView::dense(slot_row.data(), DType::kI32, {kTokens, kSlots}, gpu);
  pack.rows = TensorView::dense(rows.data(), DType::kE4M3, {kRows, kHidden}, gpu);
  pack.rows_scale = TensorView::dense(scale.data(), DType::kF32, {kBlocks, kRows}, gpu);
  combine::Args combine;
  combine.y = TensorView::dense(y.data(), DType::kBF16, {kRows, kHidden}, gpu);
  combine.slot_row = pack.slot_row;
  combine.unweighted = true;
  combine.out = TensorView::dense(out.data(), DType::kBF16, {kTokens, kHidden}, gpu);
  const std::int64_t checked[] = {0, kBorderToken - 1, kBorderToken, kBorderToken + 1, kTokens - 1};
  for (std::int64_t t : checked) {
    Buffer token(DType::kBF16, {1, kHidden}), of_y(DType::kBF16, {kSlots, kHidden});
    token.fill_normal(static_cast<std::uint64_t>(t), 2.0);
    of_y.fill_normal(static_cast<std::uint64_t>(t) + 1, 2.0);
    copy(pack.x.row(t), token.view().data, kHidden * 2);
    copy(combine.y.row(t * kSlots), of_y.view().data, kSlots * kHidden * 2);
  }
  ASSERT_TRUE(check(pack).is_ok());
  ASSERT_TRUE(check(combine).is_ok());
  const Ctx ctx{nullptr, {scratch.data(), static_cast<std::size_t>(kTokens * kBlocks * 4)}, 1};
  ASSERT_TRUE(gpu_impl(pack::impls()).run(pack, ctx).is_ok());
  ASSERT_TRUE(gpu_impl(combine::impls()).run(combine, ctx).is_ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (std::int64_t t : checked) {
    SCOPED_TRACE("token " + std::to_string(t));
    Buffer token(DType::kBF16, {1, kHidden}), of_y(DType::kBF16, {kSlots, kHidden});
    token.fill_normal(static_cast<std::uint64_t>(t), 2.0);
    of_y.fill_normal(static_cast<std::uint64_t>(t) + 1, 2.0);
    Buffer want(DType::kE4M3, {1, kHidden}), want_scale(DType::kF32, {kBlocks, 1}),
        want_out(DType::kBF16, {1, kHidden});
    Buffer slots(DType::kI32, {1, kSlots}), got(DType::kE4M3, {1, kHidden}), got_out(DType::kBF16, {1, kHidden});
    slots.fill_with([](std::int64_t s) { return static_cast<double>(s); });
    pack::Args small_pack;
    small_pack.x = token.view();
    small_pack.rows = want.view();
    small_pack.rows_scale = want_scale.view();
    ASSERT_TRUE(pack::impls().back().run(small_pack, {}).is_ok());
    combine::Args small;
    small.y = of_y.view();
    small.slot_row = slots.view();
    small.unweighted = true;
    small.out = want_out.view();
    ASSERT_TRUE(combine::impls().back().run(small, {}).is_ok());
    for (std::int64_t r = t * kSlots; r < (t + 1) * kSlots; ++r) {
      copy(got.view().data, pack.rows.row(r), kHidden);
      EXPECT_EQ(got.bytes(), want.bytes()) << "row " << r;
      for (std::int64_t b = 0; b < kBlocks; ++b) {
        float value = 0;
        copy(&value, scale.data() + (b * kRows + r) * 4, 4);
        ASSERT_EQ(static_cast<double>(value), want_scale.at(b)) << "row " << r << ", block " << b;
      }
    }
    copy(got_out.view().data, combine.out.row(t), kHidden * 2);
    EXPECT_EQ(got_out.bytes(), want_out.bytes());
  }
}

}  // namespace
}  // namespace sluice::test
