// Grouped GEMM on the CPU. The bits of every output are one chain of fmas, so lanes run over N: a panel of w rows is
// transposed and decoded to f32 [128 k][panel rows] in L1, and register tiles of A rows run over it.
//
//   item (expert, row chunk, column chunk):
//     for k in blocks of A columns:          A rows -> f32, in L2
//       for panel of w rows in the chunk:
//         for block of 128 k:                panel -> f32, in L1; p = A * panel in registers; C = fma(p, s, C)
//     out = round(C (* s) + bias)
//
// int8 by int8 goes the same way: 128 products stay below 2^21, so p is an exact integer in f32, and C sums int32.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include <fmt/format.h>

#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "grouped_gemm/config.h"
#include "grouped_gemm/impls.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "grouped_gemm/cpu.cpp"
// SSSE3 would run the same element-wise decoder as SSE4; AVX3_DL the same code as AVX3.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target: compiled once per target.
#include "cpu/bf16-inl.h"
#include "cpu/decode-inl.h"

#ifndef SLUICE_GROUPED_GEMM_CPU_ONCE_
#define SLUICE_GROUPED_GEMM_CPU_ONCE_
namespace sluice::grouped_gemm {

// What one item needs, with every pointer at the item's expert.
struct Item {
  const std::uint8_t* a = nullptr;  // [rows,K], at the item's first row
  std::int64_t a_row_bytes = 0;
  DType a_dtype{};
  const float* a_scale = nullptr;  // of blocks, at (0, first row); null: none
  std::int64_t a_scale_block_elems = 0, a_scale_row_elems = 0;
  const float* a_row_scale = nullptr;  // one a row, at the first row, a_scale_row_elems apart; null: none
  const std::uint8_t* w = nullptr;     // [N,K]
  std::int64_t w_row_bytes = 0;
  DType w_dtype{};
  const float* w_scale = nullptr;  // of blocks, [Nb,Kb]; null: none
  std::int64_t w_scale_row_elems = 0;
  const float* w_row_scale = nullptr;  // one a row, [N], w_scale_row_elems apart; null: none
  bool integer = false;                // C holds int32
  const float* bias = nullptr;         // [N]; null: none
  std::uint8_t* out = nullptr;         // [rows,N], at the item's first row
  std::int64_t out_row_bytes = 0;
  DType out_dtype{};
  std::int64_t rows = 0, n = 0, k = 0, part_rows = 0;
  std::int64_t chunk_cols = 0, chunk = 0;
  // Scratch slices of this worker.
  float* a_block = nullptr;      // [rows, a_block_cols + kAPadElems]
  float* c_block = nullptr;      // [panels, rows, panel rows]
  float* scale_block = nullptr;  // [a_block_cols/128, rows]
  float* panel = nullptr;        // [128, panel rows]
};

}  // namespace sluice::grouped_gemm
#endif  // SLUICE_GROUPED_GEMM_CPU_ONCE_

HWY_BEFORE_NAMESPACE();
namespace sluice::grouped_gemm {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = sluice::cpu::HWY_NAMESPACE;
using cpu::BF16;
using cpu::E4M3;
using cpu::F32;
using cpu::I8;
using simd::DF;
using simd::VF;

#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
inline constexpr int kMaxTileRows = 12;  // 24 accumulators, 2 panel vectors, 1 broadcast of 32 registers
#else
inline constexpr int kMaxTileRows = 6;  // 12 + 2 + 1 of 16
#endif
// Up to here the products are taken while decoding, without storing the panel.
inline constexpr int kMaxDirectRows = SLUICE_VECTOR_DECODE ? 4 : 0;

// C[r,:] = fma(p[r,:], s, C[r,:]); s is 1 where nothing is scaled, and fma(p, 1, C) has the bits of C + p. A null a_scale
// says that p are integers and C is int32.
template <int kRows>
HWY_INLINE void Promote(const VF (&p)[kRows][2], const float* a_scale, float w_scale, float* HWY_RESTRICT c) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  if (a_scale == nullptr) {
    const hn::RebindToSigned<DF> di;
    auto* sums = reinterpret_cast<std::int32_t*>(c);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      std::int32_t* row = sums + 2 * lanes * static_cast<std::size_t>(r);
      hn::Store(hn::Add(hn::ConvertTo(di, p[r][0]), hn::Load(di, row)), di, row);
      hn::Store(hn::Add(hn::ConvertTo(di, p[r][1]), hn::Load(di, row + lanes)), di, row + lanes);
    }
    return;
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    const VF s = hn::Set(d, a_scale[r] * w_scale);
    float* row = c + 2 * lanes * static_cast<std::size_t>(r);
    hn::Store(hn::MulAdd(p[r][0], s, hn::Load(d, row)), d, row);
    hn::Store(hn::MulAdd(p[r][1], s, hn::Load(d, row + lanes)), d, row + lanes);
  }
}

