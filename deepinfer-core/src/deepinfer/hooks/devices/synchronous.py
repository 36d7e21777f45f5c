"""Streams, events and graphs of a device that finishes every op before the call returns.

Same methods as `torch.Stream` and `torch.Event`, so the engine's code for overlapped devices runs unchanged on the
CPU and is tested there. Used by `devices.host`; `RerunGraph` by every runtime without device graphs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepinfer.errors import OpError


class SynchronousEvent:
    """A point on a stream. All work before it is finished as soon as it is recorded.

    Follows `torch.Event`: an event that was never recorded counts as finished.
    """

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._recorded_ns: int | None = None

    def record(self, stream: SynchronousStream | None = None) -> None:
        """Mark this moment; recording again moves the mark."""
        self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: SynchronousStream | None = None) -> None:
        """Make a stream wait for the event: nothing to do."""

    def query(self) -> bool:
        """Whether all work before the event is finished."""
        return True

    def synchronize(self) -> None:
        """Block the host until the event has happened: nothing to do."""

    def elapsed_time(self, end: SynchronousEvent) -> float:
        """Milliseconds from this event to `end`, host clock. Raises OpError unless both are timed and recorded."""
        return (end._moment("end") - self._moment("start")) / 1e6

    def _moment(self, role: str) -> int:
        if not self._timed:
            raise OpError(f"elapsed_time: the {role} event keeps no time; create it with new_event(True)")
        if self._recorded_ns is None:
            raise OpError(f"elapsed_time: the {role} event was never recorded")
        return self._recorded_ns


class SynchronousStream:
    """A queue of device work that is always empty."""

    def wait_event(self, event: SynchronousEvent) -> None:
        """Later work waits for `event`: nothing to do."""

    def wait_stream(self, stream: SynchronousStream) -> None:
        """Later work waits for all work of `stream` so far: nothing to do."""

    def record_event(self, event: SynchronousEvent | None = None) -> SynchronousEvent:
        """Record `event`, or a new one without time, here and return it."""
        event = SynchronousEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work is finished."""
        return True

    def synchronize(self) -> None:
        """Block the host until all work is finished: nothing to do."""


class CurrentStream:
    """Which stream each thread is on: the default one, or the innermost `use`."""

    def __init__(self) -> None:
        self._default = SynchronousStream()
        self._local = threading.local()

    def get(self) -> SynchronousStream:
        """The calling thread's current stream."""
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def use(self, stream: SynchronousStream) -> Iterator[SynchronousStream]:
        """Make `stream` the calling thread's current one inside the block."""
        before = self.get()
        self._local.stream = stream
        try:
            yield stream
        finally:
            self._local.stream = before


class RerunGraph:
    """A captured function for devices without graphs: `replay` calls it again.

    Keeps the promises of a device graph that a caller may rely on: the function reads its inputs from tensors it
    closes over, `replay` returns the function's result, and that result is valid until the next replay.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function

    def replay(self) -> Any:
        """Run the captured work. Raises OpError after `destroy`."""
        if self._function is None:
            raise OpError("replay: this graph was destroyed; capture a new one")
        return self._function()

    def destroy(self) -> None:
        """Let go of everything captured. May be called twice."""
        self._function = None
