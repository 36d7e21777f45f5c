"""The NVIDIA runtime without a GPU: every call that reaches CUDA is checked by a fake of cuda-python's boundary."""

# ruff: noqa: N801, N802, N815  the fakes have the library's names

from __future__ import annotations

import ctypes
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from deepinfer.errors import BackendError
from deepinfer.hooks import EXACT, OpContext
from deepinfer.hooks.devices.facts import MemoryInfo
from deepinfer_nvidia.cuda import Cuda
from deepinfer_nvidia.graphs import Graphs, graph_sizes
from deepinfer_nvidia.libraries import Libraries
from deepinfer_nvidia.memory import DeviceMemory, RegisteredMemory
from deepinfer_nvidia.runtime import Gpu, Runtime, cpu_list, host_place


class FakeBindings:
    """`cuda.bindings.runtime` over host memory; every function checks its arguments as the driver would."""

    cudaError_t = SimpleNamespace(cudaErrorNotReady=600)
    cudaGraphNodeType = SimpleNamespace(cudaGraphNodeTypeEventRecord=7)

    class cudaIpcMemHandle_t:
        def __init__(self):
            self.buffer = ctypes.create_string_buffer(64)

        def getPtr(self):
            return ctypes.addressof(self.buffer)

    def __init__(self):
        self.memory, self.registered, self.exported, self.opened = {}, {}, {}, {}
        self.events, self.recorded, self.nodes, self.node_sets = {}, [], {}, []
        self.clock, self.running, self.fail = 0.0, set(), None

    def cudaMalloc(self, size):
        if self.fail:
            return (self.fail, 0)
        assert size > 0 and size % 4096 == 0
        buffer = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(buffer)] = buffer
        return (0, ctypes.addressof(buffer))

    def cudaFree(self, pointer):
        del self.memory[pointer]
        return (0,)

    def cudaHostRegister(self, pointer, size, flags):
        assert flags == 3 and size > 0 and pointer not in self.registered
        self.registered[pointer] = size
        return (0,)

    def cudaHostGetDevicePointer(self, pointer, flags):
        assert flags == 0 and pointer in self.registered
        return (0, pointer)

    def cudaHostUnregister(self, pointer):
        del self.registered[pointer]
        return (0,)

    def cudaIpcGetMemHandle(self, pointer):
        assert pointer in self.memory
        handle = self.cudaIpcMemHandle_t()
        handle.buffer.raw = pointer.to_bytes(8, "little") + bytes(range(8, 64))
        self.exported[handle.buffer.raw] = pointer
        return (0, handle)

    def cudaIpcOpenMemHandle(self, handle, flags):
        assert flags == 1 and isinstance(handle, self.cudaIpcMemHandle_t)
        pointer = self.exported[handle.buffer.raw]
        self.opened[pointer] = self.opened.get(pointer, 0) + 1
        return (0, pointer)

    def cudaIpcCloseMemHandle(self, pointer):
        self.opened[pointer] -= 1
        return (0,)

    def cudaEventCreateWithFlags(self, flags):
        assert flags == 0  # timing on
        self.events[len(self.events) + 1] = None
        return (0, len(self.events))

    def cudaEventDestroy(self, event):
        self.events[event] = "destroyed"
        return (0,)

    def cudaEventRecordWithFlags(self, event, stream, flags):
        assert flags == 1 and stream == 77 and event in self.events  # external: a node of the graph
        self.recorded.append(event)
        self.nodes[f"node of {event}"] = event
        return (0,)

    def cudaEventQuery(self, event):
        return (600 if event in self.running else 0,)

    def cudaEventSynchronize(self, event):
        self.running.discard(event)
        return (0,)

    def cudaEventElapsedTime(self, start, end):
        assert start not in self.running and end not in self.running
        return (0, self.events[end] - self.events[start])

    def cudaGraphGetNodes(self, graph, count=0):
        assert graph == 11
        everything = ["kernel", *self.nodes]
        return (0, everything[:count], len(everything))

    def cudaGraphNodeGetType(self, node):
        return (0, 0 if node == "kernel" else 7)

    def cudaGraphEventRecordNodeGetEvent(self, node):
        return (0, self.nodes[node])

    def cudaGraphExecEventRecordNodeSetEvent(self, executable, node, event):
        assert executable == 12 and node in self.nodes and event in self.events
        self.node_sets.append((node, event))
        return (0,)

    def cudaGetErrorName(self, status):
        return (0, b"cudaErrorMemoryAllocation")

    def cudaGetErrorString(self, status):
        return (0, b"out of memory")


