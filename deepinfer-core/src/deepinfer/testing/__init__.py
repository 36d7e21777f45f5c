"""The test kit: checkpoints to test with, and the model without an engine. Public, for users and backend authors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.testing.checkpoint import write_checkpoint
    from deepinfer.testing.logits import forward_logits

__all__ = ["forward_logits", "write_checkpoint"]

_HOMES = {"forward_logits": "logits", "write_checkpoint": "checkpoint"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
