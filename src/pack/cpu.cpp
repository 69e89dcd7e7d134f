// Stage 3, pack. Without weights a row depends on its token alone, so the work goes token by token: the rows of each
// token are chained through a list, the first is converted or quantised, and the others are copied from it while it
// is in L1. A token is read once and quantised once, and each row is written once: T*H*2 + R*H bytes for bf16 to
// e4m3. (Quantising into a [T,H] scratch and gathering from it would move T*H more each way.) With weights the
// rows of a token differ, and each is made on its own.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pack/cpu.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "cpu/columns-inl.h"
#include "cpu/parallel.h"
#include "cpu/score_math-inl.h"
#include "cpu/scratch.h"
#include "pack/impls.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::pack {
namespace HWY_NAMESPACE {
namespace simd = sluice::HWY_NAMESPACE;

// x[t,h] (* weight) of the columns from `column` on, into `buffer`.
HWY_INLINE void LoadToken(const Args& args, std::int64_t t, std::int64_t column, std::size_t n, const float* weight,
                          float* HWY_RESTRICT buffer) {
  namespace hn = hwy::HWY_NAMESPACE;
  const std::int64_t at = t * args.x.stride[0] + column;
  if (args.x.dtype == DType::kBF16) {
    simd::LoadColumns(args.x.as<const std::uint16_t>() + at, n, buffer);
  } else {
    simd::LoadColumns(args.x.as<const float>() + at, n, buffer);
  }
  if (weight == nullptr) return;
  // An infinite weight makes NaN of the padding zeros; NaN never enters an amax, and padding is not stored.
  const simd::ColumnTag d;
  const auto w = hn::Set(d, *weight);
  for (std::size_t i = 0; i < simd::kColumns; i += hn::Lanes(d)) {
    hn::Store(simd::SpecCanonicalNaN(d, hn::Mul(hn::Load(d, buffer + i), w)), d, buffer + i);
  }
}

// The quantised row r from token t. With one scale for the row its amax takes a first pass over the token, which the
// second then finds in cache.
void QuantiseRow(const Args& args, std::int64_t t, std::int64_t r, const float* weight) {
  const std::int64_t hidden = args.x.shape[1];
  const bool row_scale = args.rows_scale.shape[0] == 1;
  auto* const row = reinterpret_cast<std::uint8_t*>(args.rows.row(r));
  float* const scale_out = args.rows_scale.as<float>() + r * args.rows_scale.stride[1];
  HWY_ALIGN float buffer[simd::kColumns];
  float scale = 0;
  if (row_scale) {
    float amax = 0;
    for (std::int64_t column = 0; column < hidden; column += kScaleBlock) {
      LoadToken(args, t, column, static_cast<std::size_t>(std::min(kScaleBlock, hidden - column)), weight, buffer);
      amax = std::max(amax, simd::AmaxColumns(buffer));
    }
    *scale_out = scale = simd::ScaleOf(amax, args.rows.dtype, args.scale_format);
  }
  for (std::int64_t column = 0; column < hidden; column += kScaleBlock) {
    const auto n = static_cast<std::size_t>(std::min(kScaleBlock, hidden - column));
    LoadToken(args, t, column, n, weight, buffer);
    if (!row_scale) {
      scale = simd::ScaleOf(simd::AmaxColumns(buffer), args.rows.dtype, args.scale_format);
      scale_out[column / kScaleBlock * args.rows_scale.stride[0]] = scale;
    }
    simd::EncodeColumns(buffer, n, args.rows.dtype, scale, row + column);
  }
}

// Row r from token t.
void MakeRow(const Args& args, std::int64_t t, std::int64_t r, const float* weight) {
  const std::int64_t hidden = args.x.shape[1];
  std::byte* const row = args.rows.row(r);
  if (args.x.dtype == args.rows.dtype && weight == nullptr) {
    std::memcpy(row, args.x.row(t), static_cast<std::size_t>(hidden * size_bytes(args.x.dtype)));
    if (!is_quantised(args.x.dtype)) return;
    const float* const from = args.x_scale.as<const float>() + t * args.x_scale.stride[1];
    float* const to = args.rows_scale.as<float>() + r * args.rows_scale.stride[1];
    for (std::int64_t b = 0; b < args.x_scale.shape[0]; ++b) {
      std::memcpy(to + b * args.rows_scale.stride[0], from + b * args.x_scale.stride[0], sizeof(float));
    }
    return;
  }
  if (is_quantised(args.rows.dtype)) return QuantiseRow(args, t, r, weight);
  HWY_ALIGN float buffer[simd::kColumns];
  for (std::int64_t column = 0; column < hidden; column += kScaleBlock) {
    const auto n = static_cast<std::size_t>(std::min(kScaleBlock, hidden - column));
    LoadToken(args, t, column, n, weight, buffer);
    if (args.rows.dtype == DType::kBF16) {
      simd::StoreColumns(buffer, n, reinterpret_cast<std::uint16_t*>(row) + column);
    } else {
      simd::StoreColumns(buffer, n, reinterpret_cast<float*>(row) + column);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice::pack
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::pack {
namespace {

HWY_EXPORT(MakeRow);

constexpr std::int64_t kBytesPerRange = 65536;  // of output per hand-out of work: well above the cost of handing out

bool by_token(const Args& args) { return args.row_token.is_present() && !args.weight.is_present(); }

std::int64_t list_bytes(const Args& args) {
  if (!by_token(args)) return 0;
  return (args.x.shape[0] + args.rows.shape[0]) * std::int64_t{sizeof(std::int32_t)};
}

std::int64_t rows_in_use(const Args& args) {
  const std::int64_t capacity = args.rows.shape[0];
  if (!args.num_rows.is_present()) return capacity;
  return std::clamp<std::int64_t>(args.num_rows.as<const std::int32_t>()[0], 0, capacity);
}

// The metadata may come from memory nobody filled; nothing is written before all of it is known to be in range.
Status check_range(const char* name, const TensorView& values, std::int64_t num_rows, std::int64_t end) {
  const auto* const value = values.as<const std::int32_t>();
  for (std::int64_t r = 0; r < num_rows; ++r) {
    if (value[r] < 0 || value[r] >= end) {
      return {StatusCode::kInvalidArgument,
              fmt::format("pack: {} of row {} is {}, expected 0 to {}", name, r, value[r], end - 1)};
    }
  }
  return Status::ok();
}

// Copies what MakeRow wrote for row `from` to row `to`.
void copy_row(const Args& args, std::int64_t from, std::int64_t to) {
  std::memcpy(args.rows.row(to), args.rows.row(from),
              static_cast<std::size_t>(args.rows.shape[1] * size_bytes(args.rows.dtype)));
  if (!args.rows_scale.is_present()) return;
  const TensorView& scale = args.rows_scale;  // [Hb,R]
  for (std::int64_t b = 0; b < scale.shape[0]; ++b) {
    float* const block = scale.as<float>() + b * scale.stride[0];
    std::memcpy(block + to * scale.stride[1], block + from * scale.stride[1], sizeof(float));
  }
}

}  // namespace

std::int64_t scratch_bytes_cpu(const Args& args, const Machine&) { return cpu::scratch_to_book(list_bytes(args)); }

std::string describe_cpu(const Args& args, const Machine& machine) {
  return fmt::format("{}, {}", machine.simd,
                     by_token(args) ? "each token once, then copied to its rows" : "row by row");
}

Status run_cpu(const Args& args, const Ctx& ctx) {
  const std::int64_t num_tokens = args.x.shape[0];
  const std::int64_t num_rows = rows_in_use(args);
  if (args.row_token.is_present()) SLUICE_TRY(check_range("row_token", args.row_token, num_rows, num_tokens));
  if (args.weight.is_present()) {
    SLUICE_TRY(check_range("row_slot", args.row_slot, num_rows, args.weight.num_elements()));
  }
  const auto make_row = HWY_DYNAMIC_DISPATCH(MakeRow);
  const std::int64_t row_bytes = std::max<std::int64_t>(args.rows.shape[1] * size_bytes(args.rows.dtype), 1);
  const std::int64_t rows_per_range = std::max<std::int64_t>(kBytesPerRange / row_bytes, 1);

  if (!by_token(args)) {
    const std::int64_t slots = args.weight.is_present() ? args.weight.shape[1] : 1;
    std::int64_t first = 0;
    const auto make_rows = [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t r = first + begin; r < first + end; ++r) {
        const std::int64_t t = args.row_token.is_present() ? args.row_token.as<const std::int32_t>()[r] : r;
        const float* weight = nullptr;
        if (args.weight.is_present()) {
          const std::int64_t slot = args.row_slot.as<const std::int32_t>()[r];
          weight = args.weight.as<const float>() + slot / slots * args.weight.stride[0] + slot % slots;
        }
        make_row(args, t, r, weight);
      }
    };
    // Neighbouring groups without a gap are one range: contiguous groups are handed out as whole rows are.
    for (std::int64_t g = 0; g < args.groups.num_groups();) {
      const RowRange range = row_range(args.groups, g, num_rows);
      std::int64_t end = range.end;
      for (++g; g < args.groups.num_groups(); ++g) {
        const RowRange next = row_range(args.groups, g, num_rows);
        if (next.begin != end) break;
        end = next.end;
      }
      first = range.begin;
      cpu::parallel_ranges(end - range.begin, rows_per_range, ctx.num_threads, make_rows);
    }
    return Status::ok();
  }

  Result<std::byte*> scratch = cpu::take_scratch("pack", ctx.workspace, list_bytes(args));
  if (!scratch) return scratch.status();
  auto* const first_row = reinterpret_cast<std::int32_t*>(scratch.value());  // [T], -1: no row
  std::int32_t* const next_row = first_row + num_tokens;                     // [R]
  std::fill_n(first_row, num_tokens, -1);
  for (std::int64_t r = num_rows - 1; r >= 0; --r) {
    std::int32_t& first = first_row[args.row_token.as<const std::int32_t>()[r]];
    next_row[r] = first;
    first = static_cast<std::int32_t>(r);
  }
  const std::int64_t tokens_per_range =
      std::max<std::int64_t>(rows_per_range * num_tokens / std::max<std::int64_t>(num_rows, 1), 1);
  cpu::parallel_ranges(num_tokens, tokens_per_range, ctx.num_threads, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int32_t first = first_row[t];
      if (first < 0) continue;
      make_row(args, t, first, nullptr);
      for (std::int32_t r = next_row[first]; r >= 0; r = next_row[r]) copy_row(args, first, r);
    }
  });
  return Status::ok();
}

}  // namespace sluice::pack
#endif  // HWY_ONCE
