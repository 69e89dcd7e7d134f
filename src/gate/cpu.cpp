// The gate on the CPU: router GEMM and selection, for every SIMD target, chosen at run time.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "cpu/parallel.h"
#include "gate/config.h"
#include "gate/impls.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gate/cpu.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/score_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using gate::kTileTokens;

// 16 lanes at most, so that fixed-size buffers can be padded to whole vectors on every target.
using DF = hn::CappedTag<float, 16>;
using VF = hn::Vec<DF>;
constexpr std::int64_t kMaxPanel = 16 * gate::kVectorsPerPanel;

// ---------------------------------------------------------------------------------------------------------
// Router GEMM
// ---------------------------------------------------------------------------------------------------------

// `count` elements of a row as fp32, zeros up to kScaleBlock.
HWY_INLINE void LoadBlock(const TensorView& view, std::int64_t row, std::int64_t column, std::int64_t count,
                          float* HWY_RESTRICT out) {
  if (view.dtype == DType::kF32) {
    std::memcpy(out, reinterpret_cast<const float*>(view.row(row)) + column,
                static_cast<size_t>(count) * sizeof(float));
  } else {
    const std::uint16_t* HWY_RESTRICT from = reinterpret_cast<const std::uint16_t*>(view.row(row)) + column;
    const DF d;
    const hn::RebindToUnsigned<DF> du;
    const hn::Rebind<std::uint16_t, DF> du16;
    const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from + i)))), d, out + i);
    }
    for (; i < count; ++i) out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(from[i]) << 16);
  }
  std::fill(out + count, out + kScaleBlock, 0.0f);
}

// out[k * panel + first + n] = rows[n][k] for four rows; a panel of the scalar target holds only two.
HWY_INLINE void Transpose(const float* HWY_RESTRICT rows, std::int64_t panel, std::int64_t first,
                          float* HWY_RESTRICT out) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t n = 0; n < std::min<std::int64_t>(4, panel - first); ++n) {
    for (std::int64_t k = 0; k < kScaleBlock; ++k) out[k * panel + first + n] = rows[n * kScaleBlock + k];
  }
#else
  const hn::CappedTag<float, 4> d4;
  const hn::CappedTag<double, 2> d2;
  for (std::int64_t k = 0; k < kScaleBlock; k += 4) {
    const auto r0 = hn::Load(d4, rows + k);
    const auto r1 = hn::Load(d4, rows + kScaleBlock + k);
    const auto r2 = hn::Load(d4, rows + 2 * kScaleBlock + k);
    const auto r3 = hn::Load(d4, rows + 3 * kScaleBlock + k);
    const auto a = hn::BitCast(d2, hn::InterleaveLower(d4, r0, r1));  // 00 10 01 11
    const auto b = hn::BitCast(d2, hn::InterleaveLower(d4, r2, r3));  // 20 30 21 31
    const auto c = hn::BitCast(d2, hn::InterleaveUpper(d4, r0, r1));
    const auto e = hn::BitCast(d2, hn::InterleaveUpper(d4, r2, r3));
    float* HWY_RESTRICT to = out + k * panel + first;
    hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, a, b)), d4, to);
    hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, a, b)), d4, to + panel);
    hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, c, e)), d4, to + 2 * panel);
    hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, c, e)), d4, to + 3 * panel);
  }
#endif
}

// acc[m][n] += one block's products for kRows tokens and a panel of experts. A lane is one (token, expert) sum,
// its products in ascending k, so neither batch nor tile shape can be seen in it.
template <int kRows>
HWY_INLINE void MultiplyTile(const float* HWY_RESTRICT x, const float* HWY_RESTRICT w, std::int64_t depth,
                             float* HWY_RESTRICT acc) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t panel = 2 * lanes;
  VF p0[kRows];
  VF p1[kRows];
  for (int m = 0; m < kRows; ++m) p0[m] = p1[m] = hn::Zero(d);
  for (std::int64_t k = 0; k < depth; ++k) {
    const VF w0 = hn::Load(d, w + k * panel);
    const VF w1 = hn::Load(d, w + k * panel + lanes);
    for (int m = 0; m < kRows; ++m) {
      const VF a = hn::Set(d, x[m * kScaleBlock + k]);
      p0[m] = hn::MulAdd(a, w0, p0[m]);
      p1[m] = hn::MulAdd(a, w1, p1[m]);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    float* HWY_RESTRICT row = acc + m * panel;
    hn::Store(hn::Add(hn::Load(d, row), p0[m]), d, row);
    hn::Store(hn::Add(hn::Load(d, row + lanes), p1[m]), d, row + lanes);
  }
}

