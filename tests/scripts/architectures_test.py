#!/usr/bin/env python3
"""architectures_test.py COMPILE_COMMANDS: which architectures every file with kernels is compiled for.

Files named *_sm90.cu, those of wgmma and TMA, are compiled for sm_90a alone (for plain sm_90, or any other GPU, they
would not assemble); the others for GPUs they run on, never with the letter; and nothing leaves PTX, which a driver would compile at run time.
Where warnings of the C++ code are errors, those of the kernels are too.
"""

import json
import re
import sys

PORTABLE = {"80", "90", "100"}


def findings(entries):
    out = []
    num_kernels = 0
    strict = any(entry["file"].endswith(".cpp") and " -Werror " in entry["command"] for entry in entries)
    for entry in entries:
        name = entry["file"]
        if not name.endswith(".cu"):
            continue
        num_kernels += 1
        # -gencode arch=compute_X,code=sm_X in both spellings nvcc knows; CMake writes the code in brackets.
        pairs = re.findall(r"arch=compute_(\w+),\"?code=\"?\[?([\w,]+)\]?", entry["command"])
        codes = [code for _, codes in pairs for code in codes.split(",")]
        if strict and "/bench/peers/" not in name and "-Werror all-warnings" not in entry["command"]:
            out.append(f"{name}: its warnings are no errors, those of the C++ code are")
        if any(code.startswith("compute_") for code in codes):
            out.append(f"{name} leaves PTX: {codes}")
        if re.search(r"\s-arch[=\s]", entry["command"]):
            out.append(f"{name} is given -arch")
        targets = {code.removeprefix("sm_") for code in codes}
        hopper = re.search(r"_sm90[a-z0-9_]*\.cu$", name)
        if hopper and targets != {"90a"}:
            out.append(f"{name} is compiled for {sorted(targets)}, not for 90a alone")
        elif not hopper and (not targets or not targets <= PORTABLE):
            out.append(f"{name} is compiled for {sorted(targets)}, not for some of {sorted(PORTABLE)}")
        if any(arch != code.removeprefix("sm_") for arch, codes in pairs for code in codes.split(",")):
            out.append(f"{name} compiles one architecture's code from another's: {pairs}")
    if num_kernels == 0:
        out.append("no file with kernels is compiled")
    return out, num_kernels


def main(path):
    with open(path, encoding="utf-8") as file:
        found, num_kernels = findings(json.load(file))
    for one in found:
        print(one)
    print(f"{num_kernels} files with kernels, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
