#include "io/layer_load.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>

#include "cpu/parallel.h"
#include "io/unpack.h"

namespace sluice::io {
namespace {

constexpr std::size_t kHugePageWorth = std::size_t{16} << 20;
constexpr std::uintptr_t kViewAlignment = 64;  // what owned memory has at least
constexpr int kMaxLoadThreads = 8;             // beyond this the disk or the page table lock is the limit

struct Done {
  std::int64_t num_nan = 0;
  Status status = Status::ok();
};

// One piece of work: reads parts of source tensors, fills one range of one destination.
struct Job {
  const std::byte* dst = nullptr;
  std::int64_t dst_bytes = 0;  // 0: only looks (views into the file)
  TensorRef source;
  std::int64_t src_begin = 0, src_bytes = 0;
  std::function<Done(const std::byte* src)> run;
};

class Loader {
 public:
  Loader(const LayerFiles& files, const LoadOptions& options, bool poison)
      : files_(files), options_(options), poison_(poison) {}

  Result<LoadedLayer> load() {
    loaded_.config = files_.config;
    loaded_.notes = files_.notes;
    LayerWeights& w = loaded_.weights;
    const std::int64_t H = files_.config.hidden, E = files_.config.num_experts;
    SLUICE_TRY(take_matrix(files_.router, {E, H}, w.w_gate));
    SLUICE_TRY(take_f32(files_.router_bias, {E}, w.router_bias));
    SLUICE_TRY(take_f32(files_.score_bias, {E}, w.score_bias));
    Result<std::vector<std::int64_t>> slots = find_slots(E);
    if (!slots) return slots.status();
    SLUICE_TRY(take_ffn(files_.experts, H, *slots, w.experts));
    if (options_.routed_only && files_.shared.present) {
      loaded_.config.shared_intermediate = 0;
      loaded_.config.has_shared_gate = false;
      loaded_.notes.push_back("the shared expert was not read (routed_only)");
    } else if (files_.shared.present) {
      SLUICE_TRY(take_ffn(files_.shared, H, counted_from(0, files_.shared.num_experts), w.shared));
      SLUICE_TRY(take_matrix(files_.shared_gate, {1, H}, w.shared_gate));
    }
    SLUICE_TRY(check_ledger());
    SLUICE_TRY(run());
    for (TensorView* bias : {&w.experts.w13_bias, &w.experts.w2_bias}) SLUICE_TRY(pick(*slots, *bias));
    SLUICE_TRY(check_weights(loaded_.config, w));
    if (options_.tensor_shard.size == 1) return std::move(loaded_);
    Result<ShardedLayer> part = shard(loaded_.config, w, options_.tensor_shard);
    if (!part) return part.status().with_context("load");
    loaded_.config = part->config;
    loaded_.weights = std::move(part->weights);
    loaded_.shared_is_whole = part->shared_is_whole;
    return std::move(loaded_);
  }

 private:
  // ---- experts ----

  static std::vector<std::int64_t> counted_from(std::int64_t first, std::int64_t count) {
    std::vector<std::int64_t> slots(static_cast<std::size_t>(count));
    std::iota(slots.begin(), slots.end(), first);
    return slots;
  }
  static bool are_neighbours(const std::vector<std::int64_t>& slots) {
    return slots.empty() || slots == counted_from(slots.front(), std::ssize(slots));
  }

