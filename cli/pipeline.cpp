#include "pipeline.h"

#include <fmt/format.h>

#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace sluice::cli {

namespace {

constexpr std::size_t kAlignment = 64;

double bytes_of(const TensorView& view) { return view.is_present() ? static_cast<double>(view.num_bytes()) : 0.0; }

}  // namespace

std::byte* Buffers::grow(const std::string& name, std::int64_t bytes) {
  Block& block = memory_[name];
  const std::size_t wanted = (static_cast<std::size_t>(bytes) + kAlignment) / kAlignment * kAlignment;
  if (block.bytes < wanted && device_.kind == DeviceKind::kCuda) {
    Result<device::Buffer> memory = device::Buffer::allocate(device_, static_cast<std::int64_t>(wanted), name);
    if (!memory) throw std::runtime_error(memory.status().message());
    block.on_device = std::move(*memory);
    block.bytes = wanted;
  }
  if (device_.kind == DeviceKind::kCuda) return block.on_device.data();
  if (block.bytes < wanted) {
    block.data.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, wanted)));
    if (block.data == nullptr) throw std::bad_alloc();
    block.bytes = wanted;
  }
  return block.data.get();
}

TensorView Buffers::make(const std::string& name, DType dtype, std::initializer_list<std::int64_t> shape) {
  std::int64_t elements = 1;
  for (std::int64_t extent : shape) elements *= extent;
  std::byte* data = grow(name, elements * size_bytes(dtype));
  // NaN in every float format: what a stage fails to write shows up in the comparison.
  const std::int64_t bytes = elements * size_bytes(dtype);
  if (device_.kind == DeviceKind::kCpu) {
    std::memset(data, 0xFF, static_cast<std::size_t>(bytes));
  } else if (const Status filled = device::fill_bytes(device_, data, 0xFF, bytes); !filled.is_ok()) {
    throw std::runtime_error(filled.message());
  }
  return TensorView::dense(data, dtype, shape, device_);
}

std::span<std::byte> Buffers::scratch(std::int64_t bytes) {
  return {grow("scratch", bytes), static_cast<std::size_t>(bytes)};
}

namespace {

// Every tensor of a stage's arguments; `is_weight` for those that stay the same from step to step.
template <class Visit>
void for_each_view(gate::LogitsArgs& a, const Visit& visit) {
  visit(a.x, false), visit(a.w_gate, true), visit(a.router_bias, true), visit(a.logits, false);
}
template <class Visit>
void for_each_view(gate::SelectArgs& a, const Visit& visit) {
  visit(a.logits, false), visit(a.score_bias, true), visit(a.topk_idx.view, false), visit(a.topk_weight, false);
}
template <class Visit>
void for_each_view(route::Args& a, const Visit& visit) {
  visit(a.topk_idx.view, false), visit(a.plan.expert_offset.view, false), visit(a.plan.row_token, false);
  visit(a.plan.row_slot, false), visit(a.plan.slot_row, false), visit(a.plan.num_rows, false);
}
template <class Visit>
void for_each_view(pack::Args& a, const Visit& visit) {
  visit(a.x, false), visit(a.x_scale, false), visit(a.row_token, false), visit(a.row_slot, false);
  visit(a.slot_row, false), visit(a.num_rows, false), visit(a.weight, false), visit(a.rows, false);
  visit(a.rows_scale, false);
}
template <class Visit>
void for_each_view(grouped_gemm::Args& a, const Visit& visit) {
  visit(a.a, false), visit(a.a_scale, false), visit(a.groups.expert_offset.view, false), visit(a.w, true);
  visit(a.w_scale, true), visit(a.bias, true), visit(a.out, false);
}
template <class Visit>
void for_each_view(swiglu_quant::Args& a, const Visit& visit) {
  visit(a.h, false), visit(a.groups.expert_offset.view, false), visit(a.a, false), visit(a.a_scale, false);
}
template <class Visit>
void for_each_view(combine::Args& a, const Visit& visit) {
  visit(a.y, false), visit(a.slot_row, false), visit(a.topk_weight, false), visit(a.shared, false);
  visit(a.shared_gate, false), visit(a.out, false);
}

}  // namespace

