"""Makes the helpers of this folder, and the stub executor of the engine's tests, importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]


@pytest.fixture(scope="session", autouse=True)
def _xgrammar() -> None:
    """These tests are about xgrammar; without it nothing can be said."""
    import xgrammar  # noqa: F401