HWY_INLINE void MultiplyRows(std::int64_t rows, const float* x, const float* w, std::int64_t depth, float* acc) {
  static_assert(kTileTokens == 6);
  switch (rows) {
    case 1: return MultiplyTile<1>(x, w, depth, acc);
    case 2: return MultiplyTile<2>(x, w, depth, acc);
    case 3: return MultiplyTile<3>(x, w, depth, acc);
    case 4: return MultiplyTile<4>(x, w, depth, acc);
    case 5: return MultiplyTile<5>(x, w, depth, acc);
    default: return MultiplyTile<6>(x, w, depth, acc);
  }
}

std::int64_t PanelLanes() { return static_cast<std::int64_t>(hn::Lanes(DF())); }

// One panel of experts for one chunk of tokens.
void LogitsTask(const gate::LogitsArgs& args, const gate::LogitsConfig& config, std::int64_t task) {
  const std::int64_t hidden = args.x.shape[1];
  const std::int64_t panel = config.panel_experts;
  const std::int64_t first_expert = task / config.num_chunks * panel;
  const std::int64_t num_experts = std::min(panel, args.w_gate.shape[0] - first_expert);
  const std::int64_t first_token = task % config.num_chunks * config.chunk_tokens;
  const std::int64_t num_tokens = std::min(config.chunk_tokens, args.x.shape[0] - first_token);

  HWY_ALIGN float acc[gate::kMaxChunkTokens * kMaxPanel];  // [chunk, panel]
  HWY_ALIGN float w_block[kScaleBlock * kMaxPanel];        // [128, panel]
  HWY_ALIGN float w_rows[4 * kScaleBlock];                 // [4, 128]
  HWY_ALIGN float x_rows[kTileTokens * kScaleBlock];       // [tile, 128]
  std::fill_n(acc, num_tokens * panel, 0.0f);

  for (std::int64_t h = 0; h < hidden; h += kScaleBlock) {
    const std::int64_t depth = std::min(kScaleBlock, hidden - h);
    for (std::int64_t n = 0; n < panel; n += 4) {
      for (std::int64_t i = 0; i < 4; ++i) {
        if (n + i < num_experts) {
          LoadBlock(args.w_gate, first_expert + n + i, h, depth, w_rows + i * kScaleBlock);
        } else {
          std::fill_n(w_rows + i * kScaleBlock, kScaleBlock, 0.0f);
        }
      }
      Transpose(w_rows, panel, n, w_block);
    }
    for (std::int64_t t = 0; t < num_tokens; t += kTileTokens) {
      const std::int64_t rows = std::min(kTileTokens, num_tokens - t);
      for (std::int64_t m = 0; m < rows; ++m)
        LoadBlock(args.x, first_token + t + m, h, depth, x_rows + m * kScaleBlock);
      MultiplyRows(rows, x_rows, w_block, depth, acc + t * panel);
    }
  }

  const float* bias = args.router_bias.is_present() ? args.router_bias.as<float>() + first_expert : nullptr;  // [E]
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    float* out = reinterpret_cast<float*>(args.logits.row(first_token + t)) + first_expert;  // [T,E] f32
    for (std::int64_t n = 0; n < num_experts; ++n) {
      const float sum = acc[t * panel + n];
      out[n] = bias != nullptr ? sum + bias[n] : sum;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// Selection
// ---------------------------------------------------------------------------------------------------------

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr std::int64_t kSumLanes = 32;  // of the softmax sum, docs/numerics.md
constexpr std::int64_t kPadded = kMaxExperts + kSumLanes;

// One token's experts. Buffers are padded to kSumLanes with experts that are not finite; "not finite" is -inf in
// `logit` and `choice`, which no finite expert can have.
struct Scratch {
  HWY_ALIGN float bias[kPadded];
  HWY_ALIGN float logit[kPadded];
  HWY_ALIGN float score[kPadded];
  HWY_ALIGN float choice[kPadded];
};

// NaN becomes -inf, +inf the largest finite value.
HWY_INLINE VF Sanitise(DF d, VF v) {
  const VF capped = hn::IfThenElse(hn::Gt(v, hn::Set(d, kLargest)), hn::Set(d, kLargest), v);
  return hn::IfThenElse(hn::Eq(v, v), capped, hn::Set(d, -kInf));
}

HWY_INLINE void Softmax(const float* HWY_RESTRICT logit, std::int64_t padded, float* HWY_RESTRICT score) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const VF none = hn::Set(d, -kInf);
  VF largest = none;
  for (std::int64_t i = 0; i < padded; i += lanes) largest = hn::Max(largest, hn::Load(d, logit + i));
  const VF m = hn::Set(d, hn::GetLane(hn::MaxOfLanes(d, largest)));
  HWY_ALIGN float sum[kSumLanes] = {};
  for (std::int64_t i = 0; i < padded; i += lanes) {
    const VF l = hn::Load(d, logit + i);
    const VF e = hn::IfThenElseZero(hn::Gt(l, none), SpecExp(d, hn::Sub(l, m)));
    hn::Store(e, d, score + i);
    float* lane = sum + i % kSumLanes;
    hn::Store(hn::Add(hn::Load(d, lane), e), d, lane);
  }
  for (std::int64_t width = kSumLanes / 2; width >= 1; width /= 2) {
    for (std::int64_t j = 0; j < width; ++j) sum[j] += sum[j + width];
  }
  const VF total = hn::Set(d, sum[0]);
  for (std::int64_t i = 0; i < padded; i += lanes) hn::Store(hn::Div(hn::Load(d, score + i), total), d, score + i);
}

HWY_INLINE void ScoreExperts(const GateConfig& gate, bool has_bias, std::int64_t padded, Scratch& s) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < padded; i += lanes) hn::Store(Sanitise(d, hn::Load(d, s.logit + i)), d, s.logit + i);
  switch (gate.score) {
    case Score::kSoftmax: Softmax(s.logit, padded, s.score); break;
    case Score::kSigmoid:
      for (std::int64_t i = 0; i < padded; i += lanes)
        hn::Store(SpecSigmoid(d, hn::Load(d, s.logit + i)), d, s.score + i);
      break;
    case Score::kSqrtSoftplus:
      for (std::int64_t i = 0; i < padded; i += lanes)
        hn::Store(SpecSqrtSoftplus(d, hn::Load(d, s.logit + i)), d, s.score + i);
      break;
    case Score::kLogit: std::memcpy(s.score, s.logit, static_cast<size_t>(padded) * sizeof(float)); break;
  }
  const VF none = hn::Set(d, -kInf);
  for (std::int64_t i = 0; i < padded; i += lanes) {
    VF c = hn::Load(d, s.score + i);
    if (has_bias) c = hn::Add(c, hn::Load(d, s.bias + i));
    hn::Store(hn::IfThenElse(hn::Gt(hn::Load(d, s.logit + i), none), Sanitise(d, c), none), d, s.choice + i);
  }
}

