#!/usr/bin/env python3
"""bench_grid_test.py ROOT SLUICE [CASE]: the grid of `sluice bench --grid` against bench/peers/, and its pictures as XML.

The rows, their routed rows and the figures of a record are computed a second time here, by the Python of bench/peers.
"""

import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

sys.dont_write_bytecode = True
ROOT, SLUICE = pathlib.Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(ROOT / "bench" / "peers"))
sys.path.insert(0, str(ROOT / "scripts" / "internal"))

import gpu_table  # noqa: E402
import peers_file  # noqa: E402
import routes  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
QUICK = ["--experts", "8", "--seconds", "0.01", "--device", "cpu", "--threads", "2"]
TINY = ["--rows", "qwen3-30b,qwen3-30b-bf16", "--tokens", "1,3", "--memory", "0.076", *QUICK]  # one copy in bf16
ONE = ["--rows", "qwen3-30b", "--tokens", "1", "--memory", "0.04", *QUICK]
STAGES_WITH_FLOPS = ("layer", "up", "down", "gate.logits", "combine")


def sluice(*arguments, path=None):
    environment = os.environ | ({"PATH": str(path)} if path is not None else {})
    return subprocess.run([SLUICE, "bench", "--grid", *map(str, arguments)], capture_output=True, text=True, env=environment,
                          stdin=subprocess.DEVNULL, timeout=100)


def lines_of(ran):
    return [json.loads(line) for line in ran.stdout.splitlines()]


def texts(picture):
    return ["".join(element.itertext()).strip() for element in picture.iter(f"{SVG}text")]


def plots(picture):
    """The elements of every plotted series, legend entries included."""
    return [group for group in picture.iter(f"{SVG}g") if group.get("id", "").startswith("gnuplot_plot_")]


class Rows(unittest.TestCase):
    def test_the_rows_are_those_of_the_peers(self):
        ran = sluice("--memory", "0.01", "--device", "cpu", "--json")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        listed = [(f["shape"], f["tokens"], f["rows"], f["needed_bytes"]) for f in lines_of(ran) if f["bench"] == "layer"]
        wanted = []
        for row in routes.grid():
            elem_bytes = 2 if row.bf16 else 1
            weights = 3 * row.local * row.hidden * row.intermediate * elem_bytes + row.experts * row.hidden * 2
            wanted.append((row.shape, row.tokens, routes.expert_offsets(row, 0)[-1], weights))
        self.assertEqual(listed, wanted)

    def test_the_lines_are_figures_of_a_record(self):
        figures = lines_of(sluice("--rows", "qwen3-30b:1,dsv3:32", "--memory", "0.1", "--experts", "16", "--device", "cpu", "--seconds", "0.01", "--json"))
        table = gpu_table.layer_lines({"bench": {"figures": figures}})
        self.assertEqual(len(table), 4, table)
        self.assertRegex(table[2], r"^\| dsv3-e16 \| 32 \| 256 \| not run \|  \|$")
        self.assertRegex(table[3], r"^\| qwen3-30b-e16 \| 1 \| 8 \| [\d.]+ \| \d+ % \|$")

    def test_a_record_gives_the_figures_that_its_lines_give(self):
        for path in sorted((ROOT / "bench" / "results").glob("*.json")):
            record = json.loads(path.read_text())
            wanted = {(f["row"], f["peer"]): (f["us"], f["checked"]) for f in peers_file.collect(record["peers"]["figures"])}
            self.assertTrue(wanted)
            ran = sluice("--memory", "0.01", "--device", "cpu", "--json", "--peers", path)
            self.assertEqual(ran.returncode, 0, ran.stderr)
            found = {(f"{line['shape']}:{line['tokens']}", f["peer"]): (round(f["us"], 3), f["checked"])
                     for line in lines_of(ran) if line["bench"] == "peers" for f in line["figures"]}
            self.assertEqual(found, wanted, path)


class WithFolder(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)



