"""State slots copied for the prefix cache: whole ones between steps, and states in the middle of a prompt's chunk.

Called by the model runner. A prefill step that passes a position whose state is wanted writes the keys before it twice:
into the ring of the sequence and into that of the snapshot slot, so no prompt is cut for it. The model and the ops see
a few more rows in `StepInputs.rings`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from deepinfer.hooks import CacheSpec, KVCache, OpTable, RingRows, StepInputs, StepViews
from deepinfer.runner.inputs import StepBatch

ToDevice = Callable[[np.ndarray], torch.Tensor]


def copy_slots(ops: OpTable, cache: KVCache, pairs: Sequence[tuple[int, int]], tensor: ToDevice) -> None:
    """Copy state slots (from, to), as if one after the other. [in-place cache]"""
    for source, target in _independent(pairs):
        ops.cache.clone_slots(cache, tensor(source), tensor(target))


def begin_snapshots(ops: OpTable, cache: KVCache, batch: StepBatch, steps: StepViews, tensor: ToDevice) -> None:
    """Prepare the snapshots of a prefill step, before its forward. [in-place cache, steps]

    Windows that begin before the step come from the sequence's slot, what the step computes is written by its stores.
    With truncation the rings of the decoder half are left out: nobody goes on from them.
    """
    longest = max(_ring_lengths(cache.spec))
    reaching = [
        (int(batch.slots[index]), slot)
        for index, end, slot in batch.snapshots
        if batch.q_starts[index] > 0 and end - longest < batch.q_starts[index]
    ]
    copy_slots(ops, cache, reaching, tensor)
    _add_rows(steps.encoder, batch, tensor)


def _ring_lengths(spec: CacheSpec) -> set[int]:
    return {spec.ring, *spec.state.values()}


def _add_rows(step: StepInputs, batch: StepBatch, tensor: ToDevice) -> None:
    """Rows for the rings of snapshot slots. [in-place step]"""
    first_rows = np.cumsum(batch.q_lens) - batch.q_lens
    for length, ring in step.rings.items():
        rows, physical = [], []
        for index, end, slot in batch.snapshots:
            start = int(batch.q_starts[index])
            positions = np.arange(max(start, end - length), end)
            rows.append(positions - start + first_rows[index])
            physical.append(slot * length + positions % length)
        step.rings[length] = RingRows(
            torch.cat((ring.rows, tensor(np.concatenate(rows)))),
            torch.cat((ring.physical, tensor(np.concatenate(physical)))),
        )


def _independent(pairs: Sequence[tuple[int, int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Groups of copies whose targets are distinct and no source, in order."""
    groups: list[list[tuple[int, int]]] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for source, target in pairs:
        if not groups or source in targets or target in sources | targets:
            groups.append([])
            sources, targets = set(), set()
        groups[-1].append((source, target))
        sources.add(source)
        targets.add(target)
    return [(np.array([a for a, _ in group]), np.array([b for _, b in group])) for group in groups]
