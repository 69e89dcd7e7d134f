#!/usr/bin/env python3
"""Makes the tables of docs/scaling.md: what `sluice plan` predicts beside what was measured or published.

    scale_table.py SLUICE                            prints them; SLUICE is the built command
    scale_table.py SLUICE --write docs/scaling.md    puts them between the markers of that file
    scale_table.py SLUICE --check docs/scaling.md    exit status 1 unless they are there already
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BEGIN = "<!-- scale-tables: made by scripts/internal/scale_table.py -->"
END = "<!-- scale-tables: end -->"
RECORD = "bench/results/h200-2026-12-01.json"

# deepseek-ai/DeepEP, docs/legacy.md: H800, 128 tokens, top 8 ungrouped, e4m3 out and bf16 back; us.
LOW_LATENCY = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
# The same file: H800, 4096 tokens, GB/s of dispatch and combine, and whether the gate had groups (tests/test_internode.py: as many
# as nodes, 4 kept). The bytes are those of one row for each (token, rank) in one node, for each (token, node) in several, the
# token's own rank or node included.
NORMAL = {8: (153, 158, False), 16: (43, 43, False), 32: (58, 57, False), 64: (51, 50, True)}
# DeepGEMM's two-kernel layer of DeepSeek-V3 on 8 H200, dispatch and combine included: T per rank -> us.
TWO_KERNEL = {64: 444, 128: 490, 512: 807, 2048: 2088, 8192: 7492}


def plan(sluice, hardware, ep, tokens, *more):
    command = [sluice, "plan", "--hardware", str(ROOT / f"data/hardware/{hardware}-nvlink8-ib400.json"), "--like", "deepseek-v3", "--routed-only",
               "--ep", ",".join(map(str, ep)), "--tokens", ",".join(map(str, tokens)), "--json", *more]
    document = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {(p["ep"], p["tokens"]): p for p in document["predictions"]}


def off(predicted, measured):
    return f"{100 * (predicted / measured - 1):+.0f} %"


def table(columns, rows):
    return "\n".join(["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|", *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def low_latency(sluice):
    plans = plan(sluice, "h800", LOW_LATENCY, [128], "--ungrouped")
    rows = []
    for ep, (dispatch, combine) in LOW_LATENCY.items():
        p = plans[ep, 128]
        d, c = p["dispatch"]["us"], p["combine"]["us"]
        rows.append([str(ep), f"{p['ranks_per_token']:.2f}", f"{dispatch}", f"{d:.0f}", off(d, dispatch), f"{combine}", f"{c:.0f}", off(c, combine)])
    return table(["EP", "ranks a token", "dispatch, DeepEP us", "predicted", "", "combine, DeepEP us", "predicted", ""], rows)


def normal(sluice):
    rows = []
    for ep, (dispatch, combine, grouped) in NORMAL.items():
        p = plan(sluice, "h800", [ep], [4096], *([] if grouped else ["--ungrouped"]))[ep, 4096]
        copies = p["ranks_per_token"] if ep <= 8 else p["domains_per_token"]
        implied = [4096 * copies * bytes_ / (rate * 1e3) for bytes_, rate in ((7168 * (1 + 4 / 128), dispatch), (14336, combine))]
        d, c = p["dispatch_forwarded"]["us"], p["combine_forwarded"]["us"]
        rows.append([str(ep), f"{copies:.2f}", f"{dispatch} = {implied[0]:.0f}", f"{d:.0f}", off(d, implied[0]),
                     f"{combine} = {implied[1]:.0f}", f"{c:.0f}", off(c, implied[1]), f"{p['dispatch']['us']:.0f}", f"{p['combine']['us']:.0f}"])
    return table(["EP", "copies a token", "dispatch, DeepEP GB/s = us", "predicted, forwarded", "", "combine, DeepEP GB/s = us", "predicted, forwarded", "",
                  "dispatch as Sluice moves", "combine as Sluice moves"], rows)


def two_kernel(sluice):
    plans = plan(sluice, "h200", [8], TWO_KERNEL, "--ungrouped")
    rows = []
    for tokens, us in TWO_KERNEL.items():
        p = plans[8, tokens]
        gate = next(phase["us"] for phase in p["phases"] if phase["phase"] == "gate, route")
        serial, chunks = p["serial_us"] - gate, p["overlapped_us"] - gate
        rows.append([str(tokens), str(us), f"{serial:.0f}", off(serial, us), f"{chunks:.0f}", off(chunks, us)])
    return table(["T a rank", "published us", "predicted, serial", "", "predicted, two chunks", ""], rows)


def one_gpu(sluice):
    figures = json.loads((ROOT / RECORD).read_text())["bench"]["figures"]
    layers = {f["tokens"]: f["us"] for f in figures if f.get("bench") == "layer" and f["shape"] == "dsv3"}
    plans = plan(sluice, "h200", [1], layers)
    rows = []
    for tokens, us in layers.items():
        p = plans[1, tokens]
        rows.append([str(tokens), f"{us:.0f}", f"{p['serial_us']:.0f}", off(p["serial_us"], us)])
    return table(["T", "measured us", "predicted", ""], rows)


def render(sluice):
    return "\n".join([
        f"The whole layer of DeepSeek-V3 on one H200, without a shared expert, against {RECORD}:\n", one_gpu(sluice),
        "DeepEP's low-latency kernels, 128 tokens a rank on H800 (docs/legacy.md of deepseek-ai/DeepEP), microseconds:\n", low_latency(sluice),
        "DeepEP's normal kernels, 4096 tokens a rank on H800 (the same file), microseconds:\n", normal(sluice),
        "DeepGEMM's two-kernel layer at EP 8 on H200, published, microseconds:\n", two_kernel(sluice)])


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sluice")
    parser.add_argument("--write", type=pathlib.Path)
    parser.add_argument("--check", type=pathlib.Path)
    options = parser.parse_args(arguments)
    tables = render(options.sluice)
    target = options.write or options.check
    if target is None:
        print(tables)
        return 0
    text = target.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        print(f"{target}: expected one pair of markers, {BEGIN} and {END}", file=sys.stderr)
        return 1
    replaced = text.split(BEGIN)[0] + f"{BEGIN}\n{tables}{END}" + text.split(END)[1]
    if options.write:
        target.write_text(replaced)
    elif replaced != text:
        print(f"{target}: its tables are not those of {options.sluice}; run scale_table.py with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