// Cache lines a tile asks for while it computes, one a k at most: memory and arithmetic overlap.
struct Lines {
  const std::uint8_t* const* first = nullptr;
  std::int64_t count = 0;
};

// One block of up to 128 k for kRows rows against a decoded panel.
template <int kRows, bool kPrefetch>
HWY_NOINLINE void Tile(const float* HWY_RESTRICT a, std::int64_t a_stride, const float* HWY_RESTRICT panel,
                       std::int64_t num_k, const float* a_scale, float w_scale, float* HWY_RESTRICT c,
                       const Lines& lines) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  VF p[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) p[r][0] = p[r][1] = hn::Zero(d);
    // Unrolled: loop counters compete with the FMAs for ports.
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < num_k; ++k) {
    const VF w0 = hn::Load(d, panel);
    const VF w1 = hn::Load(d, panel + lanes);
    panel += 2 * lanes;
    if constexpr (kPrefetch) {
      if (k < lines.count) __builtin_prefetch(lines.first[k], 0, 3);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const VF x = hn::Set(d, a[r * a_stride + k]);
      p[r][0] = hn::MulAdd(x, w0, p[r][0]);
      p[r][1] = hn::MulAdd(x, w1, p[r][1]);
    }
  }
  Promote<kRows>(p, a_scale, w_scale, c);
}

template <bool kPrefetch>
void TileRows(int rows, const float* a, std::int64_t a_stride, const float* panel, std::int64_t num_k,
              const float* a_scale, float w_scale, float* c, const Lines& lines) {
  switch (rows) {
#define SLUICE_TILE(r) \
  case r: return Tile<r, kPrefetch>(a, a_stride, panel, num_k, a_scale, w_scale, c, lines)
    SLUICE_TILE(1);
    SLUICE_TILE(2);
    SLUICE_TILE(3);
    SLUICE_TILE(4);
    SLUICE_TILE(5);
    SLUICE_TILE(6);
#if HWY_ARCH_X86 && HWY_MAX_BYTES == 64
    SLUICE_TILE(7);
    SLUICE_TILE(8);
    SLUICE_TILE(9);
    SLUICE_TILE(10);
    SLUICE_TILE(11);
    SLUICE_TILE(12);
#endif
#undef SLUICE_TILE
    default: return;
  }
}

// The rows of w behind one panel, and where the next ones are.
struct Panel {
  const std::uint8_t* rows[simd::kMaxPanelRows];  // vector decoders: in load order
};

template <class W>
HWY_INLINE void BindPanel(W type, const Item& item, std::int64_t first, std::int64_t count, Panel& panel) {
  (void)type;
  const int num_rows = static_cast<int>(simd::NumPanelRows());
  for (int slot = 0; slot < num_rows; ++slot) {
#if SLUICE_VECTOR_DECODE
    const std::int64_t row = simd::RowOfSlot(type, slot);
#else
    const std::int64_t row = slot;
#endif
    // Lanes past the last row repeat it; they are computed and dropped.
    panel.rows[slot] = item.w + offset_elems(first + std::min(row, count - 1), item.w_row_bytes);
  }
}

