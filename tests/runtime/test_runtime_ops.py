"""RuntimeOps: the same checks on the CPU and on torch's accelerator, where this machine has one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from deepinfer.errors import BackendError, OpError
from deepinfer.hooks.api import OpContext
from deepinfer.hooks.devices.facts import RuntimeCapabilities
from deepinfer.hooks.ops.runtime import RuntimeOps
from deepinfer.hooks.types import EXACT

DEVICES = ["cpu"] + ([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])


def make(device: str, settings: object = None, kind: type[RuntimeOps] = RuntimeOps) -> RuntimeOps:
    return kind(OpContext(torch.device(device), EXACT, traits=None, settings=settings))


@pytest.fixture(params=DEVICES)
def runtime(request: pytest.FixtureRequest) -> RuntimeOps:
    ops = make(request.param)
    ops.select(0)
    return ops


def test_capabilities_are_cautious_by_default() -> None:
    assert not any(getattr(RuntimeCapabilities(), name) for name in RuntimeCapabilities.__slots__)
    assert make("cpu").capabilities() == RuntimeCapabilities()


def test_every_rank_of_a_host_shares_its_cpu() -> None:
    assert make("cpu").select(7) == torch.device("cpu")


def test_missing_accelerator_is_an_error_not_the_cpu() -> None:
    with pytest.raises(BackendError, match="the backend computes on 'meta'"):
        make("meta").select(0)


def test_properties_and_memory(runtime: RuntimeOps) -> None:
    properties, memory = runtime.properties(), runtime.memory()
    assert properties.name and properties.cores >= 1
    assert properties.memory == memory.total > 1 << 28
    assert 0 <= memory.free <= memory.total
    assert 0 <= memory.allocated <= memory.peak


_ALLOCATION = """
import torch
from deepinfer.hooks import SMOOTH, OpContext
from deepinfer.hooks.ops import RuntimeOps

runtime = RuntimeOps(OpContext(torch.device("cpu"), SMOOTH, None))
size = 1 << 27
before = runtime.memory().allocated
block = torch.ones(size, dtype=torch.uint8)
assert runtime.memory().allocated - before > size * 0.9
assert runtime.memory().peak - before > size * 0.9
del block
runtime.empty_cache()
assert runtime.memory().allocated - before < size * 0.5
if runtime.reset_peak_memory():
    assert runtime.memory().peak - before < size * 0.5
"""


def test_allocation_shows_in_memory() -> None:
    """In a fresh process: in this one the allocator may serve the block from what other tests have freed."""
    subprocess.run([sys.executable, "-c", _ALLOCATION], check=True, timeout=120)


def test_pinned_copy_round_trip(runtime: RuntimeOps) -> None:
    device = runtime.select(0)
    source, back = (runtime.pinned((3, 5), torch.int32) for _ in range(2))
    source.copy_(torch.arange(15).view(3, 5))
    assert source.is_pinned() == runtime.capabilities().pinned_memory
    there = torch.empty(3, 5, dtype=torch.int32, device=device)
    assert runtime.copy(there, source) is there
    runtime.copy(back, there)
    done = runtime.new_event()
    done.record()
    done.synchronize()
    assert done.query() and torch.equal(back, source)


def test_streams_are_ordered_by_events(runtime: RuntimeOps) -> None:
    device, main, side = runtime.select(0), runtime.current_stream(), runtime.new_stream()
    x, ready = torch.zeros(1 << 20, device=device), runtime.new_event()
    with runtime.use_stream(side) as inside:
        assert inside is side and runtime.current_stream() == side != main
        x.add_(1)
        ready.record(side)
        runtime.record_use(x, side)
    assert runtime.current_stream() == main
    main.wait_event(ready)
    x.mul_(3)
    side.wait_stream(main)
    with runtime.use_stream(side):
        total = x.sum()
    main.wait_event(side.record_event())
    assert total.item() == 3 * x.numel()
    side.synchronize()
    assert side.query()


def test_current_stream_belongs_to_the_thread(runtime: RuntimeOps) -> None:
    side, seen = runtime.new_stream(), []
    with runtime.use_stream(side):
        thread = threading.Thread(target=lambda: seen.append(runtime.current_stream()))
        thread.start()
        thread.join()
    assert seen and seen[0] != side


def test_stream_scope_ends_after_an_error(runtime: RuntimeOps) -> None:
    before = runtime.current_stream()
    with pytest.raises(KeyError), runtime.use_stream(runtime.new_stream()):
        raise KeyError
    assert runtime.current_stream() == before


def test_event_times() -> None:
    runtime = make("cpu")
    start, end = runtime.new_event(True), runtime.new_event(True)
    start.record()
    time.sleep(0.02)
    end.record()
    assert 19 <= start.elapsed_time(end) < 2000
    with pytest.raises(OpError, match="the end event keeps no time"):
        start.elapsed_time(runtime.new_event())
    with pytest.raises(OpError, match="the start event was never recorded"):
        runtime.new_event(True).elapsed_time(end)


def test_timers_are_read_once(runtime: RuntimeOps) -> None:
    device = runtime.select(0)
    for _ in range(2):
        with runtime.timer("product"):
            torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
    with pytest.raises(KeyError), runtime.timer("broken"):
        raise KeyError
    times = runtime.read_timers(True)
    assert {name: len(values) for name, values in times.items()} == {"product": 2, "broken": 1}
    assert all(ms >= 0 for values in times.values() for ms in values)
    assert runtime.read_timers() == {}


def test_unfinished_timers_stay_for_the_next_read() -> None:
    class LateEvent:
        done = False

        def record(self) -> None: ...
        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            LateEvent.done = True

        def elapsed_time(self, end: LateEvent) -> float:
            return 2.5

    class LateRuntime(RuntimeOps):
        def new_event(self, timed: bool = False) -> LateEvent:
            return LateEvent()

    runtime = make("cpu", kind=LateRuntime)
    with runtime.timer("step"):
        pass
    assert runtime.read_timers() == {}
    assert runtime.read_timers(True) == {"step": [2.5]}


class GuardedRuntime(RuntimeOps):
    """Records when the device's own guard is switched."""

    def __init__(self, context: OpContext) -> None:
        super().__init__(context)
        self.switches: list[bool] = []

    def switch_sync_guard(self, on: bool) -> None:
        self.switches.append(on)


