"""Any torch accelerator through torch's generic interfaces: what the default runtime does on a device of its own.

Used by `hooks.ops.runtime` for every device type but "cpu". Relies on `torch.accelerator`, `torch.Stream`,
`torch.Event` and, for what those do not cover, on attributes the device's torch module may have. Knows no maker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepinfer.errors import BackendError
from deepinfer.hooks.devices.facts import DeviceProperties, MemoryInfo, RuntimeCapabilities
from deepinfer.hooks.devices.host import usable_cpus
from deepinfer.hooks.devices.synchronous import RerunGraph

_CORE_COUNTS = ("multi_processor_count", "max_compute_units")
"""Names under which torch device modules report their compute units."""


class AcceleratorDevice:
    """A device of torch's current accelerator type.

    Raises BackendError where torch has no accelerator of that type: its package is not installed, or the backend has
    to bring its own runtime.
    """

    capabilities = RuntimeCapabilities(asynchronous=True, timed_events=True, pinned_memory=True)

    def __init__(self, device: torch.device) -> None:
        found = torch.accelerator.current_accelerator()
        if found is None or found.type != device.type:
            raise BackendError(
                f"torch's accelerator is {found.type if found else 'none'}, but the backend computes on "
                f"{device.type!r}; install the torch build for that device, or override the backend's runtime ops"
            )
        self.device = device
        self._module = torch.get_device_module(device)

    def select(self, index: int) -> torch.device:
        """Make device `index` of this type the process's current one."""
        count = torch.accelerator.device_count()
        if not 0 <= index < count:
            raise BackendError(
                f"rank {index} of this host has no device of its own: {count} device(s) of type {self.device.type!r} "
                "are visible; start fewer ranks on this host or make more devices visible"
            )
        torch.accelerator.set_device_index(index)
        self.device = torch.device(self.device.type, index)
        return self.device

    def properties(self) -> DeviceProperties:
        """What the device's torch module tells."""
        found = self._call("get_device_properties", self.device)
        cores = next((getattr(found, name) for name in _CORE_COUNTS if hasattr(found, name)), 1)
        name = getattr(found, "name", "") or self.device.type
        return DeviceProperties(name, cores, self.memory().total, host_cpus=usable_cpus())

    def memory(self) -> MemoryInfo:
        """Device memory; total and free are 0 where torch cannot tell."""
        query = getattr(torch.accelerator, "get_memory_info", None)
        free, total = query(self.device) if query else self._call("mem_get_info", self.device) or (0, 0)
        allocated = torch.accelerator.memory_allocated(self.device)
        return MemoryInfo(total, free, allocated, torch.accelerator.max_memory_allocated(self.device))

    def _call(self, name: str, *arguments: Any) -> Any:
        """A function of the device's torch module, None where it has no such function."""
        function = getattr(self._module, name, None)
        return None if function is None else function(*arguments)

    def reset_peak_memory(self) -> bool:
        torch.accelerator.reset_peak_memory_stats(self.device)
        return True

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    @contextmanager
    def use_stream(self, stream: torch.Stream) -> Iterator[torch.Stream]:
        before = self.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield stream
        finally:
            torch.accelerator.set_stream(before)

    def new_event(self, timed: bool) -> torch.Event:
        return torch.Event(self.device, enable_timing=timed)

    def record_use(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, function: Callable[[], Any], pool: object) -> RerunGraph:
        """Generic torch has graphs for few devices; a backend that has them overrides `runtime.capture`."""
        return RerunGraph(function)

    def warm_up(self) -> None:
        """One matrix product creates the library handles and workspaces that would otherwise be made mid-step."""
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.ones(16, 16, dtype=dtype, device=self.device)
            torch.mm(x, x)
        self.synchronize()
