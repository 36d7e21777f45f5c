"""A worker's GPU: core's torch runtime with graphs, a sync guard, timers inside graphs, and its place in the host.

Created by the plugin once a GPU was found. Graphs and their timers need cuda-python where a graph is timed; everything
else is torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepinfer.hooks import DeviceProperties, MemoryInfo, OpContext, RuntimeCapabilities, provides
from deepinfer.hooks.devices.accelerator import AcceleratorDevice
from deepinfer.hooks.ops import RuntimeOps
from deepinfer_nvidia.cuda import Cuda
from deepinfer_nvidia.graphs import Graphs, torch_graphs
from deepinfer_nvidia.libraries import Libraries, Need

BINDINGS = Need(
    "cuda.bindings.runtime",
    {name: () for name in ("cudaEventRecordWithFlags", "cudaGraphExecEventRecordNodeSetEvent", "cudaHostRegister")},
)


class Gpu(AcceleratorDevice):
    """Below the default bodies of the runtime ops."""

    capabilities = RuntimeCapabilities(
        asynchronous=True, supports_graphs=True, sync_guard=True, timed_events=True, pinned_memory=True
    )

    def properties(self) -> DeviceProperties:
        """Torch's properties, and where the GPU is plugged in."""
        found: Any = torch.cuda.get_device_properties(self.device)
        place = (
            {}
            if not hasattr(found, "pci_bus_id")
            else host_place(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")
        )
        return replace(super().properties(), **place)

    def warm_up(self) -> None:
        """Library handles, and the workspace torch takes for products on a new stream."""
        torch.cuda.init()
        super().warm_up()


def host_place(bus: str, root: Path = Path("/")) -> dict[str, Any]:
    """Fields of `DeviceProperties` that the kernel knows of a PCI device: numa_node, host_cpus; {} for others."""
    folder = root / "sys/bus/pci/devices" / bus
    try:
        node = int((folder / "numa_node").read_text())
        cpus = cpu_list((folder / "local_cpulist").read_text())
    except (OSError, ValueError):
        return {}
    return {"numa_node": node, "host_cpus": cpus} if node >= 0 and cpus else {}


def cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's "0-3,8" as numbers."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


class Runtime(RuntimeOps):
    """Streams, events, memory and modes are core's bodies over torch; graphs and the sync guard are ours."""

    def __init__(self, context: OpContext, libraries: Libraries, graphs: Graphs | None = None) -> None:
        super().__init__(context)
        self._missing = libraries.missing(BINDINGS)
        bindings = None if self._missing else Cuda(libraries.get("cuda.bindings.runtime"))
        self._graphs = graphs or torch_graphs(bindings)

    def make_device(self, device: torch.device) -> Any:
        """The GPU."""
        return Gpu(device)

    def switch_sync_guard(self, on: bool) -> None:
        """Torch raises in every call that waits for the device. The mode is one per process."""
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    @provides()
    def memory(self) -> MemoryInfo:
        """What graphs hold counts as allocated: their pools are not given back between replays."""
        found = self._device.memory()
        held = self._graphs.nbytes
        return replace(found, allocated=found.allocated + held, peak=found.peak + held)

    @provides()
    def new_graph_pool(self) -> object:
        """Torch's handle of a pool."""
        return self._graphs.new_pool()

    @provides()
    def capture(self, function: Callable[[], Any], pool: object = None) -> Any:
        """Warmed up on the capture stream, then recorded."""
        return self._graphs.capture(function, pool)

    @provides()
    def timer(self, name: str) -> AbstractContextManager[None]:
        """Inside a capture the scope is timed at every replay; not at all without cuda-python."""
        if self._graphs.capturing is None:
            return self._timers.scope(name)
        return nullcontext() if self._missing else self._graphs.timer(name)

    @provides()
    def read_timers(self, wait: bool = False) -> dict[str, list[float]]:
        """Scopes outside and inside of graphs."""
        times = self._timers.read(wait)
        for name, milliseconds in self._graphs.read_timers(wait):
            times.setdefault(name, []).append(milliseconds)
        return times