// Every tensor of a pipeline is dense or starts at its lowest address, and all of one's bytes are its own: what a row writes
// and what it leaves alone both come back.
template <class Args>
Status Pipeline::run_on_copies(const Impl<Args>& row, Args args) {
  const Device device = options_.machine.device;
  struct Copy {
    device::Buffer memory;
    TensorView host;
  };
  std::vector<Copy> copies;
  Status status;
  for_each_view(args, [&](TensorView& view, bool is_weight) {
    if (!view.is_present() || !status.is_ok()) return;
    const TensorView host = view;
    view.device = device;
    if (host.num_bytes() == 0) return;
    const auto known = uploaded_.find(host.data);
    if (is_weight && known != uploaded_.end()) {
      view.data = known->second.data();
      return;
    }
    Result<device::Buffer> memory = device::Buffer::allocate(device, host.num_bytes(), host.to_string());
    status = memory ? device::copy_to_device(device, memory->data(), host.data, host.num_bytes()) : memory.status();
    if (!status.is_ok()) return;
    view.data = memory->data();
    if (is_weight) {
      uploaded_[host.data] = std::move(*memory);
    } else {
      copies.push_back({std::move(*memory), host});
    }
  });
  SLUICE_TRY(status);
  SLUICE_TRY(row.can_run(args, options_.machine));
  Ctx ctx;
  device::Buffer scratch;
  if (row.scratch_bytes != nullptr) {
    Result<device::Buffer> memory =
        device::Buffer::allocate(device, row.scratch_bytes(args, options_.machine), "scratch");
    if (!memory) return memory.status();
    scratch = std::move(*memory);
    ctx.workspace = scratch.span();
  }
  SLUICE_TRY(row.run(args, ctx));
  SLUICE_TRY(device::synchronise(device));
  for (const Copy& copy : copies) {
    SLUICE_TRY(device::copy_to_host(device, copy.host.data, copy.memory.data(), copy.host.num_bytes()));
  }
  return {};
}

Status Pipeline::add(std::string name, std::string stage, AnyArgs args, std::vector<Output> outputs) {
  Step step{std::move(name), std::move(stage), std::move(args), std::move(outputs), {}};
  const auto found = options_.selection.find(step.stage);
  const Selection selection = found == options_.selection.end() ? Selection{} : found->second;
  const Status status = std::visit(
      [&](const auto& a) -> Status {
        SLUICE_TRY(check(a, Phase::kPlan));
        auto choice = choose(step.stage, table_of(a), a, options_.machine, selection);
        if (!choice) return choice.status();
        step.impl = choice->impl->name;
        return {};
      },
      step.args);
  if (!status.is_ok()) return status.with_context(step.name);
  steps_.push_back(std::move(step));
  return {};
}

Status Pipeline::run(const Step& step, std::string_view impl) {
  const std::string_view name = impl.empty() ? std::string_view(step.impl) : impl;
  return std::visit(
      [&](const auto& args) -> Status {
        SLUICE_TRY(check(args, Phase::kRun));
        for (const auto& row : table_of(args)) {
          if (row.name != name) continue;
          if (row.device == DeviceKind::kCuda && is_on_host()) return run_on_copies(row, args);
          const Machine& machine = row.device == options_.machine.device.kind ? options_.machine : options_.host;
          Ctx ctx;
          ctx.num_threads = machine.num_threads;
          if (row.scratch_bytes != nullptr) ctx.workspace = buffers_->scratch(row.scratch_bytes(args, machine));
          return row.run(args, ctx);
        }
        return Status(StatusCode::kInvalidArgument, fmt::format("{}: no implementation '{}'", step.stage, name));
      },
      step.args);
}

