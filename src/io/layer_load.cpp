#include "io/layer_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "io/load_jobs.h"
#include "io/unpack.h"

namespace sluice::io {
namespace {

constexpr std::int64_t kMxGroup = 32;  // columns that share an e8m0 scale

class Loader : private LoadJobs {
 public:
  Loader(const LayerFiles& files, const LoadOptions& options, bool poison) : LoadJobs(options, poison), files_(files) {}

  Result<LoadedLayer> load() {
    loaded_.config = files_.config;
    loaded_.notes = files_.notes;
    LayerWeights& w = loaded_.weights;
    const std::int64_t H = files_.config.hidden, E = files_.config.num_experts;
    SLUICE_TRY(take_matrix(files_.router, {E, H}, w.w_gate));
    SLUICE_TRY(take_f32(files_.router_bias, {E}, w.router_bias));
    SLUICE_TRY(take_f32(files_.score_bias, {E}, w.score_bias));
    const Result<std::vector<std::int32_t>> slots = find_slots(E);
    if (!slots) return slots.status();
    const Result<ShardRange> columns = columns_of(files_.experts);
    if (!columns) return columns.status().with_context("load");
    loaded_.config.intermediate = columns->end - columns->begin;
    SLUICE_TRY(take_ffn(files_.experts, H, *slots, *columns, w.experts));
    if (files_.shared.present) SLUICE_TRY(take_shared(H));
    SLUICE_TRY(check_ledger());
    SLUICE_TRY(run());
    SLUICE_TRY(check_weights(loaded_.config, w));
    return std::move(loaded_);
  }

 private:
  // ---- what is wanted ----

  // The stored bytes and scales are what the layer computes with.
  bool keeps(const StoredFfn& ffn) const { return is_kept(ffn.format) && options_.precision != Precision::kBF16; }
  // The rank's columns of I, as shard() cuts the weights that are loaded.
  Result<ShardRange> columns_of(const StoredFfn& ffn) const {
    if (options_.tensor_shard.size == 1 && options_.tensor_shard.rank == 0) return ShardRange{0, ffn.intermediate};
    return shard_range(ffn.intermediate, options_.tensor_shard, keeps(ffn) && !is_per_channel(ffn.format));
  }

  // The expert of each slot, and what the config says of them.
  Result<std::vector<std::int32_t>> find_slots(std::int64_t E) {
    const std::int64_t first = options_.first_expert;
    const bool has_none = options_.num_local == kNoExperts;
    if (!options_.experts.empty()) {
      if (first != 0 || options_.num_local != 0) {
        return Status(StatusCode::kInvalidArgument,
                      fmt::format("load: experts are listed, and first_expert = {} and num_local = {} are given too",
                                  first, options_.num_local));
      }
      for (const std::int32_t expert : options_.experts) {
        if (expert >= 0 && expert < E) continue;
        return Status(StatusCode::kInvalidArgument,
                      fmt::format("load: expert {} of the list is none of the layer's {}", expert, E));
      }
      loaded_.config.first_expert = 0;
      loaded_.config.num_local = std::ssize(options_.experts);
      return options_.experts;
    }
    const std::int64_t count = has_none ? 0 : options_.num_local > 0 ? options_.num_local : E - first;
    if (first < 0 || (options_.num_local < 0 && !has_none) || (first >= E && !has_none) || count > E - first) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("load: first_expert = {} and num_local = {} are no part of the layer's E = {} experts",
                                first, options_.num_local, E));
    }
    loaded_.config.first_expert = first;
    loaded_.config.num_local = has_none ? kNoExperts : count == E ? 0 : count;
    std::vector<std::int32_t> slots(static_cast<std::size_t>(count));
    std::iota(slots.begin(), slots.end(), static_cast<std::int32_t>(first));
    return slots;
  }