class Pictures(WithFolder):
    def peers(self):
        """Three figures: two peers at one row, one of them at another too."""
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        figures = [{"row": f"qwen3-30b-e8:{t}", "peer": peer, "covers": covers, "us": us, "checked": True}
                   for t, peer, covers, us in ((1, "one peer", "layer", 1234.5), (3, "one peer", "layer", 77777), (3, "other_peer", "gemms", 888.8))]
        path = self.folder / "it's a file.json"
        path.write_text(json.dumps({"form": "sluice-peers", "version": 1, "date": date, "device": "cpu", "figures": figures}))
        return path

    def test_what_is_drawn(self):
        out = self.folder / "deep" / "it's a folder"
        ran = sluice(*TINY, "--peers", self.peers(), "--plot", out)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertEqual(sorted(path.name for path in out.iterdir()), ["qwen3-30b-bf16-e8.svg", "qwen3-30b-e8.svg", "roofline.svg"])
        for name in ("qwen3-30b-bf16-e8.svg", "qwen3-30b-e8.svg", "roofline.svg"):
            self.assertIn(name, ran.stdout)

        roofline = xml.etree.ElementTree.parse(out / "roofline.svg").getroot()
        self.assertEqual(roofline.tag, f"{SVG}svg")
        said = texts(roofline)
        for text in ("qwen3-30b-e8: T = 1, 3", "qwen3-30b-bf16-e8: T = 1, 3", "FLOPs per byte that must be moved", "useful work (FLOP/s)", "up alone", "combine alone"):
            self.assertIn(text, said)
        self.assertTrue(any(text.startswith("Roofline of the grid: CPU, 2 threads") for text in said), said)
        # A point for every row and stage with FLOPs; the legend has one for every kind of point and one for every shape.
        points = sum(len(list(plot.iter(f"{SVG}use"))) for plot in plots(roofline))
        self.assertEqual(points, 2 * 2 * len(STAGES_WITH_FLOPS) + len(STAGES_WITH_FLOPS) + 2)

        for name, of_peers in (("qwen3-30b-e8", {"one peer, layer": 2, "other_peer, two GEMMs": 1}), ("qwen3-30b-bf16-e8", {})):
            picture = xml.etree.ElementTree.parse(out / f"{name}.svg").getroot()
            said = texts(picture)
            series = {"floor of the layer": 2, "Sluice, layer": 2, "Sluice, two GEMMs": 2} | of_peers
            bars = {}
            for plot in plots(picture):
                title = [text for text in texts(plot) if text in series]
                if title:
                    bars[title[0]] = len(list(plot.iter(f"{SVG}polygon"))) - 1  # one is the legend's
            self.assertEqual(bars, series, name)
            for text in ("T = 1", "T = 3", "8 rows", "24 rows", "time (us), logarithmic"):
                self.assertIn(text, said)
            self.assertTrue(any(text.startswith(f"{name}: 8 experts, H = 2048, I = 768, top 8") for text in said), said)
            for text in ("1234", "77777", "889") if of_peers else ():
                self.assertIn(text, said)  # the figures over the bars

class Refusals(WithFolder):
    def programs(self, script):
        """A folder for PATH with a gnuplot that is this script."""
        path = self.folder / "bin"
        path.mkdir()
        (path / "gnuplot").write_text(f"#!/bin/sh\n{script}\n")
        (path / "gnuplot").chmod(0o755)
        return path

    def test_without_gnuplot_nothing_is_measured(self):
        (self.folder / "empty").mkdir()
        out = self.folder / "out"
        ran = sluice(*TINY, "--plot", out, path=self.folder / "empty")
        self.assertEqual(ran.returncode, 3)
        self.assertEqual(ran.stdout, "")
        self.assertIn("sluice: error: --plot: gnuplot is not installed", ran.stderr)
        self.assertIn("gnuplot-nox", ran.stderr)
        self.assertFalse(out.exists())

    def test_a_gnuplot_that_fails_leaves_what_was_there(self):
        out = self.folder / "out"
        out.mkdir()
        (out / "roofline.svg").write_text("before")
        path = self.programs('[ "$1" = --version ] && exit 0\necho "half a picture"\necho "no such terminal" >&2\nexit 7')
        ran = sluice(*ONE, "--plot", out, path=path)
        self.assertEqual(ran.returncode, 3)
        self.assertIn('roofline.svg: gnuplot ended with exit status 7 and said "no such terminal"', ran.stderr)
        self.assertEqual([(p.name, p.read_text()) for p in out.iterdir()], [("roofline.svg", "before")])

    def test_half_a_picture_is_none(self):
        out = self.folder / "out"
        path = self.programs('echo "<svg>"')
        ran = sluice(*ONE, "--plot", out, path=path)
        self.assertEqual(ran.returncode, 3)
        self.assertIn("no whole SVG", ran.stderr)
        self.assertEqual(list(out.iterdir()), [])

    def test_a_name_that_is_taken_leaves_no_part(self):
        out = self.folder / "out"
        (out / "roofline.svg").mkdir(parents=True)
        ran = sluice(*ONE, "--plot", out)
        self.assertEqual(ran.returncode, 3)
        self.assertIn(f"{out}/roofline.svg: rename failed", ran.stderr)
        self.assertEqual([path.name for path in out.iterdir()], ["roofline.svg"])

    def test_a_gnuplot_that_cannot_answer_is_refused_at_once(self):
        path = self.programs('echo "cannot open display" >&2\nkill -9 $$')
        ran = sluice(*TINY, "--plot", self.folder / "out", path=path)
        self.assertEqual((ran.returncode, ran.stdout), (3, ""))
        self.assertIn('gnuplot was ended by signal 9 and said "cannot open display"', ran.stderr)
        self.assertFalse((self.folder / "out").exists())

    def test_a_place_that_is_no_folder(self):
        (self.folder / "file").write_text("")
        for place in ("file", "file/below"):
            ran = sluice(*TINY, "--plot", self.folder / place)
            self.assertEqual((ran.returncode, ran.stdout), (3, ""), place)
            self.assertIn(f"--plot {self.folder / place}: ", ran.stderr)

    def test_no_row_no_picture(self):
        ran = sluice("--rows", "dsv3", "--memory", "0.01", "--device", "cpu", "--plot", self.folder / "out")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertEqual(list((self.folder / "out").iterdir()), [])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
