#!/usr/bin/env python3
"""Times torch._grouped_mm (bf16), a per-expert loop of torch._scaled_mm (1x128 and 128x128 scales) and a Triton fused-MoE
style kernel on the grid, each checked on sampled rows first. Prints JSON lines; a peer that is not there or refuses a
shape says so in its line.

    torch_triton.py [--seconds N] [--peers FILE] [part of a shape's name]
                    start no new case after N seconds; also write the figures as `sluice bench --grid --peers FILE` reads them
"""

import json
import time

import torch
import triton
import triton.language as tl

import grid as g
import peers_file
import routes

printed = []  # every figure, for --peers


# Tokens sorted by expert and padded to BLOCK_M, one expert a block: the form the public fused MoE kernels share.
@triton.jit
def _fused_moe(a, a_scale, w, w_scale, out, row_ids, block_expert, num_rows, n, k, k_blocks, n_blocks,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    pid = tl.program_id(0)
    num_m = tl.num_programs(0) // tl.cdiv(n, BLOCK_N)
    num_n = tl.cdiv(n, BLOCK_N)
    group = pid // (GROUP_M * num_n)
    first = group * GROUP_M
    size = min(num_m - first, GROUP_M)
    m = first + (pid % (GROUP_M * num_n)) % size
    nb = (pid % (GROUP_M * num_n)) // size
    expert = tl.load(block_expert + m).to(tl.int64)
    rows = tl.load(row_ids + m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    used = rows < num_rows
    columns = nb * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, 128)
    a_at = a + rows[:, None] * k + ks[None, :]
    w_at = w + expert * n * k + columns[None, :].to(tl.int64) * k + ks[:, None]
    s_at = a_scale + rows * k_blocks
    ws_at = w_scale + (expert * n_blocks + nb * BLOCK_N // 128) * k_blocks
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(0, k // 128):
        x = tl.load(a_at, mask=used[:, None], other=0.0)
        y = tl.load(w_at)
        s = tl.load(s_at + i, mask=used, other=0.0) * tl.load(ws_at + i)
        total += tl.dot(x, y) * s[:, None]
        a_at += 128
        w_at += 128
    tl.store(out + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16), mask=used[:, None])


def padded_blocks(offsets, block_m):
    rows, experts = [], []
    for e, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        for first in range(begin, end, block_m):
            experts.append(e)
            rows += [r if r < end else offsets[-1] for r in range(first, first + block_m)]
    device = {"dtype": torch.int32, "device": "cuda"}
    return torch.tensor(rows, **device), torch.tensor(experts, **device)


def triton_configs(rows_per_expert):
    """(BLOCK_M, BLOCK_N, GROUP_M, warps, stages): what the public tables use round this size; the fastest counts."""
    if rows_per_expert <= 24:
        return [(16, 128, 1, 4, 4), (16, 128, 1, 4, 5)]
    if rows_per_expert <= 48:
        return [(32, 128, 8, 4, 4), (64, 128, 8, 4, 4)]
    if rows_per_expert <= 200:
        return [(64, 128, 16, 4, 4), (128, 128, 16, 8, 4)]
    return [(128, 128, 16, 8, 3), (128, 128, 16, 8, 4), (64, 128, 16, 4, 4)]


def report(impl, row, name, n, k, offsets, timing=None, worst=-1.0, config="", error=None):
    num_bytes, flops, floor = routes.gemm_floor(row, n, k, offsets)
    line = {"bench": "grouped_gemm", "impl": impl, "shape": row.shape, "tokens": row.tokens, "gemm": name, "rows": offsets[-1],
            "active_experts": sum(1 for a, b in zip(offsets, offsets[1:]) if b > a)}
    if error is None:
        median, least, most = timing
        line |= {"us": round(median, 2), "min_us": round(least, 2), "max_us": round(most, 2), "floor_us": round(floor, 2),
                 "share_of_floor": round(floor / median, 3), "bytes": num_bytes, "flops": flops}
    else:
        line["error"] = error
    printed.append(line | {"worst_error": round(worst, 4), "config": config})
    print(json.dumps(printed[-1]), flush=True)


def checked(impl, row, name, n, k, all_offsets, inputs, variants, run, config):
    """Runs once, holds the result against the reference, and times it only if it is right."""
    try:
        out = run(0)
        worst = g.worst_error(row, n, k, all_offsets[0], *inputs, out)
        if worst >= 1:
            report(impl, row, name, n, k, all_offsets[0], worst=worst, config=config, error="wrong result")
            return
        timing = g.time_graph(variants, routes.gemm_floor(row, n, k, all_offsets[0])[2], run)
        report(impl, row, name, n, k, all_offsets[0], timing, worst, config)
    except Exception as error:  # whatever a peer throws is its answer on this shape
        torch.cuda.synchronize()
        report(impl, row, name, n, k, all_offsets[0], config=config, error=" ".join(str(error).split())[:160])


def run_bf16(row, name, n, k, all_offsets):
    as_bf16 = routes.Row(row.shape, row.tokens, row.experts, row.local, row.hidden, row.intermediate, row.top_k, True)
    rows = max(o[-1] for o in all_offsets)
    a = g.make_values((rows, k), torch.bfloat16, g.SALT_A)
    w = g.make_values((row.local, n, k), torch.bfloat16, g.SALT_W)
    ends = [torch.tensor(o[1:], dtype=torch.int32, device="cuda") for o in all_offsets]

    def run(v):
        return torch._grouped_mm(a[: all_offsets[v][-1]], w.transpose(1, 2), offs=ends[v])

    checked("torch_grouped_mm_bf16", as_bf16, name, n, k, all_offsets, (a, None, w, None), len(all_offsets), run, "")


def run_fp8(row, name, n, k, all_offsets):
    rows = max(o[-1] for o in all_offsets)
    a = g.make_values((rows, k), torch.float8_e4m3fn, g.SALT_A)
    a_scale = g.make_a_scale(rows, k // 128)
    w = g.make_values((row.local, n, k), torch.float8_e4m3fn, g.SALT_W)
    w_scale = g.make_w_scale(row.local, n // 128, k // 128)
    inputs = (a, a_scale, w, w_scale)
    out = torch.empty((rows, n), dtype=torch.bfloat16, device="cuda")
    active = sum(1 for x, y in zip(all_offsets[0], all_offsets[0][1:]) if y > x)
    for block_m, block_n, group_m, warps, stages in triton_configs(all_offsets[0][-1] / max(active, 1)):
        blocks = [padded_blocks(o, block_m) for o in all_offsets]

        def run(v):
            ids, experts = blocks[v]
            _fused_moe[(experts.numel() * (n // block_n),)](
                a, a_scale, w, w_scale, out, ids, experts, all_offsets[v][-1], n, k, k // 128, n // 128,
                block_m, block_n, group_m, num_warps=warps, num_stages=stages)
            return out

        out.fill_(float("nan"))
        checked("triton_fused_moe", row, name, n, k, all_offsets, inputs, len(all_offsets), run,
                f"{block_m}x{block_n}x128 group {group_m} warps {warps} stages {stages}")
    # One call an expert, its rows padded to 16 as the call wants: only where the launches do not drown everything.
    if active > 64:
        return
    pieces = []
    for offsets in all_offsets:
        one = []
        for e, (begin, end) in enumerate(zip(offsets, offsets[1:])):
            if end > begin:
                padded = (end - begin + 15) // 16 * 16
                x = torch.zeros((padded, k), dtype=torch.float8_e4m3fn, device="cuda")
                x.view(torch.uint8)[: end - begin] = a.view(torch.uint8)[begin:end]
                s = torch.zeros((k // 128, padded), dtype=torch.float32, device="cuda")
                s[:, : end - begin] = a_scale[begin:end].t()
                one.append((x, s.t(), w[e].t(), w_scale[e].t(), begin, end))
        pieces.append(one)

    def run_loop(v):
        parts = [torch._scaled_mm(x, m, scale_a=s, scale_b=t, out_dtype=torch.bfloat16) for x, s, m, t, _, _ in pieces[v]]
        if v == 0 and not torch.cuda.is_current_stream_capturing():
            for part, (_, _, _, _, begin, end) in zip(parts, pieces[v]):
                out[begin:end] = part[: end - begin]
        return out

    out.fill_(float("nan"))
    checked("torch_scaled_mm_loop", row, name, n, k, all_offsets, inputs, len(all_offsets), run_loop, "one call an expert")


def main():
    options = peers_file.peer_options(__doc__)
    begin = time.monotonic()
    print(json.dumps({"bench": "routes", "impl": "torch", "digest": routes.route_digest(),
                      "version": f"torch {torch.__version__}, triton {triton.__version__}"}), flush=True)
    for row in routes.grid():
        if options.shape not in row.shape:
            continue
        for name, n, k in row.gemms():
            if time.monotonic() - begin > options.seconds:
                report("torch", row, name, n, k, routes.expert_offsets(row, 0), error=f"not started: {options.seconds:g} s were over")
                continue
            first = routes.expert_offsets(row, 0)
            variants = routes.num_variants(routes.gemm_floor(row, n, k, first)[0])
            all_offsets = [first] + [routes.expert_offsets(row, v) for v in range(1, variants)]
            if not row.bf16:
                run_fp8(row, name, n, k, all_offsets)
            run_bf16(row, name, n, k, all_offsets)
            torch.cuda.empty_cache()
    if options.peers:
        peers_file.write(options.peers, printed, torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
