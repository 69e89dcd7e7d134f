// The MoE layer: create once, forward many. Creation checks everything, books every byte of workspace and
// resolves every stage to a function; the forward calls only run: they allocate nothing of their own (with more than one
// thread, oneTBB may grow its pool of task objects).
//
// A Layer is immutable after create and may be used from several threads at once, each with its own workspace.
//
// On a GPU (options.machine = Machine::detect_cuda(n)) every tensor and the workspace are memory of that GPU, the work is
// queued on Ctx::stream and the calls return before it is done: no synchronisation, no allocation, so that a forward may be
// captured in a CUDA graph and replayed with other values in the same tensors. Weights come there by upload
// (sluice/device.h). The caller's current device is put back.
#pragma once

#include <map>

#include "sluice/placement.h"
#include "sluice/transport.h"
#include "sluice/weights.h"

namespace sluice {

struct LayerOptions {
  Precision precision = Precision::kF32;
  std::int64_t max_tokens = 0;  // T of the largest forward; workspace is sized for it
  // forward_masked: rows per expert of the padded layout it will be given; 0: not used.
  std::int64_t max_rows_per_expert = 0;
  // forward_grouped and forward_masked: rows in all. 0: max_tokens * S, or what a round of all ranks may bring.
  std::int64_t max_rows = 0;
  bool routed_only = false;  // leave the shared expert out
  bool checked = false;      // invalid expert ids are errors instead of counted; needs a layer on the CPU
  Machine machine = Machine::detect_cpu();
  bool plan_only = false;  // resolve and size the layer for a machine without its weights; its forwards refuse
  // Per stage: "gate.logits", "gate.select", "route", "pack", "grouped_gemm", "swiglu_quant", "combine"; "*" for all.
  // "route_pack" and "up_swiglu_quant" are one kernel for two of them ("cuda-fused"), or "composed".
  std::map<std::string, Selection> selection;

  // Experts spread over the ranks of a transport: each rank brings the weights of its own experts and its own tokens, and
  // gets their outputs, to the bits of one rank that holds every expert. create, forward and forward_routed are then
  // collective: every rank calls them, in the same order, also with T = 0. A rank that refuses its call tells the others,
  // who fail with kPeerFailure. Ranks must agree on all but their tokens, experts and threads; create compares.
  std::shared_ptr<Transport> transport = local_transport();
  // Which rank holds which experts; empty: the balanced split. Of one rank slot i holds expert i. config.first_expert is 0 or
  // the expert of this rank's first slot.
  Placement placement;
  // Tokens of a call go in rounds, each of as many as fit this budget for what may arrive from all ranks, or of one. The
  // buffers and the rows of the worst routing count: P * S rows for each token of a round.
  std::int64_t round_bytes = std::int64_t{1} << 30;
  std::int64_t max_round_tokens = 0;  // 0: what the budget allows; else at most so many

  // I cut over the ranks of another transport: each rank brings the same tokens and routing, and its shard of w13 and w2
  // (LoadOptions::tensor_shard), and gets the whole outputs. The partial sums are added in order of rank in fp32 and rounded
  // once: the same bits on every rank and in every run, within the bound of docs/numerics.md of those of one rank, not
  // equal to them. Null or one rank: I is whole. With `transport` beside it, the ranks form a grid of the two.
  // forward_grouped and forward_masked are refused: their rows would be partial sums.
  std::shared_ptr<Transport> tensor_transport;
  bool shared_is_whole = false;  // every rank of the tensor group brings the whole shared expert: the first adds it
};

// What is named in place of an implementation where a fused stage is left to the two stages it stands for.
inline constexpr std::string_view kComposed = "composed";

// The implementations of every stage, fastest first, reference last; stages as LayerOptions::selection names them.
struct StageNames {
  std::string stage;
  std::vector<std::string> impls;
};
std::vector<StageNames> stage_names();
// Lists of names: "cuda-wgmma,gate.logits:cuda" turns an implementation off wherever a stage has it, or in one stage; or
// forces it there. An unknown name is an error that lists what there is; `option` is what the error calls the list.
Status disable(std::string_view list, std::map<std::string, Selection>& selection, std::string_view option = "disable");
Status force(std::string_view list, std::map<std::string, Selection>& selection, std::string_view option = "force");
// What the environment variable SLUICE_DISABLE turns off. Layer::create does this itself: whoever runs an application can
// take a path out without rebuilding it.
Status disable_from_environment(std::map<std::string, Selection>& selection);

// One line of the workspace: what it is for, and its size with the formula spelled out in letters.
struct WorkspaceItem {
  std::string name;  // "h[R,2I] bf16"
  std::int64_t offset_bytes = 0;
  std::int64_t bytes = 0;
};

// One stage of the layer as it was resolved.
struct StageReport {
  std::string stage;          // "up: grouped_gemm"
  std::string impl;           // chosen
  std::string configuration;  // what the implementation says of itself
  std::string tensors;        // dtypes and shapes at max_tokens
  std::int64_t scratch_bytes = 0;
  std::vector<Declined> declined;
};

class Layer {
 public:
  struct State;  // src/layer/state.h

