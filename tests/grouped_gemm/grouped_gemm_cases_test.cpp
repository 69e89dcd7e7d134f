// Faults that other grouped GEMMs had, by number, and memory that must not be touched.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>

#include "grouped_gemm/problem.h"

namespace sluice::test {
namespace {

using testing::HasSubstr;

Status run_args(const grouped_gemm::Args& args, int num_threads = 1) {
  SLUICE_TRY(grouped_gemm::check(args));
  const auto& impl = on_cpu(grouped_gemm::impls()).front();
  std::vector<std::byte> scratch(static_cast<std::size_t>(impl.scratch_bytes(args, Machine::detect_cpu(num_threads))));
  return impl.run(args, Ctx{.workspace = scratch, .num_threads = num_threads});
}

// Memory that is reserved but only takes up pages that are touched, followed by a page that must not be.
class Mapping {
 public:
  explicit Mapping(std::int64_t bytes)
      : page_(sysconf(_SC_PAGESIZE)), bytes_((bytes + page_ - 1) / page_ * page_ + page_) {
    void* p = mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
    if (base_ != nullptr && mprotect(end(), static_cast<std::size_t>(page_), PROT_NONE) != 0) base_ = nullptr;
  }
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, static_cast<std::size_t>(bytes_));
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  bool ok() const { return base_ != nullptr; }
  std::byte* begin() const { return base_; }
  std::byte* end() const { return base_ + bytes_ - page_; }

