#!/usr/bin/env python3
"""Times kernels of packages that are installed: sgl_kernel.moe_fused_gate from logits to experts and weights, and
flashinfer.fused_moe.cutlass_fused_moe (DeepSeek's block scales) from x, ids and weights to out, on the grid, each held
against a plain computation first. Prints JSON lines; a package that is not there, or refuses a shape, says so in its line.

    installed.py [--seconds N] [--peers FILE] [part of a shape's name]
                 start no new case after N seconds; also write the layers as `sluice bench --grid --peers FILE` reads them
"""

import importlib
import json
import time

import torch

import grid as g
import peers_file
import routes

printed = []
GATE_TOKENS = (1, 32, 128, 512, 2048, 8192)
EXPERTS, GROUPS, TOPK_GROUPS, TOP_K = 256, 8, 4, 8  # DeepSeek-V3's gate
WORST_ROW = 0.05  # |out - want| / |want| of a layer whose rows are e4m3 twice: 3 % for each


def report(line, timing=None, error=None):
    if error is None:
        median, least, most = timing
        line |= {"us": round(median, 2), "min_us": round(least, 2), "max_us": round(most, 2)}
    else:
        line["error"] = " ".join(str(error).split())[:200]
    printed.append(line)
    print(json.dumps(line), flush=True)


def package(name):
    try:
        module = importlib.import_module(name)
    except Exception as error:  # absent, or built for another torch
        report({"bench": "peer", "impl": name}, error=f"not usable: {error}")
        return None
    print(json.dumps({"bench": "peer", "impl": name, "version": getattr(module, "__version__", "unknown")}), flush=True)
    return module


# ---- gate ----


def chosen_experts(logits, bias):
    """Experts [T,S] ascending and their weights, as DeepSeek-V3 defines them, in double."""
    score = torch.sigmoid(logits.double())
    biased = score + bias.double()
    group = biased.view(-1, GROUPS, EXPERTS // GROUPS).topk(2, dim=2).values.sum(2)
    kept = torch.zeros_like(group).scatter_(1, group.topk(TOPK_GROUPS, dim=1).indices, 1.0)
    allowed = kept.bool().repeat_interleave(EXPERTS // GROUPS, dim=1)
    ids = biased.masked_fill(~allowed, -torch.inf).topk(TOP_K, dim=1).indices.sort(1).values
    weight = score.gather(1, ids)
    return ids, weight / weight.sum(1, keepdim=True)


def gate_error(ids, weight, logits, bias):
    """Largest relative error of a weight; infinite where the experts are others."""
    want_ids, want = chosen_experts(logits, bias)
    got_ids, order = ids.long().sort(1)
    if not torch.equal(got_ids, want_ids):
        return float("inf")
    got = weight.double().gather(1, order)
    got = got / got.sum(1, keepdim=True)  # releases differ in whether the factor is applied here
    return ((got - want).abs() / want).max().item()


def time_gate(sgl_kernel, tokens):
    line = {"bench": "gate", "what": "select", "impl": "sgl_kernel", "shape": "dsv3", "tokens": tokens}
    try:
        variants = max(2, int(130e6 / (tokens * EXPERTS * 4)) if tokens >= 512 else 64)
        generator = torch.Generator(device="cuda").manual_seed(7)
        logits = torch.randn((variants, tokens, EXPERTS), generator=generator, device="cuda") * 2
        bias = torch.randn(EXPERTS, generator=generator, device="cuda") * 0.1

        def run(v):
            return sgl_kernel.moe_fused_gate(logits[v], bias, GROUPS, TOPK_GROUPS, TOP_K)

        weight, ids = run(0)
        worst = gate_error(ids, weight, logits[0], bias)
        line["worst_error"] = worst if worst < 1e9 else -1.0
        if not worst < 1e-5:
            report(line, error="wrong result")
            return
        report(line, g.time_graph(variants, 5.0, run))
    except Exception as error:
        torch.cuda.synchronize()
        report(line, error=error)


# ---- layer ----


def layer_error(x, ids, weight, w13, w13_scale, w2, w2_scale, out):
    """Largest |out - want| / |want| of up to four tokens; w13 is up over gate, as the peer wants it."""

    def dense(matrix, scale):
        rows = scale.repeat_interleave(128, 0)[: matrix.shape[0]].repeat_interleave(128, 1)[:, : matrix.shape[1]]
        return matrix.float() * rows

    worst = 0.0
    for t in range(min(4, x.shape[0])):
        want = torch.zeros(x.shape[1], device="cuda")
        for e, factor in zip(ids[t].tolist(), weight[t].tolist()):
            up, gate = (dense(w13[e], w13_scale[e]) @ x[t].float()).chunk(2)
            want += factor * (dense(w2[e], w2_scale[e]) @ (torch.nn.functional.silu(gate) * up))
        worst = max(worst, ((out[t].float() - want).norm() / want.norm()).item())
    return worst


def time_layer(flashinfer, row):
    line = {"bench": "layer", "what": "layer", "impl": "flashinfer", "shape": row.shape, "tokens": row.tokens,
            "entry": "x, ids and weights"}
    try:
        num_bytes, _, floor = routes.gemm_floor(row, 3 * row.intermediate, row.hidden, routes.expert_offsets(row, 0))
        variants = routes.num_variants(num_bytes)
        x = g.make_values((row.tokens, row.hidden), torch.bfloat16, g.SALT_A)
        w13 = g.make_values((row.experts, 2 * row.intermediate, row.hidden), torch.float8_e4m3fn, g.SALT_W)
        w2 = g.make_values((row.experts, row.hidden, row.intermediate), torch.float8_e4m3fn, g.SALT_W)
        w13_scale = g.make_w_scale(row.experts, 2 * row.intermediate // 128, row.hidden // 128)
        w2_scale = g.make_w_scale(row.experts, row.hidden // 128, row.intermediate // 128)
        ids = [torch.tensor(routes.drawn_experts(row, v), dtype=torch.int32, device="cuda") for v in range(variants)]
        weight = torch.full((row.tokens, row.top_k), 1.0 / row.top_k, device="cuda")
        out = torch.full((row.tokens, row.hidden), float("nan"), dtype=torch.bfloat16, device="cuda")

        def run(v):
            flashinfer.fused_moe.cutlass_fused_moe(x, ids[v], weight, w13, w2, torch.bfloat16, [w13_scale, w2_scale],
                                                   output=out, use_deepseek_fp8_block_scale=True)

        run(0)
        worst = layer_error(x, ids[0], weight, w13, w13_scale, w2, w2_scale, out)
        line["worst_error"] = worst / WORST_ROW if worst == worst else -1.0
        if not worst < WORST_ROW:
            report(line, error="wrong result")
            return
        report(line, g.time_graph(variants, floor, run))
    except Exception as error:
        torch.cuda.synchronize()
        report(line, error=error)


def main():
    options = peers_file.peer_options(__doc__)
    begin = time.monotonic()

    def in_time():
        return time.monotonic() - begin <= options.seconds

    if (sgl_kernel := package("sgl_kernel")) and options.shape in "dsv3":
        for tokens in GATE_TOKENS:
            if in_time():
                time_gate(sgl_kernel, tokens)
    if flashinfer := package("flashinfer"):
        for row in routes.grid():
            if options.shape in row.shape and row.local == row.experts and not row.bf16 and in_time():
                time_layer(flashinfer, row)
                torch.cuda.empty_cache()
    if options.peers:
        peers_file.write(options.peers, printed, torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
