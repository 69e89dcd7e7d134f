"""Writes tests/fixtures/gates/gates.json: what the public router modules choose for random tokens.

    pip install torch transformers
    python tests/oracle/gates.py

Every entry is one router module of the transformers package, run in fp32 on bf16-valued tokens and weights, with the
logits it computed, its bias, and the expert ids and weights it returned. tests/gate/gate_oracle_test.cpp feeds the
logits to Sluice's gate and compares. Which GateConfig stands for which module is stated here, in RULES.
"""

import importlib
import json
import pathlib
from types import SimpleNamespace

import torch
import transformers

HIDDEN = 64
TOKENS = 6

# model, router class, gate preset, E, S, n_group, topk_group, factor, renormalised, keys only this module reads
RULES = [
    ("deepseek_v3", "DeepseekV3TopkRouter", "G3", 256, 8, 8, 4, 2.5, True, {}),
    ("deepseek_v3", "DeepseekV3TopkRouter", "G3", 384, 8, 1, 1, 2.827, True, {}),
    ("deepseek_v3", "DeepseekV3TopkRouter", "G3", 64, 6, 1, 1, 2.446, False, {}),
    ("deepseek_v2", "DeepseekV2TopkRouter", "G1", 64, 6, 1, 1, 1.0, False, {"topk_method": "greedy"}),
    ("deepseek_v2", "DeepseekV2TopkRouter", "G2", 160, 6, 8, 3, 16.0, False, {"topk_method": "group_limited_greedy"}),
    ("deepseek_v4", "DeepseekV4TopKRouter", "G9", 256, 6, 1, 1, 1.5, True, {"scoring_func": "sqrtsoftplus"}),
    ("qwen2_moe", "Qwen2MoeTopKRouter", "G1", 60, 4, 1, 1, 1.0, False, {}),
    ("qwen3_moe", "Qwen3MoeTopKRouter", "G4", 128, 8, 1, 1, 1.0, True, {}),
    ("qwen3_next", "Qwen3NextTopKRouter", "G4", 512, 10, 1, 1, 1.0, True, {}),
    ("mixtral", "MixtralTopKRouter", "G4", 8, 2, 1, 1, 1.0, True, {}),
    ("gpt_oss", "GptOssTopKRouter", "G5", 32, 4, 1, 1, 1.0, False, {}),
    ("gpt_oss", "GptOssTopKRouter", "G5", 128, 4, 1, 1, 1.0, False, {}),
    ("llama4", "Llama4Router", "G6", 16, 1, 1, 1, 1.0, False, {}),
    ("llama4", "Llama4Router", "G6", 128, 1, 1, 1, 1.0, False, {}),
    ("minimax_m2", "MiniMaxM2TopKRouter", "G7", 256, 8, 1, 1, 1.0, True, {}),
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", "G10", 64, 6, 1, 1, 1.0, True, {"moe_norm_min": 1e-12}),
    ("glm4_moe", "Glm4MoeTopkRouter", "G3", 160, 8, 1, 1, 2.5, True, {}),
    ("dots1", "Dots1TopkRouter", "G3", 128, 6, 1, 1, 2.5, True, {}),
    ("olmoe", "OlmoeTopKRouter", "G1", 64, 8, 1, 1, 1.0, False, {}),
    ("hunyuan_v1_moe", "HunYuanMoEV1Gate", "G4", 64, 8, 1, 1, 1.0, True, {}),
]


def bf16_valued(shape, scale, generator):
    return (torch.randn(shape, generator=generator) * scale).bfloat16().float()


def make_router(model, class_name, experts, slots, n_group, topk_group, factor, renorm, extra):
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        num_experts=experts,
        num_local_experts=experts,
        n_routed_experts=experts,
        num_experts_per_tok=slots,
        moe_topk=slots,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=factor,
        norm_topk_prob=renorm,
        **extra,
    )
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, class_name)(config).float()


def fill(router, generator):
    """Random parameters; returns the selection bias, or None where the module has none."""
    bias = None
    with torch.no_grad():
        for name, tensor in list(router.named_parameters()) + list(router.named_buffers()):
            if "e_score_correction_bias" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
                bias = tensor.flatten()
            else:
                tensor.copy_(bf16_valued(tensor.shape, 2.0 / HIDDEN**0.5, generator))
    return bias


def run(router, class_name, x, experts, slots, generator):
    """Logits, ids and weights; the modules differ in what they take and return."""
    bias = None
    if class_name == "MiniMaxM2TopKRouter":
        bias = torch.randn(experts, generator=generator) * 0.1
        logits, weights, ids = router(x, bias)
    elif class_name == "Llama4Router":
        scores, logits = router(x)
        ids = torch.topk(logits, slots, dim=1).indices
        weights = scores.gather(1, ids)
    else:
        logits, weights, ids = router(x)
    return logits, ids, weights, bias


def main():
    numbers = lambda tensor: [float(f"{v:.9g}") for v in tensor.flatten().tolist()]
    cases = []
    for seed, rule in enumerate(RULES):
        model, class_name, gate, experts, slots, n_group, topk_group, factor, renorm, extra = rule
        generator = torch.Generator().manual_seed(1000 + seed)
        router = make_router(model, class_name, experts, slots, n_group, topk_group, factor, renorm, extra)
        bias = fill(router, generator)
        x = bf16_valued((TOKENS, HIDDEN), 1.0, generator)
        x[-1] *= 8  # one token with far-apart logits
        with torch.no_grad():
            logits, ids, weights, given_bias = run(router, class_name, x, experts, slots, generator)
        bias = bias if given_bias is None else given_bias
        assert logits.dtype == weights.dtype == torch.float32 and weights.shape == (TOKENS, slots)
        cases.append(
            {
                "module": f"{model}.{class_name}",
                "gate": gate,
                "num_experts": experts,
                "top_k": slots,
                "n_group": n_group,
                "topk_group": topk_group,
                "routed_scaling_factor": factor,
                "renormalised": renorm,
                "logits": numbers(logits),
                "bias": [] if bias is None else numbers(bias),
                "ids": ids.flatten().tolist(),
                "weights": numbers(weights),
            }
        )
    out = pathlib.Path(__file__).parent.parent / "fixtures" / "gates" / "gates.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    out.write_text(f'{{"transformers":"{transformers.__version__}","num_tokens":{TOKENS},"cases":[\n{body}\n]}}\n')
    print(f"{out}: {len(cases)} cases, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