// The best so far, value descending, then index ascending: offered in ascending index, a value goes behind its equals.
struct Ranking {
  float* value;
  std::int32_t* index;
  std::int64_t capacity;
  std::int64_t count = 0;

  HWY_INLINE void Offer(float v, std::int32_t i) {
    if (count == capacity) {
      if (!(v > value[count - 1])) return;
    } else {
      ++count;
    }
    std::int64_t at = count - 1;
    for (; at > 0 && v > value[at - 1]; --at) {
      value[at] = value[at - 1];
      index[at] = index[at - 1];
    }
    value[at] = v;
    index[at] = i;
  }
};

HWY_INLINE float GroupValue(GroupScore rule, const float* HWY_RESTRICT choice, std::int64_t size) {
  float first = -kInf;
  float second = -kInf;
  for (std::int64_t i = 0; i < size; ++i) {
    const float low = std::min(first, choice[i]);
    first = std::max(first, choice[i]);
    second = std::max(second, low);
  }
  return rule == GroupScore::kMax ? first : first + second;
}

// Offers experts [begin, end); a vector none of whose lanes beats the last place is passed over at once.
HWY_INLINE void OfferExperts(const float* HWY_RESTRICT choice, std::int64_t begin, std::int64_t end, Ranking& best) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = begin;
  while (i < end) {
    const bool full = best.count == best.capacity;
    if (full && i + lanes <= end &&
        hn::AllFalse(d, hn::Gt(hn::LoadU(d, choice + i), hn::Set(d, best.value[best.count - 1])))) {
      i += lanes;
      continue;
    }
    const std::int64_t stop = std::min(end, i + lanes);
    for (; i < stop; ++i) best.Offer(choice[i], static_cast<std::int32_t>(i));
  }
}

