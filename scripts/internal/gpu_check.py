#!/usr/bin/env python3
"""The part of scripts/gpu-check behind the build: runs tests, sanitizers, benchmarks and peers, and writes the record."""

import argparse
import concurrent.futures
import datetime
import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import summarise_tests

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ("tests", "sanitizers", "bench", "peers")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FILTERS = ROOT / "tests" / "gpu" / "sanitizer_filters.txt"
ALLOWED_SKIPS = ROOT / "tests" / "gpu" / "allowed_skips.txt"
SANITIZER_ERROR = 86
PACKED = "packed.json"
PROGRAMS = "gpu_programs.txt"  # written by configure: what the target gpu_programs builds, relative to the build folder
# What a benchmark must be given to print JSON lines, and the one that is for tuning and judges nothing.
BENCH_ARGUMENTS = {"gpu_stages": ["--json"]}
TUNING = {"gpu_gemm_tiles"}


def say(text):
    print(f"gpu-check: {text}", flush=True)


# Where the tests find data/: they may have been built in another place than they run in.
os.environ["SLUICE_SOURCE_DIR"] = str(ROOT)


def run(command, timeout_s, **options):
    """(exit status, output); a program that runs into its time counts as failed and says so."""
    try:
        done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL, **options)
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or ""
        return 124, (output if isinstance(output, str) else output.decode(errors="replace")) + f"\ntimed out after {timeout_s} s\n"
    except OSError as error:
        return 127, f"{command[0]}: {error}\n"


def describe_gpu():
    fields = {"name": "name", "driver": "driver_version", "sm_clock_mhz": "clocks.sm", "memory_clock_mhz": "clocks.mem",
              "max_sm_clock_mhz": "clocks.max.sm", "max_memory_clock_mhz": "clocks.max.mem", "power_limit_w": "power.limit",
              "temperature_c": "temperature.gpu", "memory_mib": "memory.total"}
    status, text = run(["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"], 30)
    if status != 0:
        raise SystemExit(f"gpu-check: nvidia-smi failed: {text.strip()}")
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    gpu = {}
    for key, value in zip(fields, values):
        try:
            gpu[key] = float(value) if key not in ("name", "driver") else value
        except ValueError:
            gpu[key] = value  # "[N/A]"
    status, text = run(["nvidia-smi"], 30)
    match = re.search(r"CUDA Version:\s*([\d.]+)", text)
    gpu["cuda_of_driver"] = match.group(1) if match else "unknown"
    return gpu


def describe_source(commit):
    """The commit and whether the tree differs from it; "unknown" where nothing here can tell."""
    status, head = run(["git", "-C", ROOT, "rev-parse", "HEAD"], 30)
    head = head.strip() if status == 0 and (ROOT / ".git").exists() else ""
    if head and commit in ("", head):
        _, changes = run(["git", "-C", ROOT, "status", "--porcelain", "--", ".", ":!bench/results"], 60)
        return head, bool(changes.strip())
    return commit or "unknown", "unknown"


