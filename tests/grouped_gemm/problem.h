// One grouped GEMM as every test makes it: guarded, pitched and poisoned buffers, the oracle of the specified bits, and
// a run that checks everything a run may not do.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "harness/buffer.h"
#include "harness/codec.h"
#include "harness/compare.h"
#include "harness/impls.h"
#include "harness/targets.h"
#include "sluice/stage/grouped_gemm.h"

namespace sluice::test {

// The same bytes on 16-byte boundaries, rows a multiple of 16 bytes apart.
inline Buffer aligned_copy(const TensorView& from) {
  std::vector<std::int64_t> shape(from.shape.begin(), from.shape.begin() + from.rank);
  const std::int64_t per_unit = 16 / size_bytes(from.dtype);
  Buffer to(from.dtype, shape, {.row_pitch_elems = ceil_div(shape.back(), per_unit) * per_unit + per_unit});
  const std::int64_t outer = from.rank == 3 ? from.shape[0] : 1;
  const std::int64_t rows = from.rank == 3 ? from.shape[1] : from.shape[0];
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto at = [&](const TensorView& v) {
        const std::int64_t element = v.rank == 3 ? o * v.stride[0] + r * v.stride[1] : r * v.stride[0];
        return static_cast<std::byte*>(v.data) + element * size_bytes(v.dtype);
      };
      std::memcpy(at(to.view()), at(from), static_cast<std::size_t>(shape.back() * size_bytes(from.dtype)));
    }
  }
  return to;
}

enum class Fill { kIntegers, kReal, kBits };

struct Spec {
  std::vector<std::int64_t> counts;  // rows of each expert
  std::int64_t n = 1, k = 1;
  DType a = DType::kF32, w = DType::kF32, out = DType::kF32;
  bool bias = false;
  std::int64_t part_rows = 0;
  std::int64_t rows_per_group = 0;  // > 0: masked
  std::int64_t unowned_rows = 2;    // after the last group of the contiguous form
  bool scale_by_row = false;        // a_scale as [R,Kb] in memory
  bool row_scales = false;          // one scale a row instead of blocks; i8 always has them so
  bool repeat_a_scale = false;      // row scales with a stride of 0: one value for the tensor
  bool repeat_w_scale = false;      // the same along N: one value an expert
  bool pitched = true;
  Fill fill = Fill::kReal;
  std::uint64_t seed = 1;
};

inline std::int64_t ceil128(std::int64_t x) { return (x + 127) / 128; }
inline bool is_scaled(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kI8; }
inline bool has_row_scales(const Spec& s) { return s.row_scales || s.a == DType::kI8 || s.w == DType::kI8; }

struct Problem {
  Spec spec;
  std::int64_t num_rows = 0;  // R
  Buffer a, w, w_scale, bias, groups;
  std::optional<Buffer> a_scale;
  grouped_gemm::Args args;  // out is absent

  explicit Problem(const Spec& s)
      : spec(s),
        num_rows(rows_of(s)),
        a(s.a, {num_rows, s.k}, {.row_pitch_elems = s.k + (s.pitched ? 5 : 0), .offset_elems = 1}),
        w(s.w, {experts(), s.n, s.k}, {.row_pitch_elems = s.k + (s.pitched ? 3 : 0), .offset_elems = 3}),
        w_scale(DType::kF32, {experts(), scale_rows(), scale_cols()},
                {.row_pitch_elems = scale_cols() + (s.pitched ? 2 : 0), .offset_elems = 1}),
        bias(DType::kF32, {experts(), s.n}, {.row_pitch_elems = s.n + 1, .offset_elems = 5}),
        groups(DType::kI32, {s.rows_per_group > 0 ? experts() : experts() + 1}, {.offset_elems = 1}) {
    const std::int64_t kb = scale_cols();
    if (is_scaled(s.a)) {
      a_scale.emplace(s.scale_by_row
                          ? Buffer(DType::kF32, {num_rows, kb}, {.row_pitch_elems = kb + 1, .offset_elems = 3})
                          : Buffer(DType::kF32, {kb, num_rows}, {.row_pitch_elems = num_rows + 7, .offset_elems = 3}));
      args.a_scale = s.scale_by_row ? a_scale->transposed() : a_scale->view();
    }
    std::vector<double> offset{0};
    for (std::int64_t c : s.counts) offset.push_back(offset.back() + static_cast<double>(c));
    if (s.rows_per_group > 0) {
      groups.fill_values({s.counts.begin(), s.counts.end()});
      args.groups = RowGroups::masked(groups.view(), s.rows_per_group);
    } else {
      groups.fill_values(offset);
      args.groups = RowGroups::contiguous({groups.view()});
    }
    args.a = a.view();
    args.w = w.view();
    if (is_scaled(s.w)) args.w_scale = w_scale.view();
    if (s.repeat_a_scale) args.a_scale.stride[1] = 0;
    if (s.repeat_w_scale) args.w_scale.stride[1] = 0;
    if (s.bias) args.bias = bias.view();
    args.part_rows = s.part_rows;
    fill();
  }