  // Cut over its own I; whole on every rank where that is too narrow.
  Status take_shared(std::int64_t H) {
    if (options_.routed_only) {
      loaded_.config.shared_intermediate = 0;
      loaded_.config.has_shared_gate = false;
      loaded_.notes.push_back("the shared expert was not read (routed_only)");
      return Status::ok();
    }
    const Result<ShardRange> part = columns_of(files_.shared);
    loaded_.shared_is_whole = !part.is_ok();
    const ShardRange columns = part ? *part : ShardRange{0, files_.shared.intermediate};
    loaded_.config.shared_intermediate = columns.end - columns.begin;
    constexpr std::int32_t kOnly[] = {0};
    SLUICE_TRY(take_ffn(files_.shared, H, kOnly, columns, loaded_.weights.shared));
    return take_matrix(files_.shared_gate, {1, H}, loaded_.weights.shared_gate);
  }

  // ---- plain tensors ----

  // bf16 and f32 as they are, f16 as f32.
  Status take_matrix(const TensorRef& ref, std::initializer_list<std::int64_t> shape, TensorView& view) {
    if (!ref) return Status::ok();
    const DType from = ref.entry->dtype, to = from == DType::kF16 ? DType::kF32 : from;
    SLUICE_TRY(allocate(to, shape, view));
    if (from != to) note_conversion(to_string(from), to);
    copy(ref, 0, view.num_elements(), view.as<std::byte>());
    return Status::ok();
  }
  Status take_f32(const TensorRef& ref, std::initializer_list<std::int64_t> shape, TensorView& view) {
    if (!ref) return Status::ok();
    SLUICE_TRY(allocate(DType::kF32, shape, view));
    const DType from = ref.entry->dtype;
    if (from != DType::kF32) note_conversion(to_string(from), DType::kF32);
    const std::int64_t count = view.num_elements();
    float* dst = view.as<float>();
    add(ref, 0, ref.num_bytes(), view.as<std::byte>(), view.num_bytes(), [=](const std::byte* src) {
      return Done{to_f32(from, src, count, dst), Status::ok()};
    });
    return Status::ok();
  }
  // `count` elements from element `first` on; f16 becomes f32, everything else stays.
  void copy(const TensorRef& ref, std::int64_t first, std::int64_t count, std::byte* dst) {
    const DType dtype = ref.entry->dtype;
    const std::int64_t size = size_bytes(dtype);
    if (dtype == DType::kF16) {
      add(ref, first * size, count * size, dst, count * 4, [=](const std::byte* src) {
        return Done{to_f32(dtype, src, count, reinterpret_cast<float*>(dst)), Status::ok()};
      });
    } else {
      add(ref, first * size, count * size, dst, count * size, [=](const std::byte* src) {
        return Done{copy_elements(dtype, src, count, dst), Status::ok()};
      });
    }
  }

  // ---- scales ----

  // The one scale of a tensor becomes that of each of its rows.
  void take_scales(const StoredFfn& ffn, const TensorRef& ref, std::int64_t first, std::int64_t count, float* dst) {
    const std::int64_t size = size_bytes(ref.entry->dtype);
    const std::int64_t stored = ffn.format == StoredFormat::kE4M3Tensor ? 1 : count;
    if (ref.entry->dtype != DType::kF32)
      note_conversion(fmt::format("{} scale", to_string(ref.entry->dtype)), DType::kF32);
    const std::int64_t from = stored == count ? first : 0;
    add(ref, from * size, stored * size, reinterpret_cast<std::byte*>(dst), count * 4, [=](const std::byte* src) {
      Done done = convert_scales(ref, src, stored, dst);
      std::fill(dst + stored, dst + count, dst[0]);
      return done;
    });
  }

  // ---- quantised matrices as bf16 ----

  // Rows [first, first + count) of matrix `index` of a tensor of [rows, cols] matrices, perhaps from inside a block on.
  void dequantise(const StoredFfn& ffn, const TensorRef& ref, const TensorRef& scale, std::int64_t index,
                  std::int64_t rows, std::int64_t cols, std::int64_t first, std::int64_t count, std::byte* dst) {
    const DType from = ffn.dtype;
    note_conversion(to_string(from), DType::kBF16, "dequantised (rounded once)");
    add(ref, (index * rows + first) * cols, count * cols, dst, count * cols * 2, [=](const std::byte* src) {
      MatrixScales scales;
      Done done = scales.read(ffn.format, scale, index, rows, cols);
      if (!done.status.is_ok()) return done;
      auto* const out = reinterpret_cast<std::uint16_t*>(dst);
      if (scales.per_row) {
        done.num_nan += dequantise_channels(from, src, scales.values.data() + first, count, cols, out);
        return done;
      }
      for (std::int64_t r = 0; r < count;) {
        const std::int64_t in_block = (first + r) % kScaleBlock, piece = std::min(count - r, kScaleBlock - in_block);
        done.num_nan += dequantise_blocks(src + r * cols, scales.at(first + r, 0), piece, cols, out + r * cols);
        r += piece;
      }
      return done;
    });
  }

