"""Writes tests/fixtures/families/<family>: a tiny random checkpoint as the public PyTorch implementation saves it, and
what its MoE block computes.

For each family a model of one or two layers is built with random weights, saved with save_pretrained, and cut down to
config.json and the MoE layer's tensors (model.safetensors). golden.safetensors holds x [T,H], the block's output y,
the router's logits, and the chosen experts with their weights, ids ascending: all from fp32 arithmetic on the saved
weights.

    python tests/oracle/families.py [family ...]        needs torch and transformers 5.24
"""

import json
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[1] / "fixtures" / "families"
TOKENS = 16

# Attention is not exported, so it only has to be legal.
ATTENTION = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=64, max_position_embeddings=64)
MLA = dict(ATTENTION, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)

# family -> config class, its arguments, the layer to export, dtype of the saved model
FAMILIES = {
    "deepseek_v2": ("DeepseekV2Config", dict(
        MLA, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=2,
        num_experts_per_tok=3, first_k_dense_replace=1, num_hidden_layers=2, topk_method="greedy",
        norm_topk_prob=False, routed_scaling_factor=1.0, n_group=1, topk_group=1), 1, torch.bfloat16),
    "deepseek_v2_groups": ("DeepseekV2Config", dict(
        MLA, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, n_routed_experts=12, n_shared_experts=1,
        num_experts_per_tok=3, first_k_dense_replace=0, num_hidden_layers=1, topk_method="group_limited_greedy",
        norm_topk_prob=False, routed_scaling_factor=16.0, n_group=4, topk_group=2), 0, torch.bfloat16),
    "deepseek_v3": ("DeepseekV3Config", dict(
        MLA, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, n_routed_experts=12, n_shared_experts=1,
        num_experts_per_tok=4, first_k_dense_replace=1, num_hidden_layers=2, n_group=4, topk_group=2), 1, torch.bfloat16),
    "glm4_moe": ("Glm4MoeConfig", dict(
        ATTENTION, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, n_routed_experts=12,
        n_shared_experts=1, num_experts_per_tok=4, first_k_dense_replace=1, num_hidden_layers=2,
        routed_scaling_factor=2.5), 1, torch.bfloat16),
    "dots1": ("Dots1Config", dict(
        ATTENTION, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, n_routed_experts=10,
        n_shared_experts=2, num_experts_per_tok=3, first_k_dense_replace=0, num_hidden_layers=1, norm_topk_prob=True,
        routed_scaling_factor=2.5), 0, torch.bfloat16),
    "qwen2_moe": ("Qwen2MoeConfig", dict(
        ATTENTION, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, shared_expert_intermediate_size=56,
        num_experts=10, num_experts_per_tok=4, num_hidden_layers=1), 0, torch.bfloat16),
    "qwen3_moe": ("Qwen3MoeConfig", dict(
        ATTENTION, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, num_experts=12,
        num_experts_per_tok=4, num_hidden_layers=2, decoder_sparse_step=2, norm_topk_prob=True), 1, torch.bfloat16),
    "qwen3_next": ("Qwen3NextConfig", dict(
        ATTENTION, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        num_experts=8, num_experts_per_tok=4, num_hidden_layers=1, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8), 0, torch.bfloat16),
    "olmoe": ("OlmoeConfig", dict(
        ATTENTION, hidden_size=32, intermediate_size=40, num_experts=9, num_experts_per_tok=3, num_hidden_layers=1),
        0, torch.bfloat16),
    "mixtral": ("MixtralConfig", dict(
        ATTENTION, hidden_size=48, intermediate_size=40, num_local_experts=5, num_experts_per_tok=2,
        num_hidden_layers=1), 0, torch.bfloat16),
    "minimax_m2": ("MiniMaxM2Config", dict(
        ATTENTION, hidden_size=48, intermediate_size=24, num_local_experts=11, num_experts_per_tok=4,
        num_hidden_layers=1), 0, torch.bfloat16),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", dict(
        ATTENTION, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, moe_num_experts=10, moe_k=3,
        moe_num_shared_experts=2, moe_layer_start_index=1, num_hidden_layers=2), 1, torch.bfloat16),
    "llama4_text": ("Llama4TextConfig", dict(
        ATTENTION, hidden_size=48, intermediate_size=24, intermediate_size_mlp=64, num_local_experts=6,
        num_experts_per_tok=1, num_hidden_layers=2, interleave_moe_layer_step=2), 1, torch.bfloat16),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", dict(
        ATTENTION, hidden_size=48, intermediate_size=24, num_experts=8, moe_topk=3, num_hidden_layers=1,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0)), 0, torch.bfloat16),
    "gpt_oss": ("GptOssConfig", dict(
        ATTENTION, hidden_size=64, intermediate_size=32, num_local_experts=6, num_experts_per_tok=2,
        num_hidden_layers=1), 0, torch.bfloat16),
    "deepseek_v4": ("DeepseekV4Config", dict(
        hidden_size=64, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
        num_hidden_layers=1, mlp_layer_types=["moe"], num_attention_heads=4, num_key_value_heads=1, head_dim=32,
        q_lora_rank=16, o_groups=2, o_lora_rank=16, index_n_heads=2, index_head_dim=16, vocab_size=64,
        max_position_embeddings=64), 0, torch.bfloat16),
}


