#include "checker.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "cpu/parallel.h"

namespace sluice::cli {

namespace {

constexpr double kUnitRoundoff = 0x1p-24;  // of fp32
double gamma(double n) { return n * kUnitRoundoff / (1 - n * kUnitRoundoff); }
// Half a unit in the last place of the output, relative.
double output_roundoff(DType dtype) { return dtype == DType::kBF16 ? 0x1p-8 : kUnitRoundoff; }

double decode_e4m3(std::uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 0x7F) == 0x7F) return std::nan("");
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return byte & 0x80 ? -magnitude : magnitude;
}

const std::array<double, 256>& e4m3_values() {
  static const std::array<double, 256> values = [] {
    std::array<double, 256> v{};
    for (int i = 0; i < 256; ++i) v[static_cast<std::size_t>(i)] = decode_e4m3(static_cast<std::uint8_t>(i));
    return v;
  }();
  return values;
}

double element(const std::byte* row, DType dtype, std::int64_t i) {
  if (dtype == DType::kE4M3) return e4m3_values()[static_cast<std::uint8_t>(row[i])];
  if (dtype == DType::kI8) return static_cast<std::int8_t>(row[i]);
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, row + 4 * i, 4);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, row + 2 * i, 2);
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float scale_at(const TensorView& scale, std::int64_t block, std::int64_t row) {
  return scale.as<float>()[block * scale.stride[0] + row * scale.stride[1]];
}

// The rows of one GEMM that the reference recomputes: gathered, with offsets of their own. A row's result depends
// on no other row (grouped_gemm.h), so the gathered problem has the same answer.
struct Sample {
  std::vector<std::int64_t> rows;    // in the full problem
  std::vector<std::int64_t> expert;  // that owns each
  std::vector<std::byte> a;
  std::vector<float> a_scale;
  std::vector<std::int32_t> offset;
  std::vector<std::byte> out;  // [n,N] of the reference
  std::vector<double> sum;     // [n,N], sum|A||W| + |bias|
  grouped_gemm::Args args;
};

Sample gather(const grouped_gemm::Args& full, std::int64_t num_rows, std::int64_t wanted) {
  Sample s;
  s.rows = sample(num_rows, wanted);
  const std::int64_t n = static_cast<std::int64_t>(s.rows.size());
  const std::int64_t K = full.a.shape[1], N = full.w.shape[1], groups = full.groups.num_groups();
  const std::size_t row_bytes = static_cast<std::size_t>(K * size_bytes(full.a.dtype));
  s.a.resize(static_cast<std::size_t>(n) * row_bytes);
  for (std::int64_t i = 0; i < n; ++i) {
    std::memcpy(s.a.data() + static_cast<std::size_t>(i) * row_bytes, full.a.row(s.rows[static_cast<std::size_t>(i)]),
                row_bytes);
  }
  s.args = full;
  s.args.a = TensorView::dense(s.a.data(), full.a.dtype, {n, K});
  if (full.a_scale.is_present()) {
    const std::int64_t blocks = full.a_scale.shape[0];
    s.a_scale.resize(static_cast<std::size_t>(blocks * n));
    for (std::int64_t b = 0; b < blocks; ++b) {
      for (std::int64_t i = 0; i < n; ++i) {
        s.a_scale[static_cast<std::size_t>(b * n + i)] = scale_at(full.a_scale, b, s.rows[static_cast<std::size_t>(i)]);
      }
    }
    s.args.a_scale = TensorView::dense(s.a_scale.data(), DType::kF32, {blocks, n});
  }
  s.offset.assign(static_cast<std::size_t>(groups) + 1, 0);
  for (std::int64_t e = 0, i = 0; e < groups; ++e) {
    const RowRange range = row_range(full.groups, e, full.a.shape[0]);
    for (; i < n && s.rows[static_cast<std::size_t>(i)] < range.end; ++i) s.expert.push_back(e);
    s.offset[static_cast<std::size_t>(e) + 1] = static_cast<std::int32_t>(i);
  }
  s.args.groups = RowGroups::contiguous({TensorView::dense(s.offset.data(), DType::kI32, {groups + 1})});
  s.out.resize(static_cast<std::size_t>(n * N * size_bytes(full.out.dtype)));
  s.args.out = TensorView::dense(s.out.data(), full.out.dtype, {n, N});
  return s;
}

