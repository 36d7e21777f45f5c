"""Results on their way from the device to the host, and how long the device worked for them.

The model runner issues the copies at the end of a step without waiting; the engine waits when it commits the step. On
the CPU nothing has to be copied and nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer.hooks import OpTable
from deepinfer.runner.inputs import StepResult, StepTiming


class Readback:
    """One per worker: copies and times its steps."""

    def __init__(self, ops: OpTable) -> None:
        self._runtime = ops.runtime
        self._asynchronous = self._runtime.capabilities().asynchronous
        self._last_end: Any = None

    def begin(self) -> Any:
        """Mark the first work of a step; returns the mark for `end`."""
        return self._mark()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor that will hold these values once the step is finished."""
        if not self._asynchronous:
            return tensor
        return self._runtime.copy(self._runtime.pinned(tuple(tensor.shape), tensor.dtype), tensor)

    def end(self, started: Any, build: Callable[[], StepResult]) -> PendingStep:
        """Everything of the step is issued; `build` makes the result of the fetched tensors once they are there."""
        before, self._last_end = self._last_end, self._mark()
        return PendingStep(before, started, self._last_end, build)

    def _mark(self) -> Any:
        event = self._runtime.new_event(True)
        event.record()
        return event


class PendingStep:
    """Handle of a step that has been issued to the device."""

    def __init__(self, before: Any, started: Any, finished: Any, build: Callable[[], StepResult]) -> None:
        self._before, self._started, self._finished, self._build = before, started, finished, build

    def result(self) -> StepResult:
        """Wait for the device."""
        self._finished.synchronize()
        result = self._build()
        waited = 0.0 if self._before is None else self._before.elapsed_time(self._started)
        result.timing = StepTiming(self._started.elapsed_time(self._finished), waited)
        return result
