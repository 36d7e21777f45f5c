"""Scopes that a runtime opens around work: forbidding synchronisation, deterministic algorithms, named timers.

Used by `hooks.ops.runtime`. None of them knows a device: what a device does is passed in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SyncGuard:
    """Nestable "no host synchronisation here", shared by all threads of a process.

    switch   called with True when the first scope opens and with False when the last one closes, in whatever threads
             they are; the mode a device keeps is one per process.
    """

    def __init__(self, switch: Callable[[bool], None]) -> None:
        self._switch = switch
        self._depth = 0
        self._lock = threading.Lock()

    @property
    def depth(self) -> int:
        """Scopes open now, over all threads."""
        return self._depth

    @contextmanager
    def forbid(self) -> Iterator[None]:
        """Open one scope. If the device refuses the switch, its error is raised and the scope is not open."""
        with self._lock:
            if self._depth == 0:
                self._switch(True)
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    self._switch(False)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Torch's deterministic mode inside the block, the previous mode afterwards.

    Torch keeps the mode per process. Its companion, filling new memory with NaN, is a debugging aid that costs a pass
    over every buffer and changes no result of correct code; it is off inside the block.
    """
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    companion: Any = torch.utils.deterministic
    fill = companion.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    companion.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        companion.fill_uninitialized_memory = fill


class DeviceTimers:
    """Named timers on the current stream. Measuring never waits for the device; reading may.

    new_event   makes a timed event (`torch.Event` or its synchronous stand-in)
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._pending: list[tuple[str, Any, Any]] = []
        self._lock = threading.Lock()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Time the device work submitted inside the block, also if it raises."""
        start, end = self._new_event(), self._new_event()
        start.record()
        try:
            yield
        finally:
            end.record()
            with self._lock:
                self._pending.append((name, start, end))

    def read(self, wait: bool = False) -> dict[str, list[float]]:
        """Milliseconds of every finished scope since the last read, by name, in order of completion.

        wait  first block the host until all scopes are finished; otherwise unfinished ones stay for the next read
        """
        with self._lock:
            pending, self._pending = self._pending, []
        times: dict[str, list[float]] = {}
        unfinished = []
        for name, start, end in pending:
            if wait:
                end.synchronize()
            if end.query():
                times.setdefault(name, []).append(start.elapsed_time(end))
            else:
                unfinished.append((name, start, end))
        with self._lock:
            self._pending = unfinished + self._pending
        return times