// What every bound of docs/numerics.md multiplies.
void fill_sums(Sample& s, int num_threads) {
  const grouped_gemm::Args& g = s.args;
  const std::int64_t n = g.a.shape[0], K = g.a.shape[1], N = g.w.shape[1];
  const std::int64_t part = g.part_rows > 0 ? g.part_rows : N;
  s.sum.resize(static_cast<std::size_t>(n * N));
  std::vector<double> a(static_cast<std::size_t>(n * K));
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t k = 0; k < K; ++k) {
      // One scale a row, or one for each 128 columns of it.
      const std::int64_t block = g.a_scale.is_present() && g.a_scale.shape[0] == 1 ? 0 : k / kScaleBlock;
      const double scale = g.a_scale.is_present() ? scale_at(g.a_scale, block, i) : 1;
      a[static_cast<std::size_t>(i * K + k)] = std::fabs(element(g.a.row(i), g.a.dtype, k) * scale);
    }
  }
  cpu::parallel_for(n * ceil_div(N, kScaleBlock), num_threads, [&](std::int64_t task, int) {
    const std::int64_t i = task % n, begin = task / n * kScaleBlock;
    const std::int64_t e = s.expert[static_cast<std::size_t>(i)];
    const double* row = a.data() + i * K;
    for (std::int64_t j = begin; j < std::min(N, begin + kScaleBlock); ++j) {
      const std::byte* w = g.w.row(e) + j * g.w.stride[1] * size_bytes(g.w.dtype);
      const bool by_channel = g.w_scale.is_present() && g.w_scale.shape[1] == N && g.w_scale.shape[2] == 1;
      const std::int64_t scale_row = by_channel ? j : j / part * ceil_div(part, kScaleBlock) + j % part / kScaleBlock;
      double sum = g.bias.is_present() ? std::fabs(element(g.bias.row(e), DType::kF32, j)) : 0;
      for (std::int64_t k0 = 0; k0 < K; k0 += kScaleBlock) {
        double block = 0;
        for (std::int64_t k = k0; k < std::min(K, k0 + kScaleBlock); ++k)
          block += row[k] * std::fabs(element(w, g.w.dtype, k));
        const double scale = g.w_scale.is_present()
                                 ? g.w_scale.as<float>()[e * g.w_scale.stride[0] + scale_row * g.w_scale.stride[1] +
                                                         (by_channel ? 0 : k0 / kScaleBlock) * g.w_scale.stride[2]]
                                 : 1;
        sum += block * std::fabs(scale);
      }
      s.sum[static_cast<std::size_t>(i * N + j)] = sum;
    }
  });
}

// What an implementation's sums may be off by, relative to sum|A||W|: fp32 in any order, or the tensor cores' own way, which
// keeps fewer bits of the products of an instruction (docs/numerics.md, "On tensor cores"; int8 is exact there).
double sum_roundoff(const Sample& s, std::string_view step, std::string_view impl) {
  const double fp32 = gamma(static_cast<double>(kScaleBlock + ceil_div(s.args.a.shape[1], kScaleBlock) + 2));
  if (step != "grouped_gemm" || impl != "cuda-wgmma") return fp32;
  if (s.args.a.dtype == DType::kE4M3) return fp32 + 4 * 33 * 0x1p-13;
  return s.args.a.dtype == DType::kBF16 ? fp32 + 8 * 17 * 0x1p-23 : fp32;
}

// Rows of `got` (the full output) against the sample's reference rows, which are rounded to the output dtype too:
// |out - reference| <= (1 + eps_out) * roundoff * sum|A||W| + 2 eps_out |reference|.
void compare_rows(const Sample& s, const TensorView& got, double roundoff, Finding& finding) {
  const std::int64_t n = s.args.out.shape[0], N = s.args.out.shape[1];
  const double eps = output_roundoff(s.args.out.dtype);
  double worst_row = -1;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t r = s.rows[static_cast<std::size_t>(i)];
    double error2 = 0, want2 = 0, bound2 = 0, ratio = 0;
    for (std::int64_t j = 0; j < N; ++j) {
      const double g = element(got.row(r), got.dtype, j), w = element(s.args.out.row(i), s.args.out.dtype, j);
      const double bound =
          (1 + eps) * roundoff * s.sum[static_cast<std::size_t>(i * N + j)] + 2 * eps * std::fabs(w) + 1e-37;
      // Equal infinities and NaN for NaN are no error; anything else that is not finite is.
      const double error = g == w || (std::isnan(g) && std::isnan(w)) ? 0 : std::fabs(g - w);
      const double share = std::isfinite(error) ? error / bound : HUGE_VAL;
      if (share > 1 && finding.passed) {
        finding.passed = false;
        finding.detail =
            fmt::format("row {} column {} is {:.9g}, the reference says {:.9g}, bound {:.3g}", r, j, g, w, bound);
      }
      ratio = std::max(ratio, share);
      if (!std::isfinite(w)) continue;
      error2 += error * error;
      want2 += w * w;
      bound2 += bound * bound;
    }
    finding.of_bound = std::max(finding.of_bound, ratio);
    if (ratio <= worst_row) continue;
    worst_row = ratio;
    const double norm = std::sqrt(std::max(want2, 1e-300));
    finding.error = std::sqrt(error2) / norm;
    finding.bound = std::sqrt(bound2) / norm;
  }
}

