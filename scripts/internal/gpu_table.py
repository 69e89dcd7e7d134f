#!/usr/bin/env python3
"""Makes README's GPU table from the newest record in bench/results.

    gpu_table.py                     prints it
    gpu_table.py --write README.md   puts it between the markers of that file
    gpu_table.py --check README.md   exit status 1 unless it is there already
    gpu_table.py --record FILE ...   from that record instead of the newest
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BEGIN = "<!-- gpu-table: made by scripts/internal/gpu_table.py -->"
END = "<!-- gpu-table: end -->"
STREAM_BYTES_PER_US = 4.5e6
NO_RECORD = "No GPU has been measured yet.\n"

SHAPES = {"dsv3": "DeepSeek-V3", "dsv3-ep8": "DeepSeek-V3, 32 experts", "dsv3-tp8": "DeepSeek-V3, I = 256", "qwen3-30b": "Qwen3-30B",
          "qwen3-30b-bf16": "Qwen3-30B bf16", "dsv3-ep8-bf16": "DeepSeek-V3, 32 experts, bf16", "mixtral-bf16": "Mixtral bf16"}
PEERS = {"deepgemm": "DeepGEMM", "cutlass": "CUTLASS", "triton_fused_moe": "Triton", "torch_scaled_mm_loop": "torch _scaled_mm",
         "torch_grouped_mm_bf16": "torch _grouped_mm"}


def newest_record(folder):
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return max(records, key=lambda record: record["date"], default=None)


def best(figures, shape, tokens, gemm, keep):
    """The fastest right figure of one GEMM among the implementations that `keep` accepts."""
    found = [f for f in figures if f.get("bench") == "grouped_gemm" and "us" in f and keep(f["impl"]) and
             (f["shape"], f["tokens"], f["gemm"]) == (shape, tokens, gemm)]
    return min(found, key=lambda f: f["us"], default=None)


def number(us):
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def gemm_lines(record):
    ours = record.get("bench", {}).get("figures", [])
    peers = record.get("peers", {}).get("figures", [])
    keys = dict.fromkeys((f["shape"], f["tokens"]) for f in ours if f.get("bench") == "grouped_gemm")
    if not keys:
        return []
    lines = ["| experts' GEMMs, up + down | T | rows | us | of the floor | best peer, us | |", "|---|---|---|---|---|---|---|"]
    for shape, tokens in keys:
        parts = [best(ours, shape, tokens, gemm, lambda impl: True) for gemm in ("up", "down")]
        # A peer in bf16 answers another question than one in e4m3, so it stands only beside bf16.
        bf16 = shape.endswith("-bf16")
        rivals = [best(peers, shape, tokens, gemm, lambda impl: impl.endswith("bf16") == bf16) for gemm in ("up", "down")]
        cells = [SHAPES.get(shape, shape), str(tokens)]
        if any(part is None for part in parts):
            lines.append("| " + " | ".join([*cells, "", "not run", "", "", ""]) + " |")
            continue
        us, floor = sum(part["us"] for part in parts), sum(part["floor_us"] for part in parts)
        cells += [str(parts[0]["rows"]), number(us), f"{100 * floor / us:.0f} %"]
        if any(rival is None for rival in rivals):
            cells += ["none", ""]
        else:
            rival_us = sum(rival["us"] for rival in rivals)
            names = dict.fromkeys(PEERS.get(rival["impl"], rival["impl"]) for rival in rivals)
            cells += [f"{number(rival_us)} ({' + '.join(names)})", f"{rival_us / us:.2f}x"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def layer_lines(record):
    lines = []
    for f in record.get("bench", {}).get("figures", []):
        if f.get("bench") == "layer":
            figures = [number(f["us"]), f"{100 * f['share_of_floor']:.0f} %"] if "us" in f else ["not run", ""]
            lines.append("| " + " | ".join([SHAPES.get(f["shape"], f["shape"]), str(f["tokens"]), str(f["rows"]), *figures]) + " |")
    return ["| whole layer, from x to out | T | rows | us | of the floor |", "|---|---|---|---|---|", *lines] if lines else []


def stage_lines(record):
    """The other stages, at the sizes that docs/performance.md has goals for; the record holds more of them.

    Their figures are {"bench", "what", "impl", "shape", "tokens", "us"}, with "bytes" where the bound is memory.
    """
    lines = []
    for f in record.get("bench", {}).get("figures", []):
        if f.get("bench") in ("grouped_gemm", "layer", "routes") or "us" not in f or f.get("shape") != "dsv3" or f.get("tokens") not in (128, 8192):
            continue
        share = f"{100 * f['bytes'] / f['us'] / STREAM_BYTES_PER_US:.0f} %" if "bytes" in f else ""
        name = f["what"] if f["what"].startswith(f["bench"]) else f"{f['bench']}: {f['what']}"
        lines.append(f"| {name} | {f.get('impl', '')} | {f['tokens']} | {number(f['us'])} | {share} |")
    return ["| other stages, DeepSeek-V3 | | T | us | of 4.5 TB/s |", "|---|---|---|---|---|", *lines] if lines else []


def header(record):
    gpu, tests, sanitizers = record["gpu"], record.get("tests"), record.get("sanitizers")
    text = f"{gpu['name']}, driver {gpu['driver']}, CUDA {record['cuda']}, {record['date'][:10]}, commit {record['commit'][:12]}"
    text += {True: " with changes", False: ""}.get(record["dirty"], "")
    if tests:
        text += f"; {tests['passed']} GPU tests passed, {tests['failed']} failed, {tests['skipped']} skipped"
    if sanitizers:
        runs = sanitizers["runs"]
        tools = dict.fromkeys(run["tool"] for run in runs)
        text += f"; compute-sanitizer ({', '.join(tools)}): {sum(r['verdict'] == 'clean' for r in runs)} of {len(runs)} runs clean"
    return text + ".\n"


def render(record):
    if record is None:
        return NO_RECORD
    tables = ["\n".join(lines) + "\n" for lines in (gemm_lines(record), layer_lines(record), stage_lines(record)) if lines]
    return "\n".join([header(record), *tables])


def replaced(text, table):
    """`text` with the table between its markers; ValueError without exactly one pair."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected one pair of markers, {BEGIN} and {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}{END}{rest.split(END)[1]}"


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=pathlib.Path)
    parser.add_argument("--check", type=pathlib.Path)
    parser.add_argument("--record", type=pathlib.Path)
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text()) if options.record else newest_record(ROOT / "bench" / "results")
    table = render(record)
    path = options.write or options.check
    if path is None:
        print(table, end="")
        return 0
    text = path.read_text()
    try:
        wanted = replaced(text, table)
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if options.write:
        path.write_text(wanted)
    elif text != wanted:
        print(f"{path}: the GPU table is not that of the newest record; run scripts/internal/gpu_table.py --write {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
