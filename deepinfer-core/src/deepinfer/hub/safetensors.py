"""A checkpoint directory in the published layout: index, shards, headers; tensors on demand.

The model's weight loader opens one, validates it against the manifest and reads what its rank needs. `open` looks at
the index and the shard headers only: an incomplete copy is refused within seconds, before anything is allocated. This
module knows files and names; which tensors a model needs is the manifest's business.

Data is read by byte range straight into the tensor's own memory, so a full load needs no more than the weights
themselves. `map_rows` maps instead of reading, for tables larger than memory.
"""

from __future__ import annotations

import io
import mmap
import os
import warnings
from collections.abc import Iterable, KeysView, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from deepinfer.errors import CheckpointError
from deepinfer.hub.checkpoint_check import compare
from deepinfer.hub.safetensors_header import TensorInfo
from deepinfer.hub.safetensors_index import scan
from deepinfer.hub.tensor_spec import TensorSpec

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.uint8,  # packed 4-bit values: bytes, not numbers
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # exponent bytes, value 2^(byte - 127)
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""dtype of the tensors handed out, by safetensors dtype name."""


class TensorSource(Protocol):
    """What the weight loader reads from: a `Checkpoint`, or generated weights of the same names and formats."""

    @property
    def names(self) -> Iterable[str]: ...
    def read(self, name: str) -> torch.Tensor: ...
    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor: ...
    def map_rows(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor: ...


class Checkpoint:
    """An opened checkpoint. Names are published names; a `model.` prefix in the files is dropped."""

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
        """Use `open`."""
        self.directory = directory
        self._tensors = tensors
        self._files: dict[Path, io.FileIO] = {}

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read index and headers. Raises CheckpointError listing every missing, damaged or contradictory file."""
        return cls(Path(directory), scan(Path(directory)))

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.nbytes for info in self._tensors.values())

    def info(self, name: str) -> TensorInfo:
        """dtype, shape and place of a tensor. Raises CheckpointError for an unknown name."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: has no tensor {name!r}") from None

    def validate(self, manifest: Mapping[str, TensorSpec]) -> None:
        """Raise CheckpointError unless names, dtypes and shapes are exactly the manifest's. Reads no data."""
        compare(self.directory, self._tensors, manifest)

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """A whole tensor in stored shape and dtype (`TORCH_DTYPES`); into `out` where given (contiguous, same kind)."""
        info = self.info(name)
        return self._read(info, info.start, info.shape, out)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor, read from their byte range alone."""
        info, first, shape = self._rows(name, start, stop)
        return self._read(info, first, shape, None)

    def map_rows(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) mapped into memory: pages are read when touched. Read-only: writing to it crashes."""
        info, first, shape = self._rows(name, start, stop)
        nbytes = int(np.prod(shape, dtype=np.int64)) * TORCH_DTYPES[info.dtype].itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=TORCH_DTYPES[info.dtype])
        page = first // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(self._file(info.file).fileno(), first - page + nbytes, access=mmap.ACCESS_READ, offset=page)
        array = np.frombuffer(mapping, np.uint8, nbytes, first - page)
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; a writable private mapping would be charged as memory
            warnings.filterwarnings("ignore", message=".*not writable.*")
            data = torch.from_numpy(array)
        return data.view(TORCH_DTYPES[info.dtype]).view(shape)

    def close(self) -> None:
        """Close the shard files. Mapped tensors stay valid."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _rows(self, name: str, start: int, stop: int | None) -> tuple[TensorInfo, int, tuple[int, ...]]:
        """Info of a tensor, absolute first byte and shape of a range of its rows."""
        info = self.info(name)
        if not info.shape:
            raise CheckpointError(f"{self.directory}: {name}: has no rows (shape [])")
        rows = info.shape[0]
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            found = f"rows [{start}, {stop})"
            raise CheckpointError(f"{self.directory}: {name}: found {found}, expected a range within [0, {rows})")
        row_bytes = info.nbytes // rows if rows else 0
        return info, info.start + start * row_bytes, (stop - start, *info.shape[1:])

    def _read(self, info: TensorInfo, first: int, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
        """Bytes from `first` on as a tensor of `shape`, in new memory or in `out`."""
        dtype = TORCH_DTYPES[info.dtype]
        tensor = torch.empty(shape, dtype=dtype) if out is None else out
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"out: found {found}, expected contiguous {dtype} {list(shape)}")
        if tensor.numel():
            # bytes are viewed flat: numpy knows neither bfloat16 nor the 8-bit floats, and 0-d has no byte view
            self._fill(info, tensor.view(-1).view(torch.uint8).numpy().data, first)
        return tensor

    def _fill(self, info: TensorInfo, buffer: memoryview, position: int) -> None:
        descriptor = self._file(info.file).fileno()
        while buffer:
            count = os.preadv(descriptor, [buffer], position)
            if count == 0:
                raise CheckpointError(f"{info.file}: became shorter while it was read: nothing at byte {position}")
            buffer, position = buffer[count:], position + count

    def _file(self, path: Path) -> io.FileIO:
        if path not in self._files:
            self._files[path] = io.FileIO(path, "rb")
        return self._files[path]