// panel_out[k][row] = w, exactly.
template <class W>
HWY_NOINLINE void DecodePanel(W type, const Panel& panel, std::int64_t offset, std::int64_t num_k,
                              std::int64_t ahead_bytes, float* HWY_RESTRICT out) {
#if SLUICE_VECTOR_DECODE
  const DF d;
  constexpr bool kHalves = std::is_same_v<W, E4M3>;
  const VF restore = hn::Set(d, cpu::kE4M3HalfInverse);
  simd::DecodeRows(type, panel.rows, offset, num_k, ahead_bytes, [&](std::int64_t k, VF first, VF second) HWY_ATTR {
    float* to = out + k * 2 * simd::kLanes;
    hn::Store(kHalves ? hn::Mul(first, restore) : first, d, to);
    hn::Store(kHalves ? hn::Mul(second, restore) : second, d, to + simd::kLanes);
  });
#else
  (void)ahead_bytes;
  const std::int64_t num_rows = simd::NumPanelRows();
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::uint8_t* from = panel.rows[row] + offset;
    for (std::int64_t k = 0; k < num_k; ++k) out[k * num_rows + row] = cpu::decode_one(type, from + k * W::kBytes);
  }
#endif
}

#if SLUICE_VECTOR_DECODE
// Decode and multiply in one go, for so few rows that a stored panel would be read about as often as written.
template <int kRows, class W>
HWY_NOINLINE void Direct(W type, const Panel& panel, std::int64_t offset, std::int64_t num_k, std::int64_t ahead_bytes,
                         const float* HWY_RESTRICT a, std::int64_t a_stride, const float* a_scale, float w_scale,
                         float* HWY_RESTRICT c) {
  const DF d;
  VF p[kRows][2];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) p[r][0] = p[r][1] = hn::Zero(d);
  simd::DecodeRows(type, panel.rows, offset, num_k, ahead_bytes, [&](std::int64_t k, VF first, VF second) HWY_ATTR {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const VF x = hn::Set(d, a[r * a_stride + k]);
      p[r][0] = hn::MulAdd(x, first, p[r][0]);
      p[r][1] = hn::MulAdd(x, second, p[r][1]);
    }
  });
  Promote<kRows>(p, a_scale, w_scale, c);
}
#endif

// f32 of A[:, k0 .. k0+num_k) times `multiplier`; returns the bits of the largest finite magnitude.
std::uint32_t DecodeA(const Item& item, std::int64_t k0, std::int64_t num_k, std::int64_t a_stride, float multiplier) {
  std::uint32_t largest = 0;
  for (std::int64_t r = 0; r < item.rows; ++r) {
    const std::uint8_t* from = item.a + offset_elems(r, item.a_row_bytes);
    // A few lines of each row, rows far apart: too short for the hardware prefetcher.
    const std::int64_t a_bytes = size_bytes(item.a_dtype);
    const std::uint8_t* later = from + 8 * item.a_row_bytes + k0 * a_bytes;
    for (std::int64_t b = 0; b < std::min<std::int64_t>(num_k * a_bytes, 512); b += 64) __builtin_prefetch(later + b);
    float* to = item.a_block + r * a_stride;
    std::uint32_t top = 0;
    switch (item.a_dtype) {
      case DType::kE4M3: top = simd::DecodeRow(E4M3(), from + k0, num_k, multiplier, to); break;
      case DType::kI8: top = simd::DecodeRow(I8(), from + k0, num_k, multiplier, to); break;
      case DType::kBF16: top = simd::DecodeRow(BF16(), from + k0 * BF16::kBytes, num_k, multiplier, to); break;
      default: top = simd::DecodeRow(F32(), from + k0 * F32::kBytes, num_k, multiplier, to); break;
    }
    largest = std::max(largest, top);
  }
  return largest;
}