 private:
  std::int64_t page_, bytes_;
  std::byte* base_ = nullptr;
};

// The last byte of each input is the last byte of a mapping, as it is in a file.
TEST(GroupedGemmCases, NothingIsReadPastTheEndOfAMapping) {
  for (DType dtype : kInputs) {
    for (std::int64_t rows : {1, 7}) {
      for (std::int64_t n : {1, 33}) {
        for (std::int64_t k : {1, 5, 16, 129, 200}) {
          const Problem p(
              {.counts = {rows}, .n = n, .k = k, .a = dtype, .w = dtype, .unowned_rows = 0, .pitched = false});
          grouped_gemm::Args args = p.args;
          const Buffer want = run(p), out = p.make_out();
          args.out = out.view();
          std::vector<std::unique_ptr<Mapping>> mappings;
          for (TensorView* view : {&args.a, &args.w, &args.w_scale, &args.a_scale}) {
            if (!view->is_present()) continue;
            // Dense in the mapping, whatever the pitch was.
            TensorView dense = TensorView::dense(nullptr, view->dtype, {1});
            dense.rank = view->rank;
            dense.shape = view->shape;
            std::int64_t stride = 1;
            for (int i = dense.rank - 1; i >= 0; --i) {
              dense.stride[static_cast<std::size_t>(i)] = stride;
              stride *= dense.shape[static_cast<std::size_t>(i)];
            }
            mappings.push_back(std::make_unique<Mapping>(dense.num_bytes()));
            ASSERT_TRUE(mappings.back()->ok());
            dense.data = mappings.back()->end() - dense.num_bytes();
            fill_values(dense, to_doubles(*view));
            *view = dense;
          }
          for (std::int64_t target : simd_targets()) {
            if (!has_native_fma(target)) continue;
            const ForcedTarget forced(target);
            ASSERT_TRUE(run_args(args).is_ok());
            EXPECT_TRUE(same_bits(out.view(), want.view())) << to_string(dtype) << " N " << n << " K " << k;
          }
        }
      }
    }
  }
}

TEST(GroupedGemmCases, Case28_RowsPastTheLastOffsetAreNotWritten) {
  // run() holds every unowned row against its poison, and they are NaN on the way in.
  for (int repeat = 0; repeat < 2; ++repeat) {
    expect_specified_bits(Problem(
        {.counts = {3, 0, 5, 0}, .n = 40, .k = 130, .a = DType::kE4M3, .w = DType::kE4M3, .unowned_rows = 504}));
  }
}

TEST(GroupedGemmCases, Case29_NaNInPaddingRowsReachesNoValidRow) {
  const Spec padded{.counts = {33}, .n = 64, .k = 256, .a = DType::kE4M3, .w = DType::kE4M3, .rows_per_group = 64};
  Problem nan(padded), zero(padded);
  for (std::int64_t r = 33; r < 64; ++r) {
    for (std::int64_t k = 0; k < 256; ++k) zero.a.set(r * 256 + k, 0.0);
    for (std::int64_t b = 0; b < 2; ++b) zero.a_scale->set(b * 64 + r, 0.0);
  }
  EXPECT_TRUE(same_bits(run(nan).view().slice(0, 33), run(zero).view().slice(0, 33)));
}

TEST(GroupedGemmCases, Case32_AnyRowCountInOneShotOrInChunks) {
  for (std::int64_t rows : {1, 31, 32, 33, 63, 65, 1023, 1025, 16001}) {
    const Problem p({.counts = {rows, 1},
                     .n = 24,
                     .k = 136,
                     .a = DType::kE4M3,
                     .w = DType::kE4M3,
                     .out = DType::kBF16,
                     .unowned_rows = 0});
    const Buffer whole = run(p);
    const Buffer parts = p.make_out();
    Buffer offset(DType::kI32, {3});
    for (std::int64_t begin = 0; begin < rows; begin += 2048) {
      const std::int64_t count = std::min<std::int64_t>(2048, rows - begin);
      grouped_gemm::Args args = p.args;
      args.a = p.a.view().slice(begin, count);
      args.a_scale.data = p.a_scale->as<float>() + begin;
      args.a_scale.shape[1] = count;
      args.out = parts.view().slice(begin, count);
      const double end = static_cast<double>(count);
      offset.fill_values({0, end, end});
      args.groups = RowGroups::contiguous({offset.view()});
      const Status s = run_args(args);
      ASSERT_TRUE(s.is_ok()) << s.message();
    }
    EXPECT_TRUE(same_bits(parts.view().slice(0, rows), whole.view().slice(0, rows))) << rows << " rows";
  }
}

// Shards of K whose boundaries are whole scale blocks add up to the whole, exactly with integers.
TEST(GroupedGemmCases, Case44_ShardsAtScaleBlocksSumToTheWhole) {
  const std::int64_t k = 1536, n = 48;
  const Problem p({.counts = {3, 4}, .n = n, .k = k, .a = DType::kE4M3, .w = DType::kE4M3, .fill = Fill::kIntegers});
  const std::vector<double> whole = run(p).to_doubles();
  for (std::int64_t shard : {128, 256, 512}) {
    std::vector<double> sum(whole.size());
    for (std::int64_t begin = 0; begin < k; begin += shard) {
      Buffer out = p.make_out();
      out.fill_constant(0.0);
      grouped_gemm::Args args = p.args;
      args.a.data = p.a.as<std::uint8_t>() + begin;
      args.w.data = p.w.as<std::uint8_t>() + begin;
      args.a.shape[1] = args.w.shape[2] = shard;
      args.a_scale = p.args.a_scale.slice(begin / 128, shard / 128);
      args.w_scale.data = p.w_scale.as<float>() + begin / 128;
      args.w_scale.shape[2] = shard / 128;
      args.out = out.view();
      const Status s = run_args(args);
      ASSERT_TRUE(s.is_ok()) << s.message();
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += out.at(static_cast<std::int64_t>(i));
    }
    for (std::int64_t i = 0; i < 7 * n; ++i) {
      EXPECT_EQ(sum[static_cast<std::size_t>(i)], whole[static_cast<std::size_t>(i)]) << "shards of " << shard;
    }
  }
}

// 320 stacked twice: 640 is a multiple of 128, each half is not. Five scale rows are refused, six are used by part.
TEST(GroupedGemmCases, Case44_AFusedWidthDoesNotHideTheHalves) {
  Problem p(
      {.counts = {2}, .n = 640, .k = 128, .a = DType::kF32, .w = DType::kE4M3, .part_rows = 320, .unowned_rows = 0});
  p.a.fill_constant(1.0);
  p.w.fill_constant(1.0);
  p.w_scale.fill_with([](std::int64_t i) { return std::ldexp(1.0, static_cast<int>(i)); });
  const Buffer out = run(p);
  for (std::int64_t n = 0; n < 640; ++n) {
    EXPECT_EQ(out.at(n), std::ldexp(128.0, static_cast<int>(n / 320 * 3 + n % 320 / 128))) << "column " << n;
  }
  grouped_gemm::Args args = p.args;
  args.out = out.view();
  args.w_scale.shape[1] = 5;
  EXPECT_THAT(grouped_gemm::check(args).message(),
              HasSubstr("axis 1 (Nb) is 5, expected 6: N = 640 in parts of 320 rows"));
  // A shard of 192 columns of K under a scale that was cut as if it had one block.
  args = p.args;
  args.out = out.view();
  args.a.shape[1] = args.w.shape[2] = 127;
  args.w_scale.shape[2] = 2;
  EXPECT_THAT(grouped_gemm::check(args).message(), HasSubstr("axis 2 (Kb) is 2, expected 1"));
}

TEST(GroupedGemmCases, Case45_TheBlockIs128AndNotAGuessFromTheShapes) {
  Problem p({.counts = {1}, .n = 1000, .k = 256, .a = DType::kF32, .w = DType::kE4M3, .unowned_rows = 0});
  p.a.fill_constant(1.0);
  p.w.fill_constant(1.0);
  p.w_scale.fill_with([](std::int64_t i) { return std::ldexp(1.0, static_cast<int>(i)); });
  const Buffer out = run(p);
  for (std::int64_t n = 0; n < 1000; ++n) {  // a guess of 125 rows would differ from column 125 on
    EXPECT_EQ(out.at(n), 128.0 * (std::ldexp(1.0, static_cast<int>(n / 128 * 2)) +
                                  std::ldexp(1.0, static_cast<int>(n / 128 * 2 + 1))));
  }
  grouped_gemm::Args args = p.args;
  args.out = out.view();
  args.w_scale.shape[1] = 7;
  EXPECT_THAT(grouped_gemm::check(args).message(), HasSubstr("axis 1 (Nb) is 7, expected 8"));
}

// Half of K with all of its scales is no smaller group: the block is 128 whatever the shapes would divide to.
TEST(GroupedGemmCases, Case50_ScalesThatWereNotShardedAlongKAreRefused) {
  Problem whole({.counts = {2}, .n = 64, .k = 512, .a = DType::kF32, .w = DType::kE4M3, .unowned_rows = 0});
  whole.a.fill_integers(1, -2, 2);
  whole.w.fill_integers(2, -2, 2);
  whole.w_scale.fill_powers_of_two(3);
  const Buffer want = run(whole);
  std::vector<double> sum(2 * 64, 0.0);
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    Problem half({.counts = {2}, .n = 64, .k = 256, .a = DType::kF32, .w = DType::kE4M3, .unowned_rows = 0});
    half.a.fill_with([&](std::int64_t i) { return whole.a.at(i / 256 * 512 + rank * 256 + i % 256); });
    half.w.fill_with([&](std::int64_t i) { return whole.w.at(i / 256 * 512 + rank * 256 + i % 256); });
    half.w_scale.fill_with([&](std::int64_t i) { return whole.w_scale.at(rank * 2 + i); });
    const Buffer out = run(half);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += out.at(static_cast<std::int64_t>(i));
    grouped_gemm::Args args = half.args;
    args.out = out.view();
    args.w_scale = whole.w_scale.view();
    EXPECT_THAT(grouped_gemm::check(args).message(), HasSubstr("axis 2 (Kb) is 4, expected 2"));
  }
  for (std::size_t i = 0; i < sum.size(); ++i) EXPECT_EQ(sum[i], want.at(static_cast<std::int64_t>(i)));
}

