"""Finds the configuration that a command line names. Used by `doctor --fit` and `ops`; reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.models.deepseek_v41.config import ModelConfig


def read_config(source: str) -> ModelConfig:
    """A built-in name (tiny, micro, full), a config.json, a checkpoint directory, or a hub id.

    Raises ConfigError or CheckpointError saying what was looked for.
    """
    from deepinfer.hub.locate import CONFIG, locate
    from deepinfer.models.deepseek_v41.config import BUILTIN, ModelConfig

    is_hub_id = source not in BUILTIN and "/" in source and not Path(source).expanduser().exists()
    return ModelConfig.from_directory(locate(source, want=CONFIG)) if is_hub_id else ModelConfig.load(source)