struct Snapshot {
  std::vector<std::vector<std::byte>> bytes;
};

Snapshot save(const Step& step) {
  Snapshot snapshot;
  for (const Output& output : step.outputs) {
    const auto* data = static_cast<const std::byte*>(output.view.data);
    snapshot.bytes.emplace_back(data, data + output.view.num_bytes());
  }
  return snapshot;
}

void poison(const Step& step) {
  for (const Output& output : step.outputs)
    std::memset(output.view.data, 0xFF, static_cast<std::size_t>(output.view.num_bytes()));
}

struct Candidate {
  std::string name;
  Status can_run;
};

// The table of a step: every implementation for this device but the last, and the last (the reference).
std::pair<std::vector<Candidate>, std::string> candidates(const Step& step, const Machine& machine) {
  return std::visit(
      [&](const auto& args) {
        const auto table = table_of(args);
        std::vector<Candidate> list;
        for (const auto& impl : table.first(table.size() - 1)) {
          if (impl.device != machine.device.kind) continue;
          list.push_back({std::string(impl.name), impl.can_run(args, machine)});
        }
        return std::pair(std::move(list), std::string(table.back().name));
      },
      step.args);
}

// A gate GEMM seen as a grouped one with a single group, so that one comparison serves both.
grouped_gemm::Args as_gemm(const gate::LogitsArgs& logits) {
  grouped_gemm::Args args;
  const std::int64_t H = logits.x.shape[1], E = logits.w_gate.shape[0];
  args.a = logits.x;
  args.groups = RowGroups::whole();
  args.w = TensorView::dense(logits.w_gate.data, logits.w_gate.dtype, {1, E, H});
  if (logits.router_bias.is_present()) args.bias = TensorView::dense(logits.router_bias.data, DType::kF32, {1, E});
  args.out = logits.logits;
  return args;
}

template <class Args>
Status run_reference(const Args& args, const Machine& machine) {
  const auto& impl = table_of(args).back();
  std::vector<std::byte> scratch(
      impl.scratch_bytes == nullptr ? 0 : static_cast<std::size_t>(impl.scratch_bytes(args, machine)));
  Ctx ctx;
  ctx.num_threads = machine.num_threads;
  ctx.workspace = scratch;
  return impl.run(args, ctx);
}

}  // namespace

std::vector<std::int64_t> sample(std::int64_t count, std::int64_t wanted) {
  std::vector<std::int64_t> indices;
  const std::int64_t n = std::clamp<std::int64_t>(wanted, std::min<std::int64_t>(count, 1), count);
  for (std::int64_t i = 0; i < n; ++i) indices.push_back(n == 1 ? 0 : i * (count - 1) / (n - 1));
  return indices;
}

Json to_json(const Finding& f) {
  if (!f.skipped.empty()) return {{"step", f.step}, {"impl", f.impl}, {"skipped", f.skipped}};
  Json json = {{"step", f.step},         {"impl", f.impl},       {"against", f.against},       {"rule", f.rule},
               {"rows", f.rows},         {"of_rows", f.of_rows}, {"worst_row_error", f.error}, {"bound", f.bound},
               {"of_bound", f.of_bound}, {"passed", f.passed}};
  if (!f.detail.empty()) json["detail"] = f.detail;
  return json;
}

