"""The inputs, the check and the timing of bench/device_data.cu, for the peers that run under torch."""

import statistics

import torch
import triton
import triton.language as tl

SALT_A, SALT_A_SCALE, SALT_W, SALT_W_SCALE = 11, 12, 13, 14


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
