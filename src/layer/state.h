// What a Layer holds after create, and the buffers of one call.
#pragma once

#include <array>

#include "sluice/layer.h"
#include "sluice/stage/combine.h"
#include "sluice/stage/gate.h"
#include "sluice/stage/grouped_gemm.h"
#include "sluice/stage/pack.h"
#include "sluice/stage/route.h"
#include "sluice/stage/route_pack.h"
#include "sluice/stage/swiglu_quant.h"
#include "sluice/stage/up_swiglu_quant.h"

namespace sluice {

// Hands out tensors of a workspace one after another. With a null base it only counts, and with `items` it
// records: planning and running walk the same code, so the two cannot disagree.
class Arena {
 public:
  // Cache lines on a CPU; on a GPU what cudaMalloc itself gives, so that every tensor allows TMA and 16-byte accesses.
  static constexpr std::int64_t align_bytes(DeviceKind kind) { return kind == DeviceKind::kCuda ? 256 : 64; }
  static constexpr std::int64_t kMaxBytes = std::int64_t{1} << 60;  // where counting stops; Layer::create refuses it

  Arena(std::byte* base, Device device, std::vector<WorkspaceItem>* items = nullptr)
      : base_(base), device_(device), items_(items) {}
  TensorView take(std::string_view what, DType dtype, std::initializer_list<std::int64_t> shape);
  // Scales [blocks,rows]: on a GPU every block begins on 16 bytes, as TMA wants it, whatever the number of rows.
  TensorView take_scale(std::string_view what, std::int64_t blocks, std::int64_t rows);
  std::span<std::byte> take_bytes(std::string_view what, std::int64_t bytes);
  template <class T>
  std::span<T> take_array(std::string_view what, std::int64_t count) {
    const std::span<std::byte> bytes = take_bytes(what, count * static_cast<std::int64_t>(sizeof(T)));
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  std::int64_t used_bytes() const { return used_; }
  Device device() const { return device_; }

 private:
  std::byte* advance(std::string_view what, std::int64_t bytes);

  std::byte* base_;
  Device device_;
  std::vector<WorkspaceItem>* items_;
  std::int64_t used_ = 0;
};

// One FFN's tensors, in data-flow order.
struct FfnBuffers {
  Rows rows;                    // [R,H] (+ [Hb,R])
  TensorView h;                 // [R,2I]; without memory where one kernel makes a of rows
  Rows a;                       // [R,I] (+ [Ib,R])
  TensorView y;                 // [R,H]
  bool groups_settled = false;  // a kernel of its own made `rows`, after the one that made their groups
};

struct Buffers {
  TensorView logits;       // [T,E] f32
  ExpertIds topk_idx;      // [T,S] i32
  TensorView topk_weight;  // [T,S] f32
  RoutePlan plan;
  FfnBuffers routed;
  FfnBuffers shared;
  TensorView shared_gate;  // [T,1] f32
  std::span<std::byte> scratch;
};

// A stage resolved to a function.
template <class Args>
struct Stage {
  const Impl<Args>* impl = nullptr;
  Status operator()(const Args& args, const Ctx& ctx) const { return impl->run(args, ctx); }
};

// A stage that touches a tensor the caller brings, which may have one of several dtypes: a function for each, or the reason
// why there is none. A kernel of a GPU may also be particular about addresses and strides, which only the call knows: then
// the next row of the table that can run stands by. Both are in the stage's report.
template <class Args>
struct CallerStage {
  struct Choice {
    const Impl<Args>* impl = nullptr;
    const Impl<Args>* stand_by = nullptr;  // null: none
    Status refusal;                        // why impl is null
  };
  std::array<Choice, kNumDTypes> by_dtype{};
  const Machine* machine = nullptr;

