// Pack with row groups (rows that experts own already): the owned rows as a pack of everything makes them, the others not
// read and not written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/compare.h"
#include "harness/every_way.h"
#include "sluice/stage/pack.h"

namespace sluice::pack {
namespace {

using test::Buffer;

struct Groups {
  const char* name;
  bool masked;
  std::vector<double> values;  // counts, or offsets
  std::vector<bool> owned;     // of 12 rows
};

std::vector<bool> rows(std::initializer_list<int> owned) {
  std::vector<bool> flags(12, false);
  for (int r : owned) flags[static_cast<std::size_t>(r)] = true;
  return flags;
}

TEST(PackGroups, OwnedRowsAsInAWholePackAndNoOthers) {
  const Groups cases[] = {
      {"masked", true, {2, 0, 4}, rows({0, 1, 8, 9, 10, 11})},
      {"masked, all", true, {4, 4, 4}, rows({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11})},
      {"masked, none", true, {0, 0, 0}, rows({})},
      {"masked, counts out of range", true, {-3, 100, 1}, rows({4, 5, 6, 7, 8})},
      {"contiguous", false, {0, 3, 3, 7}, rows({0, 1, 2, 3, 4, 5, 6})},
      {"contiguous, not from 0", false, {2, 5, 8, 12}, rows({2, 3, 4, 5, 6, 7, 8, 9, 10, 11})},
      {"contiguous, out of range", false, {-5, 1, 2, 100}, rows({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11})},
  };
  for (const Groups& c : cases) {
    for (DType dtype : {DType::kE4M3, DType::kBF16, DType::kF32}) {
      Buffer x(DType::kBF16, {12, 200});
      x.fill_normal(3);
      for (std::int64_t r = 0; r < 12; ++r) {
        if (!c.owned[static_cast<std::size_t>(r)]) x.poison(r);  // and what follows, which is filled again below
        if (c.owned[static_cast<std::size_t>(r)]) {
          for (std::int64_t h = 0; h < 200; ++h) x.set(r * 200 + h, static_cast<double>((r * 7 + h) % 13) - 6);
        }
      }
      Buffer values(DType::kI32, {static_cast<std::int64_t>(c.values.size())});
      values.fill_values(c.values);
      Buffer whole(dtype, {12, 200});
      Buffer whole_scale(DType::kF32, {2, 12});
      Args args;
      args.x = x.view();
      args.rows = whole.view();
      if (dtype == DType::kE4M3) args.rows_scale = whole_scale.view();
      ASSERT_TRUE(impls().back().run(args, {}).is_ok());
      args.groups = c.masked ? RowGroups::masked(values.view(), 4) : RowGroups::contiguous({values.view()});
      for (const Impl<Args>& impl : impls()) {
        if (impl.device != DeviceKind::kCpu) continue;
        for (int threads : {1, 3}) {
          Buffer got(dtype, {12, 200});
          Buffer got_scale(DType::kF32, {2, 12});
          args.rows = got.view();
          if (dtype == DType::kE4M3) args.rows_scale = got_scale.view();
          const Status legal = check(args);
          ASSERT_TRUE(legal.is_ok()) << legal.message();
          const Status status = impl.run(args, {nullptr, {}, threads});
          ASSERT_TRUE(status.is_ok()) << status.message();
          for (std::int64_t r = 0; r < 12; ++r) {
            const bool owned = c.owned[static_cast<std::size_t>(r)];
            const TensorView row = got.view().slice(r, 1);
            EXPECT_TRUE(owned ? test::same_bits(row, whole.view().slice(r, 1)) : test::is_poison(row))
                << c.name << ", " << impl.name << ", row " << r;
            for (std::int64_t b = 0; b < 2 && dtype == DType::kE4M3; ++b) {
              const auto bits = [&](const Buffer& buffer) { return buffer.as<std::uint32_t>()[b * 12 + r]; };
              EXPECT_EQ(bits(got_scale) == bits(whole_scale), owned) << c.name << ", " << impl.name << ", row " << r;
            }
          }
          EXPECT_TRUE(got.guards_intact());
          EXPECT_TRUE(got_scale.guards_intact());
        }
      }
    }
  }
}

TEST(PackGroups, RefusedBesideAPlanOrACount) {
  Buffer x(DType::kBF16, {12, 16});
  Buffer out(DType::kBF16, {12, 16});
  Buffer counts(DType::kI32, {3});
  Buffer num_rows(DType::kI32, {1});
  Buffer row_token(DType::kI32, {12});
  Args args;
  args.x = x.view();
  args.rows = out.view();
  args.groups = RowGroups::masked(counts.view(), 4);
  EXPECT_TRUE(check(args).is_ok());
  args.num_rows = num_rows.view();
  EXPECT_THAT(check(args).message(), testing::HasSubstr("without row_token and num_rows"));
  args.num_rows = {};
  args.row_token = row_token.view();
  EXPECT_THAT(check(args).message(), testing::HasSubstr("without row_token and num_rows"));
  args.row_token = {};
  args.groups.rows_per_group = 5;
  EXPECT_THAT(check(args).message(), testing::HasSubstr("rows_per_group = 5"));
}

}  // namespace
}  // namespace sluice::pack
