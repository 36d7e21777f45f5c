"""Reads and checks the header of one safetensors file: which tensors it holds and where. Reads no tensor data.

Called by `safetensors.py` for each shard. The format: 8 bytes little-endian header length, that many bytes of JSON
{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}, then the data, without gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.errors import CheckpointError
from deepinfer.hub import strict_json
from deepinfer.hub.tensor_spec import BITS

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format; a larger number means that the file is not a safetensors file."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: dtype (safetensors name), shape, file, absolute byte range [start, start + nbytes)."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of a file by the name written there. Raises CheckpointError naming file, found and expected."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = _header_length(path, file.read(8), size)
            entries = _parse(path, file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror or error})") from None
    data_start = 8 + length
    infos = {name: _info(path, name, entry, data_start) for name, entry in entries.items()}
    _check_layout(path, infos, data_start, size)
    return infos


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > MAX_HEADER_BYTES or length < 2:
        raise CheckpointError(f"{path.name}: not a safetensors file ({size} bytes, no valid header length)")
    if 8 + length > size:
        raise CheckpointError(
            f"{path.name}: truncated: the header alone has {8 + length} bytes, the file has {size}; copy it again"
        )
    return length


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = strict_json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path.name}: damaged header: {error}") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path.name}: damaged header: found a {type(entries).__name__}, expected an object")
    entries.pop("__metadata__", None)
    return entries


def _info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(value) is int and value >= 0 for value in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        found = f"{entry!r:.120}"
        expected = '"dtype", "shape" and "data_offsets" [begin, end]'
        raise CheckpointError(f"{path.name}: {name}: found header entry {found}, expected {expected}") from None
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{path.name}: {name}: found dtype {dtype!r}, expected one of {', '.join(BITS)}")
    nbytes = math.prod(shape) * BITS[dtype] // 8
    if end - begin != nbytes:
        found = f"{end - begin} bytes in data_offsets [{begin}, {end}]"
        raise CheckpointError(f"{path.name}: {name}: found {found}, expected {nbytes} for {dtype} {shape}")
    return TensorInfo(dtype, tuple(shape), path, data_start + begin, nbytes)


def _check_layout(path: Path, infos: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """Tensors must follow each other without gap or overlap and end where the file ends."""
    position = data_start
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != position:
            found, expected = info.start - data_start, position - data_start
            raise CheckpointError(f"{path.name}: {name}: found data at offset {found}, expected {expected} (no gaps)")
        position += info.nbytes
    if position > size:
        raise CheckpointError(
            f"{path.name}: truncated: the header describes {position} bytes, the file has {size}; copy it again"
        )
    if position < size:
        raise CheckpointError(f"{path.name}: found {size} bytes, expected {position}: data that no tensor owns")
