#!/usr/bin/env python3
"""bench/peers/peers_file.py: which lines of the peers' programs become figures, and the file they are written to."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"))

import peers_file  # noqa: E402


def gemm(impl, which, us, shape="dsv3", tokens=32, **more):
    return {"bench": "grouped_gemm", "impl": impl, "shape": shape, "tokens": tokens, "gemm": which, "us": us, "worst_error": 0.3} | more


class PeersFile(unittest.TestCase):
    def test_the_fastest_of_each_gemm_counts(self):
        lines = [gemm("a", "up", 5.0), gemm("a", "up", 4.0), gemm("a", "down", 2.5), gemm("a", "down", 2.75)]
        self.assertEqual(peers_file.collect(lines), [{"row": "dsv3:32", "peer": "a", "covers": "gemms", "us": 6.5, "checked": True}])

    def test_what_did_not_run_or_is_one_half_is_no_figure(self):
        wrong = gemm("a", "up", 1.0, error="wrong result")
        refused = {key: value for key, value in gemm("a", "down", 1.0).items() if key != "us"}
        routes = {"bench": "routes", "impl": "a", "digest": "0"}
        self.assertEqual(peers_file.collect([wrong, gemm("a", "down", 2.0), refused, routes, gemm("b", "up", 1.0), gemm("c", "up", 1.0, tokens=1)]), [])

    def test_bf16_stands_beside_bf16(self):
        lines = [gemm(impl, which, 1.0, shape) for impl in ("x", "x_bf16") for which in ("up", "down") for shape in ("dsv3", "mixtral-bf16")]
        self.assertEqual([(f["row"], f["peer"]) for f in peers_file.collect(lines)], [("dsv3:32", "x"), ("mixtral-bf16:32", "x_bf16")])

    def test_without_a_check_the_figure_says_so(self):
        def checked(*errors):
            lines = [gemm("a", which, 1.0, worst_error=error) for which, error in zip(("up", "down"), errors)]
            return [f["checked"] for f in peers_file.collect([{k: v for k, v in line.items() if v is not None} for line in lines])]

        self.assertEqual(checked(0, 0.99), [True])
        for wrong in ((0.3, 1.0), (-1.0, 0.3), (0.3, None)):
            self.assertEqual(checked(*wrong), [False], wrong)

    def test_a_layer_is_a_figure_by_itself(self):
        line = {"bench": "layer", "impl": "a", "shape": "dsv3", "tokens": 1, "us": 98.0, "worst_error": 0.01}
        self.assertEqual(peers_file.collect([line]), [{"row": "dsv3:1", "peer": "a", "covers": "layer", "us": 98.0, "checked": True}])

    def test_the_file(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            text = "some words\n" + "".join(json.dumps(line) + "\n" for line in (gemm("a", "up", 1.0), gemm("a", "down", 2.0))) + "[1]\n"
            (folder / "lines").write_text(text)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(peers_file.main(["--device", "G", "--out", f"{name}/p.json", f"{name}/lines"]), 0)
                document = json.loads((folder / "p.json").read_text())
                (folder / "lines").write_text("nothing\n")
                self.assertEqual(peers_file.main(["--device", "G", "--out", f"{name}/q.json", f"{name}/lines"]), 1)
            self.assertIn("no figure", said.getvalue())
            self.assertRegex(document.pop("date"), r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
            self.assertEqual(document, {"form": "sluice-peers", "version": 1, "device": "G", "figures": [
                {"row": "dsv3:32", "peer": "a", "covers": "gemms", "us": 3.0, "checked": True}]})
            self.assertEqual(sorted(path.name for path in folder.iterdir()), ["lines", "p.json", "q.json"])


if __name__ == "__main__":
    unittest.main()
