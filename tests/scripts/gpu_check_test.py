#!/usr/bin/env python3
"""scripts/gpu-check without a GPU: what it refuses, how it judges what the tools say, and the table made of its record."""

import contextlib
import copy
import fnmatch
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "scripts" / "internal"))

import gpu_check  # noqa: E402
import gpu_table  # noqa: E402


def figure(impl, shape="dsv3", tokens=1, gemm="up", us=10.0, **more):
    return {"bench": "grouped_gemm", "impl": impl, "shape": shape, "tokens": tokens, "gemm": gemm, "rows": 8, "us": us,
            "floor_us": 8.0} | more


RECORD = {
    "schema": 1, "date": "2026-12-01T10:00:00Z", "commit": "0123456789abcdef", "dirty": False, "cuda": "13.0.88",
    "gpu": {"name": "NVIDIA H200", "driver": "580.1"},
    "tests": {"passed": 7, "failed": 1, "skipped": 2},
    "sanitizers": {"runs": [{"tool": "memcheck", "verdict": "clean"}, {"tool": "racecheck", "verdict": "3 findings"}]},
    "bench": {"figures": [figure("cuda-wgmma"), figure("cuda-wgmma", gemm="down", us=6.0),
                          figure("cuda-wgmma", "qwen3-30b-bf16", 512, us=200.0), figure("cuda-wgmma", "qwen3-30b-bf16", 512, "down", 100.0),
                          {"bench": "gate", "what": "select", "impl": "cuda", "shape": "dsv3", "tokens": 8192, "us": 9.5},
                          {"bench": "stages", "what": "pack", "impl": "cuda", "shape": "dsv3", "tokens": 128, "us": 10.0, "bytes": 36e6},
                          {"bench": "layer", "shape": "dsv3", "tokens": 1, "rows": 8, "us": 110.0, "share_of_floor": 0.712},
                          {"bench": "layer", "shape": "dsv3", "tokens": 32, "rows": 256, "error": "no"},
                          {"bench": "gate", "what": "select", "impl": "cuda", "shape": "kimi-k2", "tokens": 8192, "us": 77.0},
                          {"bench": "gate", "what": "logits", "impl": "cuda", "shape": "dsv3", "tokens": 128, "error": "no"}]},
    "peers": {"figures": [figure("deepgemm", us=12.0), figure("deepgemm", us=11.0), figure("cutlass", us=20.0),
                          figure("cutlass", gemm="down", us=9.0), figure("deepgemm", gemm="down", us=9.5),
                          figure("torch_grouped_mm_bf16", us=1.0), figure("torch_grouped_mm_bf16", gemm="down", us=1.0),
                          figure("torch_grouped_mm_bf16", "qwen3-30b-bf16", 512, us=240.0),
                          figure("triton_fused_moe", gemm="down", error="wrong result", us=0.1)]},
}
del RECORD["peers"]["figures"][-1]["us"]


class Refusals(unittest.TestCase):
    def run_with(self, nvidia_smi, *arguments):
        """The script with this nvidia-smi (None: none) in front of nothing but the shell's own tools."""
        with tempfile.TemporaryDirectory() as folder:
            for tool in ("bash", "env", "dirname", "sed", "grep", "head", "cat"):
                path = next(p for d in os.environ["PATH"].split(":") if (p := pathlib.Path(d) / tool).exists())
                (pathlib.Path(folder) / tool).symlink_to(path)
            if nvidia_smi is not None:
                stub = pathlib.Path(folder) / "nvidia-smi"
                stub.write_text(f"#!/bin/bash\n{nvidia_smi}\n")
                stub.chmod(0o755)
            return subprocess.run([str(ROOT / "scripts" / "gpu-check"), *arguments], env={"PATH": folder}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60)

    def test_no_driver(self):
        done = self.run_with(None)
        self.assertEqual(done.returncode, 1)
        self.assertIn("no NVIDIA GPU here: there is no nvidia-smi", done.stderr)

    def test_a_driver_without_a_gpu(self):
        for stub in ("echo 'No devices were found'; exit 6", "echo 'No devices were found'", "exit 9"):
            done = self.run_with(stub)
            self.assertEqual(done.returncode, 1, stub)
            self.assertIn("no NVIDIA GPU here", done.stderr)
            self.assertEqual(done.stdout, "")

    def test_arguments(self):
        self.assertEqual(self.run_with(None, "--nonsense").returncode, 2)
        self.assertEqual(self.run_with(None, "--commit").returncode, 2)
        self.assertEqual(self.run_with(None, "--help").returncode, 0)


