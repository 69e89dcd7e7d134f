// Stage 6, swiglu_quant: 128 columns at a time, gate and up side by side, the activation in registers and its result
// in an L1 buffer until the block's scale is known. Threads take ranges of the owned rows, counted across groups.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "swiglu_quant/cpu.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <fmt/format.h>

#include <algorithm>

#include "cpu/columns-inl.h"
#include "cpu/parallel.h"
#include "cpu/score_math-inl.h"
#include "cpu/scratch.h"
#include "swiglu_quant/impls.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::swiglu_quant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = sluice::HWY_NAMESPACE;
using Vec = hn::Vec<simd::ColumnTag>;

// Comparisons rather than Min and Max: those do not agree between machines about NaN, which has to pass.
HWY_INLINE Vec AtMost(Vec v, Vec limit) { return hn::IfThenElse(hn::Gt(v, limit), limit, v); }
HWY_INLINE Vec AtLeast(Vec v, Vec limit) { return hn::IfThenElse(hn::Lt(v, limit), limit, v); }

template <ActivationKind kKind>
HWY_INLINE Vec Activate(const Activation& activation, Vec g, Vec u) {
  const simd::ColumnTag d;
  if constexpr (kKind != ActivationKind::kSilu) {
    const Vec limit = hn::Set(d, activation.limit);
    g = AtMost(g, limit);
    u = AtLeast(AtMost(u, limit), hn::Neg(limit));
  }
  if constexpr (kKind == ActivationKind::kGptOss) {
    const Vec z = hn::Mul(g, simd::SpecSigmoid(d, hn::Mul(hn::Set(d, activation.alpha), g)));
    return simd::SpecCanonicalNaN(d, hn::Mul(hn::Add(u, hn::Set(d, 1.0f)), z));
  } else {
    return simd::SpecCanonicalNaN(d, hn::Mul(simd::SpecSilu(d, g), u));
  }
}

// T is uint16_t for bf16, or float. With one scale a row, `values` holds the row [Ib * 128] until its amax is known.
template <ActivationKind kKind, class T>
void Rows(const Args& args, std::int64_t begin, std::int64_t end, float* HWY_RESTRICT values) {
  const simd::ColumnTag d;
  const std::int64_t width = args.a.shape[1];
  const bool quantised = is_quantised(args.a.dtype);
  const bool row_scale = quantised && args.a_scale.shape[0] == 1;
  HWY_ALIGN float block[simd::kColumns];
  HWY_ALIGN T gate_padded[simd::kColumns];
  HWY_ALIGN T up_padded[simd::kColumns];
  for (std::int64_t r = begin; r < end; ++r) {
    const T* const h = reinterpret_cast<const T*>(args.h.row(r));  // [2I]
    std::byte* const a = args.a.row(r);
    float* const scale_out = quantised ? args.a_scale.as<float>() + r * args.a_scale.stride[1] : nullptr;
    float amax = 0;
    for (std::int64_t column = 0; column < width; column += kScaleBlock) {
      float* const v = row_scale ? values + column : block;
      const auto n = static_cast<std::size_t>(std::min(kScaleBlock, width - column));
      const T* const gate = simd::WholeBlock(h + column, n, gate_padded);
      const T* const up = simd::WholeBlock(h + width + column, n, up_padded);
      for (std::size_t i = 0; i < simd::kColumns; i += hn::Lanes(d)) {
        hn::Store(Activate<kKind>(args.activation, simd::LoadAsF32(d, gate + i), simd::LoadAsF32(d, up + i)), d, v + i);
      }
      if (row_scale) {
        amax = std::max(amax, simd::AmaxColumns(v));
      } else if (quantised) {
        const float scale = simd::ScaleOf(simd::AmaxColumns(v), args.a.dtype, args.scale_format);
        scale_out[column / kScaleBlock * args.a_scale.stride[0]] = scale;
        simd::EncodeColumns(v, n, args.a.dtype, scale, reinterpret_cast<std::uint8_t*>(a) + column);
      } else if (args.a.dtype == DType::kBF16) {
        simd::StoreColumns(v, n, reinterpret_cast<std::uint16_t*>(a) + column);
      } else {
        simd::StoreColumns(v, n, reinterpret_cast<float*>(a) + column);
      }
    }
    if (!row_scale) continue;
    const float scale = *scale_out = simd::ScaleOf(amax, args.a.dtype, args.scale_format);
    for (std::int64_t column = 0; column < width; column += kScaleBlock) {
      const auto n = static_cast<std::size_t>(std::min(kScaleBlock, width - column));
      simd::EncodeColumns(values + column, n, args.a.dtype, scale, reinterpret_cast<std::uint8_t*>(a) + column);
    }
  }
}