  std::int64_t experts() const { return static_cast<std::int64_t>(spec.counts.size()); }
  std::int64_t scale_cols() const { return has_row_scales(spec) ? 1 : ceil128(spec.k); }
  std::int64_t scale_rows() const {
    if (has_row_scales(spec)) return spec.n;
    const std::int64_t part = spec.part_rows > 0 ? spec.part_rows : spec.n;
    return spec.n / part * ceil128(part);
  }
  static std::int64_t rows_of(const Spec& s) {
    if (s.rows_per_group > 0) return s.rows_per_group * static_cast<std::int64_t>(s.counts.size());
    std::int64_t rows = s.unowned_rows;
    for (std::int64_t c : s.counts) rows += c;
    return rows;
  }
  // [first, end) of each expert, from the spec and not from the library.
  std::pair<std::int64_t, std::int64_t> rows_of_expert(std::int64_t e) const {
    std::int64_t first = 0;
    for (std::int64_t i = 0; i < e; ++i) first += spec.rows_per_group > 0 ? spec.rows_per_group : spec.counts[i];
    return {first, first + spec.counts[static_cast<std::size_t>(e)]};
  }
  bool is_owned(std::int64_t row) const {
    for (std::int64_t e = 0; e < experts(); ++e) {
      if (row >= rows_of_expert(e).first && row < rows_of_expert(e).second) return true;
    }
    return false;
  }

  void fill() {
    if (spec.fill == Fill::kIntegers) {
      a.fill_integers(spec.seed, -4, 4);
      w.fill_integers(spec.seed + 1, -4, 4);
      w_scale.fill_powers_of_two(spec.seed + 2);
      bias.fill_integers(spec.seed + 3, -8, 8);
      if (a_scale) a_scale->fill_powers_of_two(spec.seed + 4);
    } else if (spec.fill == Fill::kReal) {
      a.fill_normal(spec.seed, 1.0);
      w.fill_normal(spec.seed + 1, 0.3);
      w_scale.fill_uniform(spec.seed + 2, 0.01, 0.02);
      bias.fill_normal(spec.seed + 3);
      if (a_scale) a_scale->fill_uniform(spec.seed + 4, 0.001, 0.01);
    } else {
      a.fill_random_bits(spec.seed);
      w.fill_random_bits(spec.seed + 1);
      w_scale.fill_random_bits(spec.seed + 2);
      bias.fill_random_bits(spec.seed + 3);
      if (a_scale) a_scale->fill_random_bits(spec.seed + 4);
    }
    // Normal values would leave most of i8 unused.
    if (spec.fill == Fill::kReal && spec.a == DType::kI8) a.fill_integers(spec.seed, -128, 127);
    if (spec.fill == Fill::kReal && spec.w == DType::kI8) w.fill_integers(spec.seed + 1, -128, 127);
    poison_unowned();
  }

  void poison_unowned() {
    for (std::int64_t r = 0; r < num_rows; ++r) {
      if (is_owned(r)) continue;
      for (std::int64_t k = 0; k < spec.k; ++k) a.set(r * spec.k + k, NAN);
      for (std::int64_t b = 0; a_scale && b < scale_cols() && !spec.repeat_a_scale; ++b) {
        a_scale->set(spec.scale_by_row ? r * scale_cols() + b : b * num_rows + r, NAN);
      }
    }
  }

  Buffer make_out() const {
    return Buffer(spec.out, {num_rows, spec.n},
                  {.row_pitch_elems = spec.n + (spec.pitched ? 9 : 0), .offset_elems = 7});
  }

