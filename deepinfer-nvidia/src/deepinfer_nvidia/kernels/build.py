"""Compiles every kernel of this package to machine code without a GPU, and reports registers, spills and shared memory.

`python -m deepinfer_nvidia.kernels.build [--arch 90 100] [--only NAME] [--json FILE]`; also called by the tests. The
compiler is the one in Triton's wheel. Shapes are those of DeepSeek-V4.1-Flash, listed in `variants`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer_nvidia import kernels


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with its compile-time values.

    types      {argument: Triton's name of its type}, e.g. "*bf16", "i32"; every other argument is in `constants`
    majors     compute capabilities it is meant for
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    majors: tuple[int, ...] = (9, 10)


@dataclass(frozen=True, slots=True)
class Report:
    """What the assembler says. registers a thread; spills in bytes; shared in bytes a program."""

    name: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    matrix_instruction: str
    seconds: float


def build(variant: Variant, major: int) -> Report:
    """Compile for compute capability `major`.0 with its own instructions ("a"), e.g. sm_90a."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    started = time.monotonic()
    places = {name: (index,) for index, name in enumerate(variant.kernel.arg_names)}
    aligned = {
        places[name]: [["tt.divisibility", 16]]
        for name, kind in variant.types.items()
        if kind.startswith("*") or name in ("width", "n_size", "k_size")
    }
    source = ASTSource(variant.kernel, variant.types, variant.constants, aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    made = triton.compile(source, GPUTarget("cuda", major * 10, 32), options)
    stores, loads, registers = _assemble(made.asm["ptx"], f"sm_{major * 10}a")
    text = made.asm["ptx"]
    matrix = next((name for name in ("wgmma", "tcgen05.mma", "mma.sync") if name in text), "none")
    seconds = round(time.monotonic() - started, 1)
    return Report(variant.name, f"sm_{major * 10}a", registers, stores, loads, made.metadata.shared, matrix, seconds)


def _assemble(ptx: str, arch: str) -> tuple[int, int, int]:
    """Spill stores, spill loads and registers that ptxas reports."""
    from triton import knobs

    tool = (knobs.nvidia.ptxas_blackwell if arch >= "sm_100" and len(arch) > 6 else knobs.nvidia.ptxas).path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [tool, "-v", f"-arch={arch}", str(path), "-o", str(path.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    if spills is None or registers is None:
        raise RuntimeError(f"{tool} -v reported no registers: {said}")
    return int(spills[1]), int(spills[2]), int(registers[1])


def variants() -> list[Variant]:
    """Every kernel at the model's shapes."""
    return [*_attention(), *_rowwise(), *_products(), *_index(), *_cache()]


def _attention() -> list[Variant]:
    file = kernels.load("sparse_attention")
    index = "*i64"
    types = {
        "q": "*bf16", "ring_rows": "*u8", "before": "*i32", "own": "*i32", "entry_rows": "*u8", "entries": index,
        "block_table": index, "positions": index, "sequence": index, "slots": index, "window_lo": index,
        "row_starts": index, "sink": "*fp32", "out": "*bf16", "lse": "*fp32", "heads": "i32", "width": "i32",
        "columns": "i32", "scale": "fp32",
    }  # fmt: skip
    sizes = {"DIM": 512, "HEADS": 64, "WINDOW": 128, "RING": 134, "PER_BLOCK": 64, "CAPACITY": 512, "FP4": True}
    found = []
    for name, splits, in_ring, keys, warps in (
        ("decode", 2, True, 32, 8),
        ("decode whole", 1, True, 32, 8),
        ("decode 64 keys", 2, True, 64, 8),
        ("prefill", 1, False, 32, 8),
        ("prefill 64 keys", 1, False, 64, 8),
    ):
        constants = {**sizes, "SPLITS": splits, "IN_RING": in_ring, "KEYS": keys}
        kinds = {**types, "out": "*bf16" if splits == 1 else "*fp32"}
        found.append(Variant(f"sparse attention, {name}", file.attend, kinds, constants, warps, majors=(9,)))
    joined = {"parts": "*fp32", "lse": "*fp32", "sink": "*fp32", "out": "*bf16", "heads": "i32"}
    found.append(Variant("sparse attention, join", file.join, joined, {"DIM": 512, "SPLITS": 2}))
    return found


def _rowwise() -> list[Variant]:
    file = kernels.load("rowwise")
    norm = {"x": "*bf16", "weight": "*bf16", "normed": "*bf16", "rounded": "*bf16", "width": "i32", "eps": "fp32"}
    glu = {"gate_up": "*bf16", "row_weight": "*fp32", "out": "*bf16", "width": "i32", "limit": "fp32"}
    rope = {"x": "*bf16", "positions": "*i64", "table": "*fp32", "out": "*bf16", "vectors": "i32", "width": "i32"}
    return [
        Variant("RMSNorm + e4m3", file._norm, norm, {"BLOCK": 8192, "NORM": True, "ROUND": True}, 16),
        Variant("e4m3", file._norm, norm, {"BLOCK": 4096, "NORM": False, "ROUND": True}, 8),
        Variant("SwiGLU + e4m3", file._swiglu, glu, {"WEIGHTED": True, "BLOCK": 1024, "ROUND": True}),
        Variant("rope", file._rope, rope, {"INVERSE": True, "ROPE": 64, "BLOCK": 512}, 1),
    ]


def _products() -> list[Variant]:
    file = kernels.load("products")
    grouped = {
        "x": "*bf16", "codes": "*u8", "scales": "*u8", "out": "*bf16", "tile_expert": "*i32", "tile_start": "*i32",
        "tile_end": "*i32", "n_size": "i32", "k_size": "i32",
    }  # fmt: skip
    dense = {
        "x": "*bf16", "codes": "*u8", "scales": "*u8", "out": "*bf16", "m_size": "i32", "n_size": "i32",
        "k_size": "i32", "scale_columns": "i32",
    }  # fmt: skip
    found = []
    for rows, columns, warps in ((16, 128, 4), (64, 128, 4), (128, 128, 8)):
        tile = {"ROWS": rows, "COLUMNS": columns, "DEPTH": 128}
        found.append(Variant(f"grouped MXFP4 {rows}x{columns}", file.grouped_mxfp4, grouped, tile, warps, 3))
    for rows, columns, warps, fp8 in ((64, 64, 4, True), (128, 128, 8, True), (64, 64, 4, False)):
        tile = {"ROWS": rows, "COLUMNS": columns, "DEPTH": 128, "FP8": fp8}
        kinds = dense if fp8 else {**dense, "codes": "*bf16", "scales": "*bf16"}
        name = f"dense {'FP8' if fp8 else 'bf16'} {rows}x{columns}"
        found.append(Variant(name, file.dense, kinds, tile, warps, 3))
    return found


def _index() -> list[Variant]:
    file = kernels.load("index")
    score = {
        "q": "*bf16", "weights": "*bf16", "table": "*u8", "block_table": "*i64", "out": "*bf16", "row_start": "i32",
        "first": "i32", "q_len": "i32", "visible": "i32", "columns": "i32", "block_bytes": "i32",
    }  # fmt: skip
    choose = {"values": "*bf16", "lengths": "*i64", "out": "*i64", "width": "i32", "count": "i32"}
    peaks = {"values": "*bf16", "lengths": "*i64", "out": "*bf16", "width": "i32", "blocks": "i32"}
    heads = {"HEADS": 64, "DIM": 128, "KEYS": 64, "PER_BLOCK": 64, "REAL_HEADS": 64}
    return [
        Variant("index scores", file.scores, score, heads),
        Variant("top-k", file.choose, choose, {"LOWEST_BIT": 16, "BLOCK": 4096}, 8),
        Variant("candidate blocks", file.block_peaks, peaks, {"SIZE": 8, "BLOCK": 128}),
    ]


def _cache() -> list[Variant]:
    types = {"x": "*bf16", "target": "*i64", "table": "*u8", "out": "*bf16"}
    return [Variant("store window keys", kernels.load("cache_rows").store_fp8, types, {"DIM": 512}, 2)]


def main() -> None:
    """Print one line a kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 100], help="compute capabilities times ten")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the table here")
    given = parser.parse_args()
    reports = []
    print(f"{'kernel':36} {'arch':8} {'regs':>4} {'spill st/ld':>12} {'shared':>7} {'matrix':12} {'s':>5}")
    for variant in variants():
        for arch in (a for a in given.arch if given.only in variant.name and a // 10 in variant.majors):
            r = build(variant, arch // 10)
            reports.append(asdict(r))
            spills = f"{r.spill_stores}/{r.spill_loads}"
            print(
                f"{r.name:36} {r.arch:8} {r.registers:4} {spills:>12} {r.shared:7} "
                f"{r.matrix_instruction:12} {r.seconds:5}"
            )
    if given.json:
        given.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
