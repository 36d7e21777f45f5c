"""The public surface for plugins: contracts, records, markers, the data that crosses a hook, and how to open it all.

Everything is resolved on first use, so that a backend's entry module can take `Backend` and `Requires` from here
without importing torch or pluggy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.hooks.api import (
        CANONICAL, OpContext, OpGroup, OpSpec, Provides, hookimpl, hookspec, op, provides,
    )  # fmt: skip
    from deepinfer.hooks.bind import Contribution
    from deepinfer.hooks.build import build_ops
    from deepinfer.hooks.discover import survey
    from deepinfer.hooks.failure import op_failures
    from deepinfer.hooks.load import LoadedBackend, open_backend
    from deepinfer.hooks.manifest import Manifest
    from deepinfer.hooks.record import PLUGIN_API, Backend, OpPack, Requires
    from deepinfer.hooks.table import Binding, OpTable, Provider
    from deepinfer.hooks.trace import Tracer
    from deepinfer.hooks.types import *  # noqa: F403
    from deepinfer.hooks.visibility import Visibility, read_visibility

_HOMES = {
    "record": ("PLUGIN_API", "Backend", "OpPack", "Requires"),
    "api": ("CANONICAL", "OpContext", "OpGroup", "OpSpec", "Provides", "hookimpl", "hookspec", "op", "provides"),
    "types": (
        "EXACT", "SMOOTH", "CacheSpec", "EntryRows", "KVCache", "ModelTraits", "Numerics", "QuantTensor",
        "RingRows", "Selection", "SequenceSpan", "StepInputs", "StepViews", "Weight",
    ),
    "bind": ("Contribution",),
    "build": ("build_ops",),
    "discover": ("survey",),
    "failure": ("op_failures",),
    "load": ("LoadedBackend", "open_backend"),
    "manifest": ("Manifest",),
    "table": ("Binding", "OpTable", "Provider"),
    "trace": ("Tracer",),
    "visibility": ("Visibility", "read_visibility"),
}  # fmt: skip
"""{module of this package: public names it defines}"""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
