"""The op contracts, one module a group, and the one list of them.

`contracts()` is what binding, `deepinfer ops` and the conformance kit iterate over; its order is the order groups are
created in, so that later groups find `runtime` and `communicator` in their context.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.hooks.api import OpGroup
    from deepinfer.hooks.ops.attention import AttentionOps as AttentionOps
    from deepinfer.hooks.ops.cache import CacheOps as CacheOps
    from deepinfer.hooks.ops.communicator import CommunicatorOps as CommunicatorOps
    from deepinfer.hooks.ops.engram import EngramOps as EngramOps
    from deepinfer.hooks.ops.experts import ExpertOps as ExpertOps
    from deepinfer.hooks.ops.gemm import GemmOps as GemmOps
    from deepinfer.hooks.ops.residual import ResidualOps as ResidualOps
    from deepinfer.hooks.ops.runtime import RuntimeOps as RuntimeOps
    from deepinfer.hooks.ops.sampling import SamplingOps as SamplingOps
    from deepinfer.hooks.ops.step_inputs import StepInputOps as StepInputOps
    from deepinfer.hooks.ops.vision import VisionOps as VisionOps

CONTRACTS = (
    ("runtime", "RuntimeOps"),
    ("communicator", "CommunicatorOps"),
    ("attention", "AttentionOps"),
    ("gemm", "GemmOps"),
    ("experts", "ExpertOps"),
    ("cache", "CacheOps"),
    ("residual", "ResidualOps"),
    ("engram", "EngramOps"),
    ("sampling", "SamplingOps"),
    ("step_inputs", "StepInputOps"),
    ("vision", "VisionOps"),
)
"""(group, contract class); the module is `deepinfer.hooks.ops.<group>`."""


def contracts() -> tuple[type[OpGroup], ...]:
    """The contract class of every op group. Imports torch."""
    return tuple(getattr(importlib.import_module(f"{__name__}.{group}"), name) for group, name in CONTRACTS)


def __getattr__(name: str) -> type[OpGroup]:
    """Contract classes by name, imported on first use: `from deepinfer.hooks.ops import GemmOps`."""
    for group, contract in CONTRACTS:
        if name == contract:
            return getattr(importlib.import_module(f"{__name__}.{group}"), contract)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
