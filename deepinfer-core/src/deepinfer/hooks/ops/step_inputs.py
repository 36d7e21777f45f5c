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

    @op(version=1, level="recommended", status="experimental", grain="kernel")
    def build_ahead(
        self,
        q_starts: torch.Tensor,
        latest: np.ndarray,
        q_lens: np.ndarray,
        slots: torch.Tensor,
        block_table: np.ndarray,
        spec: CacheSpec,
    ) -> StepInputs:
        """A step whose positions only the device knows: drafts of the step before may or may not have been accepted.

        q_starts     [n] int64 on the device: first new position of each sequence
        latest       int64 [n] host array, no smaller than `q_starts`; bounds `max_context` of the spans
        q_lens       int64 [n] host array: new rows, at most the length of every ring of `spec`
        slots        [n] int64 on the device
        block_table  int [n, B] host array, covering every position up to `latest + q_lens`; 0 where a sequence owns no
                     block
        raises       ValueError for more rows than a ring has, or a block table too narrow
        returns      what `build` gives for the same positions, with `plan` unset and every size known to the host: each
                     row has an entry of each ratio, and those of rows that complete none go to the null block
        """
        shortest = min((spec.ring, *spec.state.values()))
        if int(q_lens.max()) > shortest:
            raise ValueError(f"a sequence brings {int(q_lens.max())} rows, expected at most the {shortest} of a ring")
        width, paged = block_table.shape[1] * spec.block_size, bool(spec.compressed or spec.index)
        if paged and int((latest + q_lens).max()) > width:
            raise ValueError(f"the block table covers {width} positions, expected {int((latest + q_lens).max())}")
        row_starts, sequence, offset = (self._tensor(x) for x in reference.row_layout(np.zeros_like(q_lens), q_lens))
        positions = q_starts[sequence] + offset
        table, rows, owner = self._tensor(block_table), torch.arange(len(offset), device=offset.device), slots[sequence]
        return StepInputs(
            positions=positions,
            sequence=sequence,
            q_starts=q_starts.clone(),  # the caller goes on with its tensors
            row_starts=row_starts,
            slots=slots.clone(),
            block_table=table,
            window_lo=(positions - (self.traits.sliding_window - 1)).clamp(min=0),
            entries={
                ratio: EntryRows(rows, *reference.every_entry(positions, table[sequence], ratio, spec.block_size))
                for ratio in sorted({*spec.compressed.values(), *spec.index.values()})
            },
            rings={
                length: RingRows(rows, owner * length + positions % length)
                for length in {spec.ring, *spec.state.values()}
            },
            spans=self._spans(q_lens, latest + q_lens),
            in_ring=int(q_lens.max()) <= spec.ring - self.traits.sliding_window + 1,
        )

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
