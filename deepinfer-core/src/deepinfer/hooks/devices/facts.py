"""Plain data about a device: capabilities, properties, memory. Returned by `runtime` ops, read by worker and engine.

Decisions are made on these fields, never on which backend is loaded. Nothing here asks a device anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RuntimeCapabilities:
    """What a runtime can do; every default is the cautious answer.

    asynchronous     launches return before the device has finished; streams really overlap
    supports_graphs  `capture` records device work; False: `capture` returns an object that calls the function again
    sync_guard       inside `forbid_sync` a host synchronisation raises; False: nesting is only counted
    timed_events     event times are taken on the device; False: on the host when the work is submitted
    pinned_memory    `pinned` returns page-locked memory, so copies from it can overlap
    batch_invariant  the device's own library ops (torch's, for this device) do not depend on the batch
    """

    asynchronous: bool = False
    supports_graphs: bool = False
    sync_guard: bool = False
    timed_events: bool = False
    pinned_memory: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What one device is.

    name       as its maker calls it
    cores      compute units a kernel can spread over; CPU: cores this process may use
    memory     bytes of device memory in all
    numa_node  node of the host memory next to it, None where unknown
    host_cpus  CPU numbers of this process's share of the host, ascending
    """

    name: str
    cores: int
    memory: int
    numa_node: int | None = None
    host_cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of device memory at one moment.

    total, free      of the device (CPU: of this process's container), shared with other processes
    allocated, peak  by this process, now and at most since `reset_peak_memory`
    """

    total: int
    free: int
    allocated: int
    peak: int
