// Times pack, swiglu_quant and combine on a GPU against the bytes they must move, each checked first.
//   gpu_stages [part of a name] [--json]     a table, or JSON lines
// Bytes count every tensor once, read or written. Sizes are DeepSeek-V3's: H = 7168, I = 2048, S = 8.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "device_data.h"
#include "sluice/stage/combine.h"
#include "sluice/stage/pack.h"
#include "sluice/stage/swiglu_quant.h"

namespace sluice::bench {
namespace {

constexpr Device kGpu{DeviceKind::kCuda, 0};
constexpr std::int64_t kHidden = 7168, kIntermediate = 2048, kExperts = 256, kSlots = 8;
constexpr std::int64_t kBlocks = kHidden / 128, kActBlocks = kIntermediate / 128;
constexpr double kRotatedBytes = 130e6;  // twice the L2

struct Options {
  std::string only;
  bool json = false;
};

// Near normal bf16, standard deviation 1.2: a chunk made here, repeated over the buffer from another place each time.
void fill_normal(const DeviceBuffer& to, std::int64_t count) {
  static const std::vector<std::uint16_t> chunk = [] {
    std::vector<std::uint16_t> values((1 << 22) + 12347);
    std::uint64_t state = 5;
    for (std::uint16_t& v : values) {
      const std::uint64_t bits = next_random(state);
      float sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<float>((bits >> (16 * i)) & 0xFFFF) / 32768.0f - 1.0f;
      std::uint32_t word = 0;
      std::memcpy(&word, &sum, sizeof(word));
      v = static_cast<std::uint16_t>(word >> 16);
    }
    return values;
  }();
  const auto size = static_cast<std::int64_t>(chunk.size());
  for (std::int64_t at = 0; at < count; at += size) {
    must(cudaMemcpy(to.as<std::uint16_t>() + at, chunk.data(), static_cast<std::size_t>(std::min(size, count - at) * 2),
                    cudaMemcpyHostToDevice),
         "fill");
  }
}

template <class T>
std::vector<T> download(const void* from, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  must(cudaMemcpy(host.data(), from, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return host;
}

// The plan of tokens whose slots go to distinct experts at random.
struct Plan {
  std::vector<std::int32_t> row_token, slot_row;
  explicit Plan(std::int64_t tokens)
      : row_token(static_cast<std::size_t>(tokens * kSlots)), slot_row(row_token.size()) {
    std::vector<std::vector<std::int32_t>> of_expert(kExperts);
    std::uint64_t state = 17;
    for (std::int64_t i = 0; i < tokens * kSlots; ++i) {
      const auto expert =
          (next_random(state) >> 33) % (kExperts / kSlots) * kSlots + static_cast<std::uint64_t>(i % kSlots);
      of_expert[expert].push_back(static_cast<std::int32_t>(i));
    }
    std::int32_t row = 0;
    for (const auto& slots : of_expert) {
      for (const std::int32_t slot : slots) {
        row_token[static_cast<std::size_t>(row)] = slot / static_cast<std::int32_t>(kSlots);
        slot_row[static_cast<std::size_t>(slot)] = row++;
      }
    }
  }
};

struct Reported {
  const char* bench;
  std::string what;
  std::int64_t tokens;
  double bytes;
};

template <class Args>
Timing time_stage(std::span<const Impl<Args>> table, const std::vector<Args>& variants, double expected_us) {
  const Impl<Args>& impl = table.front();
  Machine machine;
  machine.device = kGpu;
  const std::int64_t scratch = impl.scratch_bytes == nullptr ? 0 : impl.scratch_bytes(variants[0], machine);
  const DeviceBuffer memory(scratch + 256);
  return time_graph(static_cast<int>(variants.size()), expected_us, [&](cudaStream_t stream, int v) {
    const Ctx ctx{stream, {memory.as<std::byte>(), static_cast<std::size_t>(scratch)}, 1};
    return impl.run(variants[static_cast<std::size_t>(v)], ctx).is_ok();
  });
}

double g_copy_bytes_per_us = 0;

void print(const Options& options, const Reported& r, const Timing& timing, bool right) {
  if (options.json) {
    std::printf("{\"bench\":\"%s\",\"what\":\"%s\",\"impl\":\"cuda\",\"shape\":\"dsv3\",\"tokens\":%lld,\"right\":%s",
                r.bench, r.what.c_str(), static_cast<long long>(r.tokens), right ? "true" : "false");
    if (timing.error.empty() && right) std::printf(",\"us\":%.3f,\"bytes\":%.0f", timing.median_us, r.bytes);
    std::printf(",\"copy_bytes_per_us\":%.0f}\n", g_copy_bytes_per_us);
    return;
  }
  std::printf("%-38s T=%-5lld %9.2f us %8.1f MB  %3.0f %% of 4.5 TB/s, %3.0f %% of a copy  %s%s\n",
              (std::string(r.bench) + ": " + r.what).c_str(), static_cast<long long>(r.tokens), timing.median_us,
              r.bytes / 1e6, 100 * r.bytes / timing.median_us / kStreamBytesPerUs,
              100 * r.bytes / timing.median_us / g_copy_bytes_per_us, right ? "right" : "WRONG", timing.error.c_str());
}

std::int64_t variants_for(double bytes) {
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::ceil(kRotatedBytes / bytes)), 1, 24);
}

// ---------------------------------------------------------------------------------------------------------

// 0: e4m3 by blocks, 1: e4m3 a row, 2: i8.
constexpr const char* kKinds[] = {"e4m3, a scale for 128 columns", "e4m3, a scale a row", "i8, a scale a row"};

void bench_pack(const Options& options, std::int64_t tokens, int kind) {
  const Plan plan(tokens);
  const std::int64_t rows = tokens * kSlots, scales = kind == 0 ? kBlocks : 1;
  const DType dtype = kind == 2 ? DType::kI8 : DType::kE4M3;
  const double bytes = static_cast<double>(tokens) * kHidden * 2 + static_cast<double>(rows) * (kHidden + scales * 4);
  const DeviceBuffer row_token = upload(plan.row_token), slot_row = upload(plan.slot_row);
  std::vector<DeviceBuffer> memory;
  std::vector<pack::Args> variants;
  for (std::int64_t v = 0; v < variants_for(bytes); ++v) {
    memory.emplace_back(tokens * kHidden * 2);
    fill_normal(memory.back(), tokens * kHidden);
    pack::Args a;
    a.x = TensorView::dense(memory.back().as<void>(), DType::kBF16, {tokens, kHidden}, kGpu);
    a.row_token = TensorView::dense(row_token.as<void>(), DType::kI32, {rows}, kGpu);
    a.slot_row = TensorView::dense(slot_row.as<void>(), DType::kI32, {tokens, kSlots}, kGpu);
    memory.emplace_back(rows * kHidden);
    a.rows = TensorView::dense(memory.back().as<void>(), dtype, {rows, kHidden}, kGpu);
    memory.emplace_back(rows * scales * 4);
    a.rows_scale = TensorView::dense(memory.back().as<void>(), DType::kF32, {scales, rows}, kGpu);
    variants.push_back(a);
  }
  const Timing timing = time_stage(pack::impls(), variants, bytes / kStreamBytesPerUs);
  // Some rows all over, against the reference of their tokens.
  bool right = true;
  const pack::Args& d = variants[0];
  const auto scale = download<float>(d.rows_scale.data, scales * rows);
  for (std::int64_t r = 0; r < rows; r += std::max<std::int64_t>(rows / 97, 1)) {
    const std::int64_t t = plan.row_token[static_cast<std::size_t>(r)];
    auto x = download<std::uint16_t>(d.x.row(t), kHidden);
    const auto got = download<std::uint8_t>(d.rows.row(r), kHidden);
    std::vector<std::uint8_t> want(kHidden);
    std::vector<float> want_scale(static_cast<std::size_t>(scales));
    pack::Args a;
    a.x = TensorView::dense(x.data(), DType::kBF16, {1, kHidden});
    a.rows = TensorView::dense(want.data(), dtype, {1, kHidden});
    a.rows_scale = TensorView::dense(want_scale.data(), DType::kF32, {scales, 1});
    right = right && pack::impls().back().run(a, {}).is_ok() && got == want;
    for (std::int64_t b = 0; b < scales; ++b)
      right = right && scale[static_cast<std::size_t>(b * rows + r)] == want_scale[static_cast<std::size_t>(b)];
  }
  print(options, {"pack", kKinds[kind], tokens, bytes}, timing, right);
}

void bench_swiglu(const Options& options, std::int64_t tokens, int kind, bool offsets) {
  const std::int64_t rows = tokens * kSlots, scales = kind == 0 ? kActBlocks : 1;
  const DType dtype = kind == 2 ? DType::kI8 : DType::kE4M3;
  const double bytes = static_cast<double>(rows) * (kIntermediate * 5.0 + static_cast<double>(scales) * 4);
  const std::vector<std::int32_t> offset = {0, static_cast<std::int32_t>(rows / 3), static_cast<std::int32_t>(rows)};
  const DeviceBuffer expert_offset = upload(offset);
  std::vector<DeviceBuffer> memory;
  std::vector<swiglu_quant::Args> variants;
  for (std::int64_t v = 0; v < variants_for(bytes); ++v) {
    swiglu_quant::Args a;
    memory.emplace_back(rows * kIntermediate * 4);
    fill_normal(memory.back(), rows * kIntermediate * 2);
    a.h = TensorView::dense(memory.back().as<void>(), DType::kBF16, {rows, 2 * kIntermediate}, kGpu);
    a.groups = offsets ? RowGroups::contiguous({TensorView::dense(expert_offset.as<void>(), DType::kI32, {3}, kGpu)})
                       : RowGroups::whole();
    memory.emplace_back(rows * kIntermediate);
    a.a = TensorView::dense(memory.back().as<void>(), dtype, {rows, kIntermediate}, kGpu);
    memory.emplace_back(rows * scales * 4);
    a.a_scale = TensorView::dense(memory.back().as<void>(), DType::kF32, {scales, rows}, kGpu);
    variants.push_back(a);
  }
  const Timing timing = time_stage(swiglu_quant::impls(), variants, bytes / kStreamBytesPerUs);
  bool right = true;
  const swiglu_quant::Args& d = variants[0];
  const auto scale = download<float>(d.a_scale.data, scales * rows);
  for (std::int64_t r = 0; r < rows; r += std::max<std::int64_t>(rows / 97, 1)) {
    auto h = download<std::uint16_t>(d.h.row(r), 2 * kIntermediate);
    const auto got = download<std::uint8_t>(d.a.row(r), kIntermediate);
    std::vector<std::uint8_t> want(kIntermediate);
    std::vector<float> want_scale(static_cast<std::size_t>(scales));
    swiglu_quant::Args a;
    a.h = TensorView::dense(h.data(), DType::kBF16, {1, 2 * kIntermediate});
    a.groups = RowGroups::whole();
    a.a = TensorView::dense(want.data(), dtype, {1, kIntermediate});
    a.a_scale = TensorView::dense(want_scale.data(), DType::kF32, {scales, 1});
    right = right && swiglu_quant::impls().back().run(a, {}).is_ok() && got == want;
    for (std::int64_t b = 0; b < scales; ++b)
      right = right && scale[static_cast<std::size_t>(b * rows + r)] == want_scale[static_cast<std::size_t>(b)];
  }
  print(options, {"swiglu_quant", kKinds[kind], tokens, bytes}, timing, right);
}

void bench_combine(const Options& options, std::int64_t tokens) {
  const Plan plan(tokens);
  const std::int64_t rows = tokens * kSlots;
  const double bytes = static_cast<double>(rows + tokens) * kHidden * 2 + static_cast<double>(rows) * 8;
  const DeviceBuffer slot_row = upload(plan.slot_row);
  std::vector<float> weight(static_cast<std::size_t>(rows));
  std::uint64_t state = 3;
  for (float& w : weight) w = static_cast<float>(next_random(state) >> 40) / 16777216.0f;
  const DeviceBuffer topk_weight = upload(weight);
  std::vector<DeviceBuffer> memory;
  std::vector<combine::Args> variants;
  for (std::int64_t v = 0; v < variants_for(bytes); ++v) {
    combine::Args a;
    memory.emplace_back(rows * kHidden * 2);
    fill_normal(memory.back(), rows * kHidden);
    a.y = TensorView::dense(memory.back().as<void>(), DType::kBF16, {rows, kHidden}, kGpu);
    a.slot_row = TensorView::dense(slot_row.as<void>(), DType::kI32, {tokens, kSlots}, kGpu);
    a.topk_weight = TensorView::dense(topk_weight.as<void>(), DType::kF32, {tokens, kSlots}, kGpu);
    memory.emplace_back(tokens * kHidden * 2);
    a.out = TensorView::dense(memory.back().as<void>(), DType::kBF16, {tokens, kHidden}, kGpu);
    variants.push_back(a);
  }
  const Timing timing = time_stage(combine::impls(), variants, bytes / kStreamBytesPerUs);
  bool right = true;
  for (std::int64_t t = 0; t < tokens; t += std::max<std::int64_t>(tokens / 23, 1)) {
    std::vector<std::uint16_t> y;
    std::vector<std::int32_t> slots(kSlots);
    for (std::int64_t s = 0; s < kSlots; ++s) {
      const auto row =
          download<std::uint16_t>(variants[0].y.row(plan.slot_row[static_cast<std::size_t>(t * kSlots + s)]), kHidden);
      y.insert(y.end(), row.begin(), row.end());
    }
    std::iota(slots.begin(), slots.end(), 0);
    std::vector<std::uint16_t> want(kHidden);
    combine::Args a;
    a.y = TensorView::dense(y.data(), DType::kBF16, {kSlots, kHidden});
    a.slot_row = TensorView::dense(slots.data(), DType::kI32, {1, kSlots});
    a.topk_weight = TensorView::dense(weight.data() + t * kSlots, DType::kF32, {1, kSlots});
    a.out = TensorView::dense(want.data(), DType::kBF16, {1, kHidden});
    right = right && combine::impls().back().run(a, {}).is_ok() &&
            download<std::uint16_t>(variants[0].out.row(t), kHidden) == want;
  }
  print(options, {"combine", "bf16", tokens, bytes}, timing, right);
}

void bench_copy() {
  constexpr std::int64_t kBytes = std::int64_t{1} << 29;
  const DeviceBuffer from(kBytes), to(kBytes);
  const Timing timing = time_graph(1, 2 * kBytes / kStreamBytesPerUs, [&](cudaStream_t stream, int) {
    return cudaMemcpyAsync(to.as<void>(), from.as<void>(), kBytes, cudaMemcpyDeviceToDevice, stream) == cudaSuccess;
  });
  if (timing.median_us > 0) g_copy_bytes_per_us = 2.0 * kBytes / timing.median_us;
}

int run(const Options& options) {
  bench_copy();
  if (!options.json) std::printf("copy: %.2f TB/s read and written\n", g_copy_bytes_per_us / 1e6);
  const auto wanted = [&](const char* name) { return std::string(name).find(options.only) != std::string::npos; };
  for (const std::int64_t tokens : {std::int64_t{8192}, std::int64_t{128}, std::int64_t{1}}) {
    for (int kind = 0; kind < 3; ++kind) {
      if (wanted("pack")) bench_pack(options, tokens, kind);
      if (wanted("swiglu_quant")) bench_swiglu(options, tokens, kind, true);
    }
    if (wanted("combine")) bench_combine(options, tokens);
  }
  return 0;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) {
  sluice::bench::Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      options.json = true;
    } else {
      options.only = argv[i];
    }
  }
  return sluice::bench::run(options);
}