def test_sync_guard_nests_and_switches_once() -> None:
    runtime = make("cpu", kind=GuardedRuntime)
    with runtime.forbid_sync():
        with pytest.raises(KeyError), runtime.forbid_sync():
            assert runtime.sync_depth() == 2
            raise KeyError
        assert runtime.sync_depth() == 1 and runtime.switches == [True]
    assert runtime.sync_depth() == 0 and runtime.switches == [True, False]


def test_sync_guard_is_shared_by_threads() -> None:
    runtime = make("cpu", kind=GuardedRuntime)
    barrier = threading.Barrier(8)

    def work() -> None:
        with runtime.forbid_sync():
            barrier.wait(timeout=10)  # all eight scopes are open now
            assert runtime.sync_depth() >= 1
            barrier.wait(timeout=10)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not barrier.broken and runtime.sync_depth() == 0 and runtime.switches == [True, False]


def test_sync_guard_can_be_disabled() -> None:
    runtime = make("cpu", settings=SimpleNamespace(disable_sync_guard=True), kind=GuardedRuntime)
    with runtime.forbid_sync():
        assert runtime.sync_depth() == 0
    assert runtime.switches == []


def test_capture_replays_with_new_inputs(runtime: RuntimeOps) -> None:
    device = runtime.select(0)
    x, weight = torch.ones(4, device=device), torch.full((4,), 2.0, device=device)
    graph = runtime.capture(lambda: x * weight, runtime.new_graph_pool())
    assert graph.replay().tolist() == [2.0] * 4
    x.fill_(5)
    assert graph.replay().tolist() == [10.0] * 4
    graph.destroy()
    graph.destroy()
    with pytest.raises(OpError, match="destroyed"):
        graph.replay()


def test_deterministic_scope_restores_the_mode() -> None:
    runtime = make("cpu")
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(KeyError), runtime.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        with runtime.deterministic(False):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == fill


def test_warm_up_and_synchronize(runtime: RuntimeOps) -> None:
    runtime.warm_up()
    runtime.synchronize()
    assert runtime.current_stream().query()


def test_make_device_exchanges_everything_below_the_ops() -> None:
    class Fast:
        capabilities = RuntimeCapabilities(supports_graphs=True)

    class FastRuntime(RuntimeOps):
        def make_device(self, device: torch.device) -> Fast:
            return Fast()

    assert make("cpu", kind=FastRuntime).capabilities().supports_graphs
