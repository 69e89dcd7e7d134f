// `sluice bench` on a GPU: graphs of every stage and of the whole layer, replayed between events.
#include "bench_cuda.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "checker.h"
#include "random.h"

namespace sluice::cli {

namespace {

constexpr double kRotatedBytes = 4 * kGpuCache;  // of weights, before a graph comes back to the same
constexpr std::size_t kMaxSets = 16;
constexpr double kGraphSeconds = 2e-3;  // the start of a graph is then below a thousandth of it
constexpr double kShortestSeconds = 1e-6;
constexpr int kMinReplays = 15, kMaxReplays = 2000;

// x and routes on the GPU; a pipeline for every set of routes, each with tensors of its own; the layer's workspace.
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
    options.out = bench_.out;
    const std::size_t sets = num_sets();
    for (std::size_t set = 0; set < sets; ++set) {
      Result<Pipeline> pipeline =
          Pipeline::create(c, bench_.weights, x_, options, std::make_shared<Buffers>(bench_.machine.device));
      if (!pipeline) return pipeline.status();
      pipelines_.push_back(std::move(*pipeline));
      for (const Step& step : pipelines_[set].steps()) {
        if (step.stage == "route") SLUICE_TRY(inject(pipelines_[set], set));
        SLUICE_TRY(pipelines_[set].run(step).with_context(step.name));
      }
      SLUICE_TRY(device::synchronise(bench_.machine.device));
    }
    std::vector<BenchRow> rows;
    SLUICE_TRY(time_stages(rows));
    SLUICE_TRY(time_layer(rows));
    return rows;
  }

 private:
  Status send(const TensorView& to, const void* from) {
    return device::copy_to_device(bench_.machine.device, to.data, from, to.num_bytes());
  }

  std::vector<std::int32_t> ids_of(std::size_t set) const {
    const MoeConfig& c = bench_.config;
    if (bench_.draw) return bench_.draw(tokens_, set);
    std::vector<std::int32_t> ids = random_ids(bench_.route, tokens_, c.top_k, num_local(c), bench_.seed + set);
    for (std::int32_t& id : ids) id += static_cast<std::int32_t>(c.first_expert);
    return ids;
  }

  // As many routes as make one layer after the other read its weights from memory and not from the L2.
  std::size_t num_sets() const {
    const MoeConfig& c = bench_.config;
    std::set<std::int32_t> active;
    for (const std::int32_t id : ids_of(0)) {
      if (id >= c.first_expert && id < c.first_expert + num_local(c)) active.insert(id);
    }
    const double bytes = static_cast<double>(active.size()) * static_cast<double>(num_bytes(bench_.weights.experts)) /
                         static_cast<double>(num_local(c));
    if (bytes >= kRotatedBytes / 2) return 1;
    return std::min(kMaxSets, static_cast<std::size_t>(kRotatedBytes / std::max(bytes, 1.0)) + 1);
  }

  Status inject(Pipeline& pipeline, std::size_t set) {
    const std::vector<std::int32_t> ids = ids_of(set);
    const std::vector<float> weights(ids.size(), 1.0f / static_cast<float>(bench_.config.top_k));
    SLUICE_TRY(send(pipeline.topk_idx(), ids.data()));
    return send(pipeline.topk_weight(), weights.data());
  }

  // Every set equally often, in a graph of about kGraphSeconds.
  int num_calls(const Cost& cost) const {
    const double floor = std::max({cost.bytes / kGpuStream, cost.flops / kGpuFp8, kShortestSeconds});
    const auto sets = static_cast<double>(pipelines_.size());
    return static_cast<int>(std::max(1.0, kGraphSeconds / (floor * sets))) * static_cast<int>(pipelines_.size());
  }

  // `call` launches the work of one set on the stream. Adds to the row the seconds of a call, once for each replay.
  Status time(BenchRow& row, const Cost& cost, double budget, const std::function<Status(std::size_t, void*)>& call) {
    const int calls = num_calls(cost);
    Result<device::Graph> graph = device::Graph::capture(bench_.machine.device, [&](void* stream) -> Status {
      for (int i = 0; i < calls; ++i) SLUICE_TRY(call(static_cast<std::size_t>(i) % pipelines_.size(), stream));
      return {};
    });
    if (!graph) return graph.status();
    double spent = 0;
    for (int i = -3; i < kMaxReplays && (i < kMinReplays || spent < budget); ++i) {  // negative: warms up
      Result<double> seconds = graph->replay();
      if (!seconds) return seconds.status();
      if (i < 0) continue;
      spent += *seconds;
      add_run(row, *seconds / calls, cost);
    }
    row.touched_bytes = cost.bytes * static_cast<double>(pipelines_.size());
    return {};
  }

  // Bytes and FLOPs of `of` in the mean over the sets.
  Cost mean_cost(const std::function<Cost(const Pipeline&)>& of) const {
    Cost mean = of(pipelines_[0]);
    const auto sets = static_cast<double>(pipelines_.size());
    mean.bytes = mean.flops = 0;
    for (const Pipeline& pipeline : pipelines_) {
      const Cost cost = of(pipeline);
      mean.bytes += cost.bytes / sets;
      mean.flops += cost.flops / sets;
    }
    return mean;
  }

