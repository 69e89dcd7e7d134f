"""The rows, routes, inputs and checks of bench/grid.h and bench/device_data.cu, for the peers that run under torch.

The digest of the routes is printed by every program; equal digests mean that the same rows were measured.
"""

import statistics

import torch
import triton
import triton.language as tl

MASK = (1 << 64) - 1
STREAM_BYTES_PER_US = 4.5e6
FP8_FLOPS_PER_US = 1.49e9
BF16_FLOPS_PER_US = 0.79e9
SALT_A, SALT_A_SCALE, SALT_W, SALT_W_SCALE = 11, 12, 13, 14


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


def expert_offsets(row, variant):
    counts = [0] * row.local
    state = 1234 + variant
    for _ in range(row.tokens):
        chosen = []
        while len(chosen) < row.top_k:
            state = (state + 0x9E3779B97F4A7C15) & MASK
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
            e = ((z ^ (z >> 31)) >> 33) % row.experts
            if e in chosen:
                continue
            chosen.append(e)
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


@triton.jit
def _hash(index, salt):
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    x = low ^ (high * 0x9E3779B9 + salt)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _fill(out, count, salt, SCALE_EXPONENT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h = _hash(index, salt)
    if SCALE_EXPONENT == 0:
        total = ((h & 255) + ((h >> 8) & 255) + ((h >> 16) & 255) + (h >> 24)).to(tl.int32) - 510
        value = total.to(tl.float32) * 0.25
    elif SCALE_EXPONENT == 24:
        value = (65536 + (h & 0xFFFF)).to(tl.float32) * (1.0 / (1 << 24))
    else:
        value = (65536 + (h & 0xFFFF)).to(tl.float32) * (1.0 / (1 << 28))
    tl.store(out + index, value.to(out.dtype.element_ty), mask=index < count)


def _filled(shape, dtype, salt, scale_exponent):
    out = torch.empty(shape, dtype=dtype, device="cuda")
    salt = (salt * 0x01000193) & 0xFFFFFFFF
    salt = salt - (1 << 32) if salt >= 1 << 31 else salt  # a Triton argument is a signed word
    _fill[(triton.cdiv(out.numel(), 4096),)](out, out.numel(), salt, scale_exponent, 4096)
    return out


def make_values(shape, dtype, salt):
    return _filled(shape, dtype, salt, 0)


def make_a_scale(rows, k_blocks):
    return _filled((rows, k_blocks), torch.float32, SALT_A_SCALE, 24)


def make_w_scale(experts, n_blocks, k_blocks):
    return _filled((experts, n_blocks, k_blocks), torch.float32, SALT_W_SCALE, 28)


def pick_rows(matrix, rows):
    """matrix[rows] for dtypes that torch does not index."""
    return matrix.view(torch.uint8)[rows].view(matrix.dtype) if matrix.element_size() == 1 else matrix[rows]


def worst_error(row, n, k, offsets, a, a_scale, w, w_scale, out):
    """Largest |out - reference| / bound over sampled rows and columns, in double; a right result is below 1."""
    num_rows = offsets[-1]
    if num_rows == 0:
        return 0.0
    samples = min(num_rows, 33)
    worst = 0.0
    columns = torch.tensor([c * (n - 1) // 47 for c in range(48)], device="cuda")
    for i in range(samples):
        r = 0 if samples == 1 else i * (num_rows - 1) // (samples - 1)
        expert = next(e for e in range(row.local) if offsets[e] <= r < offsets[e + 1])
        x = a[r].float().double()
        m = pick_rows(w[expert], columns).float().double()
        if not row.bf16:
            x = x * a_scale[r].double().repeat_interleave(128)[:k]
            m = m * w_scale[expert].double()[columns // 128].repeat_interleave(128, dim=1)[:, :k]
        products = m * x
        want = products.sum(1)
        bound = 2.0**-8 * want.abs() + 2.0**-12 * products.abs().sum(1)
        ratio = ((out[r][columns].double() - want).abs() / bound).max().item()
        worst = max(worst, ratio if ratio == ratio else 1e30)
    return worst


def time_graph(variants, expected_us, run):
    """Median, least and largest microseconds of a call: graph replay, as time_graph in bench/device_data.cu."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for v in range(variants):
            run(v)
        stream.synchronize()
        calls = max(1, int(2000 / max(expected_us * variants, 1))) * variants
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                run(i % variants)
        times = []
        for i in range(18):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(begin.elapsed_time(end) * 1e3 / calls)
    del graph
    return statistics.median(times), min(times), max(times)
