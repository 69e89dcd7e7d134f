// The shortest way from a checkpoint to an MoE layer's output.   quickstart data/tiny-dsv3 1
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "sluice/sluice.h"

namespace {

sluice::Status run(const char* model, std::int64_t number) {
  auto checkpoint = sluice::Checkpoint::open(model);
  if (!checkpoint) return checkpoint.status();
  sluice::LoadOptions load;
  load.precision = sluice::Precision::kF32;
  auto loaded = checkpoint->load(number, load);
  if (!loaded) return loaded.status();

  sluice::LayerOptions options;
  options.precision = load.precision;
  options.max_tokens = 4;
  auto layer = sluice::Layer::create(loaded->config, loaded->weights, options);
  if (!layer) return layer.status();

  const std::int64_t T = options.max_tokens, H = loaded->config.hidden;
  std::vector<float> x(static_cast<std::size_t>(T * H), 0.5f);  // [T,H]
  std::vector<float> out(x.size());                             // [T,H]
  std::vector<std::byte> workspace(static_cast<std::size_t>(layer->workspace_bytes()));
  sluice::Ctx ctx;
  ctx.workspace = workspace;
  ctx.num_threads = options.machine.num_threads;
  SLUICE_TRY(layer->forward(sluice::TensorView::dense(x.data(), sluice::DType::kF32, {T, H}),
                            sluice::TensorView::dense(out.data(), sluice::DType::kF32, {T, H}), ctx));
  std::printf("%s layer %lld: out[0,0..3] = %g %g %g %g\n", checkpoint->family().c_str(),
              static_cast<long long>(number), out[0], out[1], out[2], out[3]);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: quickstart MODEL LAYER\n");
    return 2;
  }
  const sluice::Status status = run(argv[1], std::atoll(argv[2]));
  if (!status) std::fprintf(stderr, "quickstart: %s\n", status.message().c_str());
  return status ? 0 : 1;
}
