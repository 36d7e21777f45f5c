"""Copies of a good checkpoint that a test may damage, and a safetensors editor that shares no code with the product."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Entry = tuple[str, list[int], bytes]
"""dtype, shape, data"""
Edit = Callable[[dict[str, Entry]], None]


@pytest.fixture
def copy(checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny checkpoint of its own: files are hard links, so replace them, never write into them."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(checkpoints("tiny"), directory, copy_function=os.link)
    return directory


@pytest.fixture
def edit_shard() -> Callable[[Path, Edit], None]:
    """`edit_shard(path, edit)` rewrites a shard after `edit` has changed its {name: (dtype, shape, data)}."""

    def run(path: Path, edit: Edit) -> None:
        tensors = read_shard(path)
        edit(tensors)
        write_shard(path, tensors)

    return run


@pytest.fixture
def edit_index(copy: Path) -> Callable[[Callable[[dict[str, str]], None]], None]:
    """`edit_index(edit)` rewrites the index of `copy` after `edit` has changed its {name: shard}."""

    def run(edit: Callable[[dict[str, str]], None]) -> None:
        path = copy / "model.safetensors.index.json"
        index = json.loads(path.read_text(encoding="utf-8"))
        edit(index["weight_map"])
        replace(path, json.dumps(index).encode())

    return run


def read_shard(path: Path) -> dict[str, Entry]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], content[start + begin : start + end])
    return tensors


def write_shard(path: Path, tensors: dict[str, Entry]) -> None:
    header, position = {"__metadata__": {"format": "pt", "note": "only metadata"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    replace(path, b"".join([len(text).to_bytes(8, "little"), text, *(data for _, _, data in tensors.values())]))


def replace(path: Path, content: bytes) -> None:
    """Write a new file under the name, leaving other links to the old one alone."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    fresh.replace(path)