def randomise(block):
    """Weights large enough that a wrong name, order or orientation shows, biases large enough to change choices."""
    generator = torch.Generator().manual_seed(1234)
    for name, tensor in list(block.named_parameters()) + list(block.named_buffers()):
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        fan_in = tensor.shape[-1] if tensor.dim() > 1 else 4
        tensor.data.copy_(noise * (1.5 if "gate" in name and tensor.dim() == 2 else 1.0) / fan_in**0.5)


def find_block(layer):
    for name in ("mlp", "block_sparse_moe", "feed_forward"):
        if hasattr(layer, name):
            return getattr(layer, name)
    raise LookupError(f"no MoE block in {type(layer).__name__}")


def routing(family, block, x, logits, y):
    """Chosen experts, ascending, and their weights, from the block's own router."""
    gate = getattr(block, "gate", None) or block.router
    flat = x.reshape(-1, x.shape[-1])
    out = gate(flat, block.e_score_correction_bias) if family == "minimax_m2" else gate(flat)
    if family == "llama4_text":
        scores, logits = out
        weight, idx = scores.max(dim=-1, keepdim=True)
        return logits, idx, weight
    logits, weight, idx = out
    idx, order = torch.sort(idx, dim=-1)
    return logits, idx, weight.gather(1, order)


def export(family):
    config_class, arguments, layer, dtype = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomise(find_block(model.model.layers[layer]))
    folder = ROOT / family
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        root = json.loads((pathlib.Path(saved) / "config.json").read_text())
        tensors = {}
        with safe_open(pathlib.Path(saved) / "model.safetensors", "pt") as f:
            for name in f.keys():
                parts = name.split(".")
                inside = f".{layer}." in name and any(m in parts for m in ("mlp", "block_sparse_moe", "feed_forward", "ffn"))
                if inside and "norm" not in name and not any("attn" in p for p in parts):
                    tensors[name] = f.get_tensor(name)
        # The block with exactly the saved weights, in fp32.
        block = find_block(type(model).from_pretrained(saved, dtype=torch.float32).model.layers[layer]).eval()
    (folder / "config.json").write_text(json.dumps(root, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    x = torch.randn(1, TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(7)).bfloat16().float()
    with torch.no_grad():
        y = block(x)
        y = y[0] if isinstance(y, tuple) else y
        logits, idx, weight = routing(family, block, x, None, y)
    save_file({"x": x[0].bfloat16().contiguous(), "y": y.reshape(TOKENS, -1).float().contiguous(),
               "router_logits": logits.float().contiguous(), "topk_idx_sorted": idx.int().contiguous(),
               "topk_weight": weight.float().contiguous()}, folder / "golden.safetensors")
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{family}: {size} bytes, {len(tensors)} tensors, e.g. {sorted(tensors)[:2]} ... {sorted(tensors)[-2:]}, "
          f"{ {tuple(t.shape) for t in tensors.values()} }")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or FAMILIES:
        export(chosen)
