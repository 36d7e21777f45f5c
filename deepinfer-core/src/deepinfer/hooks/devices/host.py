"""The CPU as a device: what the default runtime does where tensors live in host memory. Used by `hooks.ops.runtime`.

Every op has finished when its call returns, so streams and events are the synchronous stand-ins.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from deepinfer.hooks.devices.facts import DeviceProperties, MemoryInfo, RuntimeCapabilities
from deepinfer.hooks.devices.host_memory import keep_freed_memory, memory_info, reset_peak
from deepinfer.hooks.devices.synchronous import CurrentStream, RerunGraph, SynchronousEvent, SynchronousStream


class HostDevice:
    """Device of type "cpu". `root` is where the kernel's files are, "/" but for tests."""

    capabilities = RuntimeCapabilities()

    def __init__(self, root: Path = Path("/")) -> None:
        self.device = torch.device("cpu")
        self._root = root
        self._streams = CurrentStream()

    def select(self, index: int) -> torch.device:
        """All ranks of a host share its one CPU device, whatever their index."""
        return self.device

    def properties(self) -> DeviceProperties:
        """Processor name, usable cores, memory of machine or container."""
        cpus = usable_cpus()
        cores = len(cpus) or os.cpu_count() or 1
        return DeviceProperties(_processor_name(self._root), cores, self.memory().total, host_cpus=cpus)

    def memory(self) -> MemoryInfo:
        return memory_info(self._root)

    def reset_peak_memory(self) -> bool:
        return reset_peak(self._root)

    def empty_cache(self) -> None:
        """The C allocator keeps freed memory for the next step, see `warm_up`."""

    def current_stream(self) -> SynchronousStream:
        return self._streams.get()

    def new_stream(self) -> SynchronousStream:
        return SynchronousStream()

    def use_stream(self, stream: SynchronousStream) -> AbstractContextManager[SynchronousStream]:
        return self._streams.use(stream)

    def new_event(self, timed: bool) -> SynchronousEvent:
        return SynchronousEvent(timed)

    def record_use(self, tensor: torch.Tensor, stream: SynchronousStream) -> None:
        """Nothing is still running when a tensor is let go."""

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def capture(self, function: Callable[[], Any], pool: object) -> RerunGraph:
        return RerunGraph(function)

    def warm_up(self) -> None:
        """Make the C allocator keep what a step frees for the next one."""
        keep_freed_memory()


def usable_cpus() -> tuple[int, ...]:
    """CPU numbers this process may run on, ascending; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def _processor_name(root: Path) -> str:
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "CPU"
