"""`StepMasks`: the masks of one step, made between its forward and its sampling.

A step may be launched before the one before it is committed, but its masks depend on the tokens of that one. So the
engine hands the runner this promise, opens it after the commit, and the runner, with the forward on its way, asks for
the result: the waiting and the work lie behind the forward. Implements `runner.inputs.MaskSource`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from deepinfer.structured.constraint import ALL, Constraint


@dataclass(frozen=True, slots=True)
class ConstrainedRows:
    """The rows of a step that belong to one request: `count` from `first` on, of them all but the last verify a
    draft."""

    constraint: Constraint
    first: int
    count: int


class StepMasks:
    """Masks of `num_rows` rows, `num_words` words each, for the rows that have a constraint."""

    def __init__(self, entries: list[ConstrainedRows], num_rows: int, num_words: int) -> None:
        self._entries, self._shape = entries, (num_rows, num_words)
        self._known = threading.Event()
        self._cancelled = False

    def open(self) -> None:
        """The step before is committed: every constraint knows its tokens and drafts."""
        self._known.set()

    def cancel(self) -> None:
        """See `MaskSource`."""
        self._cancelled = True
        self._known.set()

    def result(self, rows: np.ndarray | None = None) -> np.ndarray | None:
        """See `MaskSource`. A constraint that fails fails alone."""
        self._known.wait()
        if self._cancelled:
            return None
        kept = np.ones(self._shape[0], dtype=np.bool_)
        if rows is not None:
            kept[:] = False
            kept[rows] = True
        masks = np.full(self._shape, ALL, dtype=np.int32)
        for entry in self._entries:
            count = int(kept[entry.first : entry.first + entry.count].sum())  # a step is narrowed from the end
            try:
                entry.constraint.fill(masks[entry.first : entry.first + count])
            except Exception as error:
                masks[entry.first : entry.first + count] = ALL
                entry.constraint.fail(error)
        return masks if rows is None else masks[rows]
