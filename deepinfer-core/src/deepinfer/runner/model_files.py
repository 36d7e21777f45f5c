"""Which model an engine runs: its directory, config and tokenizer, found once and shared by entrypoint and worker.

With `load_format="dummy"` a built-in configuration name ("tiny", "micro", "full") stands for a model without any file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer.config import EngineConfig
from deepinfer.environ import Settings
from deepinfer.hub.locate import MODEL_DIR_VARIABLE, TOKENIZER, locate
from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.models.deepseek_v41.config import BUILTIN, ModelConfig


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """directory is None for a built-in configuration with dummy weights."""

    directory: Path | None
    config: ModelConfig
    tokenizer: Tokenizer


def open_model(config: EngineConfig) -> ModelFiles:
    """Find the model of an engine config and read its config and tokenizer; no weight is touched."""
    if config.load_format == "dummy" and config.model in BUILTIN:
        model = ModelConfig.builtin(config.model)
        text = model.text
        tokenizer = Tokenizer.byte_level(text.vocab_size, text.engram_compressed_vocab_size, model.image_token_id)
        return ModelFiles(None, model, tokenizer)
    environ = _environ(config.settings)
    directory = locate(config.model, config.revision, environ)
    model = ModelConfig.from_directory(directory)
    if config.tokenizer is None:
        return ModelFiles(directory, model, Tokenizer(directory))
    where = locate(config.tokenizer, config.tokenizer_revision, environ, TOKENIZER)
    return ModelFiles(directory, model, Tokenizer(where))


def _environ(settings: Settings) -> Mapping[str, str]:
    """This process's environment with the model directory that the settings have decided on."""
    environ = dict(os.environ)
    environ.pop(MODEL_DIR_VARIABLE, None)
    if settings.hf_model_dir is not None:
        environ[MODEL_DIR_VARIABLE] = str(settings.hf_model_dir)
    return environ