  BenchRow row_of(const char* kind, std::string name, std::string impl) const {
    BenchRow row;
    row.kind = kind;
    row.name = std::move(name);
    row.impl = std::move(impl);
    row.precision = to_string(bench_.precision);
    row.tokens = tokens_;
    row.routed_rows = pipelines_[0].num_rows();
    row.active_experts = pipelines_[0].num_active();
    row.local_experts = num_local(bench_.config);
    row.weight_bytes = num_bytes(bench_.weights);
    return row;
  }

  // Every stage on its own; its inputs are what the stages before it left.
  Status time_stages(std::vector<BenchRow>& rows) {
    for (std::size_t i = 0; i < pipelines_[0].steps().size(); ++i) {
      const Step& step = pipelines_[0].steps()[i];
      // Selection, when it was timed, left its own choice there.
      for (std::size_t set = 0; step.stage == "route" && set < pipelines_.size(); ++set) {
        SLUICE_TRY(inject(pipelines_[set], set));
      }
      BenchRow row = row_of("stage", step.name, step.impl);
      const Cost cost = mean_cost([&](const Pipeline& pipeline) { return pipeline.cost(pipeline.steps()[i]); });
      const Status timed = time(row, cost, bench_.seconds / 4, [&](std::size_t set, void* stream) {
        return pipelines_[set].bind(pipelines_[set].steps()[i], stream)();
      });
      if (!timed) return timed.with_context(step.name);
      rows.push_back(std::move(row));
    }
    return {};
  }

  // The whole layer from x, on prescribed routes; first its bits against the stages one by one.
  Status time_layer(std::vector<BenchRow>& rows) {
    LayerOptions options;
    options.precision = bench_.precision;
    options.max_tokens = tokens_;
    options.routed_only = bench_.routed_only;
    options.machine = bench_.machine;
    options.selection = bench_.selection;
    Result<Layer> layer = Layer::create(bench_.config, bench_.weights, options);
    if (!layer) return layer.status();
    const TensorView out = buffers_->make("layer out", bench_.out, {tokens_, bench_.config.hidden});
    const TensorView workspace = buffers_->make("layer workspace", DType::kU8, {layer->workspace_bytes()});
    Ctx ctx;
    ctx.workspace = {workspace.as<std::byte>(), static_cast<std::size_t>(workspace.num_bytes())};
    // With its own gate the routing cannot be steered: the gate runs into tensors of its own, the rest on injected routes.
    const TensorView chosen_idx = buffers_->make("chosen topk_idx", DType::kI32, {tokens_, bench_.config.top_k});
    const TensorView chosen_weight = buffers_->make("chosen topk_weight", DType::kF32, {tokens_, bench_.config.top_k});
    std::vector<Step> selects;
    for (std::size_t set = 0; set < pipelines_.size(); ++set) {
      Pipeline& pipeline = pipelines_[set];
      SLUICE_TRY(layer->forward_routed(routed(pipeline), out, ctx));
      SLUICE_TRY(device::synchronise(bench_.machine.device));
      std::vector<std::byte> got(static_cast<std::size_t>(out.num_bytes())), want(got.size());
      SLUICE_TRY(device::copy_to_host(bench_.machine.device, got.data(), out.data, out.num_bytes()));
      SLUICE_TRY(device::copy_to_host(bench_.machine.device, want.data(), pipeline.out().data, out.num_bytes()));
      if (got != want) return {StatusCode::kInternal, "the layer's output differs from its stages one by one"};
      selects.push_back(pipeline.steps()[1]);
      auto& args = std::get<gate::SelectArgs>(selects.back().args);
      args.topk_idx = {chosen_idx};
      args.topk_weight = chosen_weight;
    }
    BenchRow row = row_of("layer", "layer", "chosen");
    const Cost cost = mean_cost([](const Pipeline& pipeline) { return pipeline.layer_cost(); });
    const Status timed = time(row, cost, bench_.seconds, [&](std::size_t set, void* stream) -> Status {
      Pipeline& pipeline = pipelines_[set];
      SLUICE_TRY(pipeline.bind(pipeline.steps()[0], stream)());
      SLUICE_TRY(pipeline.bind(selects[set], stream)());
      Ctx on_stream = ctx;
      on_stream.stream = stream;
      return layer->forward_routed(routed(pipeline), out, on_stream);
    });
    if (!timed) return timed.with_context("layer");
    rows.push_back(std::move(row));
    return {};
  }

  Layer::RoutedInput routed(const Pipeline& pipeline) const {
    return {x_, {}, {pipeline.topk_idx()}, pipeline.topk_weight(), {}};
  }

  const GpuBench& bench_;
  std::int64_t tokens_;
  std::shared_ptr<Buffers> buffers_;
  TensorView x_;
  std::vector<Pipeline> pipelines_;
};

}  // namespace

Result<std::vector<BenchRow>> bench_on_gpu(const GpuBench& bench, std::int64_t tokens) {
  return GpuCase(bench, tokens).run();
}

}  // namespace sluice::cli