std::function<Status()> Pipeline::bind(const Step& step, void* stream) {
  return std::visit(
      [&](const auto& args) -> std::function<Status()> {
        for (const auto& row : table_of(args)) {
          if (row.name != step.impl) continue;
          Ctx ctx;
          ctx.stream = stream;
          ctx.num_threads = options_.machine.num_threads;
          if (row.scratch_bytes != nullptr)
            ctx.workspace = buffers_->scratch(row.scratch_bytes(args, options_.machine));
          return [run = row.run, &args, ctx, buffers = buffers_] { return run(args, ctx); };
        }
        return [] { return Status(StatusCode::kInternal, "step without implementation"); };
      },
      step.args);
}

Status Pipeline::run_all() {
  for (const Step& step : steps_) SLUICE_TRY(run(step).with_context(step.name));
  return {};
}

Status Pipeline::add_ffn(const std::string& prefix, const FfnWeights& weights, const RowGroups& groups,
                         std::int64_t num_rows, std::int64_t intermediate, const DataPath& path, const TensorView& rows,
                         const TensorView& rows_scale, TensorView* y) {
  const TensorView h = buffers_->make(prefix + "h", path.h, {num_rows, 2 * intermediate});  // [R,2I]
  grouped_gemm::Args up;
  up.a = rows;
  up.a_scale = rows_scale;
  up.groups = groups;
  up.w = weights.w13;
  up.w_scale = weights.w13_scale;
  up.bias = weights.w13_bias;
  up.part_rows = intermediate;
  up.out = h;
  SLUICE_TRY(add(prefix + "up", "grouped_gemm", up, {{"h", h}}));

  swiglu_quant::Args swiglu;
  swiglu.h = h;
  swiglu.groups = groups;
  swiglu.activation = config_.activation;
  swiglu.scale_format = config_.activation_scale;
  swiglu.a = buffers_->make(prefix + "a", path.a, {num_rows, intermediate});  // [R,I]
  std::vector<Output> outputs = {{"a", swiglu.a}};
  if (is_quantised(path.a)) {
    swiglu.a_scale =
        buffers_->make(prefix + "a_scale", DType::kF32, {path.scale_blocks(intermediate), num_rows});  // [Ib or 1,R]
    outputs.push_back({"a_scale", swiglu.a_scale});
  }
  SLUICE_TRY(add(prefix + "swiglu", "swiglu_quant", swiglu, std::move(outputs)));

  grouped_gemm::Args down;
  down.a = swiglu.a;
  down.a_scale = swiglu.a_scale;
  down.groups = groups;
  down.w = weights.w2;
  down.w_scale = weights.w2_scale;
  down.bias = weights.w2_bias;
  down.out = *y = buffers_->make(prefix + "y", path.y, {num_rows, config_.hidden});  // [R,H]
  return add(prefix + "down", "grouped_gemm", down, {{"y", *y}});
}

