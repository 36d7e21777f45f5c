"""Runtime ops: the device itself, its memory, streams, events, graphs, timers and modes.

Called by the worker (which selects the device, measures memory, captures graphs) and by the engine's step loop (which
copies, orders streams and times). The defaults serve the CPU, where everything is finished when a call returns, and any
torch accelerator through torch's generic interfaces; both run the same code path of the engine.

One provider serves the whole group, and these ops are called before the op table exists: bodies call `self`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from deepinfer.hooks.api import OpContext, OpGroup, op
from deepinfer.hooks.devices.accelerator import AcceleratorDevice
from deepinfer.hooks.devices.facts import DeviceProperties, MemoryInfo, RuntimeCapabilities
from deepinfer.hooks.devices.guards import DeviceTimers, SyncGuard, deterministic_algorithms
from deepinfer.hooks.devices.host import HostDevice


class RuntimeOps(OpGroup):
    """A worker's device. Streams and events have the methods of `torch.Stream` and `torch.Event`.

    A backend overrides single ops, or `make_device` to exchange everything below them at once.
    """

    group = "runtime"
    whole = True
    numeric = False

    def __init__(self, context: OpContext) -> None:
        super().__init__(context)
        self._guard = SyncGuard(self.switch_sync_guard)
        self._timers = DeviceTimers(lambda: self.new_event(True))

    def make_device(self, device: torch.device) -> Any:
        """The object behind the default bodies; made at first use. Not an op: overridden, never called from outside."""
        return HostDevice() if device.type == "cpu" else AcceleratorDevice(device)

    def switch_sync_guard(self, on: bool) -> None:
        """Make host synchronisation raise, or allow it again. Not an op: called by the outermost `forbid_sync`.

        Core's default does nothing: its reference ops may read sizes back to the host.
        """

    @cached_property
    def _device(self) -> Any:
        return self.make_device(torch.device(self.context.device))

    # device

    @op(level="recommended")
    def select(self, index: int) -> torch.device:
        """Make device `index` (the rank's number on its host) this process's device, before any other use of it.

        returns  the device to create tensors on; on the CPU the one CPU device for every index
        raises   BackendError where the host has no such device
        """
        return self._device.select(index)

    @op(level="recommended")
    def capabilities(self) -> RuntimeCapabilities:
        """What this runtime can do. The engine decides on these fields only."""
        return self._device.capabilities

    @op(level="recommended")
    def properties(self) -> DeviceProperties:
        """Name, cores, bytes of memory and place in the host of the selected device."""
        return self._device.properties()

    @op(level="recommended")
    def warm_up(self) -> None:
        """Do every one-time initialisation that synchronises. Called once, before guards and graph capture."""
        self._device.warm_up()

    # memory

    @op(level="recommended")
    def memory(self) -> MemoryInfo:
        """Bytes of the selected device: total, free, allocated and peak of this process."""
        return self._device.memory()

    @op()
    def reset_peak_memory(self) -> bool:
        """Start a new peak. Returns False where the peak cannot be reset and keeps counting."""
        return self._device.reset_peak_memory()

    @op()
    def empty_cache(self) -> None:
        """Give memory the framework keeps for reuse back to the device."""
        self._device.empty_cache()

    @op(level="recommended")
    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new host tensor, uninitialised, from and to which copies can overlap (page-locked where that exists)."""
        return self._device.pinned(tuple(shape), dtype)

    @op(level="recommended")
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy values on the current stream without waiting. [in-place destination]

        destination, source  any devices and dtypes, equal shapes; the host may touch neither before an event recorded
                             after the copy has happened
        returns              destination
        """
        return destination.copy_(source, non_blocking=True)

    # streams and events

    @op(level="recommended")
    def current_stream(self) -> Any:
        """The stream that ops of the calling thread go to."""
        return self._device.current_stream()

    @op(level="recommended")
    def new_stream(self) -> Any:
        """A stream of its own order; work on it may overlap with other streams."""
        return self._device.new_stream()

    @op(level="recommended")
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Scope in which `stream` is the calling thread's current one. It orders nothing: use events."""
        return self._device.use_stream(stream)

    @op(level="recommended")
    def new_event(self, timed: bool = False) -> Any:
        """An event: record(stream), wait(stream), query(), synchronize(), elapsed_time(end) in ms if timed."""
        return self._device.new_event(timed)

    @op()
    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of `tensor` from reuse until the work now on `stream` is finished."""
        self._device.record_use(tensor, stream)

    @op(level="recommended")
    def synchronize(self) -> None:
        """Block the host until all work of the selected device is finished."""
        self._device.synchronize()

    @op()
    def forbid_sync(self) -> AbstractContextManager[None]:
        """Scope in which host synchronisation is a mistake. Nests, over all threads of the process.

        Raising needs `capabilities().sync_guard`; elsewhere scopes are only counted. DEEPINFER_DISABLE_SYNC_GUARD
        turns it off.
        """
        return nullcontext() if getattr(self.context.settings, "disable_sync_guard", False) else self._guard.forbid()

    @op()
    def sync_depth(self) -> int:
        """Open `forbid_sync` scopes of all threads."""
        return self._guard.depth

    # graphs

    @op(level="recommended")
    def new_graph_pool(self) -> object:
        """Memory that several captured graphs share, as an opaque token; None where there is no such thing."""
        return None

    @op(level="recommended")
    def capture(self, function: Callable[[], Any], pool: object = None) -> Any:
        """Record the device work of `function()` for cheap repetition; it must be free of host synchronisation.

        The function takes its inputs from tensors it closes over; values written there before a replay count. Whether
        `capture` itself computes anything is not defined: results come from `replay`.
        returns  an object with replay() -> what the function returned, valid until its next replay, and destroy()
        """
        return self._device.capture(function, pool)

    # timers and modes

    @op()
    def timer(self, name: str) -> AbstractContextManager[None]:
        """Scope whose device work on the current stream is timed under `name`, without waiting for it."""
        return self._timers.scope(name)

    @op()
    def read_timers(self, wait: bool = False) -> dict[str, list[float]]:
        """Milliseconds of every scope finished since the last read, by name. `wait` blocks until all are finished."""
        return self._timers.read(wait)

    @op()
    def deterministic(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Scope in which the framework uses only algorithms that give the same bits every time."""
        return deterministic_algorithms(enabled)