TEST(GroupedGemmCases, Case46_BothScaleOrdersByStrideAndNoOther) {
  for (bool by_row : {false, true}) {
    Problem p({.counts = {3},
               .n = 2,
               .k = 256,
               .a = DType::kE4M3,
               .w = DType::kBF16,
               .unowned_rows = 0,
               .scale_by_row = by_row});
    p.a.fill_constant(1.0);
    p.w.fill_constant(1.0);
    for (std::int64_t r = 0; r < 3; ++r) {
      for (std::int64_t b = 0; b < 2; ++b) {
        p.a_scale->set(by_row ? r * 2 + b : b * 3 + r, std::ldexp(1.0, static_cast<int>(r * 2 + b)));
      }
    }
    const Buffer out = run(p);
    for (std::int64_t r = 0; r < 3; ++r)
      EXPECT_EQ(out.at(r * 2), 128.0 * (std::ldexp(1.0, 2 * static_cast<int>(r)) * 3.0));
    grouped_gemm::Args args = p.args;
    args.out = out.view();
    args.a_scale.shape = {3, 2};  // the axes named the other way round
    EXPECT_THAT(grouped_gemm::check(args).message(), HasSubstr("a_scale[Kb,R] f32 axis 0 (Kb) is 3, expected 2"));
    args.a_scale = p.args.a_scale;
    args.a_scale.stride = {1, 1};
    EXPECT_THAT(grouped_gemm::check(args).message(),
                HasSubstr("has strides 1 and 1 for axes 0 and 1, so that elements overlap"));
    args.a_scale.stride = {0, 1};
    EXPECT_THAT(grouped_gemm::check(args).message(), HasSubstr("a_scale[Kb,R] f32 axis 0 has stride 0"));
  }
}