  static Result<Layer> create(const MoeConfig& config, LayerWeights weights, const LayerOptions& options);

  Layer(Layer&&) noexcept;
  Layer& operator=(Layer&&) noexcept;
  ~Layer();

  const MoeConfig& config() const;
  const LayerOptions& options() const;
  std::int64_t workspace_bytes() const;  // what Ctx::workspace must hold, for any entry point up to the planned sizes
  const std::vector<WorkspaceItem>& workspace_items() const;
  const std::vector<StageReport>& stages() const;

  // Everything a forward may give back besides `out`; absent views are kept in the workspace.
  struct Routing {
    ExpertIds topk_idx;      // [T,S] i32, out
    TensorView topk_weight;  // [T,S] f32, out
    TensorView counters;     // [kCounters] i64, added to
  };

  // 1. Gate included. x [T,H] bf16 or f32 -> out [T,H] bf16 or f32. T <= max_tokens; T = 0 succeeds. out may be x itself
  //    (same address, dtype and strides); any other overlap of arguments is undefined, here and below.
  Status forward(const TensorView& x, const TensorView& out, const Routing& routing, const Ctx& ctx) const;
  Status forward(const TensorView& x, const TensorView& out, const Ctx& ctx) const { return forward(x, out, {}, ctx); }

  // 2. Routing decided elsewhere; ids are global, -1 is skipped. x may be e4m3 with x_scale [Hb,T] (either stride
  //    order) where the layer's precision is w8a8 and it has no shared expert.
  struct RoutedInput {
    TensorView x;
    TensorView x_scale;
    ExpertIds topk_idx;
    TensorView topk_weight;
    TensorView counters;
  };
  Status forward_routed(const RoutedInput& input, const TensorView& out, const Ctx& ctx) const;

  // 3. Rows already grouped by local expert -> one output row each, [R,H]; no weights, no combine, no shared expert.
  //    out has the dtype of y in docs/numerics.md: f32 at precision f32, else bf16. Offsets must ascend within [0,R]:
  //    with `checked` anything else is an error naming the expert, without it values are clamped to that range.
  //    rows in the packed dtype of the precision (e4m3 with scale [Hb,R] for w8a8), or bf16/f32, quantised on entry.
  Status forward_grouped(const Rows& rows, const ExpertOffsets& expert_offset, const TensorView& out,
                         const Ctx& ctx) const;

  // 4. The padded layout: rows [L,Mmax,H] (seen as [L*Mmax,H]; scale [Hb,L*Mmax]) with counts num_rows [L] i32, each
  //    within [0,Mmax] (checked or clamped as above); out as in 3.
  //    Rows past a count are neither read nor written.
  Status forward_masked(const Rows& rows, const TensorView& num_rows, const TensorView& out, const Ctx& ctx) const;

 private:
  static Result<Layer> make(const MoeConfig& config, LayerWeights weights, const LayerOptions& options);
  explicit Layer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace sluice
