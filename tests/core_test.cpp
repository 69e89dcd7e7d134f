// The vocabulary: statuses, dtypes, views, axis binding, choosing, configs, row groups, expert ownership.
#include "sluice/core.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "sluice/config.h"
#include "sluice/plan.h"
#include "sluice/transport.h"

namespace sluice {
namespace {

bool says(const Status& status, std::string_view word) { return status.message().find(word) != std::string::npos; }

TEST(Status, CarriesCodeAndText) {
  EXPECT_TRUE(Status::ok().is_ok());
  EXPECT_EQ(Status::ok().message(), "");
  const Status bad(StatusCode::kBadData, "w[3] is NaN");
  EXPECT_FALSE(bad.is_ok());
  EXPECT_EQ(bad.code(), StatusCode::kBadData);
  EXPECT_EQ(bad.with_context("layer 4").message(), "layer 4: w[3] is NaN");
  EXPECT_EQ(bad.with_context("layer 4").with_context("layer 4").message(), "layer 4: w[3] is NaN");
  EXPECT_EQ(bad.with_context("layer 4").code(), StatusCode::kBadData);
  EXPECT_TRUE(Status::ok().with_context("x").is_ok());
  const Result<int> value(3);
  EXPECT_TRUE(value.is_ok());
  EXPECT_EQ(*value, 3);
  const Result<int> none(bad);
  EXPECT_EQ(none.status().message(), "w[3] is NaN");
}

TEST(DType, EveryOneHasASizeAndAName) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const DType d = static_cast<DType>(i);
    EXPECT_GE(size_bytes(d), 1) << i;
    EXPECT_LE(size_bytes(d), 8) << i;
    EXPECT_EQ(to_string(d).find("unknown"), std::string_view::npos) << i;
    for (int j = 0; j < i; ++j) EXPECT_NE(to_string(d), to_string(static_cast<DType>(j)));
  }
  const DTypeSet set{DType::kBF16, DType::kF32};
  EXPECT_TRUE(set.has(DType::kBF16));
  EXPECT_FALSE(set.has(DType::kF16));
  EXPECT_EQ(set.to_string(), "f32 or bf16");
}

constexpr TensorSpec kH{"h", DType::kBF16, {Axis::kR, Axis::kI2}};
constexpr TensorSpec kA{"a", DType::kE4M3, {Axis::kR, Axis::kI}};
constexpr TensorSpec kScale = TensorSpec{"a_scale", DType::kF32, {Axis::kIb, Axis::kR}}.opt().strided();
constexpr TensorSpec kOffset{"expert_offset", DType::kI32, {Axis::kL1}};
constexpr TensorSpec kWeight{"w", DType::kBF16, {Axis::kL, Axis::kN, Axis::kK}};

TensorView plan(DType dtype, std::initializer_list<std::int64_t> shape) {
  return TensorView::dense(nullptr, dtype, shape);
}

TEST(AxisBinder, DerivedAxesAreTakenFromTheirBase) {
  AxisBinder binder("stage");
  ASSERT_TRUE(binder.bind(kH, plan(DType::kBF16, {7, 2 * 192}), Phase::kPlan).is_ok());
  EXPECT_EQ(binder.extent(Axis::kI), 192);
  EXPECT_EQ(binder.extent(Axis::kIb), 2);
  EXPECT_TRUE(binder.bind(kA, plan(DType::kE4M3, {7, 192}), Phase::kPlan).is_ok());
  EXPECT_TRUE(binder.bind(kScale, plan(DType::kF32, {2, 7}), Phase::kPlan).is_ok());
  EXPECT_TRUE(binder.bind(kScale, {}, Phase::kPlan).is_ok()) << "optional";
  ASSERT_TRUE(binder.bind(kOffset, plan(DType::kI32, {5}), Phase::kPlan).is_ok());
  EXPECT_EQ(binder.extent(Axis::kL), 4);
}

