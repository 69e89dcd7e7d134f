#include "random.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "cpu/parallel.h"

namespace sluice::cli {

namespace {

std::uint64_t mix(std::uint64_t z) {  // the finaliser of SplitMix64
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

double unit(std::uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Anonymous pages, zero until touched; unmapped with the last owner.
Result<std::shared_ptr<void>> map_pages(std::int64_t bytes) {
  const std::size_t size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return Status(StatusCode::kIoError,
                  fmt::format("cannot map {} bytes for weights: {}", bytes, std::strerror(errno)));
  }
  madvise(data, size, MADV_HUGEPAGE);
  return std::shared_ptr<void>(data, [size](void* p) { munmap(p, size); });
}

class Maker {
 public:
  Maker(LayerWeights& weights, Fill fill, std::uint64_t seed, int num_threads)
      : weights_(weights), fill_(fill), seed_(seed), num_threads_(num_threads) {}

  // `scale`: deviation of the values (uniform), or for e4m3 of the stored numbers times the block scales below.
  Status tensor(TensorView& view, DType dtype, std::initializer_list<std::int64_t> shape, double scale) {
    view = TensorView::dense(nullptr, dtype, shape);
    Result<std::shared_ptr<void>> pages = map_pages(view.num_bytes());
    if (!pages) return pages.status();
    view.data = pages->get();
    weights_.owners.push_back(*pages);
    seed_ = mix(seed_);
    if (fill_ == Fill::kRandom) fill_random(view, scale);
    return {};
  }
  // Scales are small: they are filled even when nothing else is, because creation reads them.
  Status scales(TensorView& view, std::initializer_list<std::int64_t> shape, double around) {
    view = TensorView::dense(nullptr, DType::kF32, shape);
    Result<std::shared_ptr<void>> pages = map_pages(view.num_bytes());
    if (!pages) return pages.status();
    view.data = pages->get();
    weights_.owners.push_back(*pages);
    seed_ = mix(seed_);
    for (std::int64_t i = 0; i < view.num_elements(); ++i) {
      view.as<float>()[i] =
          static_cast<float>(around * (0.75 + 0.5 * unit(mix(seed_ + static_cast<std::uint64_t>(i)))));
    }
    return {};
  }
  // [n,k] matrices whose products with unit inputs stay near 1. Random e4m3 bytes below have a deviation near 1.
  Status matrix(TensorView& w, TensorView& w_scale, const WeightForm& form, std::int64_t l, std::int64_t n,
                std::int64_t k, std::int64_t scale_rows) {
    const double deviation = 1 / std::sqrt(static_cast<double>(k));
    SLUICE_TRY(tensor(w, form.dtype, {l, n, k}, deviation));
    if (!is_quantised(form.dtype)) return {};
    constexpr double kInt8Deviation = 73.6;  // of random bytes
    if (form.row_scales)
      return scales(w_scale, {l, n, 1}, form.dtype == DType::kI8 ? deviation / kInt8Deviation : deviation);
    return scales(w_scale, {l, scale_rows, ceil_div(k, kScaleBlock)}, deviation);
  }

 private:
  void fill_random(const TensorView& view, double scale) const {
    const std::uint64_t seed = seed_;
    auto* bytes = static_cast<unsigned char*>(view.data);
    const std::int64_t elements = view.num_elements();
    constexpr std::int64_t kGrain = std::int64_t{1} << 18;
    const double width = scale * std::sqrt(3.0);  // of a uniform distribution with that deviation
    cpu::parallel_ranges(elements, kGrain, num_threads_, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; i += 8) {
        // One mix gives eight bytes of e4m3, or is used as the start of a cheap sequence for wider types.
        std::uint64_t z = mix(seed ^ static_cast<std::uint64_t>(i));
        for (std::int64_t j = i; j < std::min(i + 8, end); ++j) {
          if (view.dtype == DType::kE4M3) {
            // Sign and 3 mantissa bits random, exponent 4..7: magnitudes 0.125 to 1.875, like scaled-down normals.
            bytes[j] = static_cast<unsigned char>((z & 0x87) | ((4 + (z >> 3 & 3)) << 3));
            z >>= 8;
            continue;
          }
          if (view.dtype == DType::kI8) {
            bytes[j] = static_cast<unsigned char>(z & 0xFF);
            z >>= 8;
            continue;
          }
          const double u = static_cast<double>(static_cast<std::int64_t>(z & 0xFFFF) - 0x8000 + 0.5) / 0x8000;
          const float value = static_cast<float>(u * width);
          if (view.dtype == DType::kBF16) {
            const std::uint16_t half = to_bf16(value);
            std::memcpy(bytes + 2 * j, &half, 2);
          } else {
            std::memcpy(bytes + 4 * j, &value, 4);
          }
          z = z * 6364136223846793005u + 1442695040888963407u;
          z ^= z >> 29;
        }
      }
    });
  }