// out = round(C (* a_row_scale * w_row_scale) + bias) for one panel; nothing past column `count` is touched.
void StorePanel(const Item& item, std::int64_t first, std::int64_t count, const float* HWY_RESTRICT c) {
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t width = simd::NumPanelRows();
  // Which NaN operand an fma hands on depends on the instruction's form; one NaN for all keeps the bits defined.
  const VF nan = hn::BitCast(d, hn::Set(du, 0x7FC00000U));
  HWY_ALIGN float bias[simd::kMaxPanelRows] = {};
  if (item.bias != nullptr) std::memcpy(bias, item.bias + first, static_cast<std::size_t>(count) * sizeof(float));
  const bool scaled = item.a_row_scale != nullptr || item.w_row_scale != nullptr;
  HWY_ALIGN float w_scale[simd::kMaxPanelRows];
  for (std::int64_t i = 0; scaled && i < width; ++i) {
    const bool present = item.w_row_scale != nullptr && i < count;
    w_scale[i] = present ? item.w_row_scale[offset_elems(first + i, item.w_scale_row_elems)] : 1.0F;
  }
  const std::int64_t elem_bytes = size_bytes(item.out_dtype);
  HWY_ALIGN std::uint8_t staged[simd::kMaxPanelRows * sizeof(float)];
  for (std::int64_t r = 0; r < item.rows; ++r, c += width) {
    std::uint8_t* row = item.out + offset_elems(r, item.out_row_bytes) + first * elem_bytes;
    std::uint8_t* to = count == width ? row : staged;
    const VF a_scale =
        hn::Set(d, item.a_row_scale == nullptr ? 1.0F : item.a_row_scale[offset_elems(r, item.a_scale_row_elems)]);
    for (std::int64_t i = 0; i < width; i += lanes) {
      VF v = hn::Load(d, c + i);
      if (item.integer) v = hn::ConvertTo(d, hn::BitCast(hn::RebindToSigned<DF>(), v));
      if (scaled) v = hn::Mul(v, hn::Mul(a_scale, hn::Load(d, w_scale + i)));
      // Not + 0 where there is none: that would turn -0 into +0.
      if (item.bias != nullptr) v = hn::Add(v, hn::Load(d, bias + i));
      v = hn::IfThenElse(hn::Eq(v, v), v, nan);
      if (item.out_dtype == DType::kF32) {
        hn::StoreU(v, d, reinterpret_cast<float*>(to) + i);
      } else {
        sluice::HWY_NAMESPACE::StoreBF16(d, v, reinterpret_cast<std::uint16_t*>(to) + i);
      }
    }
    if (count < width) std::memcpy(row, staged, static_cast<std::size_t>(count * elem_bytes));
  }
}

