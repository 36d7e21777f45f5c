"""Integer arithmetic of a step: which position, sequence, cache row and ring row every row of a batch has.

Plain numpy on the host, because a step is planned there; `hooks.ops.step_inputs` moves the results to the device. Where
only the device knows the positions, torch does the same there.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch


def row_layout(q_starts: np.ndarray, q_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of n sequences one after another: (row_starts [n], sequence [Q], positions [Q]), all int64."""
    row_starts = np.cumsum(q_lens) - q_lens
    sequence = np.repeat(np.arange(len(q_lens)), q_lens)
    positions = np.arange(int(q_lens.sum())) + np.repeat(q_starts - row_starts, q_lens)
    return row_starts, sequence, positions


def entry_rows(
    positions: np.ndarray, sequence: np.ndarray, block_table: np.ndarray, ratio: int, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries of `ratio` tokens that the rows complete: (rows, entry index, physical cache row), each int64 [M]."""
    rows = np.flatnonzero(positions % ratio == ratio - 1)
    index = positions[rows] // ratio
    per_block = block_size // ratio
    blocks = block_table[sequence[rows], index // per_block].astype(np.int64)
    return rows, index, blocks * per_block + index % per_block


def every_entry(
    positions: torch.Tensor, blocks: torch.Tensor, ratio: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For every row the entry its token belongs to: (entry index, physical cache row), each int64 [Q].

    positions [Q], blocks [Q, B] block table of each row's sequence. Rows that do not complete their entry get a row of
    the null block, as do positions for which a sequence has no block.
    """
    index = positions // ratio
    per_block = block_size // ratio
    block = blocks.gather(1, (index // per_block).unsqueeze(1).clamp(max=blocks.shape[1] - 1))[:, 0]
    completes = positions % ratio == ratio - 1
    return index, torch.where(completes, block * per_block, 0) + index % per_block


def ring_rows(
    positions: np.ndarray,
    sequence: np.ndarray,
    ends: np.ndarray,
    slots: np.ndarray,
    length: int,
    keep: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose values a ring of `length` slots keeps: (rows [S], physical [S]), int64.

    ends [n]: one past the last position of each sequence in this step; keep [Q] bool further restricts the rows.
    """
    kept = positions >= ends[sequence] - length
    rows = np.flatnonzero(kept if keep is None else kept & keep)
    return rows, slots[sequence[rows]] * length + positions[rows] % length


def runs_of_equal_length(q_lens: np.ndarray) -> list[tuple[int, int]]:
    """(first, count) of maximal runs of consecutive equal values."""
    edges = np.flatnonzero(np.diff(q_lens)) + 1
    bounds = [0, *edges.tolist(), len(q_lens)]
    return [(a, b - a) for a, b in pairwise(bounds) if b > a]


def truncated_rows(q_starts: np.ndarray, q_lens: np.ndarray, data_lens: np.ndarray, keep: int) -> np.ndarray:
    """Rows each sequence loses at the decoder boundary in compact truncation, int64 [n]; one row always remains."""
    return np.clip(data_lens - keep - q_starts, 0, q_lens - 1)
