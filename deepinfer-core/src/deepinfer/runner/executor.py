"""Executors: how the engine's steps reach a worker. Here: one worker in this process, steps run when launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer.errors import UnsupportedError
from deepinfer.runner.inputs import CacheCapacity, StepBatch, StepResult

if TYPE_CHECKING:
    from deepinfer.config import EngineConfig
    from deepinfer.hooks import LoadedBackend
    from deepinfer.hooks.trace import Wrapper
    from deepinfer.runner.worker import Worker


class FinishedStep:
    """Handle of a step that ran during `launch`."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """What the step produced."""
        return self._result


class LocalExecutor:
    """Executor over one worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker: Worker | None = worker

    def _open(self) -> Worker:
        if self.worker is None:
            raise RuntimeError("the executor is closed")
        return self.worker

    @property
    def capacity(self) -> CacheCapacity:
        """Sizes of the worker's caches."""
        return self._open().capacity

    def launch(self, batch: StepBatch) -> FinishedStep:
        """Run a step."""
        return FinishedStep(self._open().run(batch))

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Reset state slots."""
        self._open().runner.zero_slots(list(slots))

    def close(self) -> None:
        """Give weights and caches back. Idempotent."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()


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
    return LocalExecutor(Worker.load(config, backend, wrappers))
