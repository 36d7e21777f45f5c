"""Timers inside device graphs. Used by `graphs`.

A graph records the events it was captured with, so two replays in flight would write the same ones. Every timed scope
has two pairs of events; before a replay its nodes are pointed at the pair that the replay before last used. What is
still unfinished then is lost, because waiting is not allowed in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deepinfer_nvidia.cuda import Cuda

BUFFERS = 2


@dataclass(slots=True)
class _Scope:
    name: str
    pairs: list[tuple[int, int]]
    nodes: tuple[Any, Any] = (None, None)
    pending: list[bool] = field(default_factory=lambda: [False] * BUFFERS)


class GraphTimers:
    """The timed scopes of one graph."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._scopes: list[_Scope] = []
        self._executable = 0
        self._turn = 0
        self._times: list[tuple[str, float]] = []

    @contextmanager
    def scope(self, name: str, stream: int) -> Iterator[None]:
        """While capturing: time the work captured inside the block."""
        pairs = [(self._cuda.new_event(), self._cuda.new_event()) for _ in range(BUFFERS)]
        self._scopes.append(_Scope(name, pairs))
        self._cuda.record_external(pairs[0][0], stream)
        try:
            yield
        finally:
            self._cuda.record_external(pairs[0][1], stream)

    def bind(self, graph: int, executable: int) -> None:
        """After instantiation: find the nodes that record the events."""
        if not self._scopes:
            return
        nodes = self._cuda.event_nodes(graph)
        for scope in self._scopes:
            scope.nodes = (nodes[scope.pairs[0][0]], nodes[scope.pairs[0][1]])
        self._executable = executable

    def before_replay(self) -> None:
        """Collect what the pair in turn has measured, and let the next replay record it."""
        for scope in self._scopes:
            self._collect(scope, self._turn, wait=False)
            scope.pending[self._turn] = True
            for node, event in zip(scope.nodes, scope.pairs[self._turn], strict=True):
                self._cuda.set_event(self._executable, node, event)
        self._turn = (self._turn + 1) % BUFFERS

    def read(self, wait: bool) -> list[tuple[str, float]]:
        """(name, ms) of every scope finished since the last read; `wait` blocks until all are."""
        for offset in range(BUFFERS):
            for scope in self._scopes:
                self._collect(scope, (self._turn + offset) % BUFFERS, wait)
        times, self._times = self._times, []
        return times

    def _collect(self, scope: _Scope, buffer: int, wait: bool) -> None:
        start, end = scope.pairs[buffer]
        if not scope.pending[buffer]:
            return
        if wait:
            self._cuda.wait(end)
        if self._cuda.finished(end):
            scope.pending[buffer] = False
            self._times.append((scope.name, self._cuda.milliseconds(start, end)))

    def close(self) -> None:
        """Destroy the events; the graph goes first."""
        scopes, self._scopes = self._scopes, []
        for scope in scopes:
            for pair in scope.pairs:
                for event in pair:
                    self._cuda.destroy_event(event)
