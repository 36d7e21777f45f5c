"""`WaitingQueue`: requests that hold no memory, in the order in which they will get some.

The scheduler adds, looks at the head and takes it. Which of several priorities goes first is the order's decision
(`policy.PriorityOrder`); within a priority it is first come, first served, preempted requests before new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from deepinfer.engine.policy import RequestOrder, WaitingView
from deepinfer.engine.sequence import Sequence


class WaitingQueue:
    """One first-in-first-out line a priority; finding the head looks at the first of each line only."""

    def __init__(self, order: RequestOrder, clock: Callable[[], float]) -> None:
        self._order, self._clock = order, clock
        self._lines: dict[int, OrderedDict[str, Sequence]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[str]:
        """Request ids, by priority and then in order."""
        for priority in sorted(self._lines):
            yield from self._lines[priority]

    def add(self, seq: Sequence) -> None:
        """Behind the others of its priority."""
        self._lines.setdefault(seq.request.priority, OrderedDict())[seq.request_id] = seq

    def put_back(self, seq: Sequence) -> None:
        """Before the others of its priority."""
        self.add(seq)
        self._lines[seq.request.priority].move_to_end(seq.request_id, last=False)

    def discard(self, seq: Sequence) -> None:
        """Take it out, if it is here."""
        line = self._lines.get(seq.request.priority)
        if line is not None and line.pop(seq.request_id, None) is not None and not line:
            del self._lines[seq.request.priority]

    def head(self) -> Sequence | None:
        """Whose turn it is."""
        if len(self._lines) <= 1:
            return next((next(iter(line.values())) for line in self._lines.values()), None)
        now = self._clock()
        heads = [next(iter(line.values())) for line in self._lines.values()]
        return min(heads, key=lambda seq: self._order.rank(_view(seq, now)))


def _view(seq: Sequence, now: float) -> WaitingView:
    return WaitingView(seq.request.priority, now - seq.request.arrival_time, seq.request.arrival_time)