// Weights of the chosen in slot order; slots from num_finite on keep 0.
HWY_INLINE void Weigh(const GateConfig& gate, const Scratch& s, const std::int32_t* HWY_RESTRICT ids,
                      std::int64_t num_slots, std::int64_t num_finite, float* HWY_RESTRICT weight) {
  const DF d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::fill_n(weight, kMaxTopK, 0.0f);
  if (gate.weight_rule == WeightRule::kScore) {
    for (std::int64_t i = 0; i < num_finite; ++i) weight[i] = s.score[ids[i]];
  } else {
    HWY_ALIGN float l[kMaxTopK] = {};
    float largest = -kInf;
    for (std::int64_t i = 0; i < num_finite; ++i) {
      l[i] = s.logit[ids[i]];
      largest = std::max(largest, l[i]);
    }
    if (gate.weight_rule == WeightRule::kSigmoidOfLogit) {
      for (std::int64_t i = 0; i < kMaxTopK; i += lanes) hn::Store(SpecSigmoid(d, hn::Load(d, l + i)), d, l + i);
      std::copy_n(l, num_finite, weight);
    } else {
      const VF m = hn::Set(d, largest);
      for (std::int64_t i = 0; i < kMaxTopK; i += lanes)
        hn::Store(SpecExp(d, hn::Sub(hn::Load(d, l + i), m)), d, l + i);
      float sum = 0.0f;
      for (std::int64_t i = 0; i < num_finite; ++i) sum += l[i];
      for (std::int64_t i = 0; i < num_finite; ++i) weight[i] = l[i] / sum;
    }
  }
  // "One or the other": where the factor stands in for the renormalisation, a single slot is scaled.
  const bool either = gate.scale_rule == ScaleRule::kUnlessRenorm;
  const bool renormalise = gate.renorm != Renorm::kNone && !(either && num_slots == 1);
  if (renormalise) {
    float sum = 0.0f;
    for (std::int64_t i = 0; i < num_finite; ++i) sum += weight[i];
    const float divisor = gate.renorm == Renorm::kSum ? sum + 1e-20f : std::max(sum, 1e-12f);
    for (std::int64_t i = 0; i < num_finite; ++i) weight[i] /= divisor;
  }
  if (!(either && renormalise)) {
    for (std::int64_t i = 0; i < num_finite; ++i) weight[i] *= gate.routed_scaling_factor;
  }
}

