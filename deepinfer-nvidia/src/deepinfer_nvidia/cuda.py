"""The CUDA runtime through cuda-python, with errors as exceptions. Called by `memory`, `graphs` and `timers`.

Every binding returns a tuple whose first element is a status. Handles (pointers, events, nodes) travel as integers.
"""

from __future__ import annotations

import ctypes
from typing import Any

from deepinfer.hooks import BackendError

IPC_BYTES = 64
"""Size of an IPC handle."""

HOST_MAPPED, HOST_PORTABLE = 2, 1
EVENT_EXTERNAL = 1
IPC_LAZY_PEERS = 1


class Cuda:
    """`cuda.bindings.runtime`, or what stands for it in tests."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def call(self, name: str, *arguments: Any) -> Any:
        """A function's result without its status: nothing, one value, or a tuple. Raises `BackendError`."""
        status, *values = getattr(self._bindings, name)(*arguments)
        if int(status):
            raise BackendError(f"{name} failed: {self.reason(status)}")
        return values[0] if len(values) == 1 else tuple(values) or None

    def reason(self, status: Any) -> str:
        """Name and text of a status."""
        (_, name), (_, text) = self._bindings.cudaGetErrorName(status), self._bindings.cudaGetErrorString(status)
        return f"{name.decode()} ({text.decode()})"

    # memory

    def malloc(self, size: int) -> int:
        return int(self.call("cudaMalloc", size))

    def free(self, pointer: int) -> None:
        self.call("cudaFree", pointer)

    def register(self, pointer: int, size: int) -> int:
        """Page-lock host memory for all devices; returns its address on the device."""
        self.call("cudaHostRegister", pointer, size, HOST_MAPPED | HOST_PORTABLE)
        return int(self.call("cudaHostGetDevicePointer", pointer, 0))

    def unregister(self, pointer: int) -> None:
        self.call("cudaHostUnregister", pointer)

    def ipc_handle(self, pointer: int) -> bytes:
        """What another process opens this memory with."""
        handle = self.call("cudaIpcGetMemHandle", pointer)
        return ctypes.string_at(int(handle.getPtr()), IPC_BYTES)

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's memory; peers are enabled when first used. Raises `BackendError` for a short handle."""
        if len(handle) != IPC_BYTES:
            raise BackendError(f"an IPC handle has {IPC_BYTES} bytes, found {len(handle)}")
        opened = self._bindings.cudaIpcMemHandle_t()
        ctypes.memmove(int(opened.getPtr()), handle, IPC_BYTES)
        return int(self.call("cudaIpcOpenMemHandle", opened, IPC_LAZY_PEERS))

    def ipc_close(self, pointer: int) -> None:
        self.call("cudaIpcCloseMemHandle", pointer)

    # events

    def new_event(self) -> int:
        """A timed event."""
        return int(self.call("cudaEventCreateWithFlags", 0))

    def destroy_event(self, event: int) -> None:
        self.call("cudaEventDestroy", event)

    def record_external(self, event: int, stream: int) -> None:
        """Record while a stream is captured, so that the event is a node of the graph."""
        self.call("cudaEventRecordWithFlags", event, stream, EVENT_EXTERNAL)

    def finished(self, event: int) -> bool:
        """Whether an event has happened."""
        status = self._bindings.cudaEventQuery(event)[0]
        if int(status) == int(self._bindings.cudaError_t.cudaErrorNotReady):
            return False
        if int(status):
            raise BackendError(f"cudaEventQuery failed: {self.reason(status)}")
        return True

    def wait(self, event: int) -> None:
        self.call("cudaEventSynchronize", event)

    def milliseconds(self, start: int, end: int) -> float:
        return float(self.call("cudaEventElapsedTime", start, end))

    # graphs

    def event_nodes(self, graph: int) -> dict[int, Any]:
        """{event: node that records it} of a graph."""
        _, count = self.call("cudaGraphGetNodes", graph, 0)
        nodes, _ = self.call("cudaGraphGetNodes", graph, count)
        record = int(self._bindings.cudaGraphNodeType.cudaGraphNodeTypeEventRecord)
        recording = [node for node in nodes[:count] if int(self.call("cudaGraphNodeGetType", node)) == record]
        return {int(self.call("cudaGraphEventRecordNodeGetEvent", node)): node for node in recording}

    def set_event(self, executable: int, node: Any, event: int) -> None:
        """Let a node of an instantiated graph record another event from the next launch on."""
        self.call("cudaGraphExecEventRecordNodeSetEvent", executable, node, event)
