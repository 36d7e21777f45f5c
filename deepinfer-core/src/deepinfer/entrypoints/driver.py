"""`Driver`: lets any number of threads use one `Engine`.

`LLM` submits requests here and iterates over their results. Whoever waits for results runs the next step; results of
other callers' requests are kept for them. The engine is touched under one lock only, taken for a step at a time and
handed over in order, so that a second caller, or an abort, gets in between any two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from deepinfer.engine.admission import Ask
from deepinfer.engine.engine import Engine
from deepinfer.engine.output import RequestOutput
from deepinfer.engine.stats import EngineStats
from deepinfer.errors import EngineError

OnStep = Callable[[EngineStats], None]
"""Called after every step, for progress bars."""


class FairLock:
    """A lock that the thread which has just released it cannot take again before those that wait."""

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def mine(self) -> bool:
        """True if the calling thread holds it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        with self._turnstile:
            self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._owner = None
        self._lock.release()


class Driver:
    """Owns the engine; all methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = FairLock()
        self._finished: dict[str, RequestOutput] = {}
        self._abandoned: deque[str] = deque()
        self._closed = False

    @property
    def stats(self) -> EngineStats:
        """The engine's totals."""
        return self._engine.stats

    def submit(self, asks: Sequence[Ask]) -> list[str]:
        """Queue requests; returns their ids. Their results must be fetched with `results`."""
        with self._turn():
            self._check_open()
            ids = [self._engine.add_request(ask) for ask in asks]
            self._collect()
        return ids

    def results(self, request_ids: Sequence[str], on_step: OnStep | None = None) -> Iterator[RequestOutput]:
        """Yield the results of these requests as they end, with `index` = place in `request_ids`.

        Leaving the iteration early aborts what is left. EngineError if a step fails; its `outputs` holds all results
        that have not been yielded, in order of `request_ids`.
        """
        index = {request_id: at for at, request_id in enumerate(request_ids)}
        try:
            while index:
                with self._turn():
                    ready = self._take(index) or self._advance(index)
                if on_step is not None:
                    on_step(self._engine.stats)
                yield from ready
        finally:
            if index:
                self._drop(index)

    def abort(self, request_ids: str | Iterable[str]) -> list[str]:
        """End requests of any caller; returns the ids that ended by this. Their callers get the results."""
        with self._turn():
            aborted = [] if self._closed else self._engine.abort_request(request_ids)
            self._collect()
        return aborted

    def close(self) -> None:
        """Abort everything and close the engine. Idempotent."""
        with self._turn():
            self._closed = True
            self._engine.close()
            self._collect()

    # --- under the lock ----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed; make a new one")

    def _collect(self) -> None:
        for output in self._engine.take_outputs():
            self._finished[output.request_id] = output

    def _take(self, index: dict[str, int]) -> list[RequestOutput]:
        """Remove the finished ones from `index` and return them."""
        ready = [request_id for request_id in self._finished if request_id in index]
        outputs = [self._finished.pop(request_id) for request_id in ready]
        for output in outputs:
            output.index = index.pop(output.request_id)
        return outputs

    def _advance(self, index: dict[str, int]) -> list[RequestOutput]:
        """Run one step and return what it finished of `index`."""
        self._check_open()
        assert self._engine.has_unfinished, "results are awaited that nobody will produce"
        try:
            for output in self._engine.step():
                self._finished[output.request_id] = output
        except BaseException as error:
            self._collect()
            if isinstance(error, EngineError):
                error.outputs = sorted(self._take(index), key=lambda output: output.index)
            raise
        return self._take(index)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the engine; before and after, abort what was abandoned meanwhile."""
        with self._lock:
            self._abort_abandoned()
            try:
                yield
            finally:
                self._abort_abandoned()

    def _drop(self, index: dict[str, int]) -> None:
        """Abort requests whose caller has gone, and forget their results.

        An abandoned iterator may be finalized by a garbage collection in the middle of this very thread's step; its
        requests are then aborted at the end of that turn.
        """
        self._abandoned.extend(index)
        if not self._lock.mine:
            with self._turn():
                pass

    def _abort_abandoned(self) -> None:
        gone = [self._abandoned.popleft() for _ in range(len(self._abandoned))]
        if gone:
            if not self._closed:
                self._engine.abort_request(gone)
            self._collect()
            for request_id in gone:
                self._finished.pop(request_id, None)