// Tokens [begin, end); returns how many of them had fewer than S finite experts.
std::int64_t SelectRange(const gate::SelectArgs& args, std::int64_t begin, std::int64_t end) {
  const GateConfig& gate = args.gate;
  const std::int64_t num_experts = args.logits.shape[1];
  const std::int64_t num_slots = args.topk_idx.view.shape[1];
  const std::int64_t group_size = num_experts / gate.n_group;
  const std::int64_t padded = ceil_div(num_experts, kSumLanes) * kSumLanes;
  const bool has_bias = args.score_bias.is_present();

  Scratch s;
  std::fill_n(s.bias, padded, 0.0f);
  if (has_bias) std::memcpy(s.bias, args.score_bias.as<float>(), static_cast<size_t>(num_experts) * sizeof(float));
  float value[kMaxTopK];
  std::int32_t index[kMaxTopK];
  HWY_ALIGN float weight[kMaxTopK];
  float group_value[kMaxExperts];
  std::int32_t group_index[kMaxExperts];

  std::int64_t num_short = 0;
  for (std::int64_t t = begin; t < end; ++t) {
    std::memcpy(s.logit, args.logits.row(t), static_cast<size_t>(num_experts) * sizeof(float));
    std::fill(s.logit + num_experts, s.logit + padded, -kInf);
    ScoreExperts(gate, has_bias, padded, s);

    Ranking best{value, index, num_slots};
    if (gate.topk_group == gate.n_group) {
      OfferExperts(s.choice, 0, num_experts, best);
    } else {
      Ranking groups{group_value, group_index, gate.topk_group};
      for (std::int64_t g = 0; g < gate.n_group; ++g) {
        groups.Offer(GroupValue(gate.group_score, s.choice + g * group_size, group_size), static_cast<std::int32_t>(g));
      }
      // Ties between experts go by index, so the kept groups are walked in ascending order.
      std::sort(group_index, group_index + groups.count);
      for (std::int64_t g = 0; g < groups.count; ++g) {
        OfferExperts(s.choice, group_index[g] * group_size, (group_index[g] + 1) * group_size, best);
      }
    }
    std::int64_t num_finite = best.count;
    while (num_finite > 0 && value[num_finite - 1] == -kInf) --num_finite;
    num_short += num_finite < num_slots ? 1 : 0;

    Weigh(gate, s, index, num_slots, num_finite, weight);
    std::memcpy(args.topk_idx.view.row(t), index, static_cast<size_t>(num_slots) * sizeof(std::int32_t));  // [T,S] i32
    std::memcpy(args.topk_weight.row(t), weight, static_cast<size_t>(num_slots) * sizeof(float));          // [T,S] f32
  }
  return num_short;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace sluice
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice {

HWY_EXPORT(PanelLanes);
HWY_EXPORT(LogitsTask);
HWY_EXPORT(SelectRange);

namespace gate {

Status logits_cpu(const LogitsArgs& args, const Ctx& ctx) {
  const std::int64_t lanes = HWY_DYNAMIC_DISPATCH(PanelLanes)();
  const LogitsConfig config = logits_config(args.x.shape[0], args.w_gate.shape[0], lanes, ctx.num_threads);
  cpu::parallel_for(config.num_tasks(), ctx.num_threads, [&](std::int64_t task, int) {
    HWY_DYNAMIC_DISPATCH(LogitsTask)(args, config, task);
  });
  return Status::ok();
}

std::string describe_logits_cpu(const LogitsArgs& args, const Machine& machine) {
  const std::int64_t lanes = HWY_DYNAMIC_DISPATCH(PanelLanes)();
  const LogitsConfig config = logits_config(args.x.shape[0], args.w_gate.shape[0], lanes, machine.num_threads);
  return fmt::format("{} panels of {} experts x {} chunks of {} tokens", config.num_panels, config.panel_experts,
                     config.num_chunks, config.chunk_tokens);
}

Status select_cpu(const SelectArgs& args, const Ctx& ctx) {
  std::atomic<std::int64_t> num_short{0};
  cpu::parallel_ranges(args.logits.shape[0], kSelectGrainTokens, ctx.num_threads,
                       [&](std::int64_t begin, std::int64_t end, int) {
                         const std::int64_t n = HWY_DYNAMIC_DISPATCH(SelectRange)(args, begin, end);
                         num_short.fetch_add(n, std::memory_order_relaxed);
                       });
  if (args.counters.is_present()) {
    args.counters.as<std::int64_t>()[static_cast<std::size_t>(Counter::kNonFiniteTokens)] += num_short.load();
  }
  return Status::ok();
}

}  // namespace gate
}  // namespace sluice
#endif  // HWY_ONCE
