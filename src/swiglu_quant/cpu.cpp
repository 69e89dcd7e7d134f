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
#include "sluice/stage/swiglu_quant.h"

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

// T is uint16_t for bf16, or float.
template <ActivationKind kKind, class T>
void Rows(const Args& args, std::int64_t begin, std::int64_t end) {
  const simd::ColumnTag d;
  const std::int64_t width = args.a.shape[1];
  HWY_ALIGN float v[simd::kColumns];
  HWY_ALIGN T gate_padded[simd::kColumns];
  HWY_ALIGN T up_padded[simd::kColumns];
  for (std::int64_t r = begin; r < end; ++r) {
    const T* const h = reinterpret_cast<const T*>(args.h.row(r));  // [2I]
    for (std::int64_t column = 0; column < width; column += kScaleBlock) {
      const auto n = static_cast<std::size_t>(std::min(kScaleBlock, width - column));
      const T* const gate = simd::WholeBlock(h + column, n, gate_padded);
      const T* const up = simd::WholeBlock(h + width + column, n, up_padded);
      for (std::size_t i = 0; i < simd::kColumns; i += hn::Lanes(d)) {
        hn::Store(Activate<kKind>(args.activation, simd::LoadAsF32(d, gate + i), simd::LoadAsF32(d, up + i)), d, v + i);
      }
      std::byte* const a = args.a.row(r);
      if (args.a.dtype == DType::kE4M3) {
        const float scale = simd::QuantiseColumns(v, n, args.scale_format, reinterpret_cast<std::uint8_t*>(a) + column);
        args.a_scale.as<float>()[column / kScaleBlock * args.a_scale.stride[0] + r * args.a_scale.stride[1]] = scale;
      } else if (args.a.dtype == DType::kBF16) {
        simd::StoreColumns(v, n, reinterpret_cast<std::uint16_t*>(a) + column);
      } else {
        simd::StoreColumns(v, n, reinterpret_cast<float*>(a) + column);
      }
    }
  }
}

template <ActivationKind kKind>
void RowsOfAnyInput(const Args& args, std::int64_t begin, std::int64_t end) {
  args.h.dtype == DType::kBF16 ? Rows<kKind, std::uint16_t>(args, begin, end) : Rows<kKind, float>(args, begin, end);
}

void ActivateRows(const Args& args, std::int64_t begin, std::int64_t end) {
  switch (args.activation.kind) {
    case ActivationKind::kSilu: return RowsOfAnyInput<ActivationKind::kSilu>(args, begin, end);
    case ActivationKind::kSiluClamped: return RowsOfAnyInput<ActivationKind::kSiluClamped>(args, begin, end);
    case ActivationKind::kGptOss: return RowsOfAnyInput<ActivationKind::kGptOss>(args, begin, end);
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

}  // namespace

std::string describe_cpu(const Args&, const Machine& machine) { return machine.simd; }

Status run_cpu(const Args& args, const Ctx& ctx) {
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
  cpu::parallel_ranges(num_owned, rows_per_range, ctx.num_threads, [&](std::int64_t begin, std::int64_t end, int) {
    std::int64_t group_begin = 0;
    for (std::int64_t e = 0; e < num_groups && group_begin < end; ++e) {
      const RowRange range = row_range(args.groups, e, num_rows);
      const std::int64_t group_end = group_begin + range.end - range.begin;
      const std::int64_t from = std::max(begin, group_begin);
      const std::int64_t to = std::min(end, group_end);
      if (from < to) activate_rows(args, range.begin + from - group_begin, range.begin + to - group_begin);
      group_begin = group_end;
    }
  });
  return Status::ok();
}

}  // namespace sluice::swiglu_quant
#endif  // HWY_ONCE
