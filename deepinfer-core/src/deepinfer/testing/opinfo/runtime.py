"""Checks of the runtime ops: device, memory, streams, events, graphs, timers and modes behave as the contract says.

There are no numbers to compare here, so every op has checks instead of samples. They run on the subject alone and, for
what only a device can do, ask its own `capabilities()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch

from deepinfer.errors import BackendError
from deepinfer.hooks.devices.facts import DeviceProperties, MemoryInfo, RuntimeCapabilities
from deepinfer.testing.opinfo.context import SampleContext, Trio
from deepinfer.testing.opinfo.expect import raises, require
from deepinfer.testing.opinfo.record import Args, Check, ErrorSample, OpInfo
from deepinfer.testing.opinfo.streams import (
    busy,
    capture,
    events,
    pool,
    record_use,
    separate_streams,
    stream_after_error,
    stream_of_thread,
    streams,
    synchronize,
)
from deepinfer.testing.results import Failure, Skip

BLOCK = 1 << 26
"""Bytes of the tensors that must show in `memory()`."""
MOST_BLOCKS = 16


# device


def select(trio: Trio) -> None:
    runtime, device = trio.found.ops.runtime, trio.found.device
    chosen = runtime.select(0)
    require(
        isinstance(chosen, torch.device) and chosen.type == device.type, f"select(0) is {chosen!r}, expected {device}"
    )
    require(torch.zeros(1, device=chosen).device.type == device.type, "tensors made on it are elsewhere")


def select_missing(trio: Trio) -> None:
    if trio.found.device.type == "cpu":
        raise Skip("every index means the one CPU")
    raises(BackendError, lambda: trio.found.ops.runtime.select(4096), "select(4096)")
    trio.found.ops.runtime.select(0)


def capabilities(trio: Trio) -> str:
    facts = trio.found.ops.runtime.capabilities()
    require(isinstance(facts, RuntimeCapabilities), f"is a {type(facts).__name__}, expected RuntimeCapabilities")
    named = {f.name: getattr(facts, f.name) for f in fields(facts)}
    require(all(type(value) is bool for value in named.values()), f"fields are {named}, expected booleans")
    require(trio.found.ops.runtime.capabilities() == facts, "differs from call to call")
    return ", ".join(name for name, value in named.items() if value) or "none"


def properties(trio: Trio) -> str:
    facts = trio.found.ops.runtime.properties()
    require(isinstance(facts, DeviceProperties), f"is a {type(facts).__name__}, expected DeviceProperties")
    require(facts.name and facts.cores >= 1 and facts.memory > 0, f"says nothing: {facts}")
    require(
        list(facts.host_cpus) == sorted(set(facts.host_cpus)), f"host_cpus are {facts.host_cpus}, expected ascending"
    )
    return f"{facts.name}, {facts.cores} cores"


def warm_up(trio: Trio) -> None:
    ctx = trio.found
    ctx.ops.runtime.warm_up()
    ctx.ops.runtime.warm_up()
    require(torch.ones(2, device=ctx.device).sum().item() == 2, "the device does not work afterwards")


# memory


def memory(trio: Trio) -> str:
    """What is allocated shows; a host may first use up memory that was freed and kept."""
    runtime, device = trio.found.ops.runtime, trio.found.device
    before, blocks = _memory(runtime), []
    for count in range(1, MOST_BLOCKS + 1):
        blocks.append(torch.ones(BLOCK, dtype=torch.uint8, device=device))
        runtime.synchronize()
        during = _memory(runtime)
        require(during.total == before.total, f"total changed from {before.total} to {during.total}")
        require(during.allocated >= 0.9 * BLOCK * count, f"{during.allocated} bytes, but {count} x {BLOCK} are in use")
        if during.allocated - before.allocated > 0.8 * BLOCK:
            return f"shows after {count} block(s)"
    raise Failure(f"{MOST_BLOCKS} x {BLOCK} bytes more do not show: {before} -> {during}")


def _memory(runtime: Any) -> MemoryInfo:
    facts = runtime.memory()
    require(isinstance(facts, MemoryInfo), f"is a {type(facts).__name__}, expected MemoryInfo")
    require(0 <= facts.free <= facts.total and 0 <= facts.allocated <= facts.peak, f"does not add up: {facts}")
    return facts


def peak(trio: Trio) -> str:
    runtime, device = trio.found.ops.runtime, trio.found.device
    block = torch.ones(BLOCK, dtype=torch.uint8, device=device)
    runtime.synchronize()
    held = _memory(runtime)
    require(held.peak >= 0.9 * BLOCK, f"the peak is {held.peak} bytes, but {BLOCK} are in use")
    del block
    runtime.empty_cache()
    require(_memory(runtime).peak >= held.allocated, "the peak falls without a reset")
    possible = runtime.reset_peak_memory()
    require(type(possible) is bool, f"returned {possible!r}, expected whether the peak can be reset")
    # an allocator that keeps freed memory leaves the new peak where the old one was, and the process grows by the way
    now = _memory(runtime).peak
    require(not possible or now <= held.peak + BLOCK // 4, f"the peak rises by a reset: {held.peak} -> {now}")
    return "resets" if possible else "cannot be reset"


def empty_cache(trio: Trio) -> None:
    x = torch.arange(1000, device=trio.found.device)
    trio.found.ops.runtime.empty_cache()
    require(int(x.sum()) == 499_500, "changed a tensor in use")


def pinned(trio: Trio) -> None:
    runtime = trio.found.ops.runtime
    locked = runtime.capabilities().pinned_memory
    for shape, dtype in (((3, 5), torch.int32), ((), torch.float32), ((0, 4), torch.uint8), ((7,), torch.bfloat16)):
        x = runtime.pinned(shape, dtype)
        require(
            (tuple(x.shape), x.dtype, x.device.type) == (shape, dtype, "cpu"),
            f"is {x.dtype} {list(x.shape)} on {x.device}",
        )
        require(not x.numel() or x.is_pinned() == locked, f"page-locked: {x.is_pinned()}, capabilities say {locked}")
    a, b = runtime.pinned((4,), torch.int32), runtime.pinned((4,), torch.int32)
    a.fill_(1), b.fill_(2)
    require(a.tolist() == [1] * 4, "two tensors share memory")


def copy(trio: Trio) -> None:
    ctx, runtime = trio.found, trio.found.ops.runtime
    source = runtime.pinned((3, 5), torch.int32)
    source.copy_(torch.arange(15).view(3, 5))
    there = torch.empty(3, 5, dtype=torch.int32, device=ctx.device)
    wide, back = torch.empty(5, 3, device=ctx.device).t(), runtime.pinned((3, 5), torch.float32)
    require(runtime.copy(there, source) is there, "does not return its destination")
    runtime.copy(wide, there)
    runtime.copy(back, wide)
    done = runtime.new_event()
    done.record()
    done.synchronize()
    require(torch.equal(back, source.float()), f"host to device, to float32, to host gives {back.tolist()}")


def copy_errors(ctx: SampleContext) -> Iterator[ErrorSample]:
    def args() -> Args:
        return torch.empty(3, 4, device=ctx.device), torch.empty(4, 3)

    yield ErrorSample("shapes differ", args)


# guards


def guard(trio: Trio) -> str:
    ctx, runtime = trio.found, trio.found.ops.runtime
    runtime.warm_up()
    start, x = runtime.sync_depth(), torch.ones(4, device=ctx.device)
    with runtime.forbid_sync():
        require(runtime.sync_depth() >= start, "the depth falls inside a scope")
        counted = runtime.sync_depth() > start
        with runtime.forbid_sync():
            require(
                not counted or runtime.sync_depth() == start + 2, f"two scopes count {runtime.sync_depth() - start}"
            )
        if runtime.capabilities().sync_guard and counted:
            raises(Exception, x.sum().item, "reading a value back inside forbid_sync")
    require(runtime.sync_depth() == start, f"after the scope {runtime.sync_depth() - start} stay open")
    require(x.sum().item() == 4, "reading a value back after the scope")
    return "counts" if counted else "turned off by the settings"


def guard_after_error(trio: Trio) -> None:
    runtime = trio.found.ops.runtime
    start = runtime.sync_depth()
    try:
        with runtime.forbid_sync():
            raise KeyError
    except KeyError:
        pass
    require(runtime.sync_depth() == start, "an exception leaves the scope open")


# timers and modes


def timers(trio: Trio) -> None:
    ctx, runtime = trio.found, trio.found.ops.runtime
    runtime.read_timers(True)
    for _ in range(2):
        with runtime.timer("product"):
            busy(ctx, 2)
    try:
        with runtime.timer("broken"):
            raise KeyError
    except KeyError:
        pass
    times = runtime.read_timers(True)
    found = {name: len(values) for name, values in times.items()}
    require(found == {"product": 2, "broken": 1}, f"scopes timed: {found}, expected product twice and broken once")
    require(
        all(0 <= ms < 60_000 for values in times.values() for ms in values), f"times are {times}, expected milliseconds"
    )
    require(runtime.read_timers(True) == {}, "a scope is read twice")


def deterministic(trio: Trio) -> None:
    runtime, before = trio.found.ops.runtime, torch.are_deterministic_algorithms_enabled()
    try:
        with runtime.deterministic():
            require(torch.are_deterministic_algorithms_enabled(), "torch's mode is off inside the scope")
            with runtime.deterministic(False):
                require(not torch.are_deterministic_algorithms_enabled(), "deterministic(False) leaves the mode on")
            raise KeyError
    except KeyError:
        pass
    require(torch.are_deterministic_algorithms_enabled() == before, "the mode before is not restored")


def _info(op: str, *checks: Check, **fields: Any) -> OpInfo:
    return OpInfo(f"runtime.{op}", properties=frozenset(), checks=checks, **fields)


INFOS = (
    _info("select", Check("the first device", select), Check("a missing device", select_missing)),
    _info("capabilities", Check("plain facts", capabilities)),
    _info("properties", Check("plain facts", properties)),
    _info("warm_up", Check("twice", warm_up)),
    _info("memory", Check("shows an allocation", memory)),
    _info("reset_peak_memory", Check("a new peak", peak)),
    _info("empty_cache", Check("keeps what is in use", empty_cache)),
    _info("pinned", Check("host memory", pinned)),
    _info("copy", Check("there and back", copy), make_errors=copy_errors),
    _info("current_stream", Check("of the calling thread", stream_of_thread)),
    _info("new_stream", Check("of its own", separate_streams)),
    _info("use_stream", Check("ordered by events", streams), Check("after an error", stream_after_error)),
    _info("new_event", Check("recorded, timed", events)),
    _info("record_use", Check("memory in use elsewhere", record_use)),
    _info("synchronize", Check("all streams", synchronize)),
    _info("forbid_sync", Check("nested", guard), Check("after an error", guard_after_error)),
    _info("sync_depth", Check("counts scopes", guard)),
    _info("new_graph_pool", Check("shared by two graphs", pool)),
    _info("capture", Check("replays", capture)),
    _info("timer", Check("scopes", timers)),
    _info("read_timers", Check("once", timers)),
    _info("deterministic", Check("scopes", deterministic)),
)
