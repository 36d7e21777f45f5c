"""Times this package's own kernels on the GPU that is here, against what must be moved and computed, and against peers.

`python -m deepinfer_nvidia.bench [--only NAME] [--json FILE]`. Shapes are those of DeepSeek-V4.1-Flash; each kernel
runs in several variants of tile shape, and the best is named. Medians; the L2 cache is flushed before every run. The
floor is the larger of bytes / 4.3 TB/s and operations / 786 TFLOP/s (bf16), measured on an H200.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_nvidia import kernels

BYTES_PER_US = 4.3e6
OPERATIONS_PER_US = 786e6
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One op at one shape: variants of the own kernel, and a peer where one is here.

    size, operations  bytes that must move, multiplications and additions
    """

    name: str
    size: float
    operations: float
    variants: dict[str, Call]
    peer: Call | None = None


def tasks(device: torch.device) -> Iterator[tuple[str, Callable[[], Task]]]:
    """(name, function that makes the operands). Operands exist while their task runs."""
    for rows in (1, 8, 64, 256, 384):
        yield f"decode attention {rows}", lambda rows=rows: attention(rows, device, ring=True)
    yield "prefill attention 4096", lambda: attention(4096, device, ring=False)
    for tokens in (96, 576, 4096):
        yield f"gate_up 48 experts {tokens} tokens", lambda tokens=tokens: grouped(tokens, device)
    for name, n, k in (("q_b", 32768, 1280), ("wo_b", 5120, 8192), ("gate_up", 4608, 5120), ("down", 5120, 2304)):
        for rows in (1, 64, 1024, 4096):
            yield f"{name} {rows}", lambda rows=rows, n=n, k=k, name=name: dense(name, rows, n, k, device)
    for rows, width in ((64, 8192), (64, 131072), (4096, 16384)):
        yield f"top-512 {rows} x {width}", lambda rows=rows, width=width: top(rows, width, device)
    yield "index scores 64 x 32768", lambda: index_scores(64, 32768, device)
    for rows in (64, 4096):
        yield f"RMSNorm + e4m3 {rows}", lambda rows=rows: rowwise(rows, device)


def attention(rows: int, device: torch.device, ring: bool) -> Task:
    """64 heads of 512; 128 FP8 window keys and 512 FP4 entries of a context of 16,384 tokens a sequence."""
    file = kernels.load("sparse_attention")
    sequences = rows if ring else 1
    blocks = 128
    q = torch.randn(rows, 64, 512, device=device).bfloat16()
    table = torch.randint(1, 4096, (sequences, blocks), device=device)
    entry_rows = torch.randint(0, 120, (4096 * 64, 288), dtype=torch.uint8, device=device)
    entry_rows[:, 256:] = 0x38  # scales 1
    drawn = torch.rand(rows, blocks * 64, device=device).topk(512).indices.sort(-1).values
    positions = torch.full((rows,), blocks * 128 - 1, device=device)
    member = torch.arange(rows, device=device) if ring else torch.zeros(rows, dtype=torch.int64, device=device)
    if ring:
        window = torch.randint(0, 120, (rows * 134, 528), dtype=torch.uint8, device=device)
        window[:, 512:] = 120
    else:
        window = tuple(torch.randn(*shape, device=device).bfloat16() for shape in ((1, 127, 512), (rows, 512)))
        positions = torch.arange(blocks * 128 - rows, blocks * 128, device=device)
    starts = torch.arange(sequences, device=device) if ring else torch.zeros(1, dtype=torch.int64, device=device)

    def call(**options: Any) -> Call:
        return lambda: file.sparse_attention(
            q, window, entry_rows, drawn, torch.zeros(64, device=device), positions, member,
            torch.arange(sequences, device=device), positions - 127, starts, table, window_size=128, ring=134,
            per_block=64, capacity=512, **options,
        )  # fmt: skip

    size = rows * (128 * (528 if ring else 8) + 512 * 288 * (1 if ring else 0.1) + 2 * 64 * 1024)
    variants = {}
    for splits in (1, 2, 4) if ring else (1,):
        for keys, warps, stages in ((32, 8, 1), (32, 8, 2), (64, 8, 1), (64, 8, 2), (32, 4, 1), (16, 8, 2)):
            label = f"splits {splits} keys {keys} warps {warps} stages {stages}"
            variants[label] = call(splits=splits, keys=keys, num_warps=warps, num_stages=stages)
    name = f"{'decode' if ring else 'prefill'} attention, {rows} rows"
    return Task(name, size, rows * 64 * 640 * 512 * 4, variants)