  // The expert of each slot, and what the config says of them.
  Result<std::vector<std::int64_t>> find_slots(std::int64_t E) {
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
      return std::vector<std::int64_t>(options_.experts.begin(), options_.experts.end());
    }
    const std::int64_t count = has_none ? 0 : options_.num_local > 0 ? options_.num_local : E - first;
    if (first < 0 || (options_.num_local < 0 && !has_none) || (first >= E && !has_none) || count > E - first) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("load: first_expert = {} and num_local = {} are no part of the layer's E = {} experts",
                                first, options_.num_local, E));
    }
    loaded_.config.first_expert = first;
    loaded_.config.num_local = has_none ? kNoExperts : count == E ? 0 : count;
    return counted_from(first, count);
  }

  // Biases are few and were taken of all experts: those of the slots, in their order.
  Status pick(const std::vector<std::int64_t>& slots, TensorView& view) {
    if (!view.is_present()) return Status::ok();
    if (are_neighbours(slots)) {
      view = view.slice(slots.empty() ? 0 : slots.front(), std::ssize(slots));
      return Status::ok();
    }
    const TensorView all = view;
    SLUICE_TRY(allocate(all.dtype, {std::ssize(slots), all.shape[1]}, view));
    for (std::int64_t l = 0; l < std::ssize(slots); ++l) {
      std::memcpy(view.row(l), all.row(slots[static_cast<std::size_t>(l)]),
                  static_cast<std::size_t>(all.shape[1] * size_bytes(all.dtype)));
    }
    return Status::ok();
  }

  // ---- destinations ----

  Status allocate(DType dtype, std::initializer_list<std::int64_t> shape, TensorView& view) {
    view = TensorView::dense(nullptr, dtype, shape);
    const auto bytes = static_cast<std::size_t>(view.num_bytes());
    if (bytes == 0 && view.shape[0] == 0) return Status::ok();  // no experts
    if (bytes == 0) return {StatusCode::kInternal, fmt::format("load: an empty destination {}", view.to_string())};
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
      return {StatusCode::kIoError, fmt::format("load: no memory for {} ({} bytes)", view.to_string(), bytes)};
    if (bytes >= kHugePageWorth) ::madvise(memory, bytes, MADV_HUGEPAGE);
    if (poison_) std::memset(memory, 0xFF, bytes);
    view.data = memory;
    loaded_.weights.owners.emplace_back(memory, [bytes](const void* p) { ::munmap(const_cast<void*>(p), bytes); });
    destinations_.push_back({view.as<std::byte>(), static_cast<std::int64_t>(bytes)});
    return Status::ok();
  }

  // A stored tensor that is already what is wanted, where it lies: not copied, but looked through for NaN.
  bool take_view(const TensorRef& ref, DType dtype, std::initializer_list<std::int64_t> shape, TensorView& view) {
    if (reinterpret_cast<std::uintptr_t>(ref.data()) % kViewAlignment != 0) return false;
    view = TensorView::dense(ref.data(), dtype, shape);
    loaded_.weights.owners.push_back(ref.file->shared_from_this());
    constexpr std::int64_t kPiece = std::int64_t{8} << 20;
    for (std::int64_t begin = 0; begin < ref.num_bytes(); begin += kPiece) {
      const std::int64_t bytes = std::min(kPiece, ref.num_bytes() - begin);
      jobs_.push_back({nullptr, 0, ref, begin, bytes, [=](const std::byte* src) {
                         return Done{count_nan(dtype, src, bytes / size_bytes(dtype)), Status::ok()};
                       }});
    }
    return true;
  }

  void add(const TensorRef& ref, std::int64_t src_begin, std::int64_t src_bytes, std::byte* dst, std::int64_t dst_bytes,
           std::function<Done(const std::byte* src)> run) {
    jobs_.push_back({dst, dst_bytes, ref, src_begin, src_bytes, std::move(run)});
  }

  void note_conversion(std::string_view from, DType to, std::string_view how = "converted exactly") {
    const std::string note = fmt::format("{} tensors were {} to {}", from, how, to_string(to));
    auto& notes = loaded_.notes;
    if (std::find(notes.begin(), notes.end(), note) == notes.end()) notes.push_back(note);
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

  // A scale is a magnitude. Placeholders that were never overwritten show as negative or infinite ones.
  static Done convert_scales(const TensorRef& ref, const std::byte* src, std::int64_t count, float* dst) {
    Done done{to_f32(ref.entry->dtype, src, count, dst), Status::ok()};
    for (std::int64_t i = 0; i < count; ++i) {
      if (dst[i] < 0.0f || std::isinf(dst[i])) {
        done.status = {StatusCode::kBadData,
                       fmt::format("scale not loaded: {} holds {}, which is no scale", ref.entry->name, dst[i])};
        break;
      }
    }
    return done;
  }
  // The one scale of a tensor becomes that of each of its rows.
  void take_scales(const StoredFfn& ffn, const TensorRef& ref, std::int64_t first, std::int64_t count, float* dst) {
    const std::int64_t size = size_bytes(ref.entry->dtype);
    const std::int64_t stored = ffn.format == StoredFormat::kE4M3Tensor ? 1 : count;
    if (ref.entry->dtype != DType::kF32)
      note_conversion(fmt::format("{} scale", to_string(ref.entry->dtype)), DType::kF32);
    add(ref, first * size, stored * size, reinterpret_cast<std::byte*>(dst), count * 4, [=](const std::byte* src) {
      Done done = convert_scales(ref, src, stored, dst);
      std::fill(dst + stored, dst + count, dst[0]);
      return done;
    });
  }

  // ---- quantised matrices as bf16 ----

  void dequantise(const StoredFfn& ffn, const TensorRef& ref, const TensorRef& scale, std::int64_t index,
                  std::int64_t rows, std::int64_t cols, std::byte* dst) {
    const DType from = ffn.dtype;
    note_conversion(to_string(from), DType::kBF16, "dequantised (rounded once)");
    const bool per_channel = is_per_channel(ffn.format), per_tensor = ffn.format == StoredFormat::kE4M3Tensor;
    const std::int64_t blocks = per_channel ? rows : ceil_div(rows, kScaleBlock) * ceil_div(cols, kScaleBlock);
    add(ref, index * rows * cols, rows * cols, dst, rows * cols * 2, [=](const std::byte* src) {
      std::vector<float> scales(static_cast<std::size_t>(blocks));
      Done done = convert_scales(scale, scale.data() + index * blocks * size_bytes(scale.entry->dtype),
                                 per_tensor ? 1 : blocks, scales.data());
      if (!done.status.is_ok()) return done;
      if (per_tensor) std::fill(scales.begin(), scales.end(), scales[0]);
      auto* const out = reinterpret_cast<std::uint16_t*>(dst);
      done.num_nan += per_channel ? dequantise_channels(from, src, scales.data(), rows, cols, out)
                                  : dequantise_blocks(src, scales.data(), rows, cols, out);
      return done;
    });
  }

  // Rows of 32-column scaled formats; row n of the source becomes row target(n) of dst.
  void dequantise_rows(const StoredFfn& ffn, const TensorRef& ref, const TensorRef& scale, std::int64_t index,
                       std::int64_t rows, std::int64_t cols, std::byte* dst, GateUp order, std::int64_t intermediate) {
    const bool fp4 = ffn.format == StoredFormat::kMxfp4;
    note_conversion(ffn.text, DType::kBF16, "dequantised exactly");
    const std::int64_t row_bytes = fp4 ? cols / 2 : cols, row_scales = ceil_div(cols, 32);
    add(ref, index * rows * row_bytes, rows * row_bytes, dst, rows * cols * 2, [=](const std::byte* src) {
      Done done;
      const std::byte* scales = scale.data() + index * rows * row_scales;
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t target = intermediate == 0 ? r : w13_row(order, r, intermediate);
        auto* out = reinterpret_cast<std::uint16_t*>(dst) + target * cols;
        const Dequantised row = fp4 ? dequantise_mxfp4_row(src + r * row_bytes, scales + r * row_scales, cols, out)
                                    : dequantise_mx_row(src + r * row_bytes, scales + r * row_scales, cols, out);
        done.num_nan += row.num_nan;
        if (!row.exact) {
          done.status = {StatusCode::kBadData,
                         fmt::format("{}: row {} of expert {} has a product with its scale that bf16 cannot hold",
                                     ref.entry->name, r, index)};
        }
      }
      return done;
    });
  }

  // ---- the gated FFN ----

  // The experts of the slots; what the files hold as one tensor is taken whole and shown in part where that is enough.
  Status take_ffn(const StoredFfn& ffn, std::int64_t H, const std::vector<std::int64_t>& slots, FfnWeights& out) {
    const std::int64_t E = ffn.num_experts, L = std::ssize(slots), I = ffn.intermediate;
    const std::int64_t first = slots.empty() ? 0 : slots.front();
    const std::int64_t Ib = ceil_div(I, kScaleBlock), Hb = ceil_div(H, kScaleBlock);
    const bool per_channel = is_per_channel(ffn.format);
    const bool keep = is_kept(ffn.format) && options_.precision != Precision::kBF16;
    DType dtype = ffn.dtype == DType::kF16 ? DType::kF32 : ffn.dtype;
    if (ffn.format != StoredFormat::kPlain && !keep) dtype = DType::kBF16;
    if (ffn.dtype == DType::kF16) note_conversion("f16", DType::kF32);

    // Stored as wanted? f16 never is; e4m3 and int8 when they stay so.
    const bool as_stored = ffn.dtype == dtype && !ffn.transposed && are_neighbours(slots);
    const bool w13_view = as_stored && ffn.fused && ffn.order == GateUp::kGateFirst &&
                          take_view(ffn.gate[0], dtype, {E, 2 * I, H}, out.w13);
    const bool w2_view = as_stored && ffn.down.size() == 1 && take_view(ffn.down[0], dtype, {E, H, I}, out.w2);
    if (w13_view) out.w13 = out.w13.slice(first, L);
    if (w2_view) out.w2 = out.w2.slice(first, L);
    if (!w13_view) SLUICE_TRY(allocate(dtype, {L, 2 * I, H}, out.w13));
    if (!w2_view) SLUICE_TRY(allocate(dtype, {L, H, I}, out.w2));
    if (keep && per_channel) {
      SLUICE_TRY(allocate(DType::kF32, {L, 2 * I, 1}, out.w13_scale));
      SLUICE_TRY(allocate(DType::kF32, {L, H, 1}, out.w2_scale));
    } else if (keep) {
      SLUICE_TRY(allocate(DType::kF32, {L, 2 * Ib, Hb}, out.w13_scale));
      SLUICE_TRY(allocate(DType::kF32, {L, Hb, Ib}, out.w2_scale));
    }
    for (std::int64_t l = 0; l < L; ++l) {
      const std::int64_t e = slots[static_cast<std::size_t>(l)];
      first_ = e - l;
      if (!w13_view) ffn.fused ? fused_w13(ffn, e, H, out) : split_w13(ffn, e, H, out);
      if (!w2_view) take_w2(ffn, e, H, out);
      // Rows and columns of scales: of gate or up, then of down.
      if (keep && per_channel) expert_scales(ffn, e, {I, 1, H, 1}, out);
      if (keep && !per_channel) expert_scales(ffn, e, {Ib, Hb, Hb, Ib}, out);
    }
    return take_biases(ffn, H, out);
  }

  void split_w13(const StoredFfn& ffn, std::int64_t e, std::int64_t H, const FfnWeights& out) {
    const auto i = static_cast<std::size_t>(e);
    const std::int64_t I = ffn.intermediate;
    std::byte* gate = out.w13.row(e - first_);
    std::byte* up = gate + I * H * size_bytes(out.w13.dtype);
    for (const auto& [weights, scales, dst] :
         {std::tuple(&ffn.gate, &ffn.gate_scale, gate), std::tuple(&ffn.up, &ffn.up_scale, up)}) {
      const TensorRef& ref = (*weights)[i];
      if (ffn.format == StoredFormat::kE4M3Mx) {
        dequantise_rows(ffn, ref, (*scales)[i], 0, I, H, dst, GateUp::kGateFirst, 0);
      } else if (is_kept(ffn.format) && out.w13.dtype == DType::kBF16) {
        dequantise(ffn, ref, (*scales)[i], 0, I, H, dst);
      } else {
        copy(ref, 0, I * H, dst);
      }
    }
  }

  void fused_w13(const StoredFfn& ffn, std::int64_t e, std::int64_t H, const FfnWeights& out) {
    const std::int64_t I = ffn.intermediate, count = 2 * I * H;
    const TensorRef& ref = ffn.gate[0];
    std::byte* dst = out.w13.row(e - first_);
    const std::int64_t src_size = size_bytes(ffn.dtype), dst_size = size_bytes(out.w13.dtype);
    const GateUp order = ffn.order;
    const DType from = ffn.dtype;
    if (ffn.format == StoredFormat::kMxfp4 || ffn.format == StoredFormat::kE4M3Mx) {
      dequantise_rows(ffn, ref, ffn.gate_scale[0], e, 2 * I, H, dst, order, I);
    } else if (ffn.format == StoredFormat::kE4M3Block && out.w13.dtype == DType::kBF16) {
      // Whole halves: I is a multiple of the block here.
      for (std::int64_t half = 0; half < 2; ++half) {
        dequantise(ffn, ref, ffn.gate_scale[0], 2 * e + half, I, H, dst + w13_row(order, half * I, I) * H * dst_size);
      }
    } else if (ffn.transposed) {
      add(ref, e * count * src_size, count * src_size, dst, count * dst_size, [=](const std::byte* src) {
        return Done{transpose({from, H, 2 * I, order, I}, src, dst), Status::ok()};
      });
    } else if (order == GateUp::kInterleaved) {
      add(ref, e * count * src_size, count * src_size, dst, count * dst_size, [=](const std::byte* src) {
        Done done;
        for (std::int64_t n = 0; n < 2 * I; ++n) {
          std::byte* out_row = dst + w13_row(order, n, I) * H * dst_size;
          done.num_nan += from == DType::kF16
                              ? to_f32(from, src + n * H * src_size, H, reinterpret_cast<float*>(out_row))
                              : copy_elements(from, src + n * H * src_size, H, out_row);
        }
        return done;
      });
    } else {
      for (std::int64_t half = 0; half < 2; ++half) {
        copy(ref, e * count + half * I * H, I * H, dst + w13_row(order, half * I, I) * H * dst_size);
      }
    }
  }

  void take_w2(const StoredFfn& ffn, std::int64_t e, std::int64_t H, const FfnWeights& out) {
    const std::int64_t I = ffn.intermediate, count = H * I;
    const std::int64_t index = ffn.fused ? e : 0;
    const auto i = static_cast<std::size_t>(ffn.fused ? 0 : e);
    const TensorRef& ref = ffn.down[i];
    std::byte* dst = out.w2.row(e - first_);
    const DType from = ffn.dtype;
    if (ffn.format == StoredFormat::kMxfp4 || ffn.format == StoredFormat::kE4M3Mx) {
      dequantise_rows(ffn, ref, ffn.down_scale[i], index, H, I, dst, GateUp::kGateFirst, 0);
    } else if (is_kept(ffn.format) && out.w2.dtype == DType::kBF16) {
      dequantise(ffn, ref, ffn.down_scale[i], index, H, I, dst);
    } else if (ffn.transposed) {
      add(ref, e * count * size_bytes(from), count * size_bytes(from), dst, count * size_bytes(out.w2.dtype),
          [=](const std::byte* src) {
            return Done{transpose({from, I, H, GateUp::kGateFirst, 0}, src, dst), Status::ok()};
          });
    } else {
      copy(ref, index * count, count, dst);
    }
  }

  struct ScaleExtents {
    std::int64_t w13_rows, w13_cols, w2_rows, w2_cols;  // of one expert; w13_rows of its gate or its up
  };
  void expert_scales(const StoredFfn& ffn, std::int64_t e, const ScaleExtents& n, const FfnWeights& out) {
    const std::int64_t half_count = n.w13_rows * n.w13_cols, w2_count = n.w2_rows * n.w2_cols;
    float* w13 = out.w13_scale.as<float>() + (e - first_) * 2 * half_count;
    float* w2 = out.w2_scale.as<float>() + (e - first_) * w2_count;
    const auto i = static_cast<std::size_t>(ffn.fused ? 0 : e);
    if (ffn.fused) {
      for (std::int64_t half = 0; half < 2; ++half) {
        take_scales(ffn, ffn.gate_scale[0], (2 * e + half) * half_count, half_count,
                    w13 + w13_row(ffn.order, half * n.w13_rows, n.w13_rows) * n.w13_cols);
      }
    } else {
      take_scales(ffn, ffn.gate_scale[i], 0, half_count, w13);
      take_scales(ffn, ffn.up_scale[i], 0, half_count, w13 + half_count);
    }
    take_scales(ffn, ffn.down_scale[i], (ffn.fused ? e : 0) * w2_count, w2_count, w2);
  }

  Status take_biases(const StoredFfn& ffn, std::int64_t H, FfnWeights& out) {
    if (!ffn.gate_up_bias) return Status::ok();
    const std::int64_t L = ffn.num_experts, I = ffn.intermediate;
    SLUICE_TRY(allocate(DType::kF32, {L, 2 * I}, out.w13_bias));
    SLUICE_TRY(take_f32(ffn.down_bias, {L, H}, out.w2_bias));
    const DType from = ffn.gate_up_bias.entry->dtype;
    const GateUp order = ffn.order;
    float* dst = out.w13_bias.as<float>();
    add(ffn.gate_up_bias, 0, ffn.gate_up_bias.num_bytes(), out.w13_bias.as<std::byte>(), out.w13_bias.num_bytes(),
        [=](const std::byte* src) {
          std::vector<float> row(static_cast<std::size_t>(2 * I));
          Done done;
          for (std::int64_t e = 0; e < L; ++e) {
            done.num_nan += to_f32(from, src + e * 2 * I * size_bytes(from), 2 * I, row.data());
            for (std::int64_t n = 0; n < 2 * I; ++n)
              dst[e * 2 * I + w13_row(order, n, I)] = row[static_cast<std::size_t>(n)];
          }
          return done;
        });
    return Status::ok();
  }

  // ---- doing it ----

  struct Range {
    const std::byte* begin;
    std::int64_t bytes;
  };

  // The jobs' ranges must tile the destinations: no byte unfilled, none filled twice.
  Status check_ledger() const {
    std::vector<Range> claimed;
    for (const Job& job : jobs_) {
      if (job.dst_bytes > 0) claimed.push_back({job.dst, job.dst_bytes});
    }
    const auto by_address = [](const Range& a, const Range& b) { return a.begin < b.begin; };
    std::sort(claimed.begin(), claimed.end(), by_address);
    auto wanted = destinations_;
    std::sort(wanted.begin(), wanted.end(), by_address);
    std::size_t i = 0;
    for (const Range& destination : wanted) {
      const std::byte* at = destination.begin;
      const std::byte* end = destination.begin + destination.bytes;
      for (; i < claimed.size() && claimed[i].begin == at && at < end; ++i) at += claimed[i].bytes;
      if (at != end)
        return {StatusCode::kInternal, fmt::format("load: byte {} of a destination of {} is not filled exactly once",
                                                   at - destination.begin, destination.bytes)};
    }
    if (i != claimed.size()) return {StatusCode::kInternal, "load: a destination is filled twice"};
    return Status::ok();
  }

  Status run() {
    std::int64_t total = 0, finished = 0;
    for (const Job& job : jobs_) total += job.src_bytes;
    std::vector<Done> results(jobs_.size());
    std::mutex mutex;
    bool stopped = false;
    const int threads = std::min(Machine::detect_cpu().num_threads, kMaxLoadThreads);
    cpu::parallel_for(static_cast<std::int64_t>(jobs_.size()), threads, [&](std::int64_t index, int) {
      const Job& job = jobs_[static_cast<std::size_t>(index)];
      Done& done = results[static_cast<std::size_t>(index)];
      if (options_.stop) {
        const std::lock_guard<std::mutex> lock(mutex);
        stopped = stopped || options_.stop();
        if (stopped) return;
      }
      try {
        done = job.run(job.source.data() + job.src_begin);
      } catch (const std::exception& e) {  // an allocation inside a job
        done.status = {StatusCode::kInternal, fmt::format("load: {}: {}", job.source.entry->name, e.what())};
      }
      if (job.dst_bytes > 0) job.source.file->drop(*job.source.entry, job.src_begin, job.src_begin + job.src_bytes);
      if (options_.progress) {
        const std::lock_guard<std::mutex> lock(mutex);
        finished += job.src_bytes;
        options_.progress(finished, total);
      }
    });
    if (stopped) return {StatusCode::kIoError, "load: stopped when asked to"};
    // Per tensor, in the order of the jobs: what is reported does not depend on the threads.
    std::vector<std::pair<const TensorEntry*, std::int64_t>> nan;
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      if (!results[i].status.is_ok()) return results[i].status;
      if (results[i].num_nan == 0) continue;
      loaded_.num_nan += results[i].num_nan;
      const auto same = [&](const auto& p) { return p.first == jobs_[i].source.entry; };
      const auto it = std::find_if(nan.begin(), nan.end(), same);
      if (it != nan.end()) {
        it->second += results[i].num_nan;
      } else {
        nan.emplace_back(jobs_[i].source.entry, results[i].num_nan);
      }
    }
    constexpr std::size_t kMaxNamed = 8;
    for (std::size_t i = 0; i < nan.size() && i < kMaxNamed; ++i) {
      loaded_.nan_tensors.push_back(fmt::format("{}: {} NaN", nan[i].first->name, nan[i].second));
    }
    if (nan.size() > kMaxNamed)
      loaded_.nan_tensors.push_back(fmt::format("and {} more tensors", nan.size() - kMaxNamed));
    return Status::ok();
  }

  const LayerFiles& files_;
  const LoadOptions& options_;
  std::int64_t first_ = 0;  // the expert that is being taken, less its slot
  bool poison_;
  LoadedLayer loaded_;
  std::vector<Job> jobs_;
  std::vector<Range> destinations_;
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
