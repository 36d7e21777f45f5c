"""Executors: how the engine's steps reach a worker. Here: one worker in this process.

With overlap the steps run in order on a thread of their own, so that `launch` returns at once and the engine commits
one step and plans another meanwhile; the interpreter is free while the thread is inside an op. Without, a step runs
when it is launched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from deepinfer.errors import UnsupportedError
from deepinfer.runner.inputs import CacheCapacity, StepBatch, StepHandle, StepResult

if TYPE_CHECKING:
    from deepinfer.config import EngineConfig
    from deepinfer.hooks import LoadedBackend
    from deepinfer.hooks.trace import Wrapper
    from deepinfer.runner.worker import Worker
    from deepinfer.speculate.costs import CostModel


class Task:
    """Something a thread does for another one. Plain locks: a step's end must cost the thread next to nothing."""

    __slots__ = ("_done", "_error", "_function", "_value")

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Called by the thread."""
        function, self._function = self._function, None  # what it refers to must not outlive it
        assert function is not None
        try:
            self._value = function()
        except BaseException as error:
            self._error = error
        self._done.release()

    def wait(self) -> Any:
        """What the function returned, or raises what it raised. May be asked again."""
        with self._done:
            pass
        if self._error is not None:
            raise self._error
        return self._value


class WorkerThread:
    """Does tasks one after the other. A daemon: a process that forgets to close its engine can still end."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="deepinfer-worker", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Task:
        """Queue a task."""
        task = Task(function)
        self._tasks.put(task)
        return task

    def close(self, wait: bool = True) -> None:
        """Finish what is queued and end. Idempotent."""
        self._tasks.put(None)
        if wait:
            self._thread.join()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
            del task


class SubmittedStep:
    """Handle of a step that the worker's thread runs or will run."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def result(self) -> StepResult:
        """Wait for the thread, then for the device."""
        return self._task.wait().result()


SlotReset = tuple[Literal["zero_slots", "copy_slots"], list[Any]]
"""A method of the model runner and the slots it is asked for."""


class LocalExecutor:
    """Executor over one worker in this process, whose steps run on `thread`, or where they are launched."""

    def __init__(self, worker: Worker, thread: WorkerThread | None = None) -> None:
        self.worker: Worker | None = worker
        self._resets: list[SlotReset] = []
        self._thread = thread

    def _open(self) -> Worker:
        if self.worker is None:
            raise RuntimeError("the executor is closed")
        return self.worker

    @property
    def capacity(self) -> CacheCapacity:
        """Sizes of the worker's caches."""
        return self._open().capacity

    def launch(self, batch: StepBatch) -> StepHandle:
        """Run a step, or hand it to the thread."""
        resets, self._resets = self._resets, []
        run = _step(self._open(), resets, batch)
        return run() if self._thread is None else SubmittedStep(self._thread.submit(run))

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Reset state slots before the next step."""
        self._resets.append(("zero_slots", list(slots)))

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state slots before the next step."""
        self._resets.append(("copy_slots", list(pairs)))

    @property
    def chooses(self) -> bool:
        """True on devices whose results are the host's as soon as they are computed."""
        return not self._open().ops.runtime.capabilities().asynchronous

    def costs(self) -> CostModel:
        """See `Executor.costs`."""
        measure = self._open().costs
        return measure() if self._thread is None else self._thread.submit(measure).wait()

    def __del__(self) -> None:
        """An executor that nobody closed takes its thread along."""
        if self._thread is not None:
            self._thread.close(wait=False)

    def close(self) -> None:
        """Give weights and caches back, after the steps that are under way. Idempotent."""
        worker, self.worker = self.worker, None
        if self._thread is not None:
            self._thread.close()
        if worker is not None:
            worker.close()


def _step(worker: Worker, resets: list[SlotReset], batch: StepBatch) -> Callable[[], StepHandle]:
    """A step with the resets that go before it, in order."""

    def run() -> StepHandle:
        for method, slots in resets:
            getattr(worker.runner, method)(slots)
        return worker.run(batch)

    return run


def create_executor(
    config: EngineConfig, backend: LoadedBackend | None = None, wrappers: Sequence[Wrapper] = ()
) -> LocalExecutor:
    """Load the model of an engine and return the executor that runs it. backend, wrappers: see `worker.bind_ops`."""
    from deepinfer.runner.worker import Worker

    sizes = {
        name: getattr(config, name)
        for name in ("data_parallel_size", "context_parallel_size", "expert_parallel_size", "engram_parallel_size")
    }
    wanted = {name: size for name, size in sizes.items() if size and size > 1}
    if wanted:
        listed = ", ".join(f"{name}={size}" for name, size in wanted.items())
        raise UnsupportedError(f"{listed}: this build runs one rank; leave the parallel sizes at 1")

    def load() -> Worker:
        return Worker.load(config, backend, wrappers)

    return load_on_thread(load) if config.overlap else LocalExecutor(load())


def load_on_thread(load: Callable[[], Worker]) -> LocalExecutor:
    """An executor whose worker is made on the thread it works on: no other thread ever has a part in its device.

    A thread has a current device of its own, and on the CPU a pool of helpers of its own. A second pool is more than
    the machine has cores, and then helpers sleep between ops instead of waiting for the next one: steps took 1.5 times
    as long.
    """
    thread = WorkerThread()
    try:
        return LocalExecutor(thread.submit(load).wait(), thread)
    except BaseException:
        thread.close(wait=False)
        raise
