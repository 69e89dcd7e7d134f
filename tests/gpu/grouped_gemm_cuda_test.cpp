// The grouped GEMM on the GPU. Plain fmas: the specified bits, for every dtype. Tensor cores: exact where inputs are small
// integers, inside the derived bound otherwise, and one row's bits whatever the tile, the batch or the run.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "gpu/device_mirror.h"
#include "grouped_gemm/cuda.h"
#include "grouped_gemm/problem.h"

namespace sluice::test {
namespace {

using grouped_gemm::GpuTile;

class GroupedGemmCuda : public GpuTest {};

Machine hopper() {
  Machine machine;
  machine.device = {DeviceKind::kCuda, 0};
  machine.gpu.capability = {9, 0};
  return machine;
}

// A problem on the device; run() may be called again and again.
class OnDevice {
 public:
  explicit OnDevice(const Problem& p, bool aligned)
      : problem_(p),
        a_(aligned ? aligned_copy(p.args.a) : p.a.clone()),
        w_(aligned ? aligned_copy(p.args.w) : p.w.clone()) {
    args_ = p.args;
    args_.a = a_.view();
    args_.w = w_.view();
    for (TensorView* view : {&args_.a, &args_.w, &args_.a_scale, &args_.w_scale, &args_.bias, &args_.groups.counts,
                             &args_.groups.expert_offset.view}) {
      inputs_.add(*view);
    }
  }

