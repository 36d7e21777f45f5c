"""Tensors inside whatever crosses a hook: walking results and operands, copies of them, shared memory.

Used by the op records and by levels 1 and 2. Walks tuples, lists, dicts, dataclasses and plain objects; a provider's
private objects are walked like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from deepinfer.hooks import OpTable, QuantTensor, StepInputs

_LEAVES = (str, bytes, int, float, bool, type(None), type, ModuleType, FunctionType, MethodType, torch.dtype,
           torch.device, OpTable)  # fmt: skip


COPY_LIMIT = 1 << 30
"""Bytes of the largest tensor that is copied to see whether an op changes it."""


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, part) of a compound value; nothing for a leaf."""
    if isinstance(value, (*_LEAVES, torch.Tensor, np.ndarray)):
        return
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple)):
        yield from ((str(i), part) for i, part in enumerate(value))
    elif is_dataclass(value):
        skipped = ("scratch", "plan") if isinstance(value, StepInputs) else ()
        yield from ((f.name, getattr(value, f.name)) for f in fields(value) if f.name not in skipped)
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, tensor) of every tensor in a nest; host arrays count as tensors. Shared objects are seen once."""
    seen: set[int] = set()
    stack = [(name, value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield path, item
        elif isinstance(item, np.ndarray):
            yield path, torch.from_numpy(np.asarray(item))
        else:
            parts = list(children(item))
            if not parts or id(item) in seen:
                continue
            seen.add(id(item))
            stack += [(f"{path}.{key}" if path else key, part) for key, part in reversed(parts)]


def values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of a result as its reader sees it: a quantized tensor is one leaf, so is anything else."""
    if isinstance(value, QuantTensor):
        yield name, value
        return
    parts = list(children(value))
    if not parts:
        yield name, value
    for key, part in parts:
        yield from values(part, f"{name}.{key}" if name else key)


def named(result: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """A result's parts by name: one name for a single result, else one for each element."""
    if len(names) == 1:
        return {names[0]: result}
    parts = list(result) if isinstance(result, (tuple, list)) else [part for _, part in children(result)]
    if len(parts) != len(names):
        raise TypeError(f"returned {len(parts)} values, expected {', '.join(names)}")
    return dict(zip(names, parts, strict=True))


def dense(leaf: Any) -> Any:
    """What a leaf says as a tensor: a quantized one is dequantized, an unrounded one gives its exact numbers."""
    if isinstance(leaf, QuantTensor):
        return getattr(leaf, "exact", None) if hasattr(leaf, "exact") else leaf.dequantize()
    return leaf


def snapshot(value: Any) -> dict[str, torch.Tensor]:
    """Copies of every tensor in a nest, those of more than `COPY_LIMIT` bytes left out."""
    return {name: tensor.detach().clone() for name, tensor in tensors(value) if tensor.nbytes <= COPY_LIMIT}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes, so that NaN equals NaN and 0 differs from -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = (t.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(x, y))


def memory(value: Any) -> dict[int, str]:
    """{address of a storage: name of a tensor in it} of a nest; empty tensors have none."""
    return {t.untyped_storage().data_ptr(): name for name, t in tensors(value) if t.numel()}
