#!/usr/bin/env python3
"""readme_runs_test.py ROOT SLUICE COMPILER: does what README.md shows. Its `sluice` lines run one after another, as a reader
pastes them, and its C++ compiles against the public headers alone.
"""

import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import check_docs  # noqa: E402


def lines_of(text, languages):
    return [line for _, line, language in check_docs.split_fences(text) if language in languages]


def run_commands(text, folder, program):
    """One finding for each line that does not end with success."""
    commands = [line for line in lines_of(text, check_docs.SHELL_LANGUAGES) if line.startswith("sluice ")]
    findings = [] if commands else ["README.md shows no sluice command"]
    for line in commands:
        words = shlex.split(line, comments=True)
        done = subprocess.run([program, *words[1:]], cwd=folder, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
        if done.returncode != 0:
            findings.append(f"{line}\n  ends with {done.returncode}: {done.stdout[-500:]}")
    return findings, len(commands)


def compile_blocks(text, folder, include, compiler):
    source = pathlib.Path(folder) / "readme.cpp"
    source.write_text("\n".join(lines_of(text, {"cpp"})) + "\n")
    done = subprocess.run([compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{include}", source],
                          stdin=subprocess.DEVNULL, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return [] if done.returncode == 0 else [f"the C++ of README.md does not compile:\n{done.stdout}"]


def main(root, program, compiler):
    root = pathlib.Path(root).resolve()
    program = str(pathlib.Path(program).resolve())
    text = (root / "README.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(root / "data", pathlib.Path(folder) / "data")
        findings, count = run_commands(text, folder, program)
        findings += compile_blocks(text, folder, root / "include", compiler)
        # A check that cannot fail is none.
        if not run_commands("```sh\nsluice nonsense\n```", folder, program)[0]:
            findings.append("a command that does not exist passed")
        if not compile_blocks("```cpp\nint x = nonsense;\n```", folder, root / "include", compiler):
            findings.append("C++ that does not compile passed")
    for finding in findings:
        print(finding)
    print(f"{count} commands, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