template <ActivationKind kKind>
void RowsOfAnyInput(const Args& args, std::int64_t begin, std::int64_t end, float* values) {
  args.h.dtype == DType::kBF16 ? Rows<kKind, std::uint16_t>(args, begin, end, values)
                               : Rows<kKind, float>(args, begin, end, values);
}

void ActivateRows(const Args& args, std::int64_t begin, std::int64_t end, float* values) {
  switch (args.activation.kind) {
    case ActivationKind::kSilu: return RowsOfAnyInput<ActivationKind::kSilu>(args, begin, end, values);
    case ActivationKind::kSiluClamped: return RowsOfAnyInput<ActivationKind::kSiluClamped>(args, begin, end, values);
    case ActivationKind::kGptOss: return RowsOfAnyInput<ActivationKind::kGptOss>(args, begin, end, values);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice::swiglu_quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::swiglu_quant {
namespace {

HWY_EXPORT(ActivateRows);

constexpr std::int64_t kElemsPerRange = 32768;  // of `a`; some 20 us of work per hand-out

// Values of one row, for one worker; whole blocks, so that every worker's start on a cache line.
std::int64_t row_elems(const Args& args) {
  const bool row_scale = is_quantised(args.a.dtype) && args.a_scale.shape[0] == 1;
  return row_scale ? ceil_div(args.a.shape[1], kScaleBlock) * kScaleBlock : 0;
}

std::int64_t needed_bytes(const Args& args, int num_threads) {
  return row_elems(args) * std::int64_t{sizeof(float)} * std::max(num_threads, 1);
}

}  // namespace

std::string describe_cpu(const Args&, const Machine& machine) { return machine.simd; }

std::int64_t scratch_bytes_cpu(const Args& args, const Machine& machine) {
  return cpu::scratch_to_book(needed_bytes(args, machine.num_threads));
}

Status run_cpu(const Args& args, const Ctx& ctx) {
  Result<std::byte*> scratch = cpu::take_scratch("swiglu_quant", ctx.workspace, needed_bytes(args, ctx.num_threads));
  if (!scratch) return scratch.status();
  auto* const values = reinterpret_cast<float*>(*scratch);
  const std::int64_t elems = row_elems(args);
  const auto activate_rows = HWY_DYNAMIC_DISPATCH(ActivateRows);
  const std::int64_t num_rows = args.h.shape[0];
  const std::int64_t num_groups = args.groups.num_groups();
  std::int64_t num_owned = 0;
  for (std::int64_t e = 0; e < num_groups; ++e) {
    const RowRange range = row_range(args.groups, e, num_rows);
    num_owned += range.end - range.begin;
  }
  const std::int64_t rows_per_range =
      std::max<std::int64_t>(kElemsPerRange / std::max<std::int64_t>(args.a.shape[1], 1), 1);
  // [begin, end) counts owned rows; each group takes its share of the range.
  cpu::parallel_ranges(num_owned, rows_per_range, ctx.num_threads,
                       [&](std::int64_t begin, std::int64_t end, int worker) {
                         std::int64_t group_begin = 0;
                         for (std::int64_t e = 0; e < num_groups && group_begin < end; ++e) {
                           const RowRange range = row_range(args.groups, e, num_rows);
                           const std::int64_t group_end = group_begin + range.end - range.begin;
                           const std::int64_t from = std::max(begin, group_begin);
                           const std::int64_t to = std::min(end, group_end);
                           if (from < to) {
                             activate_rows(args, range.begin + from - group_begin, range.begin + to - group_begin,
                                           values + elems * worker);
                           }
                           group_begin = group_end;
                         }
                       });
  return Status::ok();
}

}  // namespace sluice::swiglu_quant
#endif  // HWY_ONCE
