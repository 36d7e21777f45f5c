"""Looks over a checkpoint directory before anything is read: index, shard files, headers, and whether they agree.

Called by `Checkpoint.open`; the result is the place of every tensor. A missing, truncated or stale file is found here,
within seconds, whatever the size of the checkpoint. It does not know which tensors a model needs.

Rules: every shard that the index names must exist; every tensor must be where the index says; a shard must hold no
tensor that the index does not list; a name may be written with or without the prefix `model.`, not both. Shards that
the index does not name are not part of the checkpoint and not opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from deepinfer.errors import CheckpointError
from deepinfer.hub import strict_json
from deepinfer.hub.faults import Faults
from deepinfer.hub.safetensors_header import TensorInfo, read_header

INDEX_NAME = "model.safetensors.index.json"
"""Names the shard of every tensor."""
SINGLE_NAME = "model.safetensors"
"""The only shard of a checkpoint without an index."""
COPY_HINT = "The copy looks incomplete: download or copy the checkpoint again, then compare file names and sizes."


def scan(directory: Path) -> dict[str, TensorInfo]:
    """Place of every tensor by name without prefix. Raises CheckpointError listing everything that is wrong."""
    weight_map = _read_index(directory)
    shards = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
    _require_files(directory, shards)
    headers = _read_headers(directory, shards)
    return _merge(directory, headers, weight_map)


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
        weight_map = strict_json.loads(path.read_text(encoding="utf-8"))["weight_map"]
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
                faults.add(f"{name}: found twice, in {other} and in {shard} (a prefix 'model.' makes no other name)")
            tensors[name] = info
    if weight_map is not None:
        _check_index(tensors, weight_map, faults)
    faults.raise_if_any("index and shards disagree", f"{INDEX_NAME} may be of an older conversion. {COPY_HINT}")
    return tensors


def _check_index(tensors: Mapping[str, TensorInfo], weight_map: Mapping[str, str], faults: Faults) -> None:
    indexed: dict[str, str] = {}
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
