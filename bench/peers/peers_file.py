#!/usr/bin/env python3
"""Makes the file that `sluice bench --grid --peers FILE` reads from the JSON lines that the peers' programs print.

    peer_cutlass | peers_file.py --device "NVIDIA H200" --out peers.json
    peers_file.py --device "NVIDIA H200" --out peers.json LINES...

The form is described in cli/grid_peers.h. A GEMM is timed in several configurations: the fastest right one counts, and
up and down of one peer together are its figure for the row. Needs nothing but Python.
"""

import argparse
import datetime
import json
import os
import pathlib
import sys


def peer_options(doc):
    """What the command line of a peer that writes such a file says: seconds, peers (the file) and a part of a shape's name."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--peers", default="")
    parser.add_argument("shape", nargs="?", default="")
    return parser.parse_args()


def json_lines(text):
    """The JSON objects among the lines of a program's output."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def is_checked(line):
    """Held against a reference, and within its bound: worst_error is the largest error over the bound."""
    return 0 <= line.get("worst_error", -1) < 1


def collect(lines):
    """The figures of a peers file. A peer in bf16 answers another question than one in e4m3: it stands beside bf16 alone."""
    best, figures = {}, []
    for line in lines:
        if line.get("bench") not in ("grouped_gemm", "layer") or "us" not in line or "error" in line:
            continue
        row = f"{line['shape']}:{line['tokens']}"
        if line["bench"] == "layer":
            figures.append({"row": row, "peer": line["impl"], "covers": "layer", "us": line["us"], "checked": is_checked(line)})
        elif line["impl"].endswith("bf16") == line["shape"].endswith("-bf16"):
            of_gemm = best.setdefault((row, line["impl"]), {})
            if line["gemm"] not in of_gemm or line["us"] < of_gemm[line["gemm"]]["us"]:
                of_gemm[line["gemm"]] = line
    for (row, peer), of_gemm in best.items():
        if of_gemm.keys() == {"up", "down"}:
            us = of_gemm["up"]["us"] + of_gemm["down"]["us"]
            figures.append({"row": row, "peer": peer, "covers": "gemms", "us": round(us, 3), "checked": all(map(is_checked, of_gemm.values()))})
    return figures


def write(path, lines, device, date=None):
    """Writes the file whole or not at all; returns the number of figures."""
    date = date or datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    document = {"form": "sluice-peers", "version": 1, "date": date, "device": device, "figures": collect(lines)}
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(temporary, path)
    return len(document["figures"])


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True, help="name of the GPU, as nvidia-smi gives it")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("lines", nargs="*", type=pathlib.Path, help="files of JSON lines; none: standard input")
    options = parser.parse_args(arguments)
    text = "\n".join(path.read_text() for path in options.lines) if options.lines else sys.stdin.read()
    count = write(options.out, json_lines(text), options.device)
    if count == 0:
        print("peers_file: no figure among these lines", file=sys.stderr)
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