// Rows and experts past 2^31 elements, in memory that is mostly never touched. A small copy at the origin must agree.
void expect_same_far_away(DType dtype, std::int64_t first_row, std::int64_t pitch, std::int64_t expert,
                          std::int64_t expert_stride) {
  const std::int64_t n = 20, k = 144, rows = 3;
  const Problem p({.counts = {rows},
                   .n = n,
                   .k = k,
                   .a = dtype,
                   .w = dtype,
                   .out = dtype == DType::kE4M3 ? DType::kBF16 : dtype,
                   .unowned_rows = 0});
  const Buffer want = run(p);
  const std::int64_t size = size_bytes(dtype), out_size = size_bytes(p.spec.out);
  const Mapping a((first_row + rows) * pitch * size), w(((expert + 1) * expert_stride + n * k) * size),
      out((first_row + rows) * pitch * out_size);
  ASSERT_TRUE(a.ok() && w.ok() && out.ok());
  grouped_gemm::Args args = p.args;
  args.a = TensorView::dense(a.begin(), dtype, {first_row + rows, k});
  args.out = TensorView::dense(out.begin(), p.spec.out, {first_row + rows, n});
  args.a.stride[0] = args.out.stride[0] = pitch;
  args.w = TensorView::dense(w.begin(), dtype, {expert + 1, n, k});
  args.w.stride[0] = expert_stride;
  fill_values(args.a.slice(first_row, rows), p.a.to_doubles());
  fill_values(args.w.slice(expert, 1), p.w.to_doubles());
  std::vector<float> a_scale, w_scale;
  if (p.a_scale) {
    a_scale.assign(static_cast<std::size_t>(2 * (first_row + rows)), NAN);
    w_scale.assign(static_cast<std::size_t>(2 * (expert + 1)), NAN);
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t r = 0; r < rows; ++r) {
        a_scale[static_cast<std::size_t>(b * (first_row + rows) + first_row + r)] =
            static_cast<float>(p.a_scale->at(b * rows + r));
      }
      w_scale[static_cast<std::size_t>(expert * 2 + b)] = static_cast<float>(p.w_scale.at(b));
    }
    args.a_scale = TensorView::dense(a_scale.data(), DType::kF32, {2, first_row + rows});
    args.w_scale = TensorView::dense(w_scale.data(), DType::kF32, {expert + 1, 1, 2});
  }
  std::vector<std::int32_t> offset(static_cast<std::size_t>(expert + 2), static_cast<std::int32_t>(first_row));
  offset.back() = static_cast<std::int32_t>(first_row + rows);
  args.groups = RowGroups::contiguous({TensorView::dense(offset.data(), DType::kI32, {expert + 2})});
  const Status s = run_args(args);
  ASSERT_TRUE(s.is_ok()) << s.message();
  EXPECT_TRUE(same_bits(args.out.slice(first_row, rows), want.view())) << "row " << first_row << ", expert " << expert;
}