class FakeTorchCuda:
    """torch.cuda as far as captures need it. Replaying sets the events that the graph's nodes point at."""

    def __init__(self, bindings):
        self.bindings, self.log, self.reserved = bindings, [], 100
        self.outer = SimpleNamespace(name="outer", wait_stream=lambda s: self.log.append(("outer waits", s.name)))
        self.current = self.outer

    def Stream(self):
        self.log.append("new stream")
        return SimpleNamespace(
            name="capture", cuda_stream=77, wait_stream=lambda s: self.log.append(("capture waits", s.name)),
            synchronize=lambda: self.log.append("synchronize"),
        )  # fmt: skip

    def current_stream(self):
        return self.current

    @contextmanager
    def stream(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before

    def memory_reserved(self):
        return self.reserved

    def graph_pool_handle(self):
        return ("pool", 1)

    def CUDAGraph(self, keep_graph):
        assert keep_graph is True  # the nodes are looked at after the capture
        outer = self

        class Graph:
            def instantiate(self):
                outer.log.append("instantiate")

            def raw_cuda_graph(self):
                return 11

            def raw_cuda_graph_exec(self):
                assert "instantiate" in outer.log
                return 12

            def replay(self):
                outer.log.append("replay")
                for event in [event for _, event in outer.bindings.node_sets[-2:]]:
                    outer.bindings.clock += 1.5
                    outer.bindings.events[event] = outer.bindings.clock

            def reset(self):
                outer.log.append("reset")

        return Graph()

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local" and stream.name == "capture"
        self.log.append(("capture", pool))
        with self.stream(stream):
            yield
        self.reserved += 50


@pytest.fixture
def bindings():
    return FakeBindings()


@pytest.fixture
def cuda(bindings):
    return Cuda(bindings)


@pytest.fixture
def fake_torch(bindings):
    return FakeTorchCuda(bindings)


@pytest.fixture
def runtime(bindings, fake_torch, monkeypatch):
    """The runtime's own ops over the fakes."""
    graphs = Graphs(fake_torch, Cuda(bindings))
    made = Runtime(
        OpContext(torch.device("cpu"), EXACT, traits=None), Libraries({"cuda.bindings.runtime": bindings}), graphs
    )
    made._timers = OUTSIDE
    monkeypatch.setattr(
        made, "make_device", lambda device: SimpleNamespace(memory=lambda: MemoryInfo(1000, 500, 200, 300))
    )
    return made


OUTSIDE = SimpleNamespace(scope=lambda name: nullcontext(), read=lambda wait: {})
"""Timers outside of graphs, which are core's."""


def on_host(described):
    """A host tensor over the bytes an object describes; what torch does on a GPU."""
    layout = described.__cuda_array_interface__
    assert layout["typestr"] == "|u1" and layout["strides"] is None and layout["version"] == 3
    (size,), (pointer, read_only) = layout["shape"], layout["data"]
    assert read_only is False
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_device_memory_is_rounded_shared_and_freed(cuda, bindings):
    own = DeviceMemory.allocate(cuda, 5000)
    assert own.size == 8192
    own.tensor(on_host)[5] = 9
    handle = own.handle()
    assert len(handle) == 64 and handle[8:] == bytes(range(8, 64))
    peer = DeviceMemory.open(cuda, handle, own.size)
    assert peer.tensor(on_host)[5] == 9
    with pytest.raises(BackendError, match="belongs to another process"):
        peer.handle()
    peer.close()
    peer.close()
    assert set(bindings.opened.values()) == {0} and len(bindings.memory) == 1  # unmapped, not freed
    own.close()
    assert not bindings.memory
    with pytest.raises(BackendError, match="given back"):
        own.tensor(on_host)


def test_device_memory_that_cannot_be_had(cuda, bindings):
    with pytest.raises(BackendError, match="of 0 bytes"):
        DeviceMemory.allocate(cuda, 0)
    bindings.fail = 2
    with pytest.raises(BackendError, match=r"cudaMalloc failed: cudaErrorMemoryAllocation \(out of memory\)"):
        DeviceMemory.allocate(cuda, 1)
    with pytest.raises(BackendError, match="has 64 bytes, found 3"):
        DeviceMemory.open(cuda, b"abc", 4096)


def test_registered_memory_is_the_same_bytes(cuda, bindings):
    table = torch.arange(12, dtype=torch.int16).view(3, 4)
    registered = RegisteredMemory(cuda, table)
    assert bindings.registered == {table.data_ptr(): 24}
    view = registered.device_view(on_host)
    assert torch.equal(view, table)
    table[2, 3] = -7
    assert view[2, 3] == -7
    registered.close()
    registered.close()
    assert not bindings.registered
    with pytest.raises(BackendError, match="no longer registered"):
        registered.device_view(on_host)


@pytest.mark.parametrize("wrong", [torch.zeros(4, 4).T[1:], torch.zeros(0)])
def test_only_whole_host_tensors_are_registered(cuda, wrong):
    with pytest.raises(BackendError, match="a contiguous host tensor"):
        RegisteredMemory(cuda, wrong)


# --- graphs ---------------------------------------------------------------------------------------------------------


def test_sizes_are_powers_then_multiples_from_large_to_small():
    assert graph_sizes(40, 16) == [40, 32, 16, 8, 4, 2, 1]
    assert graph_sizes(16, 16) == [16, 8, 4, 2, 1]
    assert graph_sizes(5, 8) == [5, 4, 2, 1]
    assert graph_sizes(1, 1) == [1]
    with pytest.raises(BackendError, match="expected at least 1"):
        graph_sizes(0, 8)


def test_a_capture_is_warmed_up_on_its_stream_and_recorded_once(runtime, fake_torch):
    streams = []

    def work():
        streams.append(fake_torch.current_stream().name)
        return len(streams)

    pool = runtime.new_graph_pool()
    graph = runtime.capture(work, pool)
    assert streams == ["capture", "capture"]
    assert fake_torch.log == [
        "new stream", ("capture waits", "outer"), "synchronize", ("capture", ("pool", 1)), "instantiate",
        ("outer waits", "capture"),
    ]  # fmt: skip
    assert (graph.replay(), graph.replay(), len(streams)) == (2, 2, 2)
    assert fake_torch.current_stream().name == "outer"
    second = runtime.capture(work, pool)
    assert fake_torch.log.count("new stream") == 1  # warmed up streams stay
    graph.destroy()
    graph.destroy()
    assert fake_torch.log.count("reset") == 1
    with pytest.raises(BackendError, match="was destroyed"):
        graph.replay()
    assert second.replay() == 4


def test_the_memory_budget_counts_graphs(runtime):
    assert runtime.memory() == MemoryInfo(1000, 500, 200, 300)
    graph = runtime.capture(lambda: None, None)
    other = runtime.capture(lambda: None, None)
    assert runtime.memory() == MemoryInfo(1000, 500, 300, 400)
    graph.destroy()
    assert runtime.memory().allocated == 250
    other.destroy()
    assert runtime.memory().allocated == 200


def test_captures_do_not_nest_and_failures_leave_nothing(runtime, bindings):
    with pytest.raises(BackendError, match="do not nest"):
        runtime.capture(lambda: runtime._graphs.capturing and runtime.capture(lambda: None), None)
    calls = []

    def fails_while_recorded():
        calls.append(1)
        with runtime.timer("x"):
            if len(calls) == 2:
                raise ValueError("no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        runtime.capture(fails_while_recorded, None)
    assert set(bindings.events.values()) == {"destroyed"}
    assert runtime.memory().allocated == 200
    runtime.capture(lambda: None, None).replay()


def test_timers_in_a_graph_swap_their_events(runtime, bindings):
    def work():
        with runtime.timer("attention"):
            pass

    graph = runtime.capture(work, None)
    assert bindings.recorded == [1, 2] and len(bindings.events) == 4  # outside of the capture nothing is recorded
    graph.replay()
    graph.replay()
    first, second = bindings.node_sets[:2], bindings.node_sets[2:]
    assert first == [("node of 1", 1), ("node of 2", 2)]
    assert second == [("node of 1", 3), ("node of 2", 4)]
    assert runtime.read_timers() == {"attention": [1.5, 1.5]}
    assert runtime.read_timers() == {}
    bindings.running |= {2}
    graph.replay()
    assert runtime.read_timers() == {}  # still running
    assert runtime.read_timers(True) == {"attention": [1.5]}
    graph.replay()
    bindings.running |= {4}
    graph.replay()
    graph.replay()  # its events are needed again: that measurement is lost, nothing waits
    bindings.running.clear()
    assert len(runtime.read_timers()["attention"]) == 2


def test_without_cuda_python_graphs_work_untimed(fake_torch):
    context = OpContext(torch.device("cpu"), EXACT, traits=None)
    made = Runtime(context, Libraries({"cuda.bindings.runtime": None}), Graphs(fake_torch, None))
    made._timers = OUTSIDE

    def work():
        with made.timer("attention"):
            return 5

    assert made.capture(work, None).replay() == 5
    assert made.read_timers() == {}


# --- modes and facts ------------------------------------------------------------------------------------------------


def test_the_sync_guard_sets_torchs_mode(runtime, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with runtime.forbid_sync(), runtime.forbid_sync():
        assert modes == ["error"]
    assert modes == ["error", "default"]


def test_capabilities_say_what_is_there():
    found = Gpu.capabilities
    assert found.asynchronous and found.supports_graphs and found.sync_guard and found.timed_events
    assert found.pinned_memory and not found.batch_invariant  # cuBLAS picks by the number of rows


def test_the_place_in_the_host_comes_from_the_kernels_files(tmp_path):
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    (folder / "local_cpulist").write_text("8-10,24\n")
    assert host_place("0000:1b:00.0", tmp_path) == {"numa_node": 1, "host_cpus": (8, 9, 10, 24)}
    (folder / "numa_node").write_text("-1\n")
    assert host_place("0000:1b:00.0", tmp_path) == {}
    assert host_place("0000:ff:00.0", tmp_path) == {}
    assert cpu_list("0") == (0,)