Result<Pipeline> Pipeline::create(const MoeConfig& config, const LayerWeights& weights, const TensorView& x,
                                  const PipelineOptions& options, std::shared_ptr<Buffers> buffers) {
  Pipeline p;
  p.config_ = config;
  p.weights_ = weights;
  p.options_ = options;
  p.buffers_ = std::move(buffers);
  p.x_ = x;
  Buffers& memory = *p.buffers_;
  const std::int64_t T = x.shape[0], H = config.hidden, E = config.num_experts, S = config.top_k;
  const std::int64_t L = num_local(config), R = T * S;

  p.topk_idx_ = memory.make("topk_idx", DType::kI32, {T, S});
  p.topk_weight_ = memory.make("topk_weight", DType::kF32, {T, S});
  if (options.with_gate) {
    gate::LogitsArgs logits;
    logits.x = x;
    logits.w_gate = weights.w_gate;
    logits.router_bias = weights.router_bias;
    logits.logits = memory.make("logits", DType::kF32, {T, E});
    SLUICE_TRY(p.add("gate.logits", "gate.logits", logits, {{"logits", logits.logits}}));

    gate::SelectArgs select;
    select.gate = config.gate;
    select.logits = logits.logits;
    select.score_bias = weights.score_bias;
    select.topk_idx = {p.topk_idx_};
    select.topk_weight = p.topk_weight_;
    SLUICE_TRY(
        p.add("gate.select", "gate.select", select, {{"topk_idx", p.topk_idx_}, {"topk_weight", p.topk_weight_}}));
  }

  route::Args route;
  route.topk_idx = {p.topk_idx_};
  route.num_experts = E;
  route.first_expert = config.first_expert;
  route.plan.expert_offset = {memory.make("expert_offset", DType::kI32, {L + 1})};
  route.plan.row_token = memory.make("row_token", DType::kI32, {R});
  route.plan.row_slot = memory.make("row_slot", DType::kI32, {R});
  route.plan.slot_row = memory.make("slot_row", DType::kI32, {T, S});
  route.plan.num_rows = memory.make("num_rows", DType::kI32, {1});
  p.plan_ = route.plan;
  SLUICE_TRY(p.add("route", "route", route,
                   {{"expert_offset", p.plan_.expert_offset.view},
                    {"row_token", p.plan_.row_token},
                    {"row_slot", p.plan_.row_slot},
                    {"slot_row", p.plan_.slot_row},
                    {"num_rows", p.plan_.num_rows}}));

  Result<DataPath> path = data_path(options.precision, weights.experts);
  if (!path) return path.status();
  pack::Args pack;
  pack.x = x;
  pack.scale_format = config.activation_scale;
  pack.row_token = p.plan_.row_token;
  pack.slot_row = p.plan_.slot_row;
  pack.num_rows = p.plan_.num_rows;
  if (config.weight_on_input) {
    pack.row_slot = p.plan_.row_slot;
    pack.weight = p.topk_weight_;
  }
  pack.rows = memory.make("rows", path->rows, {R, H});
  std::vector<Output> outputs = {{"rows", pack.rows}};
  if (is_quantised(path->rows)) {
    pack.rows_scale = memory.make("rows_scale", DType::kF32, {path->scale_blocks(H), R});
    outputs.push_back({"rows_scale", pack.rows_scale});
  }
  SLUICE_TRY(p.add("pack", "pack", pack, std::move(outputs)));
  SLUICE_TRY(p.add_ffn("", weights.experts, RowGroups::contiguous(p.plan_.expert_offset), R, config.intermediate, *path,
                       pack.rows, pack.rows_scale, &p.y_));

  combine::Args combine;
  const std::int64_t Is = options.routed_only ? 0 : config.shared_intermediate;
  if (Is > 0) {
    // A shared expert may be stored in another dtype than the routed ones; it then runs in the path of its own.
    Result<DataPath> shared_path = data_path(options.precision, weights.shared);
    if (!shared_path) shared_path = data_path(Precision::kBF16, weights.shared.w13.dtype);
    if (!shared_path) return shared_path.status();
    pack::Args all;
    all.x = x;
    all.scale_format = config.activation_scale;
    all.rows = memory.make("shared rows", shared_path->rows, {T, H});
    std::vector<Output> packed = {{"rows", all.rows}};
    if (is_quantised(shared_path->rows)) {
      all.rows_scale = memory.make("shared rows_scale", DType::kF32, {shared_path->scale_blocks(H), T});
      packed.push_back({"rows_scale", all.rows_scale});
    }
    SLUICE_TRY(p.add("shared pack", "pack", all, std::move(packed)));
    SLUICE_TRY(p.add_ffn("shared ", weights.shared, RowGroups::whole(), T, Is, *shared_path, all.rows, all.rows_scale,
                         &p.y_shared_));
    combine.shared = p.y_shared_;
    if (config.has_shared_gate) {
      gate::LogitsArgs logit;
      logit.x = x;
      logit.w_gate = weights.shared_gate;
      logit.logits = memory.make("shared_gate", DType::kF32, {T, 1});
      SLUICE_TRY(p.add("shared gate", "gate.logits", logit, {{"shared_gate", logit.logits}}));
      combine.shared_gate = logit.logits;
    }
  }

  combine.y = p.y_;
  combine.slot_row = p.plan_.slot_row;
  combine.unweighted = config.weight_on_input;
  if (!combine.unweighted) combine.topk_weight = p.topk_weight_;
  combine.out = p.out_ = memory.make("out", options.out, {T, H});
  SLUICE_TRY(p.add("combine", "combine", combine, {{"out", p.out_}}));
  return p;
}

