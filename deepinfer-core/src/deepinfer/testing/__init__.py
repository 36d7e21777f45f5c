"""The test kit: conformance of backends, checkpoints to test with, the model without an engine. Public."""

# ruff: noqa: F401  the imports below are for type checkers; at run time `__getattr__` does their work
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.testing.capture import CallDumper
    from deepinfer.testing.checkpoint import write_checkpoint
    from deepinfer.testing.logits import forward_logits
    from deepinfer.testing.plugin import conformance_tests
    from deepinfer.testing.subject import Subject, load_groups, load_plugin_object, make_reference, make_subject

_HOMES = {
    "CallDumper": "capture",
    "Subject": "subject",
    "conformance_tests": "plugin",
    "forward_logits": "logits",
    "load_groups": "subject",
    "load_plugin_object": "subject",
    "make_reference": "subject",
    "make_subject": "subject",
    "write_checkpoint": "checkpoint",
}
"""{public name: module that defines it}"""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    if name == "conformance_tests":
        _require_pytest_plugin()
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def _require_pytest_plugin() -> None:
    """Without the plugin pytest would take no notice of the name, and a test file of it would test nothing."""
    import sys

    if f"{__name__}.plugin" not in sys.modules:
        raise ImportError(
            "conformance_tests needs the pytest plugin: run pytest -p deepinfer.testing.plugin, or put "
            'addopts = ["-p", "deepinfer.testing.plugin"] into the pytest settings'
        )