def cuda_of_build(build):
    for path in sorted(build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake")):
        match = re.search(r'CMAKE_CUDA_COMPILER_VERSION "([^"]+)"', path.read_text())
        if match:
            return match.group(1)
    return "unknown"


def describe_build(build, commit):
    """{commit, dirty, cuda}. Packed programs bring what was true where they were built; that wins over this machine."""
    if (build / PACKED).is_file():
        packed = json.loads((build / PACKED).read_text())
        if commit not in ("", packed["commit"]):
            raise SystemExit(f"gpu-check: --commit {commit}, but the programs in {build} were packed at {packed['commit']}")
        return packed
    commit, dirty = describe_source(commit)
    return {"commit": commit, "dirty": dirty, "cuda": cuda_of_build(build)}


def expected_programs(build):
    """The paths of the programs this build was configured for; None where the folder does not say."""
    path = build / PROGRAMS
    return path.read_text().split() if path.is_file() else None


def missing_programs(build, part=""):
    """Of those below the folder `part` the ones that are not there."""
    return [name for name in expected_programs(build) or [] if name.startswith(part) and not os.access(build / name, os.X_OK)]


def test_programs(build):
    """The programs of tests/gpu, in order; one that was not built is a failure of its own."""
    return [(path.stem, build / "tests" / path.stem) for path in test_sources()]


def test_sources():
    return sorted(path for path in (ROOT / "tests" / "gpu").rglob("*_test.*") if path.suffix in (".cpp", ".cu"))


def count_results(results):
    """gtest's JSON -> (passed, [failed], [(skipped, reason)])."""
    passed, failed, skipped = 0, [], []
    for suite in results.get("testsuites", []):
        for case in suite.get("testsuite", []):
            name = f"{suite['name']}.{case['name']}"
            if case.get("failures"):
                failed.append(name)
            elif case.get("result") == "SKIPPED":
                text = " ".join(" ".join(s.get("message", "") for s in case.get("skipped", [])).split())
                skipped.append((name, text or "no reason given"))
            elif case.get("result") == "COMPLETED" and case.get("status") == "RUN":
                passed += 1
    return passed, failed, skipped


def run_gtest(program, arguments, timeout_s, wrapper=()):
    """(counts as count_results gives them, exit status, output)."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "results.json"
        status, output = run([*wrapper, program, f"--gtest_output=json:{path}", *arguments], timeout_s)
        try:
            results = json.loads(path.read_text())
        except (OSError, ValueError):
            results = {}
    return count_results(results), status, output


def forbidden_skips(skips, patterns):
    """Of "test: reason" lines those whose test no pattern allows to skip where there is a GPU."""
    return [skip for skip in skips if not any(fnmatch.fnmatchcase(skip.split(": ", 1)[0], pattern) for pattern in patterns)]


# A test program that takes longer counts as failed; the longest takes 35 s with the GPU to itself.
TEST_SECONDS = 120
# Test programs are processes of their own and spend most of their time in the oracle on the CPU. Nothing is timed here.
SIDE_BY_SIDE = 4


def run_tests(build):
    record = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "skips": [], "programs": {}}

    def one(test_program):
        begin = time.monotonic()
        return *test_program, run_gtest(test_program[1], [], TEST_SECONDS), round(time.monotonic() - begin, 1)

    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for name, program, ((passed, failed, skipped), status, output), seconds in pool.map(one, test_programs(build)):
            if status != 0 and not failed:
                failed = [f"{name} ended with status {status}: {' '.join(output.split()[-12:])}"]
            if status == 0 and passed + len(skipped) == 0:
                failed = [f"{name} ran no test"]
            record["passed"] += passed
            record["failed"] += len(failed)
            record["skipped"] += len(skipped)
            record["failures"] += failed
            record["skips"] += [f"{test}: {reason}" for test, reason in skipped]
            record["programs"][name] = {"passed": passed, "failed": len(failed), "skipped": len(skipped), "seconds": seconds}
            if failed:
                print(output[-4000:], flush=True)
            say(f"{name}: {passed} passed, {len(failed)} failed, {len(skipped)} skipped, {seconds} s")
    return record


def read_filters(text):
    """Lines "TOOLS PROGRAM FILTER"; TOOLS is "all" or a comma list."""
    jobs = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        tools = TOOLS if words[0] == "all" else tuple(words[0].split(","))
        if len(words) != 3 or any(tool not in TOOLS for tool in tools):
            raise ValueError(f"line {number}: expected TOOLS PROGRAM FILTER, tools among {', '.join(TOOLS)}: {line}")
        jobs += [(tool, words[1], words[2]) for tool in tools]
    return jobs


def judge_sanitizer(counts, status, output):
    """"clean", or what is wrong. A filter that runs nothing proves nothing."""
    passed, failed, skipped = counts
    if status == 124:
        return "timed out"
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", output) + re.findall(r"RACECHECK SUMMARY: (\d+) hazard", output)
    found = sum(int(number) for number in summary)
    if not summary:
        return "no summary: " + " ".join(output.split()[-12:])
    if found > 0:
        return f"{found} findings"
    if failed or status != 0:
        return f"tests failed under it (status {status}): {', '.join(failed)}"
    if skipped or passed == 0:
        return f"{passed} tests ran, {len(skipped)} skipped"
    return "clean"


def run_sanitizers(build):
    tool_path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    record = {"runs": [], "findings": 0}
    programs = dict(test_programs(build))

    def one(job):
        tool, program, pattern = job
        begin = time.monotonic()
        # Asking CUDA about an address that is not its own is an answer to the library, and an error to the tool.
        wrapper = [tool_path, "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR), "--print-limit", "5",
                   "--report-api-errors", "no"]
        counts, status, output = run_gtest(programs.get(program, program), [f"--gtest_filter={pattern}"], TEST_SECONDS, wrapper)
        return {"tool": tool, "program": program, "filter": pattern, "tests": counts[0],
                "verdict": judge_sanitizer(counts, status, output), "seconds": round(time.monotonic() - begin, 1)}, output

    # A sanitized kernel leaves most of the GPU idle, and each run is a process of its own.
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for result, output in pool.map(one, read_filters(FILTERS.read_text())):
            record["runs"].append(result)
            if result["verdict"] != "clean":
                record["findings"] += 1
                print(output[-3000:], flush=True)
            say(f"{result['tool']} {result['program']}: {result['verdict']} ({result['tests']} tests, {result['seconds']} s)")
    return record


def json_lines(output):
    """(lines that are JSON objects, the others)."""
    figures, rest = [], []
    for line in output.splitlines():
        try:
            value = json.loads(line)
            (figures if isinstance(value, dict) else rest).append(value if isinstance(value, dict) else line)
        except ValueError:
            rest.append(line)
    return figures, rest


def run_benches(programs):
    """Runs each [name, command...]; a program's figures stay in the record even where it ends badly."""
    record = {"figures": [], "failures": []}
    for name, *command in programs:
        begin = time.monotonic()
        status, output = run(command, 300)
        figures, rest = json_lines(output)
        record["figures"] += figures
        if status != 0:
            record["failures"].append(f"{name} ended with status {status}: {' '.join(' '.join(rest).split()[-20:])}")
        say(f"{name}: {len(figures)} figures, status {status}, {time.monotonic() - begin:.1f} s")
    return record


def bench_programs(build):
    folder = build / "bench"
    found = [path for path in sorted(folder.glob("gpu_*")) if path.is_file() and os.access(path, os.X_OK) and path.name not in TUNING]
    return [[path.name, path, *BENCH_ARGUMENTS.get(path.name, [])] for path in found]


def python_with_torch(wanted):
    """The first interpreter on PATH that imports torch and triton, or the one asked for; None where none does."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    candidates = [wanted] if wanted else [sys.executable] + [os.path.join(folder, "python3") for folder in folders]
    for candidate in dict.fromkeys(candidates):
        if os.access(candidate, os.X_OK) and run([candidate, "-c", "import torch, triton"], 120)[0] == 0:
            return candidate
    return None


def peer_programs(build, wanted_python):
    programs = [[path.name, path] for path in sorted((build / "bench").glob("peer_*")) if path.is_file() and os.access(path, os.X_OK)]
    if python := python_with_torch(wanted_python):
        programs.append(["torch_triton", python, "-B", ROOT / "bench" / "peers" / "torch_triton.py", "--seconds", "120"])
        programs.append(["installed", python, "-B", ROOT / "bench" / "peers" / "installed.py", "--seconds", "60"])
    else:
        say(f"{wanted_python or 'no python3'} {'does not import' if wanted_python else 'with'} torch and triton: those peers are left out")
    return programs


def pack(build, folder, commit):
    """Copies the programs a run needs, stripped: for a machine with a GPU and nothing to build with."""
    names = expected_programs(build)
    if names is None:
        say(f"{build} is no build folder with the CUDA code: it has no {PROGRAMS}; configure it with preset cuda-release")
        return 1
    if missing := missing_programs(build):
        say(f"{len(missing)} of {len(names)} programs are not in {build}: {', '.join(missing)}")
        say(f"nothing was packed; build them first: cmake --build {build} --target gpu_programs")
        return 1
    if not any(name.startswith("bench/peer_") for name in names):
        say("this build has no peers (SLUICE_BUILD_PEERS=OFF)")
    programs = [build / name for name in names]
    num_bytes = 0
    for program in programs:
        target = folder / program.relative_to(build)
        target.parent.mkdir(parents=True, exist_ok=True)
        status, text = run(["strip", "-o", target, program], 120)
        if status != 0:
            say(f"strip {program}: {text.strip()}")
            return 1
        num_bytes += target.stat().st_size
    (folder / PROGRAMS).write_text("".join(f"{name}\n" for name in names))
    (folder / PACKED).write_text(json.dumps(describe_build(build, commit)) + "\n")
    say(f"{len(programs)} programs, {num_bytes / 1e6:.1f} MB in {folder}; run them with scripts/gpu-check --build {folder}")
    return 0


def slug(gpu_name):
    words = re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")
    return words.removeprefix("nvidia-")


def merged(old, record):
    """`record` with the parts it left out, where an older record of the same day has them of the same commit and GPU."""
    same = all(old.get(key) == record.get(key) for key in ("schema", "commit", "dirty", "cuda"))
    if same and old["gpu"]["name"] == record["gpu"]["name"]:
        record = record | {part: old[part] for part in PARTS if part in old and part not in record}
    return record | {"left_out": [part for part in PARTS if part not in record]}


def main(arguments):
    parser = argparse.ArgumentParser(prog="gpu-check", usage="scripts/gpu-check --help says", description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--python", default="")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--pack", type=pathlib.Path)
    parser.add_argument("--judge-arguments", action="store_true", help="do nothing but that, before a build of minutes")
    options = parser.parse_args(arguments)
    parts = options.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(unknown)}")
    # Found out now, and not when there is a record to be written.
    folder = options.pack or options.out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot write to {folder}: {error.strerror}")
    if not os.access(folder, os.W_OK):
        parser.error(f"cannot write to {folder}")
    if options.judge_arguments:
        return 0
    if options.pack:
        return pack(options.build.resolve(), options.pack, options.commit)
    build = options.build.resolve()
    now = datetime.datetime.now(datetime.timezone.utc)
    record = {"schema": 1, "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), **describe_build(build, options.commit),
              "gpu": describe_gpu(), "left_out": [part for part in PARTS if part not in parts]}
    say(f"{record['gpu']['name']}, driver {record['gpu']['driver']}, commit {record['commit'][:12]}")
    # Tests come first: a figure of a program whose tests fail is not worth the time.
    if "tests" in parts:
        record["tests"] = run_tests(build)
    if "bench" in parts:
        record["bench"] = run_benches(bench_programs(build))
        record["gpu"]["after_bench"] = {key: value for key, value in describe_gpu().items() if key in ("sm_clock_mhz", "temperature_c")}
    if "peers" in parts:
        record["peers"] = run_benches(peer_programs(build, options.python))
    if "sanitizers" in parts:
        record["sanitizers"] = run_sanitizers(build)
    path = options.out / f"{slug(record['gpu']['name'])}-{now.strftime('%Y-%m-%d')}.json"
    if path.is_file():
        record = merged(json.loads(path.read_text()), record)
    path.write_text(json.dumps(record, indent=1) + "\n")
    say(f"wrote {path}")
    tests, sanitizers = record.get("tests", {}), record.get("sanitizers", {})
    problems = tests.get("failures", []) + record.get("bench", {}).get("failures", [])
    patterns = summarise_tests.read_patterns(ALLOWED_SKIPS)
    if "bench" in parts or "peers" in parts:
        problems += [f"{name} was not built: its figures are missing" for name in missing_programs(build, "bench/")]
    problems += [f"skipped, and not on the list: {skip}" for skip in forbidden_skips(tests.get("skips", []), patterns)]
    problems += [f"{r['tool']} {r['program']}: {r['verdict']}" for r in sanitizers.get("runs", []) if r["verdict"] != "clean"]
    for problem in problems:
        say(problem)
    say(f"{tests.get('passed', 0)} passed, {tests.get('failed', 0)} failed, {tests.get('skipped', 0)} skipped; "
        f"{len(sanitizers.get('runs', []))} sanitizer runs, {sanitizers.get('findings', 0)} with findings")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