namespace {

// i32 values, from wherever they are.
std::vector<std::int32_t> read_i32(const TensorView& view) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(view.num_elements()));
  if (view.device.kind == DeviceKind::kCpu) {
    std::memcpy(values.data(), view.data, values.size() * sizeof(values[0]));
  } else if (const Status copied = device::copy_to_host(view.device, values.data(), view.data, view.num_bytes());
             !copied.is_ok()) {
    throw std::runtime_error(copied.message());
  }
  return values;
}

}  // namespace

std::int64_t Pipeline::num_rows() const { return read_i32(plan_.num_rows)[0]; }

std::int64_t Pipeline::num_active() const {
  const TensorView& offset = plan_.expert_offset.view;
  const std::vector<std::int32_t> offsets = read_i32(offset);
  const std::int32_t* o = offsets.data();
  std::int64_t active = 0;
  for (std::int64_t e = 0; e + 1 < offset.shape[0]; ++e) active += o[e + 1] > o[e] ? 1 : 0;
  return active;
}

Cost Pipeline::cost(const Step& step) const {
  Cost cost;
  const bool is_shared = step.name.rfind("shared", 0) == 0;
  const double rows = is_shared ? static_cast<double>(x_.shape[0]) : static_cast<double>(num_rows());
  const std::string R = is_shared ? "T" : "R";
  const auto width = [](const TensorView& v) { return static_cast<double>(size_bytes(v.dtype)); };
  std::visit(
      [&](const auto& a) {
        using A = std::decay_t<decltype(a)>;
        if constexpr (std::is_same_v<A, gate::LogitsArgs>) {
          const double T = static_cast<double>(a.x.shape[0]), H = static_cast<double>(a.x.shape[1]);
          const double E = static_cast<double>(a.w_gate.shape[0]);
          cost.bytes = bytes_of(a.x) + bytes_of(a.w_gate) + bytes_of(a.logits);
          cost.flops = 2 * T * E * H;
          cost.bytes_formula = fmt::format("T*H*{} + E*H*{} + T*E*4", width(a.x), width(a.w_gate));
          cost.flops_formula = "2*T*E*H";
        } else if constexpr (std::is_same_v<A, gate::SelectArgs>) {
          cost.bytes = bytes_of(a.logits) + bytes_of(a.topk_idx.view) + bytes_of(a.topk_weight);
          cost.bytes_formula = "T*E*4 + T*S*8";
        } else if constexpr (std::is_same_v<A, route::Args>) {
          cost.bytes = 2 * bytes_of(a.topk_idx.view) + rows * 8 + bytes_of(a.plan.expert_offset.view);
          cost.bytes_formula = "T*S*4 + T*S*4 + R*8 + (L+1)*4";
        } else if constexpr (std::is_same_v<A, pack::Args>) {
          const double H = static_cast<double>(a.x.shape[1]);
          const double scales = a.rows_scale.is_present() ? static_cast<double>(a.rows_scale.shape[0]) * 4 : 0;
          cost.bytes = bytes_of(a.x) + rows * (H * width(a.rows) + scales);
          cost.bytes_formula =
              fmt::format("T*H*{} + {}*H*{}{}", width(a.x), R, width(a.rows), scales > 0 ? " + " + R + "*Hb*4" : "");
        } else if constexpr (std::is_same_v<A, grouped_gemm::Args>) {
          const double N = static_cast<double>(a.w.shape[1]), K = static_cast<double>(a.w.shape[2]);
          const double experts = is_shared ? 1 : static_cast<double>(num_active());
          double weight = N * K * width(a.w);
          if (a.w_scale.is_present()) weight += bytes_of(a.w_scale) / static_cast<double>(a.w_scale.shape[0]);
          const double scales = a.a_scale.is_present() ? static_cast<double>(a.a_scale.shape[0]) * 4 : 0;
          cost.bytes = experts * weight + rows * (K * width(a.a) + scales + N * width(a.out));
          cost.flops = 2 * rows * N * K;
          const bool is_up = a.part_rows != 0;
          const char* n = is_up ? "2I" : "H";
          const char* k = is_up ? "H" : "I";
          cost.bytes_formula = fmt::format("A*({}*{}*{}{}) + {}*({}*{}{} + {}*{})", n, k, width(a.w),
                                           a.w_scale.is_present() ? " + scales" : "", R, k, width(a.a),
                                           scales > 0 ? " + scales" : "", n, width(a.out));
          cost.flops_formula = fmt::format("2*{}*{}*{}", R, n, k);
        } else if constexpr (std::is_same_v<A, swiglu_quant::Args>) {
          const double I = static_cast<double>(a.a.shape[1]);
          const double scales = a.a_scale.is_present() ? static_cast<double>(a.a_scale.shape[0]) * 4 : 0;
          cost.bytes = rows * (2 * I * width(a.h) + I * width(a.a) + scales);
          cost.bytes_formula =
              fmt::format("{}*(2I*{} + I*{}{})", R, width(a.h), width(a.a), scales > 0 ? " + Ib*4" : "");
        } else {
          const double H = static_cast<double>(a.out.shape[1]);
          cost.bytes = rows * H * width(a.y) + bytes_of(a.shared) + bytes_of(a.out);
          cost.flops = 2 * rows * H;
          cost.bytes_formula =
              fmt::format("R*H*{}{} + T*H*{}", width(a.y),
                          a.shared.is_present() ? fmt::format(" + T*H*{}", width(a.shared)) : "", width(a.out));
          cost.flops_formula = "2*R*H";
        }
      },
      step.args);
  return cost;
}