TEST(GroupedGemmCases, Case56_RowsPast32BitOffsets) {
  expect_same_far_away(DType::kBF16, 56000 * 8, 7168, 0, 4096);  // 3,211,264,000 elements
  expect_same_far_away(DType::kBF16, 1525201, 2816, 0, 4096);    // past 2^32
  expect_same_far_away(DType::kE4M3, 1525201, 2816, 0, 4096);
}

TEST(GroupedGemmCases, Case57_ExpertsPast32BitOffsets) {
  for (std::int64_t expert : {255, 256, 511}) {
    for (DType dtype : {DType::kE4M3, DType::kBF16}) expect_same_far_away(dtype, 0, 200, expert, 2LL * 1024 * 4096);
  }
}

TEST(GroupedGemmCases, Case58_TokensPast32BitOffsets) {
  for (std::int64_t row : {61680, 61681, 65536}) expect_same_far_away(DType::kBF16, row, 2 * 17408, 0, 4096);
}

TEST(GroupedGemmCases, Case62_MaskedGroupsOfFewRows) {
  for (std::int64_t most : {1, 8, 16, 32, 48, 64, 72}) {
    Rng rng(static_cast<std::uint64_t>(most));
    Spec spec{.n = 40, .k = 136, .a = DType::kE4M3, .w = DType::kE4M3, .out = DType::kBF16, .rows_per_group = most};
    for (int g = 0; g < 4; ++g) spec.counts.push_back(rng.integer(0, most));
    expect_specified_bits(Problem(spec));  // run() holds the rows after each group against their poison
  }
}

TEST(GroupedGemmCases, Case64_ColumnTailsStayInTheirRow) {
  Problem p({.counts = {2, 2}, .n = 33, .k = 64, .unowned_rows = 0, .pitched = false});
  p.a.fill_with([](std::int64_t i) { return std::ldexp(1.0, static_cast<int>(i / 64)); });
  p.w.fill_constant(1.0);
  for (int repeat = 0; repeat < 20; ++repeat) {
    const Buffer out = run(p, "cpu", 3);
    for (std::int64_t i = 0; i < 4 * 33; ++i) ASSERT_EQ(out.at(i), std::ldexp(64.0, static_cast<int>(i / 33))) << i;
  }
}

// Nodes as slices of N, more threads than rows or columns.
TEST(GroupedGemmCases, Case88_EverySplitOfTheWidthGivesTheSameBits) {
  for (std::int64_t width : {1536, 1408, 704, 96}) {
    const Problem p({.counts = {1, 2}, .n = width, .k = 100, .a = DType::kBF16, .w = DType::kBF16, .unowned_rows = 0});
    const Buffer whole = run(p, "cpu", 1);
    for (std::int64_t nodes : {1, 2, 4}) {
      const Buffer out = p.make_out();
      for (std::int64_t node = 0; node < nodes; ++node) {
        const std::int64_t begin = width * node / nodes;
        grouped_gemm::Args args = p.args;
        args.w.data = p.w.view().as<std::uint16_t>() + begin * args.w.stride[1];
        args.out = out.view();
        args.out.data = static_cast<std::byte*>(out.view().data) + begin * size_bytes(p.spec.out);
        args.w.shape[1] = args.out.shape[1] = width / nodes;
        const Status s = run_args(args, static_cast<int>(8 / nodes));
        ASSERT_TRUE(s.is_ok()) << s.message();
      }
      EXPECT_TRUE(out.guards_intact());
      EXPECT_TRUE(same_bits(out.view(), whole.view())) << width << " columns over " << nodes << " nodes";
    }
  }
}

TEST(GroupedGemmCases, Case89_WidthsThatAreNotMultiplesOf128) {
  for (std::int64_t width : {64, 192, 320, 1344}) {
    expect_specified_bits(
        Problem({.counts = {1, 5}, .n = 2 * width, .k = 72, .a = DType::kBF16, .w = DType::kBF16, .part_rows = width}));
    expect_specified_bits(Problem({.counts = {1, 5}, .n = 40, .k = width, .a = DType::kBF16, .w = DType::kBF16}));
    expect_specified_bits(
        Problem({.counts = {1, 5}, .n = 2 * width, .k = 72, .a = DType::kE4M3, .w = DType::kE4M3, .part_rows = width}));
  }
}

}  // namespace
}  // namespace sluice::test