  LayerWeights& weights_;
  Fill fill_;
  std::uint64_t seed_;
  int num_threads_;
};

}  // namespace

std::vector<std::byte> random_normal_bf16(std::int64_t count, double deviation, std::uint64_t seed) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(2 * count));
  constexpr double kTwoPi = 6.283185307179586;
  for (std::int64_t i = 0; i < count; ++i) {  // Box-Muller
    const double u = unit(mix(mix(seed) + 2 * static_cast<std::uint64_t>(i)));
    const double v = unit(mix(mix(seed) + 2 * static_cast<std::uint64_t>(i) + 1));
    const std::uint16_t half =
        to_bf16(static_cast<float>(deviation * std::sqrt(-2 * std::log(u)) * std::cos(kTwoPi * v)));
    std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

std::int64_t weights_bytes(const MoeConfig& c, DType experts, DType shared) {
  const std::int64_t gate = c.num_experts * c.hidden * 2;
  return 3 * c.hidden *
             (num_local(c) * c.intermediate * size_bytes(experts) + c.shared_intermediate * size_bytes(shared)) +
         gate;
}

Result<LayerWeights> make_weights(const MoeConfig& c, WeightForm experts, WeightForm shared, Fill fill,
                                  std::uint64_t seed, int num_threads) {
  LayerWeights w;
  Maker maker(w, fill, seed, num_threads);
  const std::int64_t H = c.hidden, E = c.num_experts;
  SLUICE_TRY(maker.tensor(w.w_gate, DType::kBF16, {E, H}, 1 / std::sqrt(static_cast<double>(H))));
  if (c.gate.has_router_bias) SLUICE_TRY(maker.tensor(w.router_bias, DType::kF32, {E}, 0.1));
  if (c.gate.has_score_bias) SLUICE_TRY(maker.tensor(w.score_bias, DType::kF32, {E}, 0.01));
  const auto ffn = [&](FfnWeights& f, const WeightForm& form, std::int64_t L, std::int64_t I) -> Status {
    const std::int64_t Ib = ceil_div(I, kScaleBlock), Hb = ceil_div(H, kScaleBlock);
    SLUICE_TRY(maker.matrix(f.w13, f.w13_scale, form, L, 2 * I, H, 2 * Ib));
    SLUICE_TRY(maker.matrix(f.w2, f.w2_scale, form, L, H, I, Hb));
    if (c.activation.kind != ActivationKind::kGptOss) return {};
    SLUICE_TRY(maker.tensor(f.w13_bias, DType::kF32, {L, 2 * I}, 0.1));
    return maker.tensor(f.w2_bias, DType::kF32, {L, H}, 0.1);
  };
  SLUICE_TRY(ffn(w.experts, experts, num_local(c), c.intermediate));
  if (c.shared_intermediate > 0) SLUICE_TRY(ffn(w.shared, shared, 1, c.shared_intermediate));
  if (c.has_shared_gate)
    SLUICE_TRY(maker.tensor(w.shared_gate, DType::kBF16, {1, H}, 1 / std::sqrt(static_cast<double>(H))));
  return w;
}

std::vector<std::int32_t> random_ids(Route route, std::int64_t num_tokens, std::int64_t top_k, std::int64_t num_experts,
                                     std::uint64_t seed) {
  std::vector<double> cumulative(static_cast<std::size_t>(num_experts));
  double total = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    total += route == Route::kZipf ? 1.0 / static_cast<double>(e + 1) : 1.0;
    cumulative[static_cast<std::size_t>(e)] = total;
  }
  std::vector<std::int32_t> ids(static_cast<std::size_t>(num_tokens * top_k));
  std::uint64_t state = mix(seed);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    std::int32_t* row = ids.data() + t * top_k;
    std::int64_t filled = 0;
    if (route == Route::kOneExpert) row[filled++] = 0;
    while (filled < top_k) {
      const double u = unit(mix(state++)) * total;
      const auto id =
          static_cast<std::int32_t>(std::upper_bound(cumulative.begin(), cumulative.end() - 1, u) - cumulative.begin());
      if (std::find(row, row + filled, id) == row + filled) row[filled++] = id;
    }
  }
  return ids;
}

}  // namespace sluice::cli