TEST(AxisBinder, MessagesNameTensorsAxesAndBothValues) {
  AxisBinder binder("swiglu_quant");
  ASSERT_TRUE(binder.bind(kH, plan(DType::kBF16, {7, 384}), Phase::kPlan).is_ok());
  const Status status = binder.bind(kA, plan(DType::kE4M3, {7, 191}), Phase::kPlan);
  for (const char* word : {"swiglu_quant", "a[R,I] e4m3", "axis 1 (I)", "191", "192", "h[R,2I]", "bf16[7,384]"}) {
    EXPECT_TRUE(says(status, word)) << word << " / " << status.message();
  }
  EXPECT_TRUE(says(binder.bind(kA, {}, Phase::kPlan), "missing"));
  EXPECT_TRUE(says(binder.bind(kA, plan(DType::kBF16, {7, 192}), Phase::kPlan), "must be e4m3, got bf16[7,192]"));
  EXPECT_TRUE(says(binder.bind(kA, plan(DType::kE4M3, {7, 192, 1}), Phase::kPlan), "2 axes"));
  EXPECT_TRUE(says(AxisBinder("s").bind(kH, plan(DType::kBF16, {7, 383}), Phase::kPlan), "odd"));
  EXPECT_TRUE(says(AxisBinder("s").bind(kH, plan(DType::kBF16, {-1, 4}), Phase::kPlan), "-1"));
  AxisBinder fixed("s");
  fixed.set(Axis::kR, 9, "the plan");
  EXPECT_TRUE(says(fixed.bind(kH, plan(DType::kBF16, {7, 384}), Phase::kPlan), "expected 9 from the plan"));
}

// Case 140 and 46: what is strided in a way a stage does not read is refused, never read as if dense.
TEST(AxisBinder, Case140_StridesAreJudged) {
  const auto bind = [](auto change) {
    TensorView view = plan(DType::kBF16, {3, 4, 8});
    change(view);
    return AxisBinder("s").bind(kWeight, view, Phase::kPlan);
  };
  EXPECT_TRUE(bind([](TensorView&) {}).is_ok());
  EXPECT_TRUE(bind([](TensorView& v) { v.stride = {100, 9, 1}; }).is_ok()) << "pitched rows";
  EXPECT_FALSE(bind([](TensorView& v) { v.stride = {32, 8, 2}; }).is_ok()) << "every other column";
  EXPECT_FALSE(bind([](TensorView& v) { v.stride = {32, 1, 4}; }).is_ok()) << "transposed";
  EXPECT_FALSE(bind([](TensorView& v) { v.stride = {32, 7, 1}; }).is_ok()) << "overlapping rows";
  EXPECT_FALSE(bind([](TensorView& v) { v.stride = {31, 8, 1}; }).is_ok()) << "overlapping matrices";
  EXPECT_FALSE(bind([](TensorView& v) { v.stride = {0, 8, 1}; }).is_ok()) << "broadcast";
  EXPECT_FALSE(bind([](TensorView& v) { v.stride = {32, -8, 1}; }).is_ok()) << "reversed";
  EXPECT_TRUE(bind([](TensorView& v) {
                v.shape = {0, 4, 8};
                v.stride = {0, 0, 0};
              }).is_ok())
      << "nothing to read";
  EXPECT_TRUE(bind([](TensorView& v) {
                v.shape = {1, 4, 8};
                v.stride = {0, 8, 1};
              }).is_ok())
      << "the stride of a single element does not matter";
}

// A scale of the whole tensor is one value seen along an axis with a stride of 0; only where a spec allows it.
TEST(AxisBinder, RepeatedScales) {
  const auto bind = [](const TensorSpec& spec, std::array<std::int64_t, kMaxRank> stride) {
    TensorView view = plan(DType::kF32, {4, 8, 1});
    view.stride = stride;
    return AxisBinder("s").bind(spec, view, Phase::kPlan);
  };
  constexpr TensorSpec kPlain{"s", DType::kF32, {Axis::kL, Axis::kN, Axis::kOne}};
  for (const auto& stride : {std::array<std::int64_t, 3>{0, 0, 0}, {1, 0, 0}, {0, 1, 0}, {8, 1, 1}, {1, 4, 1}}) {
    EXPECT_TRUE(bind(kPlain.repeated(), stride).is_ok()) << stride[0] << ' ' << stride[1];
  }
  EXPECT_TRUE(says(bind(kPlain.repeated(), {8, -1, 1}), "axis 1 has stride -1 elements, expected at least 0"));
  EXPECT_TRUE(says(bind(kPlain.repeated(), {3, 1, 1}), "so that elements overlap"));
  EXPECT_FALSE(bind(kPlain.strided(), {0, 1, 1}).is_ok());
  EXPECT_FALSE(bind(kPlain, {8, 0, 1}).is_ok());
}

