"""Imports the pure-torch references of the `tile_kernels` wheel on a machine without its device compilers.

Used by the tests of this folder as an oracle written independently of `deepinfer.reference`. The wheel's kernels need
`tilelang`; its references only ask that module for two constants. So a stand-in takes its place in `sys.modules`, the
package's own `__init__` files (which import kernels) are skipped, and `torch.compile` is the identity meanwhile.
A missing wheel is an error, never a skip.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

INSTALL = "pip install --no-deps --ignore-requires-python tile_kernels==2.1.0"


class _Language(types.ModuleType):
    """Stand-in for `tilelang.language`: two numeric limits, any other attribute a decorator that changes nothing."""

    float8_e4m3fn = "float8_e4m3fn"
    float4_e2m1fn = "float4_e2m1fn"

    @staticmethod
    def max_value(dtype: str) -> float:
        """Largest finite number of a format."""
        return {"float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0}[dtype]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _transparent


def _transparent(*args: Any, **kwargs: Any) -> Any:
    """Works as `@decorator`, as `@decorator(...)` and as an annotation."""
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else (lambda function: function)


def _package(name: str, folder: Path) -> types.ModuleType:
    """An empty package whose submodules are found in `folder`."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    return module


@contextlib.contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    language = _Language("tilelang.language")
    tilelang = types.ModuleType("tilelang")
    tilelang.language = language  # type: ignore[attr-defined]
    modules = {
        "tilelang": tilelang,
        "tilelang.language": language,
        "tile_kernels": _package("tile_kernels", folder),
        "tile_kernels.quant": _package("tile_kernels.quant", folder / "quant"),
    }

    def identity(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return function if function is not None else (lambda inner: inner)

    with mock.patch.dict(sys.modules, modules), mock.patch.object(torch, "compile", identity):
        yield


@functools.cache
def tile_kernels() -> types.ModuleType:
    """The module `tile_kernels.torch`; `ModuleNotFoundError` with the install command if the wheel is missing."""
    spec = importlib.util.find_spec("tile_kernels")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"tile_kernels is not installed; these tests compare with it: {INSTALL}")
    with _stand_ins(Path(spec.origin).parent):
        return importlib.import_module("tile_kernels.torch")
