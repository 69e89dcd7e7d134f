"""The rows, routes and floors of bench/grid.h in Python; needs nothing but Python.

The digest of the routes is printed by every program; equal digests mean that the same rows were measured.
"""

MASK = (1 << 64) - 1
STREAM_BYTES_PER_US = 4.5e6
FP8_FLOPS_PER_US = 1.49e9
BF16_FLOPS_PER_US = 0.79e9


class Row:
    def __init__(self, shape, tokens, experts, local, hidden, intermediate, top_k, bf16):
        self.shape, self.tokens, self.experts, self.local = shape, tokens, experts, local
        self.hidden, self.intermediate, self.top_k, self.bf16 = hidden, intermediate, top_k, bf16

    def gemms(self):
        return (("up", 2 * self.intermediate, self.hidden), ("down", self.hidden, self.intermediate))


def grid():
    rows = [Row("dsv3", t, 256, 256, 7168, 2048, 8, False) for t in (1, 32, 128, 512, 8192)]
    rows += [Row("dsv3-ep8", t, 256, 32, 7168, 2048, 8, False) for t in (256, 1024, 32768)]
    rows += [Row("dsv3-tp8", t, 256, 256, 7168, 256, 8, False) for t in (1, 8, 32, 128, 512, 2048, 8192)]
    rows += [Row("qwen3-30b", t, 128, 128, 2048, 768, 8, False) for t in (1, 32, 512, 8192)]
    rows += [Row("qwen3-30b-bf16", t, 128, 128, 2048, 768, 8, True) for t in (512, 8192)]
    rows += [Row("dsv3-ep8-bf16", t, 256, 32, 7168, 2048, 8, True) for t in (1024, 32768)]
    rows += [Row("mixtral-bf16", t, 8, 8, 4096, 14336, 2, True) for t in (128, 4096)]
    return rows


def drawn_experts(row, variant):
    """The experts of each token, [T][S], in the order they are drawn."""
    state = 1234 + variant
    tokens = []
    for _ in range(row.tokens):
        chosen = []
        while len(chosen) < row.top_k:
            state = (state + 0x9E3779B97F4A7C15) & MASK
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
            e = ((z ^ (z >> 31)) >> 33) % row.experts
            if e not in chosen:
                chosen.append(e)
        tokens.append(chosen)
    return tokens


def expert_offsets(row, variant):
    counts = [0] * row.local
    for chosen in drawn_experts(row, variant):
        for e in chosen:
            if e < row.local:
                counts[e] += 1
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def route_digest():
    digest = 0xCBF29CE484222325
    for row in grid():
        for offset in expert_offsets(row, 0):
            digest = ((digest ^ offset) * 0x100000001B3) & MASK
    return f"{digest:016x}"


def gemm_floor(row, n, k, offsets):
    """bytes, flops and microseconds, as in bench/grid.h."""
    rows = offsets[-1]
    active = sum(1 for a, b in zip(offsets, offsets[1:]) if b > a)
    elem = 2 if row.bf16 else 1
    num_bytes = active * n * k * elem + rows * k * elem + rows * n * 2
    if not row.bf16:
        num_bytes += active * (n / 128) * (k / 128) * 4 + rows * (k / 128) * 4
    flops = 2 * rows * n * k
    return num_bytes, flops, max(num_bytes / STREAM_BYTES_PER_US, flops / (BF16_FLOPS_PER_US if row.bf16 else FP8_FLOPS_PER_US))


def num_variants(num_bytes):
    return int(240e6 / num_bytes) + 1 if 0 < num_bytes < 120e6 else 1
