"""From an `EngineConfig` to a running `Engine`: model limits, tokenizer, chat renderer, executor.

Called by `LLM`. What can be refused from the configuration and the tokenizer alone is refused before any weight is
read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import ModelInfo
from deepinfer.environ import Settings
from deepinfer.hub.chat import Renderer
from deepinfer.hub.chat_encoder import chat_renderer
from deepinfer.hub.locate import MODEL_DIR_VARIABLE, TOKENIZER, locate
from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.models.deepseek_v41.config import ModelConfig
from deepinfer.runner.executor import create_executor


def build_engine(config: EngineConfig) -> tuple[Engine, Renderer]:
    """Load everything an engine needs, and what renders conversations for its model."""
    environ = _environ(config.settings)
    directory = locate(config.model, config.revision, environ)
    model = ModelConfig.from_directory(directory)
    config = replace(config.resolve(model), model=str(directory))
    renderer = chat_renderer(directory, config.trust_remote_code)
    if config.tokenizer is None:
        tokenizer = Tokenizer(directory)
    else:
        tokenizer = Tokenizer(locate(config.tokenizer, config.tokenizer_revision, environ, want=TOKENIZER))
    info = ModelInfo(model.text.vocab_size, tokenizer.eos_ids, model.image_token_id)
    return Engine(config, create_executor(config), tokenizer, info), renderer


def _environ(settings: Settings) -> Mapping[str, str]:
    """This process's environment with the model directory that the settings have decided on."""
    environ = dict(os.environ)
    environ.pop(MODEL_DIR_VARIABLE, None)
    if settings.hf_model_dir is not None:
        environ[MODEL_DIR_VARIABLE] = str(settings.hf_model_dir)
    return environ