TEST(AxisBinder, TwoShapesAreToldApartByTheirExtents) {
  constexpr TensorSpec kRowScale = TensorSpec{"a_scale", DType::kF32, {Axis::kOne, Axis::kR}}.opt().repeated();
  const auto bind = [&](std::int64_t width, TensorView view) {
    AxisBinder binder("swiglu_quant");
    EXPECT_TRUE(binder.bind(kA, plan(DType::kE4M3, {7, width}), Phase::kPlan).is_ok());
    return binder.bind_either(kScale, kRowScale, view, Phase::kPlan);
  };
  EXPECT_TRUE(bind(192, plan(DType::kF32, {2, 7})).is_ok());
  EXPECT_TRUE(bind(192, plan(DType::kF32, {1, 7})).is_ok());
  EXPECT_TRUE(bind(192, {}).is_ok()) << "optional";
  TensorView one = plan(DType::kF32, {1, 7});
  one.stride[1] = 0;
  EXPECT_TRUE(bind(192, one).is_ok());
  EXPECT_TRUE(bind(100, one).is_ok()) << "where both shapes fit, what either allows";
  TensorView blocks = plan(DType::kF32, {2, 7});
  blocks.stride[1] = 0;
  EXPECT_TRUE(says(bind(192, blocks), "axis 1 has stride 0"));
  const Status neither = bind(192, plan(DType::kF32, {3, 7}));
  EXPECT_TRUE(says(neither, "a_scale[Ib,R] f32 axis 0 (Ib) is 3, expected 2")) << neither.message();
  EXPECT_TRUE(says(neither, "nor is it a_scale[1,R] f32")) << neither.message();
  EXPECT_TRUE(says(bind(192, plan(DType::kBF16, {1, 7})), "must be f32"));
}

TEST(AxisBinder, PointersAreJudgedAtRunTimeOnly) {
  alignas(16) std::byte memory[64] = {};
  TensorView view = TensorView::dense(memory, DType::kBF16, {2, 3});
  constexpr TensorSpec kSpec{"x", DType::kBF16, {Axis::kT, Axis::kH}};
  EXPECT_TRUE(AxisBinder("s").bind(kSpec, view, Phase::kRun).is_ok());
  view.data = memory + 1;
  EXPECT_TRUE(says(AxisBinder("s").bind(kSpec, view, Phase::kRun), "1 bytes off"));
  EXPECT_TRUE(AxisBinder("s").bind(kSpec, view, Phase::kPlan).is_ok());
  view.data = nullptr;
  EXPECT_TRUE(says(AxisBinder("s").bind(kSpec, view, Phase::kRun), "null"));
  view.shape[0] = 0;
  EXPECT_TRUE(AxisBinder("s").bind(kSpec, view, Phase::kRun).is_ok()) << "Case 144: nothing is behind an empty tensor";
}

// ---------------------------------------------------------------------------------------------------------

struct ToyArgs {
  int n = 0;
};
Status toy_can(const ToyArgs& args, const Machine&) {
  return args.n % 2 == 0 ? Status::ok() : Status(StatusCode::kUnsupported, "n = " + std::to_string(args.n) + " is odd");
}
Status toy_any(const ToyArgs&, const Machine&) { return Status::ok(); }
const Impl<ToyArgs> kToyTable[] = {
    {"gpu", DeviceKind::kCuda, toy_any}, {"even", DeviceKind::kCpu, toy_can}, {"reference", DeviceKind::kCpu, toy_any}};