Cost Pipeline::layer_cost() const {
  Cost cost;
  const double T = static_cast<double>(x_.shape[0]);
  const double rows = static_cast<double>(num_rows());
  const double H = static_cast<double>(config_.hidden), I = static_cast<double>(config_.intermediate);
  const double Is = options_.routed_only ? 0 : static_cast<double>(config_.shared_intermediate);
  const double per_expert = static_cast<double>(num_bytes(weights_.experts)) / static_cast<double>(num_local(config_));
  cost.bytes = static_cast<double>(num_active()) * per_expert + bytes_of(weights_.w_gate) +
               (Is > 0 ? static_cast<double>(num_bytes(weights_.shared)) : 0) + bytes_of(x_) + bytes_of(out_);
  cost.flops = 6 * rows * H * I + 6 * T * H * Is + 2 * T * H * static_cast<double>(config_.num_experts);
  cost.bytes_formula = fmt::format("A*expert bytes + gate{} + T*H*{} + T*H*{}", Is > 0 ? " + shared" : "",
                                   size_bytes(x_.dtype), size_bytes(out_.dtype));
  cost.flops_formula = fmt::format("6*R*H*I{} + 2*T*H*E", Is > 0 ? " + 6*T*H*Is" : "");
  return cost;
}

}  // namespace sluice::cli
