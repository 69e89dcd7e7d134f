// A layer's stages called one by one, each with buffers of its own: what `check` compares and `bench` times.
// Layer::forward must give the same bits as this composition; `check` holds it to that.
#pragma once

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "device/device.h"
#include "sluice/sluice.h"

namespace sluice::cli {

using AnyArgs = std::variant<gate::LogitsArgs, gate::SelectArgs, route::Args, pack::Args, grouped_gemm::Args,
                             swiglu_quant::Args, combine::Args>;

inline std::span<const Impl<gate::LogitsArgs>> table_of(const gate::LogitsArgs&) { return gate::logits_impls(); }
inline std::span<const Impl<gate::SelectArgs>> table_of(const gate::SelectArgs&) { return gate::select_impls(); }
inline std::span<const Impl<route::Args>> table_of(const route::Args&) { return route::impls(); }
inline std::span<const Impl<pack::Args>> table_of(const pack::Args&) { return pack::impls(); }
inline std::span<const Impl<grouped_gemm::Args>> table_of(const grouped_gemm::Args&) { return grouped_gemm::impls(); }
inline std::span<const Impl<swiglu_quant::Args>> table_of(const swiglu_quant::Args&) { return swiglu_quant::impls(); }
inline std::span<const Impl<combine::Args>> table_of(const combine::Args&) { return combine::impls(); }

// What a step costs at least: bytes that must move and operations that must be done, with their formulas.
struct Cost {
  double bytes = 0;
  double flops = 0;
  std::string bytes_formula;
  std::string flops_formula;
};

struct Output {
  std::string name;
  TensorView view;
};

struct Step {
  std::string name;   // "up"; shared-expert steps begin with "shared "
  std::string stage;  // key in LayerOptions::selection
  AnyArgs args;
  std::vector<Output> outputs;
  std::string impl;  // chosen
};

// Memory that grows and is reused by name, so that pipelines over rotated weights share their activations. On a CPU, or
// all of it on one GPU.
class Buffers {
 public:
  explicit Buffers(Device device = {}) : device_(device) {}
  TensorView make(const std::string& name, DType dtype, std::initializer_list<std::int64_t> shape);
  std::span<std::byte> scratch(std::int64_t bytes);

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  struct Block {
    std::unique_ptr<std::byte, Free> data;
    device::Buffer on_device;
    std::size_t bytes = 0;
  };
  std::byte* grow(const std::string& name, std::int64_t bytes);
  Device device_;
  std::map<std::string, Block> memory_;
};

struct PipelineOptions {
  Precision precision = Precision::kF32;
  Machine machine = Machine::detect_cpu();
  Machine host = Machine::detect_cpu();  // runs the rows of a CPU, e.g. references, where machine is a GPU
  std::map<std::string, Selection> selection;
  bool routed_only = false;
  bool with_gate = true;    // false: topk_idx and topk_weight are filled by the caller
  DType out = DType::kF32;  // of the layer's output
};

// Tensors on the host: a row of a GPU then runs on copies (check). Tensors on the GPU, weights and x included: the rows run
// on them in place (bench).
class Pipeline {
 public:
  static Result<Pipeline> create(const MoeConfig& config, const LayerWeights& weights, const TensorView& x,
                                 const PipelineOptions& options, std::shared_ptr<Buffers> buffers);

  std::vector<Step>& steps() { return steps_; }
  const std::vector<Step>& steps() const { return steps_; }
  // Runs one step with its chosen implementation, or with the one named.
  Status run(const Step& step, std::string_view impl = {});
  Status run_all();
  // The chosen implementation with everything resolved, for timing: no checks, no look-ups.
  std::function<Status()> bind(const Step& step, void* stream = nullptr);

  const TensorView& x() const { return x_; }
  const TensorView& topk_idx() const { return topk_idx_; }        // [T,S] i32
  const TensorView& topk_weight() const { return topk_weight_; }  // [T,S] f32
  const TensorView& y() const { return y_; }                      // [R,H]
  const TensorView& y_shared() const { return y_shared_; }        // [T,H], or absent
  const TensorView& out() const { return out_; }                  // [T,H]
  const RoutePlan& plan() const { return plan_; }
  const PipelineOptions& options() const { return options_; }
  // Valid once `route` has run: reads what the steps work on, e.g. how many experts have rows.
  Cost cost(const Step& step) const;
  Cost layer_cost() const;
  std::int64_t num_active() const;  // experts that have rows
  std::int64_t num_rows() const;    // that are routed

 private:
  Status add(std::string name, std::string stage, AnyArgs args, std::vector<Output> outputs);
  Status add_ffn(const std::string& prefix, const FfnWeights& weights, const RowGroups& groups, std::int64_t num_rows,
                 std::int64_t intermediate, const DataPath& path, const TensorView& rows, const TensorView& rows_scale,
                 TensorView* y);
  template <class Args>
  Status run_on_copies(const Impl<Args>& row, Args args);
  bool is_on_host() const { return x_.device.kind == DeviceKind::kCpu; }
  MoeConfig config_;
  LayerWeights weights_;
  std::map<const void*, device::Buffer> uploaded_;  // weights that steps have run on copies of
  PipelineOptions options_;
  std::shared_ptr<Buffers> buffers_;
  std::vector<Step> steps_;
  TensorView x_, topk_idx_, topk_weight_, y_, y_shared_, out_;
  RoutePlan plan_;
};

}  // namespace sluice::cli
