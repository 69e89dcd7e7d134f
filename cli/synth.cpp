// `sluice synth`: a random checkpoint in a family's own layout.
#include <fmt/format.h>

#include <filesystem>

#include "commands.h"
#include "interrupt.h"
#include "io/synth.h"
#include "options.h"
#include "progress.h"
#include "subject.h"

namespace sluice::cli {

namespace {

constexpr const char* kAbout = R"(Write a random checkpoint in a model's layout, to try without a download

Writes config.json and safetensors files with the names, shapes and dtypes of a released model, or of any config.json,
with its MoE layers and nothing else. Weights are normal with deviation 1/sqrt(fan-in), scales are real ones
(a block's amax / 448). The same arguments and seed give the same bytes. The folder must be new or empty; on failure
and on Ctrl-C nothing stays behind.)";

constexpr const char* kFooter =
    R"(One layer of deepseek-v3 takes 11.3 GB, of qwen3-30b 1.2 GB; --experts, --hidden and --intermediate make a small
relative. Layer numbers stay those of the model: `sluice inspect DIR` lists them.

Examples:
  sluice synth --like qwen3-30b --layers 1 --out qwen3-layer
  sluice synth --like deepseek-v3 --layers 2 --experts 16 --hidden 1024 --intermediate 512 --out small-dsv3
  sluice synth --like my/config.json --weights e4m3 --seed 7 --out mine
)";

Outcome synth(io::SynthRequest request, const std::string& weights, bool json) {
  if (weights == "bf16") request.weights = io::SynthWeights::kBF16;
  if (weights == "f32") request.weights = io::SynthWeights::kF32;
  if (weights == "e4m3") request.weights = io::SynthWeights::kE4M3;
  Result<nlohmann::json> config = io::config_like(request.like);
  if (!config) {
    if (config.status().code() != StatusCode::kInvalidArgument) return config.status();
    return Outcome::usage("--like: " + config.status().message());
  }
  {
    Progress progress("writing", Progress::Unit::kBytes);
    request.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
    catch_interrupts();
    request.stop = is_interrupted;
    if (Status s = io::synthesize(request); !s.is_ok()) {
      if (is_interrupted()) return interrupted(Status(s.code(), "interrupted; nothing was left behind"));
      return s.code() == StatusCode::kInvalidArgument ? Outcome::usage(s.message()) : Outcome(s);
    }
  }
  Result<Checkpoint> made = Checkpoint::open(request.out);
  if (!made) return made.status();
  std::int64_t bytes = 0;
  std::error_code ec;
  for (const auto& entry : std::filesystem::directory_iterator(request.out, ec))
    bytes += static_cast<std::int64_t>(entry.file_size(ec));
  if (json) {
    print_json({{"out", request.out.string()},
                {"like", request.like},
                {"family", made->family()},
                {"seed", request.seed},
                {"moe_layers", made->moe_layers()},
                {"bytes", bytes}});
    return kExitOk;
  }
  const std::vector<std::int64_t> layers = made->moe_layers();
  fmt::print("{}: {}, {} {} with experts, {}\n", request.out.string(), made->family(),
             layers.size() == 1 ? "layer" : "layers", format_ranges(layers), format_bytes(bytes));
  return kExitOk;
}

}  // namespace

void add_synth(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("synth", kAbout);
  sub->footer(kFooter);
  auto o = std::make_shared<io::SynthRequest>();
  auto out = std::make_shared<std::string>();
  auto weights = std::make_shared<std::string>("config");
  sub->add_option("--like", o->like, fmt::format("A preset or the path of a config.json. Presets:\n{}", preset_list()))
      ->required()
      ->type_name("NAME");
  sub->add_option("--out", *out, "Folder to write")->required()->type_name("DIR");
  sub->add_option("--layers", o->num_layers, "MoE layers to write, from the first on [1]; 0: all")
      ->check(whole_number(0, 100000))
      ->type_name("N");
  sub->add_option("--seed", o->seed, "Of the weights [1]")->check(whole_number(0, INT64_MAX))->type_name("N");
  sub->add_option("--weights", *weights, "config (as config.json says), e4m3, bf16 or f32 [config]")
      ->check(one_of({"config", "e4m3", "bf16", "f32"}))
      ->type_name("DTYPE");
  sub->add_flag("--fused", o->fused, "The family's fused 3-D layout instead of a tensor per expert");
  sub->add_option("--experts", o->num_experts, "E instead of the config's")
      ->check(whole_number(1, 1024))
      ->type_name("E");
  sub->add_option("--top-k", o->top_k, "S instead of the config's")->check(whole_number(1, 32))->type_name("S");
  sub->add_option("--hidden", o->hidden, "H instead of the config's")->check(whole_number(1, 1 << 20))->type_name("H");
  sub->add_option("--intermediate", o->intermediate, "I instead of the config's")
      ->check(whole_number(1, 1 << 20))
      ->type_name("I");
  sub->add_option("--shared-intermediate", o->shared_intermediate,
                  "Shared expert's I, for families that name it (Qwen)")
      ->check(whole_number(1, 1 << 20))
      ->type_name("I");
  add_json(*sub, command);
  sub->callback([&command, o, out, weights] {
    command.run = [&command, o, out, weights] {
      o->out = *out;
      return synth(*o, *weights, command.json);
    };
  });
}

}  // namespace sluice::cli
