#!/usr/bin/env python3
"""Fits the grouped GEMM of include/sluice/scale.h to a record of scripts/gpu-check.

    fit_gemm_rates.py RECORD                    prints the constants fp8.* and bf16.* and how far each figure is off
    fit_gemm_rates.py RECORD --leave-out SHAPE  fits without a shape, and shows what is then predicted for it

Random descent from a fixed seed: the same record gives the same constants.
"""

import argparse
import json
import math
import random
import sys

HBM_BYTES_PER_US = 4.5e6
SIZES = {"dsv3": (7168, 2048), "dsv3-ep8": (7168, 2048), "dsv3-tp8": (7168, 256), "qwen3-30b": (2048, 768), "mixtral": (4096, 14336)}
PRECISIONS = {"fp8": (1490.0, [16, 64, 256, 1024]), "bf16": (790.0, [32, 256, 1024])}  # TFLOP/s; rows per expert of the table


def figures(record, precision):
    for f in record["bench"]["figures"]:
        shape = f.get("shape", "")
        if f.get("bench") != "grouped_gemm" or shape.endswith("-bf16") != (precision == "bf16"):
            continue
        hidden, width = SIZES[shape.removesuffix("-bf16")]
        n, k = (2 * width, hidden) if f["gemm"] == "up" else (hidden, width)
        yield {**f, "n": n, "k": k}


def share_at(points, shares, rows):
    at = math.log(rows)
    if at <= points[0]:
        return shares[0]
    for i in range(1, len(points)):
        if at <= points[i]:
            return shares[i - 1] + (at - points[i - 1]) / (points[i] - points[i - 1]) * (shares[i] - shares[i - 1])
    return shares[-1]


def gemm_us(constants, f, peak_tflops, points):
    fixed, stream, depth, output, *shares = constants
    memory = f["bytes"] / (HBM_BYTES_PER_US * stream)
    flops = f["flops"] * (1 + depth / f["k"])
    compute = flops / (peak_tflops * 1e6 * share_at(points, shares, f["rows"] / f["active_experts"]))
    compute += output * f["rows"] * f["n"] * 2 / HBM_BYTES_PER_US
    return fixed + (memory**4 + compute**4) ** 0.25


def fit(data, peak_tflops, points, steps=80000):
    def loss(c):
        shares = c[4:]
        if min(c) < 0 or c[1] > 1 or shares[-1] > 1 or any(b < a for a, b in zip(shares, shares[1:])):
            return math.inf
        return sum(math.log(gemm_us(c, f, peak_tflops, points) / f["us"]) ** 2 for f in data)

    draw = random.Random(1)
    best = [3.0, 0.95, 250.0, 1.0, *(0.3 + 0.5 * i / len(points) for i in range(len(points)))]
    lowest, width = loss(best), 0.2
    for step in range(steps):
        tried = list(best)
        tried[draw.randrange(len(tried))] *= math.exp(draw.gauss(0, width))
        value = loss(tried)
        if value < lowest:
            best, lowest = tried, value
        if step % 5000 == 4999:
            width *= 0.75
    return best


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record")
    parser.add_argument("--leave-out", default="")
    options = parser.parse_args(arguments)
    with open(options.record, encoding="utf-8") as file:
        record = json.load(file)
    for precision, (peak, rows) in PRECISIONS.items():
        data = list(figures(record, precision))
        points = [math.log(r) for r in rows]
        fitted = fit([f for f in data if f["shape"] != options.leave_out], peak, points)
        names = ["fixed_us", "stream_share", "depth_k", "output_share"]
        print(json.dumps({**{f"{precision}.{n}": round(v, 3) for n, v in zip(names, fitted)}, f"{precision}.rows_per_expert": rows,
                          f"{precision}.share_of_peak": [round(v, 3) for v in fitted[4:]]}))
        for f in data:
            predicted = gemm_us(fitted, f, peak, points)
            mark = " (left out)" if f["shape"] == options.leave_out else ""
            print(f"  {f['shape']:15} T={f['tokens']:<6} {f['gemm']:5} {f['us']:9.2f} us, predicted {predicted:9.2f}, "
                  f"{100 * (predicted / f['us'] - 1):+5.1f} %{mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
