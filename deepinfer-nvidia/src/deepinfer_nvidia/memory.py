"""Memory that torch's caching allocator does not own: device memory for other processes, host memory a GPU reads.

Used where memory outlives steps and is shared: peers on one host, tables too large for the GPU. All of it is given back
by `close`, never by a destructor, because views of it may still be in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepinfer.hooks import BackendError
from deepinfer_nvidia.cuda import Cuda

PAGE = 4096
"""Bytes device memory is rounded up to."""

AsTensor = Callable[[Any], torch.Tensor]


class _Bytes:
    """An address as an object torch makes a tensor of, without a copy."""

    def __init__(self, pointer: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


def on_gpu(described: Any) -> torch.Tensor:
    """A tensor over memory that an object describes."""
    return torch.as_tensor(described, device="cuda")


class DeviceMemory:
    """Device memory outside of torch's allocator, own (`allocate`) or another process's (`open`)."""

    def __init__(self, cuda: Cuda, pointer: int, size: int, opened: bool) -> None:
        self._cuda, self._pointer, self.size, self._opened = cuda, pointer, size, opened

    @classmethod
    def allocate(cls, cuda: Cuda, size: int) -> DeviceMemory:
        """At least `size` bytes, uninitialised."""
        if size < 1:
            raise BackendError(f"device memory of {size} bytes, expected at least 1")
        rounded = -(-size // PAGE) * PAGE
        return cls(cuda, cuda.malloc(rounded), rounded, False)

    @classmethod
    def open(cls, cuda: Cuda, handle: bytes, size: int) -> DeviceMemory:
        """Another process's memory, by the handle it exported."""
        return cls(cuda, cuda.ipc_open(handle), size, True)

    def handle(self) -> bytes:
        """64 bytes with which another process of this host opens the memory."""
        self._require_open()
        if self._opened:
            raise BackendError("this memory belongs to another process; only its owner exports it")
        return self._cuda.ipc_handle(self._pointer)

    def tensor(self, as_tensor: AsTensor = on_gpu) -> torch.Tensor:
        """The memory as uint8 [size]; valid until `close`."""
        self._require_open()
        return as_tensor(_Bytes(self._pointer, self.size, self))

    def close(self) -> None:
        """Free it, or unmap it where another process owns it. May be called twice."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            (self._cuda.ipc_close if self._opened else self._cuda.free)(pointer)

    def _require_open(self) -> None:
        if not self._pointer:
            raise BackendError("this device memory has been given back")


class RegisteredMemory:
    """Host memory that the GPU reads over the bus: page-locked where it lies, whoever allocated it."""

    def __init__(self, cuda: Cuda, host: torch.Tensor) -> None:
        if host.device.type != "cpu" or not host.is_contiguous() or not host.nbytes:
            raise BackendError(
                f"registered memory is a contiguous host tensor with bytes in it; found {tuple(host.shape)} on "
                f"{host.device}, {'contiguous' if host.is_contiguous() else 'strided'}"
            )
        self.host, self._cuda = host, cuda
        self._pointer = cuda.register(host.data_ptr(), host.nbytes)

    def device_view(self, as_tensor: AsTensor = on_gpu) -> torch.Tensor:
        """The same bytes as a GPU tensor of the host tensor's dtype and shape; valid until `close`."""
        if not self._pointer:
            raise BackendError("this host memory is no longer registered")
        view = as_tensor(_Bytes(self._pointer, self.host.nbytes, self))
        return view.view(self.host.dtype).view(self.host.shape)

    def close(self) -> None:
        """Unlock the pages. May be called twice."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            self._cuda.unregister(self.host.data_ptr())
