"""Step inputs: from what the scheduler decided to the integer tensors every other op reads.

Called once a step by the runner. The arguments are host arrays; the results live on the context's device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.hooks.api import OpGroup, op
from deepinfer.hooks.types import CacheSpec, EntryRows, RingRows, SequenceSpan, StepInputs, StepViews
from deepinfer.reference import step_inputs as reference


@dataclass(frozen=True, slots=True)
class Truncation:
    """Prefill truncation of the decoder half (YOCO). mode is off, mask or compact; keep counts prompt tokens."""

    mode: str = "off"
    keep: int = 0


class StepInputOps(OpGroup):
    """Integer metadata of a step; results must equal the core bodies exactly."""

    group = "step_inputs"

    @op(version=1, level="recommended", status="beta", grain="kernel")
    def build(
        self,
        q_starts: np.ndarray,
        q_lens: np.ndarray,
        slots: np.ndarray,
        block_table: np.ndarray,
        data_lens: np.ndarray,
        spec: CacheSpec,
        truncation: Truncation,
    ) -> StepViews:
        """Both views of a step.

        q_starts, q_lens, slots, data_lens  int64 [n] host arrays: first new position, new rows, state slot and full
                     prompt length of each sequence
        block_table  int [n, B] host array, covering every position of the step
        truncation   decides what the decoder half sees: with rect_lo = data_len - keep, `mask` narrows its windows to
                     positions >= rect_lo, `compact` also drops the rows before it (one row of a sequence always stays);
                     rows before rect_lo write no decoder ring
        returns      StepViews with `plan` still unset
        """
        full = self._view(q_starts, q_lens, slots, block_table, spec, None)
        if truncation.mode == "off" or not (data_lens > truncation.keep).any():
            return StepViews(full, full, None)
        lowest = data_lens - truncation.keep
        if truncation.mode == "mask":
            return StepViews(full, self._view(q_starts, q_lens, slots, block_table, spec, lowest), None)
        lost = reference.truncated_rows(q_starts, q_lens, data_lens, truncation.keep)
        narrow = self._view(q_starts + lost, q_lens - lost, slots, block_table, spec, lowest)
        if not lost.any():
            return StepViews(full, narrow, None)
        row_starts, sequence, _ = reference.row_layout(q_starts, q_lens)
        kept = np.flatnonzero(np.arange(len(sequence)) - row_starts[sequence] >= lost[sequence])
        return StepViews(full, narrow, self._tensor(kept))

    def _view(
        self,
        q_starts: np.ndarray,
        q_lens: np.ndarray,
        slots: np.ndarray,
        block_table: np.ndarray,
        spec: CacheSpec,
        lowest: np.ndarray | None,
    ) -> StepInputs:
        """One view; `lowest` [n] is the first position that windows see and rings keep (None = all)."""
        row_starts, sequence, positions = reference.row_layout(q_starts, q_lens)
        ends = q_starts + q_lens
        window_lo = np.maximum(positions - (self.traits.sliding_window - 1), 0)
        keep = None
        if lowest is not None:
            window_lo = np.minimum(np.maximum(window_lo, lowest[sequence]), positions + 1)
            keep = positions >= lowest[sequence]
        tensor = self._tensor
        entries = {}
        for ratio in sorted({*spec.compressed.values(), *spec.index.values()}):
            rows = reference.entry_rows(positions, sequence, block_table, ratio, spec.block_size)
            entries[ratio] = EntryRows(*map(tensor, rows))
        rings = {spec.ring: (positions, sequence, ends, slots, spec.ring, keep)}
        rings |= {length: (positions, sequence, ends, slots, length, None) for length in set(spec.state.values())}
        return StepInputs(
            positions=tensor(positions),
            sequence=tensor(sequence),
            q_starts=tensor(q_starts),
            row_starts=tensor(row_starts),
            slots=tensor(slots),
            block_table=tensor(block_table),
            window_lo=tensor(window_lo),
            entries=entries,
            rings={length: RingRows(*map(tensor, reference.ring_rows(*args))) for length, args in rings.items()},
            spans=self._spans(q_lens, ends),
            in_ring=int(q_lens.max()) <= spec.ring - self.traits.sliding_window + 1,
        )

    def _spans(self, q_lens: np.ndarray, ends: np.ndarray) -> tuple[SequenceSpan, ...]:
        spans, row = [], 0
        for first, count in reference.runs_of_equal_length(q_lens):
            length = int(q_lens[first])
            spans.append(SequenceSpan(first, count, row, length, int(ends[first : first + count].max())))
            row += count * length
        return tuple(spans)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.array(values, dtype=np.int64))  # a copy: the caller goes on with its arrays
        return tensor.to(self.context.device, non_blocking=True)