def grouped(tokens: int, device: torch.device) -> Task:
    """The gate and up product of 48 experts, top-6 of each token among them."""
    file = kernels.load("products")
    experts, n, k = 48, 4608, 5120
    ids = torch.rand(tokens, experts, device=device).topk(6).indices.flatten().sort().values
    offsets = torch.searchsorted(ids, torch.arange(experts, device=device), right=True)
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(118, 124, (experts, n, k // 32), dtype=torch.uint8, device=device)
    x = torch.randn(tokens * 6, k, device=device).bfloat16()
    shapes = ((16, 128, 128, 4, 3), (16, 64, 256, 4, 3), (32, 128, 128, 4, 3), (64, 128, 128, 4, 3),
              (64, 256, 64, 8, 3), (128, 128, 64, 8, 3), (64, 128, 64, 4, 4))  # fmt: skip
    variants = {
        f"{r}x{c}x{d} warps {w} stages {s}": (
            lambda r=r, c=c, d=d, w=w, s=s: file.grouped_linear(
                x, codes, scales, offsets, rows=r, columns=c, depth=d, num_warps=w, num_stages=s
            )
        )
        for r, c, d, w, s in shapes
    }
    size = codes.numel() + scales.numel() + 2 * tokens * 6 * (n + k)
    return Task(f"gate_up of 48 MXFP4 experts, {tokens} tokens", size, 2 * tokens * 6 * n * k, variants)


def dense(name: str, rows: int, n: int, k: int, device: torch.device) -> Task:
    """A dense FP8 layer; the peer is cuBLAS on the weight decoded to bfloat16."""
    file = kernels.load("products")
    codes = torch.randint(0, 120, (n, k), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.randint(110, 118, (n // 32, k // 32), dtype=torch.uint8, device=device)
    x, wide = torch.randn(rows, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
    shapes = ((16, 64, 128, 4, 4), (64, 64, 128, 4, 4), (64, 128, 128, 4, 3), (128, 128, 64, 8, 3))
    variants = {
        f"{r}x{c}x{d} warps {w} stages {s}": (
            lambda r=r, c=c, d=d, w=w, s=s: file.linear(
                x, codes, scales, torch.bfloat16, rows=r, columns=c, depth=d, num_warps=w, num_stages=s
            )
        )
        for r, c, d, w, s in shapes
    }
    size = n * k + 2 * rows * (n + k)
    peer = lambda: torch.nn.functional.linear(x, wide)  # noqa: E731
    return Task(f"dense {name} {n}x{k}, {rows} rows", size, 2 * rows * n * k, variants, peer)


def top(rows: int, width: int, device: torch.device) -> Task:
    """The 512 best scores; the peer is torch's top-k and a sort, which is not stable."""
    file = kernels.load("index")
    values = torch.randn(rows, width, device=device).bfloat16()
    lengths = torch.full((rows,), width, device=device)
    variants = {f"warps {w}": (lambda w=w: file.top_entries(values, lengths, 512, num_warps=w)) for w in (4, 8, 16)}
    peer = lambda: torch.topk(values, 512, sorted=False).indices.sort(-1)  # noqa: E731
    return Task(f"top-512 of {rows} x {width}", 2 * rows * width, 0, variants, peer)


def index_scores(rows: int, entries: int, device: torch.device) -> Task:
    """64 index heads of 128, one row a sequence."""
    file = kernels.load("index")
    blocks = entries // 64
    table = torch.randint(0, 256, (4096, 64 * 68), dtype=torch.uint8, device=device)
    table[:, 64 * 64 :] = 127
    block_table = torch.randint(1, 4096, (rows, blocks), device=device)
    q, weights = torch.randn(rows, 64, 128, device=device).bfloat16(), torch.randn(rows, 64, device=device).bfloat16()
    variants = {
        f"keys {keys} warps {w}": (
            lambda keys=keys, w=w: file.index_scores(
                q, weights, table, block_table, row_start=0, first=0, count=rows, q_len=1, visible=entries,
                per_block=64, keys=keys, num_warps=w,
            )
        )
        for keys, w in ((32, 4), (64, 4), (128, 4), (128, 8))
    }  # fmt: skip
    size, operations = rows * entries * 70, rows * entries * 64 * 128 * 2
    return Task(f"index scores, {rows} rows x {entries}", size, operations, variants)


def rowwise(rows: int, device: torch.device) -> Task:
    """RMSNorm of 5120 channels with rounding to e4m3; the peer is torch's norm alone."""
    file = kernels.load("rowwise")
    x, weight = torch.randn(rows, 5120, device=device).bfloat16(), torch.ones(5120, device=device).bfloat16()
    own = {"own": lambda: file.rms_norm_quantize(x, weight, 1e-6)}
    peer = lambda: torch.nn.functional.rms_norm(x, (5120,), weight)  # noqa: E731
    return Task(f"RMSNorm + e4m3, {rows} x 5120", rows * 5120 * 6, 0, own, peer)


def measure(call: Call) -> float:
    """Median microseconds, NaN where a variant cannot be compiled or launched."""
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench

    try:
        return float(do_bench(call, warmup=5, rep=40, return_mode="median")) * 1e3
    except (OutOfResources, PTXASError):  # a variant that asks for more shared memory or registers than there are
        return math.nan


def main() -> None:
    """Print a table: best variant, time, floor, ratio, peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--json", type=Path, help="times of all variants")
    given = parser.parse_args()
    device, records = torch.device("cuda"), []
    print(f"{'op':46} {'us':>8} {'floor':>8} {'ratio':>6} {'peer':>8}  best variant")
    for name, make in tasks(device):
        if given.only not in name:
            continue
        task = make()
        times = {label: measure(call) for label, call in task.variants.items()}
        works = {label: time for label, time in times.items() if not math.isnan(time)}
        best = min(works, key=works.__getitem__) if works else "none runs"
        floor = max(task.size / BYTES_PER_US, task.operations / OPERATIONS_PER_US)
        peer = math.nan if task.peer is None else measure(task.peer)
        time = works.get(best, math.nan)
        print(f"{task.name:46} {time:8.1f} {floor:8.1f} {time / floor:6.2f} {peer:8.1f}  {best}", flush=True)
        records.append({**described(task), "floor_us": floor, "peer_us": peer, "variants_us": times})
        if given.json:
            given.json.write_text(json.dumps(records, indent=1) + "\n")
        del task
        torch.cuda.empty_cache()


def described(task: Task) -> dict[str, Any]:
    """Name, bytes and operations."""
    return {"name": task.name, "bytes": task.size, "operations": task.operations}


if __name__ == "__main__":
    main()
