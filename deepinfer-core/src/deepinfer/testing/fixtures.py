"""Fixtures for a backend's own tests. They come with the pytest plugin: `-p deepinfer.testing.plugin`.

    def test_norm_of_one_row(deepinfer_subject):
        ops, device = deepinfer_subject.ops, deepinfer_subject.context.device
        ...

`deepinfer_subject` is the backend under test, bound for the `micro` model; `deepinfer_make_subject` binds it in other
ways; `deepinfer_reference` is core's own op table for the same sizes; `deepinfer_checkpoint` a model to load.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from deepinfer.hooks import OpTable
    from deepinfer.testing.subject import Subject


@pytest.fixture(scope="session")
def deepinfer_make_subject(pytestconfig: pytest.Config) -> Callable[..., Subject]:
    """`deepinfer_make_subject(config="tiny", overrides=..., ...)`: the backend under test, bound as asked."""
    from deepinfer.testing.plugin import settings_of
    from deepinfer.testing.subject import make_subject

    chosen = settings_of(pytestconfig)

    def make(**arguments: object) -> Subject:
        return make_subject(chosen.backend, **({"seed": chosen.options.seed} | arguments))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def deepinfer_subject(deepinfer_make_subject: Callable[..., Subject]) -> Subject:
    """The backend under test, bound for the `micro` model in exact numerics."""
    return deepinfer_make_subject()


@pytest.fixture(scope="session")
def deepinfer_reference(deepinfer_subject: Subject) -> OpTable:
    """Core's own bodies for the same model, on the CPU."""
    from deepinfer.testing.subject import make_reference

    return make_reference(deepinfer_subject)


@pytest.fixture(scope="session")
def deepinfer_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a small random checkpoint, tokenizer included."""
    from deepinfer.models.deepseek_v41.config import ModelConfig
    from deepinfer.testing.checkpoint import write_checkpoint

    return write_checkpoint(ModelConfig.builtin("micro"), tmp_path_factory.mktemp("deepinfer") / "micro")
