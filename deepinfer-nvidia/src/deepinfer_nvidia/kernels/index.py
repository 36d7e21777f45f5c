"""The lightning indexer: scores of MXFP4 keys in paged blocks, and the exact stable choice of the best entries.

Scores: one program is a row of a span and a tile of entries, read as the bytes are stored (a block holds the 64 data
bytes of all its keys, then their scales). Choice: the k-th largest score is found bit by bit on 16- or 32-bit keys that
sort like the scores, then a prefix sum writes the survivors in ascending order, of equal ones the lowest entries: a
stable selection without sorting. One program a row. Called by `sm90.attention`.
"""

# No `annotations` import: Triton reads the annotations of its functions.

import torch
import triton
import triton.language as tl

from deepinfer_nvidia.kernels.formats import e2m1_value, high_half, low_half, product, rounded, ue8m0_value


@triton.jit
def scores(
    q, weights, table, block_table, out, row_start, first, q_len, visible, columns, block_bytes,
    HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PER_BLOCK: tl.constexpr, REAL_HEADS: tl.constexpr,
):  # fmt: skip
    """Grid: rows of the span, tiles of KEYS entries."""
    row = tl.program_id(0).to(tl.int64)
    member = first + row // q_len
    entry = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    inside = entry < visible
    block = tl.load(block_table + member * columns + entry // PER_BLOCK, inside, other=0)
    offset = entry % PER_BLOCK
    half: tl.constexpr = DIM // 2
    pair, group = tl.arange(0, half), tl.arange(0, DIM // 32)
    start = table + block * block_bytes
    packed = tl.load((start + offset * half)[:, None] + pair[None, :], inside[:, None], other=0)
    scale_at = start + PER_BLOCK * half + offset * (DIM // 32)
    scale = ue8m0_value(tl.load(scale_at[:, None] + group[None, :], inside[:, None], other=127))[:, :, None]
    low = tl.reshape(tl.reshape(e2m1_value(packed & 15), (KEYS, DIM // 32, 16)) * scale, (KEYS, half))
    high = tl.reshape(tl.reshape(e2m1_value(packed >> 4), (KEYS, DIM // 32, 16)) * scale, (KEYS, half))
    head = tl.arange(0, HEADS)
    real = head < REAL_HEADS
    source = row_start + row
    words = tl.load(
        q.to(tl.pointer_type(tl.int32)) + (source * REAL_HEADS + head[:, None]) * half + pair[None, :],
        real[:, None], other=0,
    )  # fmt: skip
    found = product(low_half(words), tl.trans(low.to(tl.bfloat16)), tl.zeros((HEADS, KEYS), tl.float32))
    found = product(high_half(words), tl.trans(high.to(tl.bfloat16)), found)
    weight = tl.load(weights + source * REAL_HEADS + head, real, other=0.0).to(tl.float32)
    score = tl.sum(tl.maximum(found, 0.0) * weight[:, None], 0)
    tl.store(out + row * visible + entry, rounded(score, out.dtype.element_ty), inside)


@triton.jit
def _order(values):
    """int64 keys >= 0 that sort like the float32 values; -0 equals 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    signed = tl.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    signed = tl.where(values == 0.0, 0, signed)
    return signed.to(tl.int64) + 2147483648


@triton.jit
def choose(values, lengths, out, width, count, LOWEST_BIT: tl.constexpr, BLOCK: tl.constexpr):
    """The `count` best of a row's first `length` columns, ascending, -1 behind. Grid: rows.

    LOWEST_BIT  16 where values are bfloat16 (their keys differ in the upper 16 bits alone), else 0
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths + row), width).to(tl.int32)
    values += row * width
    out += row * count
    edge = tl.zeros((), tl.int64)
    for step in tl.static_range(32 - LOWEST_BIT):
        trial = edge + (1 << (31 - step))
        above = tl.zeros((), tl.int32)
        for start in range(0, length, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(values + column, column < length, other=float("-inf")).to(tl.float32)
            above += tl.sum(((_order(value) >= trial) & (value > float("-inf"))).to(tl.int32), 0)
        edge = tl.where(above >= count, trial, edge)
    # edge: largest key that at least `count` values reach, 0 where fewer are visible
    better = tl.zeros((), tl.int32)
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(values + column, column < length, other=float("-inf")).to(tl.float32)
        better += tl.sum(((_order(value) >> LOWEST_BIT > edge >> LOWEST_BIT) & (value > float("-inf"))).to(tl.int32), 0)
    wanted = count - better
    written = tl.zeros((), tl.int32)
    ties = tl.zeros((), tl.int32)
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(values + column, column < length, other=float("-inf")).to(tl.float32)
        key = _order(value) >> LOWEST_BIT
        seen = value > float("-inf")
        equal = ((key == edge >> LOWEST_BIT) & seen).to(tl.int32)
        taken = ((key > edge >> LOWEST_BIT) & seen) | ((equal > 0) & (ties + tl.cumsum(equal, 0) <= wanted))
        place = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(out + place, column.to(tl.int64), taken)
        written += tl.sum(taken.to(tl.int32), 0)
        ties += tl.sum(equal, 0)
    for start in range(written, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(out + column, tl.full((BLOCK,), -1, tl.int64), column < count)


@triton.jit
def block_peaks(values, lengths, out, width, blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Largest visible value of each block of SIZE columns; the last visible block gets +inf. Grid: rows, tiles."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    seen = (column < length) & (column < width)
    value = tl.load(values + row * width + column, seen, other=float("-inf")).to(tl.float32)
    peak = tl.minimum(tl.max(value, 1), 3.3895313892515355e38)
    last = tl.maximum((length + SIZE - 1) // SIZE - 1, 0)
    peak = tl.where(block == last, float("inf"), peak)
    tl.store(out + row * blocks + block, peak.to(out.dtype.element_ty), block < blocks)


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    block_table: torch.Tensor,
    *,
    row_start: int,
    first: int,
    count: int,
    q_len: int,
    visible: int,
    per_block: int,
    keys: int = 64,
    num_warps: int = 4,
) -> torch.Tensor:
    """Scores [count * q_len, visible] bfloat16 of a span's rows.

    q [Q, h, d] bfloat16 rounded to MXFP4, weights [Q, h] bfloat16, table uint8 [blocks, per_block * (d/2 + d/32)]
    """
    heads, dim = q.shape[1:]
    rows = count * q_len
    out = torch.empty(rows, visible, dtype=torch.bfloat16, device=q.device)
    if rows and visible:
        scores[(rows, triton.cdiv(visible, keys))](
            q.contiguous(), weights.contiguous(), table, block_table.contiguous(), out, row_start, first, q_len,
            visible, block_table.shape[1], table.shape[1], HEADS=max(16, triton.next_power_of_2(heads)), DIM=dim,
            KEYS=keys, PER_BLOCK=per_block, REAL_HEADS=heads, num_warps=num_warps,
        )  # fmt: skip
    return out


def top_entries(values: torch.Tensor, lengths: torch.Tensor, count: int, num_warps: int = 8) -> torch.Tensor:
    """The `count` best of each row's first `lengths` columns: int64 [R, min(count, K)] ascending, -1 padding."""
    rows, width = values.shape
    _require_lengths(values, lengths)
    count = min(count, width)
    out = torch.empty(rows, count, dtype=torch.int64, device=values.device)
    if rows and count:
        lowest = 16 if values.dtype == torch.bfloat16 else 0
        block = min(4096, max(32, triton.next_power_of_2(width)))
        choose[(rows,)](
            values.contiguous(), lengths, out, width, count, LOWEST_BIT=lowest, BLOCK=block, num_warps=num_warps
        )
    return out


def candidate_blocks(values: torch.Tensor, lengths: torch.Tensor, size: int, count: int) -> torch.Tensor | None:
    """The `count` blocks of `size` columns with the largest value, the last visible one among them: int64 [R, count]
    ascending, -1 padding. None where no row has more blocks. size: a power of two."""
    rows, width = values.shape
    _require_lengths(values, lengths)
    blocks = triton.cdiv(width, size)
    if blocks <= count:
        return None
    peaks = torch.empty(rows, blocks, dtype=values.dtype, device=values.device)
    tile = max(1, 1024 // size)
    if rows:
        block_peaks[(rows, triton.cdiv(blocks, tile))](
            values.contiguous(), lengths, peaks, width, blocks, SIZE=size, BLOCK=tile
        )
    return top_entries(peaks, (lengths + size - 1) // size, count)


def _require_lengths(values: torch.Tensor, lengths: torch.Tensor) -> None:
    if lengths.shape != values.shape[:1]:
        raise ValueError(f"lengths are {list(lengths.shape)}, expected [{values.shape[0]}]")