  Choice& of(DType dtype) { return by_dtype[static_cast<std::size_t>(dtype)]; }
  const Choice& of(DType dtype) const { return by_dtype[static_cast<std::size_t>(dtype)]; }
  Status serves(DType dtype) const { return of(dtype).refusal; }
  // Whether one of the two takes these tensors as they lie in memory.
  Status accepts(DType dtype, const Args& args) const {
    const Choice& choice = of(dtype);
    if (machine->device.kind != DeviceKind::kCuda) return Status::ok();
    const Status status = choice.impl->can_run(args, *machine);
    if (status.is_ok() || choice.stand_by == nullptr) return status;
    return choice.stand_by->can_run(args, *machine);
  }
  Status operator()(DType dtype, const Args& args, const Ctx& ctx) const {
    const Choice& choice = of(dtype);
    const bool may_decline = machine->device.kind == DeviceKind::kCuda && choice.stand_by != nullptr;
    const bool stands_by = may_decline && !choice.impl->can_run(args, *machine).is_ok();
    return (stands_by ? choice.stand_by : choice.impl)->run(args, ctx);
  }
};

struct FfnStages {
  CallerStage<pack::Args> pack;  // by the dtype of x
  Stage<grouped_gemm::Args> up;
  Stage<swiglu_quant::Args> act;
  Stage<grouped_gemm::Args> down;
  // One kernel for up and act, in calls of up to so many rows: 0 where there is none.
  Stage<up_swiglu_quant::Args> up_act;
  std::int64_t most_fused_rows = 0;
};

struct Spread;       // layer/spread.h
struct TensorGroup;  // layer/tensor_parallel.h

struct Layer::State {
  MoeConfig config;
  LayerWeights weights;
  LayerOptions options;
  DataPath path;         // routed experts
  DataPath shared_path;  // shared expert: its own weights decide

  CallerStage<gate::LogitsArgs> logits;  // by the dtype of x
  Stage<gate::SelectArgs> select;
  Stage<gate::BothArgs> logits_and_select;  // in place of the two for few tokens in bf16; may have none
  Stage<route::Args> route;
  Stage<route_pack::Args> route_pack;  // one kernel for route and pack, in calls of few slots; null impl: none
  FfnStages routed;
  FfnStages shared;
  CallerStage<gate::LogitsArgs> shared_logits;  // by the dtype of x
  CallerStage<combine::Args> combine;           // by the dtype of out
  CallerStage<pack::Args> group_pack;           // rows a caller has grouped, by their dtype

  std::unique_ptr<Spread> spread;       // the experts are spread over ranks; null: all that tokens reach are here
  std::unique_ptr<TensorGroup> tensor;  // I is cut over ranks; null: it is whole

  std::int64_t scratch_bytes = 0;
  std::int64_t workspace_bytes = 0;
  std::vector<WorkspaceItem> items;
  std::vector<StageReport> reports;

  Device device() const { return options.machine.device; }
  State();
  ~State();
  // Of a tensor group whose shared expert is whole on every rank, the first runs it.
  bool has_shared() const;
  // R of a call with so many tokens: a row a slot; of a layer over several ranks what a round of all of them may bring.
  std::int64_t rows_of_tokens(std::int64_t num_tokens) const;
  std::int64_t max_rows() const;
};

// The routed experts' tensors for R rows.
FfnBuffers lay_out_experts(const Layer::State& state, Arena& arena, std::int64_t num_rows);
// The tensors of a call with T tokens and R rows.
Buffers lay_out(const Layer::State& state, Arena& arena, std::int64_t num_tokens, std::int64_t num_rows);

// Arguments of the stages, the same for planning (null pointers) and running.
gate::LogitsArgs logits_args(const Layer::State& state, const Buffers& b, const TensorView& x);
gate::SelectArgs select_args(const Layer::State& state, const Buffers& b, const TensorView& counters);
route::Args route_args(const Layer::State& state, const Buffers& b, const TensorView& counters);
pack::Args pack_args(const Layer::State& state, const Buffers& b, const TensorView& x, const TensorView& x_scale);
grouped_gemm::Args up_args(const FfnWeights& weights, const FfnBuffers& b, const RowGroups& groups);
// Rows in their given order, without a plan: the shared expert's tokens, and rows a caller has grouped.
pack::Args whole_pack_args(const Layer::State& state, const Rows& rows, const TensorView& x, const RowGroups& groups);
swiglu_quant::Args act_args(const Layer::State& state, const FfnBuffers& b, const RowGroups& groups);
up_swiglu_quant::Args up_act_args(const Layer::State& state, const FfnWeights& weights, const FfnBuffers& b,
                                  const RowGroups& groups);
grouped_gemm::Args down_args(const FfnWeights& weights, const FfnBuffers& b, const RowGroups& groups);
gate::LogitsArgs shared_logits_args(const Layer::State& state, const Buffers& b, const TensorView& x);
combine::Args combine_args(const Layer::State& state, const Buffers& b, const TensorView& y, const TensorView& out);

}  // namespace sluice
