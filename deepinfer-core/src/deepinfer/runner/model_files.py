"""Which model an engine runs: its directory, config and tokenizer, found once and shared by entrypoint and worker.

With `load_format="dummy"` a built-in configuration name ("tiny", "micro", "full") stands for a model without any file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer.config import EngineConfig
from deepinfer.hub.locate import locate
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
    preferred = config.settings.hf_model_dir
    directory = locate(config.model, config.revision, preferred)
    model = ModelConfig.from_directory(directory)
    source = directory if config.tokenizer is None else locate(config.tokenizer, config.tokenizer_revision)
    return ModelFiles(directory, model, Tokenizer(source, model.tokenizer_compatibility))
