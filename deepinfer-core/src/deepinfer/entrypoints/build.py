"""From an `EngineConfig` to a running `Engine`, and to what renders conversations for its model.

Called by `LLM`. The backend is opened first: it may set variables that torch reads when it is imported, so nothing here
imports torch before. What can be refused from configuration and tokenizer alone is refused before any weight is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import ModelInfo
from deepinfer.hooks import LoadedBackend, open_backend
from deepinfer.hooks.trace import Wrapper
from deepinfer.hub.chat import Renderer
from deepinfer.hub.chat_encoder import chat_renderer
from deepinfer.structured.builder import GrammarBuilder, Limits
from deepinfer.structured.vocabulary import Vocabulary


def build_engine(
    config: EngineConfig, backend: LoadedBackend | None = None, wrappers: Sequence[Wrapper] = ()
) -> tuple[Engine, Renderer]:
    """Load everything an engine needs. `config` may be unresolved; the engine's is resolved.

    backend   an opened backend, None: the one that `config` selects
    wrappers  put around bound calls, see `hooks.trace`
    """
    backend = open_backend(config.accelerator, settings=config.settings) if backend is None else backend
    from deepinfer.runner.executor import create_executor
    from deepinfer.runner.model_files import open_model

    files = open_model(config)
    config = config.resolve(files.config)
    renderer = chat_renderer(files.directory, config.trust_remote_code)
    info = ModelInfo(files.config.text.vocab_size, tuple(files.tokenizer.eos_ids), files.config.image_token_id)
    settings, tokenizer = config.settings, files.tokenizer
    grammars = GrammarBuilder(
        lambda: Vocabulary.of(tokenizer, info.vocab_size), Limits.of(settings), settings.so_engine
    )
    executor = create_executor(config, backend, wrappers)
    return Engine(config, executor, tokenizer, info, grammars=grammars), renderer
