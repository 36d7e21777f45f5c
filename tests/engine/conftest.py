"""Makes the stub executor importable for the tests of this folder, and runs each of them in every mode of the
engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import stub_executor


@pytest.fixture(scope="module", autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[stub_executor.Mode]:
    """Engines over the stub plan their steps in order or ahead, with or without drafts. What a request gets is the same
    in all modes; tests of single steps name the modes they mean, e.g. with the mark `stub_executor.IN_ORDER`."""
    stub_executor.CURRENT.append(stub_executor.MODES[getattr(request, "param", "in order")])
    yield stub_executor.CURRENT[-1]
    stub_executor.CURRENT.pop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    named = any(mark.args[0] == "mode" for mark in metafunc.definition.iter_markers("parametrize"))
    if not named and "stub_executor" in _imported(metafunc.module):
        metafunc.parametrize("mode", list(stub_executor.MODES), indirect=True, scope="module")


def _imported(module: object) -> set[str]:
    """Names of the modules that a test module took something from."""
    return {getattr(value, "__module__", "") for value in vars(module).values()}
