// Every CUDA stage against the reference, bit by bit: outputs, rows that must stay untouched, inputs, guards.
#include <gtest/gtest.h>

#include <limits>

#include "gpu/stage_bits.h"

namespace sluice::test {
namespace {

class StagesCuda : public GpuTest {};

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST_F(StagesCuda, SelectHasTheReferencesBits) {
  using gate::SelectArgs;
  int num_cases = 0;
  for (int id = 0; id < 10; ++id) {
    for (std::int64_t experts : {1, 2, 8, 31, 32, 33, 64, 72, 160, 255, 256, 257, 384, 512, 896, 1024}) {
      for (std::int64_t groups : {1, 2, 4, 8, 9}) {
        for (std::int64_t top_k : {1, 4, 8, 32}) {
          GateConfig config = gate_preset(static_cast<GateId>(id));
          config.n_group = groups;
          config.topk_group = std::max<std::int64_t>(groups / 2, 1);
          if (groups > 1 && config.group_score == GroupScore::kNone) config.group_score = GroupScore::kTop2Sum;
          config.routed_scaling_factor = 2.5f;
          if (!validate(config, experts, top_k).is_ok()) continue;
          Buffer logits(DType::kF32, {37, experts}, {.row_pitch_elems = experts + 3});
          Buffer bias(DType::kF32, {experts});
          Buffer idx(DType::kI32, {37, top_k});
          Buffer weight(DType::kF32, {37, top_k});
          Buffer counters(DType::kI64, {kNumCounters});
          counters.fill_constant(3);
          logits.fill_normal(static_cast<std::uint64_t>(id * 131 + experts), 3.0);
          bias.fill_normal(5, 0.5);
          Rng rng(static_cast<std::uint64_t>(experts * 7 + top_k));
          for (std::int64_t e = 0; e < experts; ++e) {
            const double rare[] = {kNaN, kInf, -kInf, 0.0, -0.0, 1.0, -50.0, 100.0, -1e8, 1e-40};
            for (std::int64_t t = 0; t < 10; ++t) {
              if (rng.integer(0, 2) == 0) logits.set(t * experts + e, rare[rng.integer(0, 9)]);
            }
            logits.set(10 * experts + e, 0.0);  // all tied
            logits.set(11 * experts + e, kNaN);
            logits.set(12 * experts + e, -kInf);
            logits.set(13 * experts + e, kInf);
            logits.set(14 * experts + e, static_cast<double>(rng.integer(-2, 2)));  // many ties
            if (e != experts / 2) logits.set(15 * experts + e, -kInf);              // one finite
          }
          SelectArgs args;
          args.gate = config;
          args.logits = logits.view();
          if (config.has_score_bias) args.score_bias = bias.view();
          args.topk_idx = {idx.view()};
          args.topk_weight = weight.view();
          args.counters = counters.view();
          expect_reference_bits(gate::select_impls(), args,
                                "G" + std::to_string(id + 1) + " E=" + std::to_string(experts) +
                                    " groups=" + std::to_string(groups) + " S=" + std::to_string(top_k));
          ++num_cases;
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(num_cases, 500);
}

TEST_F(StagesCuda, RouteHasTheReferencesBits) {
  using route::Args;
  struct Case {
    std::int64_t tokens, slots, experts, first, local;
    int kind;  // 0 uniform, 1 all to one, 2 with invalid ids, 3 nothing here
  };
  for (const Case& c :
       {Case{0, 4, 8, 0, 8, 0}, Case{1, 1, 1, 0, 1, 0}, Case{5, 8, 256, 0, 256, 0}, Case{128, 8, 384, 0, 384, 0},
        Case{511, 8, 256, 64, 32, 0}, Case{512, 8, 256, 0, 256, 2}, Case{513, 8, 1024, 0, 1024, 0},
        Case{8193, 8, 256, 0, 256, 0}, Case{8193, 8, 256, 0, 256, 1}, Case{3000, 6, 160, 20, 20, 2},
        Case{700, 9, 7, 3, 4, 2}, Case{300, 32, 512, 1, 2, 3}, Case{40000, 10, 512, 0, 512, 0}}) {
    Buffer ids(DType::kI32, {c.tokens, c.slots}, {.row_pitch_elems = c.slots + 1});
    Rng rng(static_cast<std::uint64_t>(c.tokens * 31 + c.kind));
    ids.fill_with([&](std::int64_t) -> double {
      if (c.kind == 1) return 7;
      if (c.kind == 3) return -1;
      const std::int64_t wild = c.kind == 2 ? rng.integer(0, 9) : 9;
      if (wild == 0) return -1;
      if (wild == 1) return static_cast<double>(c.experts + rng.integer(0, 5));
      if (wild == 2) return -2147483648.0;
      return static_cast<double>(rng.integer(0, c.experts - 1));
    });
    Buffer offset(DType::kI32, {c.local + 1});
    Buffer row_token(DType::kI32, {c.tokens * c.slots + 5});
    Buffer row_slot(DType::kI32, {c.tokens * c.slots + 5});
    Buffer slot_row(DType::kI32, {c.tokens, c.slots}, {.row_pitch_elems = c.slots + 2});
    Buffer num_rows(DType::kI32, {1});
    Buffer counters(DType::kI64, {kNumCounters});
    counters.fill_constant(2);
    Args args;
    args.topk_idx = {ids.view()};
    args.num_experts = c.experts;
    args.first_expert = c.first;
    args.plan = {{offset.view()}, row_token.view(), row_slot.view(), slot_row.view(), num_rows.view()};
    args.counters = counters.view();
    expect_reference_bits(
        route::impls(), args,
        "T=" + std::to_string(c.tokens) + " E=" + std::to_string(c.experts) + " kind " + std::to_string(c.kind));
  }
}

TEST_F(StagesCuda, PackHasTheReferencesBits) {
  using pack::Args;
  const std::int64_t tokens = 29;
  const std::int64_t slots = 3;
  for (std::int64_t hidden : {1, 16, 96, 128, 130, 192, 1000, 7168}) {
    for (DType x_dtype : {DType::kBF16, DType::kF32, DType::kE4M3}) {
      for (DType rows_dtype : {DType::kE4M3, DType::kBF16, DType::kF32}) {
        if (x_dtype == DType::kE4M3 && rows_dtype != DType::kE4M3) continue;
        for (int form = 0; form < 4; ++form) {  // 0 by token, 1 by row, 2 weighted rows, 3 rows are tokens
          if (form == 2 && x_dtype == DType::kE4M3) continue;
          for (ScaleFormat format : {ScaleFormat::kF32, ScaleFormat::kUe8m0}) {
            const std::int64_t pitch = hidden % 16 == 0 && form % 2 == 0 ? 0 : hidden + 5;
            Buffer x(x_dtype, {tokens, hidden}, {.row_pitch_elems = pitch});
            if (x_dtype == DType::kE4M3) {
              x.fill_random_bits(3);
            } else {
              fill_hard(x, static_cast<std::uint64_t>(hidden));
            }
            const std::int64_t blocks = ceil_div(hidden, kScaleBlock);
            Buffer x_scale(DType::kF32, {blocks, tokens});
            x_scale.fill_uniform(4, 0.5, 2.0);
            // A plan: every third slot is nowhere.
            Buffer slot_row(DType::kI32, {tokens, slots});
            const std::int64_t capacity = form == 3 ? tokens : tokens * slots;
            Buffer row_token(DType::kI32, {capacity});
            Buffer row_slot(DType::kI32, {capacity});
            std::int64_t used = 0;
            for (std::int64_t i = 0; i < tokens * slots; ++i) {
              const bool here = i % 3 != 1;
              slot_row.set(i, here ? static_cast<double>(used) : -1.0);
              if (!here || form == 3) continue;
              row_token.set(used, static_cast<double>(i / slots));
              row_slot.set(used, static_cast<double>(i));
              ++used;
            }
            Buffer num_rows(DType::kI32, {1});
            num_rows.fill_constant(static_cast<double>(form == 3 ? tokens - 2 : used));
            Buffer weight(DType::kF32, {tokens, slots});
            weight.fill_normal(9);
            Buffer rows(rows_dtype, {capacity, hidden}, {.row_pitch_elems = pitch});
            Buffer rows_scale(DType::kF32, form == 1 ? std::vector<std::int64_t>{capacity, blocks}
                                                     : std::vector<std::int64_t>{blocks, capacity});
            Args args;
            args.x = x.view();
            if (x_dtype == DType::kE4M3) args.x_scale = x_scale.view();
            if (form != 3) {
              args.row_token = row_token.view();
              args.row_slot = row_slot.view();
            }
            if (form == 0) args.slot_row = slot_row.view();
            args.num_rows = num_rows.view();
            if (form == 2) args.weight = weight.view();
            args.rows = rows.view();
            if (rows_dtype == DType::kE4M3) args.rows_scale = form == 1 ? rows_scale.transposed() : rows_scale.view();
            args.scale_format = format;
            expect_reference_bits(pack::impls(), args,
                                  std::string(to_string(x_dtype)) + " -> " + std::string(to_string(rows_dtype)) +
                                      " H=" + std::to_string(hidden) + " form " + std::to_string(form));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(StagesCuda, SwigluQuantHasTheReferencesBits) {
  using swiglu_quant::Args;
  for (std::int64_t width : {1, 7, 96, 128, 192, 320, 768, 2048}) {
    for (DType h_dtype : {DType::kBF16, DType::kF32}) {
      for (DType a_dtype : {DType::kE4M3, DType::kBF16, DType::kF32}) {
        for (int kind = 0; kind < 3; ++kind) {
          for (int form = 0; form < 3; ++form) {
            const std::int64_t num_rows = 36;
            Buffer h(h_dtype, {num_rows, 2 * width});
            fill_hard(h, static_cast<std::uint64_t>(width + kind));
            Buffer offset(DType::kI32, {4});
            offset.fill_values({0, 9, 9, 31});
            Buffer counts(DType::kI32, {3});
            counts.fill_values({12, 0, 5});
            Buffer a(a_dtype, {num_rows, width});
            const std::int64_t blocks = ceil_div(width, kScaleBlock);
            Buffer a_scale(DType::kF32, form == 1 ? std::vector<std::int64_t>{num_rows, blocks}
                                                  : std::vector<std::int64_t>{blocks, num_rows});
            Args args;
            args.h = h.view();
            args.groups = form == 0   ? RowGroups::contiguous({offset.view()})
                          : form == 1 ? RowGroups::masked(counts.view(), 12)
                                      : RowGroups::whole();
            if (kind == 1) args.activation = {ActivationKind::kSiluClamped, 3.0f, 0.0f};
            if (kind == 2) args.activation = {ActivationKind::kGptOss, 7.0f, 1.702f};
            args.a = a.view();
            if (a_dtype == DType::kE4M3) args.a_scale = form == 1 ? a_scale.transposed() : a_scale.view();
            args.scale_format = kind == 1 ? ScaleFormat::kUe8m0 : ScaleFormat::kF32;
            expect_reference_bits(swiglu_quant::impls(), args,
                                  std::string(to_string(h_dtype)) + " -> " + std::string(to_string(a_dtype)) +
                                      " I=" + std::to_string(width) + " kind " + std::to_string(kind) + " form " +
                                      std::to_string(form));
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(StagesCuda, CombineHasTheReferencesBits) {
  using combine::Args;
  for (std::int64_t hidden : {1, 7, 46, 128, 1000, 7168}) {
    for (DType y_dtype : {DType::kBF16, DType::kF32}) {
      for (DType out_dtype : {DType::kBF16, DType::kF32}) {
        for (int form = 0; form < 8; ++form) {  // bit 0 shared, bit 1 gate or unweighted, bit 2 accumulate
          const std::int64_t tokens = 23;
          const std::int64_t slots = 9;
          Buffer y(y_dtype, {100, hidden});
          fill_hard(y, static_cast<std::uint64_t>(hidden + form));
          Buffer slot_row(DType::kI32, {tokens, slots});
          Rng rng(static_cast<std::uint64_t>(form));
          slot_row.fill_with([&](std::int64_t i) {
            return i / slots == 5 || rng.integer(0, 3) == 0 ? -1.0 : static_cast<double>(rng.integer(0, 99));
          });
          Buffer weight(DType::kF32, {tokens, slots});
          weight.fill_normal(2);
          Buffer shared(y_dtype, {tokens, hidden});
          fill_hard(shared, 77);
          Buffer shared_gate(DType::kF32, {tokens, 1});
          shared_gate.fill_normal(8, 3.0);
          Buffer out(out_dtype, {tokens, hidden});
          if ((form & 4) != 0) out.fill_normal(6);
          Args args;
          args.y = y.view();
          args.slot_row = slot_row.view();
          args.unweighted = (form & 3) == 2;
          if (!args.unweighted) args.topk_weight = weight.view();
          if ((form & 1) != 0) args.shared = shared.view();
          if ((form & 3) == 3) args.shared_gate = shared_gate.view();
          args.accumulate = (form & 4) != 0;
          args.out = out.view();
          expect_reference_bits(combine::impls(), args,
                                "H=" + std::to_string(hidden) + " form " + std::to_string(form));
          if (HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice::test
