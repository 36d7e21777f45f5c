"""Checkpoints that tests share: random ones in the published format, written once a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoints("tiny")`: directory of a checkpoint of a built-in configuration."""
    from deepinfer.models.deepseek_v41.config import ModelConfig
    from deepinfer.testing.checkpoint import write_checkpoint

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write_checkpoint(ModelConfig.builtin(name), tmp_path_factory.mktemp("checkpoints") / name)
        return made[name]

    return get
