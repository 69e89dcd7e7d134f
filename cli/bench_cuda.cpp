// `sluice bench` on a GPU: graphs of every stage and of the whole layer, replayed between events.
#include "bench_cuda.h"

#include <fmt/format.h>

#include <cstring>

#include "checker.h"
#include "random.h"

namespace sluice::cli {

namespace {

constexpr std::size_t kRouteSets = 8;
constexpr int kMinReplays = 20, kMaxReplays = 2000;

// x and routes on the GPU; the pipeline's tensors; the layer's workspace.
class GpuCase {
 public:
  GpuCase(const GpuBench& bench, std::int64_t tokens)
      : bench_(bench), tokens_(tokens), buffers_(std::make_shared<Buffers>(bench.machine.device)) {}

  Result<std::vector<BenchRow>> run() {
    const MoeConfig& c = bench_.config;
    const std::vector<std::byte> x = random_normal_bf16(tokens_ * c.hidden, 1.0, bench_.seed);
    x_ = buffers_->make("x", DType::kBF16, {tokens_, c.hidden});
    SLUICE_TRY(send(x_, x.data()));
    PipelineOptions options;
    options.precision = bench_.precision;
    options.machine = bench_.machine;
    options.host = bench_.host;
    options.selection = bench_.selection;
    options.routed_only = bench_.routed_only;
    Result<Pipeline> pipeline = Pipeline::create(c, bench_.weights, x_, options, buffers_);
    if (!pipeline) return pipeline.status();
    std::vector<BenchRow> rows;
    SLUICE_TRY(time_stages(*pipeline, rows));
    SLUICE_TRY(time_layer(*pipeline, rows));
    return rows;
  }

 private:
  Status send(const TensorView& to, const void* from) {
    return device::copy_to_device(bench_.machine.device, to.data, from, to.num_bytes());
  }

  Status inject(Pipeline& pipeline, std::size_t set) {
    const MoeConfig& c = bench_.config;
    std::vector<std::int32_t> ids = random_ids(bench_.route, tokens_, c.top_k, num_local(c), bench_.seed + set);
    for (std::int32_t& id : ids) id += static_cast<std::int32_t>(c.first_expert);
    const std::vector<float> weights(ids.size(), 1.0f / static_cast<float>(c.top_k));
    SLUICE_TRY(send(pipeline.topk_idx(), ids.data()));
    return send(pipeline.topk_weight(), weights.data());
  }

  Status replay(device::Graph& graph, std::vector<double>& seconds, double budget) {
    double spent = 0;
    for (int i = -3; i < kMaxReplays && (i < kMinReplays || spent < budget); ++i) {  // negative: warms up
      Result<double> once = graph.replay();
      if (!once) return once.status();
      if (i < 0) continue;
      spent += *once;
      seconds.push_back(*once);
    }
    return {};
  }

  BenchRow row_of(Pipeline& pipeline, const char* kind, std::string name, std::string impl) {
    BenchRow row;
    row.kind = kind;
    row.name = std::move(name);
    row.impl = std::move(impl);
    row.precision = to_string(bench_.precision);
    row.tokens = tokens_;
    row.routed_rows = pipeline.num_rows();
    row.active_experts = pipeline.num_active();
    row.local_experts = num_local(bench_.config);
    row.weight_bytes = num_bytes(bench_.weights);
    return row;
  }

  // Every stage on its own; its inputs are what the stages before it left.
  Status time_stages(Pipeline& pipeline, std::vector<BenchRow>& rows) {
    for (Step& step : pipeline.steps()) {
      if (step.stage == "route") SLUICE_TRY(inject(pipeline, 0));
      Result<device::Graph> graph =
          device::Graph::capture(bench_.machine.device, [&](void* stream) { return pipeline.bind(step, stream)(); });
      if (!graph) return graph.status().with_context(step.name);
      std::vector<double> seconds;
      SLUICE_TRY(replay(*graph, seconds, bench_.seconds / 4).with_context(step.name));
      steps_.emplace_back(&step, std::move(seconds));
    }
    // Costs read the plan, so they come after all of it.
    for (auto& [step, seconds] : steps_) {
      BenchRow row = row_of(pipeline, "stage", step->name, step->impl);
      const Cost cost = pipeline.cost(*step);
      for (double s : seconds) add_run(row, s, cost);
      row.touched_bytes = row.cost.bytes;  // the same ones each time
      rows.push_back(std::move(row));
    }
    return {};
  }