TEST(Choose, FirstThatCanRunWithReasonsForTheRest) {
  const Machine machine;
  const auto pick = [&](int n, Selection selection) {
    return choose<ToyArgs>("toy", kToyTable, {n}, machine, selection);
  };
  auto even = pick(2, {});
  ASSERT_TRUE(even.is_ok());
  EXPECT_EQ(even->impl->name, "even");
  ASSERT_EQ(even->declined.size(), 2u);
  EXPECT_NE(even->declined[0].reason.find("cuda"), std::string::npos);
  auto odd = pick(3, {});
  EXPECT_EQ(odd->impl->name, "reference");
  EXPECT_EQ(odd->declined[1].reason, "n = 3 is odd");
  EXPECT_EQ(pick(2, {"reference", {}})->impl->name, "reference");
  EXPECT_EQ(pick(2, {"", {"even"}})->impl->name, "reference");
  const Status forced = pick(3, {"even", {}}).status();
  EXPECT_EQ(forced.code(), StatusCode::kUnsupported);
  EXPECT_TRUE(says(forced, "n = 3 is odd")) << "no silent fallback: " << forced.message();
  const Status unknown = pick(3, {"odd", {}}).status();
  EXPECT_EQ(unknown.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(says(unknown, "gpu, even, reference")) << unknown.message();
  EXPECT_TRUE(says(pick(2, {"", {"even", "reference"}}).status(), "disabled"));
}

// A row's own reason is told wherever the chosen one stands: before it, behind it, forced or not.
TEST(Choose, DisabledAndOnAnotherDeviceAreSaidOfRowsBehindTheChosenOneToo) {
  Machine gpu;
  gpu.device.kind = DeviceKind::kCuda;
  const auto reasons = [&](const Machine& machine, const Selection& selection) {
    std::map<std::string, std::string> by_name;
    const auto choice = choose<ToyArgs>("toy", kToyTable, {2}, machine, selection);
    if (!choice) return by_name;
    for (const Declined& d : choice->declined) by_name[d.name] = d.reason;
    by_name[std::string(choice->impl->name)] = "chosen";
    return by_name;
  };
  const std::string disabled = "disabled by the caller or by SLUICE_DISABLE";
  const std::string on_gpu = "runs on cuda, the layer is on cpu", on_cpu = "runs on cpu, the layer is on cuda";
  using Reasons = std::map<std::string, std::string>;
  EXPECT_EQ(reasons({}, {}),
            (Reasons{{"gpu", on_gpu}, {"even", "chosen"}, {"reference", "not asked: even comes first"}}));
  EXPECT_EQ(reasons({}, {"", {"reference"}}), (Reasons{{"gpu", on_gpu}, {"even", "chosen"}, {"reference", disabled}}));
  EXPECT_EQ(reasons({}, {"even", {"reference", "gpu"}}),
            (Reasons{{"gpu", disabled}, {"even", "chosen"}, {"reference", disabled}}));
  EXPECT_EQ(reasons({}, {"reference", {}}),
            (Reasons{{"gpu", on_gpu}, {"even", "not asked: reference was forced"}, {"reference", "chosen"}}));
  EXPECT_EQ(reasons(gpu, {}), (Reasons{{"gpu", "chosen"}, {"even", on_cpu}, {"reference", on_cpu}}));
  EXPECT_EQ(reasons(gpu, {"", {"even"}}), (Reasons{{"gpu", "chosen"}, {"even", disabled}, {"reference", on_cpu}}));
  EXPECT_TRUE(reasons({}, {"even", {"even"}}).empty()) << "forced and disabled is no choice";
}

// ---------------------------------------------------------------------------------------------------------

TEST(Config, PrecisionsParseAndPrint) {
  for (Precision p : {Precision::kW8A8, Precision::kW8A16, Precision::kBF16, Precision::kF32}) {
    const auto parsed = parse_precision(to_string(p));
    ASSERT_TRUE(parsed.is_ok());
    EXPECT_EQ(*parsed, p);
  }
  EXPECT_TRUE(says(parse_precision("fp16").status(), "fp16"));
}

TEST(Config, DataPathsFollowTheWeights) {
  const auto path = data_path(Precision::kW8A8, DType::kE4M3);
  ASSERT_TRUE(path.is_ok());
  EXPECT_EQ(path->rows, DType::kE4M3);
  EXPECT_EQ(path->h, DType::kBF16);
  EXPECT_EQ(path->a, DType::kE4M3);
  EXPECT_EQ(path->y, DType::kBF16);
  EXPECT_FALSE(path->row_scales);
  EXPECT_EQ(path->scale_blocks(300), 3);
  const auto rows = data_path(Precision::kW8A8, DType::kE4M3, true);
  ASSERT_TRUE(rows.is_ok());
  EXPECT_TRUE(rows->row_scales);
  EXPECT_EQ(rows->a, DType::kE4M3);
  EXPECT_EQ(rows->scale_blocks(300), 1);
  const auto int8 = data_path(Precision::kW8A8, DType::kI8);
  ASSERT_TRUE(int8.is_ok());
  EXPECT_TRUE(int8->row_scales) << "i8 has no blocks";
  EXPECT_EQ(int8->rows, DType::kI8);
  EXPECT_EQ(int8->h, DType::kBF16);
  EXPECT_EQ(int8->a, DType::kI8);
  EXPECT_EQ(int8->y, DType::kBF16);
  for (DType d : {DType::kE4M3, DType::kI8}) {
    const auto wide = data_path(Precision::kW8A16, d, true);
    ASSERT_TRUE(wide.is_ok());
    EXPECT_EQ(wide->rows, DType::kBF16);
    EXPECT_FALSE(wide->row_scales) << "nothing is quantised";
    EXPECT_TRUE(says(data_path(Precision::kBF16, d, true).status(), "dequantise"));
  }
  for (DType d : {DType::kE4M3, DType::kI8, DType::kBF16, DType::kF32})
    EXPECT_TRUE(data_path(Precision::kF32, d).is_ok());
  EXPECT_TRUE(data_path(Precision::kBF16, DType::kBF16).is_ok());
  EXPECT_TRUE(says(data_path(Precision::kBF16, DType::kE4M3).status(), "dequantise"));
  EXPECT_TRUE(says(data_path(Precision::kW8A8, DType::kBF16).status(), "w8a8"));
  EXPECT_TRUE(says(data_path(Precision::kW8A16, DType::kF32).status(), "w8a16"));
  EXPECT_TRUE(says(data_path(Precision::kF32, DType::kI16).status(), "i16"));
}

TEST(Config, DescriptionsSayWhatTheGateDoes) {
  GateConfig gate = gate_preset(GateId::kG3);
  gate.n_group = 8;
  gate.topk_group = 4;
  gate.routed_scaling_factor = 2.5f;
  EXPECT_EQ(describe(gate), "sigmoid + bias, 8 groups keep 4 by top-2 sum, renormalised, x2.5");
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(describe(gate_preset(static_cast<GateId>(i))).empty());
  EXPECT_EQ(describe(Activation{}), "silu(g)*u");
}

TEST(Config, ValidateNamesTheField) {
  MoeConfig config;
  config.hidden = 8;
  config.intermediate = 4;
  config.num_experts = 4;
  config.top_k = 2;
  config.gate = gate_preset(GateId::kG4);
  EXPECT_TRUE(validate(config).is_ok());
  const auto refused = [&](auto change, std::string_view word) {
    MoeConfig c = config;
    change(c);
    const Status status = validate(c);
    return !status.is_ok() && says(status, word);
  };
  EXPECT_TRUE(refused([](MoeConfig& c) { c.hidden = 0; }, "hidden = 0"));
  EXPECT_TRUE(refused([](MoeConfig& c) { c.intermediate = -3; }, "intermediate = -3"));
  EXPECT_TRUE(refused([](MoeConfig& c) { c.shared_intermediate = -1; }, "shared_intermediate = -1"));
  EXPECT_TRUE(refused([](MoeConfig& c) { c.has_shared_gate = true; }, "has_shared_gate"));
  EXPECT_TRUE(refused(
      [](MoeConfig& c) {
        c.first_expert = 2;
        c.num_local = 3;
      },
      "[2, 5)"));
  EXPECT_TRUE(refused([](MoeConfig& c) { c.weight_on_input = true; }, "top_k = 2"));
  EXPECT_TRUE(refused([](MoeConfig& c) { c.activation.kind = ActivationKind::kSiluClamped; }, "limit = 0"));
  EXPECT_TRUE(refused([](MoeConfig& c) { c.activation = {ActivationKind::kGptOss, NAN, 1.702f}; }, "limit = nan"));
}

// ---------------------------------------------------------------------------------------------------------

TEST(RowGroups, RangesNeverLeaveTheTensor) {
  std::vector<std::int32_t> offsets{0, 3, 3, -7, 900};
  const RowGroups contiguous = RowGroups::contiguous({TensorView::dense(offsets.data(), DType::kI32, {5})});
  EXPECT_EQ(row_range(contiguous, 0, 10).end, 3);
  EXPECT_EQ(row_range(contiguous, 1, 10).begin, row_range(contiguous, 1, 10).end);
  std::vector<std::int32_t> counts{2, -1, 99};
  const RowGroups masked = RowGroups::masked(TensorView::dense(counts.data(), DType::kI32, {3}), 4);
  EXPECT_EQ(row_range(masked, 0, 12).end, 2);
  for (const RowGroups* groups : {&contiguous, &masked}) {
    for (std::int64_t g = 0; g < groups->num_groups(); ++g) {
      const RowRange range = row_range(*groups, g, 10);
      EXPECT_LE(0, range.begin);
      EXPECT_LE(range.begin, range.end);
      EXPECT_LE(range.end, 10);
    }
  }
  EXPECT_EQ(row_range(masked, 2, 12).end, 12) << "a count past the group's rows is cut";
}

TEST(RowGroups, ExactlyOneFormAndMatchingExtents) {
  const ExpertOffsets offsets{plan(DType::kI32, {5})};
  const TensorView counts = plan(DType::kI32, {4});
  EXPECT_TRUE(check_row_groups("s", RowGroups::contiguous(offsets), 4, 100, Phase::kPlan).is_ok());
  EXPECT_TRUE(check_row_groups("s", RowGroups::masked(counts, 25), 4, 100, Phase::kPlan).is_ok());
  EXPECT_TRUE(says(check_row_groups("s", {}, 4, 100, Phase::kPlan), "expert_offset[L+1] is missing"));
  EXPECT_TRUE(says(check_row_groups("s", {RowGroups::Form::kMasked, offsets, counts, 25}, 4, 100, Phase::kPlan),
                   "counts alone"));
  EXPECT_TRUE(says(check_row_groups("s", RowGroups::contiguous(offsets), 5, 100, Phase::kPlan), "expert_offset"));
  EXPECT_TRUE(check_row_groups("s", RowGroups::whole(), 1, 100, Phase::kPlan).is_ok());
  EXPECT_TRUE(says(check_row_groups("s", RowGroups::whole(), 4, 100, Phase::kPlan), "L = 4"));
  EXPECT_EQ(row_range(RowGroups::whole(), 0, 9).end, 9);
  EXPECT_TRUE(says(check_row_groups("s", RowGroups::masked(counts, 24), 4, 100, Phase::kPlan), "24"));
}

TEST(Ownership, Case114_BalancedSplitAndItsInverse) {
  const auto sizes = [](std::int64_t experts, std::int64_t ranks) {
    std::vector<std::int64_t> n;
    for (std::int64_t r = 0; r < ranks; ++r)
      n.push_back(experts_of_rank(experts, ranks, r).end - experts_of_rank(experts, ranks, r).begin);
    return n;
  };
  EXPECT_EQ(sizes(30, 8), (std::vector<std::int64_t>{4, 4, 4, 4, 4, 4, 3, 3}));
  EXPECT_EQ(sizes(5, 2), (std::vector<std::int64_t>{3, 2}));
  EXPECT_EQ(sizes(3, 4), (std::vector<std::int64_t>{1, 1, 1, 0}));
  for (std::int64_t experts = 1; experts <= 70; ++experts) {
    for (std::int64_t ranks = 1; ranks <= 12; ++ranks) {
      std::int64_t next = 0;
      for (std::int64_t r = 0; r < ranks; ++r) {
        const ExpertRange range = experts_of_rank(experts, ranks, r);
        ASSERT_EQ(range.begin, next);
        next = range.end;
        for (std::int64_t e = range.begin; e < range.end; ++e)
          ASSERT_EQ(owner(experts, ranks, e), r) << experts << "/" << ranks;
      }
      ASSERT_EQ(next, experts);
    }
  }
}

TEST(Machine, DetectsThisOne) {
  EXPECT_GE(Machine::detect_cpu().num_threads, 1);
  EXPECT_EQ(Machine::detect_cpu(5).num_threads, 5);
  EXPECT_FALSE(Machine::detect_cpu().simd.empty());
}

}  // namespace
}  // namespace sluice