template <class W>
void RunTyped(W type, const Item& item) {
  constexpr bool kHalves = SLUICE_VECTOR_DECODE && std::is_same_v<W, E4M3>;
  constexpr std::int64_t kBlockBytes = kScaleBlock * W::kBytes;
  const std::int64_t width = simd::NumPanelRows();
  const std::int64_t block_cols = a_block_cols(item.rows, item.k);
  const std::int64_t a_stride = block_cols + kAPadElems;
  const std::int64_t num_pieces = std::max<std::int64_t>(item.chunk_cols / kScaleBlock, 1);
  std::fill_n(item.c_block, item.rows * std::max(item.chunk_cols, width), 0.0F);

  for (std::int64_t k0 = 0; k0 < item.k; k0 += block_cols) {
    const std::int64_t num_k = std::min(block_cols, item.k - k0);
    const std::int64_t num_blocks = ceil_div(num_k, kScaleBlock);
    // The direct path leaves e4m3 weights at 2^-8 and gives A the 2^8 instead: exact unless A overflows, in which
    // case the panel path, which restores w, takes over with the same bits.
    bool direct = item.rows <= kMaxDirectRows;
    const bool fold = kHalves && direct;
    const std::uint32_t largest = DecodeA(item, k0, num_k, a_stride, fold ? cpu::kE4M3HalfInverse : 1.0F);
    if (fold && std::bit_cast<float>(largest) >= 0x1p119F) {
      direct = false;
      DecodeA(item, k0, num_k, a_stride, 1.0F);
    }
    for (std::int64_t b = 0; b < num_blocks; ++b) {
      for (std::int64_t r = 0; r < item.rows; ++r) {
        item.scale_block[b * item.rows + r] =
            item.a_scale == nullptr ? 1.0F
                                    : item.a_scale[offset_elems(k0 / kScaleBlock + b, item.a_scale_block_elems) +
                                                   offset_elems(r, item.a_scale_row_elems)];
      }
    }
    float* c = item.c_block;
    for (std::int64_t i = 0; i < num_pieces; ++i) {
      const ColRange cols = col_range(item.n, item.part_rows, item.chunk_cols, item.chunk, i);
      for (std::int64_t j = 0; j < cols.count; j += width, c += item.rows * width) {
        Panel panel{};
        BindPanel(type, item, cols.begin + j, std::min(width, cols.count - j), panel);
        for (std::int64_t b = 0; b < num_blocks; ++b) {
          const std::int64_t offset = (k0 + b * kScaleBlock) * W::kBytes;
          const std::int64_t block_k = std::min(kScaleBlock, num_k - b * kScaleBlock);
          // Prefetch the next block of the rows, or the first of the next panel's: docs/performance.md has what lost.
          const std::int64_t ahead =
              b + 1 < num_blocks ? kBlockBytes : width * item.w_row_bytes + (1 - num_blocks) * kBlockBytes;
          const float w_scale =
              item.w_scale == nullptr
                  ? 1.0F
                  : item.w_scale[offset_elems(cols.scale_row, item.w_scale_row_elems) + k0 / kScaleBlock + b];
          const float* a = item.a_block + b * kScaleBlock;
          const float* a_scale = item.integer ? nullptr : item.scale_block + b * item.rows;
#if SLUICE_VECTOR_DECODE
          if (direct) {
            switch (item.rows) {
              case 1: Direct<1>(type, panel, offset, block_k, ahead, a, a_stride, a_scale, w_scale, c); break;
              case 2: Direct<2>(type, panel, offset, block_k, ahead, a, a_stride, a_scale, w_scale, c); break;
              case 3: Direct<3>(type, panel, offset, block_k, ahead, a, a_stride, a_scale, w_scale, c); break;
              default: Direct<4>(type, panel, offset, block_k, ahead, a, a_stride, a_scale, w_scale, c); break;
            }
            continue;
          }
#endif
          // Panels ask for their next lines from inside the tiles where that wins: decoding bf16 and f32 is short, and lines
          // asked for there leave memory idle while the tiles run. Decoding e4m3 is its own bound; it gains between 24 and
          // 63 rows (260 -> 272 GFLOP/s at 32) and loses outside (222 -> 210 at 16, 335 -> 319 at 512).
          const bool spread = SLUICE_VECTOR_DECODE && (W::kBytes > 1 || (item.rows >= 24 && item.rows < 64));
          const std::uint8_t* lines[simd::kMaxPanelRows * (kBlockBytes / 64 + 1)];
          std::int64_t num_lines = 0;
          if (spread) {
            for (std::int64_t row = 0; row < width; ++row) {
              for (std::int64_t at = 0; at < kBlockBytes; at += 64)
                lines[num_lines++] = panel.rows[row] + offset + ahead + at;
            }
          }
          DecodePanel(type, panel, offset, block_k, spread ? 0 : ahead, item.panel);
          // Even tiles: 16 rows are 8 + 8, not 12 + 4, which would leave the FMA units waiting on few chains.
          const std::int64_t num_tiles = ceil_div(item.rows, kMaxTileRows);
          // In few tiles at a time, so that the others run without the test for a line.
          const std::int64_t lines_per_tile = std::max<std::int64_t>(ceil_div(num_lines, num_tiles), 32);
          for (std::int64_t t = 0, r = 0, line = 0; t < num_tiles; ++t) {
            const std::int64_t next = item.rows * (t + 1) / num_tiles;
            const Lines share{lines + line, std::min(lines_per_tile, num_lines - line)};
            const auto tile_rows = share.count > 0 ? TileRows<true> : TileRows<false>;
            tile_rows(static_cast<int>(next - r), a + r * a_stride, a_stride, item.panel, block_k,
                      a_scale == nullptr ? nullptr : a_scale + r, w_scale, c + r * width, share);
            line += share.count;
            r = next;
          }
        }
      }
    }
  }

  const float* c = item.c_block;
  for (std::int64_t i = 0; i < num_pieces; ++i) {
    const ColRange cols = col_range(item.n, item.part_rows, item.chunk_cols, item.chunk, i);
    for (std::int64_t j = 0; j < cols.count; j += width, c += item.rows * width) {
      StorePanel(item, cols.begin + j, std::min(width, cols.count - j), c);
    }
  }
}