Finding compare_bytes(const std::string& name, const TensorView& got, const TensorView& want) {
  Finding finding;
  finding.rule = "bitwise";
  finding.rows = finding.of_rows = got.shape[0];
  const std::int64_t width = size_bytes(got.dtype), elements = got.num_elements();
  const auto* g = static_cast<const std::byte*>(got.data);
  const auto* w = static_cast<const std::byte*>(want.data);
  for (std::int64_t i = 0; i < elements; ++i) {
    if (std::memcmp(g + i * width, w + i * width, static_cast<std::size_t>(width)) == 0) continue;
    finding.passed = false;
    finding.of_bound = HUGE_VAL;
    const std::int64_t columns = got.rank > 1 ? elements / got.shape[0] : 1;
    const auto text = [&](const std::byte* p) {
      std::string hex;
      for (std::int64_t b = width - 1; b >= 0; --b)
        hex += fmt::format("{:02x}", static_cast<unsigned>(p[i * width + b]));
      return hex;
    };
    finding.detail =
        fmt::format("{}[{},{}] has bits {}, expected {}", name, i / columns, i % columns, text(g), text(w));
    break;
  }
  return finding;
}

Result<std::vector<Finding>> check_steps(Pipeline& pipeline, Scope scope, double reference_products,
                                         const std::function<void(std::int64_t, std::int64_t)>& progress) {
  std::vector<Finding> findings;
  const Machine& machine = pipeline.options().machine;
  // References and bounds are the host's work, wherever the layer is.
  const Machine& host = machine.device.kind == DeviceKind::kCpu ? machine : pipeline.options().host;
  std::int64_t done = 0;
  for (Step& step : pipeline.steps()) {
    if (progress) progress(done++, static_cast<std::int64_t>(pipeline.steps().size()));
    const auto [list, reference] = candidates(step, machine);
    // Empty when the step is no GEMM: then the contract defines every bit.
    std::vector<Sample> sampled;
    Snapshot want;
    std::int64_t num_rows = 0;
    const auto sample_gemm = [&](const grouped_gemm::Args& full) {
      num_rows = 0;
      for (std::int64_t e = 0; e < full.groups.num_groups(); ++e) {
        num_rows = std::max(num_rows, row_range(full.groups, e, full.a.shape[0]).end);
      }
      const double per_row = static_cast<double>(full.w.shape[1]) * static_cast<double>(full.w.shape[2]);
      sampled.push_back(gather(full, num_rows, static_cast<std::int64_t>(reference_products / per_row) + 1));
    };
    if (const auto* gemm = std::get_if<grouped_gemm::Args>(&step.args)) {
      sample_gemm(*gemm);
      SLUICE_TRY(run_reference(sampled[0].args, host).with_context(step.name + ": reference"));
    } else if (const auto* logits = std::get_if<gate::LogitsArgs>(&step.args)) {
      sample_gemm(as_gemm(*logits));
      gate::LogitsArgs rows = *logits;
      rows.x = sampled[0].args.a;
      rows.logits = sampled[0].args.out;
      SLUICE_TRY(run_reference(rows, host).with_context(step.name + ": reference"));
    } else {
      poison(step);
      SLUICE_TRY(pipeline.run(step, reference).with_context(step.name + ": reference"));
      want = save(step);
    }
    if (!sampled.empty()) fill_sums(sampled[0], host.num_threads);

    for (const Candidate& candidate : list) {
      if (scope == Scope::kChosenOnly && candidate.name != step.impl) continue;
      Finding finding;
      if (!candidate.can_run.is_ok()) {
        finding.skipped = candidate.can_run.message();
      } else {
        poison(step);
        SLUICE_TRY(pipeline.run(step, candidate.name).with_context(step.name + ": " + candidate.name));
        if (!sampled.empty()) {
          finding.rule = "derived bound";
          finding.rows = static_cast<std::int64_t>(sampled[0].rows.size());
          finding.of_rows = num_rows;
          compare_rows(sampled[0], step.outputs[0].view, sum_roundoff(sampled[0], step.stage, candidate.name), finding);
        } else {
          finding.rule = "bitwise";
          for (std::size_t i = 0; i < step.outputs.size(); ++i) {
            TensorView expected = step.outputs[i].view;
            expected.data = want.bytes[i].data();
            Finding part = compare_bytes(step.outputs[i].name, step.outputs[i].view, expected);
            if (i == 0 || !part.passed) finding = std::move(part);
            if (!finding.passed) break;
          }
          if (step.stage == "route") finding.rows = finding.of_rows = pipeline.x().shape[0];
        }
      }
      finding.step = step.name == step.stage ? step.name : step.name + ": " + step.stage;
      finding.impl = candidate.name;
      finding.against = reference;
      findings.push_back(std::move(finding));
    }
    // Downstream steps read what the layer itself would have computed.
    SLUICE_TRY(pipeline.run(step).with_context(step.name));
  }
  return findings;
}

}  // namespace sluice::cli
