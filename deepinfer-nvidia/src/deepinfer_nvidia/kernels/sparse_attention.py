"""Sparse latent attention over cache rows as they are stored: a window, then selected compressed entries, plus a sink.

One program is a row of the step, a block of heads and a fixed slice of its key list. Keys are decoded to bfloat16
(exact for every stored format), multiplied by the matrix units, summed in float32. A key's even and odd channels stay
in two tiles: e4m3 pairs come as 16-bit words, e2m1 pairs as bytes, bfloat16 pairs as 32-bit words, so nothing is
interleaved before the one store at the end. Slices depend on window and list capacity alone and are joined in order:
a row's bits do not depend on the other rows. Serves decode (window in the FP8 ring) and prefill (window as bfloat16
rows). Called by `sm90.attention`.
"""

# No `annotations` import: Triton reads the annotations of its functions.

import torch
import triton
import triton.language as tl

from deepinfer_nvidia.kernels.formats import e2m1_value, e4m3_value, high_half, low_half, product, rounded, ue8m0_value

LOG2E = 1.4426950408889634
KEYS = 32
"""Keys of one tile."""


@triton.jit
def _fp8_rows(table, rows, mask, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Even and odd channels [KEYS, DIM / 2] bfloat16 of rows of DIM e4m3 codes and DIM / 32 scale bytes."""
    start = table + rows * (DIM + DIM // 32)
    pairs = tl.arange(0, DIM // 2)
    words = tl.load(start[:, None].to(tl.pointer_type(tl.uint16)) + pairs[None, :], mask[:, None], other=0)
    groups = tl.arange(0, DIM // 32)
    scale = ue8m0_value(tl.load(start[:, None] + DIM + groups[None, :], mask[:, None], other=127))[:, :, None]
    low = tl.reshape(e4m3_value(words & 255), (KEYS, DIM // 32, 16)) * scale
    high = tl.reshape(e4m3_value(words >> 8), (KEYS, DIM // 32, 16)) * scale
    shape: tl.constexpr = (KEYS, DIM // 2)
    return tl.reshape(low, shape).to(tl.bfloat16), tl.reshape(high, shape).to(tl.bfloat16)


@triton.jit
def _fp4_rows(table, rows, mask, DIM: tl.constexpr, KEYS: tl.constexpr):
    """The same of rows of DIM / 2 bytes of e2m1 pairs and DIM / 16 e4m3 scales."""
    start = table + rows * (DIM // 2 + DIM // 16)
    pairs = tl.arange(0, DIM // 2)
    codes = tl.load(start[:, None] + pairs[None, :], mask[:, None], other=0)
    groups = tl.arange(0, DIM // 16)
    scale = e4m3_value(tl.load(start[:, None] + DIM // 2 + groups[None, :], mask[:, None], other=0))[:, :, None]
    low = tl.reshape(e2m1_value(codes & 15), (KEYS, DIM // 16, 8)) * scale
    high = tl.reshape(e2m1_value(codes >> 4), (KEYS, DIM // 16, 8)) * scale
    shape: tl.constexpr = (KEYS, DIM // 2)
    return tl.reshape(low, shape).to(tl.bfloat16), tl.reshape(high, shape).to(tl.bfloat16)


@triton.jit
def _add_keys(q_low, q_high, low, high, seen, peak, total, out_low, out_high, scale):
    """One tile of keys added to the running softmax. All logits are in units of log 2."""
    logits = tl.zeros((q_low.shape[0], low.shape[0]), tl.float32)
    logits = product(q_low, tl.trans(low), logits)
    logits = product(q_high, tl.trans(high), logits)
    logits = tl.where(seen[None, :], logits * scale, float("-inf"))
    highest = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    weights = rounded(weights, tl.bfloat16)
    out_low = product(weights, low, out_low * shrink[:, None])
    out_high = product(weights, high, out_high * shrink[:, None])
    return highest, total, out_low, out_high


@triton.jit
def attend(
    q, ring_rows, before, own, entry_rows, entries, block_table, positions, sequence, slots, window_lo, row_starts,
    sink, out, lse, heads, width, columns, scale,
    DIM: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, RING: tl.constexpr,
    PER_BLOCK: tl.constexpr, CAPACITY: tl.constexpr, SPLITS: tl.constexpr, IN_RING: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """See `sparse_attention`. Grid: rows, head blocks, splits. DIM/2 pairs; KEYS keys a tile."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    half: tl.constexpr = DIM // 2
    pairs = tl.arange(0, half)
    q_words = tl.load(
        q.to(tl.pointer_type(tl.int32)) + (row * heads + head[:, None]) * half + pairs[None, :],
        head[:, None] < heads, other=0,
    )  # fmt: skip
    q_low, q_high = low_half(q_words), high_half(q_words)
    place = tl.load(positions + row)
    member = tl.load(sequence + row)
    lowest = tl.maximum(tl.maximum(tl.load(window_lo + row), place - (WINDOW - 1)), 0)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    out_low = tl.zeros((HEADS, half), tl.float32)
    out_high = tl.zeros((HEADS, half), tl.float32)
    tiles_window: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    tiles: tl.constexpr = tiles_window + (CAPACITY + KEYS - 1) // KEYS
    per_split: tl.constexpr = (tiles + SPLITS - 1) // SPLITS
    first = split * per_split
    for tile in range(first, tl.minimum(first + per_split, tiles_window)):
        key = place - (WINDOW - 1) + tile * KEYS + tl.arange(0, KEYS)
        seen = (key >= lowest) & (key <= place)
        if IN_RING:
            kept = tl.load(slots + member) * RING + tl.maximum(key, 0) % RING
            low, high = _fp8_rows(ring_rows, kept, seen, DIM, KEYS)
        else:
            local = row - tl.load(row_starts + member) + (key - place)
            earlier = before + (member * (WINDOW - 1) + (WINDOW - 1) + local) * half
            start = tl.where(local >= 0, own + (row + key - place) * half, earlier)
            words = tl.load(start[:, None] + pairs[None, :], seen[:, None], other=0)
            low, high = low_half(words), high_half(words)
        peak, total, out_low, out_high = _add_keys(
            q_low, q_high, low, high, seen, peak, total, out_low, out_high, scale
        )
    last = tl.minimum(first + per_split, tiles_window + (width + KEYS - 1) // KEYS)
    for tile in range(tl.maximum(first, tiles_window), last):
        column = (tile - tiles_window) * KEYS + tl.arange(0, KEYS)
        entry = tl.load(entries + row * width + column, column < width, other=-1)
        seen = entry >= 0
        entry = tl.maximum(entry, 0)
        block = tl.load(block_table + member * columns + entry // PER_BLOCK, seen, other=0)
        kept = block * PER_BLOCK + entry % PER_BLOCK
        if FP4:
            low, high = _fp4_rows(entry_rows, kept, seen, DIM, KEYS)
        else:
            low, high = _fp8_rows(entry_rows, kept, seen, DIM, KEYS)
        peak, total, out_low, out_high = _add_keys(
            q_low, q_high, low, high, seen, peak, total, out_low, out_high, scale
        )
    kept_heads = head < heads
    if SPLITS == 1:
        extra = tl.load(sink + head, kept_heads, other=0.0) * 1.4426950408889634
        highest = tl.maximum(peak, extra)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(peak - base)
        norm = total * shrink + tl.exp2(extra - base)
        factor = tl.where(norm > 0, shrink / norm, 0.0)
    else:
        factor = tl.where(total > 0, 1.0 / total, 0.0)
        tl.store(lse + (row * SPLITS + split) * heads + head, peak + tl.log2(total), kept_heads)
    both = tl.reshape(tl.join(out_low * factor[:, None], out_high * factor[:, None]), (HEADS, DIM))
    target = out + ((row * SPLITS + split) * heads + head[:, None]) * DIM + tl.arange(0, DIM)[None, :]
    tl.store(target, rounded(both, out.dtype.element_ty), kept_heads[:, None])


@triton.jit
def join(parts, lse, sink, out, heads, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Slices of one row and head joined in order, with the sink. Grid: rows, heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    extra = tl.load(sink + head) * 1.4426950408889634
    highest = extra
    for split in tl.static_range(SPLITS):
        highest = tl.maximum(highest, tl.load(lse + (row * SPLITS + split) * heads + head))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    norm = tl.exp2(extra - base)
    total = tl.zeros((DIM,), tl.float32)
    channel = tl.arange(0, DIM)
    for split in tl.static_range(SPLITS):
        place = (row * SPLITS + split) * heads + head
        weight = tl.exp2(tl.load(lse + place) - base)
        norm += weight
        total += weight * tl.load(parts + place * DIM + channel)
    result = tl.where(norm > 0, total / norm, 0.0)
    tl.store(out + (row * heads + head) * DIM + channel, rounded(result, out.dtype.element_ty))


def sparse_attention(
    q: torch.Tensor,
    window: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    entry_rows: torch.Tensor | None,
    entries: torch.Tensor | None,
    sink: torch.Tensor,
    positions: torch.Tensor,
    sequence: torch.Tensor,
    slots: torch.Tensor,
    window_lo: torch.Tensor,
    row_starts: torch.Tensor,
    block_table: torch.Tensor,
    *,
    window_size: int,
    ring: int,
    per_block: int,
    capacity: int,
    splits: int = 1,
    num_warps: int = 8,
    num_stages: int = 2,
    keys: int = KEYS,
) -> torch.Tensor:
    """Attention of Q rows; every row sees up to `window_size` recent keys and the entries listed for it.

    q           [Q, h, d] bfloat16, d a power of two >= 64
    window      ring rows uint8 [slots * ring, d + d/32], or (before bf16 [n, W - 1, d], own bf16 [Q, d])
    entry_rows  uint8 [rows, d/2 + d/16] or [rows, d + d/32], or None
    entries     [Q, T] int64 entry numbers, -1 = none;  T <= capacity, on which the slices depend
    sink        [h] float32;  the other tensors as in `StepInputs`, int64
    returns     [Q, h, d] bfloat16
    """
    rows, heads, dim = q.shape
    q = q.contiguous()
    block = min(64, max(16, triton.next_power_of_2(heads)))
    in_ring = isinstance(window, torch.Tensor)
    before, own = (None, None) if in_ring else (part.contiguous().view(torch.int32) for part in window)
    width = 0 if entries is None else entries.shape[1]
    capacity = 0 if entries is None else max(capacity, width)
    shape = (rows, heads, dim) if splits == 1 else (rows, splits, heads, dim)
    parts = q.new_empty(shape, dtype=torch.bfloat16 if splits == 1 else torch.float32)
    lse = q.new_empty(rows, splits, heads, dtype=torch.float32)
    if rows == 0:
        return q.new_empty(q.shape)
    ring_rows = window if in_ring else positions
    attend[(rows, triton.cdiv(heads, block), splits)](
        q, ring_rows, positions if before is None else before, positions if own is None else own,
        ring_rows if entry_rows is None else entry_rows, positions if entries is None else entries.contiguous(),
        block_table.contiguous(), positions, sequence, slots, window_lo, row_starts, sink, parts, lse,
        heads, width, block_table.shape[1], dim**-0.5 * LOG2E,
        DIM=dim, HEADS=block, KEYS=keys, WINDOW=window_size, RING=ring, PER_BLOCK=per_block, CAPACITY=capacity,
        SPLITS=splits, IN_RING=in_ring, FP4=entry_rows is not None and entry_rows.shape[1] == dim // 2 + dim // 16,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits == 1:
        return parts
    out = q.new_empty(q.shape)
    join[(rows, heads)](parts, lse, sink, out, heads, DIM=dim, SPLITS=splits, num_warps=4)
    return out
