"""The public surface for plugins: contracts, records, markers, the data that crosses a hook, and how to open it all.

Everything is resolved on first use, so that a backend's entry module can take `Backend` and `Requires` from here
without importing torch or pluggy.
"""

# ruff: noqa: F401, I001  the imports below are for type checkers; at run time `__getattr__` does their work
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.errors import BackendError, DeepInferError, OpBindingError, OpError, UnsupportedError
    from deepinfer.hooks.api import (
        CANONICAL, OpContext, OpGroup, OpSpec, Provides, hookimpl, hookspec, op, provides,
    )  # fmt: skip
    from deepinfer.hooks.bind import Contribution
    from deepinfer.hooks.build import build_ops
    from deepinfer.hooks.devices.facts import DeviceProperties, MemoryInfo, RuntimeCapabilities
    from deepinfer.hooks.discover import survey
    from deepinfer.hooks.failure import op_failures
    from deepinfer.hooks.load import LoadedBackend, open_backend
    from deepinfer.hooks.manifest import Manifest
    from deepinfer.hooks.ops.communicator import CommunicatorCapabilities
    from deepinfer.hooks.record import PLUGIN_API, Backend, OpPack, Requires
    from deepinfer.hooks.table import Binding, OpTable, Provider
    from deepinfer.hooks.trace import Tracer
    from deepinfer.hooks.types import *  # noqa: F403
    from deepinfer.hooks.visibility import Visibility, read_visibility

_HOMES = {
    "deepinfer.errors": ("BackendError", "DeepInferError", "OpBindingError", "OpError", "UnsupportedError"),
    "deepinfer.hooks.record": ("PLUGIN_API", "Backend", "OpPack", "Requires"),
    "deepinfer.hooks.api": (
        "CANONICAL", "OpContext", "OpGroup", "OpSpec", "Provides", "hookimpl", "hookspec", "op", "provides",
    ),
    "deepinfer.hooks.types": (
        "EXACT", "SMOOTH", "CacheSpec", "EntryRows", "KVCache", "ModelTraits", "Numerics", "QuantTensor",
        "RingRows", "Selection", "SequenceSpan", "StepInputs", "StepViews", "Weight",
    ),
    "deepinfer.hooks.bind": ("Contribution",),
    "deepinfer.hooks.build": ("build_ops",),
    "deepinfer.hooks.devices.facts": ("DeviceProperties", "MemoryInfo", "RuntimeCapabilities"),
    "deepinfer.hooks.discover": ("survey",),
    "deepinfer.hooks.failure": ("op_failures",),
    "deepinfer.hooks.load": ("LoadedBackend", "open_backend"),
    "deepinfer.hooks.manifest": ("Manifest",),
    "deepinfer.hooks.ops.communicator": ("CommunicatorCapabilities",),
    "deepinfer.hooks.table": ("Binding", "OpTable", "Provider"),
    "deepinfer.hooks.trace": ("Tracer",),
    "deepinfer.hooks.visibility": ("Visibility", "read_visibility"),
}  # fmt: skip
"""{module: public names it defines}"""

_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