  // Rows of 32-column scaled formats, from row `first` of the tensor on; row n of them becomes row target(n) of dst.
  void dequantise_rows(const StoredFfn& ffn, const TensorRef& ref, const TensorRef& scale, std::int64_t first,
                       std::int64_t rows, std::int64_t cols, std::byte* dst, GateUp order, std::int64_t intermediate) {
    const bool fp4 = ffn.format == StoredFormat::kMxfp4;
    note_conversion(ffn.text, DType::kBF16, "dequantised exactly");
    const std::int64_t row_bytes = fp4 ? cols / 2 : cols, row_scales = ceil_div(cols, 32);
    add(ref, first * row_bytes, rows * row_bytes, dst, rows * cols * 2, [=](const std::byte* src) {
      Done done;
      const std::byte* scales = scale.data() + first * row_scales;
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t target = intermediate == 0 ? r : w13_row(order, r, intermediate);
        auto* out = reinterpret_cast<std::uint16_t*>(dst) + target * cols;
        const Dequantised row = fp4 ? dequantise_mxfp4_row(src + r * row_bytes, scales + r * row_scales, cols, out)
                                    : dequantise_mx_row(src + r * row_bytes, scales + r * row_scales, cols, out);
        done.num_nan += row.num_nan;
        if (!row.exact) done.status = inexact(ref, first + r);
      }
      return done;
    });
  }
  static Status inexact(const TensorRef& ref, std::int64_t row) {
    return {StatusCode::kBadData,
            fmt::format("{}: row {} has a product with its scale that bf16 cannot hold", ref.entry->name, row)};
  }

  // ---- the gated FFN ----

  // These experts, in this order, and these columns of I, on their way to the destinations.
  struct FfnPart {
    const StoredFfn& ffn;
    std::span<const std::int32_t> experts;
    ShardRange columns;
    std::int64_t H;
    FfnWeights& out;

    std::int64_t begin() const { return columns.begin; }
    std::int64_t count() const { return columns.end - columns.begin; }
    bool is_whole() const { return count() == ffn.intermediate; }
  };

  // Where the whole of it is one tensor of the file, as wanted and in order, it is seen there; else slots are copied.
  Status take_ffn(const StoredFfn& ffn, std::int64_t H, std::span<const std::int32_t> experts,
                  const ShardRange& columns, FfnWeights& out) {
    const FfnPart p{ffn, experts, columns, H, out};
    const auto L = static_cast<std::int64_t>(experts.size());
    const std::int64_t E = ffn.num_experts, I = p.count();
    const std::int64_t Ib = ceil_div(I, kScaleBlock), Hb = ceil_div(H, kScaleBlock);
    const bool per_channel = is_per_channel(ffn.format);
    const bool keep = keeps(ffn);
    DType dtype = ffn.dtype == DType::kF16 ? DType::kF32 : ffn.dtype;
    if (ffn.format != StoredFormat::kPlain && !keep) dtype = DType::kBF16;
    if (ffn.dtype == DType::kF16) note_conversion("f16", DType::kF32);

    bool in_order = L > 0;
    for (std::int64_t i = 1; i < L; ++i) in_order = in_order && experts[i] == experts[i - 1] + 1;
    // Stored as wanted? f16 never is; e4m3 and int8 when they stay so.
    const bool as_stored = p.is_whole() && in_order && ffn.dtype == dtype && !ffn.transposed;
    const bool w13_view = as_stored && ffn.fused && ffn.order == GateUp::kGateFirst &&
                          take_view(ffn.gate[0], dtype, {E, 2 * I, H}, experts[0], L, out.w13);
    const bool w2_view =
        as_stored && ffn.down.size() == 1 && take_view(ffn.down[0], dtype, {E, H, I}, experts[0], L, out.w2);
    if (!w13_view) SLUICE_TRY(allocate(dtype, {L, 2 * I, H}, out.w13));
    if (!w2_view) SLUICE_TRY(allocate(dtype, {L, H, I}, out.w2));
    if (keep && per_channel) {
      SLUICE_TRY(allocate(DType::kF32, {L, 2 * I, 1}, out.w13_scale));
      SLUICE_TRY(allocate(DType::kF32, {L, H, 1}, out.w2_scale));
    } else if (keep) {
      SLUICE_TRY(allocate(DType::kF32, {L, 2 * Ib, Hb}, out.w13_scale));
      SLUICE_TRY(allocate(DType::kF32, {L, Hb, Ib}, out.w2_scale));
    }
    for (std::int64_t slot = 0; slot < L; ++slot) {
      if (!w13_view) ffn.fused ? fused_w13(p, slot) : split_w13(p, slot);
      if (!w2_view) take_w2(p, slot);
      if (keep) per_channel ? channel_scales(p, slot) : block_scales(p, slot);
    }
    return take_biases(p);
  }

  // Rows of gate or up: those of the part in matrix `index` of a tensor of [I,H] matrices.
  void take_rows(const FfnPart& p, const TensorRef& ref, const TensorRef& scale, std::int64_t index, std::byte* dst) {
    const std::int64_t I = p.ffn.intermediate, first = index * I + p.begin();
    if (p.ffn.format == StoredFormat::kE4M3Mx || p.ffn.format == StoredFormat::kMxfp4) {
      dequantise_rows(p.ffn, ref, scale, first, p.count(), p.H, dst, GateUp::kGateFirst, 0);
    } else if (is_kept(p.ffn.format) && p.out.w13.dtype == DType::kBF16) {
      dequantise(p.ffn, ref, scale, index, I, p.H, p.begin(), p.count(), dst);
    } else {
      copy(ref, first * p.H, p.count() * p.H, dst);
    }
  }

  static std::byte* half_of(const FfnPart& p, std::int64_t slot, std::int64_t half) {
    return p.out.w13.row(slot) + half * p.count() * p.H * size_bytes(p.out.w13.dtype);
  }
  // Half of w13 (0: gate) that the stored half is.
  static std::int64_t target_half(const FfnPart& p, std::int64_t stored) {
    return w13_row(p.ffn.order, stored * p.ffn.intermediate, p.ffn.intermediate) / p.ffn.intermediate;
  }

  void split_w13(const FfnPart& p, std::int64_t slot) {
    const auto e = static_cast<std::size_t>(p.experts[slot]);
    const bool scaled = !p.ffn.gate_scale.empty();
    take_rows(p, p.ffn.gate[e], scaled ? p.ffn.gate_scale[e] : TensorRef{}, 0, half_of(p, slot, 0));
    take_rows(p, p.ffn.up[e], scaled ? p.ffn.up_scale[e] : TensorRef{}, 0, half_of(p, slot, 1));
  }

  void fused_w13(const FfnPart& p, std::int64_t slot) {
    const StoredFfn& ffn = p.ffn;
    const TensorRef& ref = ffn.gate[0];
    const TensorRef scale = ffn.gate_scale.empty() ? TensorRef{} : ffn.gate_scale[0];
    const std::int64_t e = p.experts[slot], I = ffn.intermediate, H = p.H, n = p.count();
    const std::int64_t src_size = size_bytes(ffn.dtype), dst_size = size_bytes(p.out.w13.dtype);
    const DType from = ffn.dtype;
    const GateUp order = ffn.order;
    std::byte* const dst = half_of(p, slot, 0);
    const bool mx = ffn.format == StoredFormat::kMxfp4 || ffn.format == StoredFormat::kE4M3Mx;
    // Gate and up rows of the part are neighbours in the file: [2 * begin, 2 * end) of the [2I, ...].
    const bool together = order == GateUp::kInterleaved || p.is_whole();
    const std::int64_t begin = 2 * p.begin();
    if (ffn.transposed) {
      const auto columns = [&](std::int64_t first, std::int64_t count, std::int64_t intermediate, std::byte* to) {
        const Transpose shape{from, H, count, order, intermediate, 2 * I};
        add(ref, (e * H * 2 * I + first) * src_size, ((H - 1) * 2 * I + count) * src_size, to, count * H * dst_size,
            [=](const std::byte* src) {
              return Done{transpose(shape, src, to), Status::ok()};
            });
      };
      if (together) return columns(begin, 2 * n, n, dst);
      for (std::int64_t half = 0; half < 2; ++half)
        columns(half * I + p.begin(), n, 0, half_of(p, slot, target_half(p, half)));
    } else if (mx && together) {
      dequantise_rows(ffn, ref, scale, e * 2 * I + begin, 2 * n, H, dst, order, n);
    } else if (order == GateUp::kInterleaved) {
      add(ref, (e * 2 * I + begin) * H * src_size, 2 * n * H * src_size, dst, 2 * n * H * dst_size,
          [=](const std::byte* src) {
            Done done;
            for (std::int64_t r = 0; r < 2 * n; ++r) {
              std::byte* out_row = dst + w13_row(order, r, n) * H * dst_size;
              done.num_nan += from == DType::kF16
                                  ? to_f32(from, src + r * H * src_size, H, reinterpret_cast<float*>(out_row))
                                  : copy_elements(from, src + r * H * src_size, H, out_row);
            }
            return done;
          });
    } else {
      // Blocks do not span the boundary of gate and up here: I is a multiple of them.
      for (std::int64_t half = 0; half < 2; ++half)
        take_rows(p, ref, scale, 2 * e + half, half_of(p, slot, target_half(p, half)));
    }
  }

  void take_w2(const FfnPart& p, std::int64_t slot) {
    const StoredFfn& ffn = p.ffn;
    const std::int64_t e = p.experts[slot], I = ffn.intermediate, H = p.H, n = p.count();
    const std::int64_t index = ffn.fused ? e : 0;
    const auto i = static_cast<std::size_t>(ffn.fused ? 0 : e);
    const TensorRef& ref = ffn.down[i];
    const TensorRef scale = ffn.down_scale.empty() ? TensorRef{} : ffn.down_scale[i];
    std::byte* const dst = p.out.w2.row(slot);
    const DType from = ffn.dtype;
    const std::int64_t src_size = size_bytes(from), dst_size = size_bytes(p.out.w2.dtype);
    const bool mx = ffn.format == StoredFormat::kMxfp4 || ffn.format == StoredFormat::kE4M3Mx;
    const bool as_bf16 = is_kept(ffn.format) && p.out.w2.dtype == DType::kBF16;
    if (ffn.transposed) {
      add(ref, (e * I + p.begin()) * H * src_size, n * H * src_size, dst, n * H * dst_size, [=](const std::byte* src) {
        return Done{transpose({from, n, H, GateUp::kGateFirst, 0}, src, dst), Status::ok()};
      });
    } else if (!p.is_whole()) {
      mx ? take_mx_columns(p, ref, scale, index, dst) : take_columns(p, ref, scale, index, dst);
    } else if (mx) {
      dequantise_rows(ffn, ref, scale, index * H, H, I, dst, GateUp::kGateFirst, 0);
    } else if (as_bf16) {
      dequantise(ffn, ref, scale, index, H, I, 0, H, dst);
    } else {
      copy(ref, index * H * I, H * I, dst);
    }
  }

  // The part's columns of matrix `index` of a tensor of [H,I] matrices.
  void take_columns(const FfnPart& p, const TensorRef& ref, const TensorRef& scale, std::int64_t index,
                    std::byte* dst) {
    const StoredFormat format = p.ffn.format;
    const std::int64_t I = p.ffn.intermediate, H = p.H, begin = p.begin(), n = p.count();
    const bool as_bf16 = is_kept(format) && p.out.w2.dtype == DType::kBF16;
    const DType from = p.ffn.dtype;
    const std::int64_t src_size = size_bytes(from), dst_size = size_bytes(p.out.w2.dtype);
    if (as_bf16) note_conversion(to_string(from), DType::kBF16, "dequantised (rounded once)");
    add(ref, (index * H * I + begin) * src_size, ((H - 1) * I + n) * src_size, dst, H * n * dst_size,
        [=](const std::byte* src) {
          Done done;
          MatrixScales scales;
          if (as_bf16) done = scales.read(format, scale, index, H, I);
          // Columns that share a scale, the first of them perhaps inside its group.
          const std::int64_t group = as_bf16 && !scales.per_row ? kScaleBlock : I;
          for (std::int64_t r = 0; r < H && done.status.is_ok(); ++r) {
            const std::byte* const row = src + r * I * src_size;
            std::byte* const out = dst + r * n * dst_size;
            if (!as_bf16) {
              done.num_nan += from == DType::kF16 ? to_f32(from, row, n, reinterpret_cast<float*>(out))
                                                  : copy_elements(from, row, n, out);
              continue;
            }
            for (std::int64_t c = 0; c < n;) {
              const std::int64_t piece = std::min(n - c, group - (begin + c) % group);
              done.num_nan += dequantise_channels(from, row + c, scales.at(r, begin + c), 1, piece,
                                                  reinterpret_cast<std::uint16_t*>(out) + c);
              c += piece;
            }
          }
          return done;
        });
  }

  // The same of 32-column scaled formats: whole groups are dequantised, and the part's columns of them kept.
  void take_mx_columns(const FfnPart& p, const TensorRef& ref, const TensorRef& scale, std::int64_t index,
                       std::byte* dst) {
    const bool fp4 = p.ffn.format == StoredFormat::kMxfp4;
    note_conversion(p.ffn.text, DType::kBF16, "dequantised exactly");
    const std::int64_t I = p.ffn.intermediate, H = p.H, n = p.count();
    const std::int64_t first = p.begin() / kMxGroup * kMxGroup;
    const std::int64_t columns = std::min(ceil_div(p.columns.end, kMxGroup) * kMxGroup, I) - first;
    const std::int64_t skipped = p.begin() - first;
    const auto bytes_of = [fp4](std::int64_t elems) { return fp4 ? elems / 2 : elems; };
    add(ref, bytes_of(index * H * I + first), bytes_of((H - 1) * I + columns), dst, H * n * 2,
        [=](const std::byte* src) {
          Done done;
          std::vector<std::uint16_t> groups(static_cast<std::size_t>(columns));
          for (std::int64_t r = 0; r < H; ++r) {
            const std::byte* const row = src + bytes_of(r * I);
            const std::byte* const s = scale.data() + (index * H + r) * ceil_div(I, kMxGroup) + first / kMxGroup;
            const Dequantised got = fp4 ? dequantise_mxfp4_row(row, s, columns, groups.data())
                                        : dequantise_mx_row(row, s, columns, groups.data());
            if (!got.exact) done.status = inexact(ref, index * H + r);
            done.num_nan += copy_elements(DType::kBF16, reinterpret_cast<const std::byte*>(groups.data() + skipped), n,
                                          dst + r * n * 2);
          }
          return done;
        });
  }

  void channel_scales(const FfnPart& p, std::int64_t slot) {
    const auto e = static_cast<std::size_t>(p.experts[slot]);
    const std::int64_t n = p.count();
    float* const w13 = p.out.w13_scale.as<float>() + slot * 2 * n;
    take_scales(p.ffn, p.ffn.gate_scale[e], p.begin(), n, w13);
    take_scales(p.ffn, p.ffn.up_scale[e], p.begin(), n, w13 + n);
    take_scales(p.ffn, p.ffn.down_scale[e], 0, p.H, p.out.w2_scale.as<float>() + slot * p.H);
  }

  // The true block index: a shard begins with a block, or lies inside one.
  void block_scales(const FfnPart& p, std::int64_t slot) {
    const StoredFfn& ffn = p.ffn;
    const std::int64_t e = p.experts[slot], all = ceil_div(ffn.intermediate, kScaleBlock);
    const std::int64_t Hb = ceil_div(p.H, kScaleBlock), first = p.begin() / kScaleBlock;
    const std::int64_t blocks = ceil_div(p.count(), kScaleBlock);
    float* const w13 = p.out.w13_scale.as<float>() + slot * 2 * blocks * Hb;
    float* const w2 = p.out.w2_scale.as<float>() + slot * Hb * blocks;
    const auto i = static_cast<std::size_t>(ffn.fused ? 0 : e);
    for (std::int64_t half = 0; half < 2; ++half) {
      const TensorRef& ref = ffn.fused || half == 0 ? ffn.gate_scale[i] : ffn.up_scale[i];
      const std::int64_t index = ffn.fused ? 2 * e + half : 0, to = ffn.fused ? target_half(p, half) : half;
      take_scales(ffn, ref, (index * all + first) * Hb, blocks * Hb, w13 + to * blocks * Hb);
    }
    const std::int64_t index = ffn.fused ? e : 0;
    if (p.is_whole()) return take_scales(ffn, ffn.down_scale[i], index * Hb * all, Hb * all, w2);
    for (std::int64_t row = 0; row < Hb; ++row)
      take_scales(ffn, ffn.down_scale[i], (index * Hb + row) * all + first, blocks, w2 + row * blocks);
  }

  // That of w2 is added once for a tensor-parallel group, by its rank 0.
  Status take_biases(const FfnPart& p) {
    const StoredFfn& ffn = p.ffn;
    if (!ffn.gate_up_bias) return Status::ok();
    const auto L = static_cast<std::int64_t>(p.experts.size());
    const std::int64_t I = ffn.intermediate, n = p.count(), begin = p.begin(), H = p.H;
    const bool has_down = options_.tensor_shard.rank == 0;
    SLUICE_TRY(allocate(DType::kF32, {L, 2 * n}, p.out.w13_bias));
    if (has_down) SLUICE_TRY(allocate(DType::kF32, {L, H}, p.out.w2_bias));
    const DType from = ffn.gate_up_bias.entry->dtype, down_from = ffn.down_bias.entry->dtype;
    const GateUp order = ffn.order;
    if (has_down && down_from != DType::kF32) note_conversion(to_string(down_from), DType::kF32);
    for (std::int64_t slot = 0; slot < L; ++slot) {
      const std::int64_t e = p.experts[slot], src_bytes = 2 * I * size_bytes(from);
      float* const dst = p.out.w13_bias.as<float>() + slot * 2 * n;
      add(ffn.gate_up_bias, e * src_bytes, src_bytes, p.out.w13_bias.row(slot), 2 * n * 4, [=](const std::byte* src) {
        std::vector<float> row(static_cast<std::size_t>(2 * I)), ordered(row.size());
        Done done{to_f32(from, src, 2 * I, row.data()), Status::ok()};
        for (std::size_t r = 0; r < row.size(); ++r)
          ordered[static_cast<std::size_t>(w13_row(order, static_cast<std::int64_t>(r), I))] = row[r];
        std::copy_n(ordered.data() + begin, n, dst);
        std::copy_n(ordered.data() + I + begin, n, dst + n);
        return done;
      });
      if (!has_down) continue;
      const std::int64_t down_bytes = H * size_bytes(down_from);
      float* const down = p.out.w2_bias.as<float>() + slot * H;
      add(ffn.down_bias, e * down_bytes, down_bytes, p.out.w2_bias.row(slot), H * 4, [=](const std::byte* src) {
        return Done{to_f32(down_from, src, H, down), Status::ok()};
      });
    }
    return Status::ok();
  }

  const LayerFiles& files_;
};

}  // namespace

Result<LoadedLayer> load_layer(const LayerFiles& files, const LoadOptions& options, bool poison) {
  const std::vector<Precision> can = files.precisions();
  if (std::find(can.begin(), can.end(), options.precision) == can.end()) {
    std::string names;
    for (Precision p : can) names += (names.empty() ? "" : ", ") + std::string(to_string(p));
    return Status(StatusCode::kUnsupported,
                  can.empty() ? fmt::format("layer {} cannot be run: {}", files.layer, files.cannot_run)
                              : fmt::format("layer {} holds {} experts, which run in {}, not in {}", files.layer,
                                            files.experts.text, names, to_string(options.precision)));
  }
  return Loader(files, options, poison).load();
}

}  // namespace sluice::io
