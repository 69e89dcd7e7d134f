#!/usr/bin/env python3
"""The routes of bench/peers/routes.py are those of bench/grid.h (tests/bench/grid_test.cpp expects the same number)."""

import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"))

import routes  # noqa: E402


class Routes(unittest.TestCase):
    def test_digest(self):
        self.assertEqual(routes.route_digest(), "be5fb5e7b9673cb2")

    def test_floor(self):
        row = routes.Row("x", 2, 4, 4, 256, 128, 2, False)
        num_bytes, flops, us = routes.gemm_floor(row, 256, 256, [0, 3, 3, 4, 4])
        self.assertEqual(num_bytes, 2 * (256 * 256 + 4 * 4) + 4 * (256 + 2 * 4) + 4 * 256 * 2)
        self.assertEqual(flops, 2 * 4 * 256 * 256)
        self.assertAlmostEqual(us, num_bytes / 4.5e6)


if __name__ == "__main__":
    unittest.main()
