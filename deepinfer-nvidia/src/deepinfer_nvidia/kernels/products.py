"""Products of bfloat16 rows with weights as the checkpoint stores them: MXFP4 experts and FP8 32x32 dense layers.

A weight tile is decoded to bfloat16 in registers (exact), so the products are the reference's and only the order of the
float32 sums differs. Tile shape and order over K are fixed by the weight alone: no split of K, no atomics, so a row's
bits do not depend on the other rows. Channels stay as stored: even and odd e2m1 codes are two tiles, against x's even
and odd channels. Called by `sm90.gemm`.
"""

# No `annotations` import: Triton reads the annotations of its functions.

import torch
import triton
import triton.language as tl

from deepinfer_nvidia.kernels.formats import e2m1_value, e4m3_value, high_half, low_half, product, rounded, ue8m0_value


@triton.jit
def grouped_mxfp4(
    x, codes, scales, out, tile_expert, tile_start, tile_end, n_size, k_size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's rows. Grid: column tiles, row tiles; a row tile past the last has no expert (-1)."""
    expert = tl.load(tile_expert + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile_start + tl.program_id(1)) + tl.arange(0, ROWS)
    inside = row < tl.load(tile_end + tl.program_id(1))
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = column < n_size
    half = k_size // 2
    place = expert * n_size + column.to(tl.int64)
    pair = tl.arange(0, DEPTH // 2)
    group = tl.arange(0, DEPTH // 32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    x_words = x.to(tl.pointer_type(tl.int32)) + row.to(tl.int64)[:, None] * half + pair[None, :]
    codes += place[:, None] * half + pair[None, :]
    scales += place[:, None] * (k_size // 32) + group[None, :]
    for step in range(0, tl.cdiv(k_size, DEPTH)):
        left = half - step * (DEPTH // 2)
        words = tl.load(x_words + step * (DEPTH // 2), inside[:, None] & (pair[None, :] < left), other=0)
        packed = tl.load(codes + step * (DEPTH // 2), wanted[:, None] & (pair[None, :] < left), other=0)
        seen = wanted[:, None] & (group[None, :] * 16 < left)
        scale = ue8m0_value(tl.load(scales + step * (DEPTH // 32), seen, other=127))[:, :, None]
        shape: tl.constexpr = (COLUMNS, DEPTH // 2)
        low = tl.reshape(tl.reshape(e2m1_value(packed & 15), (COLUMNS, DEPTH // 32, 16)) * scale, shape)
        high = tl.reshape(tl.reshape(e2m1_value(packed >> 4), (COLUMNS, DEPTH // 32, 16)) * scale, shape)
        total = product(low_half(words), tl.trans(low.to(tl.bfloat16)), total)
        total = product(high_half(words), tl.trans(high.to(tl.bfloat16)), total)
    target = out + row.to(tl.int64)[:, None] * n_size + column[None, :]
    tl.store(target, rounded(total, out.dtype.element_ty), inside[:, None] & wanted[None, :])


@triton.jit
def dense(
    x, codes, scales, out, m_size, n_size, k_size, scale_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One tile of x times a weight: e4m3 codes with a ue8m0 scale per 32x32 block, or bfloat16 (FP8 false; scales are
    not read). Grid: column tiles, row tiles."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside, wanted = row < m_size, column < n_size
    depth = tl.arange(0, DEPTH)
    group = tl.arange(0, DEPTH // 32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    x += row.to(tl.int64)[:, None] * k_size + depth[None, :]
    codes += column.to(tl.int64)[:, None] * k_size + depth[None, :]
    scales += (column // 32)[:, None] * scale_columns + group[None, :]
    for step in range(0, tl.cdiv(k_size, DEPTH)):
        left = k_size - step * DEPTH
        values = tl.load(x + step * DEPTH, inside[:, None] & (depth[None, :] < left), other=0.0)
        packed = tl.load(codes + step * DEPTH, wanted[:, None] & (depth[None, :] < left), other=0)
        if FP8:
            seen = wanted[:, None] & (group[None, :] * 32 < left)
            scale = ue8m0_value(tl.load(scales + step * (DEPTH // 32), seen, other=127))[:, :, None]
            weight = tl.reshape(e4m3_value(packed), (COLUMNS, DEPTH // 32, 32)) * scale
            total = product(values, tl.trans(tl.reshape(weight, (COLUMNS, DEPTH)).to(tl.bfloat16)), total)
        else:
            total = product(values, tl.trans(packed), total)
    target = out + row.to(tl.int64)[:, None] * n_size + column[None, :]
    tl.store(target, rounded(total, out.dtype.element_ty), inside[:, None] & wanted[None, :])


def row_tiles(offsets: torch.Tensor, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tiles of at most `size` rows of one expert, in the experts' order; no host synchronisation.

    offsets [E] int64; returns expert, first row and end of each tile, int32 [tiles]; unused tiles have expert -1
    """
    experts = offsets.shape[0]
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    ends = ((counts + size - 1) // size).cumsum(0)
    most = min(experts, rows) + rows // size
    tile = torch.arange(most, device=offsets.device)
    expert = torch.searchsorted(ends, tile, right=True)
    used = expert < experts
    expert = expert.clamp(max=experts - 1)
    before = torch.where(expert > 0, ends[(expert - 1).clamp(min=0)], 0)
    start = (offsets - counts)[expert] + (tile - before) * size
    end = torch.minimum(start + size, offsets[expert])
    return torch.where(used, expert, -1).to(torch.int32), start.to(torch.int32), end.to(torch.int32)


def grouped_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    *,
    rows: int = 64,
    columns: int = 128,
    depth: int = 128,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """x [R, K] bfloat16 sorted by expert, codes uint8 [E, N, K/2], scales uint8 [E, N, K/32] -> [R, N] bfloat16."""
    experts, n_size, half = codes.shape
    if x.shape[1] != 2 * half:
        raise ValueError(f"x has {x.shape[1]} channels, the weight {2 * half}")
    if offsets.shape[0] != experts:
        raise ValueError(f"offsets are of {offsets.shape[0]} experts, the weight has {experts}")
    out = torch.empty(x.shape[0], n_size, dtype=torch.bfloat16, device=x.device)
    if x.shape[0]:
        tiles = row_tiles(offsets, x.shape[0], rows)
        grouped_mxfp4[(triton.cdiv(n_size, columns), tiles[0].shape[0])](
            x.contiguous(), codes, scales, out, *tiles, n_size, 2 * half, ROWS=rows, COLUMNS=columns, DEPTH=depth,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out


def linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    rows: int = 64,
    columns: int = 64,
    depth: int = 128,
    num_warps: int = 4,
    num_stages: int = 4,
) -> torch.Tensor:
    """x [..., K] bfloat16, codes e4m3 [N, K] with scales uint8 [ceil(N/32), ceil(K/32)], or bfloat16 [N, K] and None.

    returns [..., N] `out_dtype`
    """
    n_size, k_size = codes.shape
    if x.shape[-1] != k_size:
        raise ValueError(f"x has {x.shape[-1]} channels, the weight {k_size}")
    flat = x.reshape(-1, k_size)
    out = torch.empty(flat.shape[0], n_size, dtype=out_dtype, device=x.device)
    if flat.shape[0]:
        dense[(triton.cdiv(n_size, columns), triton.cdiv(flat.shape[0], rows))](
            flat.contiguous(), codes if scales is None else codes.view(torch.uint8),
            codes if scales is None else scales, out, flat.shape[0], n_size, k_size, triton.cdiv(k_size, 32),
            ROWS=rows, COLUMNS=columns, DEPTH=depth, FP8=scales is not None, num_warps=num_warps,
            num_stages=num_stages,
        )  # fmt: skip
    return out.view(*x.shape[:-1], n_size)