  template <class Run>
  Buffer run(const Run& call, bool aligned_out = true) {
    Buffer out = aligned_out ? Buffer(problem_.spec.out, {problem_.num_rows, problem_.spec.n},
                                      {.row_pitch_elems = ceil_div(problem_.spec.n, 8) * 8 + 8})
                             : problem_.make_out();
    DeviceMirror mirror;
    grouped_gemm::Args args = args_;
    args.out = out.view();
    mirror.add(args.out);
    const Status legal = grouped_gemm::check(args);
    EXPECT_TRUE(legal.is_ok()) << legal.message();
    const Status ran = call(args);
    EXPECT_TRUE(ran.is_ok()) << ran.message();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(out.view().data, args.out.data, span_bytes(out.view()), cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_TRUE(out.guards_intact());
    EXPECT_TRUE(mirror.equals_host()) << "outside the tensor";
    EXPECT_TRUE(inputs_.equals_host()) << "an input changed";
    for (std::int64_t r = 0; r < problem_.num_rows; ++r) {
      if (problem_.is_owned(r)) continue;
      EXPECT_TRUE(is_poison(out.view().slice(r, 1))) << "row " << r << " belongs to nobody";
    }
    return out;
  }
  Buffer run_simt() {
    return run([](const grouped_gemm::Args& args) { return grouped_gemm::run_simt(args, {}); }, false);
  }
  Buffer run_tile(GpuTile tile) {
    return run([&](const grouped_gemm::Args& args) {
      return grouped_gemm::run_wgmma_tile(args, {}, grouped_gemm::with_stages(tile, grouped_gemm::problem_of(args)));
    });
  }
  // As the table would take it.
  Buffer run_chosen() {
    return run([](const grouped_gemm::Args& args) {
      const Status able = grouped_gemm::can_run_wgmma(args, hopper());
      return able.is_ok() ? grouped_gemm::run_wgmma(args, {}) : able;
    });
  }

 private:
  const Problem& problem_;
  Buffer a_, w_;
  grouped_gemm::Args args_;
  DeviceMirror inputs_;
};

std::vector<GpuTile> tiles() {
  std::vector<GpuTile> all;
  for (std::int64_t tokens : {8, 16, 32, 64, 96}) {
    for (std::int64_t weight_rows : {128, 256}) all.push_back({false, tokens, weight_rows});
  }
  all.push_back({true, 128, 256});
  return all;
}

struct Kind {
  DType dtype;
  bool row_scales;
};
constexpr Kind kKinds[] = {{DType::kE4M3, false}, {DType::kE4M3, true}, {DType::kI8, true}, {DType::kBF16, false}};

Spec spec_of(const Kind& kind, std::vector<std::int64_t> counts, std::int64_t n, std::int64_t k) {
  Spec s;
  s.counts = std::move(counts);
  s.n = n;
  s.k = k;
  s.a = s.w = kind.dtype;
  s.out = DType::kBF16;
  s.row_scales = kind.row_scales;
  return s;
}

// 4 instructions a block of 128, 33 addends each, cut 13 bits below the largest (docs/numerics.md, "On tensor cores").
constexpr double kE4m3SumEps = 4 * 33 * 0x1p-13;

void expect_within_bound(const Problem& p, const Buffer& got, const std::string& what) {
  const Spec& s = p.spec;
  const bool rows = has_row_scales(s);
  const std::vector<double> a = p.a.to_doubles();
  const std::vector<double> w = p.w.to_doubles();
  const std::vector<double> as = p.a_scale ? to_doubles(p.args.a_scale) : std::vector<double>{};
  const std::vector<double> ws = is_scaled(s.w) ? to_doubles(p.args.w_scale) : std::vector<double>{};
  const std::int64_t part = s.part_rows > 0 ? s.part_rows : s.n;
  const auto at = [](const std::vector<double>& v, std::int64_t i) { return v[static_cast<std::size_t>(i)]; };
  for (std::int64_t e = 0; e < p.experts(); ++e) {
    const auto [first, end] = p.rows_of_expert(e);
    if (first == end) continue;
    std::vector<double> ar, wr;
    for (std::int64_t r = first; r < end; ++r) {
      for (std::int64_t k = 0; k < s.k; ++k) {
        const double scale = as.empty() ? 1.0 : at(as, (rows ? 0 : k / 128) * p.num_rows + r);
        ar.push_back(at(a, r * s.k + k) * scale);
      }
    }
    for (std::int64_t n = 0; n < s.n; ++n) {
      for (std::int64_t k = 0; k < s.k; ++k) {
        const std::int64_t row = rows ? n : n / part * ceil128(part) + n % part / 128;
        const double scale =
            ws.empty() ? 1.0 : at(ws, (e * p.scale_rows() + row) * p.scale_cols() + (rows ? 0 : k / 128));
        wr.push_back(at(w, (e * s.n + n) * s.k + k) * scale);
      }
    }
    Product product = exact_product(ar, wr, end - first, s.n, s.k);
    for (std::int64_t i = 0; i < (end - first) * s.n; ++i) {
      if (!s.bias) break;
      const double b = p.bias.at(e * s.n + i % s.n);
      product.value[static_cast<std::size_t>(i)] += b;
      product.magnitude[static_cast<std::size_t>(i)] += std::abs(b);
    }
    Bounds bounds = gemm_bounds(product.value, product.magnitude, s.n, s.k, s.out);
    if (s.a == DType::kE4M3) {
      for (std::int64_t r = 0; r < end - first; ++r) {
        double squares = 0.0;
        for (std::int64_t n = 0; n < s.n; ++n) {
          const double more = kE4m3SumEps * at(product.magnitude, r * s.n + n);
          bounds.max_abs[static_cast<std::size_t>(r * s.n + n)] += more;
          squares += more * more;
        }
        bounds.l2[static_cast<std::size_t>(r)] += std::sqrt(squares);
      }
    }
    EXPECT_TRUE(rows_within(got.view().slice(first, end - first), product.value, bounds)) << what << ", expert " << e;
  }
}

TEST_F(GroupedGemmCuda, PlainFmasHaveTheSpecifiedBits) {
  int cases = 0;
  for (DType a : {DType::kE4M3, DType::kI8, DType::kBF16, DType::kF32}) {
    for (DType w : {DType::kE4M3, DType::kI8, DType::kBF16, DType::kF32}) {
      if (a == DType::kI8 && w != DType::kI8) continue;
      for (DType out : kOutputs) {
        for (int variant = 0; variant < 6; ++variant) {
          Spec s = spec_of({w, variant % 2 == 1}, {3, 0, 17, 1}, variant < 3 ? 70 : 2 * 65, variant == 2 ? 5 : 259);
          s.a = a;
          s.out = out;
          s.row_scales = variant % 2 == 1 && is_scaled(w) && (!is_scaled(a) || a == w);
          if (is_scaled(a) && is_scaled(w) && a != w) continue;
          s.part_rows = variant < 3 ? 0 : 65;
          s.bias = variant >= 2;
          s.rows_per_group = variant == 4 ? 18 : 0;
          s.scale_by_row = variant == 5;
          s.fill = variant == 1 ? Fill::kBits : Fill::kReal;
          s.seed = static_cast<std::uint64_t>(variant) + 11;
          const Problem p(s);
          grouped_gemm::Args legal = p.args;
          const Buffer out_shape = p.make_out();
          legal.out = out_shape.view();
          if (!grouped_gemm::check(legal).is_ok()) continue;
          ++cases;
          OnDevice device(p, false);
          EXPECT_TRUE(same_bits(device.run_simt().view(), p.oracle().view()))
              << to_string(a) << " x " << to_string(w) << " -> " << to_string(out) << ", variant " << variant;
        }
      }
    }
  }
  EXPECT_GE(cases, 100);
}

// Every tile, and sizes that leave tails in each direction: rows, columns, both parts of stacked matrices, K.
TEST_F(GroupedGemmCuda, TensorCoresAreExactOnIntegers) {
  for (const Kind& kind : kKinds) {
    for (int variant = 0; variant < 5; ++variant) {
      Spec s = spec_of(kind, {3, 0, 130, 1, 7, 8, 9}, variant % 2 == 0 ? 2 * 136 : 264, variant < 2 ? 384 : 144);
      s.fill = Fill::kIntegers;
      s.part_rows = variant % 2 == 0 ? 136 : 0;
      s.bias = variant == 1 || variant == 3;
      s.rows_per_group = variant == 2 ? 131 : 0;
      s.scale_by_row = variant == 3;
      if (variant == 4) s.n = 2 * 77, s.part_rows = 77;  // columns that no 16-byte store fits
      const Problem p(s);
      const Buffer want = p.oracle();
      OnDevice device(p, true);
      for (const GpuTile& tile : tiles()) {
        EXPECT_TRUE(same_bits(device.run_tile(tile).view(), want.view()))
            << to_string(kind.dtype) << (kind.row_scales ? " by row" : "") << ", variant " << variant << ": "
            << tile.to_string();
      }
    }
  }
}

TEST_F(GroupedGemmCuda, TensorCoresStayInsideTheBoundWithOneSetOfBitsForAllTiles) {
  for (const Kind& kind : kKinds) {
    for (std::int64_t k : {16, 128, 1040}) {
      Spec s = spec_of(kind, {40, 0, 129, 2}, 2 * 144, k);
      s.part_rows = 144;
      s.bias = k == 128;
      const Problem p(s);
      OnDevice device(p, true);
      const Buffer first = device.run_chosen();
      const std::string what =
          std::string(to_string(kind.dtype)) + (kind.row_scales ? " by row" : "") + ", K " + std::to_string(k);
      expect_within_bound(p, first, what);
      EXPECT_TRUE(same_bits(device.run_chosen().view(), first.view())) << what << ", run again";
      for (const GpuTile& tile : tiles()) {
        EXPECT_TRUE(same_bits(device.run_tile(tile).view(), first.view())) << what << ": " << tile.to_string();
      }
    }
  }
}

// A row that is NaN, or infinite, stays alone; what overflows is infinite; NaN is the specified one.
TEST_F(GroupedGemmCuda, ANaNStaysInItsRow) {
  for (const Kind& kind : kKinds) {
    if (kind.dtype == DType::kI8) continue;
    Spec s = spec_of(kind, {20, 5}, 128, 256);
    s.fill = Fill::kIntegers;
    Problem p(s);
    p.a.set(3 * s.k + 70, NAN);
    p.w.set((1 * s.n + 9) * s.k + 5, NAN);
    OnDevice device(p, true);
    for (const GpuTile& tile : tiles())
      EXPECT_TRUE(same_bits(device.run_tile(tile).view(), p.oracle().view())) << tile.to_string();
  }
}

// Row r of expert e has the bits it has alone, whatever shares its tile, its expert or its launch.
TEST_F(GroupedGemmCuda, ARowIsTheSameInEveryBatch) {
  for (const Kind& kind : kKinds) {
    Spec s = spec_of(kind, {300}, 256, 512);
    s.unowned_rows = 0;
    const Problem whole(s);
    OnDevice device(whole, true);
    const Buffer want = device.run_chosen();
    for (std::int64_t rows : {1, 2, 7, 8, 9, 31, 64, 65, 96, 128, 129, 200, 299}) {
      Spec part = s;
      part.counts = {0, rows, 0};
      Problem p(part);
      for (std::int64_t i = 0; i < rows * s.k; ++i) p.a.set(i, whole.a.at(i));
      for (std::int64_t i = 0; i < s.n * s.k; ++i) p.w.set(s.n * s.k + i, whole.w.at(i));
      if (is_scaled(s.w)) {
        const std::int64_t scales = whole.w_scale.num_elements();
        for (std::int64_t i = 0; i < scales; ++i) p.w_scale.set(scales + i, whole.w_scale.at(i));
      }
      for (std::int64_t b = 0; p.a_scale && b < p.scale_cols(); ++b) {
        for (std::int64_t r = 0; r < rows; ++r) p.a_scale->set(b * rows + r, whole.a_scale->at(b * 300 + r));
      }
      OnDevice alone(p, true);
      EXPECT_TRUE(same_bits(alone.run_chosen().view(), want.view().slice(0, rows)))
          << to_string(kind.dtype) << ", " << rows;
    }
  }
}

// Shapes on which other kernels were caught racing: hundreds of experts and few tokens, short K, all rows on one expert.
TEST_F(GroupedGemmCuda, AThousandRunsHaveTheSameBits) {
  for (const Kind& kind : kKinds) {
    for (int shape = 0; shape < 3; ++shape) {
      std::vector<std::int64_t> counts(384);
      for (int i = 0; i < 24; ++i) ++counts[static_cast<std::size_t>(shape == 2 ? 5 : i * 97 % 384)];
      if (shape == 1) counts = {2, 0, 700, 1};
      Spec s = spec_of(kind, counts, shape == 1 ? 384 : 128, shape == 0 ? 128 : 256);
      s.unowned_rows = 0;
      const Problem p(s);
      OnDevice device(p, true);
      const Buffer want = device.run_chosen();
      device.run([&](const grouped_gemm::Args& args) {
        const std::size_t bytes = span_bytes(args.out);
        std::vector<char> x(bytes), y(bytes);
        for (int i = 0; i < 1000; ++i) {
          EXPECT_TRUE(grouped_gemm::run_wgmma(args, {}).is_ok());
          if (i > 0 && i % 50 != 49) continue;
          EXPECT_EQ(cudaMemcpy(i == 0 ? x.data() : y.data(), args.out.data, bytes, cudaMemcpyDeviceToHost),
                    cudaSuccess);
          EXPECT_TRUE(i == 0 || x == y) << to_string(kind.dtype) << ", shape " << shape << ", run " << i;
        }
        return Status::ok();
      });
    }
  }
}

TEST_F(GroupedGemmCuda, OneGroupForAllRowsAndGarbageOffsets) {
  for (const Kind& kind : kKinds) {
    Spec s = spec_of(kind, {37}, 128, 256);
    s.unowned_rows = 0;
    const Problem p(s);
    OnDevice device(p, true);
    const Buffer want = device.run_chosen();
    const Buffer whole = device.run([](grouped_gemm::Args args) {
      args.groups = RowGroups::whole();
      return grouped_gemm::run_wgmma(args, {});
    });
    EXPECT_TRUE(same_bits(whole.view(), want.view()));
    // Offsets that lead outside are clamped to the rows there are.
    Buffer offset(DType::kI32, {2});
    offset.fill_values({-5, 1000000});
    TensorView view = offset.view();
    DeviceMirror mirror;
    mirror.add(view);
    const Buffer clamped = device.run([&](grouped_gemm::Args args) {
      args.groups = RowGroups::contiguous({view});
      return grouped_gemm::run_wgmma(args, {});
    });
    EXPECT_TRUE(same_bits(clamped.view(), want.view()));
  }
}

}  // namespace
}  // namespace sluice::test