void RunItem(const Item& item) {
  switch (item.w_dtype) {
    case DType::kE4M3: return RunTyped(E4M3(), item);
    case DType::kI8: return RunTyped(I8(), item);
    case DType::kBF16: return RunTyped(BF16(), item);
    default: return RunTyped(F32(), item);
  }
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace sluice::grouped_gemm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::grouped_gemm {
HWY_EXPORT(RunItem);
HWY_EXPORT(TargetName);

namespace cpu_impl {
namespace {

struct Shape {
  std::int64_t num_rows, num_groups, n, k, part_rows, max_group_rows;
};

Shape shape_of(const Args& args) {
  Shape s{args.a.shape[0], args.w.shape[0], args.w.shape[1], args.w.shape[2], args.part_rows, args.a.shape[0]};
  // Where nothing is scaled the parts do not matter, and one part leaves the fewest ragged panels.
  if (s.part_rows == 0 || !args.w_scale.is_present() || has_row_scales(args)) s.part_rows = s.n;
  if (args.groups.form == RowGroups::Form::kMasked) s.max_group_rows = args.groups.rows_per_group;
  return s;
}

// Running item count before each group, shared by the workers.
std::int64_t prefix_bytes(const Shape& s) {
  return ceil_div((s.num_groups + 1) * 8, cpu::kScratchAlignBytes) * cpu::kScratchAlignBytes;
}

std::int64_t needed_bytes(const Shape& s, int num_threads) {
  return prefix_bytes(s) + worker_scratch(s.max_group_rows, s.k).total() * 4 * std::max(num_threads, 1);
}

}  // namespace

Status can_run(const Args&, const Machine&) { return Status::ok(); }

std::int64_t scratch_bytes(const Args& args, const Machine& machine) {
  return cpu::scratch_to_book(needed_bytes(shape_of(args), machine.num_threads));
}

std::string describe(const Args& args, const Machine& machine) {
  const Shape s = shape_of(args);
  const std::int64_t per_group = ceil_div(s.num_rows, std::max<std::int64_t>(s.num_groups, 1));
  const Problem even{s.num_rows,  per_group,          std::min(s.num_groups, s.num_rows), s.n, s.k,
                     s.part_rows, machine.num_threads};
  return fmt::format("{}, rows spread evenly: {}", HWY_DYNAMIC_DISPATCH(TargetName)(), choose_config(even).to_string());
}

Status run(const Args& args, const Ctx& ctx) {
  const Shape s = shape_of(args);
  Problem problem{0, 0, 0, s.n, s.k, s.part_rows, std::max(ctx.num_threads, 1)};
  for (std::int64_t e = 0; e < s.num_groups; ++e) {
    const RowRange range = row_range(args.groups, e, s.num_rows);
    problem.num_rows += range.end - range.begin;
    problem.max_group_rows = std::max(problem.max_group_rows, range.end - range.begin);
    problem.num_active += range.end > range.begin ? 1 : 0;
  }
  if (problem.num_rows == 0) return Status::ok();
  const auto taken = cpu::take_scratch("grouped_gemm", ctx.workspace, needed_bytes(s, ctx.num_threads));
  if (!taken) return taken.status();
  std::byte* scratch = *taken;
  const Config config = choose_config(problem);
  auto* item_begin = reinterpret_cast<std::int64_t*>(scratch);  // [L+1]
  auto* slices = reinterpret_cast<float*>(scratch + prefix_bytes(s));
  const ScratchElems slice = worker_scratch(s.max_group_rows, s.k);

  const bool row_scales = has_row_scales(args);
  const std::int64_t col_chunks = num_col_chunks(s.n, s.part_rows, config.chunk_cols);
  item_begin[0] = 0;
  for (std::int64_t e = 0; e < s.num_groups; ++e) {
    const RowRange range = row_range(args.groups, e, s.num_rows);
    item_begin[e + 1] = item_begin[e] + ceil_div(range.end - range.begin, config.chunk_rows) * col_chunks;
  }

  cpu::parallel_for(item_begin[s.num_groups], problem.num_threads, [&](std::int64_t index, int worker) {
    const std::int64_t e = std::upper_bound(item_begin, item_begin + s.num_groups + 1, index) - item_begin - 1;
    const RowRange range = row_range(args.groups, e, s.num_rows);
    const std::int64_t row_chunks = ceil_div(range.end - range.begin, config.chunk_rows);
    const std::int64_t in_group = index - item_begin[e];
    // Row chunks of one column chunk are neighbours: they share its weights in the last-level cache.
    const std::int64_t rows = range.end - range.begin;
    const std::int64_t begin = range.begin + rows * (in_group % row_chunks) / row_chunks;
    const std::int64_t end = range.begin + rows * (in_group % row_chunks + 1) / row_chunks;
    Item item;
    item.a = reinterpret_cast<const std::uint8_t*>(args.a.row(begin));
    item.a_row_bytes = offset_elems(args.a.stride[0], size_bytes(args.a.dtype));
    item.a_dtype = args.a.dtype;
    if (args.a_scale.is_present()) {
      item.a_scale_block_elems = args.a_scale.stride[0];
      item.a_scale_row_elems = args.a_scale.stride[1];
      const float* const a_scale = args.a_scale.as<const float>() + offset_elems(begin, item.a_scale_row_elems);
      (row_scales ? item.a_row_scale : item.a_scale) = a_scale;
    }
    item.integer = args.a.dtype == DType::kI8;
    item.w = reinterpret_cast<const std::uint8_t*>(args.w.row(e));
    item.w_row_bytes = offset_elems(args.w.stride[1], size_bytes(args.w.dtype));
    item.w_dtype = args.w.dtype;
    if (args.w_scale.is_present()) {
      (row_scales ? item.w_row_scale : item.w_scale) = reinterpret_cast<const float*>(args.w_scale.row(e));
      item.w_scale_row_elems = args.w_scale.stride[1];
    }
    if (args.bias.is_present()) item.bias = reinterpret_cast<const float*>(args.bias.row(e));
    item.out = reinterpret_cast<std::uint8_t*>(args.out.row(begin));
    item.out_row_bytes = offset_elems(args.out.stride[0], size_bytes(args.out.dtype));
    item.out_dtype = args.out.dtype;
    item.rows = end - begin;
    item.n = s.n;
    item.k = s.k;
    item.part_rows = s.part_rows;
    item.chunk_cols = config.chunk_cols;
    item.chunk = in_group / row_chunks;
    item.a_block = slices + slice.total() * worker;
    item.c_block = item.a_block + slice.a;
    item.scale_block = item.c_block + slice.c;
    item.panel = item.scale_block + slice.scale;
    HWY_DYNAMIC_DISPATCH(RunItem)(item);
  });
  return Status::ok();
}

}  // namespace cpu_impl
}  // namespace sluice::grouped_gemm
#endif  // HWY_ONCE
