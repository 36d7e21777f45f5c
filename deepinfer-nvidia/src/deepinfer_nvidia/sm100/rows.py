"""Index lists of attention kernels, made once a step and shared by all layers. Used by `attention`.

Physical rows of core's caches: a window key is at slot * ring + position % ring, an entry at block * entries per block
+ offset. FlashMLA takes int32 lists padded with -1 to whole tiles; it checks no upper bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer.hooks import KVCache, Selection, StepInputs
from deepinfer_nvidia.sm100.formats import align

TILE = 128
"""A list's length is a multiple of this; what every FlashMLA kernel accepts."""


def cached(step: StepInputs, key: Any, make: Callable[[], Any]) -> Any:
    """`make()` once a step, kept in its scratch."""
    found = step.scratch.get(key)
    if found is None:
        found = step.scratch[key] = make()
    return found


def padded(rows: torch.Tensor) -> torch.Tensor:
    """int32 [Q, TILE * n] of rows [Q, T], the rest -1."""
    width = rows.shape[1]
    out = torch.full((len(rows), align(max(width, 1), TILE)), -1, dtype=torch.int32, device=rows.device)
    out[:, :width] = rows
    return out


def window(step: StepInputs, ring: int, size: int) -> torch.Tensor:
    """Rows of the ring that each row of the step sees; int32 [Q, ...]. Only for steps with `in_ring`."""

    def make() -> torch.Tensor:
        positions = step.positions.unsqueeze(1) + torch.arange(1 - size, 1, device=step.positions.device)
        rows = step.slots[step.sequence].unsqueeze(1) * ring + positions % ring
        return padded(rows.masked_fill(positions < step.window_lo.unsqueeze(1), -1))

    return cached(step, ("sm100 window", ring, size), make)


def chunk_window(step: StepInputs, size: int) -> torch.Tensor:
    """Like `window`, for keys laid out as [size - 1 keys before each sequence | the step's own]; int64 [Q, size]."""

    def make() -> torch.Tensor:
        before = step.num_sequences * (size - 1)
        positions = step.positions.unsqueeze(1) + torch.arange(1 - size, 1, device=step.positions.device)
        start = step.q_starts[step.sequence].unsqueeze(1)
        own = before + step.row_starts[step.sequence].unsqueeze(1) + positions - start
        earlier = step.sequence.unsqueeze(1) * (size - 1) + positions - start + size - 1
        rows = torch.where(positions < start, earlier, own)
        return rows.masked_fill(positions < step.window_lo.unsqueeze(1), -1)

    return cached(step, ("sm100 chunk window", size), make)


def entries(step: StepInputs, cache: KVCache, selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the paged cache each row of the step reads, int32 [Q, ...], and how many [Q] int32 (at least 1)."""

    def make() -> tuple[Selection, torch.Tensor, torch.Tensor]:
        per_block = cache.spec.block_size // selection.ratio
        entry = selection.entries.clamp(min=0)
        blocks = step.block_table[step.sequence.unsqueeze(1), entry // per_block]
        rows = (blocks * per_block + entry % per_block).masked_fill(selection.entries < 0, -1)
        counts = (selection.entries >= 0).sum(1).clamp(min=1).to(torch.int32)
        return selection, padded(rows), counts  # keeps the selection alive: its id is the key

    _, rows, counts = cached(step, ("sm100 entries", id(selection)), make)
    return rows, counts