def with_included_tests(path):
    """The text of a test, and of the .cpp files it includes: the CUDA rows run the CPU's cases that way."""
    text = path.read_text()
    return text + "".join((path.parent / name).read_text() for name in re.findall(r'#include "([^"]+\.cpp)"', text))


class Judgement(unittest.TestCase):
    def test_results_are_counted(self):
        cases = [{"name": "A", "status": "RUN", "result": "COMPLETED"},
                 {"name": "B", "status": "RUN", "result": "COMPLETED", "failures": [{"failure": "no"}]},
                 {"name": "C", "status": "RUN", "result": "SKIPPED", "skipped": [{"message": "no CUDA\ndevice"}]},
                 {"name": "D", "status": "NOTRUN", "result": "SUPPRESSED"}]
        counts = gpu_check.count_results({"testsuites": [{"name": "S", "testsuite": cases}]})
        self.assertEqual(counts, (1, ["S.B"], [("S.C", "no CUDA device")]))

    def test_only_a_run_that_ran_and_found_nothing_is_clean(self):
        clean = "========= ERROR SUMMARY: 0 errors"
        judge = gpu_check.judge_sanitizer
        self.assertEqual(judge((3, [], []), 0, clean), "clean")
        self.assertEqual(judge((3, [], []), 0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"), "clean")
        for counts, status, output in (((3, [], []), 86, "ERROR SUMMARY: 2 errors"), ((3, [], []), 0, "ERROR SUMMARY: 2 errors"),
                                       ((3, [], []), 0, "RACECHECK SUMMARY: 1 hazard displayed"), ((0, [], []), 0, clean),
                                       ((2, [], [("S.C", "no GPU")]), 0, clean), ((2, ["S.B"], []), 1, clean),
                                       ((3, [], []), 139, clean), ((3, [], []), 0, "it never started"), ((3, [], []), 124, clean)):
            self.assertNotEqual(judge(counts, status, output), "clean", (counts, status, output))

    def test_filters(self):
        self.assertEqual(gpu_check.read_filters("# text\n\nall p A.*\nmemcheck,synccheck q B.*  # why\n"),
                         [(tool, "p", "A.*") for tool in gpu_check.TOOLS] + [("memcheck", "q", "B.*"), ("synccheck", "q", "B.*")])
        for wrong in ("all p", "memchek p A.*", "all p A.* B.*"):
            with self.assertRaises(ValueError):
                gpu_check.read_filters(wrong)

    def test_the_filters_of_the_tree_name_programs_and_tests_that_are_there(self):
        sources = {path.stem: with_included_tests(path) for path in gpu_check.test_sources()}
        jobs = gpu_check.read_filters(gpu_check.FILTERS.read_text())
        self.assertGreater(len(jobs), 0)
        for _, program, pattern in jobs:
            self.assertIn(program, sources)
            for one in pattern.split("-")[0].split(":"):
                for word in one.replace("*", ".").replace("/", ".").split("."):
                    self.assertIn(word, sources[program], f"{pattern} in {program}")

    def test_every_gpu_fixture_may_skip_where_there_is_no_gpu(self):
        patterns = gpu_check.summarise_tests.read_patterns(ROOT / "tests" / "allowed_skips.txt")
        suites = {}
        for path in gpu_check.test_sources():
            for suite, test in re.findall(r"^TEST_[FP]\((\w+),\s*(\w+)\)", path.read_text(), re.MULTILINE):
                suites[f"{suite}.{test}"] = path.name
        self.assertGreater(len(suites), 0)
        for name, path in suites.items():
            self.assertTrue(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns), f"{name} of {path}")

    def test_skips_where_there_is_a_gpu(self):
        skips = ["A.OneDevice: needs two GPUs", "A.Other: no CUDA device"]
        self.assertEqual(gpu_check.forbidden_skips(skips, ["A.One*"]), skips[1:])
        self.assertEqual(gpu_check.forbidden_skips(skips, []), skips)

    def test_benchmarks_keep_their_figures_when_they_fail(self):
        program = ["x", sys.executable, "-c", "import sys; print('{\"us\": 1}'); print('oh'); print('[1]'); sys.exit(3)"]
        with contextlib.redirect_stdout(io.StringIO()):
            record = gpu_check.run_benches([program])
        self.assertEqual(record["figures"], [{"us": 1}])
        self.assertEqual(record["failures"], ["x ended with status 3: oh [1]"])

    def test_a_program_that_hangs_or_is_missing_is_a_failure(self):
        self.assertEqual(gpu_check.run([sys.executable, "-c", "import time; print('a', flush=True); time.sleep(60)"], 1)[0], 124)
        self.assertEqual(gpu_check.run(["/no/such/program"], 1)[0], 127)

    def test_packed_programs_bring_their_commit(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            self.assertEqual(gpu_check.describe_build(folder, "0123")["commit"], "0123")
            (folder / gpu_check.PACKED).write_text(json.dumps({"commit": "abc", "dirty": True, "cuda": "13.0"}))
            for commit in ("", "abc"):
                self.assertEqual(gpu_check.describe_build(folder, commit), {"commit": "abc", "dirty": True, "cuda": "13.0"})
            with self.assertRaises(SystemExit):
                gpu_check.describe_build(folder, "def")

    def test_packing_names_every_program_that_is_missing(self):
        def pack(build, folder):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                return gpu_check.pack(build, folder, "abc"), text.getvalue()

        with tempfile.TemporaryDirectory() as name:
            build, folder = pathlib.Path(name) / "build", pathlib.Path(name) / "packed"
            names = ["tests/a_test", "tests/b_test", "bench/gpu_c", "bench/peer_d"]
            for one in names:
                (build / one).parent.mkdir(parents=True, exist_ok=True)
            status, text = pack(build, folder)
            self.assertEqual(status, 1)
            self.assertIn("is no build folder with the CUDA code", text)
            (build / gpu_check.PROGRAMS).write_text("\n".join(names) + "\n")
            for one in names[::2]:
                (build / one).write_bytes(pathlib.Path(os.path.realpath(sys.executable)).read_bytes())
                (build / one).chmod(0o755)
            (build / names[3]).write_text("a file, but no program")
            status, text = pack(build, folder)
            self.assertEqual(status, 1)
            self.assertIn("2 of 4 programs are not in", text)
            self.assertIn(": tests/b_test, bench/peer_d\n", text)
            self.assertFalse(folder.exists())
            self.assertEqual(gpu_check.missing_programs(build, "bench/"), ["bench/peer_d"])
            (build / gpu_check.PROGRAMS).write_text("\n".join(names[::2]) + "\n")
            status, text = pack(build, folder)
            self.assertEqual(status, 0, text)
            self.assertIn("this build has no peers", text)
            self.assertEqual(gpu_check.expected_programs(folder), names[::2])
            self.assertEqual(gpu_check.missing_programs(folder), [])

    def test_arguments_are_judged_before_anything_takes_time(self):
        def judge(*arguments):
            with contextlib.redirect_stderr(io.StringIO()) as text:
                try:
                    return gpu_check.main(["--judge-arguments", "--build", "b", *arguments]), ""
                except SystemExit as end:
                    return end.code, text.getvalue()

        with tempfile.TemporaryDirectory() as name:
            self.assertEqual(judge("--out", f"{name}/new"), (0, ""))
            self.assertEqual(judge("--out", name, "--only", "bench,peers", "--python", sys.executable), (0, ""))
            (pathlib.Path(name) / "file").write_text("")
            for wrong, said in ((["--only", "bench,bnech"], "not bnech"), (["--out", f"{name}/file"], "cannot write to"), (["--pack", f"{name}/file/x"], "cannot write to")):
                status, text = judge("--out", name, *wrong)
                self.assertEqual(status, 2, wrong)
                self.assertIn(said, text)

    def test_a_run_in_parts_becomes_one_record(self):
        old = {"schema": 1, "commit": "a", "dirty": False, "cuda": "13", "gpu": {"name": "G"}, "tests": {"passed": 1}, "left_out": []}
        new = {"schema": 1, "commit": "a", "dirty": False, "cuda": "13", "gpu": {"name": "G"}, "bench": {}, "left_out": []}
        self.assertEqual(gpu_check.merged(old, new)["tests"], {"passed": 1})
        self.assertEqual(gpu_check.merged(old, new)["left_out"], ["sanitizers", "peers"])
        self.assertEqual(gpu_check.merged(old, new | {"tests": {"passed": 2}})["tests"], {"passed": 2})
        for other in ({"commit": "b"}, {"dirty": True}, {"gpu": {"name": "H"}}):
            self.assertNotIn("tests", gpu_check.merged(old, new | other))

    def test_names_of_files(self):
        self.assertEqual(gpu_check.slug("NVIDIA H200"), "h200")
        self.assertEqual(gpu_check.slug("NVIDIA H100 80GB HBM3"), "h100-80gb-hbm3")


class Table(unittest.TestCase):
    def test_rows(self):
        text = gpu_table.render(RECORD)
        # 10 + 6 us against a floor of 16; the best rival of each GEMM is 11 (not the wrong or the bf16 one) and 9.
        self.assertIn("| DeepSeek-V3 | 1 | 8 | 16.0 | 100 % | 20.0 (DeepGEMM + CUTLASS) | 1.25x |\n", text)
        # One of the two GEMMs has no rival: no comparison is made.
        self.assertIn("| Qwen3-30B bf16 | 512 | 8 | 300 | 5 % | none |  |\n", text)
        self.assertIn("| gate: select | cuda | 8192 | 9.5 |  |\n| stages: pack | cuda | 128 | 10.0 | 80 % |\n", text)
        self.assertNotIn("77.0", text)
        self.assertIn("| DeepSeek-V3 | 1 | 8 | 110 | 71 % |\n| DeepSeek-V3 | 32 | 256 | not run |  |\n", text)
        self.assertIn("commit 0123456789ab; 7 GPU tests passed, 1 failed, 2 skipped; "
                      "compute-sanitizer (memcheck, racecheck): 1 of 2 runs clean.", text)

    def test_a_gemm_that_did_not_run_is_shown(self):
        record = copy.deepcopy(RECORD)
        del record["bench"]["figures"][1]["us"]
        self.assertIn("| DeepSeek-V3 | 1 |  | not run |  |  |  |\n", gpu_table.render(record))

    def test_changes_are_said(self):
        self.assertIn("commit 0123456789ab with changes", gpu_table.render(RECORD | {"dirty": True}))
        self.assertNotIn("with changes", gpu_table.render(RECORD | {"dirty": "unknown"}))

    def test_the_newest_record_counts(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            self.assertIsNone(gpu_table.newest_record(folder))
            self.assertEqual(gpu_table.render(None), gpu_table.NO_RECORD)
            (folder / "z-old.json").write_text(json.dumps(RECORD))
            (folder / "a-new.json").write_text(json.dumps(RECORD | {"date": "2027-01-01T00:00:00Z"}))
            self.assertEqual(gpu_table.newest_record(folder)["date"][:4], "2027")

    def test_the_markers(self):
        page = f"a\n{gpu_table.BEGIN}\nold\n{gpu_table.END}\nb\n"
        self.assertEqual(gpu_table.replaced(page, "new\n"), f"a\n{gpu_table.BEGIN}\nnew\n{gpu_table.END}\nb\n")
        for broken in ("a\n", page + page, f"{gpu_table.END}\n{gpu_table.BEGIN}\n"):
            with self.assertRaises(ValueError):
                gpu_table.replaced(broken, "new\n")

    def test_a_stale_table_is_found(self):
        with tempfile.TemporaryDirectory() as name:
            page, record = pathlib.Path(name) / "R.md", pathlib.Path(name) / "r.json"
            page.write_text(f"{gpu_table.BEGIN}\n{gpu_table.END}\n")
            record.write_text(json.dumps(RECORD))
            arguments = ["--record", str(record)]
            with contextlib.redirect_stderr(io.StringIO()):
                self.assertEqual(gpu_table.main([*arguments, "--check", str(page)]), 1)
                self.assertEqual(gpu_table.main([*arguments, "--write", str(page)]), 0)
                self.assertEqual(gpu_table.main([*arguments, "--check", str(page)]), 0)
                page.write_text(page.read_text().replace("16.0", "15.0"))
                self.assertEqual(gpu_table.main([*arguments, "--check", str(page)]), 1)

    def test_readme_has_the_table_of_the_newest_record(self):
        self.assertEqual(gpu_table.main(["--check", str(ROOT / "README.md")]), 0)


if __name__ == "__main__":
    unittest.main()