  // The bits the contract defines: one chain of fmas per output (of products and sums on a machine without).
  Buffer oracle(bool fused = true) const {
    Buffer want = make_out();
    std::vector<float> av, wv, as, ws, bv;
    for (double x : a.to_doubles()) av.push_back(static_cast<float>(x));
    for (double x : w.to_doubles()) wv.push_back(static_cast<float>(x));
    for (double x : is_scaled(spec.w) ? to_doubles(args.w_scale) : std::vector<double>{}) {
      ws.push_back(static_cast<float>(x));
    }
    for (double x : bias.to_doubles()) bv.push_back(static_cast<float>(x));
    if (a_scale) {
      for (double x : to_doubles(args.a_scale)) as.push_back(static_cast<float>(x));  // [Kb,R]
    }
    const auto mul_add = [&](float x, float y, float z) {
      if (fused) return std::fma(x, y, z);
      const float product = x * y;
      return product + z;
    };
    const std::int64_t part = spec.part_rows > 0 ? spec.part_rows : spec.n;
    for (std::int64_t e = 0; e < experts(); ++e) {
      for (std::int64_t r = rows_of_expert(e).first; r < rows_of_expert(e).second; ++r) {
        for (std::int64_t n = 0; n < spec.n; ++n) {
          const std::int64_t scale_row = n / part * ceil128(part) + n % part / 128;
          float acc = 0.0F;
          std::int64_t integer = 0;
          for (std::int64_t b = 0; b < ceil128(spec.k); ++b) {
            float p = 0.0F;
            for (std::int64_t k = b * 128; k < std::min(spec.k, b * 128 + 128); ++k) {
              const float x = av[static_cast<std::size_t>(r * spec.k + k)];
              const float y = wv[static_cast<std::size_t>((e * spec.n + n) * spec.k + k)];
              p = mul_add(x, y, p);
              if (spec.a == DType::kI8) integer += static_cast<std::int64_t>(x) * static_cast<std::int64_t>(y);
            }
            if (has_row_scales(spec)) {
              acc = acc + p;
              continue;
            }
            const float w_s = spec.w == DType::kE4M3
                                  ? ws[static_cast<std::size_t>((e * scale_rows() + scale_row) * ceil128(spec.k) + b)]
                                  : 1.0F;
            const float a_s = a_scale ? as[static_cast<std::size_t>(b * num_rows + r)] : 1.0F;
            if (spec.w == DType::kE4M3 || a_scale) {
              const float s = spec.w != DType::kE4M3 ? a_s : !a_scale ? w_s : a_s * w_s;
              acc = mul_add(p, s, acc);
            } else {
              acc = acc + p;
            }
          }
          if (has_row_scales(spec)) {
            if (spec.a == DType::kI8) acc = static_cast<float>(integer);
            const float w_s = is_scaled(spec.w) ? ws[static_cast<std::size_t>(e * spec.n + n)] : 1.0F;
            const float a_s = a_scale ? as[static_cast<std::size_t>(r)] : 1.0F;
            const float s = a_s * w_s;
            acc = acc * s;
          }
          if (spec.bias) acc = acc + bv[static_cast<std::size_t>(e * spec.n + n)];
          if (std::isnan(acc)) acc = NAN;
          want.set(r * spec.n + n, static_cast<double>(acc));
        }
      }
    }
    return want;
  }
};

// Runs and checks what no run may do: write beyond its rows or guards, change an input, need its scratch clean.
inline Buffer run(const Problem& p, std::string_view impl_name = "cpu", int num_threads = 1) {
  Buffer out = p.make_out();
  grouped_gemm::Args args = p.args;
  args.out = out.view();
  const Status checked = grouped_gemm::check(args);
  EXPECT_TRUE(checked.is_ok()) << checked.message();
  if (!checked.is_ok()) return out;
  for (const auto& impl : grouped_gemm::impls()) {
    if (impl.name != impl_name) continue;
    const Machine machine = Machine::detect_cpu(num_threads);
    EXPECT_TRUE(impl.can_run(args, machine).is_ok());
    const std::int64_t bytes = impl.scratch_bytes != nullptr ? impl.scratch_bytes(args, machine) : 0;
    Buffer scratch(DType::kU8, {bytes + 1}, {.offset_elems = 1});
    if (bytes > 0) std::memset(scratch.as<std::uint8_t>(), 0xFF, static_cast<std::size_t>(bytes));
    const auto a_before = p.a.bytes(), w_before = p.w.bytes(), s_before = p.w_scale.bytes(),
               g_before = p.groups.bytes();
    const Status ran = impl.run(args, Ctx{.workspace = {reinterpret_cast<std::byte*>(scratch.as<std::uint8_t>()),
                                                        static_cast<std::size_t>(bytes)},
                                          .num_threads = num_threads});
    EXPECT_TRUE(ran.is_ok()) << ran.message();
    EXPECT_TRUE(p.a.unchanged_since(a_before));
    EXPECT_TRUE(p.w.unchanged_since(w_before));
    EXPECT_TRUE(p.w_scale.unchanged_since(s_before));
    EXPECT_TRUE(p.groups.unchanged_since(g_before));
    EXPECT_TRUE(scratch.guards_intact());
    EXPECT_TRUE(out.guards_intact());
    for (std::int64_t r = 0; r < p.num_rows; ++r) {
      if (p.is_owned(r)) continue;
      EXPECT_TRUE(is_poison(out.view().slice(r, 1))) << "row " << r << " belongs to no expert";
    }
    return out;
  }
  ADD_FAILURE() << "there is no implementation " << impl_name;
  return out;
}

// The specified bits on every SIMD target.
inline void expect_specified_bits(const Problem& p, int num_threads = 1) {
  std::optional<Buffer> want[2];
  for (std::int64_t target : simd_targets()) {
    const ForcedTarget forced(target);
    auto& oracle = want[has_native_fma(target) ? 1 : 0];
    if (!oracle) oracle.emplace(p.oracle(has_native_fma(target)));
    EXPECT_TRUE(same_bits(run(p, "cpu", num_threads).view(), oracle->view()))
        << hwy::TargetName(target) << ": a " << to_string(p.spec.a) << ", w " << to_string(p.spec.w) << ", out "
        << to_string(p.spec.out) << ", N " << p.spec.n << ", K " << p.spec.k << ", part_rows " << p.spec.part_rows;
  }
}

inline constexpr DType kInputs[] = {DType::kE4M3, DType::kBF16, DType::kF32};
inline constexpr DType kOutputs[] = {DType::kBF16, DType::kF32};

}  // namespace sluice::test
