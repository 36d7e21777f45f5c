"""Capture and replay of device graphs through torch. Used by `runtime`.

Everything is captured on one stream of its own, after a run of the function there: libraries allocate barriers and pick
algorithms on a stream's first use, which a capture would record as work. Graphs that share a pool replay one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer.hooks import BackendError
from deepinfer_nvidia.cuda import Cuda
from deepinfer_nvidia.timers import GraphTimers


def graph_sizes(largest: int, interval: int) -> list[int]:
    """Row counts to capture, largest first so that smaller graphs fit in the pool's memory.

    Powers of two up to `interval`, then its multiples up to `largest`, and `largest` itself.
    """
    if largest < 1 or interval < 1:
        raise BackendError(f"graphs of {largest} rows in steps of {interval}, expected at least 1")
    sizes = {1 << power for power in range(interval.bit_length()) if 1 << power <= interval}
    sizes |= set(range(interval, largest + 1, interval)) | {largest}
    return sorted((size for size in sizes if size <= largest), reverse=True)


class Graph:
    """A captured function. `replay` returns what it returned, valid until the next replay."""

    def __init__(self, graph: Any, result: Any, timers: GraphTimers, size: int, gone: Callable[[Graph], None]) -> None:
        self._graph, self._result, self.timers, self.size, self._gone = graph, result, timers, size, gone

    def replay(self) -> Any:
        if self._graph is None:
            raise BackendError("this graph was destroyed")
        self.timers.before_replay()
        self._graph.replay()
        return self._result

    def destroy(self) -> None:
        """Give memory and events back; before communicators whose work it holds. May be called twice."""
        graph, self._graph, self._result = self._graph, None, None
        if graph is not None:
            graph.reset()
            self.timers.close()
            self._gone(self)


class Graphs:
    """The graphs of one device. cuda: torch.cuda, or what stands for it in tests; runtime: None without cuda-python."""

    def __init__(self, cuda: Any, runtime: Cuda | None) -> None:
        self._cuda, self._runtime = cuda, runtime
        self._stream: Any = None
        self._alive: list[Graph] = []
        self._capturing: GraphTimers | None = None

    @property
    def nbytes(self) -> int:
        """Device memory that captures have taken and not given back."""
        return sum(graph.size for graph in self._alive)

    @property
    def capturing(self) -> GraphTimers | None:
        """Timers of the graph that is captured now."""
        return self._capturing

    def new_pool(self) -> object:
        """Memory for graphs that never run at the same time."""
        return self._cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Any], pool: object) -> Graph:
        """Run once to warm the capture stream up, then record."""
        if self._capturing is not None:
            raise BackendError("a graph is being captured already; captures do not nest")
        stream = self._stream = self._stream or self._cuda.Stream()
        outer = self._cuda.current_stream()
        stream.wait_stream(outer)
        with self._cuda.stream(stream):
            function()
        stream.synchronize()
        before = self._cuda.memory_reserved()
        graph, timers = self._cuda.CUDAGraph(keep_graph=True), GraphTimers(self._runtime)  # type: ignore[arg-type]
        self._capturing = timers
        try:
            with self._cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            timers.close()
            raise
        finally:
            self._capturing = None
        graph.instantiate()
        timers.bind(graph.raw_cuda_graph(), graph.raw_cuda_graph_exec())
        outer.wait_stream(stream)
        size = max(0, self._cuda.memory_reserved() - before)
        made = Graph(graph, result, timers, size, self._forget)
        self._alive.append(made)
        return made

    def timer(self, name: str) -> Any:
        """A scope of the graph that is captured now, timed at every replay."""
        assert self._capturing is not None
        return self._capturing.scope(name, self._cuda.current_stream().cuda_stream)

    def read_timers(self, wait: bool) -> list[tuple[str, float]]:
        """(name, ms) of all graphs since the last read."""
        return [time for graph in self._alive for time in graph.timers.read(wait)]

    def _forget(self, graph: Graph) -> None:
        self._alive.remove(graph)


def torch_graphs(runtime: Cuda | None) -> Graphs:
    """Graphs of torch's current GPU."""
    return Graphs(torch.cuda, runtime)
