#!/usr/bin/env python3
"""Sums ctest's JUnit files into one line, "N passed, N failed, N skipped", and into an exit status.

A skipped test prints its reason and must be listed (as a shell pattern, one a line) in the file of allowed skips. A
test that ctest could not start is a failure, as is a run that ended badly without a failed test, or ran nothing.
"""

import argparse
import fnmatch
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree


def read_patterns(path):
    lines = (line.split("#", 1)[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def skip_reason(case):
    """The sentence given to GTEST_SKIP: the line after "path:123: Skipped" in the test's output."""
    output = case.findtext("system-out") or ""
    match = re.search(r": Skipped\n(.*)", output)
    return match.group(1).strip() if match and match.group(1).strip() else "no reason given"


class Summary:
    def __init__(self, allowed_skips):
        self.allowed_skips = allowed_skips
        self.passed = 0
        self.failures = []
        self.num_skipped = 0
        self.notes = []

    def fail(self, text):
        self.failures.append(text)

    def add_case(self, preset, case):
        name = case.get("name", "?")
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            self.fail(f"{preset}: {name}")
        elif case.get("status") == "run" and skipped is None:
            self.passed += 1
        elif skipped is not None and skipped.get("message", "").startswith("SKIP_"):
            reason = skip_reason(case)
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.allowed_skips):
                self.num_skipped += 1
                self.notes.append(f"skipped: {preset}: {name}: {reason}")
            else:
                self.fail(f"{preset}: {name} was skipped and is not on the list of allowed skips: {reason}")
        else:
            message = skipped.get("message", "") if skipped is not None else ""
            self.fail(f"{preset}: {name} did not run ({case.get('status')} {message})".rstrip())

    def add_run(self, preset, status, path):
        before = len(self.failures)
        try:
            cases = list(ElementTree.parse(path).getroot().iter("testcase"))
        except (OSError, ElementTree.ParseError) as error:
            self.fail(f"{preset}: no test results ({error})")
            return
        if not cases:
            self.fail(f"{preset}: no test ran")
        for case in cases:
            self.add_case(preset, case)
        if status != 0 and len(self.failures) == before:
            self.fail(f"{preset}: ctest ended with status {status}")

    def report(self, out):
        for note in self.notes:
            print(note, file=out)
        for failure in self.failures:
            print(f"failed: {failure}", file=out)
        print(f"{self.passed} passed, {len(self.failures)} failed, {self.num_skipped} skipped", file=out)
        return 0 if self.passed > 0 and not self.failures else 1


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--allowed-skips", type=pathlib.Path, required=True)
    parser.add_argument("--failed", action="append", default=[], metavar="TEXT", help="a step that failed before its tests")
    parser.add_argument("--run", action="append", default=[], metavar="PRESET=STATUS=FILE", help="a run of ctest")
    options = parser.parse_args(arguments)
    summary = Summary(read_patterns(options.allowed_skips))
    for text in options.failed:
        summary.fail(text)
    for run in options.run:
        preset, status, path = run.split("=", 2)
        summary.add_run(preset, int(status), path)
    return summary.report(sys.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
