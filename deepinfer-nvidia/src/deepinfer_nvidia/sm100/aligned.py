"""Grouped products want every expert's rows to begin at a tile. Where the rows go, without asking the host.

The row count of the spread-out form depends on the routing, so room is taken for the worst case: one tile less a row
for every expert that can have rows. Used by `gemm` and `experts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_nvidia.sm100.formats import GROUP, Fp8Tensor, align, empty_scales


@dataclass(frozen=True, slots=True)
class Places:
    """rows [R] int64: place of every row; size: rows in all; ends [E] int32: end of each expert's rows."""

    rows: torch.Tensor
    size: int
    ends: torch.Tensor


def places(offsets: torch.Tensor, count: int, tile: int) -> Places:
    """offsets [E] int64 as `gemm.grouped_linear` takes them, `count` rows."""
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    taken = (counts + tile - 1) // tile * tile
    begins = taken.cumsum(0) - taken
    row = torch.arange(count, device=offsets.device)
    expert = torch.searchsorted(offsets, row, right=True)
    within = row - (offsets - counts)[expert]
    size = align(count, tile) + tile * min(count, len(offsets))
    return Places(begins[expert] + within, size, (begins + counts).to(torch.int32))


def spread(x: Fp8Tensor, to: Places) -> Fp8Tensor:
    """Rows at their places; the gaps hold zeros."""
    codes = x.values.new_zeros(to.size, x.values.shape[1], dtype=torch.uint8)
    codes.index_copy_(0, to.rows, x.values.view(torch.uint8))
    words = empty_scales(to.size, x.words.shape[1], device=codes.device).zero_()
    words.index_copy_(0, to.rows, x.words)
    return Fp8Tensor(codes.view(torch.float8_e4m3fn), words)


def spread_values(x: torch.Tensor, to: Places) -> torch.Tensor:
    """Plain values [R] at their places, zeros elsewhere."""
    return x.new_zeros(to.size).index_copy_(0, to.rows, x)


def product(library: Any, x: Fp8Tensor, weight: tuple[torch.Tensor, torch.Tensor], at: Places) -> torch.Tensor:
    """bfloat16 [size, N]; rows in the gaps are undefined. weight: (packed [E, N, K/2], words [E, N, K/128])."""
    out = torch.empty(at.size, weight[0].shape[1], dtype=torch.bfloat16, device=x.values.device)
    scales = (1, GROUP)
    library.m_grouped_fp8_fp4_gemm_nt_contiguous(
        (x.values, x.words), weight, out, at.ends, recipe_a=scales, recipe_b=scales, use_psum_layout=True
    )
    return out