  // The whole layer from x, on prescribed routes; first its bits against the stages one by one.
  Status time_layer(Pipeline& pipeline, std::vector<BenchRow>& rows) {
    LayerOptions options;
    options.precision = bench_.precision;
    options.max_tokens = tokens_;
    options.routed_only = bench_.routed_only;
    options.machine = bench_.machine;
    options.selection = bench_.selection;
    Result<Layer> layer = Layer::create(bench_.config, bench_.weights, options);
    if (!layer) return layer.status();
    const TensorView out = buffers_->make("layer out", DType::kF32, {tokens_, bench_.config.hidden});
    const TensorView workspace = buffers_->make("layer workspace", DType::kU8, {layer->workspace_bytes()});
    Ctx ctx;
    ctx.workspace = {workspace.as<std::byte>(), static_cast<std::size_t>(workspace.num_bytes())};
    const Layer::RoutedInput input{x_, {}, {pipeline.topk_idx()}, pipeline.topk_weight(), {}};
    SLUICE_TRY(layer->forward_routed(input, out, ctx));
    SLUICE_TRY(device::synchronise(bench_.machine.device));
    std::vector<std::byte> got(static_cast<std::size_t>(out.num_bytes())), want(got.size());
    SLUICE_TRY(device::copy_to_host(bench_.machine.device, got.data(), out.data, out.num_bytes()));
    SLUICE_TRY(device::copy_to_host(bench_.machine.device, want.data(), pipeline.out().data, out.num_bytes()));
    if (std::memcmp(got.data(), want.data(), got.size()) != 0)
      return {StatusCode::kInternal, "the layer's output differs from its stages one by one"};

    // With its own gate the routing cannot be steered: the gate runs into tensors of its own, the rest on injected routes.
    Step select = pipeline.steps()[1];
    auto& select_args = std::get<gate::SelectArgs>(select.args);
    select_args.topk_idx = {buffers_->make("chosen topk_idx", DType::kI32, {tokens_, bench_.config.top_k})};
    select_args.topk_weight = buffers_->make("chosen topk_weight", DType::kF32, {tokens_, bench_.config.top_k});
    Result<device::Graph> graph = device::Graph::capture(bench_.machine.device, [&](void* stream) -> Status {
      SLUICE_TRY(pipeline.bind(pipeline.steps()[0], stream)());
      SLUICE_TRY(pipeline.bind(select, stream)());
      Ctx on_stream = ctx;
      on_stream.stream = stream;
      return layer->forward_routed(input, out, on_stream);
    });
    if (!graph) return graph.status().with_context("layer");
    std::vector<Cost> costs;
    for (std::size_t set = 0; set < kRouteSets; ++set) {
      SLUICE_TRY(inject(pipeline, set));
      for (const Step& step : pipeline.steps()) {
        if (step.stage == "route") SLUICE_TRY(pipeline.run(step));
      }
      SLUICE_TRY(device::synchronise(bench_.machine.device));
      costs.push_back(pipeline.layer_cost());
    }
    BenchRow row = row_of(pipeline, "layer", "layer", "chosen");
    double spent = 0;
    for (int i = -3; i < kMaxReplays && (i < kMinReplays || spent < bench_.seconds); ++i) {
      // Other experts each time, so that weights come from memory.
      const std::size_t set = static_cast<std::size_t>(i + 3) % kRouteSets;
      SLUICE_TRY(inject(pipeline, set));
      Result<double> seconds = graph->replay();
      if (!seconds) return seconds.status().with_context("layer");
      if (i < 0) continue;
      spent += *seconds;
      add_run(row, *seconds, costs[set]);
    }
    row.touched_bytes = row.cost.bytes * static_cast<double>(kRouteSets);
    rows.push_back(std::move(row));
    return {};
  }

  const GpuBench& bench_;
  std::int64_t tokens_;
  std::shared_ptr<Buffers> buffers_;
  TensorView x_;
  std::vector<std::pair<Step*, std::vector<double>>> steps_;
};

}  // namespace

Result<std::vector<BenchRow>> bench_on_gpu(const GpuBench& bench, std::int64_t tokens) {
  return GpuCase(bench, tokens).run();
}

}  // namespace sluice::cli
