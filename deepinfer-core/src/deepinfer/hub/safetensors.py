"""A checkpoint directory in the published layout: index, shards, headers; tensors on demand.

The model's weight loader opens one, validates it against the manifest and reads what its rank needs. `open` looks at
the index and the shard headers only: an incomplete copy is refused within seconds, before anything is allocated. This
module knows files and names; which tensors a model needs is the manifest's business.

Data is read by byte range straight into the tensor's own memory, so a full load needs no more than the weights
themselves. `map_rows` maps instead of reading, for tables larger than memory.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import warnings
from collections.abc import Iterable, KeysView, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from deepinfer.errors import CheckpointError
from deepinfer.hub.checkpoint_check import compare
from deepinfer.hub.faults import Faults
from deepinfer.hub.safetensors_header import TensorInfo, read_header
from deepinfer.hub.tensor_spec import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
COPY_HINT = "The copy looks incomplete: download or copy the checkpoint again, then compare file names and sizes."

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
        directory = Path(directory)
        weight_map = _read_index(directory)
        shards = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
        _require_files(directory, shards)
        headers = _read_headers(directory, shards)
        return cls(directory, _merge(directory, headers, weight_map))

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
        """A whole tensor, in stored shape and dtype (`TORCH_DTYPES`); into `out` where given (contiguous, same size)."""
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
            raise CheckpointError(f"{self.directory}: {name}: found rows [{start}, {stop}), expected within [0, {rows})")
        row_bytes = info.nbytes // rows if rows else 0
        return info, info.start + start * row_bytes, (stop - start, *info.shape[1:])

    def _read(self, info: TensorInfo, first: int, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
        dtype = TORCH_DTYPES[info.dtype]
        tensor = torch.empty(shape, dtype=dtype) if out is None else out
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"out: found {found}, expected contiguous {dtype} {list(shape)}")
        if tensor.numel():
            # bytes are viewed flat: numpy knows neither bfloat16 nor the 8-bit floats, and 0-d has no byte view
            self._fill(info, memoryview(tensor.view(-1).view(torch.uint8).numpy()), first)
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


def _read_index(directory: Path) -> dict[str, str] | None:
    """{tensor: shard}; None for a checkpoint of one file without an index."""
    path = directory / INDEX_NAME
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: found no such directory, expected a checkpoint")
    if not path.exists():
        if (directory / SINGLE_NAME).exists():
            return None
        shards = len(list(directory.glob("*.safetensors")))
        found = f"found {shards} *.safetensors files and neither {INDEX_NAME} nor {SINGLE_NAME}"
        raise CheckpointError(f"{directory}: {found}, expected one of them. {COPY_HINT}")
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        valid = isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged index ({type(error).__name__}: {error}); copy it again") from None
    if not valid or not weight_map:
        raise CheckpointError(f'{path}: damaged index: found no "weight_map" of tensor and file names; copy it again')
    outside = [shard for shard in weight_map.values() if Path(shard).name != shard]
    if outside:
        raise CheckpointError(f"{path}: found shard {outside[0]!r}, expected a file name inside the directory")
    return weight_map


def _require_files(directory: Path, shards: Iterable[str]) -> None:
    faults = Faults(directory)
    for shard in shards:
        if not (directory / shard).is_file():
            faults.add(f"missing {shard}")
    known = set(shards)
    others = sorted(file.name for file in directory.glob("*.safetensors") if file.name not in known)
    hint = COPY_HINT
    if others:
        hint += f" Files that the index does not name: {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}."
    faults.raise_if_any(f"{len(faults.lines)} of {len(known)} shards named by the index are missing", hint)


def _read_headers(directory: Path, shards: Iterable[str]) -> dict[str, dict[str, TensorInfo]]:
    faults, headers = Faults(directory), {}
    for shard in shards:
        try:
            headers[shard] = read_header(directory / shard)
        except CheckpointError as error:
            faults.add(str(error))
    faults.raise_if_any("damaged shards", COPY_HINT)
    return headers


def _merge(
    directory: Path, headers: Mapping[str, Mapping[str, TensorInfo]], weight_map: Mapping[str, str] | None
) -> dict[str, TensorInfo]:
    """One table over all shards, checked against the index."""
    faults = Faults(directory)
    tensors: dict[str, TensorInfo] = {}
    for shard, infos in headers.items():
        for written, info in infos.items():
            name = written.removeprefix("model.")
            if name in tensors:
                other = tensors[name].file.name
                faults.add(f"{name}: found twice, in {other} and in {shard} (with and without 'model.' is the same name)")
            tensors[name] = info
    if weight_map is not None:
        _check_index(tensors, weight_map, faults)
    faults.raise_if_any("index and shards disagree", f"{INDEX_NAME} may be of an older conversion. {COPY_HINT}")
    return tensors


def _check_index(tensors: Mapping[str, TensorInfo], weight_map: Mapping[str, str], faults: Faults) -> None:
    indexed: dict[str, Any] = {}
    for written, shard in weight_map.items():
        name = written.removeprefix("model.")
        if name in indexed:
            faults.add(f"{name}: the index has it with and without the prefix 'model.', expected one spelling")
        indexed[name] = shard
        if name not in tensors:
            faults.add(f"{name}: the index says {shard}, but no shard has it")
        elif tensors[name].file.name != shard:
            faults.add(f"{name}: the index says {shard}, found in {tensors[name].file.name}")
    for name, info in tensors.items():
        if name not in indexed:
            faults.add(f"{name}: found in {info.file.name}, but the index does not list it")
