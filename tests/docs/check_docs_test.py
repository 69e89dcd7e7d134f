#!/usr/bin/env python3
"""The checkers of the documents and of the test summary, fed with trees and results that are broken on purpose."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / "tests" / "docs"), str(ROOT / "scripts" / "internal")]

import check_docs  # noqa: E402
import summarise_tests  # noqa: E402


class Tree(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        self.write("CMakePresets.json", '{"configurePresets": [{"name": "ci"}]}')
        self.write("cli/main.cpp", 'app.add_subcommand("explain", ""); explain->add_option("--impl", x, "");\n')
        self.write("scripts/demo", "#!/bin/sh\n# --fast\n").chmod(0o755)
        self.write("docs/layer.md", "# The layer\n## Rows, and `num_rows`\n")
        self.write("README.md", "# Title\n")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def findings(self, readme):
        self.write("README.md", readme)
        return check_docs.Checker(self.root).run()

    def assert_finds(self, readme, text):
        findings = self.findings(readme)
        self.assertEqual(len(findings), 1, findings)
        self.assertIn(text, findings[0])


class Links(Tree):
    def test_good_ones_pass(self):
        readme = (
            "# Title\n[a](docs/layer.md) ![b](<docs/layer.md> \"t\") [c](docs/layer.md#rows-and-num_rows) [d](#title) [e](/docs/layer.md)\n"
            "[f](https://example.org/nothing) [g][r] `docs/layer.md:2` `docs/{layer,layer}.md` `docs/*.md` `src/NAME` no\n"
            "[r]: docs/layer.md\n"
        )
        self.write("src/NAME", "")
        self.assertEqual(self.findings(readme), [])

    def test_broken_ones_are_found(self):
        self.assert_finds("x [a](docs/none.md) y", "README.md:1: link to docs/none.md")
        self.assert_finds("\n\n![a](none.png)", "README.md:3: link to none.png")
        self.assert_finds("[a](docs/layer.md#columns)", "no such heading")
        self.assert_finds("[a](#columns)", "no such heading")
        self.assert_finds("[r]: docs/none.md", "docs/none.md")
        self.assert_finds("see `src/gate/none.cpp`", "names src/gate/none.cpp")
        self.assert_finds("see `docs/{layer,none}.md`", "names docs/none.md")
        self.assert_finds("see `docs/*.txt`", "names docs/*.txt")

    def test_other_documents_are_read_too(self):
        self.write("docs/sub/deep.md", "[up](../layer.md) [wrong](layer.md)")
        self.assert_finds("# Title", "docs/sub/deep.md:1: link to layer.md")

    def test_links_in_code_are_text(self):
        self.assertEqual(self.findings("`[a](none.md)`\n```cpp\n[a](none.md)\n```\n"), [])

    def test_a_missing_readme_is_found(self):
        (self.root / "README.md").unlink()
        self.assertEqual(check_docs.Checker(self.root).run(), ["README.md is missing"])


class Commands(Tree):
    def test_good_ones_pass(self):
        readme = (
            "```sh\nscripts/demo   # runs\n./scripts/demo --fast && scripts/demo --help\nX=1 sluice explain \\\n  --impl=reference\n"
            "build/ci/cli/sluice --version\ncmake --preset ci\ncmake --build --preset ci\nls nothing\n```\n"
            "```console\n$ scripts/demo\nscripts/none is output here\n```\n"
        )
        self.assertEqual(self.findings(readme), [])

    def test_broken_ones_are_found(self):
        def sh(text):
            return f"```sh\n{text}\n```\n"

        self.assert_finds(sh("scripts/none"), "README.md:2: runs scripts/none, which does not exist")
        self.assert_finds(sh("cd x && ./scripts/none --fast"), "runs scripts/none")
        self.assert_finds(sh("$ sudo scripts/none"), "runs scripts/none")
        self.assert_finds(sh("scripts/demo --slow"), "gives --slow to scripts/demo")
        self.assert_finds(sh("scripts/demo --fas"), "gives --fas to scripts/demo")
        self.assert_finds(sh("sluice explian"), "no such subcommand")
        self.assert_finds(sh("sluice explain --imp reference"), "gives --imp to sluice")
        self.assert_finds(sh("build/none/cli/sluice explain"), "no preset none")
        self.assert_finds(sh("cmake --preset none"), "preset none")
        self.assert_finds(sh("sluice \\\n  explian"), "README.md:3: runs sluice explian")
        self.assert_finds("```console\n$ scripts/none\n```\n", "runs scripts/none")
        self.write("scripts/plain", "")
        self.assert_finds(sh("scripts/plain"), "not executable")


class Length(Tree):
    def test_600_lines_pass_and_601_do_not(self):
        self.write("src/a.cpp", "\n" * 600)
        self.write("tests/fixtures/b.h", "\n" * 2000)
        self.write("build/c.cpp", "\n" * 2000)
        self.write("data/long.txt", "\n" * 2000)
        self.assertEqual(self.findings(""), [])
        self.write("src/a.cpp", "\n" * 601)
        self.assert_finds("", "601 lines")

    def test_the_exit_status_tells(self):
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(check_docs.main([str(self.root)]), 0)
            self.write("src/a.h", "\n" * 601)
            self.assertEqual(check_docs.main([str(self.root)]), 1)


PASSED = '<testcase name="A.Good" status="run"/>'
FAILED = '<testcase name="A.Bad" status="fail"><failure message=""/></testcase>'
SKIPPED = (
    '<testcase name="A.Gpu" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>'
    "<system-out>[ RUN      ] A.Gpu\nsrc/x.cpp:12: Skipped\nno GPU\n\n[  SKIPPED ] A.Gpu</system-out></testcase>"
)
UNSTARTED = '<testcase name="A.Lost" status="notrun"><skipped message="Unable to find executable"/></testcase>'
DISABLED = '<testcase name="A.Off" status="disabled"><skipped message="Disabled"/></testcase>'


class Totals(Tree):
    def total(self, *cases, status=0, allowed="", failed=()):
        junit = self.write("junit.xml", f"<testsuite>{''.join(cases)}</testsuite>")
        skips = self.write("allowed.txt", f"# comment\n{allowed}\n")
        arguments = ["--allowed-skips", str(skips), "--run", f"ci={status}={junit}"]
        for text in failed:
            arguments += ["--failed", text]
        return self.run_main(arguments)

    def run_main(self, arguments):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = summarise_tests.main(arguments)
        lines = out.getvalue().splitlines()
        return code, lines[-1], "\n".join(lines[:-1])

    def test_all_passed(self):
        self.assertEqual(self.total(PASSED, PASSED), (0, "2 passed, 0 failed, 0 skipped", ""))

    def test_a_failure_is_named(self):
        code, last, text = self.total(PASSED, FAILED, status=8)
        self.assertEqual((code, last), (1, "1 passed, 1 failed, 0 skipped"))
        self.assertIn("ci: A.Bad", text)

    def test_only_listed_skips_are_skips(self):
        code, last, text = self.total(PASSED, SKIPPED, allowed="A.G*  # needs a GPU")
        self.assertEqual((code, last), (0, "1 passed, 0 failed, 1 skipped"))
        self.assertIn("A.Gpu: no GPU", text)
        code, last, text = self.total(PASSED, SKIPPED, allowed="B.*")
        self.assertEqual((code, last), (1, "1 passed, 1 failed, 0 skipped"))
        self.assertIn("not on the list", text)

    def test_what_did_not_run_is_a_failure(self):
        for case in (UNSTARTED, DISABLED):
            self.assertEqual(self.total(PASSED, case, allowed="*")[:2], (1, "1 passed, 1 failed, 0 skipped"))

    def test_nothing_ran(self):
        self.assertEqual(self.total()[:2], (1, "0 passed, 1 failed, 0 skipped"))
        self.assertEqual(self.total(SKIPPED, allowed="*")[0], 1)
        arguments = ["--allowed-skips", str(self.write("allowed.txt", "")), "--run", f"ci=8={self.root / 'none.xml'}"]
        self.assertEqual(self.run_main(arguments)[:2], (1, "0 passed, 1 failed, 0 skipped"))

    def test_a_bad_end_without_a_failed_test(self):
        self.assertEqual(self.total(PASSED, status=8)[:2], (1, "1 passed, 1 failed, 0 skipped"))

    def test_a_step_before_the_tests(self):
        self.assertEqual(self.total(PASSED, failed=["cpu-debug: build"])[:2], (1, "1 passed, 1 failed, 0 skipped"))


if __name__ == "__main__":
    unittest.main()
